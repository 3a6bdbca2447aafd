"""One request to a streaming model, and its reader: answers are kept between the two, but no more than a few."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable
from time import monotonic
from typing import TYPE_CHECKING, Any

from weir.batching.request_state import RequestBase
from weir.errors import ModelError, Overloaded, Unsupported, WeirError, for_caller
from weir.manager.delivery import discard, is_block
from weir.messages import NO_ANSWER, Dispatch, Request

if TYPE_CHECKING:
    from weir.manager.service import Service

BURST = 16
BURST_BYTES = 4 << 20
PATIENCE = 0.25


class Streamed(RequestBase):
    """A request whose answers one reader takes with `read`, or as an async iterator. A model that is not streaming gives
    one.

    `limit` answers are kept for a reader that is busy; BURST times as many for PATIENCE seconds, as a model may give them
    faster than the event loop goes round, if they are no larger than BURST_BYTES together. A reader that falls behind further is at its end: it still gets what was kept, and
    then Overloaded. Nobody else waits for it. `withdraw` takes the request out of the line or off its
    worker. All is done on the service's event loop, but for the constructor.
    """

    __slots__ = (
        "_behind_since",
        "_burst_bytes",
        "_error",
        "_kept",
        "_last",
        "_limit",
        "_over",
        "_waiter",
        "_withdraw",
        "dispatch",
        "outside",
    )

    def __init__(
        self, payload: Any, arrival: float, timeout: float, limit: int, withdraw: Callable[["Streamed"], None],
        **attributes: Any,
    ) -> None:  # fmt: skip
        super().__init__(payload, arrival, timeout, **attributes)
        self.outside = False  # waits for room in the line
        self.dispatch: Dispatch | None = None  # the batch that it is in, once there is an answer
        self._limit = limit
        self._withdraw = withdraw
        self._kept: deque[Any] = deque()
        self._over = False
        self._last = False  # the model gave the newest of those kept as its last
        self._error: WeirError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._behind_since: float | None = None
        self._burst_bytes = 0

    # What the service says.

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Keep an answer for the reader. Raises Overloaded when it is too far behind."""
        if len(self._kept) >= self._limit and self._too_far_behind(output):
            raise Overloaded(
                f"the reader of this stream is {len(self._kept)} answers behind; {self._limit} are kept (stream_buffer)",
                retry_after=0.0,
            )
        self._kept.append(output)
        self.dispatch = dispatch
        self._wake()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Keep the last answer, if there is one: after it nothing comes."""
        self.dispatch = dispatch
        if output is not NO_ANSWER:
            self._kept.append(output)
            self._last = True
        self._over = True
        self._wake()

    def fail(self, error: WeirError) -> None:
        """Keep the error, which the reader gets after the answers before it."""
        self._error = error
        self._over = True
        self._wake()

    # What its reader does.

    async def read(self) -> tuple[Any, bool]:
        """Return the next answer, and whether the model said that it is the last. Raises the error that ended the request,
        or StopAsyncIteration when there is no answer any more."""
        while not self._kept:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        answer = self._kept.popleft()
        if len(self._kept) < self._limit:
            self._behind_since = None
        return answer, self._last and not self._kept

    def __aiter__(self) -> "Streamed":
        return self

    async def __anext__(self) -> Any:
        return (await self.read())[0]

    def close(self) -> None:
        """Leave: nothing more is computed for this request, and what was kept is let go. Idempotent."""
        if not self.settled:
            self._withdraw(self)
        self._over = True
        while self._kept:
            discard(self._kept.popleft())
        self._wake()

    def _too_far_behind(self, output: Any) -> bool:
        now = monotonic()
        if self._behind_since is None:
            self._behind_since, self._burst_bytes = now, 0
        self._burst_bytes += _size_of(output)
        return (
            now - self._behind_since > PATIENCE
            or len(self._kept) >= BURST * self._limit
            or self._burst_bytes > BURST_BYTES
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size_of(output: Any) -> int:
    if isinstance(output, (bytes, str)):
        return len(output)
    if is_block(output):
        return len(output.view)
    return sum(map(_size_of, output.values())) if isinstance(output, dict) else int(getattr(output, "nbytes", 0))


def new_stream(service: "Service", item: Any, timeout: float | None, priority: int, key: Hashable) -> Streamed:
    """Return a request for `item` that has not been entered; from any thread."""
    settings = service.settings
    seconds = settings.timeout if timeout is None else timeout
    return Streamed(
        item, service.now(), seconds, settings.stream_buffer, service.cancel, priority=priority, key=key
    )  # fmt: skip


async def read(service: "Service", request: Streamed, backpressure: bool | None) -> AsyncGenerator[Any, None]:
    """Enter `request` and yield its answers; whoever leaves, leaves the line or the worker too."""
    try:
        service.enter(request, backpressure)
        async for answer in request:
            yield answer
    except ModelError as error:
        raise for_caller(error) from error.__cause__
    finally:
        request.close()


def takes_one(request: Request) -> bool:
    """Tell whether `request` is of a kind that takes one answer only."""
    return getattr(type(request), "part", None) in (None, RequestBase.part)


def several(name: str) -> Unsupported:
    """Return the error for those who ask a streaming model for one answer."""
    return Unsupported(f"model {name!r} is streaming, it gives several answers: ask it for a stream")
