"""Lets requests leave: at their own instants whatever becomes of them (open loop), or when an answer came (closed loop)."""

from collections.abc import Callable

from weir.bench.alarm import Waker
from weir.bench.ledger import Ledger

# Seconds before an instant that the loop turns without sleeping: to be woken takes up to about so long.
SPIN = 0.0001
# Requests that leave in one turn of the loop, so that answers are read in between.
_BURST = 32

Clock = Callable[[], float]
Send = Callable[[int], None]


class OpenLoop:
    """Calls `send(index)` for each request of the ledger at its intended instant, or as soon after as can be.

    `tick` begins; it sees itself to be called again. `soon(callback)` calls back in the next turn of
    the event loop. `finished()` is called when the last request was begun.
    """

    def __init__(
        self, ledger: Ledger, send: Send, *, clock: Clock, waker: Waker, soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None], spin: float = SPIN,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._waker = waker
        self._soon = soon
        self._finished = finished
        self._spin = spin

    def tick(self) -> None:
        """Let leave what is due, then wait for the next."""
        ledger = self._ledger
        intended = ledger.intended
        index, count = ledger.begun, len(intended)
        last = index + _BURST
        while index < count:
            due = intended[index]
            now = self._clock()
            if now < due:
                if due - now <= self._spin:
                    self._soon(self.tick)
                else:
                    self._waker.set(due - self._spin, self.tick)
                return
            if index == last:
                self._soon(self.tick)
                return
            ledger.begun = index + 1
            self._send(index)
            index += 1
        self._finished()


class ClosedLoop:
    """Keeps `concurrency` requests under way until the instant `end`: each leaves when another has its answer."""

    def __init__(
        self, ledger: Ledger, send: Send, *, clock: Clock, soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None], concurrency: int, end: float,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._soon = soon
        self._finished = finished
        self._end = end
        self._under_way = concurrency
        ledger.hear = self._ended

    def start(self) -> None:
        """Begin all callers."""
        for _ in range(self._under_way):
            self._next()

    def _ended(self, index: int) -> None:
        self._soon(self._next)  # not from within: an end may come while the next request is being sent

    def _next(self) -> None:
        now = self._clock()
        if now >= self._end:
            self._under_way -= 1
            if not self._under_way:
                self._finished()
            return
        index = self._ledger.add(now)
        self._ledger.begun += 1
        self._send(index)
