"""OpenAI's endpoints: POST /v1/embeddings, GET /v1/models. Jina's fields are read, too. infinity.py has the same without /v1.

A text that is longer than the model reads is cut, unless the settings refuse it. The response names the texts that were cut in `truncated`, and their number
in the header X-Weir-Truncated. OpenAI itself refuses such texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from weir.errors import InvalidRequest, Unsupported, WeirError, brief
from weir.frontends.http.asgi import ANY, AsgiCall, HttpEndpoint, answered, as_response, identified, listed
from weir.protocols.response import (
    JSON_HEADER,
    Headers,
    HttpResponse,
    OpenAIError,
    OpenAIErrorValue,
    json_response,
    openai_error,
)
from weir.text_models.packing import (
    PACKINGS,
    PackedVector,
    Packing,
    SparseVector,
    packed,
    packing_named,
    sparse_vector,
    unit_vectors,
    written_numbers,
)
from weir.text_models.texts import TOO_LONG, Ids, Outputs, TextOptionFields, TextOutput
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextWork
from weir.text_server.http import ErrorForm, HttpExchange, HttpWork, Listing, TextApi, TextEndpoint, TextPage, listing
from weir.text_server.pictures import Asked, Message, Part, read_image
from weir.text_server.texts import NO_OPTIONS, Encoded, Encodes, TextTask, Truncated, listed_name
from weir.wire.schema import any_of


def error_document(error: BaseException, development: bool) -> OpenAIError:
    """Return the document for `error`."""
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    code = "context_length_exceeded" if TOO_LONG in details else None
    return openai_error(error, code=code, development=development)


OPENAI_ERRORS = ErrorForm(error_document, field="input")


NAME = "openai"
UNKNOWN = "/v1/{path:path}"
_SOME = Meta(min_length=1)
_IMAGE = "image"
_MODALITIES = ("text", _IMAGE)
_NO = Meta(extra_json_schema={"enum": [False, None]})
_LONGEST_USER = 512  # characters, as the latest users are kept in memory


_CUT = "cuts texts to so many tokens, special ones included; -1: to those that the model reads"
CutTo = Annotated[int | None, Meta(description=_CUT)]


class EmbeddingsFields(TextOptionFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request for vectors in addition to its texts. A field that is null counts as not given."""

    model: Annotated[str | None, Meta(description="the first one if it is not given")] = None
    encoding_format: Annotated[str | None, Meta(extra_json_schema={"enum": [*PACKINGS, None]})] = None
    user: Annotated[str | None, Meta(extra_json_schema={"maxLength": _LONGEST_USER})] = None
    outputs: Outputs = None
    # Jina's names of the above, and its further fields.
    embedding_type: Annotated[str | None, Meta(extra_json_schema={"enum": [*PACKINGS, None]})] = None
    task: Annotated[str | None, Meta(description="as input_type")] = None
    normalized: Annotated[bool | None, Meta(description="false leaves the vectors as the model makes them")] = None
    late_chunking: Annotated[bool | None, _NO] = None
    return_multivector: Annotated[bool | None, _NO] = None
    # vLLM's.
    truncate_prompt_tokens: CutTo = None
    truncation_side: Annotated[str | None, Meta(description="as truncation_direction")] = None
    # Infinity's.
    modality: Annotated[str | None, Meta(extra_json_schema={"enum": [*_MODALITIES, None]})] = None
    # Fields of OpenAI's clients, or of programs for several servers, that do not affect the vectors.
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    def __post_init__(self) -> None:
        for name in ("late_chunking", "return_multivector"):
            if getattr(self, name):
                raise InvalidRequest("must be false: a text has one vector of its own here").of(name, "true")
        if self.modality not in (None, *_MODALITIES):
            raise InvalidRequest(f"must be {' or '.join(_MODALITIES)}").of("modality", brief(self.modality))
        if self.task is not None and self.input_type is not None:
            raise InvalidRequest("task, input_type: only one of them may be given").about("task")
        if self.user and len(self.user) > _LONGEST_USER:
            rule = f"has {len(self.user)} characters, must have at most {_LONGEST_USER}"
            raise InvalidRequest(rule).of("user")
        self.input_type = self.input_type or self.task
        self.truncation_direction = self.truncation_direction or self.truncation_side
        self.dimensions = self.dimensions or None  # infinity's client sends 0 for all
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("must be 1 or more").of("dimensions", str(self.dimensions))


class EmbeddingsRequest(EmbeddingsFields, forbid_unknown_fields=True, kw_only=True):
    """A request for the vectors of texts and pictures. With the modality `image` each text is a picture in base64, or its URL."""

    input: Annotated[Any, any_of(Part, Annotated[list[Part], _SOME], Ids, Annotated[list[Ids], _SOME])]


class MessagesRequest(EmbeddingsFields, forbid_unknown_fields=True, kw_only=True):
    """A request for the vector of one text or picture, which is the content of vLLM's messages."""

    messages: Annotated[list[Message], _SOME]


class NumberedVector(TypedDict):
    """The results of one text: its vector, and with `outputs` those alone that they name."""

    object: Literal["embedding"]
    index: int
    embedding: NotRequired[PackedVector]
    sparse: NotRequired[SparseVector]
    tokens: NotRequired[list[PackedVector]]


class EmbeddingsForm(NamedTuple):
    """How the vectors of a request for `model` are written."""

    model: str
    packing: Packing
    unit_length: bool  # of the vectors of texts
    outputs: tuple[TextOutput, ...] = ()
    unit_tokens: bool = False  # whether the vectors of tokens have length 1, too
    ranges: NDArray[Any] | None = None  # see TextFacts


class TokenUsage(TypedDict):
    """How many tokens the texts have."""

    prompt_tokens: int
    total_tokens: int


def usage_of(encoded: Encoded) -> TokenUsage:
    """Return how many tokens were computed."""
    tokens = sum(encoded.counts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


class EmbeddingsLead(TypedDict):
    """The fields of a response in addition to the vectors."""

    object: Literal["list"]
    model: str
    usage: TokenUsage
    truncated: NotRequired[Truncated]


class EmbeddingsResponse(EmbeddingsLead):
    """The vectors of texts, in order."""

    data: list[NumberedVector]


class TextModelCard(TypedDict):
    """A model of texts, whether it accepts requests, which KServe's client reads, and what its workers take: `memory_bytes` of each process, where a page that several share counts in parts."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    ready: bool
    dimensions: int
    max_length: int
    workers: NotRequired[int]
    threads_per_worker: NotRequired[int]
    memory_bytes: NotRequired[list[int]]


class TextModelList(TypedDict):
    """The models of texts."""

    object: Literal["list"]
    data: list[TextModelCard]


class PlainRequest(Struct, forbid_unknown_fields=True):
    """A request for the vector of one text, as most are. It is decoded in a fifth of the time of any other."""

    input: Annotated[str, _SOME]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"


_decode_plain = msgspec.json.Decoder(PlainRequest).decode
_LONGEST_PLAIN = 16 << 10  # bytes


def _read_plain(body: bytes) -> PlainRequest | None:
    """Return the request if it is a plain one; None if it is another, or invalid."""
    try:
        return _decode_plain(body) if len(body) <= _LONGEST_PLAIN else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass
class OpenAIEndpoint(TextEndpoint):
    """An endpoint that takes what OpenAI's takes."""

    name: str = NAME
    errors: ErrorForm = OPENAI_ERRORS

    def work(self, exchange: HttpExchange, headers: Headers, body: bytes) -> HttpWork:
        """See TextEndpoint."""
        plain = _read_plain(body)
        if plain is None:
            return super().work(exchange, headers, body)
        encoder = exchange.choose(plain.model, TextTask.EMBED)
        unscaled = encoder.facts.unscaled
        write = _plain_writer(listed_name(encoder), plain.encoding_format, unscaled)
        as_json = plain.encoding_format == "float" and not unscaled
        return TextWork(encoder, [plain.input], write, NO_OPTIONS, as_json)

    def request_of(self, document: dict[str, Any]) -> Any:
        """See TextEndpoint."""
        if "input" not in document:
            rule = "is missing, must be a text, a list of texts, a list of token ids, or a list of such"
            raise InvalidRequest(rule).of("input")
        return super().request_of(document)


_EXAMPLE = {"input": ["First do it", "then do it right"]}


_ENCODE, _MESSAGES = "Encode texts and images, as OpenAI does", "Encode the content of messages, as vLLM does"


@TextEndpoint("/v1/embeddings", _MESSAGES, None, EmbeddingsResponse, TextTask.EMBED, name=NAME, errors=OPENAI_ERRORS)
def of_messages(request: MessagesRequest, exchange: HttpExchange) -> HttpWork:
    """Read a request for the vector of messages."""
    contents = [each.content if isinstance(each.content, list) else [each.content] for each in request.messages]
    parts = [part for content in contents for part in content]
    try:
        text = forms.read_content({"content": parts}, "messages", exchange.context)
    except InvalidRequest as error:
        raise error.about("messages") from None
    return _embeddings(request, [text], exchange)


@OpenAIEndpoint(
    "/v1/embeddings",
    _ENCODE,
    _EXAMPLE,
    EmbeddingsResponse,
    TextTask.EMBED,
    variants={"messages": of_messages},
    uploads=True,
)
def embeddings(request: EmbeddingsRequest, exchange: HttpExchange) -> HttpWork:
    """Read a request for vectors."""
    context = exchange.context
    try:
        if request.modality == _IMAGE:
            given = request.input if isinstance(request.input, list) else [request.input]
            read = partial(read_image, limits=context.images)
            texts: Sequence[Asked] = forms.read_list(given, "input", context, read)
        else:
            texts = forms.read_texts(request.input, "input", context)
    except InvalidRequest as error:
        raise error.about("input") from None
    return _embeddings(request, texts, exchange)


def _embeddings(request: EmbeddingsFields, texts: Sequence[Asked], exchange: HttpExchange) -> HttpWork:
    field = "encoding_format" if request.encoding_format else "embedding_type"
    exchange.client = request.user or ""
    encoder = exchange.choose(request.model, None if request.outputs else TextTask.EMBED, texts)
    facts, normalized = encoder.facts, request.normalized
    options = forms.options_of(request, encoder, outputs=request.outputs)
    options = forms.cut_to(options, request.truncate_prompt_tokens, encoder)
    packing = packing_named(request.encoding_format or request.embedding_type, field)
    unit_length = facts.unscaled if normalized is None else normalized
    outputs = options.outputs or (facts.outputs[:1] if request.outputs else ())
    form = EmbeddingsForm(listed_name(encoder), packing, unit_length, outputs, bool(normalized), facts.ranges)
    return TextWork(encoder, texts, partial(_written, form), options)


def _written(form: EmbeddingsForm, encoded: Encoded) -> Listing | HttpResponse:
    """Return the vectors in the form that the request states. Raises Unsupported if there is one for each token and `outputs` do not name them."""
    vectors = encoded.vectors
    if encoded.written is not None:
        return _written_one(form.model, encoded.counts[0], encoded.written)
    if form.outputs:
        return _written_outputs(form, encoded)
    if vectors.ndim != 2:
        raise Unsupported(f"model {form.model!r} gives a vector for each token of a text: POST /encode has them")
    if len(vectors) == 1 and form.packing is Packing.FLOAT and not encoded.truncated[0]:
        vector = unit_vectors(vectors[0]) if form.unit_length else vectors[0]
        return _written_one(form.model, encoded.counts[0], written_numbers(vector))

    def items(start: int, stop: int) -> list[Any]:
        part = unit_vectors(vectors[start:stop]) if form.unit_length else vectors[start:stop]
        found = zip(range(start, stop), packed(part, form.packing, form.ranges), strict=True)
        return [{"object": "embedding", "index": index, "embedding": vector} for index, vector in found]

    return listing(_lead(form.model, encoded), "data", len(vectors), vectors.shape[1], items)


@lru_cache(maxsize=64)
def _plain_writer(model: str, packing: str, unit_length: bool) -> Callable[[Encoded], Listing | HttpResponse]:
    return partial(_written, EmbeddingsForm(model, Packing(packing), unit_length))


_ONE = b'{"object":"list","model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d},"data":[{"object":"embedding","index":0,"embedding":%b}]}'


def _written_one(model: str, count: int, numbers: bytes) -> HttpResponse:
    """Return the same as `_written` does for one vector, whose `numbers` are written already, of a text with `count` tokens."""
    return HttpResponse(200, [JSON_HEADER], _ONE % (_quoted(model), count, count, numbers))


@lru_cache(maxsize=64)
def _quoted(model: str) -> bytes:
    return msgspec.json.encode(model)


def _lead(model: str, encoded: Encoded) -> EmbeddingsLead:
    lead: EmbeddingsLead = {"object": "list", "model": model, "usage": usage_of(encoded)}
    if cut := encoded.cut:
        lead["truncated"] = cut
    return lead


def _written_outputs(form: EmbeddingsForm, encoded: Encoded) -> Listing:
    """Return what the request's `outputs` name of each text. Vectors of texts and of tokens have the requested form."""

    def vectors(found: NDArray[Any], unit_length: bool, ranges: NDArray[Any] | None = None) -> list[Any]:
        return packed(unit_vectors(found) if unit_length else found, form.packing, ranges)

    def item(index: int) -> NumberedVector:
        made: NumberedVector = {"object": "embedding", "index": index}
        for output, found in encoded.outputs(form.outputs, index).items():
            if output is TextOutput.DENSE:
                made["embedding"] = vectors(found[None], form.unit_length, form.ranges)[0]
            elif output is TextOutput.SPARSE:
                made["sparse"] = sparse_vector(found)
            else:
                made["tokens"] = vectors(found, form.unit_tokens)
        return made

    largest = encoded.vectors[0].size + sum(max(each.size for each in found) for found in encoded.further.values())

    def items(start: int, stop: int) -> list[NumberedVector]:
        return list(map(item, range(start, stop)))

    return listing(_lead(form.model, encoded), "data", len(encoded.vectors), largest, items)


class OpenAI(TextApi):
    """The endpoints of OpenAI: vectors, and the list of the models."""

    def __init__(self, context: EmbeddingContext) -> None:
        pages = [
            TextPage("get", "/v1/models", "List the models of texts", TextModelList, self.list_models),
            TextPage("get", "/v1/models/{model}", "Describe a model of texts", TextModelCard, self.show_model),
        ]
        super().__init__(context, OpenAIError, [embeddings], pages)

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints, at last one of whatever the others do not take."""
        unknown = HttpEndpoint(ANY, UNKNOWN, answered(self.refuse_path), refuse=self.texts[0].refusal)
        return [*super().endpoints(), unknown]

    async def list_models(self, call: AsgiCall) -> HttpResponse:
        """Return the list of the models."""
        cards = [model_card(encoder, self.context.since) for encoder in self.context.encoders.values()]
        return json_response(TextModelList(object="list", data=cards))

    async def show_model(self, call: AsgiCall) -> HttpResponse:
        """Return the description of one model. Raises ModelNotFound."""
        return json_response(model_card(self.context.encoder(call.path["model"]), self.context.since))

    async def refuse_path(self, request: Request) -> Response:
        """Refuse a path that does not exist, and name those that do."""
        self.context.counts.refused("", NAME, 404)
        known = listed(request.app.routes, "/v1/")
        message, kind = f"{request.url.path}: unknown path; available: {known}", "invalid_request_error"
        error: OpenAIErrorValue = {"message": message, "type": kind, "param": None, "code": "unknown_url"}
        return as_response(identified(json_response({"error": error}, status=404), request.headers.raw))


def model_card(encoder: Encodes, since: int) -> TextModelCard:
    """Return the description of a model, which was loaded at `since`, in seconds since 1970."""
    card: TextModelCard = {
        "id": listed_name(encoder),
        "object": "model",
        "created": since,
        "owned_by": (encoder.facts.id or listed_name(encoder)).rpartition("/")[0] or "weir",
        "ready": encoder.facts.ready(),
        "dimensions": encoder.dimensions,
        "max_length": encoder.max_length,
    }
    if encoder.facts.use is not None:
        use = encoder.facts.use()
        card["workers"], card["threads_per_worker"], card["memory_bytes"] = use
    return card
