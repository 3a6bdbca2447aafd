"""Weir's own protocol: one item, or a list of items, for a model that the path names. docs/reference/http.md describes it.

The ASGI application and the fast path share this module. A RequestHead depends only on the bytes of the head, so it can be cached as long as the registry
and the settings stay the same. entries.py makes queue entries of bodies.
"""

import math
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from weir.errors import (
    InvalidRequest,
    MethodNotAllowed,
    ModelError,
    ModelNotFound,
    TooLarge,
    Unsupported,
    UnsupportedMediaType,
    WeirError,
)
from weir.messages import JSON, LONGEST_TIMEOUT, TRACE_FIELD_NAMES, Form, carry
from weir.protocols import HttpSettings
from weir.protocols.access import CALLER_HEADER, CLASS_HEADER
from weir.protocols.account import charge
from weir.protocols.entries import arrays_size, body_or_error, bytes_to_read, class_offset, item_entries, output_body
from weir.protocols.exchange import EventSource, Exchange, ItemsResponse, read_parts
from weir.protocols.offloading import written
from weir.protocols.response import (
    Headers,
    HttpResponse,
    accept_of,
    accepted_coding,
    batch_body,
    coding_of,
    content_type_of,
    error_body,
    error_response,
    explain_headers,
    start_headers,
    write_types,
)
from weir.serving import NAME_IN_PATH
from weir.serving.calls import StreamedCall
from weir.serving.handle import ModelHandle
from weir.wire.sse import CONTENT_TYPE
from weir.wire.tensors import text_size

if TYPE_CHECKING:
    from weir.serving.handle import Models

FRONTEND = "http"  # the name of the HTTP frontend in metrics and logs

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_NUMBER = re.compile(r"(?:[0-9]{1,12}\.?[0-9]{0,12}|\.[0-9]{1,12})(?:[eE][+-]?[0-9]{1,3})?")
_MAX_KEY_LENGTH = 256
MAX_REQUEST_ID_LENGTH = 256


class RequestOptions:
    """The options that the headers of an inference request may set, and the `form` that is made of them."""

    form: Form

    __slots__ = (
        "accept_coding", "caller", "carrier", "class_offset", "coding", "explain", "form", "key", "priority", "request_id", "route", "timeout",
    )  # fmt: skip

    def __init__(self, timeout: float, route: str = "") -> None:
        self.timeout = timeout  # seconds
        self.route = route  # the template of the path
        self.priority = 0
        self.class_offset = 0  # the part of `priority` that is due to the class of work
        self.caller = ""
        self.key: str | None = None
        self.explain = False
        self.request_id: bytes | None = None  # sent back with the response
        self.carrier: dict[str, str] | None = None  # the headers that name the caller's span, see messages.TRACE_FIELDS
        self.coding = ""  # compression of the body: gzip, zstd, deflate, or "" for none
        self.accept_coding = ""  # compression of a large response, or "" for none

    def made_form(self, content_type: str, accept: str) -> Form:
        """Return the form of a request for one item with these options."""
        return Form(
            self.timeout, content_type=content_type, accept=accept, key=self.key, priority=self.priority,
            frontend=FRONTEND, caller=self.caller, explain=self.explain, route=self.route,
        )  # fmt: skip

    def read(self, name: bytes, value: bytes) -> None:
        """Set the option of one header, if it has one; `name` is in lower case. Raises InvalidRequest or UnsupportedMediaType."""
        reader = _READERS.get(name)
        if reader is not None:
            reader(self, value.decode("latin-1"))


class RequestHead(RequestOptions):
    """The head of an inference request.

    `undecoded` means that the body goes to the worker undecoded, as one item of one row. The request in the queue is then simply
    `RequestBase(head.form, body, now)`. Every other body, and every compressed one (`coding`), goes through `entries.item_entries`.
    """

    __slots__ = ("accept", "batch", "content_type", "service", "stream", "undecoded")

    def __init__(self, service: ModelHandle, path: str, batch: bool) -> None:
        named = rf"(?<=.)/{re.escape(service.facts.name)}(?=[/:]|$)"  # in a path of its own, a model's name stays
        super().__init__(service.facts.settings.timeout, re.sub(named, "/{model}", path))
        self.service = service
        self.batch = batch  # the body is a list of items, each with a result of its own
        self.content_type = JSON
        self.accept = JSON
        self.stream = service.facts.streaming  # the response is a stream of events
        self.undecoded = not (batch or service.facts.needs_measure or service.facts.takes_tensors)


def read_head(
    registry: "Models", settings: HttpSettings, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> RequestHead | None:
    """Read the head of a request. `path` is percent-decoded and has no query; `headers` have names in lower case.

    Returns None if `path` is not a path of inference. Raises RequestErrors naming the header, its value and the rule; ModelNotFound; MethodNotAllowed;
    UnsupportedMediaType; and TooLarge if Content-Length exceeds `max_body_size`.
    """
    found = find_service(registry, path)
    return None if found is None else read_head_for(found[0], settings, method, path, headers, batch=found[1])


def read_head_for(
    service: ModelHandle,
    settings: HttpSettings,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    batch: bool = False,
) -> RequestHead:
    """Read the head of a request to `service`, whose body is one item, or with `batch` a list of items. Raises what `read_head` raises."""
    if method != "POST":
        raise MethodNotAllowed(f"{method} {path}: inference takes POST only", details={"allow": ["POST"]})
    head = RequestHead(service, path, batch)
    head.explain = settings.explain
    content_type = accept = ""
    for name, value in headers:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"accept":
            accept = f"{accept},{value.decode('latin-1')}" if accept else value.decode("latin-1")
        elif name == b"content-length":
            check_length(value, settings.max_body_size)
        elif name in _READERS:
            _READERS[name](head, value.decode("latin-1"))
    if content_type not in ("", JSON):
        head.content_type = content_type_of(content_type, head.service.facts.model, head.batch)
    if head.stream:
        _read_as_stream(head, accept)
    elif head.content_type != JSON or accept not in ("", "*/*", JSON):
        offered = write_types(head.service.facts.model, head.batch, head.content_type)
        head.accept = accept_of(accept, offered)
    head.form = head.made_form(head.content_type, head.accept)
    return head


def _read_as_stream(head: RequestHead, accept: str) -> None:
    """Check that the caller accepts a stream of events. Its data are JSON, whatever the content type of the request."""
    name = head.service.facts.name
    if head.batch:
        raise Unsupported(f"model {name!r} is streaming: a request must have one item, not a list")
    try:
        accept_of(accept, [CONTENT_TYPE])
    except UnsupportedMediaType:
        raise Unsupported(f"Accept {accept!r}: model {name!r} is streaming; its responses are {CONTENT_TYPE}") from None


PREFIX = "/infer"
_PATH = re.compile(f"{PREFIX}/({NAME_IN_PATH})")


def find_service(registry: "Models", path: str) -> tuple[ModelHandle, bool] | None:
    """Return the service that `path` names and whether the body is a list; None if it is not a path of inference.

    Raises ModelNotFound naming the models that are served.
    """
    if path in registry.routes:
        return registry.routes[path], False
    batch = path.endswith("/batch") and path != "/infer/batch"
    base = path[: -len("/batch")] if batch else path
    if base in registry.routes:
        return registry.routes[base], batch
    if base == "/inference":
        return _sole(registry), batch
    named = _PATH.fullmatch(base)
    return None if named is None else (registry.get(named[1]), batch)


def _sole(registry: "Models") -> ModelHandle:
    if registry.sole is None:
        names = ", ".join(registry.services)
        raise ModelNotFound(
            f"POST /inference: several models are served, so use POST /infer/{{model}} with one of {names}"
        )
    return registry.sole


def head_size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return about how many bytes `headers` took on the wire."""
    return sum([len(name) + len(value) + 4 for name, value in headers])


def content_length(value: bytes) -> int:
    """Return how many bytes the `value` of a Content-Length header states, however many zeros it begins with. Of more than 19 digits the first 19 count,
    which are beyond every limit. Raises InvalidRequest if it is not a number."""
    if not value.isdigit():
        raise InvalidRequest(f"Content-Length {value[:40].decode('latin-1')!r}: must be a number of bytes")
    return int(value) if len(value) < 19 else int(value.lstrip(b"0")[:19] or 0)


def check_length(value: bytes, max_body_size: int) -> None:
    """Raise InvalidRequest if the `value` of a Content-Length header is not a number, and TooLarge if it exceeds `max_body_size` bytes."""
    if content_length(value) > max_body_size:
        raise too_large(f"of {value.lstrip(b'0')[:40].decode()} bytes", max_body_size)


def too_large(what: str, max_body_size: int) -> TooLarge:
    """Return the error for a body over the limit."""
    return TooLarge(f"body {what}: must be at most {max_body_size} bytes (max_body_size)")


def _read_timeout(options: RequestOptions, value: str) -> None:
    text = value.strip()
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT:
        rule = f"must be a number of seconds greater than 0 and at most {LONGEST_TIMEOUT:g}"
        raise InvalidRequest(f"X-Request-Timeout {value!r}: {rule}")
    options.timeout = seconds


def _read_priority(options: RequestOptions, value: str) -> None:
    if not _INTEGER.fullmatch(value.strip()):
        raise InvalidRequest(f"X-Request-Priority {value!r}: must be an integer of at most nine digits")
    options.priority = options.class_offset + int(value)


def _read_class(options: RequestOptions, value: str) -> None:
    offset = class_offset(value.strip().lower(), "X-Weir-Class")
    options.priority += offset - options.class_offset
    options.class_offset = offset


def _read_caller(options: RequestOptions, value: str) -> None:
    options.caller = value


def _read_key(options: RequestOptions, value: str) -> None:
    if not 0 < len(value) <= _MAX_KEY_LENGTH:
        raise InvalidRequest(f"X-Batch-Key {value[:80]!r}: must have 1 to {_MAX_KEY_LENGTH} characters")
    options.key = value


def _read_explain(options: RequestOptions, value: str) -> None:
    if value not in ("0", "1"):
        raise InvalidRequest(f"X-Explain {value!r}: must be 0 or 1")
    options.explain = value == "1"


def _read_request_id(options: RequestOptions, value: str) -> None:
    if len(value) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(f"X-Request-Id {value[:80]!r}: must have at most {MAX_REQUEST_ID_LENGTH} characters")
    options.request_id = value.encode("latin-1")


def _read_carrier(name: str, options: RequestOptions, value: str) -> None:
    options.carrier = carry(options.carrier, name, value)  # read only if requests are traced


def _read_coding(options: RequestOptions, value: str) -> None:
    options.coding = coding_of(value)


def _read_accept_coding(options: RequestOptions, value: str) -> None:
    options.accept_coding = accepted_coding(value)


Readers = Mapping[bytes, Callable[[RequestOptions, str], None]]
# The headers that have the same meaning in all protocols over HTTP.
COMMON: Readers = {
    CLASS_HEADER: _read_class,
    CALLER_HEADER: _read_caller,
    b"content-encoding": _read_coding,
    **{name: partial(_read_carrier, text) for name, text in TRACE_FIELD_NAMES.items()},
}
_READERS: Readers = {
    **COMMON,
    b"x-request-timeout": _read_timeout,
    b"x-request-priority": _read_priority,
    b"x-batch-key": _read_key,
    b"x-explain": _read_explain,
    b"x-request-id": _read_request_id,
    b"accept-encoding": _read_accept_coding,
}


class NativeProtocol:
    """The protocol of /infer, /inference and the models' own routes, see HttpProtocol."""

    prefix = b"/"

    def __init__(self, registry: "Models", settings: HttpSettings) -> None:
        self._registry = registry
        self._settings = settings

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """See `read_head`."""
        return read_head(self._registry, self._settings, method, path, headers)

    def service_at(self, path: str) -> ModelHandle | None:
        """Return the service that `path` names; None if it is no path of the protocol. Raises ModelNotFound."""
        found = find_service(self._registry, path)
        return found[0] if found else None

    def named(self, path: str) -> ModelHandle | None:
        """Return the service that `path` names, or None."""
        try:
            return self.service_at(path)
        except WeirError:
            return None

    def error_response(self, error: BaseException, service: ModelHandle | None) -> HttpResponse:
        """Return the response for `error`. `service` is the one that the request names, if known."""
        return error_response(error, service.facts.name if service else None, development=self._settings.development)

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """Return the response to one item or to a list of items. A list has status 200 even if items failed, unless it failed as a whole."""
        response = await exchange.infer_items(head, body)
        del body
        bodies = await written(response.size_bytes, response.write)
        for each in bodies:
            if isinstance(each, WeirError):
                exchange.refused(each, whole=False)
        return items_http_response(head, response, bodies, development=self._settings.development)

    async def stream(self, exchange: Exchange, head: RequestHead, body: bytes) -> EventSource:
        """Return the stream of a streaming model's outputs for one item."""
        (entry,) = await exchange.read(bytes_to_read(head, body), partial(item_entries, head, body))
        if isinstance(entry, WeirError):
            raise entry
        charge(arrays_size(entry.payload))
        request = exchange.stream_of(entry)

        def failure(error: WeirError) -> bytes:
            return error_body(error, head.service.facts.name, development=self._settings.development)

        def headers() -> Headers:
            explained = head.explain and request.dispatch is not None
            own = explain_headers(request.arrival, request.dispatch) if explained and request.dispatch else []
            return own + start_headers(request.arrival, request.dispatch)

        return EventSource(_events(exchange, head, request), failure, headers)


async def _events(exchange: Exchange, head: RequestHead, request: StreamedCall) -> AsyncGenerator[bytes, None]:
    async with aclosing(read_parts(exchange, request)) as parts:
        async for output, _ in parts:
            if not isinstance(output, dict):
                yield output_body(head, output)
                continue
            body = await written(sum(map(text_size, output.values())), partial(body_or_error, head, output))
            if isinstance(body, ModelError):
                raise exchange.refused(body)
            yield body


def items_http_response(
    head: RequestHead, response: ItemsResponse, bodies: list[bytes | WeirError], *, development: bool = False
) -> HttpResponse:
    """Return the response to one item or to a list of items. `bodies` has the encoded output or the error of each. Raises the error of a single item."""
    if head.batch:
        body = batch_body(bodies, head.accept, head.service.facts.name, extra=response.extra, development=development)
    else:
        (only,) = bodies
        if isinstance(only, WeirError):
            raise only
        body = only
    headers = [
        (b"content-type", head.accept.encode()),
        *response.headers,
        *start_headers(response.arrival, response.dispatch),
    ]
    if head.explain and response.dispatch is not None:
        headers.extend(explain_headers(response.arrival, response.dispatch))
    return HttpResponse(200, headers, body)
