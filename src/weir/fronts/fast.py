"""The fast path in a front: what of it the dispatcher's place for requests, bodies and shared memory changes."""

from functools import partial
from typing import TYPE_CHECKING, Any

from weir.errors import CapacityError, ModelNotFound
from weir.frontends.http.fast.connection import Connection, LoggedConnection
from weir.frontends.http.fast.inference import HotKserve, HotNative, HttpRequest, KserveRequest, Step
from weir.frontends.http.fast.plan import HttpHead, RoutePlan
from weir.frontends.http.fast.response_writer import LARGE
from weir.frontends.http.fast.shared import BlockPlace
from weir.fronts.messages import LONGEST_BODY
from weir.fronts.places import LentPlace
from weir.fronts.remote import HandedOver
from weir.protocols.kserve import ZLIB, KserveContext
from weir.protocols.response import Headers
from weir.protocols.shared_memory import Memory, Regions
from weir.wire.kserve_json import Body

if TYPE_CHECKING:
    from weir.frontends.http.fast import shared


class FrontRequest(HttpRequest):
    """A request of Weir's own protocol. Its `number` is that of the link."""

    __slots__ = ("number",)

    @property
    def explain(self) -> bool:
        """Whether its response says something of its batch."""
        return bool(self.head.explain)

    def fail(self, error: Exception) -> None:
        """Write the error, or hand the request over."""
        if isinstance(error, HandedOver):
            self.connection.hand_over(self.plan, _bytes_of(self.payload, self.plan))
        else:
            super().fail(error)


class FrontKserveRequest(KserveRequest):
    """A request of the Open Inference Protocol. The worker reads its JSON, or else it is read here and sent as packed arrays.

    `body` and `opening` are what came, and the part of it that a place does not hold any more after the request was sent; after `keep_body`, a place holds
    nothing of it.
    """

    __slots__ = ("body", "number", "opening")

    def __init__(self, connection: "Connection", plan: RoutePlan, payload: Any) -> None:
        super().__init__(connection, plan, payload)
        self.body = payload
        self.opening = b""
        if type(payload) is LentPlace:
            self.opening = bytes(payload.view[plan.lead : plan.lead + (self.head.header_length or 0)])

    @property
    def explain(self) -> bool:
        """Whether its response says something of its batch."""
        return bool(self.head.explain)

    def _read_body(self, body: Body) -> Step:
        if self.head.header_length is not None or type(self.payload) is not LentPlace:
            return super()._read_body(body)
        outline = self.head.outline  # of long JSON, which only workers decode
        found = None if outline is None or bytes(body[:1]) == ZLIB else self._undecoded(body, outline)
        if found is None:
            raise HandedOver
        return partial(self._take_outline, None, found)

    def keep_body(self) -> None:
        """Copy the body, whose place is about to be written. Raises what Account.take raises."""
        size = self.plan.length
        self.connection.charge(size)
        self.body, self.opening = _bytes_of(self.body, self.plan), b""

    def fail(self, error: BaseException) -> None:
        """Write the error, or hand the request over."""
        if isinstance(error, HandedOver):
            rest = _bytes_of(self.body, self.plan)[len(self.opening) :]
            self.connection.hand_over(self.plan, self.opening + rest)
        else:
            super().fail(error)


def _bytes_of(body: Any, plan: RoutePlan) -> bytes:
    return body if type(body) is bytes else bytes(body.view[plan.lead :])


class MemoryElsewhere(Memory):
    """The shared memory of a request: the dispatcher has the regions, and answers what refers to them."""

    def __init__(self) -> None:
        super().__init__(Regions(), _hand_over)


def _hand_over() -> None:
    raise HandedOver


class FrontContext(KserveContext):
    """A KserveContext without regions of shared memory."""

    def memory(self, peer: str | None, headers: Headers) -> Memory:
        """See KserveContext."""
        return MemoryElsewhere()


class FrontNative(HotNative):
    """HotNative for models that are known and hot; the dispatcher answers the others."""

    request = FrontRequest

    def complete(self, plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
        """See RouteHandler."""
        try:
            found = super().complete(plan, http_head, path)
        except (ModelNotFound, CapacityError):  # the dispatcher may know more
            return False
        return found and _may_receive(plan)


class FrontKserve(HotKserve):
    """HotKserve for tensors of models that are known and hot; the dispatcher answers the others."""

    request = FrontKserveRequest

    def complete(self, plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
        """See RouteHandler."""
        try:
            found = super().complete(plan, http_head, path)
        except (ModelNotFound, CapacityError):
            return False
        return found and plan.head.service.facts.takes_tensors and _may_receive(plan)


def _may_receive(plan: RoutePlan) -> bool:
    """Return whether the body of a request is short, or comes into a place of the model's arena."""
    return plan.length <= LONGEST_BODY or (plan.in_arena and plan.lead + plan.length <= plan.head.service.arena_bytes)


class FrontConnection(Connection):
    """A connection of a front. Before it receives a large body, it waits for a place in the model's arena."""

    def __init__(self, shared: "shared.HttpShared") -> None:
        super().__init__(shared)
        self._asked = 0  # times that it has asked for a place
        self._waits = False  # for a place

    def _begin_large(self, plan: RoutePlan) -> bool:
        places = plan.head.service.places
        size = plan.lead + plan.length
        if places.has(size):
            return super()._begin_large(plan)
        self.phase = LARGE
        self._waits = True
        self._asked += 1
        places.ask(size, partial(self._answered_place, plan, self._asked))
        return False

    def _answered_place(self, plan: RoutePlan, asked: int, has_place: bool) -> None:
        if not self._waits or asked != self._asked or self.phase is not LARGE:  # the client has left
            return
        self._waits = False
        if not has_place:
            self._hand_over(plan.head_bytes)
            return
        super()._begin_large(plan)
        self._regulate_reading()

    def _regulate_reading(self) -> None:
        if not self._waits or self.transport.is_closing():
            super()._regulate_reading()
        elif not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _leave(self) -> None:
        self._waits = False
        super()._leave()

    def _dispatch_received(self, place: "shared.Place") -> None:
        if isinstance(place, BlockPlace):
            super()._dispatch_received(place)
            return
        body = place.payload()  # it was moved, because others needed its place
        place.give_up()
        self._forget_place()
        self._hand_over(self._plan.head_bytes, body)


class LoggedFrontConnection(LoggedConnection, FrontConnection):
    """A connection of a front that writes the access log."""
