import numpy as np
import pytest

from weir.policy.cost.profile import Profile
from weir.simulation.engine import BLOCK, KEPT, ServiceTimes


def profile(cv: float) -> Profile:
    return Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=4, cv=cv)


def test_without_variation_a_batch_takes_what_the_profile_says() -> None:
    for cv in (0.0, 1e-5):
        services = ServiceTimes(profile(cv), 1)
        assert [services.time(rows, 7) for rows in (1, 4)] == [0.003, 0.006]


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0, 2.0])
def test_times_have_their_mean_and_variation(cv: float) -> None:
    services = ServiceTimes(profile(cv), 1)
    times = np.array([services.time(2, index) for index in range(20_000)])
    assert times.mean() == pytest.approx(0.004, rel=0.04)
    assert times.std() / times.mean() == pytest.approx(cv, rel=0.06)


def test_luck_belongs_to_requests() -> None:
    one, other = ServiceTimes(profile(0.5), 1), ServiceTimes(profile(0.5), 1)
    forwards = [one.time(2, index) for index in range(0, 3 * BLOCK, 1000)]
    backwards = [other.time(2, index) for index in reversed(range(0, 3 * BLOCK, 1000))]
    assert forwards == backwards[::-1]
    assert one.time(4, 5) / one.time(2, 5) == pytest.approx(1.5)
    assert ServiceTimes(profile(0.5), 2).time(2, 5) != one.time(2, 5)


def test_luck_has_nothing_to_do_with_the_arrivals_of_the_same_seed() -> None:
    """Both come from generators that are made of one seed; were they the same one, long gaps would bring long batches."""
    together = []
    for seed in range(40):
        services = ServiceTimes(profile(1.0), seed)
        for start in (0, 1):  # what simulate(), and a search, draw arrivals from
            gaps = np.random.default_rng([seed, start]).exponential(1.0, 60)
            luck = [services.time(1, start * BLOCK + index) for index in range(60)]
            together.append(np.corrcoef(gaps, luck)[0, 1])
    assert abs(float(np.mean(together))) < 0.05  # 0.4 if they were


def test_luck_is_the_same_after_it_was_forgotten() -> None:
    services = ServiceTimes(profile(0.5), 1)
    first = services.time(1, 3)
    for block in range(1, KEPT + 3):
        services.time(1, block * BLOCK)
    assert services.time(1, 3) == first
