"""Heads of requests on the fast path: parses a head, and plans how its request is read and answered, or that the ASGI application answers it."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import httptools

from weir.errors import InvalidRequest, ModelNotReady, Unauthorized, WeirError
from weir.messages import Form
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.native import content_length
from weir.protocols.offloading import LONG_RESPONSE
from weir.protocols.response import HttpResponse

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle


Headers = list[tuple[bytes, bytes]]

END_OF_HEAD = b"\r\n\r\n"

MAX_LINES = 256  # of a head: each line takes microseconds, however short it is

# llhttp must be fed a body before it parses the next head. It ignores the content, so it is fed zeros.
_ZEROS = memoryview(bytes(64 << 10))


class HttpHead:
    """The parsed head of one HTTP request. Header names are in lower case. `length` is that of the body, in bytes."""

    __slots__ = ("headers", "keep_alive", "length", "method", "notable", "upgrade", "url", "version")

    def __init__(self, method: str, url: bytes, version: str, headers: Headers) -> None:
        self.method = method
        self.url = url
        self.version = version
        self.headers = headers
        self.notable = _notable(headers)  # headers that the fast path must know; of repeated ones the last value
        self.length = content_length(self.notable.get(b"content-length", b"0"))
        self.keep_alive = True
        self.upgrade = False


_NOTABLE = frozenset(
    (b"authorization", b"content-length", b"cookie", b"expect", b"host", b"origin", b"proxy-authorization",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip


def _notable(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    notable: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _NOTABLE:
            if name == b"host" and name in notable:
                raise InvalidRequest("Host: must be given once, not twice")
            notable[name] = value
    return notable


class HeadReader:
    """Parses heads with one llhttp parser, which it keeps: a new parser for each head costs 0.8 µs."""

    def __init__(self) -> None:
        self._renew()

    def read(self, head: bytes) -> HttpHead:
        """Parse `head`, which has no empty line at its end.

        Raises InvalidRequest with llhttp's reason; for a version other than 1.0 and 1.1; for HTTP/1.1 without Host (RFC 9112, section 3.2); and for more
        than MAX_LINES lines.
        """
        if head.count(b"\r\n") > MAX_LINES:
            raise InvalidRequest(f"head of the request: has more than {MAX_LINES} lines")
        self._url = b""
        self._headers: Headers = []
        self._keep_alive = False
        upgrade = False
        try:
            self._parser.feed_data(head + END_OF_HEAD)
        except httptools.HttpParserUpgrade:
            upgrade = True
        except httptools.HttpParserError as error:
            self._renew()
            raise InvalidRequest(f"head of the request: {error}") from None
        try:
            return self._finished(upgrade)
        except InvalidRequest:
            self._renew()
            raise

    def _finished(self, upgrade: bool) -> HttpHead:
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"HTTP version {version}: must be 1.1 or 1.0")
        head = HttpHead(parser.get_method().decode(), self._url, version, self._headers)
        if version == "1.1" and b"host" not in head.notable:
            raise InvalidRequest("Host: HTTP/1.1 requires it, and it is missing")
        head.upgrade = upgrade and head.method != "CONNECT"
        head.keep_alive = self._keep_alive and version == "1.1"
        if upgrade or not head.keep_alive or head.length > len(_ZEROS) or b"transfer-encoding" in head.notable:
            self._renew()
        elif head.length:
            parser.feed_data(_ZEROS[: head.length])
        return head

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        """llhttp: the head is complete. If there is no body, llhttp forgets after this callback whether the connection stays open."""
        self._keep_alive = self._parser.should_keep_alive()

    def on_url(self, url: bytes) -> None:
        """llhttp: the target of the request."""
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: one header."""
        self._headers.append((name.lower(), value))


def check_beginning(data: bytearray, start: int) -> None:
    """Check an incomplete head. `data` from `start` on is new.

    Raises InvalidRequest for a line that ends with LF alone, and for a beginning that is not a method. Such a head can never become complete, so its
    sender would otherwise wait for `header_timeout`.
    """
    if not 65 <= data[0] <= 90:  # methods are in capital letters
        raise InvalidRequest("head of the request: must begin with a method")
    at = data.find(b"\n", start)
    while at >= 0:
        if at == 0 or data[at - 1] != 13:
            raise InvalidRequest("head of the request: lines must end with CR LF, not LF alone")
        at = data.find(b"\n", at + 1)


# Heads with these are planned each time: what they hold is somebody else's. A head with the key of this server is remembered like any other, once the
# key was found right: it is looked up by a hash of all its bytes under a key of this process, so how long that takes tells nothing about the key; and
# the memo is bounded, and is never shown.
_NOT_KEPT = frozenset((b"cookie", b"proxy-authorization"))


class Tally:
    """Bytes transferred for one model since they were last reported to the observers."""

    __slots__ = ("received", "sent", "service")

    def __init__(self, service: "ModelHandle") -> None:
        self.service = service
        self.received = 0
        self.sent = 0


class HotHead(Protocol):
    """The facts that a protocol reads from the head of a request to a model: how the request enters the queue, and the form of its response."""

    service: "ModelHandle"
    form: Form  # of a request whose body is one item of one row
    request_id: bytes | None
    carrier: dict[str, str] | None
    accept_coding: str


class HotRequest(Protocol):
    """One request of a connection, from its last byte to its response, which it writes to the connection itself."""

    payload: Any  # its body: bytes, or a Block

    def begin(self) -> None:
        """Start the request. Raises the WeirError that refuses it; the caller then calls `fail`."""

    def fail(self, error: Exception) -> None:
        """Write the error, which ends the request."""

    def leave(self) -> None:
        """Cancel the request, because the client has left. Nothing is written after this."""


class RouteHandler(Protocol):
    """Reads the requests of one protocol on the fast path and writes their responses; inference.py has one for each."""

    @property
    def prefix(self) -> bytes | tuple[bytes, ...]:
        """The prefix of the protocol's paths, or several. A malformed request whose path begins with it gets an error of this protocol."""

    @property
    def of_service(self) -> bool:
        """Whether the head of a request names its service. `RoutePlan.head` is then a HotHead."""

    @property
    def request(self) -> "Callable[[Any, RoutePlan, Any], HotRequest]":
        """The class of the protocol's requests, or a function: makes a request of its Connection, its plan and its body."""

    def complete(self, plan: "RoutePlan", http_head: HttpHead, path: str) -> bool:
        """Complete `plan` for a request to `path` (percent-decoded, without the query): set its `head` and what follows from it.

        Returns False if it is not a request of this protocol, or is for the ASGI application. Raises the WeirError that refuses it.
        """

    def named(self, path: str) -> "ModelHandle | None":
        """Return the service that `path` names, or None."""

    def error_response(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """Return the response for `error`. `service` is the one that the request names, if known."""


class RoutePlan:
    """Handles the requests with a certain head. A plan depends only on the head's bytes as long as the registry and the settings stay the same.

    Exactly one of three is set: `hand_over` (the ASGI application answers), `error` (the response, whatever the body is), or `head` (with `tally`, if the
    head names the service).
    """

    __slots__ = (
        "response_type", "error", "expects_continue", "hand_over", "head", "head_bytes", "in_arena", "keep_alive", "lead", "length",
        "handler", "memorable", "plain_up_to", "service", "tally", "undecoded",
    )  # fmt: skip

    head: Any  # the head as the handler's protocol reads it: a HotHead, if it names the service
    head_bytes: bytes  # as received, without the empty line at its end
    handler: RouteHandler
    tally: Tally

    def __init__(self, http_head: HttpHead) -> None:
        self.length = http_head.length  # of the body, in bytes
        self.keep_alive = http_head.keep_alive
        self.expects_continue = b"expect" in http_head.notable and http_head.version == "1.1"
        self.hand_over = False
        self.memorable = False
        self.error: WeirError | None = None
        self.service: ModelHandle | None = None  # the service that the request names, if known
        self.response_type = ""  # content type of an output that is bytes
        self.in_arena = False  # a large body is received into shared memory
        self.undecoded = False  # the body is one item of one row and goes to the worker undecoded
        self.lead = 0  # unused bytes before the body there
        # An output of at most this many bytes is sent behind a head of `Heads.plain`. -1: none is.
        self.plain_up_to = -1


def make_plan(
    http_head: HttpHead, handlers: Sequence[RouteHandler], settings: HttpSettings, access: Access
) -> RoutePlan:
    """Decide how a request is answered. Never raises: the error of a bad request is in the plan.

    A request without the server's key is handed over to the ASGI application, which refuses it.
    """
    plan = RoutePlan(http_head)
    if _is_for_asgi(http_head, settings) or not _may(http_head, access):
        plan.hand_over = True
        return plan
    path = http_head.url.partition(b"?")[0].decode("ascii")
    if "%" in path:
        path = unquote(path)
    for handler in handlers:
        plan.handler = handler
        try:
            if handler.complete(plan, http_head, path):
                _settle(plan, http_head, settings)
                return plan
        except WeirError as error:
            if isinstance(error, ModelNotReady) and error.read is not None:
                break  # the application reads the model first
            plan.error = error
            plan.service = handler.named(path)
            return plan
    plan.hand_over = True
    return plan


def _settle(plan: RoutePlan, http_head: HttpHead, settings: HttpSettings) -> None:
    plan.memorable = not (plan.expects_continue or any(name in _NOT_KEPT for name in http_head.notable))
    if plan.handler.of_service:
        _settle_for(plan, plan.head, settings)


def _settle_for(plan: RoutePlan, head: HotHead, settings: HttpSettings) -> None:
    plan.service = head.service
    adds_headers = head.form.explain or head.request_id is not None or head.service.tracing is not None
    if plan.keep_alive and not adds_headers:
        plan.plain_up_to = min(settings.compress_above, LONG_RESPONSE) if head.accept_coding else LONG_RESPONSE


def _is_for_asgi(http_head: HttpHead, settings: HttpSettings) -> bool:
    notable = http_head.notable
    return (
        http_head.method != "POST"
        or _is_websocket(http_head)
        or b"transfer-encoding" in notable
        or not http_head.url.startswith(b"/")
        or (b"origin" in notable and bool(settings.cors_origins))
        or (b"expect" in notable and notable[b"expect"].lower() != b"100-continue")
    )


def _may(http_head: HttpHead, access: Access) -> bool:
    """Return whether the request has a key, if it needs one. Its headers then state the class of work of that key."""
    try:
        http_head.headers = access.require_http(http_head.headers)
    except Unauthorized:
        return False
    return True


def _is_websocket(http_head: HttpHead) -> bool:
    return http_head.upgrade and http_head.notable[b"upgrade"].lower() == b"websocket"
