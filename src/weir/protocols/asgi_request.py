"""Requests of the ASGI door: when all that one HTTP request asks for has ended, its coroutine goes on."""

import asyncio
from collections.abc import Sequence
from typing import Any

from weir.batching.request_state import RequestBase, refuse
from weir.errors import WeirError
from weir.messages import Dispatch
from weir.protocols.native import DOOR, RequestHead
from weir.protocols.payloads import NOTHING, QueueEntry
from weir.serving.delivery import discard, drop_payload


class Countdown:
    """`over` resolves when as many have ended as there are."""

    __slots__ = ("left", "over")

    def __init__(self, left: int) -> None:
        self.left = left
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one_ended(self) -> None:
        """Count one end."""
        self.left -= 1
        if not self.left and not self.over.done():
            self.over.set_result(None)


class AsgiRequest(RequestBase):
    """`end` is the output, or the WeirError, that is its end; `dispatch` the (last) batch it was in, if any."""

    __slots__ = ("_countdown", "dispatch", "end")

    def __init__(self, ask: RequestHead, work: QueueEntry, now: float, countdown: Countdown) -> None:
        super().__init__(
            work.payload, now, ask.timeout, kind=work.kind, content_type=work.content_type, accept=work.accept,
            rows=work.rows, cost=work.cost, key=work.key, priority=ask.priority, large=work.large,
            door=DOOR, trace=ask.traceparent,
        )  # fmt: skip
        self._countdown = countdown
        self.end: Any = None
        self.dispatch: Dispatch | None = None

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Keep the output; nobody reads the payload any more, while the other items of a list may take long."""
        drop_payload(self)
        self.end = output
        self.dispatch = dispatch
        self._countdown.one_ended()

    def fail(self, error: WeirError) -> None:
        """Keep the error."""
        self.end = error
        self._countdown.one_ended()


def submit(ask: RequestHead, works: Sequence[QueueEntry | WeirError]) -> tuple[list[AsgiRequest], Countdown]:
    """Put `works` into the line of the service that `ask` asks for; an error among them is the end of its item.

    Raises what the service raises when it refuses the first: then nothing was taken. Later refusals are ends.
    """
    countdown = Countdown(len(works))
    requests: list[AsgiRequest] = []
    taken = False
    for work in works:
        refusal = work if isinstance(work, WeirError) else None
        request = AsgiRequest(ask, work if isinstance(work, QueueEntry) else NOTHING, ask.service.now(), countdown)
        if refusal is None:
            try:
                ask.service.submit(request)
                taken = True
            except WeirError as error:
                if not taken:
                    raise
                refusal = error
        if refusal is not None:
            refuse(request, refusal)
        requests.append(request)
    return requests, countdown


def abandon(ask: RequestHead, requests: Sequence[AsgiRequest]) -> None:
    """Cancel what is under way, and give back the shared memory of answers that nobody will read."""
    for request in requests:
        if not request.settled:
            ask.service.cancel(request)
        for output in request.end if isinstance(request.end, list) else [request.end]:
            discard(output)
