"""Models that share a device, with the real batchers, against exact figures."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from benchmarks.policies.devices import DeviceModel, share
from benchmarks.policies.two_models import TwoModels

from weir.policy.cost import Floats, Profile
from weir.policy.decision import Greedy
from weir.policy.online.joint import DevicePolicy
from weir.policy.solve.device import DeviceLoad, DeviceTable, solve_device

SHORT = Profile.linear(alpha_ms=0.3, tau0_ms=1.0, max_batch_size=6)
LONG = Profile.linear(alpha_ms=1.2, tau0_ms=4.0, max_batch_size=6)
RATES = [0.35 * SHORT.max_rate, 0.3 * LONG.max_rate]


def arrivals(rate: float, count: int, seed: int) -> Floats:
    times: Floats = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))
    return times


def tables() -> list[DeviceTable]:
    return solve_device([DeviceLoad(SHORT, RATES[0]), DeviceLoad(LONG, RATES[1])])


def test_the_mean_of_the_solved_order_is_what_the_exact_chain_says() -> None:
    exact = TwoModels([SHORT, LONG], RATES)
    wanted = exact.evaluate(exact.rule(tables()))[0]
    models = [
        DeviceModel(profile, DevicePolicy(table), arrivals(rate, int(40.0 * rate), seed))
        for profile, table, rate, seed in zip((SHORT, LONG), tables(), RATES, (1, 2), strict=True)
    ]
    times = np.concatenate([each.response_time_ms for each in share(models, "solved")])
    assert times.mean() == pytest.approx(wanted, rel=0.03)


def test_one_batch_runs_at_a_time_and_every_request_once() -> None:
    models = [
        DeviceModel(profile, Greedy(), arrivals(rate, 2000, 3))
        for profile, rate in zip((SHORT, LONG), RATES, strict=True)
    ]
    found = share(models, "oldest")
    spans = sorted({span for each in found for span in zip(each.start.tolist(), each.end.tolist(), strict=True)})
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    for each, model in zip(found, models, strict=True):
        assert each.batches.rows.sum() == 2000 and np.all(each.start >= each.arrival)
        assert each.energy_mj == pytest.approx(model.profile.energy_mj[each.batches.rows - 1].sum())


def test_two_workers_serve_two_models_at_once() -> None:
    models = [DeviceModel(SHORT, Greedy(), np.zeros(1)), DeviceModel(LONG, Greedy(), np.zeros(1))]
    assert [each.start[0] for each in share(models, "solved", workers=2)] == [0.0, 0.0]
    first, second = share(models, "solved")
    assert (first.start[0], second.start[0]) == (0.0, first.end[0])


def test_requests_whose_deadline_passes_are_never_run() -> None:
    busy = DeviceModel(LONG, Greedy(), np.zeros(60))
    other = DeviceModel(SHORT, Greedy(), np.array([1e-4]), timeout=0.003)
    _, found = share([busy, other], "oldest")
    assert np.isnan(found.start[0]) and not len(found.response_time_ms)


def test_response_times_are_what_the_caller_measures() -> None:
    (found,) = share([DeviceModel(replace(SHORT, latency_offset_ms=0.5), Greedy(), np.zeros(1))], "oldest")
    assert found.response_time_ms == pytest.approx([1.3 + 0.5])
