"""As many workers as the load needs: what a service decides, in virtual time, with workers that the test commands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.rings import subcases
from tests.serving.kit import Square
from tests.waiting import turns

from weir import Conflict, DeadlineExceeded, ModelError, ModelNotReady, Service, SettingsError
from weir.policy.scaling import Capacity, ScalingDecision, ScalingReason
from weir.simulation.scaling import CapacityRequest
from weir.testing import FakeClock, FakeExecutor
from weir.tuning.workers import FEWEST, WorkerTuner


class Slots(FakeExecutor):
    """An executor whose workers start when the test says so, or fail with its error."""

    def __init__(self) -> None:
        super().__init__(None)
        self.wanted: list[asyncio.Future[None]] = []
        self.removed: list[int | None] = []

    async def add_worker(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self.wanted.append(ready)
        await ready
        await super().add_worker()

    async def remove_worker(self, worker: int | None = None) -> None:
        self.removed.append(worker)
        await super().remove_worker(worker)

    def answer_everything(self) -> None:
        while self.pending:
            self.respond_next(lambda batch: batch)


class Rig:
    """A service with a range of workers. A batch takes a second, whatever its size; one worker serves 4 rows per second."""

    def __init__(self, workers: str, **settings: Any) -> None:
        self.clock, self.executor = FakeClock(), Slots()
        self.simulated: list[tuple[CapacityRequest, asyncio.Future[Capacity]]] = []
        self.service = Service(
            Square, executor=self.executor, clock=self.clock, workers=workers, max_batch_size=4, **settings
        )
        assert self.service.generation.scaler is not None
        self.scaler: WorkerTuner = self.service.generation.scaler
        self.scaler._measure = self.simulate
        self.calls: list[asyncio.Future[Any]] = []

    async def simulate(self, request: CapacityRequest, limit: float) -> Capacity:
        answer: asyncio.Future[Capacity] = asyncio.get_running_loop().create_future()
        self.simulated.append((request, answer))
        return await answer

    async def pass_seconds(self, seconds: int, rows: int = 0) -> None:
        """Let `rows` rows arrive in each of so many seconds; the batches that run are answered at their ends."""
        for _ in range(seconds):
            self.calls += [self.service.infer(1) for _ in range(rows)]
            await turns()
            self.clock.advance(1.0)
            self.executor.answer_everything()
            await turns(8)

    async def start_all(self) -> None:
        """Let every worker be ready that is starting."""
        for ready in self.executor.wanted:
            if not ready.done():
                ready.set_result(None)
        await turns(8)

    @property
    def starting(self) -> int:
        return sum(not ready.done() for ready in self.executor.wanted)

    @property
    def scaling(self) -> dict[str, Any]:
        explained: dict[str, Any] = self.service.explain_policy()["scaling"]
        return explained


@asynccontextmanager
async def running(workers: str = "1..4", seconds: int = 0, rows: int = 0, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(workers, **settings)
    await rig.service.start()
    await turns()
    await rig.pass_seconds(seconds, rows)
    try:
        yield rig
    finally:
        await rig.service.stop(0.0)
        await asyncio.gather(*rig.calls, return_exceptions=True)


async def test_number_stays_until_service_times_are_known() -> None:
    async with running() as rig:
        await rig.pass_seconds(FEWEST - 1, 4)
        assert rig.scaling["because"] == "too few batches have been run to know what a worker can do"
        assert (rig.scaling["wanted"], rig.starting, rig.simulated) == (1, 0, [])


async def test_workers_start_together_and_stop_one_by_one_as_the_rate_changes() -> None:
    async with running(seconds=10, rows=10) as rig:
        assert (rig.scaling["wanted"], rig.starting) == (4, 3)
        await rig.pass_seconds(2, 10)
        assert rig.starting == 3, "they are not asked for twice"
        await rig.start_all()
        assert rig.service.ready_workers == rig.service.worker_count == 4
        assert (rig.scaling["starts"], rig.scaling["starting"]) == (3, 0)
        assert rig.scaling["start_up_seconds"] > 1.0
        await rig.pass_seconds(200, 1)
        assert rig.executor.removed == [3, 2, 1]
        assert (rig.scaling["reason"], rig.scaling["wanted"], rig.scaling["stops"]) == ("rate", 1, 3)
        assert rig.scaling["because"] == "1 worker keeps load=0.8 up to 3.2 rows/s, and 1 arrive"


async def test_worker_that_leaves_finishes_its_batch() -> None:
    async with running(max_queue_delay=0.0, seconds=10, rows=10) as rig:
        await rig.start_all()
        await rig.pass_seconds(60, 1)
        assert rig.executor.removed, "some have left"
        assert all(call.done() and call.result() == 1 for call in rig.calls)


async def test_capacity_is_simulated_once_and_used() -> None:
    async with running(seconds=5, rows=2) as rig:
        ((request, answer),) = rig.simulated
        assert request.profile.max_rate == pytest.approx(4.0)
        assert (request.most, request.objective, request.target_load, request.solved) == (4, None, None, False)
        figures = [[(500.0 * count, 900.0 * count, 0.5)] for count in (4, 3, 2, 1)]
        answer.set_result(Capacity("knee", [2.5, 5.0, 7.5, 10.0], 4.0, 1.0, loads=(1.0,), figures=figures))
        await rig.pass_seconds(10, 2)
        assert len(rig.simulated) == 1
        scaling = rig.scaling
        assert scaling["solved"] and scaling["one_less"] is None
        assert scaling["because"] == "1 worker stays below the knee of the cost up to 2.5 rows/s, and 2 arrive"
        assert scaling["now"] == {"workers": 1, "response_time_ms": 2000.0, "p99_ms": 3600.0, "utilisation": 0.25}
        assert scaling["one_more"]["p99_ms"] == 2700.0


async def test_capacity_that_cannot_be_simulated_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    async with running(target_load=0.5, seconds=5, rows=1) as rig:
        rig.simulated[0][1].set_exception(ModelError("the solving process ended"))
        await rig.pass_seconds(1)
        assert rig.scaling["solved"] and rig.scaling["goal"] == "load=0.5"
        assert "used up to a load of 0.5: the solving process ended" in caplog.text
        await rig.pass_seconds(60, 1)
        assert len(rig.simulated) == 1


async def test_no_worker_is_kept_without_requests_and_the_first_waits_for_one() -> None:
    async with running("0..2", scale_to_zero_after=20.0, seconds=5, rows=1) as rig:
        await rig.pass_seconds(25)
        assert (rig.service.worker_count, rig.scaling["reason"]) == (0, "idle")
        assert rig.scaling["because"] == "no request arrived for 20 s"
        assert rig.service.ready
        call = rig.service.infer(7)
        await turns()
        assert rig.starting == 1, "at once, not at the next decision"
        await rig.pass_seconds(3)
        assert not call.done()
        await rig.start_all()
        assert len(rig.executor.pending) == 1
        rig.executor.answer_everything()
        assert await call == 7


async def test_request_waits_for_a_start_until_its_deadline_and_a_stop_for_it() -> None:
    async with running("0..2", scale_to_zero_after=5.0, seconds=10) as rig:
        assert rig.service.worker_count == 0  # though there was no request
        late = rig.service.infer(7, timeout=2.0)
        await rig.pass_seconds(3)
        with pytest.raises(DeadlineExceeded, match="no response within the timeout of 2 s"):
            await late
        call = rig.service.infer(7)
        await turns()
        stopping = asyncio.ensure_future(rig.service.stop(10.0))
        await turns()
        await rig.start_all()
        rig.executor.answer_everything()
        await stopping
        assert await call == 7


async def test_start_that_fails_is_tried_again_later_and_nobody_waits_for_it() -> None:
    async with running("0..2", scale_to_zero_after=5.0, seconds=10) as rig:
        call = rig.service.infer(7)
        await turns()
        rig.executor.wanted[-1].set_exception(ModelError("no room on the GPU"))
        await turns()
        with pytest.raises(ModelNotReady, match="no worker of 'square' can be started: no room on the GPU"):
            await call
        assert rig.service.not_ready_reason == "no worker of 'square' can be started: no room on the GPU"
        assert (rig.scaling["failures"], rig.scaling["error"]) == (1, "no room on the GPU")
        tries = len(rig.executor.wanted)
        await rig.pass_seconds(3)
        assert len(rig.executor.wanted) == tries + 1
        await rig.pass_seconds(20)
        await rig.start_all()
        assert rig.service.ready
        assert rig.scaling["error"] is None


async def test_lost_worker_is_not_replaced_twice() -> None:
    async with running(seconds=10, rows=10) as rig:
        await rig.start_all()
        rig.executor.lose(2)
        before = len(rig.executor.wanted)
        await rig.pass_seconds(3, 10)
        assert len(rig.executor.wanted) == before, "the executor brings it back"
        rig.executor.revive(2)


async def test_worker_stays_for_what_must_run_again() -> None:
    """Even where nothing arrives for long, and the executor takes as long to bring it back."""
    async with running("0..1", scale_to_zero_after=2.0) as rig:
        call = rig.service.infer(7)
        await turns()
        rig.executor.lose(0)
        await rig.pass_seconds(5)
        assert rig.executor.removed == []
        rig.executor.revive(0)
        rig.executor.answer_everything()
        assert await call == 7


async def test_workers_of_a_range_are_not_added_by_hand() -> None:
    async with running() as rig:
        for change in (rig.service.add_worker, rig.service.remove_worker):
            with pytest.raises(Conflict, match=r"has workers=1\.\.4, so it autoscales"):
                await change()


async def test_fixed_number_of_workers_has_nothing_to_explain() -> None:
    async with Service(Square, executor=FakeExecutor(lambda batch: batch)) as service:
        assert (service.explain_policy()["scaling"], service.worker_count) == (None, 1)


@pytest.mark.parametrize("executor", ["inline", "external"])
def test_range_needs_workers_that_can_be_started(executor: str) -> None:
    socket: dict[str, Any] = {"worker_socket": "unix:/tmp/none"} if executor == "external" else {}
    with pytest.raises(SettingsError, match="a range needs workers that the server starts"):
        Service(Square, executor=executor, workers="1..2", **socket)


LATER = "in 0 s, when a further worker could be ready, at 9 rows/s"
KEEP = "2 workers keep load=0.8 up to 6.4 rows/s"


@subcases(
    ("reason", "queue", "because"),
    [
        (ScalingReason.RATE, 0.0, f"{KEEP}, and 5 arrive"),
        (ScalingReason.QUEUE, 12.4, f"12 rows would wait {LATER}; 2 workers answer them in time"),
        (ScalingReason.QUEUE, 0.0, f"with fewer workers rows would be late {LATER}"),
        (ScalingReason.HELD, 0.0, f"{KEEP}; 1 would do now, but more were needed shortly before"),
        (ScalingReason.FIRST, 0.0, "a request is waiting and there was no worker"),
        (ScalingReason.LEAST, 0.0, f"the minimum is 1; {KEEP}, and 5 arrive"),
        (ScalingReason.MOST, 0.0, "the maximum is 4, but 1 are needed"),
    ],
)
async def test_each_reason_is_a_sentence(reason: ScalingReason, queue: float, because: str) -> None:
    async with running(seconds=5, rows=1) as rig:
        rig.scaler.decision = ScalingDecision(2, reason, 5.0, 9.0, 1, 1, queue)
        assert rig.scaling["because"] == because
