"""The searches' short cut cuts the very batches that the real batcher cuts."""

import numpy as np
import pytest
from benchmarks.policies.harness import EVERY_DELAY
from tests.rings import subcases

from weir.policy.cost.profile import GOOGLENET_P4, Floats, Profile
from weir.policy.solve.tables import limit_table
from weir.simulation.engine import ServiceTimes
from weir.simulation.search import Rule, figures, play
from weir.simulation.simulator import run

P4 = GOOGLENET_P4
RANDOM = Profile(P4.service_time_ms, P4.energy_mj, np.full(32, 0.2))


def poisson(load: float, count: int = 4_000, workers: int = 1, seed: int = 5) -> Floats:
    rate = load * workers * P4.max_rate
    return np.asarray(np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count)), dtype=np.float64)


def same(profile: Profile, rule: Rule, policy: str, arrivals: Floats, workers: int = 1) -> None:
    """Hold the two against each other, but for the last rows: the server drains them, the short cut leaves them out."""
    ours = play(arrivals.tolist(), rule, ServiceTimes(profile, 1), profile.max_batch_size, workers)
    theirs = run(profile, policy, arrivals, workers=workers, services_seed=1)
    count = len(ours.starts)
    assert count > 50
    np.testing.assert_array_equal(ours.sizes, theirs.batches.rows[:count])
    np.testing.assert_allclose(ours.starts, theirs.batches.start[:count], rtol=0.0, atol=1e-9)
    np.testing.assert_allclose(ours.ends, theirs.batches.end[:count], rtol=0.0, atol=1e-9)


@subcases(("profile", "load", "workers"), [(P4, 0.2, 1), (P4, 0.8, 3), (RANDOM, 0.8, 1), (RANDOM, 0.2, 3)])
def test_control_limits(profile: Profile, load: float, workers: int) -> None:
    for limit in (1, 9, 32):
        rule = Rule(limit_table(limit, 32).tolist())
        same(profile, rule, f"control-limit:{limit}", poisson(load, workers=workers), workers)


@subcases("load", [0.1, 0.7])
def test_sizes_and_delays(load: float) -> None:
    for size, delay in ((4, EVERY_DELAY[3]), (24, EVERY_DELAY[7])):
        rule = Rule(limit_table(size, 32).tolist(), allowance=[delay] * 33)
        same(P4, rule, f"size-or-delay:size={size},delay={1000.0 * delay:g}ms", poisson(load))


def test_counts_what_it_serves_and_refuses() -> None:
    arrivals = poisson(1.5)
    rounds = play(arrivals.tolist(), Rule(limit_table(8, 32).tolist(), max_waiting=40), ServiceTimes(P4, 1), 32)
    seen = figures(rounds, P4, deadline=0.02)
    assert rounds.refused > 1_000
    assert rounds.refused + rounds.sizes.sum() <= len(arrivals) < rounds.refused + rounds.sizes.sum() + 80
    assert seen.refused_share == pytest.approx(1.0 - 1.0 / 1.5, abs=0.05)
    assert rounds.responses.max() < 0.03


def test_figures_are_those_of_a_line_worked_out_by_hand() -> None:
    profile = Profile(np.array([1.0, 1.5]), np.array([3.0, 4.0]), np.zeros(2), latency_offset_ms=0.5)
    # Two rows 1 ms apart go together when the second comes; so do the next two, and the next.
    arrivals = [0.001, 0.002, 0.011, 0.012, 0.021, 0.022]
    rounds = play(arrivals, Rule([0, 0, 2]), ServiceTimes(profile, 1), 2)
    assert rounds.starts.tolist() == [0.002, 0.012, 0.022]
    assert rounds.sizes.tolist() == [2, 2, 2]
    seen = figures(rounds, profile, deadline=0.0025, warm_up=0.0)
    assert seen.response_time_ms == pytest.approx(2.5)
    assert seen.late_share == 0.5
    assert seen.power_w == pytest.approx(12.0 / 20.0)
    assert seen.excess_w == pytest.approx(0.0)  # pairs are what no policy beats
