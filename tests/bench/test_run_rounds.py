import asyncio
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import uvloop
from tests.bench.stubs import FakeWaker

from weir.bench import LoadSettings
from weir.bench.run import Alarm, make_load, send_by_callers, send_on_time
from weir.bench.target import OK, Ledger
from weir.errors import SettingsError
from weir.simulation.arrivals import Poisson
from weir.testing import FakeClock


async def sent(times: list[float], *, late: float = 0.0) -> tuple[list[tuple[int, float]], Ledger]:
    """Send requests at these times of a fake clock, and return when each left, and the ledger."""
    clock, left, ledger = FakeClock(0.0), list[tuple[int, float]](), Ledger(times)
    await send_on_time(ledger, lambda index: left.append((index, clock())), clock, FakeWaker(clock, late), spin=0.0)
    return left, ledger


async def test_requests_leave_at_their_instants_whether_or_not_any_was_answered() -> None:
    left, ledger = await sent([0.0, 0.5, 0.5, 2.0])
    assert left == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 2.0)]
    assert ledger.begun == 4 and ledger.open == 4
    # What is late leaves at once, and the rest is not moved.
    left, _ = await sent([1.0, 1.1, 5.0], late=0.5)
    assert left == [(0, 1.5), (1, 1.5), (2, 5.5)]


async def test_the_last_moments_before_an_instant_are_spent_awake() -> None:
    clock, left = iter([0.0, 0.25, 0.5, 0.75, 1.0]), list[int]()
    await send_on_time(Ledger([1.0]), left.append, lambda: next(clock), FakeWaker(FakeClock(0.0)), spin=9.0)
    assert left == [0] and next(clock, None) is None


async def test_a_closed_loop_keeps_its_callers_busy_until_the_end() -> None:
    clock, ledger, under_way = FakeClock(0.0), Ledger(), list[int]()
    sending = asyncio.ensure_future(send_by_callers(ledger, under_way.append, clock, 3, 1.0))
    await asyncio.sleep(0)
    assert under_way == [0, 1, 2]
    for now in (0.25, 0.5, 0.75, 1.0, 1.25):
        clock.advance(now - clock())
        for index in under_way[:]:
            under_way.remove(index)
            ledger.end(index, clock(), OK)
        assert not under_way  # never from within an end
        await asyncio.sleep(0)
        assert len(under_way) == (3 if now < 1.0 else 0) and sending.done() == (now >= 1.0)
    await sending
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


async def lateness(*waits: float) -> float:
    """Sleep until each of `waits` from now, one after the other, and return how late the last one ended."""
    with closing(Alarm()) as alarm:
        for wait in waits:
            when = time.monotonic() + wait
            await alarm.until(when)
    return time.monotonic() - when


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("waits", [(0.02,), (0.0,), (-1.0,), (0.001, 0.02)])
def test_it_wakes_the_loop_not_before_the_instant(run: object, waits: tuple[float, ...]) -> None:
    assert callable(run)
    assert run(lateness(*waits)) >= 0.0
