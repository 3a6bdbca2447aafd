"""Service times change while a solved policy serves: its queue stays stable wherever some policy can keep it so."""

import asyncio
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from tests.batching.mill import Asked
from tests.tuning.solving_rig import SPENT, turns

from weir.batching.batcher import Batcher
from weir.batching.service_time import ServiceTime
from weir.batching.settings import BatchingSettings
from weir.messages import Wakeup
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import Bank, solve_bank
from weir.testing import FakeClock
from weir.tuning import SolveRequest, SolvingProcess
from weir.tuning.policy_tuner import PolicyTuner
from weir.workers.settings import WorkerSettings

PROFILE = Profile.linear(alpha_ms=0.3, tau0_ms=1.0, max_batch_size=32, cv=0.02)
SLOW = PROFILE.scaled(time=np.where(PROFILE.sizes > 16, 1.6, 1.0))  # serves most in batches of 16
RATE = 0.85 * SLOW.max_rate
SOLVED = 0.5  # seconds


class Unconcerned(NamedTuple):
    """A service whose batcher asks the policy at each arrival."""

    service_time: ServiceTime
    label: str = "m"

    def policy_changed(self) -> None:
        """Do nothing."""


class SlowSolver(SolvingProcess):
    """Takes SOLVED seconds of `clock`."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    async def solve(self, request: SolveRequest, limit: float) -> Bank:
        await pause(self._clock, SOLVED)
        return await solve(request)


async def queue_over_time(seconds: float, *, tuned: bool) -> tuple[list[int], PolicyTuner]:
    """Let rows arrive for so many seconds, while from the 10th second on batches of more than 16 rows take 60 % longer. Return how
    many wait at each arrival, and the tuner.
    """
    clock = FakeClock()
    policy = SolvedPolicy(await solve(SolveRequest(PROFILE, Prices(), 1, None)))
    batcher = Batcher(BatchingSettings(max_batch_size=32, max_queue_size=10**6, max_queue_delay=1e9), policy)
    tuner = PolicyTuner(
        Unconcerned(batcher.service),
        policy,
        WorkerSettings(),
        clock=clock,
        pause=partial(pause, clock),
        solver=SlowSolver(clock),
        watch=tuned,
    )
    tuner.worker_changed("m", 0, "ready", "")
    tuner.open()
    batcher.worker_ready(0, 1, 0.0)
    rng = np.random.default_rng(1)
    arrivals, waiting, end = np.cumsum(rng.exponential(0.001 / RATE * 1000.0, int(seconds * RATE))), list[int](), inf
    for number, arrival in enumerate(arrivals.tolist()):
        while True:
            running = list(batcher.running.values())
            until = batcher.next_wakeup or inf
            now = min(arrival, end, until)
            clock.advance(now - clock())
            if running and end == now:
                tuner.computed("m", batcher.finished(running[0].batch_id, now), SPENT, now)
                await turns()
                end = inf
            elif now == arrival:
                batcher.submit(Asked(number, arrival, inf), now)
                waiting.append(batcher.waiting_rows)
            for cut in batcher.poll(now, Wakeup.ARRIVAL):
                law = PROFILE if now < 10.0 else SLOW
                end = now + float(rng.normal(1.0, 0.02) * law.service_time_ms[cut.rows - 1]) / 1000.0
            if now == arrival:
                break
    await tuner.close()
    return waiting, tuner


@pytest.mark.nightly
def test_a_queue_that_some_policy_keeps_stable_stays_so_where_only_large_batches_become_slow() -> None:
    waiting, tuner = asyncio.run(queue_over_time(30.0, tuned=True))
    third = len(waiting) // 3
    assert max(waiting[:third]) < 500
    assert max(waiting[-third // 2 :]) < 500
    assert 1 <= tuner.counts["drift"] <= 3
    bank = tuner.policy.bank
    assert bank is not None
    assert bank.profile.service_time_ms == pytest.approx(SLOW.service_time_ms, rel=0.05)


def test_without_new_tables_it_would_grow_without_end() -> None:
    waiting, tuner = asyncio.run(queue_over_time(16.0, tuned=False))
    assert waiting[-1] > 2000 and not tuner.counts


async def solve(request: SolveRequest) -> Bank:
    """Solve at once."""
    return solve_bank(request.profile, request.prices)


async def pause(clock: FakeClock, seconds: float) -> None:
    """Wait until the clock has gone on."""
    until = clock() + seconds
    while clock() < until:  # noqa: ASYNC110 - the clock is the test's
        await asyncio.sleep(0)
