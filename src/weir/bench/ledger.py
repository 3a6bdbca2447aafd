"""The books of one round: when each request was meant to leave, when it left, when and how it ended."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from math import nan

OK, TIMEOUT, UNSENT = "ok", "timeout", "unsent"
_RECENT = 512  # response times that the live figures are taken from


class Ledger:
    """A request is its index. All instants are seconds of one clock.

    `outcomes` has for each request the index of its outcome in `kinds`; 0 while it has none. `hear(index)` is called at
    each end.
    """

    def __init__(self, intended: Iterable[float] = (), hear: Callable[[int], None] | None = None) -> None:
        self.intended = array("d", intended)
        count = len(self.intended)
        self.sent = array("d", [nan]) * count
        self.ended = array("d", [nan]) * count
        self.outcomes = array("H", [0]) * count
        self.kinds = ["", OK]
        self.begun = 0  # requests that were handed to the target
        self.over = 0  # requests that have had their end
        self.failed = 0  # of these, the ones that were not answered well
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.hear = hear
        self._codes = {OK: 1}

    def add(self, intended: float) -> int:
        """Enter one more request, and return its index."""
        self.intended.append(intended)
        self.sent.append(nan)
        self.ended.append(nan)
        self.outcomes.append(0)
        return len(self.intended) - 1

    def end(self, index: int, now: float, outcome: str) -> None:
        """Note the end of a request: OK, or what went wrong in a few words. Each has one."""
        self.ended[index] = now
        self.over += 1
        code = self._codes.get(outcome)
        if code is None:
            code = self._codes[outcome] = len(self.kinds)
            self.kinds.append(outcome)
        self.outcomes[index] = code
        if code != 1:
            self.failed += 1
        self.recent.append(now - self.intended[index])
        if self.hear is not None:
            self.hear(index)

    @property
    def open(self) -> int:
        """How many requests were begun and have no end yet."""
        return self.begun - self.over
