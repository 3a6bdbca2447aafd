"""numerics.py: every function against scipy's."""

import numpy as np
import pytest
from tests.late import scipy
from tests.rings import subcases

from weir.numerics import GammaQuantile, erf, gamma_tail, isotonic, log_gamma, monotone_curve, student_quantile

DRAW = np.random.default_rng(7)


def test_the_error_function_is_exact_and_keeps_the_type() -> None:
    x = np.concatenate((DRAW.normal(size=1_000) * 2.0, [-np.inf, -7.0, -6.0, 0.0, 1e-300, 6.0, 7.0, np.inf]))
    np.testing.assert_allclose(erf(x), scipy.special.erf(x), rtol=1e-15, atol=3e-16)
    half = x.astype(np.float32).reshape(-1, 8)
    assert erf(half).dtype == np.float32 and erf(half).shape == half.shape
    np.testing.assert_allclose(erf(half), scipy.special.erf(half), rtol=2e-7, atol=1e-9)
    assert np.isnan(erf(np.array([np.nan]))).all()


def test_the_tail_of_a_gamma_law() -> None:
    shape = np.concatenate((10.0 ** DRAW.uniform(-2.0, 3.0, 20_000), DRAW.integers(1, 300, 20_000).astype(float)))
    x = np.maximum(shape + np.sqrt(shape) * DRAW.uniform(-6.0, 9.0, len(shape)), DRAW.exponential(size=len(shape)))
    x[:3] = 0.0, 1e-300, 1e-12
    np.testing.assert_allclose(log_gamma(shape), scipy.special.gammaln(shape), rtol=1e-13, atol=1e-14)
    found = gamma_tail(shape, x, log_gamma(shape))
    np.testing.assert_allclose(found, scipy.special.gammaincc(shape, x), rtol=1e-11, atol=1e-15)
    assert gamma_tail(*(np.empty(0) for _ in range(3))).shape == log_gamma(np.empty(0)).shape == (0,)


@subcases("shape", [0.02, 0.11, 0.5, 0.99, 1.0, 1.5, 4.0, 11.1, 123.0, 2_500.0, 9_999.0, 10_000.0, 1e6, 1e8])
def test_the_quantiles_of_a_gamma_law(shape: float) -> None:
    shares = np.concatenate((DRAW.random(5_000), 10.0 ** DRAW.uniform(-15.0, -1.0, 500)))
    shares = np.concatenate((shares, np.maximum(1.0 - shares, 2.0**-53), [2.0**-53, 1.0 - 2.0**-53]))
    quantile = GammaQuantile(shape)
    wanted = scipy.special.gammaincinv(shape, shares)
    # scipy's own series end too early in the tails of large shapes, where its shares come back otherwise.
    known = (wanted > 1e-290) & ((shape < 1e5) | ((shares > 1e-4) & (shares < 1.0 - 1e-4)))
    shares, wanted = shares[known], wanted[known]
    np.testing.assert_allclose([quantile(share) for share in shares.tolist()], wanted, rtol=2e-9)
    assert 0.0 <= quantile(0.0) <= quantile(1e-15)


@subcases("freedom", [*range(1, 40), 99, 100, 1_001])
def test_the_quantiles_of_students_law(freedom: int) -> None:
    for share in (0.5, 0.9, 0.975, 0.9995):
        assert student_quantile(freedom, share) == pytest.approx(
            scipy.special.stdtrit(freedom, share), rel=1e-12, abs=1e-14
        )


@subcases("count", [1, 2, 3, 50])
def test_isotonic_regression(count: int) -> None:
    for _ in range(50):
        values, weights = np.round(DRAW.normal(size=count), 1), DRAW.random(count) + 1e-6
        wanted = scipy.optimize.isotonic_regression(values, weights=weights).x
        np.testing.assert_allclose(isotonic(values, weights), wanted, rtol=1e-12, atol=1e-14)


@subcases("count", [2, 3, 4, 30])
def test_the_curve_that_only_rises_and_falls_as_its_points_do(count: int) -> None:
    for _ in range(50):
        x = np.cumsum(DRAW.integers(1, 20, count)).astype(float)
        y = np.round(DRAW.normal(size=count), 1)  # some are equal
        wanted = np.concatenate((x, DRAW.uniform(x[0], x[-1], 200)))
        np.testing.assert_allclose(
            monotone_curve(x, y, wanted), scipy.interpolate.PchipInterpolator(x, y)(wanted), rtol=1e-12, atol=1e-13
        )
