"""What is solved, of random models: the table that is returned does what is claimed, and nothing plainer does better."""

from functools import cache

import numpy as np
import pytest
from benchmarks.policies.event_loop import interval, served
from benchmarks.policies.random_models import MODERATE, Drawn, drawn
from tests.policy.compiler import needs_compiler
from tests.rings import spread

from weir.policy.cost import Prices, Profile
from weir.policy.solve.bank import Bank, solve, solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_table, static_table

NUMBERS = range(32)
# As on many CPUs: larger batches are slower per row; and energy is dear. Long lines are served by less than b*.
CONVEX = Profile(0.5 + 0.1 * np.arange(1.0, 9.0) ** 2, 10.0 + np.arange(1.0, 9.0), np.zeros(8))


@cache
def solved(number: int) -> tuple[Drawn, Bank]:
    """Return a random model, and a bank of one rate for it."""
    model = drawn(number)
    return model, solve_bank(model.profile, model.prices, rates=[model.rate])


@needs_compiler
@pytest.mark.parametrize("number", spread(MODERATE, 5))
def test_the_event_loop_gives_what_is_claimed(number: int) -> None:
    model, bank = solved(number)
    seen = served(model.profile, model.rate, bank.tables[0], 30_000, warm=50_000, seed=number)
    response, power = interval(seen.means), interval(seen.powers)
    assert response.low < bank.response_time_ms[0] < response.high
    assert power.low < bank.power_w[0] < power.high


@needs_compiler
def test_long_lines_are_served_as_they_were_evaluated() -> None:
    """Lines above the longest that the solver looks at were once served by the action of the longest, and evaluated with another:
    with dear energy a bank predicted a fifth of the response time that its table had."""
    for weight, load in ((100.0, 0.7), (100.0, 0.842), (10.0, 0.9), (1000.0, 0.9)):
        rate, prices = load * CONVEX.max_rate, Prices(1.0, weight)
        for table in (solve_bank(CONVEX, prices, rates=[rate]).tables[0], solve(CONVEX, rate, prices).table):
            claimed = evaluate(CONVEX, rate, table, prices).response_time_ms
            seen = interval(served(CONVEX, rate, table, 50_000, warm=100_000).means)
            assert seen.low < claimed < seen.high


def odd(seed: int) -> tuple[Profile, float, Prices]:
    """Return times and energies that make no sense, rows per second and weights."""
    rng = np.random.default_rng(seed)
    largest = int(rng.integers(1, 25))
    sizes = np.arange(1.0, largest + 1.0)
    times = rng.uniform(0.1, 10.0, largest) * sizes ** rng.uniform(0.0, 1.2)
    cv = np.full(largest, rng.choice([0.0, rng.uniform(0.0, 2.0)]))
    profile = Profile(times, 10.0 ** rng.uniform(0.0, 3.0, largest), cv)
    rate = float(rng.choice([0.99, rng.uniform(0.01, 0.99)])) * profile.max_rate
    return profile, rate, Prices(1.0, 10.0 ** rng.uniform(-6.0, 6.0))


@pytest.mark.parametrize("seed", spread(range(40), 10))
def test_times_and_energies_that_make_no_sense_are_solved_too(seed: int) -> None:
    """Where nothing rises with the batch the truncated model once stalled, 21 % above the least cost."""
    profile, rate, prices = odd(seed)
    largest = profile.max_batch_size
    solution = solve(profile, rate, prices)
    assert solution.performance.cost == pytest.approx(solution.cost, rel=1e-9)
    rules = [greedy_table(largest), full_batch_table(profile)]
    rules += [rule for k in range(1, largest + 1) for rule in (limit_table(k, largest), static_table(k))]
    least = min(evaluate(profile, rate, rule, prices).cost for rule in rules)
    assert solution.cost - solution.error_bound <= least * (1.0 + 1e-9)
    assert solution.cost <= least * (1.0 + 1e-6)
    assert solution.error_bound <= 1e-4 * solution.cost


@pytest.mark.parametrize("seed", spread(range(24), 2))
def test_units_do_not_matter(seed: int) -> None:
    """Powers of 2, so that rounding is the same too."""
    profile, rate, prices = odd(seed)
    weight = prices.energy_weight
    solved = solve(profile, rate, prices)
    slower = solve(profile.scaled(time=16.0), rate / 16.0, Prices(1.0 / 16.0, 16.0 * weight))
    dearer = solve(profile.scaled(energy=8.0), rate, Prices(1.0, weight / 8.0))
    for other in (slower, dearer):
        assert other.table.tolist() == solved.table.tolist()
        assert other.cost == pytest.approx(solved.cost, rel=1e-12)
    assert slower.performance.response_time_ms == pytest.approx(16.0 * solved.performance.response_time_ms, rel=1e-9)
    assert dearer.performance.power_w == pytest.approx(8.0 * solved.performance.power_w, rel=1e-9)


@pytest.mark.parametrize("seed", spread(range(8), 2))
def test_every_table_of_a_bank_is_stable_at_every_rate(seed: int) -> None:
    """By the stationary law: what is served is what arrives, also at rates that the table was not solved for."""
    profile, _, prices = odd(seed)
    bank = solve_bank(profile, prices, rates=np.array([0.01, 0.3, 0.95]) * profile.max_rate)
    for table in bank.tables:
        assert int(table[-1]) == profile.best_batch_size
        for load in (0.1, 0.8, 0.98):
            seen = evaluate(profile, load * profile.max_rate, table)
            assert seen.throughput == pytest.approx(load * profile.max_rate, rel=1e-6)
