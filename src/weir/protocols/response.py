"""HTTP responses, and their content types and compression: what the headers of a request declare, and what its response may use. How Weir's own protocol writes
errors and the results of a list of items, and errors in the form of OpenAI's API, for all endpoints that follow it: texts, models, files and batches.
"""

import asyncio
import gzip
import math
import sys
import traceback
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict

import msgspec

from weir.errors import (
    CapacityError,
    InvalidRequest,
    MethodNotAllowed,
    ModelError,
    ModelNotFound,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unsupported,
    UnsupportedMediaType,
    WeirError,
    bounded,
)
from weir.messages import JSON, MSGPACK, OCTETS, Dispatch, Trace
from weir.model import Model, is_tensor_model, overrides
from weir.wire.status import http_code
from weir.wire.values import UNWRITABLE

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_PREFERENCES = 64  # read of one header: each takes microseconds, and a head has room for thousands

# Content types that clients send by default although the body is JSON: none, any, and that of curl -d.
_READ_AS_JSON = frozenset(("", "*/*", "application/x-www-form-urlencoded", "text/json", JSON))
_READ_AS_MSGPACK = frozenset(("application/x-msgpack", "application/vnd.msgpack", MSGPACK))


def is_msgpack(content_type: str) -> bool:
    """Return whether a Content-Type is one of msgpack."""
    return media_of(content_type).strip().lower() in _READ_AS_MSGPACK


def read_types(model: type[Model], batch: bool) -> list[str]:
    """Return the content types that `model` reads; with `batch` only those that can hold a list of items."""
    if batch or is_tensor_model(model):
        return [JSON, MSGPACK]
    return list(dict.fromkeys((JSON, MSGPACK, OCTETS, *map(str.lower, model.content_types))))


def media_of(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0]


def write_types(model: type[Model], batch: bool, content_type: str) -> list[str]:
    """Return the content types of responses, the preferred one first.

    The preferred type is that of the request if every output can be written in it, else JSON. Every model that returns bytes can respond with octets, but
    only a model that declares `Output = bytes` does so by default.
    """
    offered = read_types(model, batch)
    content_type = media_of(content_type)
    if content_type == OCTETS:
        same = model.Output is bytes
    else:
        same = content_type in (JSON, MSGPACK) or overrides(model, "encode")
    preferred = content_type if same else JSON
    return [preferred, *(each for each in offered if each != preferred)]


def content_type_of(value: str, model: type[Model], batch: bool) -> str:
    """Return the canonical form of the `value` of a Content-Type header ("": no header).

    A multipart type keeps its parameters, because the model's `decode` needs the boundary. Raises UnsupportedMediaType naming the value and the types that
    the model reads.
    """
    media, _, parameters = value.partition(";")
    media = media.strip().lower()
    offered = read_types(model, batch)
    if media in offered:
        return f"{media}; {parameters.strip()}" if media.startswith("multipart/") and parameters.strip() else media
    if media in _READ_AS_JSON or media.endswith("+json"):
        return JSON
    if media in _READ_AS_MSGPACK:
        return MSGPACK
    raise UnsupportedMediaType(f"Content-Type {value!r}: must be one of {', '.join(offered)}")


def accept_of(value: str, offered: Sequence[str]) -> str:
    """Return the type of `offered` that the `value` of an Accept header prefers (RFC 9110, section 12.5.1); of equal ones the first.

    Raises UnsupportedMediaType naming the value and the offered types.
    """
    if value in ("", "*/*"):
        return offered[0]
    preferences = _preferences(value)
    best, best_weight = "", 0.0
    for candidate in offered:
        weight = _weight(candidate, preferences)
        if weight > best_weight:
            best, best_weight = candidate, weight
    if not best:
        raise UnsupportedMediaType(f"Accept {value!r}: responses are written as {', '.join(offered)}")
    return best


def weighted(value: str) -> dict[str, float]:
    """Return the names in a header like `gzip, zstd;q=0.5`, in lower case, with their weights, which are 1 by default.

    A weight that is not a number counts as 0. Names after the first MAX_PREFERENCES are ignored.
    """
    preferences: dict[str, float] = {}
    for part in value.split(",", MAX_PREFERENCES)[:MAX_PREFERENCES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if name:
            weights = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
            preferences[name] = _number(weights[0]) if weights else 1.0
    return preferences


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _preferences(value: str) -> dict[str, float]:
    preferences = weighted(value)
    for alias in _READ_AS_MSGPACK & preferences.keys():
        preferences.setdefault(MSGPACK, preferences[alias])
    return preferences


def _weight(candidate: str, preferences: dict[str, float]) -> float:
    family = candidate.partition("/")[0] + "/*"
    for name in (candidate, family, "*/*"):  # the most specific preference counts
        if name in preferences:
            return preferences[name]
    return 0.0


CODINGS = ("zstd", "gzip", "deflate")  # the best one first
_WINDOWS = {"gzip": 31, "deflate": 15}  # `wbits` of zlib, which selects the format
_MAX_WINDOW_LOG = 23  # 8 MiB: the largest zstd window over HTTP (RFC 9659, section 3)
# A gzip body may have several members, and a zstd body several frames. Each costs microseconds, however small it is. bgzip writes members
# of 64 KiB, so that this limit allows it 640 MB.
MAX_MEMBERS = 10_000
# Bytes given to the library at once. The pieces begin small, because it copies the bytes that follow a member in its piece.
_FIRST_PIECE, _LARGEST_PIECE = 512, 256 << 10


def coding_of(value: str) -> str:
    """Return the canonical form of the `value` of a Content-Encoding header; "" for no coding.

    Raises UnsupportedMediaType naming the value and the codings that are read.
    """
    coding = value.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding == "x-gzip":
        return "gzip"
    if coding not in CODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {value!r}: must be one of {', '.join(CODINGS)}, identity")
    return coding


def accepted_coding(value: str, offered: Sequence[str] = CODINGS) -> str:
    """Return the coding of `offered` that the `value` of an Accept-Encoding header prefers; "" if it allows none."""
    preferences = weighted(value)
    everything = preferences.get("*", 0.0)
    best = max(offered, key=lambda coding: preferences.get(coding, everything))
    return best if preferences.get(best, everything) > 0 else ""


def compress(data: bytes, coding: str) -> bytes:
    """Return `data` compressed with `coding`, one of CODINGS."""
    if coding == "zstd":
        return zstd.compress(data, level=1)
    if coding == "deflate":
        return zlib.compress(data, level=1)
    return gzip.compress(data, compresslevel=1, mtime=0)


def decompress(data: bytes, coding: str, max_size: int) -> bytes:
    """Return `data`, which is compressed with `coding`, decompressed.

    Raises TooLarge as soon as the result has more than `max_size` bytes, and InvalidRequest if `data` is damaged or cut short.
    """
    try:
        plain = _decompress(data, max_size + 1, coding)
    except (zlib.error, zstd.ZstdError, _Damaged) as error:
        raise InvalidRequest(f"body: is not {coding}, as Content-Encoding says ({error})") from error
    if len(plain) > max_size:
        raise TooLarge(f"body: must be at most {max_size} bytes after decompression (max_body_size)")
    return plain


class _Damaged(Exception):
    pass


class _Member(Protocol):
    """Reads one member of a gzip body, or one frame of a zstd body."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: memoryview, max_length: int, /) -> bytes: ...


def _member(coding: str) -> _Member:
    if coding == "zstd":
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    return zlib.decompressobj(wbits=_WINDOWS[coding])


def _decompress(data: bytes, limit: int, coding: str) -> bytes:
    """Return the first `limit` bytes, or all if there are fewer."""
    parts: list[bytes] = []
    rest, room, members = memoryview(data), limit, 0
    while rest and room > 0:
        members += 1
        if members > MAX_MEMBERS:
            raise _Damaged(f"more than {MAX_MEMBERS} {'frames' if coding == 'zstd' else 'members'}")
        member = _member(coding)
        size = _FIRST_PIECE
        while rest and room > 0 and not member.eof:
            piece = rest[:size]
            parts.append(member.decompress(piece, room))
            room -= len(parts[-1])
            rest = rest[len(piece) - len(member.unused_data) :]
            size = min(2 * size, _LARGEST_PIECE)
        if room > 0 and not member.eof:
            raise _Damaged("cut short")
    return b"".join(parts)


Headers = list[tuple[bytes, bytes]]

# Bytes that the errors of one list may take: each error, and all together. An error beyond that has a short message and no details.
ERROR_BYTES = 16 << 10
ERRORS_BYTES = 64 << 10
_SHORT_MESSAGE = 256  # characters

JSON_HEADER = (b"content-type", JSON.encode())
NO_STORE = (b"cache-control", b"no-store")


class HttpResponse(NamedTuple):
    """A complete response, except Content-Length and headers about the connection."""

    status: int
    headers: Headers
    body: bytes


def json_response(value: Any, headers: Iterable[tuple[bytes, bytes]] = (), status: int = 200) -> HttpResponse:
    """Return the response with `value` as JSON."""
    return HttpResponse(status, [JSON_HEADER, *headers], encode_safely(value))


def error_response(error: BaseException, model: str | None = None, *, development: bool = False) -> HttpResponse:
    """Return the response for `error`: its status, its JSON body, and Retry-After, Allow or WWW-Authenticate where due.

    `model` is the name of the requested model, if known. A traceback is shown only with `development`.
    """
    return HttpResponse(http_code(error), error_headers(error), error_body(error, model, development=development))


def error_headers(error: BaseException) -> Headers:
    """Return the headers of the response for `error`: Content-Type, and Retry-After, Allow or WWW-Authenticate where due."""
    headers = [JSON_HEADER]
    if isinstance(error, CapacityError):
        headers.append((b"retry-after", str(retry_after(error)).encode()))
    elif isinstance(error, MethodNotAllowed) and isinstance(error.details, dict):
        headers.append((b"allow", ", ".join(error.details.get("allow", [])).encode()))
    elif isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_body(error: BaseException, model: str | None = None, *, development: bool = False) -> bytes:
    """Return the JSON document `{"error": {"type", "message", "model", "details"}}` for `error`."""
    return encode_safely({"error": error_value(error, model, development=development)})


class ErrorValue(TypedDict):
    """The inner part of an error's document. `model` is the requested one, if known. What `details` hold depends on `type`."""

    type: str
    message: str
    model: str | None
    details: Any


def error_value(error: BaseException, model: str | None = None, *, development: bool = False) -> ErrorValue:
    """Return the inner part of the document for `error`. Its message has a bounded length."""
    if not isinstance(error, WeirError):
        return _internal(error, model, development)
    details = error.details
    if isinstance(error, CapacityError) and error.retry_after is not None and details is None:
        details = {"retry_after": round(error.retry_after, 6)}
    if isinstance(error, ModelError):
        details = _model_error_details(error, development)
    return {"type": type(error).__name__, "message": bounded(error.message), "model": model, "details": details}


def _internal(error: BaseException, model: str | None, development: bool) -> ErrorValue:
    """Return the value for an exception that is not Weir's: callers do not see the exception, only the log does."""
    details = {"traceback": "".join(traceback.format_exception(error))} if development else None
    message = bounded(f"{type(error).__name__}: {error}") if development else "internal error"
    return {"type": "InternalError", "message": message, "model": model, "details": details}


def _model_error_details(error: ModelError, development: bool) -> Any:
    details = dict(error.details) if isinstance(error.details, dict) else {}
    if error.original_type:
        details["original_type"] = error.original_type
    if development and error.remote_traceback:
        details["traceback"] = error.remote_traceback
    return details or error.details


def retry_after(error: CapacityError) -> int:
    """Return the value of Retry-After for `error`: whole seconds (RFC 9110, section 10.2.3), at least 1. The error's `details` have the exact time."""
    return max(1, math.ceil(error.retry_after or 0))


def encode_safely(value: Any) -> bytes:
    """Return `value` as JSON. A part that JSON cannot represent is written as its repr."""
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except UNWRITABLE:
        return msgspec.json.encode(json_able(value))


def json_able(value: Any, depth: int = 20) -> Any:
    """Return `value` with every part that JSON cannot represent, or that is nested deeper than `depth`, as its repr."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() < 63):
        return value
    if isinstance(value, dict) and depth:
        return {str(json_able(str(key))): json_able(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth:
        return [json_able(each, depth - 1) for each in value]
    try:
        return json_able(repr(value))
    except RecursionError:
        return "..."


def explain_headers(arrival: float, dispatch: Dispatch) -> Headers:
    """Return the headers that explain the batch of a request. It entered the queue at `arrival`. Ages and times are in seconds."""
    headers = [
        (b"x-batch-size", b"%d" % dispatch.rows),
        (b"x-batch-reason", dispatch.reason.name.lower().encode()),
        (b"x-batch-waiting", b"%d" % dispatch.waiting),
        (b"x-batch-oldest-age", b"%.6f" % dispatch.oldest_age),
        (b"x-batch-wakeup", dispatch.wakeup.name.lower().encode()),
        (b"x-queue-time", b"%.6f" % (dispatch.at - arrival)),
    ]
    if dispatch.limit is not None:
        headers.append((b"x-batch-limit", b"%d" % dispatch.limit))
    return headers


def start_headers(arrival: float, dispatch: Dispatch | None) -> Headers:
    """Return the header that says for how many seconds a request, which arrived at `arrival`, has waited for a worker to start;
    none if it has not."""
    return waited_headers(0.0 if dispatch is None else dispatch.started_for(arrival))


def waited_headers(seconds: float) -> Headers:
    """Return the header of a request that has waited `seconds` for a worker to start; none for 0."""
    return [(b"x-start-time", b"%.6f" % seconds)] if seconds else []


def echo_headers(head: Any) -> Headers:
    """Return the headers of the request that the response repeats: X-Request-Id."""
    return [] if head.request_id is None else [(b"x-request-id", head.request_id)]


def trace_headers(request: Any) -> Headers:
    """Return the header that names the span of `request`; empty if it is not traced."""
    trace = request.trace
    return [(b"traceparent", trace.traceparent.encode())] if type(trace) is Trace else []


LONG_COMPRESSION = 256 << 10  # bytes: compressing more would block the event loop for too long


async def compressed_off_loop(response: HttpResponse, coding: str) -> HttpResponse:
    """Return what `compressed` returns. A long body is compressed in a thread."""
    if len(response.body) > LONG_COMPRESSION:
        return await asyncio.to_thread(compressed, response, coding)
    return compressed(response, coding)


def compressed(response: HttpResponse, coding: str) -> HttpResponse:
    """Return `response` with its body compressed with `coding`."""
    headers = [*response.headers, (b"content-encoding", coding.encode()), (b"vary", b"accept-encoding")]
    return HttpResponse(response.status, headers, compress(response.body, coding))


def batch_body(
    outputs: Sequence[Any],
    accept: str,
    model: str,
    *,
    extra: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    development: bool = False,
) -> bytes:
    """Return the response body for a list: for each of `outputs`, in order, `{"output": ...}` or `{"error": ..., "code": ...}`.

    An output is a WeirError, or bytes that are already encoded as `accept` (JSON or msgpack). `extra` has more fields of an item, by its index.
    An error of more than ERROR_BYTES, and every error after ERRORS_BYTES, has a short message and no details.
    """
    encode = _ENCODERS[accept]
    errors = _ErrorsOfList(model, development)
    items: list[Any] = [
        {"error": errors.value(output), "code": http_code(output)}
        if isinstance(output, WeirError)
        else {"output": msgspec.Raw(output), **extra.get(index, {})}
        for index, output in enumerate(outputs)
    ]
    try:
        return encode(items)
    except UNWRITABLE:
        return encode([item if "output" in item else json_able(item) for item in items])


class _ErrorsOfList:
    """Writes the errors of one list within ERROR_BYTES for each and ERRORS_BYTES for all."""

    def __init__(self, model: str, development: bool) -> None:
        self._model = model
        self._development = development
        self._left = ERRORS_BYTES

    def value(self, error: WeirError) -> ErrorValue:
        """Return the inner part of the document for `error`."""
        value = error_value(error, self._model, development=self._development)
        if self._left > 0:
            size = len(encode_safely(value))
            if size <= ERROR_BYTES:
                self._left -= size
                return value
        return {**value, "message": bounded(error.message, _SHORT_MESSAGE), "details": None}


_ENCODERS = {JSON: msgspec.json.Encoder(enc_hook=repr).encode, MSGPACK: msgspec.msgpack.Encoder(enc_hook=repr).encode}


# OpenAI's codes where it has one; the other codes are named after our errors.
_CODES: dict[type[BaseException], str] = {
    ModelNotFound: "model_not_found",
    MethodNotAllowed: "method_not_allowed",
    Overloaded: "rate_limit_exceeded",
    Unauthorized: "invalid_api_key",
    TooLarge: "request_too_large",
    Unsupported: "unsupported",
    CapacityError: "service_unavailable",
    TimeoutError: "timeout",
}


class OpenAIErrorValue(TypedDict):
    """The inner part of an error's document. `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """The document of an error."""

    error: OpenAIErrorValue


def openai_error(error: BaseException, *, code: str | None = None, development: bool = False) -> OpenAIError:
    """Return `{"error": {"message", "type", "param", "code"}}` for `error`. `code` is its code, unless it is that of its class."""
    message = error_value(error, development=development)["message"]
    kind = next((of for each, of in _CODES.items() if isinstance(error, each)), None)
    value: OpenAIErrorValue = {
        "message": message,
        "type": _type_of(error),
        "param": _param_of(error),
        "code": code or kind,
    }
    return {"error": value}


def openai_error_response(error: BaseException, *, code: str | None = None, development: bool = False) -> HttpResponse:
    """Return the response for `error`; see `openai_error`."""
    document = openai_error(error, code=code, development=development)
    return HttpResponse(http_code(error), error_headers(error), encode_safely(document))


def _param_of(error: BaseException) -> str | None:
    """Return the field that is wrong, if the error is the request's."""
    if not isinstance(error, RequestError):
        return None
    return "model" if isinstance(error, ModelNotFound) else error.field or None


def _type_of(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "requests"
    return "invalid_request_error" if isinstance(error, RequestError) else "server_error"
