"""Streams in process, with every kind of executor and real workers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.kit import Square, Watch, squares
from tests.streaming_models import Count, Dying, Prefixes, Raising, Script, Ticking

from weir import (
    BlockingService,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Model,
    ModelCrashed,
    ModelError,
    Overloaded,
    Service,
    SettingsError,
    Tensor,
    Unsupported,
    WorkerLost,
)  # fmt: skip
from weir.serving.calls import BURST
from weir.telemetry.recorder import Metrics

pytestmark = pytest.mark.usefixtures("nothing_is_left")
EXECUTORS = ["process", "thread", "inline"]


async def taken(stream: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in stream]


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_streams_of_several_callers_share_batches(executor: str) -> None:
    watch = Watch()
    async with Service(Count, executor=executor, observers=[watch]) as service:
        answers = await asyncio.gather(*(taken(service.infer_stream(count)) for count in (3, 1, 4)))
        assert answers == [[1, 2, 3], [1], [1, 2, 3, 4]]
        assert [dispatch.rows for dispatch in watch.dispatches] == [3]
        assert (await service.deep_health())["healthy"]


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_an_answer_is_there_before_the_next_is_computed(executor: str, tmp_path: Path) -> None:
    ledger, watch = tmp_path / "ledger", Watch()
    params = {"ledger": str(ledger)}
    async with Service(Ticking, executor=executor, params=params, observers=[watch]) as service:
        stream = service.infer_stream("go")
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        await watch.until(lambda: watch.timings)  # one who leaves ends his part
        assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_the_model_hears_of_a_reader_who_left_and_goes_on_for_the_others(executor: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with Service(Script, executor=executor, params={"ledger": str(ledger)}) as service:
        gate = tmp_path / "gate"
        if executor == "inline":
            gate.touch()  # nothing runs while its model waits
        leaving = service.infer_stream(["a", None, None, None, "never"])
        staying = service.infer_stream(["b", {"until": str(gate)}, "c", "d", "e"])
        first, second = await asyncio.gather(anext(leaving), anext(staying))
        assert (first, second) == ("a", "b")
        await leaving.aclose()
        gate.touch()
        assert await taken(staying) == ["c", "d", "e"]
    lines = ledger.read_text().splitlines()
    assert lines[0] == "batch 2"
    assert lines[-2:] == ["left [0]", "done"]


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_errors_of_items_and_of_the_batch(executor: str) -> None:
    async with Service(Script, executor=executor) as service:
        got: list[Any] = []
        with pytest.raises(InvalidRequest, match="no more"):
            async for answer in service.infer_stream(["a", "b", {"error": "no more"}]):
                got.append(answer)
        assert got == ["a", "b"]
        assert await taken(service.infer_stream(["a", {"last": "z"}])) == ["a", "z"]
    async with Service(Raising, executor=executor) as service:
        stream = service.infer_stream("later")
        assert await anext(stream) == "later"
        with pytest.raises(ModelError, match="predict raised RuntimeError: not tomorrow"):
            await anext(stream)
        with pytest.raises(ModelError, match="predict raised RuntimeError: not today"):
            await anext(service.infer_stream("now"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_slow_reader_holds_back_nobody(executor: str, tmp_path: Path) -> None:
    """A model beside the loop waits for the quick reader, who would be as slow as the other on a busy machine."""
    pace = tmp_path / "pace"

    async def main() -> None:
        params = {"seconds": 0.001, "pace": "" if executor == "inline" else str(pace)}
        async with Service(Ticking, executor=executor, stream_buffer=4, params=params) as service:
            slow, quick = service.infer_stream("slow"), service.infer_stream("quick")
            assert list(await asyncio.gather(anext(slow), anext(quick))) == [0, 0]
            for number in range(1, 81):
                pace.write_bytes(bytes(number))
                assert await anext(quick) == number
            got: list[Any] = []
            with pytest.raises(Overloaded, match=r"results behind; 4 are kept \(stream_buffer\)"):
                async for answer in slow:
                    got.append(answer)
            assert got == list(range(1, len(got) + 1))
            assert 4 <= len(got) <= 4 * BURST
            await quick.aclose()

    pace.touch()
    asyncio.run(main())


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_the_deadline_ends_a_stream_and_its_work(executor: str, tmp_path: Path) -> None:
    ledger, watch = tmp_path / "ledger", Watch()
    params = {"ledger": str(ledger)}
    async with Service(Ticking, executor=executor, params=params, observers=[watch]) as service:
        with pytest.raises(DeadlineExceeded, match=r"no response within the timeout of 0\.1 s"):
            await taken(service.infer_stream("go", timeout=0.1))
        await watch.until(lambda: watch.timings)
        assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_a_stop_lets_streams_end_and_ends_those_that_do_not(executor: str, tmp_path: Path) -> None:
    service = Service(Count, executor=executor)
    await service.start()
    stream = service.infer_stream(50)
    assert await anext(stream) == 1
    await service.stop()
    assert await taken(stream) == list(range(2, 51))

    ledger = tmp_path / "ledger"
    service = Service(Ticking, executor=executor, params={"ledger": str(ledger)})
    await service.start()
    stream = service.infer_stream("for ever")
    assert await anext(stream) == 0
    await service.stop(0.05)
    with pytest.raises(Draining):
        await taken(stream)
    assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_the_time_limit_of_predict_is_for_each_yield(executor: str) -> None:
    async with Service(Ticking, params={"seconds": 0.12}, executor=executor, predict_timeout=1.0) as service:
        stream = service.infer_stream("longer than the limit in all")
        assert [await anext(stream) for _ in range(10)] == list(range(10))
        await stream.aclose()
    async with Service(Ticking, params={"seconds": 1.0}, executor=executor, predict_timeout=0.3) as service:
        with pytest.raises(WorkerLost, match=r"predict_timeout=0\.3"):
            async for number in service.infer_stream("too slow"):
                assert number == 0


async def test_a_stream_whose_worker_died_is_not_run_again() -> None:
    async with Service(Dying) as service:
        begun, silent, killer = (service.infer_stream(item) for item in ("begun", "silent", "die"))
        assert list(await asyncio.gather(anext(begun), anext(killer))) == ["begun", "begun"]
        for stream in (begun, killer):
            with pytest.raises(WorkerLost, match="lost while it was responding"):
                await anext(stream)
        assert await taken(silent) == ["whole"]  # it had no part: it is run again
        with pytest.raises(WorkerLost):
            await taken(service.infer_stream("die"))


async def test_a_request_without_a_part_that_kills_its_worker_is_found_out() -> None:
    class Deadly(Dying):
        def predict(self, batch: list[str]) -> Any:
            import os
            import signal

            if "die" in batch:
                os.kill(os.getpid(), signal.SIGKILL)
            yield dict.fromkeys(range(len(batch)), "alive")

    async with Service(Deadly) as service:
        ends = await asyncio.gather(
            taken(service.infer_stream("die")), taken(service.infer_stream("live")), return_exceptions=True
        )
        assert isinstance(ends[0], ModelCrashed)
        assert ends[1] == ["alive"]


async def test_tensors_stream_too_and_are_not_divided() -> None:
    async with Service(Prefixes, max_batch_size=4) as service:
        parts = await taken(service.infer_stream({"x": [[1, 2], [3, 4], [5, 6]]}))
        assert [(part["sum"].tolist(), part["rows"].tolist()) for part in parts] == [
            ([[1, 2]], [1]), ([[4, 6]], [2]), ([[9, 12]], [3]),
        ]  # fmt: skip
        with pytest.raises(InvalidRequest, match="max_batch_size"):
            await taken(service.infer_stream({"x": [[1, 2]] * 5}))


async def test_streams_of_tensors_of_any_shape_share_a_batch() -> None:
    class Sizes(Model):
        streaming = True
        inputs = (Tensor("x", "FP32", [-1, -1]),)
        outputs = (Tensor("size", "INT32", [-1]),)

        def predict(self, batch: list[dict[str, Any]]) -> Any:
            yield {index: {"size": [item["x"].size]} for index, item in enumerate(batch)}

    watch = Watch()
    async with Service(Sizes, observers=[watch], policy="full:4", max_queue_delay=10.0) as service:
        items = ([[1.0]], [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0, 3.0]])
        got = await asyncio.gather(*(taken(service.infer_stream({"x": item})) for item in items))
        assert [[part["size"].tolist() for part in parts] for parts in got] == [[[1]], [[4]], [[3]]]
        assert [dispatch.rows for dispatch in watch.dispatches] == [4]


async def test_large_parts_come_through_shared_memory_and_give_it_back() -> None:
    async with Service(Ticking, params={"size": 200_000, "seconds": 0.0}, stream_buffer=4) as service:
        stream = service.infer_stream("go")
        number, text = await anext(stream)
        assert (number, len(text)) == (0, 200_000)
        await stream.aclose()


async def test_one_answer_and_several_have_methods_of_their_own() -> None:
    async with Service(Count, executor="inline") as service:
        for call in (service.infer(3), service.infer_many([3]), anext(service.stream([3]))):
            with pytest.raises(Unsupported, match="model 'count' is streaming, it returns several responses"):
                await call
    async with Service(Square, executor="inline") as service:
        assert await taken(service.infer_stream(3)) == squares([3])


async def test_a_stream_that_finds_the_line_full_waits_or_is_refused() -> None:
    settings: dict[str, Any] = {"max_batch_size": 1, "max_queue_size": 1}
    async with Service(Ticking, executor="thread", **settings) as service:
        running = service.infer_stream("running")
        await anext(running)
        waiting = asyncio.ensure_future(anext(service.infer_stream("waiting")))
        outside = asyncio.ensure_future(anext(service.infer_stream("outside")))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await anext(service.infer_stream("refused", backpressure=False))
        outside.cancel()
        await running.aclose()
        assert await waiting == 0


async def test_hooks_before_a_batch_see_the_items_and_parts_pass_them_by() -> None:
    class Doubled(Service):
        model = Script

        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return [InvalidRequest("empty") if not item else item * 2 for item in batch]

    async with Doubled(executor="thread") as service:
        ends = await asyncio.gather(
            taken(service.infer_stream(["a", "b"])), taken(service.infer_stream([])),
            taken(service.infer_stream([{"last": "x"}])), return_exceptions=True,
        )  # fmt: skip
        assert ends[0] == ["a", "b", "a", "b"]
        assert isinstance(ends[1], InvalidRequest)
        assert ends[2] == ["x"]


def test_a_hook_after_a_batch_is_refused() -> None:
    class Hooked(Service):
        model = Count

        async def after_batch(self, results: list[Any]) -> list[Any]:
            return results

    with pytest.raises(SettingsError, match=r"Hooked\.after_batch: gets no results of a streaming model"):
        Hooked(executor="inline")


async def test_answers_are_counted_and_the_first_is_timed() -> None:
    metrics = Metrics()
    async with Service(Count, executor="inline", observers=[metrics]) as service:
        await asyncio.gather(taken(service.infer_stream(3)), taken(service.infer_stream(2)))
    record = metrics.models["count"]
    assert (record.parts, sum(record.first_part.counts)) == (5, 2)
    assert metrics.ended == {("count", "python", None): 2}


def test_the_blocking_twin_iterates_in_any_thread() -> None:
    with BlockingService(Count, executor="thread") as service:
        got: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda count: got.update({count: list(service.infer_stream(count))}), args=(count,))
            for count in (5, 1, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {5: [1, 2, 3, 4, 5], 1: [1], 3: [1, 2, 3]}
        with pytest.raises(DeadlineExceeded):
            list(service.infer_stream(3, timeout=0.0))


def test_whoever_leaves_a_blocking_iterator_ends_his_part(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    with BlockingService(Ticking, executor="thread", params={"ledger": str(ledger)}) as service:
        for number in service.infer_stream("go"):
            if number == 2:
                break
    assert ledger.read_text() == "closed"


async def test_a_prefetching_worker_streams_too() -> None:
    settings: dict[str, Any] = {"pipeline_depth": 2, "max_batch_size": 2, "max_queue_delay": 0.0}
    async with Service(Count, **settings) as service:
        counts = [5, 4, 3, 2, 1, 6]
        answers = await asyncio.gather(*(taken(service.infer_stream(count)) for count in counts))
        assert answers == [list(range(1, count + 1)) for count in counts]


class Forgetful(Model):
    """Not a streaming model at all."""

    def predict(self, batch: list[Any]) -> Any:
        return (item for item in batch)


async def test_a_generator_alone_makes_no_stream() -> None:
    async with Service(Forgetful, executor="inline") as service:
        assert await service.infer("x") == "x"
