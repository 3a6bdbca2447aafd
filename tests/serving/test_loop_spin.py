import asyncio
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
import uvloop
from tests.serving.kit import Square

import weir
from weir.serving.driver import LOOP_TICK, Timer
from weir.serving.loop_spin import Alertness, Rehearsal
from weir.testing import FakeExecutor

BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
SPIN = 0.01


class Handle:
    def __init__(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.callback = callback
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop whose turns the test makes; each takes a hundredth of SPIN."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: deque[Handle] = deque()
        self.later: list[tuple[float, Handle]] = []

    def clock(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> Handle:
        self.soon.append(Handle(callback, arguments))
        return self.soon[-1]

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Handle:
        handle = Handle(callback, arguments)
        self.later.append((self.now + delay, handle))
        return handle

    def live(self, until: float) -> None:
        """Go round until that instant; without anything to do, sleep until the next timer."""
        while self.now < until:
            due = [each for each in self.later if each[0] <= self.now]
            self.later = [each for each in self.later if each[0] > self.now]
            ready = [*[handle for _, handle in due], *self.soon]
            self.soon.clear()
            for handle in ready:
                if not handle.cancelled:
                    handle.callback(*handle.arguments)
            if self.soon:
                self.now += SPIN / 100.0
            else:
                self.now = min([until, *[when for when, _ in self.later]])

    @property
    def asleep(self) -> bool:
        return not self.soon


def alert(loop: Loop, rehearse: Callable[[], None] = lambda: None) -> Alertness:
    return Alertness(SPIN, loop.clock, cast(asyncio.AbstractEventLoop, loop), rehearse)


def test_the_loop_is_awake_from_before_an_expected_instant_until_after_it() -> None:
    loop, awake = Loop(), list[float]()
    alertness = alert(loop, lambda: awake.append(loop.now))
    alertness.expect(loop.now + 1.0, loop.now)
    loop.live(101.0 - SPIN - LOOP_TICK)
    assert loop.asleep and not awake
    loop.live(102.0)
    assert loop.asleep
    assert awake[0] == pytest.approx(101.0 - SPIN - LOOP_TICK)
    assert awake[-1] == pytest.approx(101.0 + SPIN, abs=0.001)


def test_what_is_expected_meanwhile_prolongs_it_and_nothing_turns_twice() -> None:
    loop = Loop()
    alertness = alert(loop)
    alertness.expect(loop.now, loop.now)
    loop.live(100.0 + SPIN / 2.0)
    alertness.expect(loop.now + SPIN, loop.now)
    assert len(loop.soon) == 1
    loop.live(100.0 + 2.4 * SPIN)
    assert not loop.asleep
    loop.live(100.0 + 3.0 * SPIN)
    assert loop.asleep


def test_once_closed_it_lets_the_loop_sleep_for_good() -> None:
    loop, awake = Loop(), list[float]()
    alertness = alert(loop, lambda: awake.append(loop.now))
    alertness.expect(loop.now + 1.0, loop.now)
    alertness.expect(loop.now, loop.now)
    alertness.close()
    loop.live(110.0)
    assert loop.asleep and not awake


def test_rehearsals_leave_time_between_them() -> None:
    loop, awake = Loop(), list[float]()
    alertness = alert(loop, lambda: awake.append(loop.now))
    alertness.expect(loop.now, loop.now)
    loop.live(100.0 + SPIN)
    assert min(later - earlier for earlier, later in pairwise(awake)) >= 0.0003


def timer_of(loop: Loop, fired: list[float], spin: float) -> Timer:
    timer = Timer(loop.clock, cast(asyncio.AbstractEventLoop, loop), lambda: fired.append(loop.now))
    timer.spin = spin
    return timer


@pytest.mark.parametrize("ahead", [1.0, SPIN + LOOP_TICK, SPIN / 2.0])
def test_a_timer_that_spins_is_neither_early_nor_late(ahead: float) -> None:
    loop, fired = Loop(), list[float]()
    timer_of(loop, fired, SPIN).arm(100.0 + ahead)
    loop.live(105.0)
    assert len(fired) == 1
    assert 0.0 <= fired[0] - (100.0 + ahead) <= SPIN / 50.0


def test_a_timer_that_spins_can_be_cancelled_and_brought_forward() -> None:
    loop, fired = Loop(), list[float]()
    timer = timer_of(loop, fired, SPIN)
    timer.arm(101.0)
    timer.cancel()
    timer.arm(103.0)
    timer.arm(102.0)
    loop.live(102.0 - SPIN / 2.0)
    timer.arm(102.0 - SPIN / 4.0)
    loop.live(110.0)
    assert fired == [pytest.approx(102.0 - SPIN / 4.0, abs=SPIN / 50.0)]


@BOTH_LOOPS
def test_a_rehearsal_is_answered_through_the_real_parts(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        rehearsal = Rehearsal(asyncio.get_running_loop().time)
        await rehearsal.start()
        assert [await rehearsal.once() for _ in range(3)] == [0, 0, 0]

    run(main())


@BOTH_LOOPS
def test_a_service_that_stays_alert_answers_as_any_other_and_stops(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with weir.Service(
            Square, executor=FakeExecutor(lambda batch: [x * x for x in batch]), loop_spin=0.001
        ) as service:
            assert await asyncio.gather(*[service.infer(x) for x in range(50)]) == [x * x for x in range(50)]
            alertness = service.generation.driver._alertness
            assert alertness is not None
            while alertness._turning:  # noqa: ASYNC110 - each of its turns is a turn of the loop
                await asyncio.sleep(0)
            assert await service.infer(7) == 49

    run(main())


@BOTH_LOOPS
def test_nobody_hears_of_rehearsals(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with weir.Service(Square, executor="process", loop_spin=0.001, spin=0.001) as service:
            assert await service.infer_many(range(10)) == [x * x for x in range(10)]
            assert sum(batch["rows"] for batch in service.state()["recent"]) == 10

    run(main())
