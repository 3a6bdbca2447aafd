"""Streams in process, with every kind of executor and real workers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import RecordingObserver
from tests.serving.kit import Square, squares
from tests.streaming_models import Count, Dying, Prefixes, Raising, Script, Ticking
from tests.waiting import until

import weir
from weir.serving.calls import BURST

pytestmark = pytest.mark.usefixtures("nothing_is_left")
EXECUTORS = ["process", "thread", "inline"]


async def taken(stream: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in stream]


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_streams_of_several_callers_share_batches(executor: str) -> None:
    watch = RecordingObserver()
    async with weir.Service(Count, executor=executor, observers=[watch]) as service:
        answers = await asyncio.gather(*(taken(service.infer_stream(count)) for count in (3, 1, 4)))
        assert answers == [[1, 2, 3], [1], [1, 2, 3, 4]]
        assert [dispatch.rows for dispatch in watch.dispatches] == [3]
        assert (await service.deep_health())["healthy"]


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_an_answer_is_there_before_the_next_is_computed(executor: str, tmp_path: Path) -> None:
    ledger, watch = tmp_path / "ledger", RecordingObserver()
    params = {"ledger": str(ledger)}
    async with weir.Service(Ticking, executor=executor, params=params, observers=[watch]) as service:
        stream = service.infer_stream("go")
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        await until(lambda: watch.timings)  # one who leaves ends his part
        assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_the_model_hears_of_a_reader_who_left_and_goes_on_for_the_others(executor: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with weir.Service(Script, executor=executor, params={"ledger": str(ledger)}) as service:
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
    async with weir.Service(Script, executor=executor) as service:
        got: list[Any] = []
        with pytest.raises(weir.InvalidRequest, match="no more"):
            async for answer in service.infer_stream(["a", "b", {"error": "no more"}]):
                got.append(answer)
        assert got == ["a", "b"]
        assert await taken(service.infer_stream(["a", {"last": "z"}])) == ["a", "z"]
    async with weir.Service(Raising, executor=executor) as service:
        stream = service.infer_stream("later")
        assert await anext(stream) == "later"
        with pytest.raises(weir.ModelError, match="predict raised RuntimeError: not tomorrow"):
            await anext(stream)
        with pytest.raises(weir.ModelError, match="predict raised RuntimeError: not today"):
            await anext(service.infer_stream("now"))


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_a_slow_reader_holds_back_nobody(executor: str, tmp_path: Path) -> None:
    """A model beside the loop waits for the quick reader, who would be as slow as the other on a busy machine."""
    pace = tmp_path / "pace"

    pace.touch()
    params = {"seconds": 0.001, "pace": "" if executor == "inline" else str(pace)}
    async with weir.Service(Ticking, executor=executor, stream_buffer=4, params=params) as service:
        slow, quick = service.infer_stream("slow"), service.infer_stream("quick")
        assert list(await asyncio.gather(anext(slow), anext(quick))) == [0, 0]
        for number in range(1, 81):
            pace.write_bytes(bytes(number))
            assert await anext(quick) == number
        got: list[Any] = []
        with pytest.raises(weir.Overloaded, match=r"results behind; 4 are kept \(stream_buffer\)"):
            async for answer in slow:
                got.append(answer)
        assert got == list(range(1, len(got) + 1))
        assert 4 <= len(got) <= 4 * BURST
        await quick.aclose()


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_the_deadline_ends_a_stream_and_its_work(executor: str, tmp_path: Path) -> None:
    ledger, watch = tmp_path / "ledger", RecordingObserver()
    params = {"ledger": str(ledger)}
    async with weir.Service(Ticking, executor=executor, params=params, observers=[watch]) as service:
        with pytest.raises(weir.DeadlineExceeded, match=r"no response within the timeout of 0\.1 s"):
            await taken(service.infer_stream("go", timeout=0.1))
        await until(lambda: watch.timings)
        assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", EXECUTORS)
async def test_a_stop_lets_streams_end_and_ends_those_that_do_not(executor: str, tmp_path: Path) -> None:
    service = weir.Service(Count, executor=executor)
    await service.start()
    stream = service.infer_stream(50)
    assert await anext(stream) == 1
    await service.stop()
    assert await taken(stream) == list(range(2, 51))

    ledger = tmp_path / "ledger"
    service = weir.Service(Ticking, executor=executor, params={"ledger": str(ledger)})
    await service.start()
    stream = service.infer_stream("for ever")
    assert await anext(stream) == 0
    await service.stop(0.05)
    with pytest.raises(weir.Draining):
        await taken(stream)
    assert ledger.read_text() == "closed"


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_the_time_limit_of_predict_is_for_each_yield(executor: str) -> None:
    async with weir.Service(Ticking, params={"seconds": 0.12}, executor=executor, predict_timeout=1.0) as service:
        stream = service.infer_stream("longer than the limit in all")
        assert [await anext(stream) for _ in range(10)] == list(range(10))
        await stream.aclose()
    async with weir.Service(Ticking, params={"seconds": 1.0}, executor=executor, predict_timeout=0.3) as service:
        with pytest.raises(weir.WorkerLost, match=r"predict_timeout=0\.3"):
            async for number in service.infer_stream("too slow"):
                assert number == 0


async def test_a_stream_whose_worker_died_is_not_run_again() -> None:
    async with weir.Service(Dying) as service:
        begun, silent, killer = (service.infer_stream(item) for item in ("begun", "silent", "die"))
        assert list(await asyncio.gather(anext(begun), anext(killer))) == ["begun", "begun"]
        for stream in (begun, killer):
            with pytest.raises(weir.WorkerLost, match="lost while it was responding"):
                await anext(stream)
        assert await taken(silent) == ["whole"]  # it had no part: it is run again
        with pytest.raises(weir.WorkerLost):
            await taken(service.infer_stream("die"))


async def test_a_request_without_a_part_that_kills_its_worker_is_found_out() -> None:
    class Deadly(Dying):
        def predict(self, batch: list[str]) -> Any:
            import os
            import signal

            if "die" in batch:
                os.kill(os.getpid(), signal.SIGKILL)
            yield dict.fromkeys(range(len(batch)), "alive")

    async with weir.Service(Deadly) as service:
        ends = await asyncio.gather(
            taken(service.infer_stream("die")), taken(service.infer_stream("live")), return_exceptions=True
        )
        assert isinstance(ends[0], weir.ModelCrashed)
        assert ends[1] == ["alive"]


async def test_tensors_stream_too_and_are_not_divided() -> None:
    watch = RecordingObserver()
    settings: dict[str, Any] = {"max_batch_size": 4, "pipeline_depth": 2, "observers": [watch]}
    async with weir.Service(Prefixes, **settings, policy="full:4", max_queue_delay=10.0) as service:
        items = ([[1, 2], [3, 4], [5, 6]], [[7, 8]])  # of different shapes, in one batch
        parts, other = await asyncio.gather(*(taken(service.infer_stream({"x": item})) for item in items))
        sums = [(part["sum"].tolist(), part["rows"].tolist()) for part in (*parts, *other)]
        assert sums == [([[1, 2]], [1]), ([[4, 6]], [2]), ([[9, 12]], [3]), ([[7, 8]], [1])]
        assert [dispatch.rows for dispatch in watch.dispatches] == [4]
        with pytest.raises(weir.InvalidRequest, match="max_batch_size"):
            await taken(service.infer_stream({"x": [[1, 2]] * 5}))


async def test_one_answer_and_several_have_methods_of_their_own() -> None:
    async with weir.Service(Count, executor="inline") as service:
        for call in (service.infer(3), service.infer_many([3]), anext(service.stream([3]))):
            with pytest.raises(weir.Unsupported, match="model 'count' is streaming, it returns several responses"):
                await call
    async with weir.Service(Square, executor="inline") as service:
        assert await taken(service.infer_stream(3)) == squares([3])


async def test_a_stream_that_finds_the_line_full_waits_or_is_refused() -> None:
    settings: dict[str, Any] = {"max_batch_size": 1, "max_queue_size": 1}
    async with weir.Service(Ticking, executor="thread", **settings) as service:
        running = service.infer_stream("running")
        await anext(running)
        waiting = asyncio.ensure_future(anext(service.infer_stream("waiting")))
        outside = asyncio.ensure_future(anext(service.infer_stream("outside")))
        await asyncio.sleep(0)
        with pytest.raises(weir.Overloaded):
            await anext(service.infer_stream("refused", backpressure=False))
        outside.cancel()
        await running.aclose()
        assert await waiting == 0


async def test_hooks_before_a_batch_see_the_items_and_parts_pass_them_by() -> None:
    class Doubled(weir.Service):
        model = Script

        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return [weir.InvalidRequest("empty") if not item else item * 2 for item in batch]

    class Hooked(Doubled):
        async def after_batch(self, results: list[Any]) -> list[Any]:
            return results

    async with Doubled(executor="thread") as service:
        streams = [taken(service.infer_stream(item)) for item in (["a", "b"], [], [{"last": "x"}])]
        first, empty, last = await asyncio.gather(*streams, return_exceptions=True)
    assert (first, last) == (["a", "b", "a", "b"], ["x"])
    assert isinstance(empty, weir.InvalidRequest)
    with pytest.raises(weir.SettingsError, match=r"Hooked\.after_batch: gets no results of a streaming model"):
        Hooked(executor="inline")


def test_the_blocking_twin_iterates_in_any_thread() -> None:
    with weir.BlockingService(Count, executor="thread") as service:
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
        with pytest.raises(weir.DeadlineExceeded):
            list(service.infer_stream(3, timeout=0.0))
