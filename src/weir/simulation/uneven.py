"""Runs a model with several kinds of workers in virtual time: the real Batcher, with a profile for each kind."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weir.batching.settings import BatchingSettings
from weir.messages import Dispatch
from weir.policy.cost.profile import Floats
from weir.policy.decision import Policy
from weir.policy.solve.uneven import WorkerKind
from weir.simulation.engine import Engine, EventLog, LogPart, ServiceTimes


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

    engine = Engine(settings, policy, OfWorker(), EventLog(note), workers=len(numbers), kinds=numbers)
    engine.arrive(0, arrivals.tolist())
    engine.finish()
    return UnevenRun(1000.0 * np.concatenate(seconds), tuple(rows), energy)
