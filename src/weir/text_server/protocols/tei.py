"""The endpoints of text-embeddings-inference (TEI): /embed, /embed_all, /similarity, /rerank, /predict, /tokenize, /decode, /vertex and /info; and
/predict_tokens, which labels tokens as transformers' pipeline does, with errors in TEI's form.

Its /health is Weir's own.

A request names no model there: the first model of the server that can do what the endpoint is for responses. A field `model` chooses another.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from msgspec import Meta, Struct
from numpy.typing import NDArray

from weir import __version__
from weir.errors import (
    Cancelled,
    CapacityError,
    InvalidRequest,
    ModelError,
    Overloaded,
    RequestError,
    TooLarge,
    WeirError,
    brief,
)
from weir.frontends.http.asgi import AsgiCall, ClientLeft, unless_left
from weir.protocols.response import (
    JSON_HEADER,
    NO_STORE,
    Headers,
    HttpResponse,
    encode_safely,
    error_value,
    json_response,
)
from weir.text_models.packing import packed, similarities, unit_vectors
from weir.text_models.texts import TOO_LONG, Ids, PlainText, Text, TextOptionFields, TokenDetail, prompt_text
from weir.text_server import forms
from weir.text_server.exchange import MANY, EmbeddingContext, TextExchange, TextWork, texts_of, tokens_of
from weir.text_server.http import ErrorForm, HttpWork, Listing, TextApi, TextEndpoint, TextPage, listing
from weir.text_server.pictures import Asked, Part
from weir.text_server.protocols.infinity import rerank as infinity_rerank
from weir.text_server.protocols.infinity import tokenize as vllm_tokenize
from weir.text_server.texts import Encoded, Encodes, TextFacts, TextOptions, TextTask, listed_name
from weir.wire.schema import any_of
from weir.wire.status import http_code

NAME = "tei"
# What answers a task for which the model was not made alone.
OUTPUT_OF_TASK = {TextTask.EMBED: ("dense",), TextTask.EMBED_ALL: ("tokens",), TextTask.EMBED_SPARSE: ("sparse",)}

_SOME = Meta(min_length=1)
_Inputs = any_of(Part, Annotated[list[Part], _SOME], Ids, Annotated[list[Ids], _SOME])


class TeiError(TypedDict):
    """The body of an error. `error_type` is Validation, Empty, Tokenizer, Overloaded, Backend or Unhealthy."""

    error: str
    error_type: str


class EmbedRequest(TextOptionFields, forbid_unknown_fields=False):
    """A request for the vectors of texts. Fields that there are not are left unread, as TEI does."""

    inputs: Annotated[Any, _Inputs]
    normalize: Annotated[bool | None, Meta(description="false leaves the vectors as the model makes them")] = None
    model: Annotated[str | None, Meta(description="the first that can do it, if it is not given")] = None


class SentencePair(Struct):
    """A sentence or a picture, and those that it is compared with."""

    source_sentence: PlainText | dict[str, Any]
    sentences: Annotated[list[PlainText | dict[str, Any]], _SOME]


class SimilarityRequest(Struct):
    """A request for the cosines between a sentence and others."""

    inputs: SentencePair
    parameters: TextOptionFields | None = None
    model: str | None = None


class TeiRerankRequest(TextOptionFields, forbid_unknown_fields=False):
    """A request for the ranking of texts by how well they answer a query."""

    query: PlainText
    texts: Annotated[list[str], _SOME]
    raw_scores: bool | None = None
    return_text: bool | None = None
    model: str | None = None


class PipelineParameters(Struct):
    """The options that clients of Hugging Face's hosted pipelines state in addition to a text."""

    top_k: Annotated[int, Meta(ge=1)] | None = None
    function_to_apply: Literal["none", "sigmoid", "softmax"] | None = None


class PredictRequest(TextOptionFields, forbid_unknown_fields=False):
    """A request for the labels of texts or pairs: a text, a pair as a list of two texts, or a list with a list of one or two texts for each."""

    inputs: Annotated[Any, any_of(PlainText, list[PlainText], list[list[PlainText]])]
    raw_scores: bool | None = None
    model: str | None = None
    parameters: Annotated[
        PipelineParameters | None,
        Meta(description="huggingface_hub's form: the labels of one text are then in a list of one, too"),
    ] = None


class TokenizeBody(Struct):
    """A request for the tokens of texts."""

    inputs: Annotated[Any, any_of(PlainText, Annotated[list[PlainText], _SOME])]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: str | None = None


class DecodeBody(Struct):
    """A request for the texts of token ids."""

    ids: Annotated[Any, any_of(Ids, Annotated[list[Ids], _SOME])]
    skip_special_tokens: bool | None = None
    model: str | None = None


class VertexBody(Struct):
    """Several requests in one, as Vertex AI sends them: each is what /rerank takes, or what the first model of the server is for."""

    instances: list[dict[str, Any]]


class VertexResponse(TypedDict):
    """The responses, in the order of the requests."""

    predictions: list[Any]


class TeiTerm(TypedDict):
    """A term of a sparse vector: the id of a token of the vocabulary, and its weight."""

    index: int
    value: float


class TeiToken(TypedDict):
    """One token of a text: it stands for the bytes of UTF-8 from `start` to `stop`. A special token stands for none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def _error_document(error: BaseException, development: bool) -> TeiError:
    message = error_value(error, development=development)["message"]
    return TeiError(error=message, error_type=_codes(error)[1])


TEI_ERRORS = ErrorForm(_error_document, lambda error: _codes(error)[0], "inputs")


@dataclass
class TeiEndpoint(TextEndpoint):
    """An endpoint of TEI."""

    name: str = NAME
    errors: ErrorForm = TEI_ERRORS

    def request_of(self, document: dict[str, Any]) -> Any:
        """See TextEndpoint. An empty text or list has an error of its own."""
        name = self.errors.field
        if document.get(name) in ("", []):
            raise InvalidRequest(f"{name}: must not be empty", details={forms.EMPTY: True})
        return super().request_of(document)


_TEXTS = ["A low dam.", "A bird."]
_INPUTS = {"inputs": _TEXTS}
_OF_TEXTS, _OF_IDS = TEI_ERRORS._replace(field="texts"), TEI_ERRORS._replace(field="ids")
_PAIRS = {"inputs": {"source_sentence": _TEXTS[0], "sentences": _TEXTS}}
_RANKING = {"query": "What is a weir?", "texts": _TEXTS}


def read_embed(request: EmbedRequest, exchange: TextExchange, task: TextTask) -> HttpWork:
    """Return the work of making a vector for each text, one for each of its tokens, or its terms, by the `task`."""
    texts = forms.read_texts(request.inputs, "inputs", exchange.context)
    encoder = exchange.choose(request.model, task, texts)
    if task is TextTask.EMBED_SPARSE:
        request.dimensions = None  # of dense vectors alone
    unit_length = request.normalize is not False and task is TextTask.EMBED

    def write(encoded: Encoded) -> Listing:
        vectors = encoded.vectors

        def items(start: int, stop: int) -> list[Any]:
            part = vectors[start:stop]
            if task is TextTask.EMBED_SPARSE:
                rows = [encoded.terms(row) for row in range(start, stop)]
                return [[{"index": index, "value": value} for index, value in row] for row in rows]
            if encoded.lengths is None:
                return packed(unit_vectors(part) if unit_length else part)
            return [packed(encoded.output(row)[None])[0] for row in range(start, stop)]

        return listing(None, "", len(vectors), vectors[0].size, items, compute_headers(encoder, texts, encoded))

    return TextWork(encoder, texts, write, options_for(request, encoder, task))


def _embedding(path: str, what: str, response: Any, task: TextTask) -> TextEndpoint:
    @TeiEndpoint(path, f"Encode {what}, as TEI does", _INPUTS, response, task)
    def embed(request: EmbedRequest, exchange: TextExchange) -> HttpWork:
        return read_embed(request, exchange, task)

    return embed


_EMBEDDINGS = (
    _embedding("/embed", "texts", list[list[float]], TextTask.EMBED),
    _embedding("/embed_all", "each token of texts", list[list[list[float]]], TextTask.EMBED_ALL),
    _embedding("/embed_sparse", "texts as weights of their terms", list[list[TeiTerm]], TextTask.EMBED_SPARSE),
)


@TeiEndpoint("/similarity", "Compare a sentence with others, as TEI does", _PAIRS, list[float], TextTask.EMBED)
def similarity(request: SimilarityRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for how similar sentences are to another, by the function of the model."""
    read = partial(forms.read_part, context=exchange.context)
    source = read(request.inputs.source_sentence, "inputs.source_sentence")
    texts = [source, *forms.read_list(request.inputs.sentences, "inputs.sentences", exchange.context, read)]
    encoder = exchange.choose(request.model, TextTask.EMBED, texts)

    def write(encoded: Encoded) -> HttpResponse:
        found = similarities(encoded.vectors[0], encoded.vectors[1:], encoder.facts.similarity)
        return json_response(packed(found[None])[0], compute_headers(encoder, texts, encoded))

    options = options_for(request.parameters or TextOptionFields(), encoder)
    lists = [("inputs.source_sentence", 1), ("inputs.sentences", len(texts) - 1)]
    return TextWork(encoder, texts, write, options, lists=lists)


def ranking_of(request: TeiRerankRequest, exchange: TextExchange) -> TextWork[list[forms.Ranked]]:
    """Return the work of ranking texts. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
    form = forms.RankingForm(None, bool(request.return_text), bool(request.raw_scores))
    options = TextOptions(truncate=request.truncate, truncate_left=forms.cuts_left(request.truncation_direction))
    ranking = forms.read_ranking(exchange, request.query, request.texts, "texts", request.model, form)
    return ranking._replace(options=options)


_RANK, _OF_INFINITY = "Rank texts, as TEI and infinity do", {"documents": infinity_rerank}


@TeiEndpoint("/rerank", _RANK, _RANKING, Any, TextTask.RERANK, errors=_OF_TEXTS, variants=_OF_INFINITY)
def rerank(request: TeiRerankRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for a ranking."""
    ranking = ranking_of(request, exchange)

    def write(encoded: Encoded) -> HttpResponse:
        return json_response(ranking.write(encoded), compute_headers(ranking.encoder, ranking.texts, encoded))

    return ranking.written(write)


@TeiEndpoint("/predict", "Label texts, as TEI does", {"inputs": _TEXTS[0]}, Any, TextTask.PREDICT)
def predict(request: PredictRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for the labels of texts, the likeliest first."""
    texts, single = _sequences(request.inputs, exchange.context)
    encoder = exchange.choose(request.model, TextTask.PREDICT)
    request.dimensions = None  # of vectors alone
    raw, top, independent = bool(request.raw_scores), None, None
    if request.parameters is not None:
        single, top, function = False, request.parameters.top_k, request.parameters.function_to_apply
        raw, independent = function == "none", None if function is None else function == "sigmoid"

    def write(encoded: Encoded) -> HttpResponse:
        rows = forms.labelled(encoded, encoder.facts, raw=raw, independent=independent)
        found = [row[:top] for row in rows]
        return json_response(found[0] if single else found, compute_headers(encoder, texts, encoded))

    return TextWork(encoder, texts, write, options_for(request, encoder))


def tokens_shown(request: TokenizeBody, exchange: TextExchange) -> TextWork[Callable[[int, int], list[list[TeiToken]]]]:
    """Return the work of showing the tokens of texts, which writes a function: it returns those of the texts from one index up to another."""
    values = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    texts = forms.read_list(values, "inputs", exchange.context, forms.check_text)
    encoder = exchange.choose(request.model)
    prompt = forms.options_of(TextOptionFields(prompt_name=request.prompt_name), encoder).prompt or ""
    before = prompt_text(prompt, encoder.facts.prompts)

    def write(encoded: Encoded) -> Callable[[int, int], list[list[TeiToken]]]:
        found = list(zip(texts, encoded.details or (), strict=True))
        return lambda start, stop: [with_byte_offsets(before + text, tokens) for text, tokens in found[start:stop]]

    special = request.add_special_tokens is not False
    return TextWork(encoder, texts, write, compute=partial(tokens_of, encoder, texts, special=special, prompt=prompt))


_SHOW, _OF_VLLM = "Show the tokens of texts, as TEI and vLLM do", {"prompt": vllm_tokenize}


@TeiEndpoint("/tokenize", _SHOW, _INPUTS, list[list[TeiToken]], variants=_OF_VLLM)
def tokenize(request: TokenizeBody, exchange: TextExchange) -> HttpWork:
    """Read a request for the tokens of texts."""
    shown = tokens_shown(request, exchange)

    def write(encoded: Encoded) -> Listing:
        tokens = encoded.details or []
        return listing(None, "", len(tokens), len(TokenDetail._fields) * max(map(len, tokens)), shown.write(encoded))

    return shown.written(write)


def with_byte_offsets(text: str, tokens: Sequence[TokenDetail]) -> list[TeiToken]:
    """Return the tokens of `text`, behind its prompt, with their offsets in bytes of UTF-8, as those of TEI are, in place of characters."""
    sizes = None if text.isascii() else [0, *accumulate(len(character.encode()) for character in text)]

    def offset(position: int | None) -> int | None:
        return position if position is None or sizes is None else sizes[position]

    return [
        TeiToken(id=each.id, text=each.text, special=each.special, start=offset(each.start), stop=offset(each.stop))
        for each in tokens
    ]


@TeiEndpoint("/decode", "Show the texts of token ids, as TEI does", {"ids": [[1, 2]]}, list[str], errors=_OF_IDS)
def decode(request: DecodeBody, exchange: TextExchange) -> HttpWork:
    """Read a request for the texts of token ids."""
    single = not isinstance(request.ids, list) or not isinstance(request.ids[0], list)
    lists = [request.ids] if single else request.ids
    lists = forms.read_list(lists, "ids", exchange.context, forms.token_ids)
    encoder = exchange.choose(request.model)
    compute = partial(texts_of, encoder, lists, skip_special=request.skip_special_tokens is not False)
    return TextWork(encoder, lists, lambda encoded: json_response(encoded.decoded), compute=compute)


# /predict_tokens has the form of transformers' pipeline. Labels that begin with B- and I- begin and continue what is labelled. Tokens that continue it are
# joined to one entity, unless each is wanted.

STRATEGIES = ("simple", "none")
_OUTSIDE = ("O",)  # the labels of tokens that are nothing, which are left out unless the request names others


class TokenLabelParameters(Struct):
    """How entities are made of tokens."""

    aggregation_strategy: Annotated[
        str | None, Meta(description="simple joins tokens to entities", extra_json_schema={"enum": [*STRATEGIES, None]})
    ] = None
    ignore_labels: Annotated[
        list[str] | None, Meta(description="labels that are left out: O unless others are named")
    ] = None

    def __post_init__(self) -> None:
        strategy = self.aggregation_strategy
        if strategy not in (None, *STRATEGIES):
            raise InvalidRequest(f"must be one of {', '.join(STRATEGIES)}").of("aggregation_strategy", brief(strategy))

    @property
    def joined(self) -> bool:
        """Whether tokens are joined to entities."""
        return self.aggregation_strategy != "none"

    @property
    def ignored(self) -> Sequence[str]:
        """The labels that are left out."""
        return _OUTSIDE if self.ignore_labels is None else self.ignore_labels


class TokenLabelRequest(Struct):
    """A request for the labels of tokens."""

    inputs: Annotated[Any, any_of(PlainText, Annotated[list[PlainText], Meta(min_length=1)])]
    parameters: TokenLabelParameters | None = None
    truncate: bool | None = None
    model: Annotated[str | None, Meta(description="the first one that labels tokens, if it is not given")] = None


class Entity(Struct, omit_defaults=True):
    """A part of a text with its label: `entity_group` of joined tokens, `entity` of one. `start` and `end` count characters."""

    score: float
    word: str
    start: int
    end: int
    entity_group: str = ""
    entity: str = ""


class LabelledToken(NamedTuple):
    """A token that is not a special one, with its likeliest label."""

    label: str
    score: float
    start: int
    end: int


_LABEL, _NAMES = "Label the tokens of texts, as transformers does", {"inputs": "Ada lives in Paris"}


@TextEndpoint("/predict_tokens", _LABEL, _NAMES, Any, TextTask.PREDICT_TOKENS, name=NAME, errors=TEI_ERRORS)
def predict_tokens(request: TokenLabelRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for the labels of tokens. Errors have TEI's shape."""
    single = isinstance(request.inputs, str)
    given = [request.inputs] if single else request.inputs
    texts = forms.read_list(given, "inputs", exchange.context, forms.check_text)
    form = request.parameters or TokenLabelParameters()
    encoder = exchange.choose(request.model, TextTask.PREDICT_TOKENS)
    options = TextOptions(truncate=request.truncate, prompt="")

    async def compute(timeout: float | None) -> Encoded:
        details = await encoder.tokenize(texts, special=True, prompt="", timeout=timeout)
        encoded = await encoder.encode(texts, exchange.query(options, timeout, exchange.trace))
        return encoded._replace(details=details)

    def write(encoded: Encoded) -> HttpResponse:
        logits = [encoded.output(row) for row in range(len(texts))]
        rows = zip(texts, logits, encoded.details or (), strict=True)
        found = [_entities(text, of_text, details, encoder.facts, form) for text, of_text, details in rows]
        return json_response(found[0] if single else found, compute_headers(encoder, texts, encoded))

    return TextWork(encoder, texts, write, options, compute=compute)


def _entities(
    text: str, logits: NDArray[Any], details: Sequence[TokenDetail], facts: TextFacts, form: TokenLabelParameters
) -> list[Entity]:
    """Return the entities of one text, given the logits of the tokens that were computed and all of its tokens."""
    tokens = list(_labelled(forms.likeliest(logits, facts), details))
    entities: list[Entity] = []
    for group in _groups(tokens) if form.joined else [[each] for each in tokens]:
        name = _split_label(group[0].label)[1] if form.joined else group[0].label
        if name not in form.ignored:
            start, end = group[0].start, group[-1].end
            score = sum(each.score for each in group) / len(group)
            names = (name, "") if form.joined else ("", name)
            entities.append(Entity(score, text[start:end], start, end, *names))
    return entities


def _labelled(labels: Sequence[forms.Label], details: Sequence[TokenDetail]) -> Iterator[LabelledToken]:
    # Of a text that was cut, the last token that was computed is the special one at the end.
    last = len(labels) - 1 if len(details) > len(labels) else len(labels)
    for label, detail in zip(labels[:last], details, strict=False):
        if detail.start is not None and detail.stop is not None:
            yield LabelledToken(label.label, label.score, detail.start, detail.stop)


def _groups(tokens: Sequence[LabelledToken]) -> list[list[LabelledToken]]:
    """Return the tokens in groups of one entity each: a token joins the one before if their labels are the same and it does not begin another."""
    groups: list[list[LabelledToken]] = []
    before = ""
    for token in tokens:
        begins, name = _split_label(token.label)
        if groups and name == before and not begins:
            groups[-1].append(token)
        else:
            groups.append([token])
        before = name
    return groups


def _split_label(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and its name without B- and I-."""
    return (label.startswith("B-"), label[2:]) if label[:2] in ("B-", "I-") else (False, label)


ENDPOINTS: Sequence[TextEndpoint] = (
    *_EMBEDDINGS, similarity, rerank, predict, tokenize, decode, predict_tokens,
)  # fmt: skip


# The endpoints that answer for the server's first model, by what it is for; for others it is /embed.
_DEFAULT_PATHS = {TextTask.RERANK: "/rerank", TextTask.PREDICT: "/predict", TextTask.EMBED_SPARSE: "/embed_sparse"}


class Tei(TextApi):
    """The endpoints of TEI. What POST / and /invocations take is what the first model of the server is for."""

    def __init__(self, context: EmbeddingContext) -> None:
        tasks = next((encoder.facts.tasks for encoder in context.encoders.values()), ())
        default = _DEFAULT_PATHS.get(tasks[0], "/embed") if tasks else "/embed"
        # A ranking is known by its fields; a model that ranks labels what else there is.
        self._instance_path = "/predict" if default == "/rerank" else default
        endpoints = [copy(each) for each in ENDPOINTS]
        for each in endpoints:
            each.aliases = ("/", "/invocations") if each.path == default else ()
        vertex = "Answer several requests in one, as TEI does for Vertex AI"
        instances = {"instances": [{"inputs": _TEXTS[0]}]}
        pages = [
            TextPage("post", "/vertex", vertex, VertexResponse, self.vertex, VertexBody, instances),
            TextPage("get", "/info", "Describe the first model of texts, as TEI does", TeiInfo, self.info),
        ]
        super().__init__(context, TeiError, endpoints, pages)

    async def info(self, call: AsgiCall) -> HttpResponse:
        """Return what is known of the first model."""
        return json_response(model_info(self.context.encoder(), self.context), [NO_STORE])

    async def vertex(self, call: AsgiCall) -> HttpResponse | None:
        """Respond to each instance as the endpoint for it does; the first error, in the order of the instances, is the response to all. None if the caller has left."""
        instances = (await call.read(VertexBody)).instances
        self.context.check_count(len(instances) or 1, "instances")
        try:
            responses = await unless_left(self._responses(call, instances), call.receive)
        except ClientLeft:
            return None
        wrong = next((response for response in responses if response.status != 200), None)
        body = b'{"predictions":[%b]}' % b",".join(response.body for response in responses)
        return HttpResponse(200, [JSON_HEADER], body) if wrong is None else wrong

    async def _responses(self, call: AsgiCall, instances: Sequence[dict[str, Any]]) -> list[HttpResponse]:
        """Return the response to each of `instances`. Raises Cancelled if one has none."""
        endpoints = {each.endpoint.path: each for each in self.texts}
        headers = [(name, value) for name, value in call.headers if name not in _OF_WHOLE_BODY]
        waiting = iter(enumerate(instances))
        responses: dict[int, HttpResponse] = {}

        async def respond_next() -> None:
            for index, instance in waiting:
                path = "/rerank" if {"query", "texts"} <= instance.keys() else self._instance_path
                response = await endpoints[path](call.part(headers, encode_safely(instance)))
                if response is None:
                    raise Cancelled(f"instances[{index}]: was cancelled")
                responses[index] = response

        await asyncio.gather(*[respond_next() for _ in range(min(_MAX_INSTANCES, len(instances)))])
        return [responses[index] for index in range(len(instances))]


_MAX_INSTANCES = 64  # of one request to /vertex that are computed at the same time
_OF_WHOLE_BODY = (b"accept-encoding", b"content-encoding", b"content-length", b"x-request-id")


class TeiInfo(TypedDict):
    """The facts that TEI tells of its model."""

    model_id: str
    served_model_name: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int | None
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    similarity_fn_name: str


def model_info(encoder: Encodes, context: EmbeddingContext) -> TeiInfo:
    """Return what is known of a model, with TEI's fields."""
    facts, batching = encoder.facts, encoder.batching
    max_tokens = batching.max_batch_cost
    return {
        "model_id": encoder.facts.id or encoder.name, "served_model_name": listed_name(encoder), "model_sha": None, "model_dtype": facts.dtype, "model_type": _model_type(encoder),
        "max_concurrent_requests": batching.max_queue_size, "max_input_length": encoder.max_length,
        "max_batch_tokens": None if max_tokens is None else int(max_tokens), "max_batch_requests": batching.max_batch_size,
        "max_client_batch_size": context.max_texts, "auto_truncate": facts.truncates, "tokenization_workers": 2,
        "version": __version__, "sha": None, "docker_label": None, "similarity_fn_name": facts.similarity,
    }  # fmt: skip


_POOLINGS = {"sep": "last_token", "sparse": "splade"}  # TEI's names where ours differ


def _model_type(encoder: Encodes) -> dict[str, Any]:
    facts = encoder.facts
    if facts.tasks[0] not in (TextTask.RERANK, TextTask.PREDICT):
        return {"embedding": {"pooling": _POOLINGS.get(facts.pooling, facts.pooling)}}
    names = {str(index): label for index, label in enumerate(facts.labels)}
    kind = "reranker" if TextTask.RERANK in facts.tasks else "classifier"
    return {kind: {"id2label": names, "label2id": {label: int(index) for index, label in names.items()}}}


def options_for(fields: TextOptionFields, encoder: Encodes, task: TextTask | None = None) -> TextOptions:
    """Return the options of `fields`, with the outputs that `task` needs if the model was not made for it alone."""
    outputs = OUTPUT_OF_TASK.get(task) if task is not None and task != encoder.facts.tasks[0] else None
    return forms.options_of(fields, encoder, outputs=outputs)


def _sequences(value: Any, context: EmbeddingContext) -> tuple[list[Text], bool]:
    """Return the texts and pairs of `inputs` of /predict, and whether they are a single one."""
    if isinstance(value, str):
        return [forms.check_text(value, "inputs")], True
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"inputs={brief(value)}: must be a text, a pair of texts, or a list of such in lists")
    if isinstance(value[0], str):
        return [_sequence(value, "inputs")], True
    return forms.read_list(value, "inputs", context, _sequence), False


def _sequence(value: Any, where: str) -> Text:
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise InvalidRequest(f"{where}={brief(value)}: must be a list of one text or two")
    is_pair = len(value) == 2
    texts = [forms.check_text(text, f"{where}[{index}]", may_be_empty=is_pair) for index, text in enumerate(value)]
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def compute_headers(encoder: Encodes, texts: Sequence[Asked], encoded: Encoded) -> Headers:
    """Return TEI's headers: how many characters and tokens were computed, and how long that took, in milliseconds."""
    phases = encoded.phases
    total = b"%d" % (1000 * phases.total)
    return [
        (b"x-compute-type", encoder.facts.device.encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % sum(map(characters, texts))),
        (b"x-compute-tokens", b"%d" % sum(encoded.counts)),
        (b"x-total-time", total),
        (b"x-tokenization-time", b"%d" % (1000 * phases.tokenize)),
        (b"x-queue-time", b"%d" % (1000 * phases.queue)),
        (b"x-inference-time", b"%d" % (1000 * phases.compute)),
    ]


def characters(text: Asked) -> int:
    """Return how many characters a text or a pair has; token ids and pictures have none."""
    return len(text) if isinstance(text, str) else sum(len(part) for part in text if isinstance(part, str))


def _codes(error: BaseException) -> tuple[int, str]:
    """Return the status of an error, TEI's own where it has one, and TEI's name for its kind."""
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    status = http_code(error)
    if isinstance(error, ModelError) or "task" in details:
        return 424, "Backend"
    if isinstance(error, InvalidRequest):
        if forms.EMPTY in details:
            return 400, "Empty"
        return (413 if TOO_LONG in details or MANY in details else 422), "Validation"
    if isinstance(error, Overloaded):
        return status, "Overloaded"
    if isinstance(error, (RequestError, TooLarge)):
        return status, "Validation"
    return status, "Unhealthy" if isinstance(error, CapacityError) else "Backend"
