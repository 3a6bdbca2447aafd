import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import uvloop
from tests.bench.stubs import FakeWaker

from weir.bench.run import Alarm, ClosedLoop, LoadSettings, OpenLoop, make_load
from weir.bench.target import OK, Ledger
from weir.errors import SettingsError
from weir.simulation.arrivals import Poisson
from weir.testing import FakeClock


class Turns:
    """The callbacks of the next turn of a loop."""

    def __init__(self) -> None:
        self.next: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> None:
        self.next.append(callback)

    def run(self) -> None:
        due, self.next = self.next, []
        for callback in due:
            callback()


class Run:
    """An open loop on a fake clock, with a note of when each request left."""

    def __init__(self, times: list[float], *, late: float = 0.0, spin: float = 0.0) -> None:
        self.clock = FakeClock(0.0)
        self.left: list[tuple[int, float]] = []
        self.ledger = Ledger(times)
        self.turns = Turns()
        self.waker = FakeWaker(self.clock, late)
        self.finished = 0
        self.loop = OpenLoop(
            self.ledger, lambda index: self.left.append((index, self.clock())), clock=self.clock, waker=self.waker,
            soon=self.turns, finished=self._finish, spin=spin,
        )  # fmt: skip
        self.loop.tick()

    def _finish(self) -> None:
        self.finished += 1


def test_requests_leave_at_their_instants_whether_or_not_any_was_answered() -> None:
    run = Run([0.0, 0.5, 0.5, 2.0])
    run.clock.advance(3.0)
    assert run.left == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 2.0)]
    assert run.finished == 1 and run.ledger.begun == 4 and run.ledger.open == 4


def test_what_is_late_leaves_at_once_and_the_rest_is_not_moved() -> None:
    run = Run([1.0, 1.1, 5.0], late=0.5)
    run.clock.advance(6.0)
    assert run.left == [(0, 1.5), (1, 1.5), (2, 5.5)]


def test_a_closed_loop_keeps_its_callers_busy_until_the_end() -> None:
    clock, turns, ledger, finished = FakeClock(0.0), Turns(), Ledger(), []
    under_way: list[int] = []
    loop = ClosedLoop(
        ledger, under_way.append, clock=clock, soon=turns, finished=lambda: finished.append(clock()), concurrency=3,
        end=1.0,
    )  # fmt: skip
    loop.start()
    assert under_way == [0, 1, 2]
    for now in (0.25, 0.5, 0.75, 1.0, 1.25):
        clock.advance(now - clock())
        for index in under_way[:]:
            under_way.remove(index)
            ledger.end(index, clock(), OK)
        assert not under_way  # never from within an end
        turns.run()
        assert len(under_way) == (3 if now < 1.0 else 0)
    assert finished == [1.0]
    assert ledger.begun == ledger.over == 12 and ledger.open == 0
    assert list(ledger.intended) == [0.0] * 3 + [0.25] * 3 + [0.5] * 3 + [0.75] * 3


def refused(targets: int = 1, **settings: object) -> str:
    with pytest.raises(SettingsError) as caught:
        make_load(LoadSettings(**settings), targets)  # type: ignore[arg-type]  # wrong on purpose
    return str(caught.value)


def test_a_rate_and_a_duration_make_a_schedule() -> None:
    load = make_load(LoadSettings("constant", rate=100.0, duration=2.0), 1)
    assert load.times is not None and load.rounds == 1 and load.round_seconds == 2.0
    assert np.allclose(load.times[0], np.arange(1, 200) / 100.0)
    assert load.warm_up == pytest.approx(0.2) and load.rate == pytest.approx(99.5)


def test_rounds_are_consecutive_parts_of_one_schedule() -> None:
    whole = make_load(LoadSettings(rate=100.0, duration=4.0, rounds=1), 1).times
    parts = make_load(LoadSettings(rate=100.0, duration=4.0), 2)
    assert whole is not None and parts.times is not None
    assert parts.rounds == len(parts.times) == 5 and parts.round_seconds == pytest.approx(0.8)
    assert all(part.min() >= 0.0 and part.max() < 0.8 for part in parts.times)
    again = np.concatenate([part + index * 0.8 for index, part in enumerate(parts.times)])
    assert np.allclose(again, whole[0])


@pytest.mark.parametrize(
    ("arrivals", "count"),
    [("gamma:cv=3", 2000), ("on-off:on=50ms,off=50ms", 2000), ("poisson:rate=200", 2000), (Poisson(200.0), 2000)],
)
def test_any_arrivals_take_the_rate_where_they_state_none(arrivals: str | Poisson, count: int) -> None:
    stated = isinstance(arrivals, Poisson) or "rate=" in arrivals
    load = make_load(LoadSettings(arrivals, rate=None if stated else 200.0, duration=10.0), 1)
    assert load.times is not None and len(load.times[0]) == pytest.approx(count, rel=0.2)


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("arrival_s,rows\n0.000000,1\n0.250000,4\n0.250000,1\n1.000000,1\n")
    load = make_load(LoadSettings(f"trace:{file}"), 1)
    assert load.times is not None and load.times[0].tolist() == [0.0, 0.25, 0.25, 1.0]
    cut = make_load(LoadSettings(f"trace:{file}", duration=0.5), 1)
    assert cut.times is not None and cut.times[0].tolist() == [0.0, 0.25, 0.25]


def test_a_closed_loop_has_no_schedule() -> None:
    load = make_load(LoadSettings(concurrency=8), 2)
    assert load.times is None and load.concurrency == 8 and load.rate is None and load.round_seconds == 2.0


def test_wrong_settings_say_what_is_wrong() -> None:
    assert "state no rate; give --rate" in refused()
    assert "a load needs a profile" in refused(arrivals="poisson:0.7")
    assert "state their own rate; give only one of them" in refused(arrivals="poisson:rate=5", rate=5.0)
    assert "must be one of poisson" in refused(arrivals="pois", rate=5.0)
    assert "a closed loop (concurrency) has no rate" in refused(rate=5.0, concurrency=2)
    assert "none within 0.1 s" in refused(arrivals="constant", rate=5.0, duration=0.1)
    assert "duration=0.1: must be at least 0.25 s for 5 rounds" in refused(2, rate=500.0, duration=0.1)
    assert "trace 'nowhere.csv' cannot be read" in refused(arrivals="trace:nowhere.csv")
    assert "warm_up=1.0: must be 0 or more, and less than 1" in refused(rate=5.0, warm_up=1.0)
    assert "max_lag_ms=0.0: must be greater than 0" in refused(rate=5.0, max_lag_ms=0.0)


def test_what_would_never_end_or_fit_into_memory_is_refused() -> None:
    for value in (float("inf"), float("nan")):
        assert f"rate={value!r}: must be greater than 0, and finite" in refused(rate=value)
        assert f"duration={value!r}: must be greater than 0, and finite" in refused(rate=5.0, duration=value)
    assert "are 1e+10 requests; must be at most 20,000,000" in refused(rate=1e9)
    assert "duration=inf" in refused(concurrency=4, duration=float("inf"))


pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")


async def woken(*waits: float) -> tuple[list[str], float]:
    """Set an alarm to each of `waits` from now, one after the other, and return who was called and how late."""
    called, done = list[str](), asyncio.get_running_loop().create_future()

    def call(name: str) -> None:
        called.append(name)
        done.set_result(time.monotonic())

    with closing(Alarm()) as alarm:
        when = 0.0
        for wait in waits:
            when = time.monotonic() + wait
            alarm.set(when, lambda name=f"{wait:g}": call(name))  # type: ignore[misc]  # mypy loses the default
        return called, await done - when


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("wait", [0.02, 0.0, -1.0])
def test_it_wakes_the_loop_not_before_the_instant(run: object, wait: float) -> None:
    assert callable(run)
    called, late = run(woken(wait))
    assert called == [f"{wait:g}"] and late >= 0.0
