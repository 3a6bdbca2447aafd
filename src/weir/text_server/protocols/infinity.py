"""The endpoints of infinity: POST /embeddings, /rerank and /classify, and GET /models; and vLLM's GET /version.

infinity's /embeddings takes what OpenAI's takes, and its answers have `id` and `created` besides.
TEI has a /rerank, too: tei.py answers that path, and has the protocol here read and write bodies with `documents`.
"""

import time
from typing import Annotated, Any, Literal, TypedDict
from uuid import uuid4

from msgspec import Meta, Struct

from weir._version import __version__
from weir.frontends.http.asgi import AsgiCall
from weir.protocols.response import HttpResponse, OpenAIError, json_response
from weir.text_models.texts import PlainText
from weir.text_server.exchange import (
    EmbeddingContext,
    RankingForm,
    TextExchange,
    check_texts,
    check_top_n,
    cut_to,
    labelled,
    ranked,
    read_pairs,
)
from weir.text_server.http import Listing, ObjectProtocol, TextApi, TextCall, TextPage
from weir.text_server.protocols.openai import (
    CutTo,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    OpenAIProtocol,
    TextModelCard,
    TokenUsage,
    error_answer,
    model_card,
    with_input_field,
)
from weir.text_server.texts import Encoded, Encodes, TextTask
from weir.wire.schema import read_document

NAME = "infinity"
_SOME = Meta(min_length=1)


class RerankRequest(Struct):
    """A request for the ranking of documents by how well they answer a query."""

    query: PlainText
    documents: Annotated[list[Any], _SOME]
    model: Annotated[str | None, Meta(description="the first one that ranks, if it is not given")] = None
    top_n: Annotated[int | None, Meta(description="how many of the best are answered")] = None
    return_documents: bool | None = None
    raw_scores: Annotated[bool | None, Meta(description="true: the model's numbers, not their sigmoids")] = None
    truncate_prompt_tokens: CutTo = None


class ClassifyRequest(Struct):
    """A request for the labels of texts."""

    input: Annotated[list[PlainText], _SOME]
    model: Annotated[str | None, Meta(description="the first one that labels texts, if it is not given")] = None
    raw_scores: Annotated[bool | None, Meta(description="true: the model's numbers, not probabilities")] = None


class Relevance(TypedDict):
    """A document at its place in the ranking; `document` is null unless it was asked for."""

    relevance_score: float
    index: int
    document: str | None


class InfinityAnswer(TypedDict):
    """What every answer has."""

    model: str
    usage: TokenUsage
    id: str
    created: int


class RerankAnswer(InfinityAnswer):
    """The ranking, the best document first."""

    object: Literal["rerank"]
    results: list[Relevance]


class LabelScore(TypedDict):
    """A label with its score."""

    score: float
    label: str


class ClassifyAnswer(InfinityAnswer):
    """For each text its labels, the likeliest first."""

    object: Literal["classify"]
    data: list[list[LabelScore]]


class InfinityProtocol(ObjectProtocol):
    """What infinity's protocols have in common."""

    name = NAME
    field = "input"  # of the texts

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the answer for `error` in OpenAI's shape, as infinity does."""
        return error_answer(with_input_field(error, self.field), development=development)


class InfinityRerank(InfinityProtocol):
    """Rankings in infinity's form."""

    field = "documents"

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See ObjectProtocol."""
        request = read_document(document, RerankRequest)
        request.top_n = request.top_n or None  # vLLM's clients send 0 for all
        check_top_n(request.top_n)
        documents = read_pairs(exchange, request.query, request.documents, "documents", request.model)
        cut_to(exchange, request.truncate_prompt_tokens)
        shown = documents if request.return_documents else None
        exchange.form = RankingForm(request.top_n, shown, bool(request.raw_scores))

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the ranking."""
        results: list[Relevance] = [
            {"relevance_score": score, "index": index, "document": document}
            for index, score, document in ranked(exchange, encoded)
        ]
        return json_response(RerankAnswer(object="rerank", results=results, **_answer(exchange, encoded)))


INFINITY_RERANK = InfinityRerank()


class ClassifyProtocol(InfinityProtocol):
    """POST /classify."""

    paths = ("/classify",)

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See ObjectProtocol."""
        request = read_document(document, ClassifyRequest)
        exchange.texts = check_texts(request.input, "input", exchange.context)
        exchange.encoder = exchange.context.encoder(request.model or "", TextTask.PREDICT)
        exchange.form = bool(request.raw_scores)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the labels of each text."""
        found = labelled(encoded, exchange.chosen.facts, raw=exchange.form)
        data: list[list[LabelScore]] = [[{"score": each.score, "label": each.label} for each in row] for row in found]
        return json_response(ClassifyAnswer(object="classify", data=data, **_answer(exchange, encoded)))


def _answer(exchange: TextExchange, encoded: Encoded) -> InfinityAnswer:
    tokens = sum(encoded.counts)
    return {
        "model": exchange.listed_model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "id": f"weir-{uuid4()}",
        "created": int(time.time()),
    }


class InfinityEmbeddingsAnswer(EmbeddingsAnswer):
    """The vectors of texts, in order."""

    id: str
    created: int


class EmbeddingsProtocol(OpenAIProtocol):
    """POST /embeddings: OpenAI's, with the answers of infinity."""

    paths = ("/embeddings",)

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing | HttpResponse:
        """Return what OpenAI's endpoint returns, with `id` and `created`."""
        written = super().write(exchange, encoded)
        more = b',"id":"weir-%b","created":%d}' % (uuid4().hex.encode(), time.time())
        if isinstance(written, Listing):
            return written._replace(closing=written.closing.removesuffix(b"}") + more)
        return HttpResponse(written.status, written.headers, written.body.removesuffix(b"}") + more)


# infinity's names of what a model can be called for.
_CAPABILITIES = {TextTask.EMBED: "embed", TextTask.RERANK: "rerank", TextTask.PREDICT: "classify"}


class InfinityModelCard(TextModelCard):
    """A model as infinity describes it. Its client knows no other owner than infinity. `stats` say how many texts wait, -1 if nobody knows."""

    stats: dict[str, float]
    backend: str
    capabilities: list[str]
    dtype: str
    device: str


class InfinityModelList(TypedDict):
    """The models of texts."""

    object: Literal["list"]
    data: list[InfinityModelCard]


def _card(encoder: Encodes, since: int) -> InfinityModelCard:
    facts, batching = encoder.facts, encoder.batching
    waiting = -1 if facts.waiting is None else facts.waiting()
    stats: dict[str, float] = {
        "queue_fraction": max(0, waiting) / batching.max_queue_size,
        "queue_absolute": waiting,
        "results_pending": waiting,
        "batch_size": batching.max_batch_size,
    }
    return {
        **model_card(encoder, since),
        "owned_by": "infinity",
        "stats": stats,
        "backend": "weir",
        "capabilities": [_CAPABILITIES[task] for task in facts.tasks if task in _CAPABILITIES],
        "dtype": facts.dtype,
        "device": facts.device,
    }


class Infinity(TextApi):
    """The endpoints of infinity but those that TEI has, too."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._since = int(time.time())
        texts = {"input": ["I am happy"]}
        to_embed = "Encode texts, as infinity does", EmbeddingsRequest, texts, InfinityEmbeddingsAnswer
        to_label = "Label texts, as infinity does", ClassifyRequest, texts, ClassifyAnswer
        calls = [
            TextCall(EmbeddingsProtocol(), *to_embed, TextTask.EMBED),
            TextCall(ClassifyProtocol(), *to_label, TextTask.PREDICT),
        ]
        title = "List the models of texts, as infinity does"
        models = TextPage("get", "/models", title, InfinityModelList, self.list_models)
        version = TextPage("get", "/version", "Return the version of this server", dict[str, str], self.version)
        super().__init__(context, OpenAIError, calls, [models, version])

    async def list_models(self, call: AsgiCall) -> HttpResponse:
        """Return the list of the models, with what waits for them."""
        cards = [_card(encoder, self._since) for encoder in self.context.encoders.values()]
        return json_response(InfinityModelList(object="list", data=cards))

    async def version(self, call: AsgiCall) -> HttpResponse:
        """Return the version of this server."""
        return json_response({"version": __version__})
