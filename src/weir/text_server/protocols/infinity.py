"""The endpoints of infinity: POST /embeddings, /rerank and /classify, and GET /models; and those of vLLM: POST /score, /tokenize and /detokenize, and GET
/version.

infinity's /embeddings takes what OpenAI's takes, and its responses have `id` and `created` besides.
TEI has a /rerank and a /tokenize, too: tei.py answers those paths, and has the protocols here read and write bodies with `documents` or `prompt`.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypedDict
from uuid import uuid4

from msgspec import Meta, Struct

from weir._version import __version__
from weir.errors import InvalidRequest
from weir.frontends.http.asgi import AsgiCall
from weir.protocols.response import Headers, HttpResponse, OpenAIError, json_response
from weir.text_models.packing import unit_vectors
from weir.text_models.texts import Ids, PlainText
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork, texts_of, tokens_of
from weir.text_server.http import HttpExchange, HttpWork, Listing, TextApi, TextEndpoint, TextPage
from weir.text_server.pictures import Asked, Message, Part, has_pictures
from weir.text_server.protocols.openai import (
    OPENAI_ERRORS,
    CutTo,
    EmbeddingsResponse,
    OpenAIEndpoint,
    TextModelCard,
    TokenUsage,
    embeddings,
    model_card,
    usage_of,
)
from weir.text_server.texts import Encoded, Encodes, TextOptions, TextTask, listed_name
from weir.wire.schema import any_of

VLLM = "vllm"
_SOME = Meta(min_length=1)


class RerankRequest(Struct):
    """A request for the ranking of documents by how well they answer a query."""

    query: Part
    documents: Annotated[list[Part], _SOME]
    model: Annotated[str | None, Meta(description="the first one that ranks, if it is not given")] = None
    top_n: Annotated[int | None, Meta(description="how many of the best are answered")] = None
    return_documents: bool | None = None
    raw_scores: Annotated[bool | None, Meta(description="true: the model's numbers, not their sigmoids")] = None
    truncate_prompt_tokens: CutTo = None


class ClassifyRequest(Struct):
    """A request for the labels of texts; with `labels`, for which of these fits each picture or text best, by a model with a vision tower."""

    input: Annotated[list[Part], _SOME]
    model: Annotated[str | None, Meta(description="the first one that labels texts, if it is not given")] = None
    raw_scores: Annotated[bool | None, Meta(description="true: the model's numbers, not probabilities")] = None
    labels: Annotated[list[PlainText], _SOME] | None = None
    hypothesis_template: Annotated[str, Meta(description="a label takes the place of {}")] = "This is a photo of {}."


class Relevance(TypedDict):
    """A document in the ranking; `document` is null unless it was asked for."""

    relevance_score: float
    index: int
    document: str | None


class InfinityResponse(TypedDict):
    """The fields that every response has."""

    model: str
    usage: TokenUsage
    id: str
    created: int


class RerankResponse(InfinityResponse):
    """The ranking, the best document first."""

    object: Literal["rerank"]
    results: list[Relevance]


class ClassifyResponse(InfinityResponse):
    """For each text its labels, the likeliest first."""

    object: Literal["classify"]
    data: list[list[forms.Label]]


# Declares an endpoint of infinity, or of vLLM if that is its name.
_endpoint = partial(TextEndpoint, name="infinity", errors=OPENAI_ERRORS)
_TEXTS = {"input": ["I am happy"]}
_OF_DOCUMENTS = OPENAI_ERRORS._replace(field="documents")
_QUERY, _DOCUMENTS = "What is a weir?", ["A low dam.", "A bird."]
_RANKING, _PAIRS = {"query": _QUERY, "documents": _DOCUMENTS}, {"queries": _QUERY, "documents": _DOCUMENTS}


@_endpoint("/rerank", "Rank texts, as infinity does", _RANKING, RerankResponse, TextTask.RERANK, errors=_OF_DOCUMENTS)
def rerank(request: RerankRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for a ranking."""
    form = forms.RankingForm(request.top_n or None, bool(request.return_documents), bool(request.raw_scores))
    ranking = forms.read_ranking(exchange, request.query, request.documents, "documents", request.model, form)
    ranking = ranking._replace(options=forms.cut_to(ranking.options, request.truncate_prompt_tokens, ranking.encoder))

    def write(encoded: Encoded) -> HttpResponse:
        results: list[Relevance] = [
            {"relevance_score": each.score, "index": each.index, "document": each.text}
            for each in ranking.write(encoded)
        ]
        return json_response(RerankResponse(object="rerank", results=results, **_lead(ranking.encoder, encoded)))

    return ranking.written(write)


@_endpoint("/classify", "Label texts and images", _TEXTS, ClassifyResponse, TextTask.PREDICT)
def classify(request: ClassifyRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for labels."""
    raw = bool(request.raw_scores)
    if request.labels is None:
        texts = forms.read_list(request.input, "input", exchange.context, forms.check_text)
        encoder = exchange.choose(request.model, TextTask.PREDICT)
        write_labels = partial(forms.labelled, facts=encoder.facts, raw=raw)
        work = TextWork(encoder, texts, write_labels)
    else:
        read = partial(forms.read_part, context=exchange.context)
        pictures = forms.read_list(request.input, "input", exchange.context, read)
        template = request.hypothesis_template
        work = forms.zero_shot(exchange, pictures, request.labels, template, request.model, raw=raw)

    def write(encoded: Encoded) -> HttpResponse:
        data = work.write(encoded)
        return json_response(ClassifyResponse(object="classify", data=data, **_lead(work.encoder, encoded)))

    return work.written(write)


def _lead(encoder: Encodes, encoded: Encoded) -> InfinityResponse:
    now, own = int(time.time()), f"weir-{uuid4()}"
    return {"model": listed_name(encoder), "usage": usage_of(encoded), "id": own, "created": now}


class InfinityEmbeddingsResponse(EmbeddingsResponse):
    """The vectors of texts, in order."""

    id: str
    created: int


@dataclass
class EmbeddingsEndpoint(OpenAIEndpoint):
    """OpenAI's endpoint, whose responses have `id` and `created`, too."""

    name: str = "infinity"

    def work(self, exchange: HttpExchange, headers: Headers, body: bytes) -> HttpWork:
        """See TextEndpoint."""
        work = super().work(exchange, headers, body)
        return work.written(lambda encoded: _identified(work.write(encoded)))


_ENCODE = "Encode texts and images, as infinity does"
embed = EmbeddingsEndpoint(
    "/embeddings",
    _ENCODE,
    _TEXTS,
    InfinityEmbeddingsResponse,
    TextTask.EMBED,
    variants=embeddings.variants,
    uploads=True,
)(embeddings.read)


def _identified(written: HttpResponse | Listing) -> HttpResponse | Listing:
    more = b',"id":"weir-%b","created":%d}' % (uuid4().hex.encode(), time.time())
    if isinstance(written, Listing):
        return written._replace(closing=written.closing.removesuffix(b"}") + more)
    return written._replace(body=written.body.removesuffix(b"}") + more)


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
    able = [_CAPABILITIES[task] for task in facts.tasks if task in _CAPABILITIES]
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
        "capabilities": able if facts.vision is None else [*able, "image_embed"],
        "dtype": facts.dtype,
        "device": facts.device,
    }


# vLLM.


_Side = Annotated[Any, any_of(Part, Message, list[Annotated[Any, any_of(Part, Message)]], None)]
# vLLM's names of the two sides of pairs.
_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(Struct):
    """A request for the scores of pairs, whose two sides have one of four pairs of names. There is one text at the first side, or as many as at the second."""

    queries: _Side = None
    documents: _Side = None
    items: _Side = None
    data_1: _Side = None
    data_2: _Side = None
    text_1: _Side = None
    text_2: _Side = None
    model: Annotated[str | None, Meta(description="default: the first one that ranks, or else embeds")] = None
    use_activation: Annotated[bool | None, Meta(description="false: the model's numbers, not their sigmoids")] = None
    truncate_prompt_tokens: CutTo = None
    truncation_side: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two sides."""
        given = (names for names in _SIDES if all(getattr(self, name) is not None for name in names))
        return next(given, _SIDES[0])


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


@_endpoint("/score", "Score pairs of texts, as vLLM does", _PAIRS, dict[str, Any], name=VLLM, aliases=["/v1/score"])
def score(request: ScoreRequest, exchange: HttpExchange) -> HttpWork:
    """Read a request for the scores of pairs, by a model that ranks, or by the cosines of vectors."""
    names, context = request.names, exchange.context
    first, second = [_side(getattr(request, name), name, context) for name in names]
    count = len(second)
    if len(first) not in (1, count):
        raise InvalidRequest(f"has {len(first)} texts, must have 1, or as many as {names[1]}: {count}").of(names[0])
    able = [context.encoder(request.model)] if request.model else context.encoders.values()
    by_pairs = not has_pictures([*first, *second]) and any(TextTask.RERANK in each.facts.tasks for each in able)
    encoder = exchange.choose(request.model, TextTask.RERANK if by_pairs else TextTask.EMBED, [*first, *second])
    ranks = by_pairs and encoder.facts.vision is None
    options = TextOptions(truncate_left=forms.cuts_left(request.truncation_side))
    options = forms.cut_to(options, request.truncate_prompt_tokens, encoder)

    def write(encoded: Encoded) -> HttpResponse:
        if ranks:
            found = forms.relevance(encoder, encoded, raw=request.use_activation is False)
        else:
            vectors = unit_vectors(encoded.vectors)
            found = (vectors[:count] * vectors[count:]).sum(axis=-1).tolist()
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]
        return json_response({"object": "list", "data": data, **_lead(encoder, encoded)})

    pairs: Any = list(zip(first * count if len(first) == 1 else first, second, strict=True))
    lists = [(names[1], count), (names[0], len(first))]
    return TextWork(encoder, pairs if ranks else [*second, *first], write, options, lists=lists)


def _side(value: Any, name: str, context: EmbeddingContext) -> list[Asked]:
    if value is None:
        raise InvalidRequest("is missing").of(name)

    def read(each: Any, where: str) -> Asked:
        if isinstance(each, dict) and "content" in each:
            return forms.read_content(each, name, context)
        return forms.read_part(each, where, context)

    return forms.read_list(value if isinstance(value, list) else [value], name, context, read)


@_endpoint("/tokenize", "Show the tokens of a text, as vLLM does", {"prompt": _QUERY}, dict[str, Any], name=VLLM)
def tokenize(request: PromptBody, exchange: TextExchange) -> HttpWork:
    """Read a request for the tokens of a prompt."""
    texts = forms.read_list([request.prompt], "prompt", exchange.context, forms.check_text)
    encoder = exchange.choose(request.model)

    def write(encoded: Encoded) -> HttpResponse:
        tokens = (encoded.details or [[]])[0]
        shown = [each.text for each in tokens] if request.return_token_strs else None
        sizes = {"count": len(tokens), "max_model_len": encoder.max_length}
        return json_response({**sizes, "tokens": [each.id for each in tokens], "token_strs": shown})

    compute = partial(tokens_of, encoder, texts, special=request.add_special_tokens is not False)
    return TextWork(encoder, texts, write, compute=compute)


@_endpoint("/detokenize", "Show the text of tokens, as vLLM does", {"tokens": [1, 2]}, dict[str, str], name=VLLM)
def detokenize(request: DetokenizeBody, exchange: TextExchange) -> HttpWork:
    """Read a request for the text of tokens."""
    encoder = exchange.choose(request.model)

    def write(encoded: Encoded) -> HttpResponse:
        return json_response({"prompt": "".join(encoded.decoded or ())})

    compute = partial(texts_of, encoder, [request.tokens], skip_special=False)
    return TextWork(encoder, [request.tokens], write, compute=compute)


def infinity_api(context: EmbeddingContext) -> TextApi:
    """Return the endpoints of infinity and vLLM but those that TEI has, too."""

    async def list_models(call: AsgiCall) -> HttpResponse:
        cards = [_card(encoder, context.since) for encoder in context.encoders.values()]
        return json_response(InfinityModelList(object="list", data=cards))

    async def version(call: AsgiCall) -> HttpResponse:
        return json_response({"version": __version__})

    title = "List the models of texts, as infinity does"
    pages = [
        TextPage("get", "/models", title, InfinityModelList, list_models),
        TextPage("get", "/version", "Return the version of this server", dict[str, str], version),
    ]
    return TextApi(context, OpenAIError, [embed, classify, score, detokenize], pages)
