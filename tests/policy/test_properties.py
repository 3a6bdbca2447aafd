"""Whatever the model: no rule is better than what is solved, units do not matter, no table is unstable."""

import numpy as np
import pytest
from tests.rings import spread

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.bank import solve, solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_table, static_table

KINDS = ("linear", "stepped", "past its best", "noisy")
SEEDS = range(32)


def drawn(seed: int) -> tuple[Profile, float, float]:
    """Return a profile of 1 to 16 sizes, a load and an energy weight; each kind of profile in turn, half of them with service
    times that vary."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % 4]
    size = int(rng.integers(1, 17)) if seed % 4 == 0 else int(rng.integers(6, 17))
    sizes = np.arange(1, size + 1)
    if kind == "stepped":
        sizes = -(-sizes // 4) * 4
    times: Floats = np.asarray(rng.uniform(0.3, 3.0) + rng.uniform(0.05, 1.0) * sizes, dtype=np.float64)
    if kind == "past its best":  # as on many CPUs: a larger batch is slower per row in the end
        times = times + rng.uniform(0.3, 2.0) * np.maximum(0, sizes - size // 2) ** 1.5
    if kind == "noisy":
        times = times * rng.uniform(0.7, 1.3, size)
    energies = rng.uniform(0.1, 30.0) + rng.uniform(0.5, 10.0) * sizes * rng.uniform(0.8, 1.2, size)
    cv = rng.uniform(0.0, 0.8, size) if seed // 4 % 2 else np.zeros(size)
    return Profile(times, energies, cv), float(rng.uniform(0.01, 0.95)), float(10.0 ** rng.uniform(-2.0, 2.0))


@pytest.mark.parametrize("seed", spread(SEEDS, 12))
def test_no_rule_is_better(seed: int) -> None:
    profile, load, weight = drawn(seed)
    rate, prices, largest = load * profile.max_rate, Prices(1.0, weight), profile.max_batch_size
    solved = solve(profile, rate, prices)
    rules = [greedy_table(largest), full_batch_table(profile)]
    for size in range(1, largest + 1):
        rules += [static_table(size), limit_table(size, largest)]
    best = min(evaluate(profile, rate, rule, prices).cost for rule in rules)
    assert solved.performance.cost <= best * (1.0 + 1e-6)
    assert solved.cost <= best * (1.0 + 1e-6)


@pytest.mark.parametrize("seed", spread(SEEDS, 6))
def test_units_do_not_matter(seed: int) -> None:
    """Powers of 2, so that rounding is the same too."""
    profile, load, weight = drawn(seed)
    rate = load * profile.max_rate
    solved = solve(profile, rate, Prices(1.0, weight))
    slower = solve(profile.scaled(time=16.0), rate / 16.0, Prices(1.0 / 16.0, 16.0 * weight))
    dearer = solve(profile.scaled(energy=8.0), rate, Prices(1.0, weight / 8.0))
    for other in (slower, dearer):
        assert other.table.tolist() == solved.table.tolist()
        assert other.cost == pytest.approx(solved.cost, rel=1e-12)
        assert other.performance.cost == pytest.approx(solved.performance.cost, rel=1e-9)
    assert slower.performance.response_time_ms == pytest.approx(16.0 * solved.performance.response_time_ms, rel=1e-9)
    assert dearer.performance.power_w == pytest.approx(8.0 * solved.performance.power_w, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_every_table_of_a_bank_is_stable_at_every_rate(seed: int) -> None:
    """By the stationary law: what is served is what arrives, also at rates that the table was not solved for."""
    profile, _, weight = drawn(seed)
    bank = solve_bank(profile, Prices(1.0, weight), rates=np.array([0.01, 0.3, 0.95]) * profile.max_rate)
    for table in bank.tables:
        assert int(table[-1]) == profile.best_batch_size
        for load in (0.1, 0.8, 0.98):
            seen = evaluate(profile, load * profile.max_rate, table)
            assert seen.throughput == pytest.approx(load * profile.max_rate, rel=1e-6)
