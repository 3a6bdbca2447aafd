"""event_loop.c: what theory knows of queues and of queues served in bulk."""

import numpy as np
import pytest
from benchmarks.policies.asked_loop import asked
from benchmarks.policies.event_loop import changes, controls, interval, served, served_by_several, sharper
from tests.policy.compiler import needs_compiler
from tests.rings import spread

from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import greedy_table, multi_worker_table, static_table
from weir.simulation.banks import make_bank
from weir.simulation.simulator import run

pytestmark = needs_compiler


def single(cv: float) -> Profile:
    """Return a profile of single rows that take 2 ms."""
    return Profile(np.array([2.0]), np.array([3.0]), np.array([cv]))


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("load", spread([0.3, 0.8]))
def test_pollaczek_and_khinchine(load: float, cv: float) -> None:
    seen = served(single(cv), load * 500.0, greedy_table(1), 100_000, warm=100_000)
    response, power = interval(seen.means), interval(seen.powers)
    assert response.low < 2.0 + load * (1.0 + cv * cv) / (1.0 - load) < response.high
    assert response.high - response.low < 0.2 * response.mean
    assert power.low < 1.5 * load < power.high


@pytest.mark.parametrize("load", [0.2, 0.7])
def test_m_m_1_is_exponential(load: float) -> None:
    mean = 2.0 / (1.0 - load)
    seen = served(single(1.0), load * 500.0, greedy_table(1), 100_000, warm=100_000, late=(mean, 3.0 * mean))
    for share, limit in zip(seen.later, (1.0, 3.0), strict=True):
        assert share.low < np.exp(-limit) < share.high
    assert float(np.mean(seen.quantiles)) == pytest.approx(-np.log(0.01) * mean, rel=0.05)


def test_m_d_1s_waiting_time() -> None:
    """Erlang's law of the wait in M/D/1: within t < τ it is (1 - ρ)·exp(λt)."""
    seen = served(single(0.0), 250.0, greedy_table(1), 100_000, warm=100_000, late=(2.0, 2.5, 3.5))
    for share, wait in zip(seen.later, (1e-9, 0.5, 1.5), strict=True):
        assert share.low < 1.0 - 0.5 * np.exp(0.25 * wait) < share.high


@pytest.mark.parametrize(("size", "load"), [(4, 0.02), (4, 0.9), (16, 0.5)])
def test_a_bulk_queue_of_fixed_batches(size: int, load: float) -> None:
    """Crommelin (1932): full batches wait as single rows do in M/D/c, c the batch; before that they fill."""
    profile = Profile(np.full(size, 2.0), np.ones(size), np.zeros(size))
    rate, mean = load * size / 2.0, load * size
    turns = np.exp(2j * np.pi * np.arange(1, size) / size)
    roots = turns / 2.0
    for _ in range(2000):
        roots = turns * np.exp(mean * (roots - 1.0) / size)
    waiting = (mean**2 - size * (size - 1)) / (2.0 * (size - mean)) + float((1.0 / (1.0 - roots)).sum().real)
    expected = 2.0 + (waiting + (size - 1) / 2.0) / rate
    seen = interval(served(profile, 1000.0 * rate, static_table(size), 100_000, warm=100_000).means)
    assert seen.low < expected < seen.high


@pytest.mark.parametrize("cv", [0.0, 0.5, 2.0])
def test_control_variates_make_the_same_sharper(cv: float) -> None:
    rate, table = 400.0, greedy_table(1)
    seen = served(single(cv), rate, table, 20_000, warm=100_000, sharpened=controls(single(cv), rate, table))
    response, power = (interval(seen.sharp[:, which]) for which in range(2))
    expected = 2.0 + 0.8 * (1.0 + cv * cv) / 0.2
    assert response.low < expected < response.high
    assert response.high - response.low < 0.05 * (interval(seen.means).high - interval(seen.means).low)
    assert power.mean == pytest.approx(1.2, rel=1e-9)


def test_control_variates_that_are_wrong_say_nothing_wrong() -> None:
    """Any function of the line's length will do: only its mean changes must be right."""
    profile, rate, table = single(0.7), 300.0, static_table(1)
    rests = np.random.default_rng(3).uniform(-3.0, 3.0, (2, 12))
    given = changes(profile, rate, table, 4, rests, np.array([0.3, -0.1]), np.array([0.02, 0.01]))
    seen = served(profile, rate, table, 100_000, warm=100_000, sharpened=given)
    response, power = (interval(seen.sharp[:, which]) for which in range(2))
    assert response.low < 2.0 + 0.6 * 1.49 / 0.4 < response.high
    assert power.low < 0.9 < power.high
    assert power.high - power.low > 1e-4


@pytest.mark.no_cover
@pytest.mark.parametrize("load", [0.5, 0.95, 1.3])
def test_a_policy_that_is_asked_by_a_plain_loop_answers_and_refuses_as_in_the_batcher(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.simulation.banks.PROMISE_LOADS", (0.5, 0.86, 0.97))
    rates = [each * GOOGLENET_P4.max_rate for each in (0.2, 0.4, 0.6, 0.8, 0.97)]
    promised = load > 1.0
    bank = (
        make_bank(GOOGLENET_P4, objective=LatencySLO(0.02, 0.01)) if promised else solve_bank(GOOGLENET_P4, rates=rates)
    )
    coming = np.cumsum(np.random.default_rng(4).exponential(1.0 / (load * GOOGLENET_P4.max_rate), 4_000))
    taken = asked(SolvedPolicy(bank), GOOGLENET_P4, coming)
    made = run(GOOGLENET_P4, SolvedPolicy(bank), coming)
    assert np.array_equal(np.isnan(taken), made.refused)
    assert (load < 1.0) == (not made.refused.any())
    np.testing.assert_allclose(1000.0 * taken[~made.refused][:-64], made.response_time_ms[:-64], rtol=1e-9)


@pytest.mark.parametrize(("workers", "cv"), [(1, 0.5), (4, 0.0), (4, 1.0)])
def test_changes_of_the_work_of_several_workers_are_nothing_on_the_mean_and_take_noise_off(
    workers: int, cv: float
) -> None:
    profile = Profile.linear(alpha_ms=0.3, tau0_ms=4.0, max_batch_size=8, cv=cv)
    tables = [multi_worker_table(profile, 3)] * workers
    bends = [workers * each for each in (0.0, 10.0, 40.0, 80.0)]
    seen = served_by_several(
        profile, 0.93 * workers * profile.max_rate, tables, 60_000, parts=40, warm=60_000, late=[60.0], bends=bends
    )
    for change in seen.sharp[:, 1:].T:
        found = interval(change)
        assert found.low <= 0.0 <= found.high
    plain, late = interval(seen.means), seen.later[0]
    sharp, sharp_late = (sharper(each, seen.sharp[:, 1:]) for each in (seen.sharp[:, 0], seen.shares[:, 0]))
    assert plain.low < sharp.mean < plain.high and late.low <= sharp_late.mean <= late.high
    assert sharp.high - sharp.low < 0.2 * (plain.high - plain.low)
    if workers == 1:
        assert sharp.low < evaluate(profile, 0.93 * profile.max_rate, tables[0]).response_time_ms < sharp.high
