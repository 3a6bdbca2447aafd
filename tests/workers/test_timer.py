import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import turns
from tests.workers.runs import StoppedClock

from weir.testing import FakeClock
from weir.workers.timer import TimekeepingClock, TimeLimit, Timer, in_background, outcome_of, resolve, sleep


async def test_a_timer_fires_at_its_instant_and_once() -> None:
    clock, fired = FakeClock(100.0), list[float]()
    timer = Timer(clock, asyncio.get_running_loop(), lambda: fired.append(clock()))
    timer.arm(105.0)
    clock.advance(4.0)
    assert fired == []
    clock.advance(10.0)
    assert fired == [105.0]


async def test_an_instant_that_has_passed_fires_in_the_next_turn() -> None:
    clock, fired = FakeClock(10.0), list[float]()
    timer = Timer(clock, asyncio.get_running_loop(), lambda: fired.append(clock()))
    timer.arm(10.0)
    assert fired == []
    await asyncio.sleep(0)
    assert fired == [10.0]


async def test_without_a_clock_of_its_own_time_the_loop_keeps_it() -> None:
    due = asyncio.Event()
    assert not isinstance(time.monotonic, TimekeepingClock)
    when = time.monotonic() + 0.002

    def look() -> None:
        if time.monotonic() >= when:
            due.set()
        else:
            timer.arm(when)

    timer = Timer(time.monotonic, asyncio.get_running_loop(), look)
    timer.arm(when)
    await due.wait()
    assert time.monotonic() >= when


async def test_a_sleep_is_over_when_the_clock_says_so() -> None:
    clock = FakeClock(100.0)
    sleeping = asyncio.ensure_future(sleep(clock, 5.0))
    for seconds, over in ((4.0, False), (2.0, True)):
        await asyncio.sleep(0)
        clock.advance(seconds)
        await turns(3)
        assert sleeping.done() is over


class Limited:
    """A limit of a second, in a loop with a clock of its own."""

    def __init__(self) -> None:
        self.loop = StoppedClock()
        self.exceeded: list[float] = []
        self.limit = TimeLimit(self.loop, 1.0, lambda: self.exceeded.append(self.loop.now))

    def pass_time(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        self.loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def limited() -> Iterator[Limited]:
    limited = Limited()
    yield limited
    limited.loop.close()


def test_exceeding_it_is_reported_once(limited: Limited) -> None:
    limited.limit.begin()
    limited.pass_time(0.9)
    assert limited.exceeded == []
    limited.pass_time(0.2)
    limited.pass_time(10.0)
    assert limited.exceeded == [1.1]


def test_beginning_again_counts_anew_and_what_has_ended_is_not_exceeded(limited: Limited) -> None:
    for _ in range(5):
        limited.limit.begin()
        limited.pass_time(0.8)
    limited.limit.begin()
    limited.limit.end()
    limited.pass_time(5.0)
    limited.limit.begin()
    limited.limit.close()
    limited.pass_time(5.0)
    assert limited.exceeded == []
    limited.limit.begin()
    limited.pass_time(0.9)
    assert limited.exceeded == []
    limited.pass_time(0.2)
    assert len(limited.exceeded) == 1


def test_a_pause_does_not_count(limited: Limited) -> None:
    limited.limit.go_on()
    limited.limit.begin()
    limited.pass_time(0.4)
    limited.limit.pause()
    limited.limit.pause()
    limited.pass_time(5.0)
    limited.limit.go_on()
    limited.limit.go_on()
    limited.pass_time(0.5)
    assert limited.exceeded == []
    limited.pass_time(0.2)
    assert len(limited.exceeded) == 1
    limited.limit.pause()
    limited.limit.go_on()
    limited.pass_time(5.0)
    assert len(limited.exceeded) == 1


async def test_an_error_of_a_task_in_the_background_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError(24, "Too many open files")

    tasks: set[asyncio.Task[Any]] = set()
    await asyncio.wait([in_background(fails(), "a watch", tasks)])
    await asyncio.sleep(0)
    assert not tasks and "a watch has failed: OSError: [Errno 24] Too many open files" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"add_done_callback\(\S*\.discard\)", "in_background, which logs how they fail"),
        (r"asyncio\.shield\(", "outcome_of, which logs no error that another one reads"),
    ],
)
def test_tasks_that_nobody_awaits_fail_in_one_way(pattern: str, instead: str) -> None:
    source = Path(__file__).parents[2] / "src" / "weir"
    found = [path.name for path in source.rglob("*.py") if re.search(pattern, path.read_text())]
    assert found == [], f"use {instead}"


async def test_an_outcome_that_nobody_waits_for_any_more_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waits = asyncio.ensure_future(outcome_of(future))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits])
    assert waits.cancelled() and not future.done()
    resolve(future, OSError(24, "Too many open files"))
    await asyncio.sleep(0)
    assert caplog.text == ""
    with pytest.raises(OSError, match="Too many"):
        await outcome_of(future)
