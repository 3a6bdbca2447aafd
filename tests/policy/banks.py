"""Banks for tests: small, and made by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from weir.messages import Reason
from weir.policy.cost import LatencySLO, Prices, Profile
from weir.policy.decision import Decision, Observation
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import limit_table, stacked
from weir.simulation import banks

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=4.0, max_batch_size=8)  # serves 667 rows/s
RATES = (100.0, 200.0, 400.0)
LIMITS = (2, 4, 6)


def bank(**changes: Any) -> Bank:
    """Return a bank of three rates, whose tables wait for 2, 4 and 6 rows, with changes."""
    tables = stacked([limit_table(limit, 8) for limit in LIMITS])
    fields: dict[str, Any] = {
        "profile": PROFILE,
        "prices": Prices(1.0, 2000.0, 200.0),  # so dear is energy that these waits pay
        "workers": 1,
        "objective": None,
        "rates": RATES,
        "tables": tables,
        "max_waiting": [0] * 3,
        "response_time_ms": [10.0, 12.0, 20.0],
        "p99_ms": [20.0, 24.0, 40.0],
        "power_w": [1.0, 1.5, 2.5],
    }
    return Bank(**fields | changes)


def promised() -> Bank:
    """Return the bank with a promise about latency: 40 ms, with a margin of 1."""
    return bank(objective=LatencySLO(0.04, 0.01, 0.001))


@contextmanager
def searched(loads: Sequence[float], requests: int, checked: int = 5_000) -> Iterator[None]:
    """Within the block, what keeps a latency objective is searched for at these loads only, from so many simulated requests."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(banks, "PROMISE_LOADS", loads)
        changed.setattr(banks, "PROMISE_REQUESTS", requests)
        changed.setattr(banks, "CHECKED_REQUESTS", checked)
        yield


class Feed:
    """Lets rows arrive at a policy that is asked after each, as if a worker were always idle."""

    def __init__(self, now: float = 0.0, **rest: Any) -> None:
        self.now = now
        self.arrivals = 0
        self.last = now
        self.rest: dict[str, Any] = {"idle_places": 1, "workers": 1, "max_batch_size": 8} | rest

    def seen(self, waiting: int, *, age: float = 0.0, **rest: Any) -> Observation:
        """Return what is seen now, with so many rows waiting, the oldest for `age` seconds."""
        told = {"max_queue_delay": 1e9, "draining": False} | self.rest | rest
        return Observation(
            self.now, waiting, self.now - age, self.now + 1e9, self.arrivals, self.last, told["idle_places"],
            told["workers"], told["max_batch_size"], told["max_queue_delay"], told["draining"],
        )  # fmt: skip

    def arrive(self, policy: Any, rate: float, count: int, waiting: int = 1) -> Decision:
        """Let `count` rows arrive at equal gaps, ask each time, and return the last answer."""
        for _ in range(count):
            self.now += 1.0 / rate
            self.last = self.now
            self.arrivals += 1
            answer: Decision = policy.decide(self.seen(waiting))
        return answer


def served(rows: int, limit: int) -> Decision:
    """Return the decision to serve so many rows by a table of that limit."""
    return Decision(rows, Reason.POLICY, None, limit)
