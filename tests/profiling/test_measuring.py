import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from weir.errors import InvalidRequest, ModelError
from weir.messages import OBJECT, Batch, Events
from weir.profiling.measuring import FIRST_ID, Finished, Measuring
from weir.testing import FakeBlock, FakeClock, FakeExecutor, whole


class Heard:
    """A Listener that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def worker_ready(self, worker: int, places: int) -> None:
        self.said.append(("ready", worker, places))

    def worker_lost(self, worker: int, reason: str) -> None:
        self.said.append(("lost", worker, reason))

    def received(self, worker: int, events: Events) -> None:
        self.said.append(("received", worker, events.batch_id))

    def unavailable(self, reason: str) -> None:
        self.said.append(("unavailable", reason))


def on_loop(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_a_batch_is_timed_from_its_dispatch_to_its_last_events() -> None:
    async def story() -> None:
        clock, executor = FakeClock(), FakeExecutor()
        measuring = Measuring(executor, clock)
        await executor.start(measuring)
        assert measuring.places == {0: 1}
        done = measuring.run(0, [1, 2], OBJECT, OBJECT)
        batch_id = executor.batches[0][1].batch_id
        clock.advance(0.25)
        executor.reply(0, Events(batch_id, [1], indices=[0], final=False))
        clock.advance(0.5)
        executor.reply(0, Events(batch_id, [2], indices=[1]))
        assert await done == Finished(1000.0, 1000.75)

    on_loop(story())


def test_results_in_shared_memory_are_given_back() -> None:
    async def story() -> None:
        executor, block = FakeExecutor(), FakeBlock(10)
        measuring = Measuring(executor)
        await executor.start(measuring)
        done = measuring.run(0, [1], OBJECT, OBJECT)
        executor.reply(0, whole(FIRST_ID, [block]))
        await done
        assert block.shares == 0

    on_loop(story())


def test_an_entrys_error_is_the_outcome() -> None:
    async def story() -> None:
        executor = FakeExecutor()
        measuring = Measuring(executor)
        await executor.start(measuring)
        done = measuring.run(0, [1, 2], OBJECT, OBJECT)
        executor.reply(0, whole(FIRST_ID, [1, InvalidRequest("no")]))
        with pytest.raises(InvalidRequest, match="no"):
            await done

    on_loop(story())


def test_a_lost_worker_fails_what_it_ran_and_what_comes_then_until_it_is_back() -> None:
    async def story() -> None:
        executor = FakeExecutor()
        measuring = Measuring(executor)
        await executor.start(measuring)
        under_way = measuring.run(0, [1], OBJECT, OBJECT)
        executor.lose(0, "it was killed")
        for done in (under_way, measuring.run(0, [1], OBJECT, OBJECT)):
            with pytest.raises(ModelError, match="it was killed"):
                await done
        executor.revive(0)
        again = measuring.run(0, [1], OBJECT, OBJECT)
        executor.reply(0, whole(executor.batches[-1][1].batch_id, [1]))
        await again

    on_loop(story())


def test_a_worker_that_was_never_there_cannot_be_measured() -> None:
    async def story() -> None:
        executor = FakeExecutor()
        measuring = Measuring(executor)
        await executor.start(measuring)
        with pytest.raises(ModelError, match="worker 3 is not there"):
            await measuring.run(3, [1], OBJECT, OBJECT)

    on_loop(story())


def test_a_batch_that_the_executor_refuses_leaves_nothing_behind() -> None:
    class Refusing(FakeExecutor):
        def run(self, worker: int, batch: Batch) -> None:
            raise RuntimeError("no")

    async def story() -> None:
        executor = Refusing()
        measuring = Measuring(executor)
        await executor.start(measuring)
        with pytest.raises(RuntimeError, match="no"):
            await measuring.run(0, [1], OBJECT, OBJECT)
        executor.lose(0)  # and there is nothing to fail

    on_loop(story())


def test_it_steps_aside_for_a_listener_that_hears_of_all_workers_as_they_are() -> None:
    async def story() -> None:
        executor, heard = FakeExecutor(workers=2, places=2), Heard()
        measuring = Measuring(executor)
        await executor.start(measuring)
        executor.lose(0, "it was killed")
        measuring.step_aside(heard)
        assert heard.said == [("ready", 0, 2), ("lost", 0, "it was killed"), ("ready", 1, 2)]
        heard.said.clear()
        executor.revive(0)
        executor.run(1, Batch(1, [1], OBJECT, OBJECT))
        executor.reply(1, whole(1, [1]))
        executor.lose(1, "it too")
        executor.end("nobody is left")
        assert heard.said == [
            ("ready", 0, 2),
            ("received", 1, 1),
            ("lost", 1, "it too"),
            ("unavailable", "nobody is left"),
        ]

    on_loop(story())


def test_who_comes_after_is_told_that_nobody_is_left() -> None:
    async def story() -> None:
        executor, heard = FakeExecutor(), Heard()
        measuring = Measuring(executor)
        await executor.start(measuring)
        executor.lose(0, "it was killed")
        executor.end("nobody is left")
        measuring.step_aside(heard)
        assert heard.said == [("ready", 0, 1), ("lost", 0, "it was killed"), ("unavailable", "nobody is left")]

    on_loop(story())


def test_what_is_late_from_the_measurement_is_not_heard_by_who_comes_after() -> None:
    async def story() -> None:
        executor, heard = FakeExecutor(), Heard()
        measuring = Measuring(executor)
        await executor.start(measuring)
        left = measuring.run(0, [1], OBJECT, OBJECT)
        left.cancel()
        measuring.step_aside(heard)
        executor.reply(0, whole(FIRST_ID, [1]))
        executor.reply(0, whole(FIRST_ID, [1]))  # and one that nobody knows
        assert heard.said == [("ready", 0, 1)]

    on_loop(story())
