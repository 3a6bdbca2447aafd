"""What a head means to the fast lane: whose request it is, how it is read and answered, or that ASGI takes it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from weir.errors import Unauthorized, WeirError
from weir.protocols.access import Access
from weir.protocols.fastlane.byte_counter import Tally
from weir.protocols.fastlane.head import Head
from weir.protocols.response import HttpResponse
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.protocols.fastlane.connection import Connection
    from weir.serving.service import Service

ANY_LENGTH = 1 << 62

_SECRETS = frozenset((b"authorization", b"cookie", b"proxy-authorization"))


class HotAsk(Protocol):
    """What the head of a hot request says: what its request in the line starts from, and how it is answered."""

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
        """Have it done. Raises the WeirError that refuses it; whoever called says `fail` then."""

    def fail(self, error: Exception) -> None:
        """Write the error, which is its end."""

    def leave(self) -> None:
        """The caller has left: nothing of it goes on, and nothing is written any more."""


class RouteHandler(Protocol):
    """How the requests of one protocol are read and answered; native.py is one."""

    @property
    def prefix(self) -> bytes:
        """What the targets of its requests begin with, also of those that make no sense otherwise."""

    @property
    def of_service(self) -> bool:
        """Whether the head of a request says which service it is for, and its `ask` is a HotAsk therefore."""

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

    Either `hand_over` is set, or `error` (the answer, whatever the body is), or `ask` (and `tally`, where the head says which service is asked).
    """

    __slots__ = (
        "answer_type", "ask", "error", "expects_continue", "hand_over", "head", "in_arena", "keep_alive", "lead", "length",
        "manner", "memorable", "plain_up_to", "service", "tally",
    )  # fmt: skip

    ask: Any  # of the kind that the manner's requests know: a HotAsk, where the head says which service is asked
    head: bytes  # as it came, without the empty line at its end
    manner: RouteHandler
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


def make_plan(head: Head, manners: Sequence[RouteHandler], settings: HttpSettings, access: Access) -> RoutePlan:
    """Decide what to do with a request. Never raises: what is wrong with the request is in the plan. One that lacks the server's key is for ASGI,
    which refuses it."""
    plan = RoutePlan(head)
    if _is_for_asgi(head, settings) or not _may(head, access):
        plan.hand_over = True
        return plan
    path = head.url.partition(b"?")[0].decode("ascii")
    if "%" in path:
        path = unquote(path)
    for manner in manners:
        plan.manner = manner
        try:
            if manner.complete(plan, head, path):
                _settle(plan, head, settings)
                return plan
        except WeirError as error:
            plan.error = error
            plan.service = manner.named(path)
            return plan
    plan.hand_over = True
    return plan


def _settle(plan: RoutePlan, head: Head, settings: HttpSettings) -> None:
    plan.memorable = not (plan.expects_continue or any(name in _SECRETS for name in head.notable))
    if plan.manner.of_service:
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
