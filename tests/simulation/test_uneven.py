"""A model with two kinds of workers in virtual time: the real batcher beside the exact optimum."""

import numpy as np
import pytest
from tests.policy.event_loop import needs_compiler
from tests.policy.solve.test_uneven import LATENCY, kinds_of, workers
from tests.policy.uneven_workers import Workers

from weir.policy.cost.profile import Floats
from weir.policy.online.uneven import UnevenPolicy
from weir.policy.rules import Greedy
from weir.policy.solve.uneven import LOADS, WorkerKind, solve_uneven
from weir.simulation.uneven import UnevenRun, run_uneven

REQUESTS = 20_000


def arrivals(rate: float, seed: int = 1) -> Floats:
    """Return Poisson arrivals at `rate` per ms, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, REQUESTS)) / 1000.0


def run(case: Workers, *, counts: tuple[int, int] = (1, 1), greedy: bool = False) -> UnevenRun:
    kinds = kinds_of(case, counts)
    policy = Greedy() if greedy else UnevenPolicy(solve_uneven(kinds, LATENCY, LOADS[1:7:2]))
    return run_uneven(kinds, policy, arrivals(case.rate))


@needs_compiler
@pytest.mark.parametrize(("shape", "ratio", "load"), [("affine", 2, 0.5), ("steps", 4, 0.3), ("linear", 4, 0.1)])
def test_the_real_batcher_is_within_3_percent_of_the_optimum(shape: str, ratio: int, load: float) -> None:
    """The policy estimates the rate itself, and has tables for loads of 0.1, 0.3 and 0.5. In uneven.c a row arrives at the end
    of its step, and so waits for half a step less than here."""
    case = workers(shape, ratio, load)
    found = float(run(case).response_time_ms.mean())
    assert found <= 1.03 * case.best() + 0.5
    assert run(case, greedy=True).response_time_ms.mean() > found


def test_every_request_is_answered_and_the_slow_worker_gets_less() -> None:
    found = run(workers("affine", 4, 0.3))
    assert len(found.response_time_ms) == sum(found.rows) == REQUESTS
    assert 0 < found.rows[1] < found.rows[0] / 4


def test_several_workers_of_each_kind_are_better_than_greedy() -> None:
    """Three fast workers and two slow ones: the solver takes those of one kind together."""
    case = workers("affine", 4, 0.5)
    case = case._replace(rate=2.5 * case.rate)
    ours, greedy = (run(case, counts=(3, 2), greedy=each).response_time_ms.mean() for each in (False, True))
    assert ours < 0.95 * greedy


def test_no_row_waits_for_the_fast_worker_longer_than_is_allowed() -> None:
    case = workers("linear", 8, 0.1)
    fast, slow = case.profiles()
    kinds = WorkerKind(fast.scaled(time=100.0), 1), WorkerKind(slow.scaled(time=100.0), 1)
    policy = UnevenPolicy(solve_uneven(kinds, LATENCY, LOADS[1:2]))
    rows = [
        run_uneven(kinds, policy.fresh(), arrivals(case.rate / 100.0)[:4000], max_queue_delay=each).rows
        for each in (1e6, 0.1)
    ]
    assert rows[1][1] > rows[0][1], "the bound on waits is above the table"
