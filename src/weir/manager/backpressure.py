"""Back-pressure: where calls in process wait while the line is full.

They wait in order of arrival, whatever their priority, and enter the line as room appears. Their deadlines hold here
too.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from weir.batching.group import Deadlines
from weir.batching.request_state import settle
from weir.messages import Request

# How many that have gone may stay behind before they are swept out.
SWEEP_ABOVE = 64


class WaitingCall(Request, Protocol):
    """A request that can wait outside the line; doors with a peer to answer refuse instead."""

    outside: bool  # whether it does so now


class BackpressureQueue:
    """The requests that wait for room in the line, first come first in. `waiting` is false when nobody does."""

    def __init__(self) -> None:
        # Truth and length are asked for with each call in process: the deque answers faster than a method could.
        self.waiting: deque[WaitingCall] = deque()
        self._deadlines = Deadlines()
        self._settled = 0  # of those in `waiting`; never the head
        self._entered = 0  # into the line, since the deadlines were swept

    def __len__(self) -> int:
        return len(self.waiting) - self._settled

    def append(self, request: WaitingCall) -> None:
        """Let `request` wait."""
        request.outside = True
        self.waiting.append(request)
        self._deadlines.add(request)

    def pop(self, room: Callable[[int], bool]) -> WaitingCall | None:
        """Take out the request that is next to enter the line, if that has `room` for so many rows."""
        waiting = self.waiting
        if not waiting or not room(waiting[0].rows):
            return None
        request = waiting.popleft()
        request.outside = False
        if self._settled:
            self._drop_settled_heads()
        self._entered += 1
        if self._entered > len(waiting) + SWEEP_ABOVE:
            self._sweep()
        return request

    def drop(self, request: WaitingCall) -> None:
        """Settle a request that waits: its caller left."""
        settle(request)
        self._note_settled(1)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, if anyone waits. It may be that of one that has entered the line since."""
        return self._deadlines.earliest() if self.waiting else None

    def expire(self, now: float) -> list[WaitingCall]:
        """Settle and return those whose deadline has passed."""
        passed = cast(list[WaitingCall], self._deadlines.passed(now))  # only `append` adds to it
        late = [request for request in passed if request.outside]
        for request in late:
            settle(request)
        self._note_settled(len(late))
        return late

    def clear(self) -> list[WaitingCall]:
        """Settle and return all that wait."""
        left = [request for request in self.waiting if not request.settled]
        for request in left:
            settle(request)
        self._note_settled(len(left))
        return left

    def _note_settled(self, count: int) -> None:
        self._settled += count
        self._drop_settled_heads()
        if self._settled > SWEEP_ABOVE and self._settled * 2 > len(self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.settled)
            self._settled = 0
            self._sweep()

    def _drop_settled_heads(self) -> None:
        waiting = self.waiting
        while waiting and waiting[0].settled:
            waiting.popleft()
            self._settled -= 1

    def _sweep(self) -> None:
        self._entered = 0
        self._deadlines.trim(len(self.waiting))
