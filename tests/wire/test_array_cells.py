"""Dicts of large arrays that are alike travel as places; all else as before."""

from typing import Any

import msgspec
import numpy
import pytest

from weir.errors import InvalidRequest
from weir.wire.cells import Cells, pack_cells, unpack_cells
from weir.wire.pickles import LARGE_BYTES, Ref

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
    values = OTHERS[name]
    cells, came = there_and_back(values, Memory())
    assert cells.alike is None
    assert repr(came) == repr(values)


def test_without_room_for_all_none_stays() -> None:
    memory = Memory(room=1)
    cells, came = there_and_back([{"a": large(1)}, {"a": large(2)}], memory)
    assert cells.alike is None
    assert [value["a"][0, 0] for value in came] == [1, 2]


def test_what_cannot_be_had_again_is_an_error_for_each() -> None:
    cells = pack_cells([{"a": large(1)}, {"a": large(2)}], Memory(), InvalidRequest)
    came = unpack_cells(cells, None, InvalidRequest)
    assert [type(value) for value in came] == [InvalidRequest] * 2
