"""What a head means to the fast lane: whose request it is, how it will be answered, or that ASGI takes it."""

from typing import TYPE_CHECKING
from urllib.parse import unquote

from weir.errors import WeirError
from weir.model import is_tensor_model
from weir.protocols.fastlane.head import Head
from weir.protocols.fastlane.tally import Tally
from weir.protocols.native import Ask, find_service, read_ask
from weir.protocols.payloads import empty_body
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.manager.registry import Registry
    from weir.manager.service import Service

ANY_LENGTH = 1 << 62

_SECRETS = frozenset((b"authorization", b"cookie", b"proxy-authorization"))


class Plan:
    """What one head means. Depends on the head's bytes alone, for as long as registry and settings stay the same.

    Either `hand_over` is set, or `error` (the answer, whatever the body is), or `ask` and `tally`.
    """

    __slots__ = (
        "ask", "error", "expects_continue", "hand_over", "keep_alive", "length", "memorable",
        "plain_up_to", "service", "tally",
    )  # fmt: skip

    ask: Ask
    tally: Tally

    def __init__(self, head: Head) -> None:
        self.length = head.length  # of the body, in bytes
        self.keep_alive = head.keep_alive
        self.expects_continue = b"expect" in head.notable and head.version == "1.1"
        self.hand_over = False
        self.memorable = False
        self.error: WeirError | None = None
        self.service: Service | None = None  # that was asked for, as far as it is known
        # Outputs of at most this many bytes are answered by a head of `Heads.plain` and the output.
        self.plain_up_to = -1


def make_plan(head: Head, registry: "Registry", settings: HttpSettings) -> Plan:
    """Decide what to do with a request. Never raises: what is wrong with the request is in the plan."""
    plan = Plan(head)
    if _is_for_asgi(head, settings):
        plan.hand_over = True
        return plan
    path = head.url.partition(b"?")[0].decode("ascii")
    if "%" in path:
        path = unquote(path)
    try:
        ask = read_ask(registry, settings, head.method, path, head.headers)
        if ask is not None and not head.length:
            raise empty_body(ask)
    except WeirError as error:
        plan.error = error
        plan.service = _named(registry, path)
        return plan
    if ask is None or not _is_hot(ask):
        plan.hand_over = True
        return plan
    plan.ask = ask
    plan.service = ask.service
    plan.memorable = not (plan.expects_continue or any(name in _SECRETS for name in head.notable))
    plan.plain_up_to = _plain_up_to(plan, ask, settings)
    return plan


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


def _is_websocket(head: Head) -> bool:
    return head.upgrade and head.notable[b"upgrade"].lower() == b"websocket"


def _is_hot(ask: Ask) -> bool:
    """Lists, tensors and compressed bodies are made into work by the ASGI application; it writes streams."""
    return not (ask.batch or ask.stream or ask.coding or is_tensor_model(ask.service.model))


def _named(registry: "Registry", path: str) -> "Service | None":
    try:
        found = find_service(registry, path)
    except WeirError:
        return None
    return found[0] if found else None


def _plain_up_to(plan: Plan, ask: Ask, settings: HttpSettings) -> int:
    if ask.explain or ask.request_id is not None or not plan.keep_alive:
        return -1
    return settings.compress_above if ask.accept_coding else ANY_LENGTH
