"""Dicts of large arrays that are alike travel as places; all else as before."""

from typing import Any

import msgspec
import numpy
import pytest

from weir.errors import InvalidRequest
from weir.wire.cells import LARGE_BYTES, Cells, Ref, pack_cells, unpack_cells

LARGE = LARGE_BYTES // 4


class Memory:
    """Places and Fetch in one: `room` places, one after the other."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.places: dict[Ref, bytes] = {}
        self._end = 0

    def place(self, payload: Any) -> Ref | None:
        if len(self.places) == self.room:
            return None
        raw = bytes(payload)
        ref = (self._end, len(raw))
        self._end += len(raw)
        self.places[ref] = raw
        return ref

    def take_back(self, ref: Ref) -> None:
        del self.places[ref]

    def buffer(self, ref: Ref) -> bytes:
        return self.places[ref]

    def cell(self, ref: Ref) -> bytes:
        return self.places[ref]


def large(value: float, *shape: int, dtype: Any = numpy.float32) -> Any:
    return numpy.full(shape or (1, LARGE), value, dtype)


def there_and_back(values: list[Any], memory: Memory) -> tuple[Cells, list[Any]]:
    cells = pack_cells(values, memory, InvalidRequest)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(cells), type=Cells)
    assert sorted(travelled.refs()) == sorted(memory.places)
    return cells, unpack_cells(travelled, memory, InvalidRequest)


def unchanged(values: list[Any]) -> Cells:
    """Return how `values` travel, of which the same must arrive."""
    cells, came = there_and_back(values, Memory())
    assert repr(came) == repr(values)
    return cells


def test_alike() -> None:
    values = [{"a": large(index), "b": large(-index, 2, 3, LARGE, dtype=numpy.int64)} for index in range(3)]
    cells, came = there_and_back(values, Memory())
    assert cells.alike is not None and cells.together is None and len(cells.alike.refs) == 6
    for sent, received in zip(values, came, strict=True):
        assert list(received) == ["a", "b"]
        for name in sent:
            assert (received[name].dtype, received[name].shape) == (sent[name].dtype, sent[name].shape)
            numpy.testing.assert_array_equal(received[name], sent[name])


OTHERS: dict[str, list[Any]] = {
    "small": [{"a": numpy.zeros(3)}],
    "one of them small": [{"a": large(1), "b": numpy.zeros(3)}],
    "no arrays": [{}],
    "a value that is none": [{"a": large(1)}, {"a": 5}],
    "other shapes": [{"a": large(1)}, {"a": large(1, 2, LARGE)}],
    "other datatypes": [{"a": large(1)}, {"a": large(1, dtype=numpy.int32)}],
    "other names": [{"a": large(1)}, {"b": large(1)}],
    "more names": [{"a": large(1)}, {"a": large(1), "b": large(2)}],
    "objects": [{"a": numpy.array([b"x"] * LARGE, object)}],
    "not contiguous": [{"a": large(1, LARGE, 2).T}],
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_travels_as_before(name: str) -> None:
    assert unchanged(OTHERS[name]).alike is None


def test_without_room_for_all_none_stays() -> None:
    memory = Memory(room=1)
    cells, came = there_and_back([{"a": large(1)}, {"a": large(2)}], memory)
    assert cells.alike is None
    assert [value["a"][0, 0] for value in came] == [1, 2]


def test_what_cannot_be_had_again_is_an_error_for_each() -> None:
    cells = pack_cells([{"a": large(1)}, {"a": large(2)}], Memory(), InvalidRequest)
    came = unpack_cells(cells, None, InvalidRequest)
    assert [type(value) for value in came] == [InvalidRequest] * 2


SMALL: dict[str, list[Any]] = {
    "one": [{"a": numpy.arange(3.0)}],
    "several": [{"a": numpy.full((rows, 2), rows, numpy.int32), "b": numpy.array([[rows > 1]])} for rows in (1, 2, 5)],
    "another order of names": [
        {"a": numpy.zeros(1), "b": numpy.ones(1, int)}, {"b": numpy.zeros(2, int), "a": numpy.ones(1)},
    ],
    "without elements, or dimensions": [{"a": numpy.zeros((0, 3)), "b": numpy.array(7)}],
    "another byte order": [{"a": numpy.arange(3, dtype=">i4")}],
    "part of another array": [{"a": numpy.arange(6).reshape(3, 2)[1:2]}],
    "half as long": [{"a": numpy.zeros(LARGE - 1, numpy.float32), "b": numpy.zeros(1, numpy.float16)}],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_arrays_travel_as_their_bytes_and_may_be_written_to(name: str) -> None:
    values = SMALL[name]
    cells, came = there_and_back(values, Memory())
    assert cells.small is not None and cells.together is None
    assert len(came) == len(values)
    for sent, received in zip(values, came, strict=True):
        assert received.keys() == sent.keys()
        for key, array in received.items():
            assert (array.dtype, array.shape, array.flags.writeable) == (sent[key].dtype, sent[key].shape, True)
            numpy.testing.assert_array_equal(array, sent[key])


NOT_SMALL: dict[str, list[Any]] = {
    "no arrays": [{}],
    "none, then some": [{}, {"a": numpy.zeros(1)}],
    "large": [{"a": large(1)}, {"a": numpy.zeros(1, numpy.float32)}],
    "one value that is none": [{"a": numpy.zeros(1), "b": 5}],
    "a later value that is none": [{"a": numpy.zeros(1)}, {"a": 5}],
    "other datatypes": [{"a": numpy.zeros(1)}, {"a": numpy.zeros(1, int)}],
    "more names": [{"a": numpy.zeros(1)}, {"a": numpy.zeros(1), "b": numpy.zeros(1)}],
    "other names": [{"a": numpy.zeros(1)}, {"b": numpy.zeros(1)}],
    "a name that is none": [{5: numpy.zeros(1)}],
    "objects": [{"a": numpy.array([b"x"], object)}],
    "times": [{"a": numpy.zeros(1, "M8[s]")}],
    "not contiguous": [{"a": numpy.zeros((3, 2)).T}],
    "a class of its own": [{"a": numpy.ma.masked_array([1, 2], [False, True])}],
}


@pytest.mark.parametrize("name", NOT_SMALL)
def test_what_is_not_small_arrays_travels_as_before(name: str) -> None:
    assert unchanged(NOT_SMALL[name]).small is None


def test_small_arrays_that_cannot_be_had_again_are_an_error_for_each() -> None:
    cells = pack_cells([{"a": numpy.zeros(1)}, {"a": numpy.zeros(2)}], None, InvalidRequest)
    assert cells.small is not None
    cells.small.shapes[1] = (300,)
    came = unpack_cells(cells, None, InvalidRequest)
    assert [type(value) for value in came] == [InvalidRequest] * 2
