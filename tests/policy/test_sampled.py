"""sampled.py: the same response times as those of the whole law."""

import numpy as np
import pytest

from weir.policy.long_lines import solve_long
from weir.policy.prices import Prices
from weir.policy.profile import GOOGLENET_P4, Profile
from weir.policy.response import response_time
from weir.policy.sampled import Sampler

STEPS = np.arange(32.0) // 8.0
STEPPED = Profile(2.0 + 1.5 * STEPS, 30.0 + 12.0 * STEPS, np.full(32, 0.2))
FLAT = Profile.linear(alpha_ms=10.8, tau0_ms=0.5, max_batch_size=32)


@pytest.mark.parametrize("profile", [GOOGLENET_P4, STEPPED, FLAT], ids=["linear", "stepped", "flat"])
@pytest.mark.parametrize("load", [0.1, 0.6, 0.9])
def test_sampled_quantiles_are_those_of_the_law(profile: Profile, load: float) -> None:
    rate = load * profile.max_rate
    found = solve_long(profile, rate, Prices(), 400)
    times = Sampler(found).response_times_ms()
    assert times.mean() == pytest.approx(found.rates.response_time_ms, rel=0.03)
    assert np.quantile(times, 0.99) == pytest.approx(
        response_time(profile, rate, found.table()).quantile_ms(0.99), rel=0.03
    )
    assert np.array_equal(times, Sampler(found).response_times_ms())


@pytest.mark.parametrize("cv", [0.6, 3.0])
@pytest.mark.parametrize("load", [0.5, 0.95])
def test_their_mean_is_right_where_lines_are_long(cv: float, load: float) -> None:
    varied = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(32, cv))
    found = solve_long(varied, load * varied.max_rate, Prices(), 200)
    times = Sampler(found).response_times_ms(65_536)
    assert times.mean() == pytest.approx(found.rates.response_time_ms, rel=0.03)
