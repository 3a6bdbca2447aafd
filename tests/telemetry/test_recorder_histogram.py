from hypothesis import given
from hypothesis import strategies as st

from weir.telemetry.recorder import SECONDS, Histogram

AGES = st.lists(st.floats(0, 100), min_size=1, max_size=70)


@given(AGES, st.floats(0, 1e6))
def test_a_batch_counts_like_its_values_one_by_one(ages: list[float], now: float) -> None:
    together, alone = Histogram(SECONDS), Histogram(SECONDS)
    instants = sorted(now - age for age in ages)
    together.observe_ages(instants, now)
    for instant in instants:
        alone.observe(now - instant)
    assert sum(together.counts) == len(ages)
    assert abs(together.sum - alone.sum) < 1e-6
    # An age within rounding of a bound may fall on either side of it.
    edges = sum(any(abs(now - instant - bound) < 1e-9 for bound in SECONDS) for instant in instants)
    assert sum(abs(a - b) for a, b in zip(together.counts, alone.counts, strict=True)) <= 2 * edges


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 8.0


def test_a_batch_of_ages_spans_buckets() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe_ages([1.0, 6.5, 8.5, 9.5, 9.75], 10.0)
    assert histogram.counts == [2, 1, 1, 1]
