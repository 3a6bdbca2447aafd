"""Many queues at once: the same batches as one at a time, the same figures as an event loop that was written apart."""

import numpy as np
import pytest
from benchmarks.policies.event_loop import interval, served_by_several
from tests.policy.compiler import needs_compiler
from tests.rings import spread, subcases

from weir.policy.cost import GOOGLENET_P4, Prices, Profile
from weir.policy.solve.tables import greedy_table, limit_of, multi_worker_table
from weir.simulation.banks import make_bank
from weir.simulation.engine import ServiceTimes
from weir.simulation.replicas import Replicas, best_tables, estimate, quantiles
from weir.simulation.search import Rule, play

P4 = GOOGLENET_P4
# What a batch takes hardly depends on its size: workers that never wait are all busy with small ones.
FLAT = Profile.linear(alpha_ms=0.1, tau0_ms=8.0, max_batch_size=32)


@subcases("workers", [1, 2, 5])
def test_the_same_batches_are_cut_as_one_at_a_time(workers: int) -> None:
    replicas, rate = Replicas(P4, workers), 0.6 * workers * P4.max_rate
    draws = replicas.draws(3, 2_000, [7])
    tables = [multi_worker_table(P4, limit) for limit in (1, 9, 32)]
    seen = replicas.serve(rate, tables, draws, times=True)
    for number, table in enumerate(tables):
        for queue in range(3):
            arrivals = (draws.arrivals[queue] / rate).tolist()
            rounds = play(arrivals, Rule(table.tolist()), ServiceTimes(P4, 1), 32, workers)
            first = np.cumsum(rounds.sizes) - rounds.sizes
            counted = (first >= 400) & (first < 2_000)
            times = 1000.0 * rounds.responses[np.repeat(counted, rounds.sizes)]
            np.testing.assert_allclose(seen.times_ms[number][queue], times, rtol=1e-6)
            assert seen.response_ms[number, queue] == pytest.approx(times.mean())


@subcases("cv", [0.05, 0.4, 1.5])
def test_service_times_have_the_gamma_law(cv: float) -> None:
    made = quantiles(np.array([0.0, cv]))
    scores = np.random.default_rng(1).standard_normal(400_000)
    grid = np.linspace(-6.0, 6.0, made.shape[1])
    times = np.interp(scores, grid, made[1])
    assert times.mean() == pytest.approx(1.0, rel=0.02)
    assert times.std() == pytest.approx(cv, rel=0.02)
    assert (made[0] == 1.0).all()


@needs_compiler
@pytest.mark.parametrize(
    ("workers", "load", "cv"), spread([(2, 0.3, 0.2), (4, 0.9, 0.0), (8, 0.45, 0.0), (8, 0.97, 0.2)])
)
def test_what_is_predicted_is_what_an_event_loop_sees(workers: int, load: float, cv: float) -> None:
    profile = Profile.linear(alpha_ms=0.3, tau0_ms=4.0, max_batch_size=16, cv=cv)
    rate, table = load * workers * profile.max_rate, multi_worker_table(profile, 5)
    predicted = estimate(Replicas(profile, workers), rate, table, 1)
    seen = served_by_several(profile, rate, [table] * workers, 150_000, parts=20, warm=100_000)
    mean, power, p99 = (interval(each) for each in (seen.means, seen.powers, seen.quantiles))
    assert mean.low * 0.99 < predicted.response_time_ms < mean.high * 1.01
    assert p99.low * 0.97 < predicted.p99_ms < p99.high * 1.03
    assert power.low * 0.99 < predicted.power_w < power.high * 1.01


@needs_compiler
@pytest.mark.parametrize(
    ("profile", "workers", "load", "prices"),
    spread([(P4, 2, 0.4, Prices(1.0, 1.0)), (FLAT, 8, 0.45, Prices(1.0, 0.0)), (FLAT, 4, 0.7, Prices(1.0, 0.0))]),
)
def test_the_common_limit_is_the_best_of_all(
    profile: Profile, workers: int, load: float, prices: Prices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", (load - 0.05, load + 0.05))
    rate = load * workers * profile.max_rate

    def cost(limit: int) -> float:
        tables = [multi_worker_table(profile, limit)] * workers
        seen = served_by_several(profile, rate, tables, 20_000, parts=5, warm=10_000, share=0.0)
        return float(prices.latency_weight * seen.means.mean() + prices.energy_weight * seen.powers.mean())

    costs = [cost(limit) for limit in range(1, profile.max_batch_size + 1)]
    found = limit_of(best_tables(Replicas(profile, workers), [rate], prices, 1)[0])
    assert costs[found - 1] < 1.005 * min(costs)
    bank = make_bank(profile, prices, workers=workers)
    assert costs[int(bank.limits()[bank.index_of(rate)]) - 1] < 1.03 * min(costs)


def test_a_profile_without_a_choice_is_estimated_too() -> None:
    one = Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=1)
    assert limit_of(best_tables(Replicas(one, 3), [500.0], Prices(1.0, 1.0), 1)[0]) == 1
    assert estimate(Replicas(one, 3), 100.0, greedy_table(1), 1).response_time_ms == pytest.approx(2.0, rel=0.01)
