"""The endpoints of text-embeddings-inference (TEI): /embed, /embed_all, /similarity, /rerank, /predict, /tokenize, /decode, /vertex and /info.

Its /health is Weir's own.

A request names no model there: the first model of the server that can do what the endpoint is for responses. A field `model` chooses another.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from msgspec import Meta, Struct

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
from weir.text_server.exchange import (
    EMPTY,
    MANY,
    EmbeddingContext,
    RankingForm,
    TextExchange,
    check_text,
    check_texts,
    cuts_left,
    labelled,
    listed_name,
    options_of,
    ranked,
    read_pairs,
    read_texts,
    terms,
    token_ids,
)
from weir.text_server.http import (
    EitherProtocol,
    ErrorForm,
    Listing,
    TextApi,
    TextCall,
    TextPage,
    TextProtocol,
    listing,
)
from weir.text_server.protocols.infinity import INFINITY_RERANK, VLLM_TOKENIZE
from weir.text_server.texts import Encoded, Encodes, TextOptions, TextTask
from weir.wire.schema import any_of, read_document
from weir.wire.status import http_code

NAME = "tei"
# What answers a task for which the model was not made alone.
OUTPUT_OF_TASK = {TextTask.EMBED: ("dense",), TextTask.EMBED_ALL: ("tokens",), TextTask.EMBED_SPARSE: ("sparse",)}

_SOME = Meta(min_length=1)
_Inputs = any_of(PlainText, Annotated[list[PlainText], _SOME], Ids, Annotated[list[Ids], _SOME])


class TeiError(TypedDict):
    """What is wrong. `error_type` is Validation, Empty, Tokenizer, Overloaded, Backend or Unhealthy."""

    error: str
    error_type: str


class EmbedRequest(TextOptionFields, forbid_unknown_fields=False):
    """A request for the vectors of texts. Fields that there are not are left unread, as TEI does."""

    inputs: Annotated[Any, _Inputs]
    normalize: Annotated[bool | None, Meta(description="false leaves the vectors as the model makes them")] = None
    model: Annotated[str | None, Meta(description="the first that can do it, if it is not given")] = None


class SentencePair(Struct):
    """A sentence, and those that it is compared with."""

    source_sentence: PlainText
    sentences: Annotated[list[PlainText], _SOME]


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
    """What clients of Hugging Face's hosted pipelines state in addition to a text."""

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


class VertexAnswer(TypedDict):
    """The responses, in the order of the requests."""

    predictions: list[Any]


class TeiRank(TypedDict, total=False):
    """A text at its place in the ranking."""

    index: int
    score: float
    text: str


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


class Shown(NamedTuple):
    """How the response of a request is written: raw scores, one input or several, vectors of length 1, the best labels alone."""

    raw: bool = False
    single: bool = False
    unit_length: bool = False
    top: int | None = None
    independent: bool | None = None


def _error_document(error: BaseException, identity: Any, development: bool) -> TeiError:
    message = error_value(error, development=development)["message"]
    return TeiError(error=message, error_type=_codes(error)[1])


class TeiProtocol(TextProtocol):
    """What TEI's protocols have in common."""

    name = NAME
    field, errors = "inputs", ErrorForm(_error_document, lambda error: _codes(error)[0])

    def __init__(self, *paths: str) -> None:
        self.paths = paths


class EmbedProtocol(TeiProtocol):
    """POST /embed; with `task` EMBED_ALL /embed_all, and with EMBED_SPARSE /embed_sparse."""

    def __init__(self, *paths: str, task: TextTask = TextTask.EMBED) -> None:
        super().__init__(*paths)
        self._task = task

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
        request = _read(document, EmbedRequest, "inputs")
        exchange.texts = read_texts(request.inputs, "inputs", exchange.context)
        exchange.encoder = encoder = exchange.context.encoder(request.model or "", self._task)
        if self._task is TextTask.EMBED_SPARSE:
            request.dimensions = None  # of dense vectors alone
        exchange.options = options_for(request, encoder, self._task)
        exchange.form = Shown(unit_length=request.normalize is not False and self._task is TextTask.EMBED)

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing:
        """Return the vectors, or the terms of each text, as a list."""
        vectors, lengths, unit_length = encoded.vectors, encoded.lengths, exchange.form.unit_length

        def items(start: int, stop: int) -> list[Any]:
            part = vectors[start:stop]
            if self._task is TextTask.EMBED_SPARSE:
                rows = [terms(encoded, row) for row in range(start, stop)]
                return [[{"index": index, "value": value} for index, value in row] for row in rows]
            if lengths is None:
                return packed(unit_vectors(part) if unit_length else part)
            return [packed(vector[None, :length])[0] for vector, length in zip(part, lengths[start:stop], strict=True)]

        return listing(None, "", len(vectors), vectors[0].size, items, compute_headers(exchange, encoded))


class SimilarityProtocol(TeiProtocol):
    """POST /similarity."""

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = _read(document, SimilarityRequest, "inputs")
        source = check_text(request.inputs.source_sentence, "inputs.source_sentence")
        exchange.texts = [source, *check_texts(request.inputs.sentences, "inputs.sentences", exchange.context)]
        exchange.encoder = encoder = exchange.context.encoder(request.model or "", TextTask.EMBED)
        exchange.options = options_for(request.parameters or TextOptionFields(), encoder)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return how similar each sentence is, by the function of the model."""
        found = similarities(encoded.vectors[0], encoded.vectors[1:], exchange.chosen.facts.similarity)
        return json_response(packed(found[None])[0], compute_headers(exchange, encoded))


class RerankProtocol(TeiProtocol):
    """POST /rerank."""

    field = "texts"

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = _read(document, TeiRerankRequest, "texts")
        left = cuts_left(request.truncation_direction)
        documents = read_pairs(
            exchange, request.query, request.texts, "texts", request.model, request.truncate, left=left
        )
        exchange.form = RankingForm(None, documents if request.return_text else None, bool(request.raw_scores))

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the texts by their ranks."""
        ranks: list[TeiRank] = []
        for index, score, text in ranked(exchange, encoded):
            rank = TeiRank(index=index, score=score)
            ranks.append(rank if text is None else {**rank, "text": text})
        return json_response(ranks, compute_headers(exchange, encoded))


class PredictProtocol(TeiProtocol):
    """POST /predict."""

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = _read(document, PredictRequest, "inputs")
        exchange.texts, single = _sequences(request.inputs, exchange.context)
        exchange.encoder = encoder = exchange.context.encoder(request.model or "", TextTask.PREDICT)
        request.dimensions = None  # of vectors alone
        exchange.options = options_for(request, encoder)
        pipeline = request.parameters
        if pipeline is None:
            exchange.form = Shown(bool(request.raw_scores), single=single)
            return
        function = pipeline.function_to_apply
        independent = None if function is None else function == "sigmoid"
        exchange.form = Shown(function == "none", top=pipeline.top_k, independent=independent)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the labels of each text, the likeliest first."""
        form: Shown = exchange.form
        rows = labelled(encoded, exchange.chosen.facts, raw=form.raw, independent=form.independent)
        found = [[each._asdict() for each in row[: form.top]] for row in rows]
        return json_response(found[0] if form.single else found, compute_headers(exchange, encoded))


class TokenizeProtocol(TeiProtocol):
    """POST /tokenize."""

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = _read(document, TokenizeBody, "inputs")
        values = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        texts = check_texts(values, "inputs", exchange.context)
        exchange.encoder = encoder = exchange.context.encoder(request.model or "")
        options = options_of(TextOptionFields(prompt_name=request.prompt_name), encoder)
        exchange.texts = texts
        exchange.form = prompt_text(options.prompt or "", encoder.facts.prompts)
        exchange.work = partial(
            encoder.tokenize, texts, special=request.add_special_tokens is not False, prompt=options.prompt or ""
        )

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing:
        """Return the tokens of each text."""
        tokens: list[list[TokenDetail]] = exchange.found

        def items(start: int, stop: int) -> list[Any]:
            texts = zip(exchange.texts[start:stop], tokens[start:stop], strict=True)
            return [with_byte_offsets(f"{exchange.form}{text}", tokens_of) for text, tokens_of in texts]

        return listing(None, "", len(tokens), len(TokenDetail._fields) * max(map(len, tokens)), items)


def with_byte_offsets(text: str, tokens: Sequence[TokenDetail]) -> list[TeiToken]:
    """Return the tokens of `text`, behind its prompt, with their offsets in bytes of UTF-8, as those of TEI are, in place of characters."""
    sizes = None if text.isascii() else [0, *accumulate(len(character.encode()) for character in text)]

    def offset(place: int | None) -> int | None:
        return place if place is None or sizes is None else sizes[place]

    return [
        TeiToken(id=each.id, text=each.text, special=each.special, start=offset(each.start), stop=offset(each.stop))
        for each in tokens
    ]


class DecodeProtocol(TeiProtocol):
    """POST /decode."""

    field = "ids"

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = _read(document, DecodeBody, "ids")
        single = not isinstance(request.ids, list) or not isinstance(request.ids[0], list)
        lists = [request.ids] if single else request.ids
        exchange.context.check_count(len(lists), "ids")
        lists = [token_ids(each, f"ids[{place}]") for place, each in enumerate(lists)]
        exchange.encoder = encoder = exchange.context.encoder(request.model or "")
        exchange.texts = lists
        exchange.work = partial(encoder.decode, lists, skip_special=request.skip_special_tokens is not False)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the text of each list."""
        return json_response(exchange.found)


# The endpoints that answer for the server's first model, by what it is for; for others it is /embed.
_DEFAULT_PATHS = {TextTask.RERANK: "/rerank", TextTask.PREDICT: "/predict", TextTask.EMBED_SPARSE: "/embed_sparse"}


class Tei(TextApi):
    """The endpoints of TEI. What POST / and /invocations take is what the first model of the server is for."""

    def __init__(self, context: EmbeddingContext) -> None:
        tasks = next((encoder.facts.tasks for encoder in context.encoders.values()), ())
        default = _DEFAULT_PATHS.get(tasks[0], "/embed") if tasks else "/embed"
        # A ranking is known by its fields; a model that ranks labels what else there is.
        self._instance_path = "/predict" if default == "/rerank" else default
        embed, rerank, predict, sparse = [
            (path, "/", "/invocations") if path == default else (path,)
            for path in ("/embed", "/rerank", "/predict", "/embed_sparse")
        ]
        query, texts = "What is a weir?", ["A low dam.", "A bird."]
        inputs: dict[str, Any] = {"inputs": texts}
        pairs = {"inputs": {"source_sentence": texts[0], "sentences": texts}}
        of_each = EmbedProtocol("/embed_all", task=TextTask.EMBED_ALL)
        to_rerank = Any, {"query": query, "texts": texts}, Any
        calls = [
            TextCall(EmbedProtocol(*embed), "Encode texts, as TEI does", EmbedRequest, inputs, list[list[float]], TextTask.EMBED),
            TextCall(of_each, "Encode each token of texts, as TEI does", EmbedRequest, inputs, list[list[list[float]]], TextTask.EMBED_ALL),
            TextCall(EmbedProtocol(*sparse, task=TextTask.EMBED_SPARSE), "Encode texts as weights of their terms, as TEI does", EmbedRequest, inputs, list[list[TeiTerm]], TextTask.EMBED_SPARSE),
            TextCall(SimilarityProtocol("/similarity"), "Compare a sentence with others, as TEI does", SimilarityRequest, pairs, list[float], TextTask.EMBED),
            TextCall(EitherProtocol(RerankProtocol(*rerank), "documents", INFINITY_RERANK), "Rank texts, as TEI and infinity do", *to_rerank, TextTask.RERANK),
            TextCall(PredictProtocol(*predict), "Label texts, as TEI does", PredictRequest, {"inputs": texts[0]}, Any, TextTask.PREDICT),
            TextCall(EitherProtocol(TokenizeProtocol("/tokenize"), "prompt", VLLM_TOKENIZE), "Show the tokens of texts, as TEI and vLLM do", TokenizeBody, inputs, list[list[TeiToken]]),
            TextCall(DecodeProtocol("/decode"), "Show the texts of token ids, as TEI does", DecodeBody, {"ids": [[1, 2]]}, list[str]),
        ]  # fmt: skip
        vertex = "Answer several requests in one, as TEI does for Vertex AI"
        instances = {"instances": [{"inputs": texts[0]}]}
        pages = [
            TextPage("post", "/vertex", vertex, VertexAnswer, self.vertex, VertexBody, instances),
            TextPage("get", "/info", "Describe the first model of texts, as TEI does", TeiInfo, self.info),
        ]
        super().__init__(context, TeiError, calls, pages)

    async def info(self, call: AsgiCall) -> HttpResponse:
        """Return what is known of the first model."""
        return json_response(model_info(self.context.encoder(), self.context), [NO_STORE])

    async def vertex(self, call: AsgiCall) -> HttpResponse | None:
        """Answer each instance as the endpoint for it does; the first error, in the order of the instances, is the response to all. None if the caller has left."""
        instances = (await call.read(VertexBody)).instances
        self.context.check_count(len(instances) or 1, "instances")
        try:
            answers = await unless_left(self._answers(call, instances), call.receive)
        except ClientLeft:
            return None
        wrong = next((answer for answer in answers if answer.status != 200), None)
        body = b'{"predictions":[%b]}' % b",".join(answer.body for answer in answers)
        return HttpResponse(200, [JSON_HEADER], body) if wrong is None else wrong

    async def _answers(self, call: AsgiCall, instances: Sequence[dict[str, Any]]) -> list[HttpResponse]:
        """Return the response to each of `instances`. Raises Cancelled if one has none."""
        endpoints = {path: each for each in self.texts for path in each.protocol.paths}
        headers = [(name, value) for name, value in call.headers if name not in _OF_WHOLE_BODY]
        waiting = iter(enumerate(instances))
        answers: dict[int, HttpResponse] = {}

        async def answer_next() -> None:
            for place, instance in waiting:
                path = "/rerank" if {"query", "texts"} <= instance.keys() else self._instance_path
                # In HTTP 1.0 no response is sent in parts.
                part = call._replace(headers=headers, body=encode_safely(instance), receive=_never, version="1.0")
                answer = await endpoints[path](part)
                if answer is None:
                    raise Cancelled(f"instances[{place}]: was cancelled")
                answers[place] = answer

        await asyncio.gather(*[answer_next() for _ in range(min(_MAX_INSTANCES, len(instances)))])
        return [answers[place] for place in range(len(instances))]


_MAX_INSTANCES = 64  # of one request to /vertex that are computed at the same time
_OF_WHOLE_BODY = (b"accept-encoding", b"content-encoding", b"content-length", b"x-request-id")


async def _never() -> Any:
    """Wait: that the caller leaves is noticed once for all instances."""
    await asyncio.Event().wait()


class TeiInfo(TypedDict):
    """What TEI tells of its model."""

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
    names = {str(place): label for place, label in enumerate(facts.labels)}
    kind = "reranker" if TextTask.RERANK in facts.tasks else "classifier"
    return {kind: {"id2label": names, "label2id": {label: int(place) for place, label in names.items()}}}


# What the protocols read and write alike.


def _read(document: dict[str, Any], declared: Any, field: str) -> Any:
    if document.get(field) in ("", []):
        raise InvalidRequest(f"{field}: must not be empty", details={EMPTY: True})
    return read_document(document, declared)


def options_for(fields: TextOptionFields, encoder: Encodes, task: TextTask | None = None) -> TextOptions:
    """Return the options of `fields`, with the outputs that `task` needs if the model was not made for it alone."""
    outputs = OUTPUT_OF_TASK.get(task) if task is not None and task != encoder.facts.tasks[0] else None
    return options_of(fields, encoder, outputs=outputs)


def _sequences(value: Any, context: EmbeddingContext) -> tuple[list[Text], bool]:
    """Return the texts and pairs of `inputs` of /predict, and whether they are a single one."""
    if isinstance(value, str):
        return [check_text(value, "inputs")], True
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"inputs={brief(value)}: must be a text, a pair of texts, or a list of such in lists")
    if isinstance(value[0], str):
        return [_sequence(value, "inputs")], True
    context.check_count(len(value), "inputs")
    return [_sequence(each, f"inputs[{place}]") for place, each in enumerate(value)], False


def _sequence(value: Any, where: str) -> Text:
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise InvalidRequest(f"{where}={brief(value)}: must be a list of one text or two")
    is_pair = len(value) == 2
    texts = [check_text(text, f"{where}[{place}]", may_be_empty=is_pair) for place, text in enumerate(value)]
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def compute_headers(exchange: TextExchange, encoded: Encoded) -> Headers:
    """Return TEI's headers: how many characters and tokens were computed, and how long that took, in milliseconds."""
    phases = encoded.phases
    total = b"%d" % (1000 * phases.total)
    return [
        (b"x-compute-type", exchange.chosen.facts.device.encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % sum(map(characters, exchange.texts))),
        (b"x-compute-tokens", b"%d" % sum(encoded.counts)),
        (b"x-total-time", total),
        (b"x-tokenization-time", b"%d" % (1000 * phases.tokenize)),
        (b"x-queue-time", b"%d" % (1000 * phases.queue)),
        (b"x-inference-time", b"%d" % (1000 * phases.compute)),
    ]


def characters(text: Text) -> int:
    """Return how many characters a text or a pair has; token ids have none."""
    return len(text) if isinstance(text, str) else sum(len(part) for part in text if isinstance(part, str))


def _codes(error: BaseException) -> tuple[int, str]:
    """Return the status of an error, TEI's own where it has one, and TEI's name for its kind."""
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    status = http_code(error)
    if isinstance(error, ModelError) or "task" in details:
        return 424, "Backend"
    if isinstance(error, InvalidRequest):
        if EMPTY in details:
            return 400, "Empty"
        return (413 if TOO_LONG in details or MANY in details else 422), "Validation"
    if isinstance(error, Overloaded):
        return status, "Overloaded"
    if isinstance(error, (RequestError, TooLarge)):
        return status, "Validation"
    return status, "Unhealthy" if isinstance(error, CapacityError) else "Backend"
