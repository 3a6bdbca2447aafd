"""drift.py: a change of service times is noticed, and nothing else is."""

import numpy as np
import pytest

from weir.policy.cost.profile import Profile
from weir.policy.online.rate import BATCHES, Drift, DriftDetector


def profile(cv: float) -> Profile:
    """Return one of 32 sizes."""
    return Profile.linear(alpha_ms=0.3, tau0_ms=1.0, max_batch_size=32, cv=cv)


def feed(detector: DriftDetector, of: Profile, factor: float, batches: int, seed: int = 1) -> tuple[Drift | None, int]:
    """Let batches of random sizes and Gamma times come; return the first verdict and how many there were."""
    rng = np.random.default_rng(seed)
    for number in range(batches):
        rows = int(rng.integers(1, 33))
        cv = float(of.cv[rows - 1])
        luck = rng.gamma(1.0 / cv**2, cv**2) if cv else 1.0
        verdict = detector.observe(rows, factor * luck * float(of.service_time_ms[rows - 1]) / 1000.0)
        if verdict is not None:
            return verdict, number + 1
    return None, batches


@pytest.mark.parametrize("cv", [0.0, 0.02, 0.1, 0.5])
def test_chance_is_no_drift(cv: float) -> None:
    of = profile(cv)
    assert feed(DriftDetector(of), of, 1.0, 100_000) == (None, 100_000)


@pytest.mark.parametrize(("cv", "soon"), [(0.0, 40), (0.02, 40), (0.1, 80), (0.3, 300)])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 3.0])
def test_a_change_is_noticed_soon_and_measured(cv: float, soon: int, factor: float) -> None:
    of = profile(cv)
    detector = DriftDetector(of)
    assert feed(detector, of, 1.0, 1000)[0] is None
    verdict, batches = feed(detector, of, factor, 10_000, seed=2)
    assert verdict is not None
    assert verdict.batches == BATCHES
    assert batches <= soon
    assert verdict.factor == pytest.approx(factor, rel=max(0.02, 3.0 * cv / BATCHES**0.5))


def test_what_is_too_little_to_matter_is_let_be() -> None:
    of = profile(0.02)
    assert feed(DriftDetector(of), of, 1.03, 20_000)[0] is None
    assert feed(DriftDetector(of), of, 0.97, 20_000)[0] is None


def test_one_pause_is_no_drift() -> None:
    of = profile(0.02)
    detector = DriftDetector(of)
    for number in range(2000):
        assert detector.observe(8, 0.0034 * (50.0 if number % 10 == 0 else 1.0)) is None


def test_an_alarm_that_what_follows_does_not_bear_out_is_taken_back() -> None:
    of = profile(0.02)
    detector = DriftDetector(of)
    assert feed(detector, of, 1.5, 4)[0] is None
    assert feed(detector, of, 1.0, 1000)[0] is None


def test_after_a_verdict_it_starts_anew() -> None:
    of = profile(0.0)
    detector = DriftDetector(of)
    first, batches = feed(detector, of, 2.0, 1000)
    assert first is not None
    assert feed(detector, of, 2.0, 1000) == (first, batches)
    assert feed(DriftDetector(of.scaled(time=2.0)), of, 2.0, 1000) == (None, 1000)


def test_what_cannot_be_compared_says_nothing() -> None:
    detector = DriftDetector(profile(0.0))
    for _ in range(100):
        assert detector.observe(33, 1.0) is None
        assert detector.observe(0, 1.0) is None
        assert detector.observe(1, 0.0) is None
