"""The endpoints of infinity: POST /embeddings, /rerank and /classify, and GET /models; and those of vLLM: POST /score, /tokenize and /detokenize, and GET
/version.

infinity's /embeddings takes what OpenAI's takes, and its responses have `id` and `created` besides.
TEI has a /rerank and a /tokenize, too: tei.py answers those paths, and has the protocols here read and write bodies with `documents` or `prompt`.
"""

import time
from functools import partial
from typing import Annotated, Any, Literal, TypedDict
from uuid import uuid4

from msgspec import Meta, Struct

from weir._version import __version__
from weir.errors import InvalidRequest, WeirError
from weir.frontends.http.asgi import AsgiCall
from weir.protocols.response import HttpResponse, OpenAIError, json_response
from weir.text_models.packing import unit_vectors
from weir.text_models.texts import Ids, PlainText, TokenDetail
from weir.text_server.exchange import (
    EmbeddingContext,
    RankingForm,
    TextExchange,
    check_texts,
    check_top_n,
    cut_to,
    cuts_left,
    labelled,
    ranked,
    read_pairs,
    relevance,
    text_of_content,
)
from weir.text_server.http import Listing, TextApi, TextCall, TextPage, TextProtocol
from weir.text_server.protocols.openai import (
    OPENAI_ERRORS,
    CutTo,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    OpenAIProtocol,
    TextModelCard,
    TokenUsage,
    model_card,
)
from weir.text_server.texts import TEXTS_FIELD, Encoded, Encodes, TextOptions, TextTask
from weir.wire.schema import any_of, read_document

NAME, VLLM = "infinity", "vllm"
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
    """What every response has."""

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


class InfinityProtocol(TextProtocol):
    """What infinity's protocols have in common."""

    name = NAME
    field, errors = "input", OPENAI_ERRORS


class InfinityRerank(InfinityProtocol):
    """Rankings in infinity's form."""

    field = "documents"

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
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
        """See TextProtocol."""
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
    usage: TokenUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": exchange.listed_model, "usage": usage, "id": f"weir-{uuid4()}", "created": int(time.time())}


class InfinityEmbeddingsAnswer(EmbeddingsAnswer):
    """The vectors of texts, in order."""

    id: str
    created: int


class EmbeddingsProtocol(OpenAIProtocol):
    """POST /embeddings: OpenAI's, with the responses of infinity."""

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


# vLLM.


_Side = Annotated[Any, any_of(PlainText, list[PlainText], None)]
# vLLM's names of the two sides of pairs.
_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(Struct):
    """A request for the scores of pairs, whose two sides have other names, too: `queries` and `items`, `data_1` and `data_2`, `text_1` and `text_2`. There is
    one text at the first side, or as many as at the second."""

    queries: _Side = None
    documents: _Side = None
    model: Annotated[str | None, Meta(description="default: the first one that ranks, or else embeds")] = None
    use_activation: Annotated[bool | None, Meta(description="false: the model's numbers, not their sigmoids")] = None
    truncate_prompt_tokens: CutTo = None
    truncation_side: str | None = None


class PromptBody(Struct):
    """A request for the tokens of one text."""

    prompt: PlainText
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct):
    """A request for the text of tokens."""

    tokens: Ids
    model: str | None = None


class ScoreProtocol(InfinityProtocol):
    """POST /score: pairs are scored by a model that ranks, or by the cosines of vectors. Errors have OpenAI's shape, as infinity's have."""

    name = VLLM
    paths = ("/score", "/v1/score")

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
        request, context = read_document(document, ScoreRequest), exchange.context
        names = next((names for names in _SIDES if document.keys() >= {*names}), _SIDES[0])
        first, second = [_side(document.get(name), name, context) for name in names]
        if len(first) not in (1, len(second)):
            rule = f"has {len(first)} texts, must have 1, or as many as {names[1]}: {len(second)}"
            raise InvalidRequest(rule).of(names[0])
        able = [context.encoder(request.model)] if request.model else context.encoders.values()
        ranks = any(TextTask.RERANK in each.facts.tasks for each in able)
        exchange.encoder = context.encoder(request.model or "", TextTask.RERANK if ranks else TextTask.EMBED)
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        exchange.texts = pairs if ranks else [*second, *first]
        exchange.options = TextOptions(truncate_left=cuts_left(request.truncation_side))
        cut_to(exchange, request.truncate_prompt_tokens)
        exchange.form = len(second), request.use_activation is False
        exchange.identity = names, len(second)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the score of each pair."""
        pairs, raw = exchange.form
        if isinstance(exchange.texts[0], tuple):
            scores = relevance(exchange, encoded, raw=raw)
        else:
            vectors = unit_vectors(encoded.vectors)
            scores = (vectors[:pairs] * vectors[pairs:]).sum(axis=-1).tolist()
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return json_response({"object": "list", "data": data, **_answer(exchange, encoded)})

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the response for `error`, which names the text at fault by its side and its place there."""
        if identity is not None and isinstance(error, WeirError) and error.field == TEXTS_FIELD:
            names, pairs = identity  # the texts of the first side follow those of the second
            side, place = divmod(error.place or 0, pairs)
            error = error.at(names[1 - side], place)
        return super().error_answer(error, development=development)


def _side(value: Any, name: str, context: EmbeddingContext) -> list[str]:
    if value is None:
        raise InvalidRequest("is missing").of(name)
    values = value if isinstance(value, list) else [value]
    texts = [text_of_content(each, name) if isinstance(each, dict) else each for each in values]
    return check_texts(texts, name, context)


class PromptProtocol(InfinityProtocol):
    """POST /tokenize with a prompt."""

    name = VLLM

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
        request = read_document(document, PromptBody)
        exchange.texts = check_texts([request.prompt], "prompt", exchange.context)
        exchange.encoder = encoder = exchange.context.encoder(request.model or "")
        special = request.add_special_tokens is not False
        exchange.work = partial(encoder.tokenize, exchange.texts, special=special, prompt="")
        exchange.form = bool(request.return_token_strs)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the tokens."""
        tokens: list[TokenDetail] = exchange.found[0]
        shown = [each.text for each in tokens] if exchange.form else None
        sizes = {"count": len(tokens), "max_model_len": exchange.chosen.max_length}
        return json_response({**sizes, "tokens": [each.id for each in tokens], "token_strs": shown})


VLLM_TOKENIZE = PromptProtocol()


class DetokenizeProtocol(InfinityProtocol):
    """POST /detokenize."""

    name = VLLM
    paths = ("/detokenize",)

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
        request = read_document(document, DetokenizeBody)
        exchange.texts = [request.tokens]
        exchange.encoder = encoder = exchange.context.encoder(request.model or "")
        exchange.work = partial(encoder.decode, [request.tokens], skip_special=False)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the text."""
        return json_response({"prompt": exchange.found[0]})


class Infinity(TextApi):
    """The endpoints of infinity and vLLM but those that TEI has, too."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._since = int(time.time())
        texts, pairs = {"input": ["I am happy"]}, {"queries": "What is a weir?", "documents": ["A low dam.", "A bird."]}
        to_embed = "Encode texts, as infinity does", EmbeddingsRequest, texts, InfinityEmbeddingsAnswer
        to_detokenize = "Show the text of tokens, as vLLM does", DetokenizeBody, {"tokens": [1, 2]}, dict[str, str]
        to_label = "Label texts, as infinity does", ClassifyRequest, texts, ClassifyAnswer
        calls = [
            TextCall(EmbeddingsProtocol(), *to_embed, TextTask.EMBED),
            TextCall(ClassifyProtocol(), *to_label, TextTask.PREDICT),
            TextCall(ScoreProtocol(), "Score pairs of texts, as vLLM does", ScoreRequest, pairs, dict[str, Any]),
            TextCall(DetokenizeProtocol(), *to_detokenize),
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
