"""BF16: the upper half of a 32-bit float. Numpy has no such type, so arrays of it hold the bits."""

from typing import Any

import numpy

Array = numpy.ndarray[Any, Any]

_HALF, _EVEN = numpy.uint32(0x7FFF), numpy.uint32(1)
_QUIET_NAN = numpy.uint16(0x7FC0)


def to_bits(numbers: Array) -> Array:
    """Return the bits of FP32 `numbers`, each rounded to the nearest BF16, halves to the even one."""
    wide = numpy.ascontiguousarray(numbers, numpy.float32).view(numpy.uint32)
    rounded = wide + _HALF + (wide >> 16 & _EVEN)
    return numpy.where(numpy.isnan(numbers), _QUIET_NAN, (rounded >> 16).astype(numpy.uint16))


def to_numbers(bits: Array) -> Array:
    """Return the FP32 numbers whose BF16 `bits` these are, exactly."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)
