"""Arrays packed and unpacked are the same, whatever they are, and other bytes are refused."""

import struct
from typing import Any

import msgspec
import numpy
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.wire import tensors
from weir.wire.tensors import DTYPES, Arrays, Unpacker, pack


def texts(*values: bytes) -> numpy.ndarray[Any, Any]:
    array = numpy.empty(len(values), object)
    array[:] = values
    return array


def same(one: Arrays, other: Arrays) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and (one[name] == other[name]).all()
        for name in one
    )


@subcases(
    "arrays",
    [
        {},
        {f"x{place}": numpy.arange(6).reshape(2, 3).astype(dtype) for place, dtype in enumerate(DTYPES.values()) if dtype.kind != "O"},
        {"empty": numpy.zeros((2, 0), "f4"), "scalar": numpy.array(3)},
        {"turned": numpy.arange(12).reshape(3, 4).T, "some": numpy.arange(12)[::2]},
        {"a": texts(b"", b"long" * 100), "b": numpy.ones(2, "f4"), "c": texts(b"\0", b"x")},
    ],
)  # fmt: skip
def test_arrays_are_the_same_afterwards(arrays: Arrays) -> None:
    unpack = Unpacker()
    for _ in range(2):  # the second head is known
        found = unpack(pack(arrays))
        assert same(found, arrays)
        assert not any(array.flags.writeable for array in found.values() if array.dtype.kind != "O")


def test_arrays_are_little_endian_and_aligned() -> None:
    arrays = {"x": numpy.array([1, 2], ">i4"), "one": numpy.ones(3, "u1"), "next": numpy.ones(3, "f8")}
    found = Unpacker()(memoryview(bytearray(pack(arrays))))
    assert found["x"].tolist() == [1, 2] and found["x"].dtype == numpy.dtype("<i4")
    assert all(array.flags.aligned for array in found.values())


def test_a_head_is_checked_once_and_again_after_a_refusal() -> None:
    seen: list[Arrays] = []

    def check(arrays: Arrays) -> None:
        seen.append(arrays)
        if "bad" in arrays:
            raise InvalidRequest("bad")

    unpack = Unpacker(check)
    for _ in range(2):
        unpack(pack({"good": numpy.ones(2)}))
        with pytest.raises(InvalidRequest, match="bad"):
            unpack(pack({"bad": numpy.ones(2)}))
    assert [*map(list, seen)] == [["good"], ["bad"], ["bad"]]


def test_heads_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_REMEMBERED", 2)
    unpack = Unpacker()
    for rows in range(1, 9):
        assert same(unpack(pack({"x": numpy.ones(rows)})), {"x": numpy.ones(rows)})
    assert len(tensors._heads) <= 2 and len(unpack._known) <= 2


WHOLE = pack({"x": numpy.ones(4, "f8")})
COLUMNS: list[list[Any]] = [
    *[["x", dtype, [2], 0, 16] for dtype in ("<f8", "O", "nonsense")],
    *[["x", "<f8", [-2], 0, 16], ["x", "", [1 << 40], 0, 16], ["x", "<f8", [2], 1 << 70 >> 8, 16]],
]
HEADS = [b"", b"\xff" * 4, *[msgspec.msgpack.encode([column]) for column in COLUMNS]]


@subcases(
    "data",
    [
        *[b"", b"\1", WHOLE[:20], WHOLE[:-8], struct.pack("<II", 1 << 31, 8)],
        *[struct.pack("<II", len(head), 8 + len(head)) + head for head in HEADS],
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"packed arrays: malformed|tensor 'x'"):
        Unpacker()(data)
