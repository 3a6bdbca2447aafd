from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rings import subcases
from tests.served import weir_here

from weir.batching import BatchingSettings
from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.cost import Profile
from weir.policy.decision import ControlLimit, FullBatches, Greedy
from weir.simulation.arrivals import Floats, parse_arrivals
from weir.simulation.engine import (
    BLOCK,
    KEPT,
    BulkRequest,
    Engine,
    LogPart,
    Run,
    ServiceTimes,
    SimulatedModel,
    SimulatedRequest,
)
from weir.simulation.simulator import run, settings_for, simulate

# A batch of b takes 2 + b ms and costs 10 + b mJ.
PLAIN = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, beta_mj=1.0, zeta0_mj=10.0, max_batch_size=8)
RANDOM = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=8, cv=0.5)
POLICIES = ["greedy", "full:4", "control-limit:3", "size-or-delay:size=6,delay=4ms"]


def settings(**changed: Any) -> BatchingSettings:
    return replace(settings_for(PLAIN), **changed)


def arrivals(text: str, count: int, profile: Profile = PLAIN) -> Floats:
    return parse_arrivals(text, capacity=profile.max_rate).times(np.random.default_rng(7), count)


def at_ms(*times: float) -> Floats:
    return np.array(times) / 1000.0


def starts_ms(seen: Run) -> list[float]:
    return [round(float(1000.0 * start), 6) for start in seen.batches.start]


def test_who_arrives_at_once_or_as_a_worker_becomes_free_joins_the_batch() -> None:
    seen = run(PLAIN, "greedy", at_ms(1.0, 2.0, 4.0, 4.0))  # the first batch ends at 4 ms
    assert (starts_ms(seen), seen.batches.rows.tolist()) == ([1.0, 4.0], [1, 3])
    assert (1000.0 * run(PLAIN, "greedy", at_ms(1.0, 1.0, 1.0)).end).tolist() == pytest.approx([6.0] * 3)


def test_a_delay_ends_at_its_instant() -> None:
    seen = run(PLAIN, "size-or-delay:size=8,delay=5ms", at_ms(1.0, 3.0, 9.0))
    assert starts_ms(seen) == [6.0, 14.0]
    assert seen.batches.reason.tolist() == [Reason.DELAY, Reason.DELAY]
    assert seen.batches.waiting.tolist() == [2, 1]


def test_what_would_wait_for_ever_is_drained_when_nothing_else_happens() -> None:
    seen = run(PLAIN, FullBatches(4), at_ms(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert (starts_ms(seen), seen.batches.rows.tolist()) == ([4.0, 10.0], [4, 2])
    assert seen.batches.reason.tolist() == [Reason.SIZE, Reason.DRAIN]
    guarded = run(PLAIN, FullBatches(4), at_ms(1.0, 2.0), settings=settings(max_queue_delay=0.02))
    assert (starts_ms(guarded), guarded.batches.reason.tolist()) == ([21.0], [Reason.DELAY])


def test_with_two_in_flight_a_worker_computes_one_after_another() -> None:
    deep = Profile(PLAIN.service_time_ms, PLAIN.energy_mj, PLAIN.cv, latency_offset_ms=0.5, pipeline_depth=2)
    seen = run(deep, "greedy", at_ms(1.0, 2.0, 3.0, 4.0, 5.0))
    # The second batch is cut while the first is computed; the third when the first is done, with what came meanwhile.
    assert (1000.0 * seen.batches.at).tolist() == pytest.approx([1.0, 2.0, 4.0, 7.0])
    assert starts_ms(seen) == [1.0, 4.0, 7.0, 11.0]
    assert seen.batches.rows.tolist() == [1, 1, 2, 1]
    assert (1000.0 * seen.end).tolist() == pytest.approx([4.5, 7.5, 11.5, 11.5, 14.5])
    assert (seen.batches.start[1:] >= seen.batches.end[:-1]).all()


def test_late_refused_and_expired_are_distinguished() -> None:
    slow = Profile.linear(alpha_ms=1.0, tau0_ms=100.0, max_batch_size=1)
    bounds = settings(max_batch_size=1, max_queue_size=2)
    seen = run(slow, "greedy", at_ms(0.0, 1.0, 2.0, 3.0), settings=bounds, deadline=0.05)
    assert seen.refused.tolist() == [False, False, False, True]
    assert seen.expired.tolist() == [False, True, True, False]
    assert seen.end[0] == pytest.approx(0.101)  # it was running: its answer comes, after its deadline
    assert np.isnan(seen.end[1:]).all()


def test_a_large_request_is_divided_and_ends_with_its_last_piece() -> None:
    seen = run(PLAIN, "greedy", at_ms(0.0, 0.0, 1.0), rows=np.array([3, 20, 1]))
    assert (seen.batches.rows.sum(), seen.batches.rows.max()) == (24, 8)
    assert seen.end[1] == seen.batches.end[-1] and np.isfinite(seen.end).all()
    seen = run(PLAIN, "greedy", at_ms(0.0), rows=np.array([9]), workers=2)
    assert seen.batches.rows.tolist() == [8, 1]
    assert (1000.0 * seen.batches.end).tolist() == pytest.approx([10.0, 3.0])
    assert 1000.0 * seen.end[0] == pytest.approx(10.0)


def test_a_divided_request_that_expires_has_no_end() -> None:
    # Eight of its rows run for 10 ms, of the rest nothing is left to run when it has had its end.
    seen = run(PLAIN, "greedy", at_ms(0.0), rows=np.array([40]), deadline=0.015)
    assert seen.expired.tolist() == [True]
    assert np.isnan(seen.end).all()
    assert 8 <= seen.batches.rows.sum() < 40


def test_littles_law_holds_exactly() -> None:
    for policy in POLICIES:
        seen = run(RANDOM, policy, arrivals("poisson:0.6", 5_000, RANDOM), workers=2)
        instants = np.sort(np.concatenate([seen.arrival, seen.end]))
        inside = np.searchsorted(np.sort(seen.arrival), instants[:-1], side="right")
        inside = inside - np.searchsorted(np.sort(seen.end), instants[:-1], side="right")
        area = float((inside * np.diff(instants)).sum())
        assert area == pytest.approx(float((seen.end - seen.arrival).sum()))


def test_every_request_is_served_once_and_in_order() -> None:
    seen = run(PLAIN, ControlLimit(3), arrivals("gamma:0.8,cv=2", 3_000))
    assert seen.batches.requests.sum() == 3_000 and (np.diff(seen.start) >= 0.0).all()
    assert (seen.batches.start[1:] >= seen.batches.end[:-1]).all()


def test_in_overload_no_worker_rests() -> None:
    for policy in POLICIES:
        seen = run(PLAIN, policy, arrivals("poisson:1.5", 4_000))
        began = seen.batches.start[seen.batches.start < seen.arrival[-1]]
        later = len(began) // 10
        assert np.array_equal(began[1 + later :], seen.batches.end[later : len(began) - 1])


def test_facts_of_a_run() -> None:
    seen = run(PLAIN, "greedy", at_ms(0.0, 1.0, 2.0))  # 3 ms for the first, 4 for the two others
    assert (seen.seconds, seen.busy_share, seen.power_w) == pytest.approx((0.007, 1.0, (11.0 + 12.0) / 7.0))
    assert seen.response_time_ms.tolist() == pytest.approx([3.0, 6.0, 5.0])
    empty = run(PLAIN, "greedy", np.empty(0))
    assert len(empty.end) == len(empty.batches.rows) == empty.seconds == 0


def profile(cv: float) -> Profile:
    return Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=4, cv=cv)


@subcases("cv", [0.0, 1e-5, 0.1, 0.5, 1.0, 2.0])
def test_times_have_their_mean_and_variation(cv: float) -> None:
    services = ServiceTimes(profile(cv), 1)
    if cv < 0.01:
        assert [services.time(rows, 7) for rows in (1, 4)] == [0.003, 0.006]
    times = np.array([services.time(2, index) for index in range(20_000)])
    assert times.mean() == pytest.approx(0.004, rel=0.04)
    assert times.std() / times.mean() == pytest.approx(cv, rel=0.06, abs=1e-4)


def test_luck_belongs_to_requests() -> None:
    one, other = ServiceTimes(profile(0.5), 1), ServiceTimes(profile(0.5), 1)
    places = range(0, (KEPT + 3) * BLOCK, 1000)  # so many that the first are forgotten
    forwards = [one.time(2, index) for index in places]
    assert forwards == [other.time(2, index) for index in reversed(places)][::-1]
    assert one.time(4, 5) / one.time(2, 5) == pytest.approx(1.5)
    assert ServiceTimes(profile(0.5), 2).time(2, 5) != one.time(2, 5)


def test_luck_has_nothing_to_do_with_the_arrivals_of_the_same_seed() -> None:
    """Both come from generators that are made of one seed; were they the same one, long gaps would bring long batches."""
    together = []
    for seed in range(40):
        services = ServiceTimes(profile(1.0), seed)
        for start in (0, 1):  # what simulate(), and a search, draw arrivals from
            gaps = np.random.default_rng([seed, start]).exponential(1.0, 60)
            luck = [services.time(1, start * BLOCK + index) for index in range(60)]
            together.append(np.corrcoef(gaps, luck)[0, 1])
    assert abs(float(np.mean(together))) < 0.05  # 0.4 if they were


# Bulk work in virtual time, beside the arrivals: what it adds to them, and what share of the idle time it gets.


PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=0.5, max_batch_size=32)


def test_bulk_work_adds_less_than_it_may_and_gets_most_of_the_idle_time() -> None:
    settings = settings_for(PROFILE, BatchingSettings(max_batch_size=32, bulk_delay=0.005, max_queue_size=1_000_000))
    alone = simulate(PROFILE, "greedy", "poisson:0.5", requests=20_000).outcomes["greedy"]
    both = simulate(PROFILE, "greedy", "poisson:0.5", requests=20_000, bulk=20_000, settings=settings)
    beside = both.outcomes["greedy"]
    assert beside.p99_ms.value - alone.p99_ms.value < 5.0
    assert beside.response_time_ms.value - alone.response_time_ms.value < 5.0
    assert 0.8 <= beside.bulk_share <= 1.0
    assert beside.bulk_rate == pytest.approx(beside.bulk_share * PROFILE.max_rate * (1.0 - beside.busy_share))
    assert isnan(alone.bulk_rate) and isnan(alone.bulk_share)


def test_without_arrivals_for_a_while_bulk_work_goes_on_and_ends() -> None:
    parts: list[LogPart] = []
    times, bulk = ServiceTimes(PROFILE, 1), map(BulkRequest, range(300))
    model = SimulatedModel(Engine(), settings_for(PROFILE), Greedy(), times, parts.append, bulk=bulk)
    model.accept(SimulatedRequest(index, at) for index, at in enumerate((0.1, 5.0)))
    model.engine.finish()
    index = np.concatenate([part.request for part in parts])
    assert sorted(index.tolist()) == [*range(-300, 0), 0, 1]
    first = [float(part.end[part.request == 0][0]) for part in parts if (part.request == 0).any()]
    assert 0.1 < first[0] < 0.1 + 0.005 + 0.0015 + 1e-9


def test_the_command_shows_bulk_work(tmp_path: Path) -> None:
    path = tmp_path / "square.profile.toml"
    path.write_text(PROFILE.to_toml())
    ran = weir_here(
        "simulate", path, "--policy", "greedy", "--requests", "2000", "--bulk", "500", "--bulk-delay", "4ms"
    )
    assert ran.returncode == 0, ran.stderr
    assert "bulk rows/s" in ran.stdout
    assert "of idle" in ran.stdout
    refused = weir_here("simulate", path, "--workers", "1..4", "--bulk", "500", "--policy", "greedy")
    assert (refused.returncode, "--bulk=500: needs a fixed number of workers" in refused.stderr) == (2, True)
    with pytest.raises(SettingsError, match=r"^bulk=-1: must be 0 or more"):
        simulate(PROFILE, "greedy", "poisson:0.5", requests=200, bulk=-1)
