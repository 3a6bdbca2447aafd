"""A model with two kinds of workers in virtual time: the real batcher beside the exact optimum."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from benchmarks.policies.uneven_workers import Workers
from tests.policy.compiler import needs_compiler
from tests.policy.solve.test_uneven import LATENCY, kinds_of, workers
from tests.rings import spread

from weir.batching.settings import BatchingSettings
from weir.messages import Dispatch
from weir.policy.cost.profile import Floats
from weir.policy.decision import Policy
from weir.policy.online.joint import UnevenPolicy
from weir.policy.rules import Greedy
from weir.policy.solve.uneven import LOADS, WorkerKind, solve_uneven
from weir.simulation.engine import Engine, LogPart, ServiceTimes, SimulatedModel, SimulatedWorkers

REQUESTS = 20_000


class UnevenRun(NamedTuple):
    """What happened to the requests.

    Attributes:
        response_time_ms: of each request that was answered, in ms.
        rows: how many rows each kind of workers has served.
        energy_mj: of all batches.
    """

    response_time_ms: Floats
    rows: tuple[int, ...]
    energy_mj: float


def run_uneven(
    kinds: Sequence[WorkerKind], policy: Policy, arrivals: Floats, *, max_queue_delay: float = 1e6, seed: int = 0
) -> UnevenRun:
    """Return what happens to requests of one row that arrive at `arrivals`, ascending instants in seconds.

    Workers of all kinds are ready from the start; kinds have the numbers 0, 1, ... Waits are at most `max_queue_delay` seconds
    long. The same `seed` gives the same service times.
    """
    numbers = [number for number, each in enumerate(kinds) for _ in range(each.workers)]
    times = [ServiceTimes(each.profile, seed) for each in kinds]
    size = min(each.profile.max_batch_size for each in kinds)
    settings = BatchingSettings(max_batch_size=size, max_queue_delay=max_queue_delay, max_queue_size=1 << 30)
    seconds, rows, energies = [], [0] * len(kinds), [each.profile.energy_mj for each in kinds]
    energy = 0.0

    class OfWorker:
        def of(self, cut: Dispatch) -> float:
            return times[numbers[cut.worker]].of(cut)

    def note(part: LogPart) -> None:
        nonlocal energy
        seconds.append(part.end - part.arrival)
        for worker, size in zip(part.batches.worker.tolist(), part.batches.rows.tolist(), strict=True):
            rows[numbers[worker]] += size
            energy += float(energies[numbers[worker]][size - 1])

    model = SimulatedModel(Engine(), settings, policy, OfWorker(), note, SimulatedWorkers(len(numbers), kinds=numbers))
    model.arrive(0, arrivals.tolist())
    model.engine.finish()
    return UnevenRun(1000.0 * np.concatenate(seconds), tuple(rows), energy)


def arrivals(rate: float, seed: int = 1) -> Floats:
    """Return Poisson arrivals at `rate` per ms, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, REQUESTS)) / 1000.0


def run(case: Workers, *, counts: tuple[int, int] = (1, 1), greedy: bool = False) -> UnevenRun:
    kinds = kinds_of(case, counts)
    policy = Greedy() if greedy else UnevenPolicy(solve_uneven(kinds, LATENCY, LOADS[1:7:2]))
    return run_uneven(kinds, policy, arrivals(case.rate))


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "ratio", "load"), spread([("affine", 2, 0.5), ("steps", 4, 0.3), ("linear", 4, 0.1)])
)
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
