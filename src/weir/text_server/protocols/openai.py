"""OpenAI's endpoints: POST /v1/embeddings, GET /v1/models. Jina's fields are read, too. infinity.py has the same without /v1.

A text that is longer than the model reads is cut, unless the settings refuse it. The response names the texts that were cut in `truncated`, and their number
in the header X-Weir-Truncated. OpenAI itself refuses such texts.
"""

import time
from collections.abc import Sequence
from functools import lru_cache
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
    packed,
    packing_named,
    unit_vectors,
    written_numbers,
)
from weir.text_models.texts import TOO_LONG, Ids, Outputs, PlainText, TextOptionFields, TextOutput
from weir.text_server.exchange import (
    EmbeddingContext,
    SparseVector,
    TextExchange,
    cut_to,
    each_output,
    listed_name,
    options_of,
    read_object,
    read_texts,
    sparse_vector,
    truncated_places,
)
from weir.text_server.http import ErrorForm, Listing, TextApi, TextCall, TextPage, TextProtocol, listing
from weir.text_server.texts import Encoded, Encodes, TextTask, Truncated
from weir.wire.schema import any_of, wrong_field


def wrong(message: str, field: str = "") -> InvalidRequest:
    """Return the InvalidRequest for the field `field`."""
    return InvalidRequest(message).about(field)


def _error_document(error: BaseException, identity: Any, development: bool) -> OpenAIError:
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    code = "context_length_exceeded" if TOO_LONG in details else None
    return openai_error(error, code=code, development=development)


OPENAI_ERRORS = ErrorForm(_error_document)


def no_such_path(path: str, known: str) -> HttpResponse:
    """Return the answer for a path that does not exist. `known` lists the paths that exist."""
    document: OpenAIErrorValue = {
        "message": f"{path}: unknown path; available: {known}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url",
    }
    return json_response({"error": document}, status=404)


NAME = "openai"
UNKNOWN = "/v1/{path:path}"
_SOME = Meta(min_length=1)
_NO = Meta(extra_json_schema={"enum": [False, None]})
_LONGEST_USER = 512  # characters, as the latest users are kept in memory


CutTo = Annotated[
    int | None,
    Meta(description="cuts texts to so many tokens, special ones included; -1: to those that the model reads"),
]


class JinaText(Struct, forbid_unknown_fields=True):
    """A text as Jina's clients may send it."""

    text: PlainText


class EmbeddingsRequest(TextOptionFields, forbid_unknown_fields=True):
    """A request for the vectors of texts. A field that is null counts as not given."""

    input: Annotated[
        Any,
        any_of(
            PlainText,
            Annotated[list[Annotated[Any, any_of(PlainText, JinaText)]], _SOME],
            Ids,
            Annotated[list[Ids], _SOME],
        ),
    ]
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
    modality: Annotated[str | None, Meta(extra_json_schema={"enum": ["text", None]})] = None
    # Fields of OpenAI's clients, or of programs for several servers, that do not affect the vectors.
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None


class NumberedVector(TypedDict):
    """What was made of one text: its vector, and with `outputs` those alone that they name."""

    object: Literal["embedding"]
    index: int
    embedding: NotRequired[PackedVector]
    sparse: NotRequired[SparseVector]
    tokens: NotRequired[list[PackedVector]]


class EmbeddingsForm(NamedTuple):
    """How the vectors of a request are written."""

    packing: Packing
    unit_length: bool  # of the vectors of texts
    outputs: tuple[TextOutput, ...] = ()
    unit_tokens: bool = False  # whether the vectors of tokens have length 1, too
    ranges: NDArray[Any] | None = None  # see TextFacts


class TokenUsage(TypedDict):
    """How many tokens the texts have."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsLead(TypedDict):
    """What is answered in addition to the vectors."""

    object: Literal["list"]
    model: str
    usage: TokenUsage
    truncated: NotRequired[Truncated]


class EmbeddingsAnswer(EmbeddingsLead):
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


class OpenAI(TextApi):
    """The endpoints of OpenAI: vectors, and the list of the models."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._since = int(time.time())
        summary, example = "Encode texts, as OpenAI does", {"input": ["First do it", "then do it right"]}
        embeddings = TextCall(OPENAI, summary, EmbeddingsRequest, example, EmbeddingsAnswer, TextTask.EMBED)
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
        cards = [model_card(encoder, self._since) for encoder in self.context.encoders.values()]
        return json_response(TextModelList(object="list", data=cards))

    async def show_model(self, call: AsgiCall) -> HttpResponse:
        """Return the description of one model. Raises ModelNotFound."""
        return json_response(model_card(self.context.encoder(call.path["model"]), self._since))

    async def refuse_path(self, request: Request) -> Response:
        """Answer a path that does not exist."""
        self.context.counts.refused("", NAME, 404)
        answer = no_such_path(request.url.path, listed(request.app.routes, "/v1/"))
        return as_response(identified(answer, request.headers.raw))


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


class OpenAIProtocol(TextProtocol):
    """OpenAI's protocol for embeddings; see TextProtocol."""

    name = NAME
    field, errors = "input", OPENAI_ERRORS
    paths: Sequence[str] = ("/v1/embeddings",)

    def read(self, exchange: TextExchange, headers: Headers, body: bytes) -> None:
        """Read the body into `exchange`. Raises InvalidRequest with the field, and ModelNotFound."""
        if (plain := _read_plain(body)) is not None:
            exchange.texts = [plain.input]
            exchange.encoder = exchange.context.encoder(plain.model, TextTask.EMBED)
            is_json, unscaled = plain.encoding_format == "float", exchange.encoder.facts.unscaled
            exchange.as_json = is_json and not unscaled
            exchange.form = _PLAIN_FORMS[is_json, unscaled]
            return
        request = read_body(body)
        try:
            exchange.texts = read_texts(request.input, "input", exchange.context)
        except InvalidRequest as error:
            raise error.about("input") from None
        packing = request.encoding_format or request.embedding_type
        field = "encoding_format" if request.encoding_format else "embedding_type"
        exchange.client = request.user or ""
        task = None if request.outputs else TextTask.EMBED
        exchange.encoder = encoder = exchange.context.encoder(request.model or "", task)
        exchange.options = options_of(request, encoder, outputs=request.outputs)
        cut_to(exchange, request.truncate_prompt_tokens)
        outputs = exchange.options.outputs or (encoder.facts.outputs[:1] if request.outputs else ())
        unit_length = encoder.facts.unscaled if request.normalized is None else request.normalized
        exchange.form = EmbeddingsForm(
            packing_named(packing, field), unit_length, outputs, bool(request.normalized), encoder.facts.ranges
        )

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing | HttpResponse:
        """Return the vectors in the requested `encoding_format`, with length 1 unless `normalized` is false. Raises Unsupported if there is one for each token and `outputs` do not name them."""
        if encoded.written is not None:
            return _written_one(exchange.listed_model, encoded.counts[0], encoded.written)
        if exchange.form.outputs:
            return _written_outputs(exchange.listed_model, exchange.form, encoded)
        if encoded.vectors.ndim != 2:
            rule = f"model {exchange.model!r} gives a vector for each token of a text: POST /encode has them"
            raise Unsupported(rule)
        form = exchange.form
        if len(encoded.vectors) == 1 and form.packing is Packing.FLOAT and not encoded.truncated[0]:
            vector = unit_vectors(encoded.vectors[0]) if form.unit_length else encoded.vectors[0]
            return _written_one(exchange.listed_model, encoded.counts[0], written_numbers(vector))
        return _written(exchange.listed_model, exchange.form, encoded)


OPENAI = OpenAIProtocol()


_PLAIN_FORMS = {
    (is_json, unit_length): EmbeddingsForm(Packing.FLOAT if is_json else Packing.BASE64, unit_length)
    for is_json in (True, False)
    for unit_length in (True, False)
}
_ONE = b'{"object":"list","model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d},"data":[{"object":"embedding","index":0,"embedding":%b}]}'


def _written_one(model: str, count: int, numbers: bytes) -> HttpResponse:
    """Return the same as `_written` does for one vector, whose `numbers` are written already, of a text with `count` tokens."""
    return HttpResponse(200, [JSON_HEADER], _ONE % (_quoted(model), count, count, numbers))


@lru_cache(maxsize=64)
def _quoted(model: str) -> bytes:
    return msgspec.json.encode(model)


def _written(model: str, form: EmbeddingsForm, encoded: Encoded) -> Listing:
    vectors = encoded.vectors

    def items(start: int, stop: int) -> list[Any]:
        part = unit_vectors(vectors[start:stop]) if form.unit_length else vectors[start:stop]
        found = zip(range(start, stop), packed(part, form.packing, form.ranges), strict=True)
        return [{"object": "embedding", "index": place, "embedding": vector} for place, vector in found]

    return listing(_lead(model, encoded), "data", len(vectors), vectors.shape[1], items)


def _lead(model: str, encoded: Encoded) -> EmbeddingsLead:
    tokens = sum(encoded.counts)
    lead: EmbeddingsLead = {
        "object": "list",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if cut := truncated_places(encoded):
        lead["truncated"] = cut
    return lead


def _written_outputs(model: str, form: EmbeddingsForm, encoded: Encoded) -> Listing:
    """Return what the request's `outputs` name of each text. Vectors of texts and of tokens have the requested form."""

    def vectors(found: NDArray[Any], unit_length: bool, ranges: NDArray[Any] | None = None) -> list[Any]:
        return packed(unit_vectors(found) if unit_length else found, form.packing, ranges)

    def item(place: int) -> NumberedVector:
        made: NumberedVector = {"object": "embedding", "index": place}
        for output, found in each_output(encoded, form.outputs, place).items():
            if output is TextOutput.DENSE:
                made["embedding"] = vectors(found[None], form.unit_length, form.ranges)[0]
            elif output is TextOutput.SPARSE:
                made["sparse"] = sparse_vector(found)
            else:
                made["tokens"] = vectors(found, form.unit_tokens)
        return made

    largest = encoded.vectors[0].size + sum(max(each.size for each in found) for found in encoded.further.values())
    return listing(
        _lead(model, encoded),
        "data",
        len(encoded.vectors),
        largest,
        lambda start, stop: list(map(item, range(start, stop))),
    )


def read_body(body: bytes) -> EmbeddingsRequest:
    """Return the request that a body is. Raises InvalidRequest with the field."""
    given = read_object(body)
    if "input" not in given:
        rule = "input: is missing, must be a text, a list of texts, a list of token ids, or a list of such"
        raise wrong(rule, "input")
    try:
        request = msgspec.convert(given, EmbeddingsRequest)
    except msgspec.ValidationError as error:
        field, message = wrong_field(given, EmbeddingsRequest, error)
        raise wrong(message, field) from None
    for name in ("late_chunking", "return_multivector"):
        if getattr(request, name):
            raise wrong(f"{name}=true: must be false: a text has one vector of its own here", name)
    if request.modality not in (None, "text"):
        raise wrong(f"modality={brief(request.modality)}: must be text", "modality")
    if request.task is not None and request.input_type is not None:
        raise wrong("task, input_type: only one of them may be given", "task")
    request.input_type = request.input_type or request.task
    request.truncation_direction = request.truncation_direction or request.truncation_side
    if request.user and len(request.user) > _LONGEST_USER:
        raise wrong(f"user: has {len(request.user)} characters, must have at most {_LONGEST_USER}", "user")
    request.dimensions = request.dimensions or None  # infinity's client sends 0 for all
    if request.dimensions is not None and request.dimensions < 1:
        raise wrong(f"dimensions={request.dimensions}: must be 1 or more", "dimensions")
    return request
