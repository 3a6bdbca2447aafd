"""The promises of a service, kept with real worker processes."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import uvloop
from tests.fakes import RecordingObserver
from tests.serving.kit import squares
from tests.serving.models import Broken, Dangerous, Paced, Square, Total
from tests.streaming_models import Fire
from tests.waiting import until
from tests.workers.models import Echo

import weir
from weir import Conflict, DeadlineExceeded, Model, Overloaded, Service, SettingsError, Tensor, WorkerLost
from weir.batching.request_state import RequestBase
from weir.errors import WeirError
from weir.messages import KSERVE, LENT, Dispatch, Form, Kind
from weir.model import PAD, RAGGED
from weir.policy import scaling
from weir.wire.inference import ArenaArrays
from weir.wire.kserve_json import BodyPeek
from weir.wire.tensors import shape_key
from weir.workers.process.shared import SharedPool

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


SOAK = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("workers", "depth", "most"), [(1, 1, 6), (2, 2, 6), pytest.param(3, 2, 1000, marks=SOAK)])
async def test_killing_workers_under_load_leaves_no_request_unanswered(workers: int, depth: int, most: int) -> None:
    """And no place of the shared memory taken, in which arrays travel."""
    heard = RecordingObserver()
    kills, answered = 0, 0
    settings: dict[str, Any] = {"workers": workers, "pipeline_depth": depth, "max_batch_size": 16}
    async with weir.Service(Echo, observers=[heard], **settings) as service:

        async def caller(number: int) -> None:
            nonlocal answered
            while kills < most:
                item = numpy.full(5_000, number) if number % 8 == 0 else number
                assert numpy.array_equal(await service.infer(item), item)
                answered += 1
                number += 64

        def recovered(enough: int) -> bool:
            return answered >= enough and len(pids(service)) == workers

        async def killer() -> None:
            nonlocal kills
            while kills < most:
                # What a dead worker had runs again, and must not meet a second kill.
                enough = answered + 500
                await until(partial(recovered, enough))
                os.kill(pids(service)[kills % workers], signal.SIGKILL)
                kills += 1

        await asyncio.gather(killer(), *map(caller, range(64)))
        state = service.state()
        assert (state["waiting"], state["in_flight"]) == (0, 0)
        # The last one may have had no batch, so that no caller waited until its end was noticed.
        await until(lambda: [state for _, state, _ in heard.worker_changes].count("lost") == most)
        gauges = service.executor.gauges()
        assert (gauges["arena_free_bytes"], gauges["results_held_bytes"]) == (gauges["arena_bytes"], 0)
    assert heard.ends == answered
    assert heard.refusals == []


async def test_a_model_that_cannot_load_stops_its_neighbours() -> None:
    registry = weir.Registry([weir.Service(Square), weir.Service(Broken)])
    with pytest.raises(weir.ModelError, match=r"weights\.bin"):
        await registry.start()
    assert not registry.ready


# As many workers as the load needs, with real processes and threads under load: up, down, to zero and back.


FEW_SECONDS = 60.0


class Slow(Model):
    def load(self) -> None:
        time.sleep(0.05)

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(0.01 * len(batch))
        return [item + 1 for item in batch]


class Load:
    """Keeps `width` requests under way, each followed by the next, and checks every answer."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.answered = 0

    async def until(self, condition: Callable[[], Any], width: int, pause: float = 0.0) -> None:
        """Go on until `condition` holds."""

        async def caller(number: int) -> None:
            while not condition():
                item = 1000 * self.answered + number
                assert await self.service.infer(item) == item + 1
                self.answered += 1
                await asyncio.sleep(pause)

        async with asyncio.timeout(FEW_SECONDS):
            await asyncio.gather(*map(caller, range(width)))


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_no_request_is_lost_when_workers_come_and_go(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LEAST_HOLD", 0.3)
    monkeypatch.setattr(scaling, "LEAST_HORIZON", 0.2)
    monkeypatch.setattr(scaling.WorkerScaling, "INTERVAL", 0.02)
    watch = RecordingObserver()
    service = Service(
        Slow, executor=executor, workers="0..3", max_batch_size=2, scale_to_zero_after=0.5, target_load=0.5,
        observers=[watch], max_queue_delay=0.0,
    )  # fmt: skip
    async with service:
        load = Load(service)
        await load.until(lambda: service.ready_workers == service.explain_policy()["scaling"]["wanted"] == 3, width=24)
        await load.until(lambda: service.worker_count < 3, width=1, pause=0.05)
        await until(lambda: service.ready_workers == 0)
        assert service.ready
        assert service.explain_policy()["scaling"]["reason"] == "idle"
        assert await service.infer(41) == 42, "the first request waits for the start"
        await load.until(lambda: service.ready_workers == 3, width=24)
        counts = service.statistics.to_dict()
    assert counts["inference_stats"]["fail"]["count"] == 0
    assert counts["inference_stats"]["success"]["count"] == load.answered + 1


# Streams whose readers leave, dawdle and run late, on workers that die: each ends once, in order, and nothing is left over.


STREAMS = 120


async def reader(service: Service, chance: random.Random, counts: Counter[str]) -> None:
    """Read one stream in one of the ways in which streams are read."""
    count, size = chance.randint(0, 40), chance.choice([0, 0, 100, 50_000])
    death = chance.randint(0, 5) if chance.random() < 0.04 else -1
    leaves_after = chance.randint(0, 10) if chance.random() < 0.3 else 1000
    timeout = chance.choice([0.0, 0.02]) if chance.random() < 0.1 else 30.0
    stream = service.infer_stream([count, size, death], timeout=timeout)
    await asyncio.sleep(chance.random() * 0.3)
    read = 0
    try:
        async for number, text in stream:
            assert (number, len(text)) == (read, size)
            read += 1
            if read >= leaves_after:
                counts["left"] += 1
                return
            if chance.random() < 0.05:
                await asyncio.sleep(chance.random() * 0.3)
        assert read == count
        counts["whole"] += 1
    except (DeadlineExceeded, Overloaded, WorkerLost) as error:
        counts[type(error).__name__] += 1
    finally:
        await stream.aclose()


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_has_its_end(seed: int) -> None:
    watch, counts, chance = RecordingObserver(), Counter[str](), random.Random(seed)
    async with Service(Fire, workers=2, stream_buffer=2, observers=[watch]) as service:
        async with asyncio.timeout(200):
            readers = [reader(service, random.Random(chance.random()), counts) for _ in range(STREAMS)]
            await asyncio.gather(*readers)
            await until(lambda: service.state()["in_flight"] == 0)
        gauges: dict[str, Any] = service.executor.gauges()
        assert gauges["results_held_bytes"] == 0
        assert gauges["arena_free_bytes"] == gauges["arena_bytes"]
    assert counts.total() == STREAMS
    assert watch.ends + len(watch.refusals) == STREAMS
    assert counts["whole"] > STREAMS / 4
    assert counts["left"]
    assert counts["WorkerLost"]


# Workers of two kinds, with real processes.


TWO: dict[str, Any] = {
    "workers": 2,
    "worker_kinds": ["small", "large"],
    "env": [{"KIND": "small", "SECONDS": "0.4"}, {"KIND": "large", "SECONDS": "0.02"}],
    "max_batch_size": 1,
}


def of_kind(service: Service, kind: str) -> Any:
    """Return the state of the worker of `kind`."""
    (found,) = (worker for worker in service.state()["workers"] if worker["kind"] == kind)
    return found


async def test_the_fastest_idle_worker_serves_under_any_rule() -> None:
    async with Service(Paced, **TWO) as service:
        assert {await service.infer(0) for _ in range(6)} == {"small", "large"}  # both are tried
        assert {await service.infer(0) for _ in range(10)} == {"large"}
        assert set(await asyncio.gather(*map(service.infer, range(4)))) == {"small", "large"}


@pytest.mark.parametrize("kind", ["small", "large"])
async def test_a_worker_that_is_killed_comes_back_as_its_own_kind(kind: str) -> None:
    heard = RecordingObserver()
    async with Service(Paced, **TWO, observers=[heard]) as service:
        before = of_kind(service, kind)["pid"]
        os.kill(before, signal.SIGKILL)
        await until(lambda: of_kind(service, kind)["pid"] not in (before, None))
        await until(lambda: of_kind(service, kind)["state"] == "ready")
        for _ in range(2):
            assert set(await asyncio.gather(*map(service.infer, range(2)))) == {"small", "large"}


async def test_each_kind_keeps_a_worker() -> None:
    async with Service(Paced, **TWO) as service:
        with pytest.raises(Conflict, match=r"workers=1: no worker is of the kind 'large'"):
            await service.remove_worker()
        await service.add_worker()
        assert [worker["kind"] for worker in service.state()["workers"]] == ["small", "large", "small"]
        await service.remove_worker()


def test_shared_workers_are_of_one_kind() -> None:
    with pytest.raises(SettingsError, match=r"worker_kinds=.*: models that share workers have workers of one kind"):
        Service(Square, executor=SharedPool().member, workers=2, worker_kinds=["a", "b"])


# Tensors from different frontends, and of different lengths, in one batch of a real worker.


class Reversed(Model):
    """Each row backwards, and how many rows there were in the batch."""

    inputs = (Tensor("x", "FP32", [-1, -1], varying=PAD),)
    outputs = (Tensor("y", "FP32", [-1, -1], like="x"), Tensor("rows", "INT64", [-1]))
    max_batch_size = 4
    policy = "full"

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        y = numpy.zeros_like(batch["x"])
        for row, length in enumerate(batch["x_lengths"]):
            y[row, :length] = batch["x"][row, :length][::-1]
        return {"y": y, "rows": numpy.full(len(y), len(y))}


class RaggedReversed(Reversed):
    inputs = (Tensor("x", "FP32", [-1, -1], varying=RAGGED),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = numpy.split(batch["x"], batch["x_lengths"].cumsum()[:-1])
        count = len(batch["x_lengths"])
        return {"y": numpy.concatenate([row[::-1] for row in rows]), "rows": numpy.full(count, count)}


class TensorsRequest(RequestBase):
    """A request of a frontend."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        self.answer.set_result(output)

    def fail(self, error: WeirError) -> None:
        self.answer.set_exception(error)


def from_json(service: Service, row: list[float]) -> TensorsRequest:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(row)], "data": row}
    body = json.dumps({"inputs": [tensor], "id": "7"}).encode()
    outline = BodyPeek(service.facts.model.inputs)(body)
    return TensorsRequest(Form(30.0, key=outline.key, content_type=KSERVE, accept=KSERVE), body, service.now())


def from_binary(service: Service, rows: list[list[float]]) -> TensorsRequest:
    array = numpy.array(rows, numpy.float32)
    block = service.reserve(array.nbytes)
    assert block is not None
    block.view[: array.nbytes] = array.tobytes()
    view = numpy.frombuffer(block.view, numpy.float32, array.size).reshape(array.shape)
    arrays = ArenaArrays({"x": view}, block)
    key, count = shape_key(arrays, service.facts.model.inputs), len(rows)
    form = Form(30.0, Kind.TENSORS, rows=count, cost=float(count), accept=LENT, key=key)
    return TensorsRequest(form, arrays, service.now())


@pytest.mark.parametrize("model", [Reversed, RaggedReversed])
async def test_they_share_a_batch_and_each_gets_its_own(model: type[Model]) -> None:
    async with Service(model) as service:
        body, binary = from_json(service, [1, 2, 3]), from_binary(service, [[4, 5], [6, 7]])
        service.submit(body)
        service.submit(binary)
        python = await service.infer({"x": [[8.0, 9.0, 10.0, 11.0, 12.0]]})
        assert python["y"].tolist() == [[12, 11, 10, 9, 8]]
        assert python["rows"].tolist() == [4]
        found = json.loads(await body.answer)
        assert (found["model_name"], found["id"]) == (service.name, "7")
        assert [output["data"] for output in found["outputs"]] == [[3, 2, 1], [4]]
        answer = await binary.answer
        assert answer["y"].tolist() == [[5, 4], [7, 6]]
        del answer, binary


async def test_the_place_of_a_request_is_free_after_its_end() -> None:
    """Whatever the end is: an answer, an error, a cancellation in the line."""

    class Touchy(Reversed):
        policy = "greedy"

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            if (batch["x"] < 0).any():
                raise ValueError("negative")
            return super().predict(batch)

    async with Service(Touchy) as service:
        free = service.executor.gauges()["arena_free_bytes"]
        good, bad = from_binary(service, [[1.0] * 20_000]), from_binary(service, [[-1.0] * 20_000] * 3)
        assert service.executor.gauges()["arena_free_bytes"] < free
        service.submit(good)
        service.submit(bad)
        late = from_binary(service, [[1.0] * 20_000])
        service.submit(late)
        service.cancel(late)
        assert (await good.answer)["y"].shape == (1, 20_000)
        with pytest.raises(WeirError, match="negative"):
            await bad.answer
        assert service.executor.gauges()["arena_free_bytes"] == free
