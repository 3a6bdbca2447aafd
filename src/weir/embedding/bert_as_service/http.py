"""The HTTP endpoints of bert-as-service: POST /encode, GET /status/server and /status/client, POST /terminate.

The body of POST /encode is JSON, msgpack or a form. A text that is longer than the model reads is cut, unless the server was told not to; the answer
says which were, in `truncated` and in the header X-Weir-Truncated.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.routing import Route

from weir.embedding.bert_as_service.status import Status, client_fields
from weir.embedding.exchange import (
    EmbeddingContext,
    TextExchange,
    TextOptions,
    as_json,
    check_dimensions,
    check_text,
    read_field,
    read_json,
    read_text,
    truncated_places,
)
from weir.embedding.http import (
    DIMENSIONS_SCHEMA,
    IDS_SCHEMA,
    PROMPT_SCHEMA,
    TEXT_SCHEMA,
    TRUNCATE_SCHEMA,
    TRUNCATED_SCHEMA,
    WORDS_SCHEMA,
    HttpTexts,
    Listing,
    Schema,
    TextHead,
    described_call,
    described_page,
)
from weir.embedding.texts import Encoded, Text
from weir.errors import InvalidRequest, UnsupportedMediaType, brief
from weir.frontends.http.asgi import AsgiCall, Endpoint
from weir.messages import JSON, MSGPACK
from weir.protocols.access import Control
from weir.protocols.content_negotiation import accept_of
from weir.protocols.response import Headers, HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.status import http_code
from weir.wire.values import DECODE, refuse_names, uncollected, without_nul, words_without_nul

_FORM = "application/x-www-form-urlencoded"
_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_JSON = ("", "*/*", "application/json", "text/json")
_PIECE = 64 << 10  # characters
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def read_document(body: bytes, content_type: str, context: EmbeddingContext) -> dict[str, Any]:
    """Read a body as far as that it is an object, or a form as one. Raises InvalidRequest; UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media == _FORM and not body.lstrip().startswith(b"{"):  # curl -d says so of JSON too
        return _read_form(body, context)
    if media in _MSGPACK:
        document = _unpacked(body)
    elif media in _JSON or media == _FORM or media.endswith("+json"):
        document = read_json(body, clean="texts")
    else:
        raise UnsupportedMediaType(
            f"Content-Type {content_type!r}: must be application/json, application/msgpack or {_FORM}"
        )
    if not isinstance(document, dict):
        raise InvalidRequest("body: must be an object with id and texts")
    return document


def read_fields(document: dict[str, Any], exchange: TextExchange) -> str:
    """Read an object into `exchange`; return the name of the model. Raises InvalidRequest naming the field, or the place of the text, and the rule."""
    for name in document:
        if name not in _FIELDS:
            raise InvalidRequest(f"{str(name)[:80]!r}: there is no such field; there are {', '.join(_FIELDS)}")
    exchange.texts = _texts(document, exchange.context)
    more = {name: read_field(document, name, *kind) for name, kind in _MORE.items()}
    exchange.options = TextOptions(
        more["dimensions"], more["truncate"], more["prompt"], bool(document.get("is_tokenized")), more["show_tokens"]
    )
    return str(more["model"])


NAME = "encode"
# The other fields: the type of each, and what holds where it is missing.
_MORE: dict[str, tuple[type[Any], Any]] = {
    "model": (str, ""), "dimensions": (int, None), "truncate": (bool, None), "show_tokens": (bool, False),
    "prompt": (str, None),
}  # fmt: skip
_FIELDS = ("id", "texts", "is_tokenized", "pairs", *_MORE)


def _unpacked(body: bytes) -> Any:
    refuse_names(body, MSGPACK)
    try:
        with uncollected(len(body)):
            return DECODE[MSGPACK](body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: is not msgpack ({error})") from error


def _texts(document: dict[str, Any], context: EmbeddingContext) -> list[Text]:
    texts = document.get("texts")
    if not isinstance(texts, list):
        raise InvalidRequest("texts: is missing, must be a list" if texts is None else "texts: must be a list of texts")
    context.check_count(len(texts), "texts")
    tokenized = read_field(document, "is_tokenized", bool, None)
    if read_field(document, "pairs", bool, False):
        return [_pair(text, f"texts[{place}]") for place, text in enumerate(texts)]
    return [read_text(_cleaned(text), f"texts[{place}]", tokenized) for place, text in enumerate(texts)]


def _cleaned(text: Any) -> Any:
    """Return `text`, or words, without the characters that bert-as-service leaves out."""
    if isinstance(text, str):
        return without_nul(text)
    return words_without_nul(text) if isinstance(text, list) and text and isinstance(text[0], str) else text


def _pair(text: Any, where: str) -> Text:
    if isinstance(text, list) and len(text) == 2:
        return check_text(_cleaned(text[0]), f"{where}[0]"), check_text(_cleaned(text[1]), f"{where}[1]")
    raise InvalidRequest(f"{where}: must be two texts (pairs), is {brief(text)}")


def _read_form(body: bytes, context: EmbeddingContext) -> dict[str, Any]:
    """Read a form: `texts` comes once for each text; words of one text have a space between."""
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
    if "texts" in fields:
        document["texts"] = (
            [text.split() for text in fields["texts"]] if document.get("is_tokenized") else fields["texts"]
        )
    return document


def _fields_of(form: str) -> dict[str, list[str]]:
    """Return the values of each field, in order. ValueError for what is no field."""
    fields: dict[str, list[str]] = {}
    for field in form.split("&"):
        name, equals, value = field.partition("=")
        if not equals:
            raise ValueError(f"bad query field: {brief(field)}")
        fields.setdefault(_unquoted(name), []).append(_unquoted(value))
    return fields


def _unquoted(text: str) -> str:
    """Return what a name or a value says. Of a long one, piece by piece: Python's own way makes a list of all escapes of it."""
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


class EncodeProtocol:
    """How requests for vectors are written at POST /encode, see TextProtocol. The form of an answer is its content type."""

    name = NAME
    path = "/encode"

    def read(self, exchange: TextExchange, headers: Headers, body: bytes) -> None:
        """Read the body."""
        fields = dict(headers)
        document = read_document(body, fields.get(b"content-type", b"").decode("latin-1"), exchange.context)
        exchange.identity = document.get("id")
        model = read_fields(document, exchange)
        exchange.form = accept_of(fields.get(b"accept", b"").decode("latin-1"), [JSON, MSGPACK])
        exchange.encoder = encoder = exchange.context.encoder(model)
        check_dimensions(exchange.options.dimensions, encoder)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse | Listing:
        """Return the vectors in the form that was asked for."""
        write = _as_msgpack if exchange.form == MSGPACK else _as_json
        return write(exchange.identity, encoded)

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the answer for `error`: `type` and `description` as bert-as-service says it, with the code, and the `id`."""
        value = error_value(error, development=development)
        status = http_code(error)
        document = {"id": identity, "type": value["type"], "description": value["message"], "status": status}
        if value["details"] is not None:
            document["details"] = value["details"]
        return HttpResponse(status, error_headers(error), encode_safely(document))


ENCODE = EncodeProtocol()


class Encode:
    """The endpoints of bert-as-service. `end` has the server end, for those whom `control` lets."""

    def __init__(self, context: EmbeddingContext, status: Status, *, control: Control, end: Callable[[], None]) -> None:
        self._context = context
        self._status = status
        self._control = control
        self._end = end

    def routes(self) -> list[Route]:
        """Return the routes."""
        encode = HttpTexts(ENCODE, self._context)
        endpoint = partial(Endpoint, settings=self._context.http, refuse=encode.refusal)
        return [
            Route(ENCODE.path, endpoint(encode), methods=["POST"]),
            Route("/status/server", endpoint(self.server_status), methods=["GET"]),
            Route("/status/client", endpoint(self.client_status), methods=["GET"]),
            Route("/terminate", endpoint(self.terminate), methods=["POST"]),
        ]

    async def server_status(self, call: AsgiCall) -> HttpResponse:
        """Show the server's configuration and what it has been asked."""
        whose = TextHead(call.headers).whose(call.peer)
        self._context.clients.asked_about(whose, door=NAME)
        return _document(self._status.server_status(whose))

    async def client_status(self, call: AsgiCall) -> HttpResponse:
        """Show what is known of the caller, as bert-as-service does, and of all clients that are remembered."""
        whose = TextHead(call.headers).whose(call.peer)
        known = self._status.client_status()
        return _document(client_fields(whose, known["clients"], self._context.http) | known)

    async def terminate(self, call: AsgiCall) -> HttpResponse:
        """Have the server finish what it has accepted, and end: for who may control it."""
        self._control.require_http(call.peer, call.headers)
        asyncio.get_running_loop().call_soon(self._end)
        return _document({"status": 200, "description": "the server finishes what it has accepted, and ends"})


def _as_json(identity: Any, encoded: Encoded) -> Listing:
    vectors = encoded.vectors
    numbers = vectors.size // len(vectors)
    return Listing(_lead(identity, encoded), "result", len(vectors), numbers, lambda a, b: list(as_json(vectors[a:b])))


def _as_msgpack(identity: Any, encoded: Encoded) -> HttpResponse:
    """The vectors as the bytes of an array, for clients that can read them so."""
    vectors = encoded.vectors.astype("<f4", order="C", copy=False)
    document = _lead(identity, encoded) | {"shape": list(vectors.shape), "result": vectors.data.cast("B")}
    return HttpResponse(200, [(b"content-type", MSGPACK.encode())], msgspec.msgpack.encode(document))


def _lead(identity: Any, encoded: Encoded) -> dict[str, Any]:
    document: dict[str, Any] = {"id": identity, "status": 200}
    if cut := truncated_places(encoded):
        document["truncated"] = cut
    if encoded.tokens is not None:
        document["tokens"] = encoded.tokens
    return document


def _document(value: dict[str, Any]) -> HttpResponse:
    return HttpResponse(200, [(b"content-type", JSON.encode()), (b"cache-control", b"no-store")], encode_safely(value))


_ENCODE: Schema = {
    "type": "object",
    "required": ["texts"],
    "additionalProperties": False,
    "properties": {
        "id": {},
        "texts": {"type": "array", "minItems": 1, "items": {"oneOf": [TEXT_SCHEMA, WORDS_SCHEMA, IDS_SCHEMA]}},
        "is_tokenized": {"type": ["boolean", "null"], "description": "every text is a list of words"},
        "pairs": {"type": ["boolean", "null"], "description": "every text is a list of two that belong together"},
        "model": {"type": ["string", "null"]},
        "dimensions": DIMENSIONS_SCHEMA,
        "truncate": TRUNCATE_SCHEMA,
        "prompt": PROMPT_SCHEMA,
        "show_tokens": {"type": ["boolean", "null"]},
    },
    "examples": [{"id": 1, "texts": ["First do it", "then do it right"]}],
}  # fmt: skip
_RESULT: Schema = {
    "type": "object",
    "properties": {
        "id": {},
        "result": {"type": "array", "description": "for each text a vector, or a list with one for each token"},
        "status": {"const": 200},
        "truncated": TRUNCATED_SCHEMA,
        "tokens": {"type": "array", "items": WORDS_SCHEMA},
    },
}  # fmt: skip
_ENCODE_ERROR: Schema = {
    "type": "object",
    "properties": {
        "id": {}, "type": {"type": "string"}, "description": {"type": "string"}, "status": {"type": "integer"},
        "details": {},
    },
}  # fmt: skip


def bert_paths() -> Mapping[str, Any]:
    """Return the paths of bert-as-service's endpoints, described for OpenAPI."""
    facts = {"type": "object"}
    return {
        "/encode": {
            "post": described_call(
                "post_encode", "Encode texts, as bert-as-service does", _ENCODE, _RESULT, _ENCODE_ERROR
            )
        },
        "/status/server": {
            "get": described_page("get_status_server", "Show configuration and counts", facts, _ENCODE_ERROR)
        },
        "/status/client": {
            "get": described_page("get_status_client", "Show what clients have asked", facts, _ENCODE_ERROR)
        },
        "/terminate": {
            "post": described_page("post_terminate", "Finish what was accepted, and end", facts, _ENCODE_ERROR)
        },
    }
