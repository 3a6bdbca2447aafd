"""Profiles that are learned from served batches."""

import numpy as np
import pytest

from weir.batching.service_time import ServiceTime
from weir.policy.cost import Profile
from weir.tuning.learning import ENOUGH, ProfileMaker, learned_profile


class Learner:
    """A maker, and the times that it reads."""

    def __init__(self, max_batch_size: int, power: float | None) -> None:
        self.times = ServiceTime()
        self.times.keep()
        self.maker = ProfileMaker(max_batch_size, power)


def learn(learned: Learner, times: dict[int, list[float]], batches: int = ENOUGH) -> list[Profile]:
    """Let batches of the sizes come in turn, each of the next of its times in ms; return the profiles on the way."""
    profiles = []
    sizes = sorted(times)
    for number in range(batches):
        size = sizes[number % len(sizes)]
        own = times[size]
        learned.times.learn(size, own[number // len(sizes) % len(own)] / 1000.0, 0.0, 1.0)
        profile = learned.maker.update(learned.times.keep(), learned.times.count)
        if profile is not None:
            profiles.append(profile)
    return profiles


def test_a_straight_line_is_found_from_some_of_its_sizes() -> None:
    (profile,) = learn(Learner(16, None), {size: [1.0 + 0.5 * size] for size in (2, 4, 8)})
    assert profile.service_time_ms == pytest.approx(1.0 + 0.5 * np.arange(1, 17))
    assert profile.energy_source == "time"
    assert (profile.cv < 1e-6).all()
    assert profile.about["how"] == f"learned from {ENOUGH} batches, of up to 8 rows"


def test_how_times_vary_is_learned_too() -> None:
    (profile,) = learn(Learner(4, 30.0), {1: [0.9, 1.1], 4: [3.6, 4.4]})
    assert profile.cv == pytest.approx(np.full(4, 0.1), rel=0.02)
    assert (profile.energy_mj == 30.0 * profile.service_time_ms).all()
    assert profile.energy_source == "stated"


def test_delays_of_the_machine_do_not_count_and_variation_is_bounded() -> None:
    (profile,) = learn(Learner(4, None), {1: [*[2.0] * 99, 500.0], 4: [3.0]})
    assert profile.service_time_ms[0] == pytest.approx(2.0) and profile.cv[0] < 1e-6
    (profile,) = learn(Learner(4, None), {1: [1.0, 1.0, 1.0, 1.0, 40.0], 4: [50.0]})
    assert profile.cv[0] == 1.0


def test_one_size_says_too_little() -> None:
    learned = Learner(16, None)
    assert learn(learned, {5: [1.0]}, 10 * ENOUGH) == []
    assert learn(learned, {5: [1.0], 6: [1.1]}, 10 * ENOUGH) == []  # and two that are nearly one


def test_larger_batches_than_before_are_worth_another_look() -> None:
    learned = Learner(16, None)
    assert len(learn(learned, {1: [1.0], 2: [1.5]}, 5 * ENOUGH)) == 1
    (better,) = learn(learned, {4: [9.0]}, ENOUGH)
    assert better.service_time_ms[3] == pytest.approx(9.0)


def test_times_never_fall_and_never_reach_zero() -> None:
    (profile,) = learn(Learner(12, None), {4: [8.0], 6: [7.0], 8: [30.0]})
    times = profile.service_time_ms
    assert (np.diff(times) >= 0.0).all()
    assert times[3] == pytest.approx(times[5])
    assert times[0] > 0.0


def test_a_size_that_no_longer_comes_is_not_forgotten() -> None:
    times = ServiceTime()
    known = times.keep()
    for rows, batches in ((1, 10), (4, 10), (8, 10), (1, 1000)):
        for _ in range(batches):
            times.learn(rows, 0.5 + 0.5 * rows, 0.0, 1.0)
    assert learned_profile(known, 8).service_time_ms == pytest.approx(1000.0 * (0.5 + 0.5 * np.arange(1, 9)))


def test_huge_batches_are_learned_up_to_a_bound() -> None:
    assert learned_profile({1: [1.0], 5000: [1.0], 9000: [1.0]}, 1 << 30).max_batch_size == 1024
    assert np.all(learned_profile({2: [0.5] * 3}, 4).service_time_ms == 500.0)
