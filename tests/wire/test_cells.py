from typing import Any

import msgspec
import numpy
import pytest

from weir.errors import InvalidRequest, WeirError
from weir.messages import JSON, OBJECT
from weir.wire.cells import Cells, Placed, Together, pack_cells, unpack_cells


def packed(values: list[Any], encodings: str | list[str] = OBJECT) -> Cells:
    return pack_cells(values, None, InvalidRequest, encodings)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([b"1", b"2"], "inline"),
        ([1, b"2", [3.0, {"a": None}]], "together"),
        ([numpy.zeros(2), numpy.float32(1), 5], "together"),
        ([], "together"),
        ([1, InvalidRequest("no")], "apart"),
        ([1, {"a": JSON, "b": InvalidRequest}], "apart"),
    ],
)
def test_what_shares_a_pickle(values: list[Any], shape: str) -> None:
    cells = packed(values)
    assert (cells.together is not None) is (shape == "together")
    assert (cells.apart is not None) is (shape == "apart")
    assert [str(value) for value in unpack_cells(cells, None, InvalidRequest)] == [str(value) for value in values]


def test_encoded_bodies_come_back_as_bytes() -> None:
    values = [memoryview(b"1"), bytearray(b"2"), b"3"]
    assert unpack_cells(packed(values, JSON), None, InvalidRequest) == [b"1", b"2", b"3"]
    mixed = unpack_cells(packed([memoryview(b"1"), bytearray(b"2")], [JSON, OBJECT]), None, InvalidRequest)
    assert (mixed, type(mixed[1])) == ([b"1", bytearray(b"2")], bytearray)


def test_one_pickle_that_cannot_be_read_fails_all_its_entries() -> None:
    values: list[WeirError] = unpack_cells(Cells(together=Together(3, b"garbage", [])), None, InvalidRequest)
    assert [type(value) for value in values] == [InvalidRequest] * 3
    assert len(set(map(id, values))) == 3
    assert "cannot be unpickled" in values[0].message


def test_a_reference_without_an_arena() -> None:
    with pytest.raises(ValueError, match="no arena"):
        unpack_cells(Cells(inline=[None], apart=[Placed(0, (0, 1))]), None, InvalidRequest)


def test_refs_are_all_that_lies_in_the_arena() -> None:
    cells = msgspec.convert([[None, None], [2, [0, 1], [[2, 3], b""]], [[0, 0, [4, 5]], [1, 1, [6, 7], [b""]]]], Cells)
    assert cells.refs() == [(0, 1), (2, 3), (4, 5), (6, 7)]


class Dressed(dict[str, int]):
    def as_plain(self) -> dict[str, int]:
        return dict(self)


def test_a_value_that_says_so_travels_as_something_plain() -> None:
    cells = packed([Dressed(a=1), {"b": 2}])
    assert cells.together is not None
    first, second = unpack_cells(cells, None, InvalidRequest)
    assert type(first) is dict
    assert (first, second) == ({"a": 1}, {"b": 2})
