"""The HTTP endpoints of bert-as-service: POST /encode, GET /status/server and /status/client, POST /terminate.

The status has the field names of bert-as-service, for its clients and dashboards, and some fields of Weir.

The body of POST /encode is JSON, msgpack or a form. A text that is longer than the model reads is cut, unless the settings refuse it. The response names the
texts that were cut in `truncated`, and their number in the header X-Weir-Truncated.
"""

import asyncio
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from urllib.parse import unquote_to_bytes
from uuid import uuid4

import msgspec
import numpy
from msgspec import Meta, Struct
from numpy.typing import NDArray

from weir._version import __version__
from weir.errors import InvalidRequest, UnsupportedMediaType, brief
from weir.frontends.http.asgi import AsgiCall
from weir.images import Picture
from weir.messages import JSON, MSGPACK
from weir.protocols import HttpSettings
from weir.protocols.access import Control
from weir.protocols.response import NO_STORE, Headers, HttpResponse, accept_of, error_value, json_response
from weir.serving.handle import ModelHandle
from weir.text_models import Pooling
from weir.text_models.packing import packed
from weir.text_models.texts import Ids, Text, TextOptionFields, Words
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork
from weir.text_server.http import (
    ErrorForm,
    HttpExchange,
    HttpWork,
    Listing,
    TextApi,
    TextEndpoint,
    TextHead,
    TextPage,
    listing,
)
from weir.text_server.metrics import TextClients
from weir.text_server.pictures import Asked, Part, has_pictures, read_image
from weir.text_server.text_model import ServedTextModel, TextModelSpec
from weir.text_server.texts import Encoded, Encodes, TextTask, Truncated, VisionFacts
from weir.wire.schema import any_of
from weir.wire.status import http_code
from weir.wire.values import DECODE, refuse_names, uncollected, without_nul, words_without_nul

# The version of bert-as-service that is imitated; its clients compare it with their own version.
STOCK_VERSION = "1.10.0"

# The numbers of the poolings in bert-as-service's enumeration, as its responses have them.
STOCK_POOLING = {
    Pooling.NONE: 0, Pooling.MAX: 1, Pooling.MEAN: 2, Pooling.MEAN_MAX: 3, Pooling.CLS: 4, Pooling.SEP: 5, Pooling.POOLER: 6,
    Pooling.CLASSIFICATION: 7, Pooling.REGRESSION: 8,
}  # fmt: skip


@dataclass(eq=False)
class Status:
    """Describes a server of the text models `served`, by name. `more` returns further fields of the configuration, which go before these."""

    served: Mapping[str, Encodes]
    clients: TextClients
    more: Callable[[], Mapping[str, Any]] = dict
    started: datetime = field(default_factory=lambda: datetime.now().astimezone())

    def config(self, client: str = "") -> dict[str, Any]:
        """Return the server's configuration. `client` is the identity of the caller, which the response repeats."""
        first, served = next(iter(self.served.values())), self.served.items()
        return {
            "client": client,
            "server_version": STOCK_VERSION,
            "weir_version": __version__,
            "python_version": platform.python_version(),
            "server_start_time": str(self.started),
            "server_current_time": str(datetime.now().astimezone()),
            "max_seq_len": first.max_length,
            "show_tokens_to_client": False,
            "models": {name: {"dimensions": each.dimensions, "max_seq_len": each.max_length} for name, each in served},
            **self.more(),
        }

    def server_status(self, client: str = "") -> dict[str, Any]:
        """Return the configuration and, in the field `statistic`, the statistics of requests."""
        return {**self.config(client), "statistic": self.clients.statistics()}

    def client_status(self) -> dict[str, Any]:
        """Return the clients that are remembered, the one that sent the latest request first."""
        return {"num_active_client": self.clients.active, "clients": self.clients.table()}


ALL = 1.0  # the fraction of a GPU's memory for a worker without a limit


def stock_fields(
    service: ModelHandle,
    spec: TextModelSpec,
    model: ServedTextModel,
    http: HttpSettings,
    ports: tuple[int, int] | None,
    *,
    show_tokens: bool,
) -> Mapping[str, Any]:
    """Return the fields that bert-as-service shows of its server, for the first model. `ports` are those of ZeroMQ for requests and responses, if open.

    A field for something that Weir does not have is empty, with the type of the field: Weir has no sockets between its parts, and loads neither
    TensorFlow nor libzmq. Null stands for ports that are not open, for poolings without a number in bert-as-service, and for `tuned_model_dir`, which
    was null there unless it was set.
    """
    text, computing, recipe = spec.text, spec.computing, model.recipe
    port, port_out = ports or (None, None)
    return {
        "status": 200,
        "model_dir": str(spec.directory),
        "tuned_model_dir": None,
        "ckpt_name": model.weights_file.name,
        "config_name": "config.json",
        "graph_tmp_dir": str(model.cache),
        "cased_tokenization": model.cased,
        "pooling_layer": list(recipe.layers),
        "pooling_strategy": None if recipe.joined else STOCK_POOLING.get(recipe.pooling),
        "mask_cls_sep": recipe.mask_special,
        "no_special_token": not (text.special_tokens and text.word_special_tokens),
        "no_position_embeddings": not recipe.positions,
        "fixed_embed_length": text.fixed_length,
        "show_tokens_to_client": show_tokens,
        "port": port,
        "port_in": port,
        "port_out": port_out,
        "http_port": http.port,
        "http_max_connect": http.max_connections,
        "cors": " ".join(http.cors_origins),
        "num_worker": service.control.worker_count,
        "num_process": service.control.worker_count + 1,
        "num_concurrent_socket": 0,
        "max_batch_size": service.facts.batching.max_batch_size,
        "priority_batch_size": service.facts.batching.small_request_size,
        "prefetch_size": service.control.workers.pipeline_depth - 1,
        "cpu": computing.device_map == ["cpu"],
        "device_map": computing.device_map,
        "gpu_memory_fraction": computing.gpu_memory_fraction or ALL,
        "fp16": computing.precision == "fp16",
        "xla": computing.compile,
        "verbose": logging.getLogger("weir").isEnabledFor(logging.DEBUG),
        "tensorflow_version": [],
        "pyzmq_version": "",
        "zmq_version": "",
        "ventilator -> worker": [],
        "ventilator <-> sink": "",
        "worker -> sink": "",
    }


def client_fields(whose: str, clients: Sequence[Mapping[str, Any]], http: HttpSettings) -> dict[str, Any]:
    """Return the fields that a client of bert-as-service shows of itself, for the client `whose`. `clients` are those that are remembered.

    No request is pending, as an HTTP client waits for each response.
    """
    own = next((client for client in clients if client["identity"] == whose), None)
    return {
        "identity": whose,
        "num_request": 0 if own is None else own["num_request"],
        "num_pending_request": 0,
        "pending_request": [],
        "output_fmt": "list",
        "port": http.port,
        "port_out": http.port,
        "server_ip": http.host,
        "client_version": STOCK_VERSION,
        "timeout": -1,
        "status": 200,
    }


_FORM = "application/x-www-form-urlencoded"
_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_JSON = ("", "*/*", "application/json", "text/json")
_PIECE = 64 << 10  # characters of a form that are decoded at once
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class EncodeBody(TextOptionFields, forbid_unknown_fields=True):
    """A request for the vectors of texts."""

    texts: Annotated[list[Annotated[Any, any_of(Part, Words, Ids)]], Meta(extra_json_schema={"minItems": 1})]
    id: Any = None
    is_tokenized: Annotated[bool | None, Meta(description="every text is a list of words")] = None
    pairs: Annotated[bool | None, Meta(description="every text is a list of two that belong together")] = None
    model: Annotated[str | None, Meta(description="the first one if it is not given")] = None
    show_tokens: Annotated[bool | None, Meta(description="the answer has the tokens too")] = None


class EncodeLead(TypedDict):
    """The fields of a response in addition to the vectors. `id` is that of the request."""

    id: Any
    status: Literal[200]
    truncated: NotRequired[Truncated]
    tokens: NotRequired[list[list[str]]]


class EncodeResponse(EncodeLead):
    """The vectors of texts."""

    result: Annotated[list[Any], Meta(description="for each text a vector, or a list with one for each token")]


class EncodeError(TypedDict):
    """The body of an error. `status` is that of HTTP."""

    id: Any
    type: str
    description: str
    status: int
    details: NotRequired[Any]


class EndNotice(TypedDict):
    """That the server ends."""

    status: Literal[200]
    description: str


def read_document(body: bytes, content_type: str, context: EmbeddingContext) -> dict[str, Any]:
    """Return the object that a body of JSON, msgpack or a form holds; its fields are not checked. Raises InvalidRequest and UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media == _FORM and not body.lstrip().startswith(b"{"):  # curl -d sends JSON with this content type, too
        return _read_form(body, context)
    if media in _MSGPACK:
        document = _unpacked(body)
    elif media in _JSON or media == _FORM or media.endswith("+json"):
        document = forms.read_json(body, clean=True)
    else:
        rule = f"Content-Type {content_type!r}: must be application/json, application/msgpack or {_FORM}"
        raise UnsupportedMediaType(rule)
    if not isinstance(document, dict):
        raise InvalidRequest("body: must be an object with id and texts")
    return document


def _unpacked(body: bytes) -> Any:
    refuse_names(body, MSGPACK)
    try:
        with uncollected(len(body)):
            return DECODE[MSGPACK](body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: is not msgpack ({error})") from error


def _texts(fields: EncodeBody, context: EmbeddingContext) -> list[Asked]:
    def read(text: Any, where: str) -> Asked:
        if fields.pairs:
            return _pair(text, where)
        if isinstance(text, (dict, Picture)):
            return forms.read_part(text, where, context)
        return forms.read_text(_cleaned(text), where, fields.is_tokenized)

    return forms.read_list(fields.texts, "texts", context, read)


def _cleaned(text: Any) -> Any:
    """Return a text or a list of words without the characters that bert-as-service removes."""
    if isinstance(text, str):
        return without_nul(text)
    return words_without_nul(text) if isinstance(text, list) and text and isinstance(text[0], str) else text


def _pair(text: Any, where: str) -> Text:
    if isinstance(text, list) and len(text) == 2:
        return forms.check_text(_cleaned(text[0]), f"{where}[0]"), forms.check_text(_cleaned(text[1]), f"{where}[1]")
    raise InvalidRequest(f"{where}: must be two texts (pairs), is {brief(text)}")


def _read_form(body: bytes, context: EmbeddingContext) -> dict[str, Any]:
    """Return the object of a form. The field `texts` is repeated for each text; words of a text are separated by spaces. Raises InvalidRequest."""
    try:
        if body.count(b"&") > context.max_texts + 16:
            raise ValueError("too many fields")
        fields = _fields_of(body.decode())
    except (UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"body: is not a form ({error})") from error
    document: dict[str, Any] = {name: values[-1] for name, values in fields.items()}
    for name in ("is_tokenized", "pairs", "truncate", "show_tokens"):
        if name in document:
            document[name] = _truth(document[name], name)
    if "dimensions" in document and document["dimensions"].isdecimal() and len(document["dimensions"]) < 10:
        document["dimensions"] = int(document["dimensions"])
    if texts := fields.get("texts"):
        document["texts"] = [text.split() for text in texts] if document.get("is_tokenized") else texts
    return document


def _fields_of(form: str) -> dict[str, list[str]]:
    """Return the values of each field of a form, in order. Raises ValueError for a field without a value."""
    fields: dict[str, list[str]] = {}
    for each in form.split("&"):
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"bad query field: {brief(each)}")
        fields.setdefault(_unquoted(name), []).append(_unquoted(value))
    return fields


def _unquoted(text: str) -> str:
    """Decode a name or a value of a form. It is decoded in pieces, as `urllib.parse.unquote` would make a list of all escapes in memory."""
    text = text.replace("+", " ")
    parts, at = [], 0
    while at < len(text):
        end = at + _PIECE
        escape = text.find("%", max(at, end - 2), end)
        if escape > 0 and end < len(text):  # an escape is not cut
            end = max(escape, at + 1)
        parts.append(unquote_to_bytes(text[at:end]))
        at = end
    return b"".join(parts).decode(errors="replace")


def _truth(text: str, name: str) -> bool:
    if text.lower() not in _TRUTH:
        raise InvalidRequest(f"{name}={text[:80]!r}: must be true or false")
    return _TRUTH[text.lower()]


NAME = "encode"


def _error_document(identity: Any, error: BaseException, development: bool) -> EncodeError:
    value, status = error_value(error, development=development), http_code(error)
    document = EncodeError(id=identity, type=value["type"], description=value["message"], status=status)
    return document if value["details"] is None else {**document, "details": value["details"]}


@dataclass
class EncodeEndpoint(TextEndpoint):
    """The endpoint of bert-as-service. Errors have the id of the request."""

    name: str = NAME
    errors: ErrorForm = ErrorForm(partial(_error_document, None))

    def work(self, exchange: HttpExchange, headers: Headers, body: bytes) -> HttpWork:
        """See TextEndpoint. The body may be JSON, msgpack or a form. Raises UnsupportedMediaType, too."""
        fields = dict(headers)
        if (work := self.uploaded(exchange, headers, body)) is not None:
            return work
        document = read_document(body, fields.get(b"content-type", b"").decode("latin-1"), exchange.context)
        exchange.errors = ErrorForm(partial(_error_document, document.get("id")))
        work = self.work_of(exchange, document)
        if accept_of(fields.get(b"accept", b"").decode("latin-1"), [JSON, MSGPACK]) == JSON:
            return work
        return work.written(partial(_as_msgpack, document.get("id")))


_EXAMPLE = {"id": 1, "texts": ["First do it", "then do it right"]}


_ENCODE = "Encode texts and images, as bert-as-service and clip-as-service do"


@EncodeEndpoint("/encode", _ENCODE, _EXAMPLE, EncodeResponse, TextTask.EMBED, uploads=True)
def encode(request: EncodeBody, exchange: TextExchange) -> HttpWork:
    """Read a request, whose response is written as JSON."""
    texts = _texts(request, exchange.context)
    encoder = exchange.choose(request.model, TextTask.EMBED if has_pictures(texts) else None, texts)
    words, tokens = bool(request.is_tokenized), bool(request.show_tokens)
    options = forms.options_of(request, encoder, whole_words=words, want_tokens=tokens)
    return TextWork(encoder, texts, partial(_as_json, request.id), options)


# clip-as-service, its successor.


class ClipMatch(Struct):
    """A text, or an image by its URL, as a data: URL or in base64."""

    id: str | None = None
    text: str | None = None
    uri: str | None = None
    blob: str | None = None


class ClipDocument(ClipMatch):
    """A document, and those that are ranked by it."""

    matches: Annotated[list[ClipMatch], Meta(description="for /rank alone")] = []


class ClipRequest(Struct):
    """A request for the vectors of documents, or for their rankings."""

    data: Annotated[list[ClipDocument], Meta(min_length=1)]
    exec_endpoint: Literal["/", "/encode", "/rank"] = msgspec.field(default="/", name="execEndpoint")
    model: str | None = None


class ClipResponse(TypedDict):
    """The documents with their vectors, or with their matches, the best first."""

    data: list[dict[str, Any]]


_DOCUMENTS = {"data": [{"text": "First do it"}]}
_OF_DATA = ErrorForm(partial(_error_document, None), field="data")


_MATCHES = {"data": [{"text": "First do it", "matches": [{"text": "do it first"}, {"text": "rest"}]}]}
_ENCODE_CLIP, _RANK_CLIP = "Encode documents, as clip-as-service does", "Rank matches, as clip-as-service does"
_OF_CLIP = VisionFacts(scale=100.0, bias=0.0, independent=False)  # for a model that has none
_clip_endpoint = partial(TextEndpoint, response=ClipResponse, task=TextTask.EMBED, name=NAME, errors=_OF_DATA)


@_clip_endpoint("/rank", _RANK_CLIP, _MATCHES)
def rank(request: ClipRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for the rankings of the matches of documents."""
    context, documents = exchange.context, request.data
    lists: list[tuple[str, Sequence[ClipMatch]]] = [("data", documents)]
    lists += [(f"data[{index}].matches", each.matches) for index, each in enumerate(documents)]
    if empty := [name for name, found in lists if not found]:
        raise InvalidRequest("must not be empty").of(empty[0])
    context.check_count(sum(len(found) for _, found in lists), "data and matches")
    texts = [_content(each, f"{name}[{index}]", context) for name, found in lists for index, each in enumerate(found)]
    encoder = exchange.choose(request.model, TextTask.EMBED, texts, sees=True)
    ends = list(accumulate(len(found) for _, found in lists))

    def write(encoded: Encoded) -> HttpResponse:
        vectors, *others, _ = numpy.split(encoded.vectors, ends)
        vision = encoder.facts.vision or _OF_CLIP
        data = [
            {**_shown(document), "matches": _ranked(document.matches, vision.logits(vector[None], of_matches), vision)}
            for document, vector, of_matches in zip(documents, vectors, others, strict=True)
        ]
        return json_response({"header": {"execEndpoint": "/rank"}, "data": data})

    return TextWork(encoder, texts, write, lists=[(name, len(found)) for name, found in lists])


def _ranked(matches: Sequence[ClipMatch], logits: NDArray[Any], vision: VisionFacts) -> list[dict[str, Any]]:
    """Return the matches of a document with their scores, the best first."""
    values = zip(vision.probabilities(logits)[0].tolist(), vision.cosines(logits)[0].tolist(), strict=True)
    scores = [{"clip_score": {"value": share}, "clip_score_cosine": {"value": cosine}} for share, cosine in values]
    return [{**_shown(matches[each.index]), "scores": scores[each.index]} for each in forms.ranking(logits[0].tolist())]


@_clip_endpoint("/post", _ENCODE_CLIP, _DOCUMENTS)
def post(request: ClipRequest, exchange: HttpExchange) -> HttpWork:
    """Read a request for the vectors of documents, or for their rankings."""
    if request.exec_endpoint == "/rank":
        return rank.read(request, exchange)
    context, documents = exchange.context, request.data
    texts = forms.read_list(documents, "data", context, partial(_content, context=context))
    encoder = exchange.choose(request.model, TextTask.EMBED, texts)

    def items(vectors: NDArray[Any], start: int, stop: int) -> list[Any]:
        found = zip(documents[start:stop], packed(vectors[start:stop]), strict=True)
        return [{**_shown(each), "embedding": vector} for each, vector in found]

    def write(encoded: Encoded) -> Listing:
        vectors = encoded.vectors
        lead = {"header": {"execEndpoint": request.exec_endpoint}}
        return listing(lead, "data", len(vectors), vectors.shape[1], partial(items, vectors))

    return TextWork(encoder, texts, write)


def _shown(document: ClipMatch) -> dict[str, Any]:
    """Return what tells a document from others in a response."""
    is_url = document.uri is not None and not document.uri.startswith("data:")
    return {"id": document.id or uuid4().hex, "text": document.text, **({"uri": document.uri} if is_url else {})}


def _content(document: ClipMatch, where: str, context: EmbeddingContext) -> Asked:
    given = [name for name in ("text", "uri", "blob") if getattr(document, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{where}: must have one of text, uri and blob, has {', '.join(given) or 'none'}")
    if document.text is not None:
        return forms.check_text(document.text, f"{where}.text")
    return read_image(getattr(document, given[0]), f"{where}.{given[0]}", context.images)


class Encode(TextApi):
    """The endpoints of bert-as-service. `end` is called to end the server if `control` allows the caller to do so."""

    def __init__(self, context: EmbeddingContext, status: Status, *, control: Control, end: Callable[[], None]) -> None:
        self._status = status
        self._control = control
        self._end = end
        pages = [
            TextPage("get", "/status/server", "Show configuration and counts", dict[str, Any], self.server_status),
            TextPage("get", "/status/client", "Show the requests of each client", dict[str, Any], self.client_status),
            TextPage("post", "/terminate", "Finish accepted requests and stop the server", EndNotice, self.terminate),
        ]
        super().__init__(context, EncodeError, [encode, post, rank], pages)

    async def server_status(self, call: AsgiCall) -> HttpResponse:
        """Return the server's configuration and statistics."""
        client_name = TextHead(call.headers).client_name(call.peer)
        self.context.clients.received_command(client_name, frontend=NAME)
        return json_response(self._status.server_status(client_name), [NO_STORE])

    async def client_status(self, call: AsgiCall) -> HttpResponse:
        """Return what is known of the caller, with the fields of bert-as-service, and of all remembered clients."""
        client_name = TextHead(call.headers).client_name(call.peer)
        known = self._status.client_status()
        return json_response(client_fields(client_name, known["clients"], self.context.http) | known, [NO_STORE])

    async def terminate(self, call: AsgiCall) -> HttpResponse:
        """Make the server finish its accepted requests and end. Raises Unauthorized or Forbidden if the caller may not do so."""
        self._control.require_http(call.peer, call.headers)
        asyncio.get_running_loop().call_soon(self._end)
        notice = EndNotice(status=200, description="the server finishes what it has accepted, and ends")
        return json_response(notice, [NO_STORE])


def _as_json(identity: Any, encoded: Encoded) -> Listing:
    vectors = encoded.vectors
    numbers = vectors.size // len(vectors)
    return listing(_lead(identity, encoded), "result", len(vectors), numbers, lambda a, b: packed(vectors[a:b]))


def _as_msgpack(identity: Any, encoded: Encoded) -> HttpResponse:
    """Return the vectors as the bytes of an array, float32 little-endian, with its shape."""
    vectors = encoded.vectors.astype("<f4", order="C", copy=False)
    result = {"shape": list(vectors.shape), "result": vectors.data.cast("B")}
    document = {**_lead(identity, encoded), **result}
    return HttpResponse(200, [(b"content-type", MSGPACK.encode())], msgspec.msgpack.encode(document))


def _lead(identity: Any, encoded: Encoded) -> EncodeLead:
    document: EncodeLead = {"id": identity, "status": 200}
    if cut := encoded.cut:
        document["truncated"] = cut
    if encoded.tokens is not None:
        document["tokens"] = encoded.tokens
    return document
