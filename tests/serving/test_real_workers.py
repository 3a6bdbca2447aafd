"""The promises of a service, kept with real worker processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import uvloop
from tests.serving.kit import Watch, squares
from tests.serving.models import Broken, Dangerous, Echo, Gated, Square, Total

import weir

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
def test_it_serves(run: Callable[[Any], None], executor: str) -> None:
    async def main() -> None:
        async with weir.Service(Square, executor=executor, workers=2 if executor == "process" else 1) as service:
            assert await service.infer(3) == 9
            assert await asyncio.gather(*map(service.infer, range(880))) == squares(list(range(880)))
            assert await service.infer_many(range(3000)) == squares(list(range(3000)))
            assert [answer async for answer in service.stream(range(1000))] == squares(list(range(1000)))
            assert (await service.deep_health())["healthy"]

    run(main())


async def test_large_values_and_arrays_come_back_as_they_went() -> None:
    async with weir.Service(Echo) as service:
        values: list[Any] = [b"x" * 100_000, numpy.arange(100_000), "y" * 100_000, {"z": bytearray(50_000)}, None]
        for value in values:
            answer = await service.infer(value)
            assert type(answer) is type(value)
            assert numpy.array_equal(answer, value) if isinstance(value, numpy.ndarray) else answer == value
    async with weir.Service(Total) as service:
        answer = await service.infer({"x": numpy.ones((1000, 10), "float32")})
        assert answer["total"].tolist() == [10.0] * 1000


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_poison_item_and_a_killer_item_fail_alone(workers: int) -> None:
    async with weir.Service(Dangerous, workers=workers, max_batch_size=64) as service:
        for bad, error in (("poison", weir.ModelError), ("killer", weir.ModelCrashed), ("odd", weir.InvalidRequest)):
            items = [*range(20), bad, *range(20, 63)]
            calls = [service.infer(item) for item in items]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            failed = answers.pop(20)
            assert isinstance(failed, error) and isinstance(failed, weir.ModelCrashed) == (error is weir.ModelCrashed)
            assert answers == squares(list(range(63)))
            if bad == "poison":
                assert isinstance(failed, weir.ModelError)
                assert isinstance(failed, ArithmeticError) and isinstance(failed.__cause__, ArithmeticError)
                assert "predict" in failed.remote_traceback
        assert service.ready


def pids(service: weir.Service) -> list[int]:
    return [worker["pid"] for worker in service.state()["workers"] if worker["state"] == "ready"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_killing_workers_under_load_leaves_no_request_unanswered(workers: int) -> None:
    heard = Watch()
    kills, answered = 0, 0
    async with weir.Service(Square, workers=workers, max_batch_size=16, observers=[heard]) as service:

        async def caller(number: int) -> None:
            nonlocal answered
            while kills < 6:
                assert await service.infer(number) == number * number
                answered += 1
                number += 64

        def recovered(enough: int) -> bool:
            return answered >= enough and len(pids(service)) == workers

        async def killer() -> None:
            nonlocal kills
            while kills < 6:
                # What a dead worker had runs again, and must not meet a second kill.
                enough = answered + 500
                await heard.until(partial(recovered, enough))
                os.kill(pids(service)[kills % workers], signal.SIGKILL)
                kills += 1

        await asyncio.gather(killer(), *map(caller, range(64)))
        state = service.state()
        assert (state["waiting"], state["in_flight"]) == (0, 0)
        # The last one may have had no batch, so that no caller waited until its end was noticed.
        await heard.until(lambda: [state for _, state, _ in heard.worker_changes].count("lost") == 6)
    assert heard.ends == answered
    assert heard.refusals == []


class Gate:
    """A named pipe at which a Gated model waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)

    async def lift(self) -> None:
        """Let the batch through that waits, or will, and all after it."""

        def lift() -> None:
            with self.path.open("wb"):  # once somebody waits
                self.path.unlink()

        await asyncio.to_thread(lift)


@asynccontextmanager
async def gated(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[weir.Service, Gate, Watch]]:
    gate, watch = Gate(tmp_path / "gate"), Watch()
    async with weir.Service(Gated, params={"gate": str(gate.path)}, observers=[watch], **settings) as service:
        yield service, gate, watch


async def test_a_cancelled_member_of_a_running_batch_harms_no_neighbour(tmp_path: Path) -> None:
    async with gated(tmp_path) as (service, gate, watch):
        calls = [service.infer(item) for item in range(64)]
        await watch.until(lambda: service.state()["in_flight"] == 64)
        gone = (0, 20, 63)
        for member in gone:
            calls[member].cancel()
        await gate.lift()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answers[member], asyncio.CancelledError) for member in gone)
        assert [each for each in answers if isinstance(each, int)] == [n * n for n in range(64) if n not in gone]


async def test_deadlines_hold_in_line_and_in_compute(tmp_path: Path) -> None:
    async with gated(tmp_path, max_batch_size=1) as (service, gate, _):
        running, waiting, patient = (
            service.infer(item, timeout=timeout) for item, timeout in ((1, 0.05), (2, 0.02), (3, 20.0))
        )
        for late in (waiting, running):
            started = service.now()
            with pytest.raises(weir.DeadlineExceeded):
                await late
            assert service.now() - started < 5.0
        await gate.lift()
        assert await patient == 9
        assert service.state()["batches"]["idle"] + service.state()["batches"]["size"] == 2


async def test_overload_waits_or_is_refused_and_accepted_work_is_done(tmp_path: Path) -> None:
    async with gated(tmp_path, max_batch_size=4, max_queue_size=8) as (service, gate, watch):
        calls = [service.infer(item, backpressure=False) for item in range(100)]
        await watch.until(lambda: service.state()["in_flight"] == 4)
        patient = [service.infer(item) for item in range(100)]
        await gate.lift()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[:8] == squares(list(range(8)))
        assert {type(answer) for answer in answers[8:]} == {weir.Overloaded}
        assert await asyncio.gather(*patient) == squares(list(range(100)))


async def test_draining_under_load_fails_no_accepted_request() -> None:
    service = weir.Service(Square, workers=2, max_batch_size=8, max_queue_size=32)
    await service.start()
    accepted = [service.infer(item) for item in range(500)]
    stopping = asyncio.ensure_future(service.stop(20.0))
    await asyncio.sleep(0)
    with pytest.raises(weir.Draining):
        await service.infer(1)
    await stopping
    assert await asyncio.gather(*accepted) == squares(list(range(500)))


async def test_a_stream_left_half_way_leaves_nothing_behind() -> None:
    watch = Watch()
    async with weir.Service(Square, workers=2, max_batch_size=8, observers=[watch]) as service:
        for stream in [service.stream(range(100_000)) for _ in range(3)]:
            assert [await anext(stream) for _ in range(100)] == squares(list(range(100)))
            await stream.aclose()
        await watch.until(lambda: service.state()["in_flight"] == 0)
        assert service.state()["waiting"] == 0
        assert await service.infer(3) == 9


async def test_a_model_that_cannot_load_stops_its_neighbours() -> None:
    registry = weir.Registry([weir.Service(Square), weir.Service(Broken)])
    with pytest.raises(weir.ModelError, match=r"weights\.bin"):
        await registry.start()
    assert not registry.ready


def test_threads_that_wait_for_each_answer_share_batches_too() -> None:
    with weir.BlockingService(Square) as service, ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda n: [service.infer(n + item) for item in range(100)], range(64)))
        assert 6400 / sum(service.state()["batches"].values()) > 2  # how many start together is the machine's affair
