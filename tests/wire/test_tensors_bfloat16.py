import ml_dtypes
import numpy
from hypothesis import given
from hypothesis import strategies as st

from weir.wire.tensors import to_bits, to_numbers


@given(st.lists(st.floats(width=32), max_size=5))
def test_numbers_are_rounded_as_others_round_them(numbers: list[float]) -> None:
    given_numbers = numpy.array(numbers, numpy.float32)
    bits = to_bits(given_numbers)
    assert bits.dtype == numpy.uint16
    ours = to_numbers(bits)
    theirs = given_numbers.astype(ml_dtypes.bfloat16).astype(numpy.float32)
    assert numpy.array_equal(ours, theirs, equal_nan=True)


def test_every_pattern_comes_back() -> None:
    patterns = numpy.arange(1 << 16, dtype=numpy.uint16).reshape(256, 256)
    numbers = to_numbers(patterns)
    finite = ~numpy.isnan(numbers)
    assert (to_bits(numbers)[finite] == patterns[finite]).all()
    assert numpy.isnan(to_numbers(to_bits(numbers[~finite]))).all()
