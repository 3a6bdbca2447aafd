"""Rows at equal distances in one mapping are one array; anything else is not."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from weir.workers.run.tensors import adjoined

Array = numpy.ndarray[Any, Any]
STEP = 64


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """A page with the numbers 0, 1, 2 and so on."""
    mapped = mmap.mmap(-1, 4096)
    numpy.frombuffer(mapped, numpy.int32)[:] = numpy.arange(1024)
    yield mapped


def row(memory: Any, offset: int, shape: tuple[int, ...] = (1, 2, 4)) -> Array:
    size = 4 * int(numpy.prod(shape))
    return numpy.frombuffer(memoryview(memory)[offset : offset + size], numpy.int32).reshape(shape)


@pytest.mark.parametrize("offsets", [(0, STEP, 2 * STEP), (STEP, 0x180), (128, 160)])
def test_equal_distances_are_a_view(memory: mmap.mmap, offsets: tuple[int, ...]) -> None:
    parts = [row(memory, offset) for offset in offsets]
    whole = adjoined(parts)
    assert whole is not None
    assert whole.__array_interface__["data"][0] == parts[0].__array_interface__["data"][0]
    assert not whole.flags.writeable
    numpy.testing.assert_array_equal(whole, numpy.concatenate(parts))
    numpy.testing.assert_array_equal(whole.reshape(len(parts), -1)[:, 0], [offset // 4 for offset in offsets])


def test_the_view_keeps_the_memory(memory: mmap.mmap) -> None:
    whole = adjoined([row(memory, 0), row(memory, STEP)])
    with pytest.raises(BufferError):
        memory.close()
    assert whole is not None and whole[1, 0, 0] == STEP // 4


def others(memory: mmap.mmap) -> dict[str, list[Array]]:
    return {
        "different distances": [row(memory, 0), row(memory, STEP), row(memory, 3 * STEP)],
        "backwards": [row(memory, STEP), row(memory, 0)],
        "the same twice": [row(memory, 0), row(memory, 0)],
        "overlapping": [row(memory, 0), row(memory, 16)],
        "distances that are no whole number of elements": [row(memory, 0), row(memory, 66)],
        "unaligned": [row(memory, 2), row(memory, 66)],
        "several rows": [row(memory, 0, (2, 4)), row(memory, STEP, (2, 4))],
        "other shapes": [row(memory, 0), row(memory, STEP, (1, 8))],
        "not contiguous": [row(memory, 0), row(memory, STEP, (1, 4, 2)).transpose(0, 2, 1)],
        "ordinary memory": [numpy.zeros((1, 2, 4), numpy.int32), numpy.zeros((1, 2, 4), numpy.int32)],
        "a second one elsewhere": [row(memory, 0), numpy.zeros((1, 2, 4), numpy.int32)],
    }


@pytest.mark.parametrize("name", others(mmap.mmap(-1, 4096)))
def test_anything_else_is_none(memory: mmap.mmap, name: str) -> None:
    assert adjoined(others(memory)[name]) is None


def test_rows_of_two_mappings_are_none_even_where_distances_agree(memory: mmap.mmap) -> None:
    other = mmap.mmap(-1, 4096)
    first, second = sorted([row(memory, 0), row(other, 0)], key=lambda part: part.__array_interface__["data"][0])
    assert adjoined([first, second]) is None
