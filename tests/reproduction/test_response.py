"""response.py: the response time's distribution, against closed forms, exact means and simulation."""

import numpy as np
import pytest
from benchmarks.policies.event_loop import served
from reproduction.response import response_time
from tests.policy.compiler import needs_compiler
from tests.rings import spread, subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices, Profile
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_table, static_table

VARIED = Profile.linear(alpha_ms=0.3051, tau0_ms=1.052, beta_mj=19.9, zeta0_mj=19.6, max_batch_size=16, cv=0.2)
STEPPED = Profile(
    np.repeat([2.0, 3.2, 4.9, 6.0], 4), np.repeat([30.0, 35.0, 60.0, 65.0], 4), np.zeros(16), latency_offset_ms=0.7
)  # fmt: skip
# Waits, serves fewer than there are, waits again; and one that serves 4 of at least 10.
GAPS: Table = np.array([0, 1, 0, 0, 3, 4, 0, 0, 0, 9, 4, 0, 7], dtype=np.uint16)
SOME: Table = np.array([0] * 10 + [4], dtype=np.uint16)

CASES = [
    (GOOGLENET_P4, 0.6, greedy_table(32)),
    (GOOGLENET_P4, 0.85, limit_table(8, 32)),
    (GOOGLENET_P4, 0.5, static_table(16)),
    (GOOGLENET_P4, 0.7, solve(GOOGLENET_P4, 0.7 * GOOGLENET_P4.max_rate, Prices(1.0, 5.0)).table),
    (VARIED, 0.8, limit_table(4, 16)),
    (STEPPED, 0.7, solve(STEPPED, 0.7 * STEPPED.max_rate, Prices(1.0, 1.0)).table),
    (STEPPED, 0.3, GAPS),
    (VARIED, 0.1, SOME),
]


@subcases(("profile", "load", "table"), CASES)
def test_the_mean_is_the_exact_one(profile: Profile, load: float, table: Table) -> None:
    rate = load * profile.max_rate
    computed = response_time(profile, rate, table)
    assert computed.mean_ms == pytest.approx(evaluate(profile, rate, table).response_time_ms, rel=5e-4)
    assert computed.masses.sum() + computed.at_once.sum() == pytest.approx(1.0, abs=1e-5)
    assert (computed.masses >= 0.0).all()


@subcases("load", [0.1, 0.8])
def test_exponential_service_gives_an_exponential_response_time(load: float) -> None:
    """M/M/1, first come first served."""
    profile = Profile(np.array([2.0]), np.array([1.0]), np.array([1.0]), latency_offset_ms=1.0)
    computed = response_time(profile, load * 500.0, greedy_table(1), cells=2048)
    mean = 2.0 / (1.0 - load)
    for share in (0.5, 0.95, 0.99):
        assert computed.quantile_ms(share) == pytest.approx(1.0 - mean * np.log(1.0 - share), rel=0.01)
    assert computed.beyond(1.0 + mean) == pytest.approx(np.exp(-1.0), rel=0.01)


def test_fixed_service_waits_for_the_rest_and_those_before() -> None:
    """M/D/1: P[no wait] = 1 - load, and the wait is at most t ≤ τ with probability (1 - load)·e^(load·t/τ)."""
    profile = Profile(np.array([2.0]), np.array([1.0]), np.array([0.0]))
    computed = response_time(profile, 250.0, greedy_table(1), cells=1024)
    assert computed.quantile_ms(0.49) == pytest.approx(2.0, rel=1e-9)
    for wait in (0.5, 1.0, 1.9):
        assert 1.0 - computed.beyond(2.0 + wait) == pytest.approx(0.5 * np.exp(0.5 * wait / 2.0), rel=1e-3)


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(SettingsError, match=r"rate=0\.0: must be a number of rows per second, greater than 0"):
        response_time(GOOGLENET_P4, 0.0, greedy_table(32))
    computed = response_time(GOOGLENET_P4, 0.9 * GOOGLENET_P4.max_rate, static_table(8))
    assert not computed.stable and computed.beyond(1e9) == 1.0  # the table is too slow for the rate
    assert computed.mean_ms == computed.quantile_ms(0.5) == np.inf
    with pytest.raises(SettingsError, match=r"share=1\.0: must be between 0 and 1"):
        computed.quantile_ms(1.0)


@subcases("load", [0.97, 0.995])
def test_long_lines_are_followed_to_their_end(load: float) -> None:
    rate = load * GOOGLENET_P4.max_rate
    computed = response_time(GOOGLENET_P4, rate, full_batch_table(GOOGLENET_P4))
    exact = evaluate(GOOGLENET_P4, rate, full_batch_table(GOOGLENET_P4)).response_time_ms
    assert computed.mean_ms == pytest.approx(exact, rel=1e-3)


@needs_compiler
@pytest.mark.parametrize(
    ("cv", "rate", "entries"),
    spread(
        [(0.0, 990.0, [0, *[1] * 16, 4]), (0.1, 900.0, [0, *[1] * 9, 3]), (1.0, 700.0, [0, 1, 1, 1, 2, 2, 2, 3, 3, 9])]
    ),
)
def test_it_reaches_as_far_as_rows_that_are_left_behind_wait(cv: float, rate: float, entries: list[int]) -> None:
    """Of lines that are served row by row while they are short, the cells once reached only as far as the long ones need."""
    profile = Profile(np.ones(16), np.ones(16), np.full(16, cv))
    table = np.array(entries, dtype=np.uint16)
    seen = served(profile, rate, table, 2_000_000, parts=1, warm=100_000).quantiles[0]
    assert response_time(profile, rate, table).quantile_ms(0.99) == pytest.approx(seen, rel=0.015)
