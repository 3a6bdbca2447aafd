"""How large a batch of bulk work may be: as large as it can be without holding an interactive request up for longer than stated.

An interactive request that arrives while a bulk batch runs waits for its end. So the longest time of a bulk batch is the longest that bulk work adds to
an interactive request. `BulkSize` finds the size that takes this long from the batches that came back, in units of cost: rows, or tokens where a model
measures them. It is a rule without a clock.
"""

DEFAULT_DELAY = 0.005  # seconds that bulk work may add, where nothing else is stated
SLO_SHARE = 0.05  # the part of a latency objective that bulk work may add ...
LEAST_DELAY = 0.002  # ... and the seconds that it may add in any case

QUIET_SHARE = 0.01  # what bulk work may add to the request that ends a quiet time, as a part of that time

GROWTH = 0.25  # how much of the way to a larger size one batch that took less time leads
MOST_GROWTH = 2.0  # the largest size that is aimed at, as a multiple of what is known to take little enough time
MOST_FALL = 0.5  # the smallest share of its size that one slow batch leaves


def delay_within(deadline: float) -> float:
    """Return the seconds that bulk work may add to an interactive request whose answer is promised within `deadline` seconds."""
    return max(LEAST_DELAY, SLO_SHARE * deadline)


def delay_after(quiet: float, delay: float) -> float:
    """Return how many seconds a bulk batch may take when no interactive request has come for `quiet` seconds: `delay`, or more after a long time.

    So a server without interactive requests does its bulk work in batches of any size.
    """
    return max(delay, QUIET_SHARE * quiet)


class BulkSize:
    """The largest bulk batch, in units of cost; `limit` is 0 until a batch came back, which means a single row or item.

    A batch that took longer than it may makes the limit smaller at once, in proportion. One that took less time makes it larger little by little: with
    a fixed time per batch, the proportion is below the size that takes just as long as it may, so the limit comes near to that size from below.
    """

    __slots__ = ("limit",)

    def __init__(self) -> None:
        self.limit = 0.0

    def learn(self, cost: float, seconds: float, delay: float) -> None:
        """Learn that a bulk batch of this `cost` took so many `seconds`, of which it may take `delay`."""
        most = MOST_GROWTH * max(self.limit, cost)
        wanted = most if seconds <= 0.0 else min(most, cost * delay / seconds)
        if seconds > delay:
            self.limit = min(self.limit, max(wanted, MOST_FALL * self.limit))
        elif wanted > self.limit:
            self.limit += GROWTH * (wanted - self.limit)
