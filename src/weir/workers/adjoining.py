"""Rows that lie at equal distances in shared memory, as one array: what need not be gathered.

Bodies of one size that arrive one after the other lie one after the other in the arena (allocator.py), each with its
header before it. A batch of them is one array whose rows are a little further apart than they are long.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

Array = numpy.ndarray[Any, Any]


def adjoined(parts: Sequence[Array]) -> Array | None:
    """Return `parts`, each of one row and all of one shape, as one array that is a view of the memory they lie in.

    None unless that is one mapping, which the array keeps, and each begins as far after the one before as all others do.
    """
    first = parts[0]
    memory = _mapping(first)
    if memory is None or len(first) != 1 or not first.flags.aligned:
        return None
    start = address = _address(first)
    step = _address(parts[1]) - start
    if step < first.nbytes or step % first.itemsize:
        return None
    for part in parts:
        if part.shape != first.shape or not part.flags.c_contiguous or _address(part) != address:
            return None
        if _mapping(part) is not memory:
            return None
        address += step
    whole = as_strided(first, (len(parts), *first.shape[1:]), (step, *first.strides[1:]), writeable=False)
    return whole.view()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _mapping(array: Array) -> mmap.mmap | None:
    """Return the mapping that `array` is a view of; None if it is not one of a mapping."""
    base: Any = array
    while isinstance(base, numpy.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else base
    return memory if isinstance(memory, mmap.mmap) else None
