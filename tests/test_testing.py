import asyncio
from collections.abc import Sequence

from tests.serving.kit import squares

from weir.messages import JSON, MSGPACK, OBJECT, Batch, Events
from weir.metrics import MetricReport
from weir.testing import FakeClock, FakeExecutor
from weir.workers.executor import Executor


class Listener:
    def __init__(self) -> None:
        self.ready: list[tuple[int, int]] = []
        self.events: list[Events] = []

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        self.ready.append((worker, places))

    def worker_lost(self, worker: int, reason: str) -> None:
        self.ready.remove((worker, 1))

    def worker_leaves(self, worker: int) -> None:
        raise AssertionError("no worker leaves")

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        raise AssertionError("the model has no metrics")

    def received(self, worker: int, events: Events) -> None:
        self.events.append(events)

    def unavailable(self, reason: str) -> None:
        self.ready.clear()


def test_the_clock_stands_still_and_fires_each_timer_at_its_instant() -> None:
    clock, fired = FakeClock(100.0), list[tuple[str, float]]()
    clock.call_at(103.0, lambda: fired.append(("late", clock())))
    clock.call_at(101.0, lambda: fired.append(("early", clock())))
    clock.call_at(101.0, lambda: fired.append(("second", clock())))
    clock.call_at(102.0, lambda: fired.append(("never", clock()))).cancel()
    assert clock() == 100.0
    clock.advance(1.5)
    assert fired == [("early", 101.0), ("second", 101.0)]
    assert clock() == 101.5
    clock.advance(1.5)
    assert fired[2:] == [("late", 103.0)]


def test_a_timer_may_arm_another_for_the_same_stretch_of_time() -> None:
    clock, fired = FakeClock(0.0), list[float]()

    def again() -> None:
        fired.append(clock())
        clock.call_at(clock() + 1.0, again)

    clock.call_at(1.0, again)
    clock.advance(3.5)
    assert fired == [1.0, 2.0, 3.0]


async def test_the_executor_answers_encoded_payloads_as_they_are_wanted() -> None:
    heard, executor = Listener(), FakeExecutor(squares, workers=2)
    typed: Executor = executor
    await typed.start(heard)
    assert heard.ready == [(0, 1), (1, 1)]
    types = [JSON, MSGPACK, OBJECT]
    executor.run(1, Batch(7, [b"3", b"\x04", 5], types, types))
    assert executor.states()[1].in_flight == 1
    await asyncio.sleep(0)
    assert heard.events[0].outputs == [b"9", b"\x10", 25]
    assert heard.events[0].kinds is None
    assert heard.events[0].final
    assert (executor.sizes, executor.payloads) == ([3], [[b"3", b"\x04", 5]])
    assert executor.states()[1].in_flight == 0
    await typed.stop()
    assert executor.gauges()["restarts"] == 0


async def test_a_lost_worker_takes_its_batches_along_and_comes_back() -> None:
    heard, executor = Listener(), FakeExecutor(squares)
    await executor.start(heard)
    executor.run(0, Batch(1, [3], OBJECT, OBJECT))
    executor.lose(0, "gone")
    await asyncio.sleep(0)
    assert heard.events == []
    assert executor.states()[0].reason == "gone"
    executor.revive(0)
    assert executor.states()[0].restarts == 1
    assert heard.ready == [(0, 1)]
    executor.end()
    assert heard.ready == []
