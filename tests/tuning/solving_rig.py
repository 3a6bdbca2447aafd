"""A resolver with a solver that the test commands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.tuning.banks import bank_for, small_bank
from tests.waiting import turns

from weir.batching.service_time import KindTimes, ServiceTime
from weir.messages import Dispatch, Reason, Timing, Wakeup
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import Bank
from weir.policy.solve.uneven import solve_uneven
from weir.testing import FakeClock
from weir.tuning import SolveRequest, SolvingProcess, UnevenRequest
from weir.tuning.policy_tuner import PolicyTuner, Tuning
from weir.workers.settings import WorkerSettings

SPENT = Timing(0.0, 0.0, 0.0)


class Solver(SolvingProcess):
    """Solves when the test says so; and for workers of two kinds at once, for few rates."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven_wishes: list[UnevenRequest] = []
        self.asked: list[tuple[SolveRequest, asyncio.Future[Bank]]] = []
        self.cancelled = 0
        self.pauses: list[tuple[float, asyncio.Future[None]]] = []

    async def solve(self, wish: Any, limit: float) -> Any:
        if isinstance(wish, UnevenRequest):
            self.uneven_wishes.append(wish)
            return solve_uneven(wish.kinds, wish.prices, [0.1, 0.5])
        answer: asyncio.Future[Bank] = asyncio.get_running_loop().create_future()
        self.asked.append((wish, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def pause(self, seconds: float) -> None:
        over = asyncio.get_running_loop().create_future()
        self.pauses.append((seconds, over))
        await over

    @property
    def wishes(self) -> list[SolveRequest]:
        return [wish for wish, _ in self.asked]

    async def answer(self, error: Exception | None = None) -> None:
        """Answer the last question."""
        wish, answer = self.asked[-1]
        if error is None:
            answer.set_result(bank_for(wish))
        else:
            answer.set_exception(error)
        await turns(8)

    async def go_on(self) -> None:
        """End the last pause."""
        self.pauses[-1][1].set_result(None)
        await turns(8)


class Rig:
    def __init__(
        self, policy: SolvedPolicy, settings: WorkerSettings | None = None, watch: bool = True, **options: Any
    ) -> None:
        settings = settings or WorkerSettings()
        self.solver = Solver()
        self.swaps = 0
        self.label = "square"
        self.service_time = KindTimes(2, lambda: [1, 1]) if settings.worker_kinds else ServiceTime()
        self.clock = FakeClock()
        tuning = Tuning(self, settings, 64, self.clock, self.solver.pause, watch)
        self.resolver = PolicyTuner(policy, tuning, solver=self.solver, **options)

    def policy_changed(self) -> None:
        self.swaps += 1

    async def changing(self, changes: dict[str, object]) -> asyncio.Task[object]:
        """Begin a change of the prices."""
        change: asyncio.Task[object] = asyncio.create_task(self.resolver.change(changes))
        await turns(8)
        return change

    async def worker(self, index: int, state: str) -> None:
        self.resolver.worker_changed("square", index, state, "")
        await turns(8)

    async def serve(self, rows: int, seconds: float, batches: int, worker: int = 0) -> None:
        for _ in range(batches):
            batch = Dispatch(1, worker, [], None, rows, 1.0, Reason.IDLE, rows, 0.0, None, Wakeup.ARRIVAL, 0.0)
            batch.seconds = seconds
            times = self.service_time
            (times.of[worker] if isinstance(times, KindTimes) else times).learn(rows, seconds, 0.0, 1.0)
            self.resolver.computed("square", batch, SPENT, 0.0)
        await turns(8)

    @property
    def bank(self) -> Bank:
        bank = self.resolver.policy.bank
        assert bank is not None
        return bank


@asynccontextmanager
async def running(policy: SolvedPolicy | None = None, workers: int = 1, **options: Any) -> AsyncIterator[Rig]:
    """A resolver that is open, of a policy whose tables are for one worker."""
    rig = Rig(policy or SolvedPolicy(small_bank()), **options)
    for index in range(workers):
        await rig.worker(index, "ready")
    rig.resolver.open()
    await turns(8)
    try:
        yield rig
    finally:
        await rig.resolver.close()
