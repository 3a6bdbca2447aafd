"""What the head of a request is, and what it means to the fast path: whose request it is, how it is read and answered, or that ASGI takes it."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from urllib.parse import unquote

import httptools

from weir.errors import InvalidRequest, Unauthorized, WeirError
from weir.protocols.access import Access
from weir.protocols.response import HttpResponse
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.serving.service import Service


Headers = list[tuple[bytes, bytes]]

END_OF_HEAD = b"\r\n\r\n"

MAX_LINES = 256  # of a head: each takes microseconds, however short it is

# llhttp wants to see a body before it reads the next head. Content is nothing to it, so it sees zeros.
_ZEROS = memoryview(bytes(64 << 10))


class Head:
    """The head of one request. Header names are in lower case."""

    __slots__ = ("headers", "keep_alive", "length", "method", "notable", "upgrade", "url", "version")

    def __init__(self, method: str, url: bytes, version: str, headers: Headers) -> None:
        self.method = method
        self.url = url
        self.version = version
        self.headers = headers
        self.notable = _notable(headers)  # of headers that the fast path must know: the (last) value
        self.length = int(self.notable.get(b"content-length", 0))
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
    """Reads heads with one llhttp parser that lives on: a new one for each head costs 0.8 µs."""

    def __init__(self) -> None:
        self._renew()

    def read(self, head: bytes) -> Head:
        """Read `head`, which is without the empty line at its end.

        Raises InvalidRequest with llhttp's reason, or for a version other than 1.0 and 1.1, or without Host, or with more than MAX_LINES.
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

    def _finished(self, upgrade: bool) -> Head:
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"HTTP version {version}: must be 1.1 or 1.0")
        head = Head(parser.get_method().decode(), self._url, version, self._headers)
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
        """llhttp: the end of the head. Without a body, it forgets after this whether the connection goes on."""
        self._keep_alive = self._parser.should_keep_alive()

    def on_url(self, url: bytes) -> None:
        """llhttp: the target of the request."""
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: one header."""
        self._headers.append((name.lower(), value))


def check_beginning(data: bytearray, start: int) -> None:
    """Refuse, before its end is there, what can never become a head: for `data` from `start` on is new.

    Raises InvalidRequest for a line ended by LF alone and for a beginning that is no method; their senders would
    otherwise wait for `header_timeout`.
    """
    if not 65 <= data[0] <= 90:  # methods are in capital letters
        raise InvalidRequest("head of the request: must begin with a method")
    at = data.find(b"\n", start)
    while at >= 0:
        if at == 0 or data[at - 1] != 13:
            raise InvalidRequest("head of the request: lines must end with CR LF, not LF alone")
        at = data.find(b"\n", at + 1)


ANY_LENGTH = 1 << 62

_SECRETS = frozenset((b"authorization", b"cookie", b"proxy-authorization"))


Meaning = TypeVar("Meaning")

_MAX_HEAD_BYTES = 4 << 10


class Tally:
    """Bytes of one model since the observers were last told."""

    __slots__ = ("received", "sent", "service")

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.received = 0
        self.sent = 0


class HeadMemo(Generic[Meaning]):
    """A bounded memory from the exact bytes of a head to its meaning.

    A head is taken in when it is offered a second time, so that heads with a unique id in them cost nothing but a
    hash each. When it is full, the oldest goes.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 1 << 20, max_seen: int = 4096) -> None:
        self._entries: dict[bytes, Meaning] = {}
        self._seen: set[int] = set()
        self._bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_seen = max_seen
        self.find = self._entries.get  # the hot path: one dictionary look-up, no call of ours in between

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, head: bytes, meaning: Meaning) -> None:
        """Remember that `head` means `meaning`, if it has been offered before."""
        if len(head) > _MAX_HEAD_BYTES:
            return
        mark = hash(head)
        if mark not in self._seen:
            if len(self._seen) >= self._max_seen:
                self._seen.clear()
            self._seen.add(mark)
        elif head not in self._entries:
            self._insert(head, meaning)

    def _insert(self, head: bytes, meaning: Meaning) -> None:
        while self._entries and (len(self._entries) >= self._max_entries or self._bytes + len(head) > self._max_bytes):
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._bytes -= len(oldest)
        self._entries[head] = meaning
        self._bytes += len(head)

    def clear(self) -> None:
        """Forget everything: the routes or the settings have changed."""
        self._entries.clear()
        self._seen.clear()
        self._bytes = 0


class HotAsk(Protocol):
    """What the fast path reads from the head of a request for a model: what its queue entry starts from, and how it is answered."""

    service: "Service"
    content_type: str
    accept: str
    timeout: float
    priority: int
    key: Any
    plain: bool  # its body is one item of one row, undecoded
    explain: bool
    request_id: bytes | None
    traceparent: str | None
    accept_coding: str


class HotRequest(Protocol):
    """One request of a connection, from its last byte to its answer, which it writes on the connection itself."""

    payload: Any  # its body: bytes, or a Block

    def begin(self) -> None:
        """Begin the work. Raises the WeirError that refuses it; the caller calls `fail` then."""

    def fail(self, error: Exception) -> None:
        """Write the error, which is its end."""

    def leave(self) -> None:
        """The caller has left: nothing of it goes on, and nothing is written any more."""


class RouteHandler(Protocol):
    """How the requests of one protocol are read and answered; request.py is one."""

    @property
    def prefix(self) -> bytes:
        """What the targets of its requests begin with, also of those that make no sense otherwise."""

    @property
    def of_service(self) -> bool:
        """Whether the head of a request names its service, so that its `ask` is a HotAsk."""

    @property
    def request(self) -> "Callable[[Connection, RoutePlan, Any], HotRequest]":
        """What makes a request from its connection, its plan and its body: the class of its requests."""

    def complete(self, plan: "RoutePlan", head: Head, path: str) -> bool:
        """Complete `plan` for a request of this protocol to `path` (percent-decoded, without the query): set its `ask` and
        what follows from it. False: it is none, or ASGI had better take it. Raises the WeirError that refuses it."""

    def named(self, path: str) -> "Service | None":
        """Return the service that `path` asks for, as far as there is one."""

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """Return what is written for `error` when `service` was asked for."""


class RoutePlan:
    """What one head means. Depends on the head's bytes alone, for as long as registry and settings stay the same.

    Either `hand_over` is set, or `error` (the answer, whatever the body is), or `ask` (and `tally`, where the head names the service).
    """

    __slots__ = (
        "answer_type", "ask", "error", "expects_continue", "hand_over", "head", "in_arena", "keep_alive", "lead", "length",
        "handler", "memorable", "plain_up_to", "service", "tally",
    )  # fmt: skip

    ask: Any  # of the kind that the handler's requests know: a HotAsk, where the head names the service
    head: bytes  # as it came, without the empty line at its end
    handler: RouteHandler
    tally: Tally

    def __init__(self, head: Head) -> None:
        self.length = head.length  # of the body, in bytes
        self.keep_alive = head.keep_alive
        self.expects_continue = b"expect" in head.notable and head.version == "1.1"
        self.hand_over = False
        self.memorable = False
        self.error: WeirError | None = None
        self.service: Service | None = None  # that was asked for, as far as it is known
        self.answer_type = ""  # content type of outputs that are bytes
        self.in_arena = False  # a large body is received into shared memory
        self.lead = 0  # so many bytes after the beginning of its place
        # Outputs of at most this many bytes are answered by a head of `Heads.plain` and the output.
        self.plain_up_to = -1


def make_plan(head: Head, route_handlers: Sequence[RouteHandler], settings: HttpSettings, access: Access) -> RoutePlan:
    """Decide what to do with a request. Never raises: what is wrong with the request is in the plan. One that lacks the server's key is for ASGI,
    which refuses it."""
    plan = RoutePlan(head)
    if _is_for_asgi(head, settings) or not _may(head, access):
        plan.hand_over = True
        return plan
    path = head.url.partition(b"?")[0].decode("ascii")
    if "%" in path:
        path = unquote(path)
    for handler in route_handlers:
        plan.handler = handler
        try:
            if handler.complete(plan, head, path):
                _settle(plan, head, settings)
                return plan
        except WeirError as error:
            plan.error = error
            plan.service = handler.named(path)
            return plan
    plan.hand_over = True
    return plan


def _settle(plan: RoutePlan, head: Head, settings: HttpSettings) -> None:
    plan.memorable = not (plan.expects_continue or any(name in _SECRETS for name in head.notable))
    if plan.handler.of_service:
        _settle_for(plan, plan.ask, settings)


def _settle_for(plan: RoutePlan, ask: HotAsk, settings: HttpSettings) -> None:
    plan.service = ask.service
    told_more = ask.explain or ask.request_id is not None or ask.service.tracing is not None
    if plan.keep_alive and not told_more:
        plan.plain_up_to = settings.compress_above if ask.accept_coding else ANY_LENGTH


def _is_for_asgi(head: Head, settings: HttpSettings) -> bool:
    notable = head.notable
    return (
        head.method != "POST"
        or _is_websocket(head)
        or b"transfer-encoding" in notable
        or not head.url.startswith(b"/")
        or (b"origin" in notable and bool(settings.cors_origins))
        or (b"expect" in notable and notable[b"expect"].lower() != b"100-continue")
    )


def _may(head: Head, access: Access) -> bool:
    try:
        access.require_http(head.headers)
    except Unauthorized:
        return False
    return True


def _is_websocket(head: Head) -> bool:
    return head.upgrade and head.notable[b"upgrade"].lower() == b"websocket"
