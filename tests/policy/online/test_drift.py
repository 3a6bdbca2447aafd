"""drift.py: a change of service times is noticed, and nothing else is."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
from tests.rings import subcases

from weir.policy.cost import Floats, Profile
from weir.policy.online.drift import BATCHES, MOST_BATCHES, Drift, DriftDetector


def profile(cv: float) -> Profile:
    """Return one of 32 sizes."""
    return Profile.linear(alpha_ms=0.3, tau0_ms=1.0, max_batch_size=32, cv=cv)


def feed(
    detector: DriftDetector, of: Profile, factor: float | Floats, batches: int, seed: int = 1, noise: float = 0.0
) -> tuple[Drift | None, int]:
    """Let batches of random sizes and Gamma times come; return the first verdict and how many there were. `factor` is one,
    or one by size; `noise` is the standard deviation of what else log τ varies by.
    """
    rng = np.random.default_rng(seed)
    factors = np.broadcast_to(factor, of.max_batch_size)
    for number in range(batches):
        rows = int(rng.integers(1, 33))
        cv = float(of.cv[rows - 1])
        luck = (rng.gamma(1.0 / cv**2, cv**2) if cv else 1.0) * np.exp(rng.normal(0.0, noise))
        verdict = detector.observe(rows, float(factors[rows - 1] * luck * of.service_time_ms[rows - 1] / 1000.0))
        if verdict is not None:
            return verdict, number + 1
    return None, batches


def only_above(size: int, factor: float) -> Floats:
    """Return the factors by which only larger batches than of `size` rows have changed, of 32."""
    return np.where(np.arange(1, 33) > size, factor, 1.0)


@pytest.mark.no_cover
@subcases("cv", [0.0, 0.02, 0.1, 0.5])
def test_chance_is_no_drift(cv: float) -> None:
    of = profile(cv)
    assert feed(DriftDetector(of), of, 1.0, 40_000) == (None, 40_000)


@subcases(("cv", "soon", "factor"), [(0.0, 40, 0.5), (0.02, 40, 0.8), (0.1, 80, 1.25), (0.3, 300, 3.0)])
def test_a_change_is_noticed_soon_and_measured(cv: float, soon: int, factor: float) -> None:
    of = profile(cv)
    detector = DriftDetector(of)
    assert feed(detector, of, 1.0, 1000)[0] is None
    verdict, batches = feed(detector, of, factor, 10_000, seed=2)
    assert verdict is not None and verdict.batches >= BATCHES and batches <= soon
    assert verdict.factors == pytest.approx([factor] * 32, rel=max(0.02, 3.0 * cv / BATCHES**0.5))


def test_what_is_too_little_to_matter_is_let_be() -> None:
    of = profile(0.02)
    assert [feed(DriftDetector(of), of, factor, 20_000)[0] for factor in (1.03, 0.97)] == [None, None]
    detector = DriftDetector(of)
    assert feed(detector, of, 1.5, 4)[0] is None  # an alarm that what follows does not bear out
    assert feed(detector, of, 1.0, 1000)[0] is None


def test_one_pause_is_no_drift() -> None:
    of = profile(0.02)
    detector = DriftDetector(of)
    for number in range(2000):
        assert detector.observe(8, 0.0034 * (50.0 if number % 10 == 0 else 1.0)) is None


def test_after_a_verdict_it_compares_with_what_it_found() -> None:
    of = profile(0.0)
    detector = DriftDetector(of)
    first, batches = feed(detector, of, 2.0, 1000)
    assert first is not None
    assert feed(detector, of, 2.0, 1000) == (first, batches)
    detector.compare_with(of.scaled(time=np.array(first.factors)))
    assert feed(detector, of, 2.0, 1000) == (None, 1000)


@subcases(("size", "factor"), [(2, 0.6), (16, 1.6), (20, 0.6), (30, 1.6)])
def test_a_change_of_some_sizes_is_measured_for_these(size: int, factor: float) -> None:
    of, factors = profile(0.05), only_above(size, factor)
    detector = DriftDetector(of)
    assert feed(detector, of, 1.0, 1000)[0] is None
    verdict, batches = feed(detector, of, factors, 1000, seed=2)
    assert verdict is not None and batches < 200 * 32 / (32 - size)
    detector.compare_with(of.scaled(time=np.array(verdict.factors)))
    while (more := feed(detector, of, factors, 5000, seed=3)[0]) is not None:  # a few batches may tell less
        verdict = Drift(tuple(a * b for a, b in zip(verdict.factors, more.factors, strict=True)), 0)
        detector.compare_with(of.scaled(time=np.array(verdict.factors)))
    assert verdict.factors == pytest.approx(factors.tolist(), rel=0.06)


def test_rare_large_batches_that_have_become_slow_are_noticed() -> None:
    of = profile(0.05)
    detector, rng = DriftDetector(of), np.random.default_rng(4)
    for number in range(10_000):
        rows = 32 if number % 50 == 0 else int(rng.integers(1, 9))
        luck = float(np.exp(rng.normal(0.0, 0.05))) * (1.6 if rows > 16 else 1.0)
        verdict = detector.observe(rows, luck * float(of.service_time_ms[rows - 1]) / 1000.0)
        if verdict is not None:
            break
    assert verdict is not None and number < 50 * 40
    assert verdict.factors[:8] == (1.0,) * 8
    assert verdict.factors[31] == pytest.approx(1.6, rel=0.05)


def feed_size(detector: DriftDetector, rows: int, seconds: float) -> Drift:
    """Let batches of one size come until there is a verdict."""
    for _ in range(200):
        if (verdict := detector.observe(rows, seconds)) is not None:
            return verdict
    raise AssertionError("no verdict")


@subcases("is_slow_too", [False, True])
def test_where_only_large_batches_come_and_are_slow_a_smaller_is_tried(is_slow_too: bool) -> None:
    of = profile(0.02)
    detector, times = DriftDetector(of), of.service_time_ms / 1000.0
    first = feed_size(detector, 32, 1.6 * times[31])
    assert (*first.factors, first.tried) == pytest.approx((*[1.6] * 32, 16), rel=0.001)
    detector.compare_with(of.scaled(time=np.array(first.factors)))
    if is_slow_too:
        assert [detector.observe(16, 1.6 * times[15]) for _ in range(100)] == [None] * 100
        return
    second = feed_size(detector, 16, times[15])
    assert (*second.factors, second.tried) == pytest.approx((*[1.0 / 1.6] * 16, *[1.0] * 16, 0), rel=0.001)


def test_no_size_is_tried_that_could_not_be_better() -> None:
    plain, steep = profile(0.02), Profile.linear(alpha_ms=0.05, tau0_ms=10.0, max_batch_size=32)
    for of, rows, factor, tried in ((plain, 32, 1.2, 16), (steep, 32, 1.6, 0), (plain, 32, 0.6, 0), (plain, 1, 2.0, 0)):
        assert feed_size(DriftDetector(of), rows, factor * float(of.service_time_ms[rows - 1]) / 1000.0).tried == tried


# What a busy machine does: no change of the model.

HOUR = 3600.0


def busy(seconds: float, settle: float, spread: float = 0.1, seed: int = 5) -> Iterator[tuple[int, float]]:
    """Return batches for so many seconds of work, each of which takes longer by a factor that varies by `spread` and is
    forgotten within `settle` seconds (0: with each batch).
    """
    rng, level, of = np.random.default_rng(seed), 0.0, profile(0.0)
    while seconds > 0.0:
        rows = int(rng.integers(1, 33))
        mean = 10.0 * float(of.service_time_ms[rows - 1]) / 1000.0
        kept = np.exp(-mean / settle) if settle else 0.0
        level = kept * level + np.sqrt(1.0 - kept**2) * rng.normal(0.0, spread)
        taken = mean * float(np.exp(level))
        seconds -= taken
        yield rows, taken


def follow(of: Profile, batches: Iterator[tuple[int, float]]) -> Iterator[tuple[float, Profile]]:
    """Let batches come, and compare with what is found; return the seconds of work until then, and each profile."""
    detector, worked = DriftDetector(of), 0.0
    for rows, seconds in batches:
        worked += seconds
        if (verdict := detector.observe(rows, seconds)) is not None:
            of = of.scaled(time=np.array(verdict.factors))
            detector.compare_with(of)
            yield worked, of


@pytest.mark.no_cover
@subcases(("settle", "most"), [(0.1, 3), (1.0, 40)])
def test_a_neighbour_that_works_now_and_then_is_seldom_a_drift(settle: float, most: int) -> None:
    """A spread that is assumed rather than learned finds 499 and 706 here."""
    assert len(list(follow(profile(0.01).scaled(time=10.0), busy(HOUR / 2.0, settle)))) <= most


@subcases("settle", [0.0, 1.0])
def test_noise_does_not_hide_a_change(settle: float) -> None:
    of = profile(0.01).scaled(time=10.0)
    slower = ((rows, 1.6 * seconds) for rows, seconds in busy(300.0, settle, seed=6))
    soon = [found for worked, found in follow(of, chain(busy(300.0, settle), slower)) if worked < 360.0]
    assert soon[-1].service_time_ms == pytest.approx(1.6 * of.service_time_ms, rel=0.2)


def test_what_cannot_be_measured_is_given_up() -> None:
    """Half of the times are twice as long, half are half as long: no median says anything."""
    of = profile(0.0)
    detector = DriftDetector(of)
    rng = np.random.default_rng(8)
    for _ in range(3 * MOST_BATCHES):
        factor = np.exp(rng.normal(0.0, 3.0))
        assert detector.observe(8, factor * float(of.service_time_ms[7]) / 1000.0) is None


def test_what_cannot_be_compared_says_nothing() -> None:
    detector = DriftDetector(profile(0.0))
    assert {detector.observe(*batch) for batch in [(33, 1.0), (0, 1.0), (1, 0.0)] * 100} == {None}
