import asyncio
import itertools
import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop
from tests.bench.stubs import Echo, FakeWaker

from weir.bench import LoadSettings, Report, bench, run_bench
from weir.bench.run import (
    Alarm,
    Load,
    Outcome,
    Round,
    TargetTurn,
    headline,
    make_load,
    make_outcome,
    rows,
    send_by_callers,
    send_on_time,
    to_dict,
)
from weir.bench.target import OK, TIMEOUT, UNSENT, Batches, Ledger
from weir.errors import SettingsError
from weir.testing import FakeClock

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")

ANY_LAG = 1e9


def echo(name: str = "echo", *, late: float = 0.0, **options: Any) -> Echo:
    return Echo(name, clock=lambda: time.monotonic() + late, **options)


def run(*targets: Echo, **settings: Any) -> Report:
    said = {"arrivals": "constant", "rate": 1000.0, "duration": 0.2, "max_lag_ms": ANY_LAG, **settings}
    return uvloop.run(run_bench(targets, LoadSettings(**said)))


def test_a_run_that_was_on_time_is_a_measurement() -> None:
    target = echo()
    report = run(target)
    assert report.failures == [] and report.outcome is report.outcomes["echo"]
    assert target.opened and target.closed
    assert report.rounds == 1 and report.outcome.requests == report.outcome.answered == 180
    assert report.warm_up == pytest.approx(0.02) and report.duration == pytest.approx(0.2)


def test_a_run_whose_requests_left_late_is_none() -> None:
    report = run(echo(late=0.005), max_lag_ms=1.0)
    (failure,) = report.failures
    assert failure.startswith("echo: requests were sent late: ") and "should be at most 1 ms (max_lag_ms)" in failure
    assert report.outcome.lag.p50_ms >= 5.0 and report.warnings == []
    assert run(echo(late=0.005)).failures == []  # what is too late is a setting
    unasked = run(echo(late=0.005), max_lag_ms=None)
    assert (unasked.failures, unasked.warnings) == (
        [],
        [f"echo: requests were sent late: {unasked.outcome.lag.p99_ms:.2f} ms{failure.partition(' ms')[2]}"],
    )


def test_a_closed_loop_has_no_lag_to_fail_for() -> None:
    instants = itertools.count()

    def clock() -> float:
        return next(instants) * 0.001  # a millisecond each time that somebody looks

    target = Echo("echo", clock=lambda: clock() + 0.005)
    settings = LoadSettings("poisson", concurrency=2, duration=0.05, max_lag_ms=1.0)
    report = uvloop.run(run_bench([target], settings, clock=clock))
    assert report.failures == [] and report.rate is None and report.outcome.answered > 0


def test_a_run_in_which_nothing_was_answered_is_no_measurement() -> None:
    assert run(echo(outcome="500 ModelError")).failures == ["echo: no request was answered (500 ModelError)"]


def test_targets_take_turns_with_the_same_schedule() -> None:
    turns: list[TargetTurn] = []
    sent: dict[str, list[int]] = {"a": [], "b": []}

    def watch(turn: TargetTurn, ledger: Ledger) -> None:
        turns.append(turn)
        sent[turn.target].append(len(ledger.intended))

    settings = LoadSettings("poisson", rate=500.0, duration=0.2, rounds=3, warm_up=0.0, max_lag_ms=ANY_LAG)
    report = uvloop.run(run_bench([echo("a"), echo("b")], settings, watch=watch))
    assert [turn.target for turn in turns] == ["a", "b", "b", "a", "a", "b"]
    assert [turn.index for turn in turns] == list(range(6)) and {turn.count for turn in turns} == {6}
    assert sent["a"] == sent["b"] and len(set(sent["a"])) > 1
    assert list(report.outcomes) == ["a", "b"]
    assert report.outcomes["a"].requests == report.outcomes["b"].requests == sum(sent["a"])


def test_names_must_differ_and_something_must_be_measured() -> None:
    with pytest.raises(SettingsError, match="targets a, a: must be one or more, of different names"):
        run(echo("a"), echo("a"))
    with pytest.raises(SettingsError, match="targets none"):
        run()


def test_what_was_opened_is_closed_when_another_cannot_be() -> None:
    class Broken(Echo):
        async def open(self) -> None:
            raise SettingsError("no server there")

    first = echo("a")
    with pytest.raises(SettingsError, match="no server there"):
        run(first, Broken("b", clock=time.monotonic), rounds=1)
    assert first.opened and first.closed


@pytest.fixture(scope="module")
def report() -> Report:
    made = run(echo("a|b"), echo("c", outcome="429 Overloaded"), rounds=2, max_lag_ms=1e-9)
    batches = Batches(4, 2.5, {"size": 3, "idle": 1}, 1.0, 2.0)
    object.__setattr__(made.outcomes["a|b"], "batches", batches)
    return made


def test_the_report_as_a_table(report: Report) -> None:
    found = dict(rows(report))
    assert found["failed: 429 Overloaded"] == ["0", "180"] and found["mean batch size"] == ["2.50", ""]
    assert found["cut by size"] == ["75.0%", ""]
    shown = "constant, 995 requests/s, 0.2 s in 2 rounds, taking turns; 0.02 s of these are the warm-up"
    assert shown in headline(report)


async def test_where_a_loop_runs_bench_says_what_to_await() -> None:
    with pytest.raises(SettingsError, match="await run_bench"):
        bench("http://localhost:1/infer/square", rate=5.0)


def load(seconds: float = 10.0, rounds: int = 1, warm_up: float = 0.0) -> Load:
    return Load("constant", 10.0, seconds, rounds, warm_up, [np.empty(0)] * rounds, None)


def books(*requests: tuple[float, float | None, float | None, str], start: float = 100.0) -> Ledger:
    """Each request: when it was meant to leave, left and ended (in seconds from the start), and how."""
    ledger = Ledger([start + intended for intended, *_ in requests])
    ledger.begun = len(requests)
    for index, (_, sent, ended, kind) in enumerate(requests):
        if sent is not None:
            ledger.sent[index] = start + sent
        if ended is not None:
            ledger.end(index, start + ended, kind)
    return ledger


def outcome(*requests: tuple[float, float | None, float | None, str], warm_up: float = 0.0) -> Outcome:
    return make_outcome("it", load(warm_up=warm_up), [Round(books(*requests), 100.0, None)], 3, 0)


def test_a_response_time_counts_from_the_intended_instant() -> None:
    found = outcome((1.0, 1.5, 2.0, OK), (2.0, 2.0, 2.5, OK))
    assert found.times_ms.tolist() == pytest.approx([1000.0, 500.0])
    assert found.response_time_ms.value == pytest.approx(750.0) and found.max_ms == pytest.approx(1000.0)
    assert list(found.lag) == pytest.approx([250.0, 495.0, 500.0])


def test_each_end_is_counted_once() -> None:
    found = outcome(
        (1.0, 1.0, 1.5, OK), (2.0, 2.0, 2.5, "429 Overloaded"), (3.0, 3.0, 3.5, "429 Overloaded"),
        (4.0, 4.0, 4.5, "connection reset"), (5.0, 5.0, 8.0, TIMEOUT), (6.0, None, 9.0, UNSENT), (7.0, 7.0, None, ""),
    )  # fmt: skip
    assert (found.requests, found.answered, found.timeouts, found.unfinished) == (7, 1, 1, 2)
    assert found.errors == {"429 Overloaded": 2, "connection reset": 1}
    # What was given up took at least so long: it must not vanish from the percentiles. Errors are no answers.
    assert found.times_ms.tolist() == pytest.approx([500.0, 3000.0, 3000.0])
    assert found.sent_rate == pytest.approx(0.6) and found.throughput == pytest.approx(0.1)


def test_warm_up_is_cut_by_the_intended_instant() -> None:
    found = outcome((1.0, 1.0, 9.0, OK), (2.0, 2.0, 3.0, OK), (3.0, 3.0, 4.0, "500"), warm_up=2.0)
    assert found.requests == 2 and found.answered == 1 and found.times_ms.tolist() == pytest.approx([1000.0])
    assert found.throughput == pytest.approx(2 / 8)  # answers that came meanwhile, whenever they were asked for
    assert found.instants.tolist() == pytest.approx([2.0])


def test_answers_after_the_end_of_the_load_are_no_throughput() -> None:
    assert outcome((9.0, 9.0, 9.5, OK), (9.0, 9.0, 10.5, OK)).throughput == pytest.approx(0.1)


def test_rounds_are_laid_end_to_end() -> None:
    rounds = [Round(books((1.0, 1.0, 2.0, OK), start=start), start, None) for start in (100.0, 200.0)]
    found = make_outcome("it", load(rounds=2), rounds, None, 0)
    assert found.instants.tolist() == pytest.approx([1.0, 11.0]) and found.requests == 2
    assert found.sent_rate == pytest.approx(0.1)


def test_percentiles_and_their_intervals() -> None:
    rng = np.random.default_rng(1)
    times = rng.exponential(0.1, 20_000)
    requests = [(index / 2000, index / 2000, index / 2000 + time, OK) for index, time in enumerate(times)]
    found = outcome(*requests)
    for estimate, true in ((found.response_time_ms, 100.0), (found.p50_ms, 69.3), (found.p99_ms, 460.5)):
        assert true in estimate and estimate.half_width < 0.2 * true
    assert math.isinf(outcome(*requests[:50]).p99_ms.high)  # too few to say


def test_the_report_as_json(report: Report) -> None:
    read = msgspec.json.decode(msgspec.json.encode(to_dict(report)))
    outcome = read["outcomes"]["a|b"]
    assert outcome["requests"] == 180 and set(outcome["p50_ms"]) == {"value", "low", "high"}
    assert outcome["batches"]["reasons"] == {"size": 3, "idle": 1}
    assert outcome["lag"]["p99_ms"] > 0.0 and "times_ms" not in outcome
    assert read["outcomes"]["c"]["p50_ms"] == {"value": None, "low": None, "high": None}
    assert len(read["failures"]) == 3


# When requests leave, and the schedules of rounds.


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
    assert "has no rate; give --rate" in refused()
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
