"""make_bank: one entry for every crew and objective, and what its banks do in the real batcher."""

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.adaptive import SolvedPolicy
from weir.policy.bank import Bank, solve_bank
from weir.policy.crew import crew_table
from weir.policy.objective import Objective
from weir.policy.prices import Prices
from weir.policy.profile import GOOGLENET_P4, Floats, Profile
from weir.simulation import banks, promises
from weir.simulation.banks import CREW_LOADS, PROMISE_LOADS, crew_limit, make_bank
from weir.simulation.promises import Keeper
from weir.simulation.rounds import Rounds, Rule, figures
from weir.simulation.simulator import run
from weir.simulation.trials import Trials, lowest
from weir.simulation.tuning import best_limit

P4 = GOOGLENET_P4
P99 = Objective.parse("p99=20ms")


@pytest.fixture(scope="module")
def promised() -> Bank:
    return make_bank(P4, objective=P99)


def poisson(load: float, count: int, workers: int = 1) -> Floats:
    rate = load * workers * P4.max_rate
    return np.asarray(np.cumsum(np.random.default_rng(77).exponential(1.0 / rate, count)), dtype=np.float64)


def test_one_worker_is_solved_exactly() -> None:
    prices = Prices(1.0, 3.0)
    made, solved = make_bank(P4, prices), solve_bank(P4, prices)
    np.testing.assert_array_equal(made.tables, solved.tables)
    assert made.prices == prices and made.workers == 1 and made.objective is None


def test_a_crews_bank_covers_all_its_workers_serve_and_is_stable_there() -> None:
    told: list[tuple[int, int]] = []
    bank = make_bank(P4, workers=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, len(CREW_LOADS)) for done in range(1, len(CREW_LOADS) + 1)]
    assert bank.workers == 3
    assert bank.rates[-1] == pytest.approx(0.97 * 3 * P4.max_rate)
    assert (bank.tables[:, -1] == P4.best_batch_size).all()  # under a long line, full batches
    assert bank.limits()[0] == 1 and bank.limits().max() > 8
    assert not bank.shares.any() and not bank.max_waiting.any()
    assert bank.response_time_ms.min() > 1.35 and (np.diff(bank.power_w) > 0).all()


def test_energy_only_waits_for_the_best_batch_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "CREW_REQUESTS", 4_000)
    one, other = (make_bank(P4, Prices(0.0, 1.0), seed=3) for _ in range(2))
    assert (one.limits() == 32).all()
    np.testing.assert_array_equal(one.p99_ms, other.p99_ms)  # the same seed makes the same bank


def test_latency_only_hardly_waits() -> None:
    assert make_bank(P4, Prices(1.0, 0.0)).limits().max() <= 3


def test_one_line_for_all_workers_costs_less_than_a_line_for_each() -> None:
    workers, rate = 2, 0.5 * 2 * P4.max_rate
    shared = Trials(P4, workers=workers, requests=30_000)
    limit = crew_limit(rate, Prices(), shared)
    together = shared(rate, Rule(crew_table(P4, limit).tolist())).excess_cost(1.0, 1.0)
    alone = Trials(P4, requests=30_000)
    # Each of two lines draws half of the power: energy weighs twice as much against its latency.
    apart = alone(rate / workers, Rule(crew_table(P4, crew_limit(rate / workers, Prices(1.0, 2.0), alone)).tolist()))
    assert together < 0.92 * (apart.response_time_ms + 2.0 * apart.excess_w)


def test_the_limit_found_is_the_best_there_is() -> None:
    trials, rate = Trials(P4, workers=2, requests=10_000), 0.4 * 2 * P4.max_rate
    costs = [trials(rate, Rule(crew_table(P4, limit).tolist())).excess_cost(1.0, 1.0) for limit in range(1, 33)]
    found = crew_limit(rate, Prices(), trials)
    assert costs[found - 1] <= min(costs) * 1.002


@pytest.mark.parametrize("start", [1, 7, 40])
def test_the_search_finds_the_valley_from_anywhere(start: int) -> None:
    assert lowest(lambda limit: abs(limit - 13.2), start, 32) == 13
    assert lowest(float, start, 32) == 1
    assert lowest(lambda limit: -float(limit), start, 32) == 32


@pytest.mark.parametrize("load", [0.1, 0.5, 0.7])
def test_an_objective_is_kept_and_saves_two_fifths_of_what_the_best_limit_spends(promised: Bank, load: float) -> None:
    times = poisson(load, 40_000)
    made = run(P4, SolvedPolicy(promised), times)
    batches = made.batches
    rounds = Rounds(batches.start, batches.end, batches.rows, made.arrival[~made.refused], int(made.refused.sum()))
    seen = figures(rounds, P4, P99.deadline)
    assert seen.late_share + 2.0 * seen.late_error <= P99.late_share
    assert seen.refused_share == 0.0
    rival = best_limit(P4, times, objective=P99)
    assert rival is not None and rival.figures.late_share <= P99.late_share
    assert seen.excess_w <= 0.6 * rival.figures.excess_w


@pytest.mark.parametrize("index", [8, 10, 12, 14])
def test_an_objective_is_kept_at_the_highest_rate_a_table_is_used_for(promised: Bank, index: int) -> None:
    worst = float(np.sqrt(promised.rates[index] * promised.rates[index + 1]))
    keeper = Keeper(P4, P99)
    rule = keeper.rule(int(promised.limits()[index]), float(promised.shares[index]), int(promised.max_waiting[index]))
    assert keeper.keeps(keeper.trials(banks.PROMISE_REQUESTS)(worst, rule))


def test_near_saturation_few_are_refused_so_that_the_others_are_in_time(promised: Bank) -> None:
    times = poisson(0.95, 40_000)
    assert best_limit(P4, times, objective=P99) is None
    made = run(P4, SolvedPolicy(promised), times)
    assert np.mean(made.response_time_ms > 20.0 + 1e-6) <= P99.late_share
    assert 0.0 < made.refused.mean() < 0.04
    assert (promised.max_waiting[promised.rates > 0.91 * P4.max_rate] > 0).all()
    assert not promised.max_waiting[promised.rates < 0.8 * P4.max_rate].any()


def test_where_one_limit_is_too_few_and_the_next_too_many_they_are_mixed() -> None:
    keeper = promises.Keeper(P4, P99)
    trials = keeper.trials(40_000)
    kept = [keeper.at(load * P4.max_rate, trials) for load in (0.85, 0.86)]
    mixed = [each for each in kept if each.share]
    assert mixed
    for each in mixed:
        assert 0.0 < each.share < 1.0 and keeper.keeps(each.figures)
        assert each.limit < 32


def test_where_batches_are_small_the_line_may_still_be_long() -> None:
    alone = Profile(np.array([2.0]), np.array([3.0]), np.zeros(1))
    keeper = promises.Keeper(alone, Objective(0.1, 0.01))
    kept = keeper.at(0.99 * alone.max_rate, keeper.trials(10_000))
    assert 30 < kept.max_waiting <= 50  # 49 before it, and its own 2 ms
    assert kept.figures.refused_share < 0.03


def test_random_service_times_get_a_margin() -> None:
    profile = Profile(P4.service_time_ms, P4.energy_mj, np.full(32, 0.15))
    keeper = promises.Keeper(profile, P99)
    assert 0.0 < keeper.objective.margin < 0.005
    trials = keeper.trials(20_000)
    assert keeper.keeps(trials(0.3 * P4.max_rate, keeper.rule(32)))


def test_an_objective_is_kept_by_a_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "PROMISE_LOADS", (0.5, 0.6, 0.7))
    bank = make_bank(P4, workers=3, objective=Objective.parse("p95=25ms"))
    made = run(P4, SolvedPolicy(bank), poisson(0.6, 20_000, 3), workers=3)
    assert np.mean(made.response_time_ms > 25.0 + 1e-6) <= 0.05


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ("p99=1ms", r"latency_objective=p99=1ms: a row alone takes 1\.357 ms"),
        ("p99=2ms", r"latency_objective=p99=2ms: cannot be kept at [\d.]+ rows/s: with one row in line"),
    ],
)
def test_an_objective_that_cannot_be_kept_is_refused(
    objective: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banks, "PROMISE_LOADS", PROMISE_LOADS[2:4])
    with pytest.raises(SettingsError, match=says):
        make_bank(P4, objective=Objective.parse(objective))


def test_there_must_be_a_worker() -> None:
    with pytest.raises(SettingsError, match="workers=0: must be 1 or more"):
        make_bank(P4, workers=0)
