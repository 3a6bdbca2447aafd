"""Back-pressure: where calls in process wait while the line is full.

They wait in order of arrival, whatever their priority, and enter the line as room appears. Their deadlines hold here
too.
"""

from collections import deque
from typing import Protocol, cast

from weir.batching.deadlines import Deadlines
from weir.messages import Request

# Settled requests are dropped when they reach the head; sweeping keeps those in the middle from piling up.
SWEEP_ABOVE = 64


class Patient(Request, Protocol):
    """A request that can wait outside the line; doors with a peer to answer refuse instead."""

    outside: bool  # whether it does so now


class Outside:
    """The requests that wait for room in the line, first come first in."""

    def __init__(self) -> None:
        self._waiting: deque[Patient] = deque()
        self._deadlines = Deadlines()
        self._settled = 0  # of those in _waiting

    def __bool__(self) -> bool:
        return len(self._waiting) > self._settled

    def __len__(self) -> int:
        return len(self._waiting) - self._settled

    def append(self, request: Patient) -> None:
        """Let `request` wait."""
        request.outside = True
        self._waiting.append(request)
        self._deadlines.add(request)

    def head(self) -> Patient | None:
        """Return the request that is next to enter the line, or None."""
        while self._waiting:
            request = self._waiting[0]
            if not request.settled:
                return request
            self._waiting.popleft()
            self._settled -= 1
        return None

    def pop(self) -> None:
        """Take away the head: it enters the line."""
        self._waiting.popleft().outside = False
        self._deadlines.trim(len(self._waiting))

    def drop(self, request: Patient) -> None:
        """Settle a request that waits: its caller left."""
        request.settled = True
        self._note_settled(1)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, if anyone waits. It may be that of one that has entered the line since."""
        return self._deadlines.earliest() if self else None

    def expire(self, now: float) -> list[Patient]:
        """Settle and return those whose deadline has passed."""
        passed = cast(list[Patient], self._deadlines.passed(now))  # only `append` adds to it
        late = [request for request in passed if request.outside]
        for request in late:
            request.settled = True
        self._note_settled(len(late))
        return late

    def clear(self) -> list[Patient]:
        """Settle and return all that wait."""
        left = [request for request in self._waiting if not request.settled]
        for request in left:
            request.settled = True
        self._waiting.clear()
        self._settled = 0
        self._deadlines = Deadlines()
        return left

    def _note_settled(self, count: int) -> None:
        self._settled += count
        if self._settled > SWEEP_ABOVE and self._settled * 2 > len(self._waiting):
            left = [request for request in self._waiting if not request.settled]
            self._waiting = deque(left)
            self._settled = 0
            self._deadlines.trim(len(left))
