"""quantile.py: the percentiles of the whole law, and of the event loop."""

import numpy as np
import pytest
from benchmarks.policies.event_loop import served
from benchmarks.policies.random_models import MODERATE, drawn
from reproduction.response import response_time
from tests.policy.compiler import needs_compiler
from tests.rings import spread, subcases

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.quantile import QuantileSampler
from weir.policy.solve.smdp import SteadyQueue, longest_of, solve_long
from weir.policy.solve.tables import Table, greedy_table, limit_table, static_table

STEPS = np.arange(32.0) // 8.0
STEPPED = Profile(2.0 + 1.5 * STEPS, 30.0 + 12.0 * STEPS, np.full(32, 0.2))
FLAT = Profile.linear(alpha_ms=10.8, tau0_ms=0.5, max_batch_size=32)
SAME = Profile(np.ones(16), np.ones(16), np.zeros(16))
STEADY = Profile(0.1942 + 0.2884 * np.arange(1.0, 35.0), np.ones(34), np.zeros(34))


@pytest.mark.no_cover
@pytest.mark.parametrize(("profile", "load"), spread([(GOOGLENET_P4, 0.9), (STEPPED, 0.6), (FLAT, 0.1)]))
def test_sampled_percentiles_are_those_of_the_law(profile: Profile, load: float) -> None:
    rate = load * profile.max_rate
    found = solve_long(profile, rate, Prices(), 400).served
    computed = response_time(profile, rate, found.table, cells=1024)
    for share in (0.5, 0.9, 0.99):
        assert QuantileSampler(found).quantile_ms(share) == pytest.approx(computed.quantile_ms(share), rel=0.01)


@subcases(("load", "rows"), [(0.2, 1), (0.8, 3), (0.99, 1)])
def test_exponential_batches_of_one_size(load: float, rows: int) -> None:
    """M/M/1: exponential with rate μ - λ. SteadyQueue singly or by threes while fewer come than are served."""
    profile = Profile(np.full(rows, 2.0), np.ones(rows), np.ones(rows))
    found = SteadyQueue(profile, load * 0.5, greedy_table(1))
    assert QuantileSampler(found).quantile_ms(0.99) == pytest.approx(-np.log(0.01) * 2.0 / (1.0 - load), rel=0.02)


@needs_compiler
@pytest.mark.parametrize(
    ("profile", "rate", "table"),
    [
        (SAME, 990.0, np.array([0, *[1] * 16, 4], dtype=np.uint16)),  # most rows wait for many batches of one
        (SAME, 5.0, static_table(4)),
        (Profile(np.ones(16), np.ones(16), np.full(16, 0.1)), 900.0, np.array([0, *[1] * 9, 3], dtype=np.uint16)),
        (GOOGLENET_P4, 100.0, limit_table(5, 32)),
        (GOOGLENET_P4, 2100.0, np.array([*[0] * 8, *[8] * 15, 23], dtype=np.uint16)),
        # Long queues have a share of 1e-32.
        (STEADY, 251.0, np.array([0, 1, 2, 2, 2, 3, 3, 3, *range(8, 35)], dtype=np.uint16)),
    ],
)
def test_sampled_percentiles_are_those_of_the_event_loop(profile: Profile, rate: float, table: Table) -> None:
    p99 = QuantileSampler(SteadyQueue(profile, rate / 1000.0, table)).quantile_ms(0.99)
    assert p99 == pytest.approx(served(profile, rate, table, 2_000_000, parts=1, warm=100_000).quantiles[0], rel=0.02)


@pytest.mark.no_cover
@needs_compiler
@pytest.mark.parametrize("number", spread(MODERATE, 4))
def test_of_random_models_one_row_in_a_hundred_is_later(number: int) -> None:
    model = drawn(number)
    found = solve_long(model.profile, model.rate, model.prices, longest_of(model.profile)).served
    p99 = QuantileSampler(found).quantile_ms(0.99)
    seen = served(model.profile, model.rate, found.table, 50_000, warm=100_000, late=(0.98 * p99, 1.02 * p99))
    assert seen.later[1].low < 0.01 < seen.later[0].high
