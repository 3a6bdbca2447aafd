import json
from typing import Any

import msgspec
import numpy
import pytest

from weir.errors import InvalidRequest
from weir.wire.tensors import BINARY_ONLY, DTYPES, read_elements, text_size, write_elements, write_json

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "FP32": [1, 0.25, 3.4028234663852886e38, -1.5],
    "FP64": [1, 1e308, -0.1],
    "BYTES": ["", "ü", "a\0b"],
}
for name, dtype in DTYPES.items():
    if dtype.kind in "ui" and name != "BF16":
        VALUES[name] = [int(numpy.iinfo(dtype).min), int(numpy.iinfo(dtype).max), 1]


def read(datatype: str, data: Any, shape: list[int] | None = None) -> numpy.ndarray[Any, Any]:
    shape = [len(data)] if shape is None else shape
    return read_elements("x", datatype, shape, int(numpy.prod(shape)), json.dumps(data).encode())


def test_every_datatype_has_its_case() -> None:
    assert set(VALUES) == set(DTYPES) - set(BINARY_ONLY)


@pytest.mark.parametrize("datatype", VALUES)
def test_there_and_back(datatype: str) -> None:
    values = VALUES[datatype]
    array = read(datatype, values)
    assert array.dtype == DTYPES[datatype]
    written = write_elements("x", datatype, array)
    assert written == values
    assert list(map(type, written)) == [float if array.dtype.kind == "f" else type(values[0])] * len(values)


@pytest.mark.parametrize("datatype", VALUES)
def test_nested_is_the_same_as_flat(datatype: str) -> None:
    values = VALUES[datatype]
    nested = [[[value] for value in values], [[value] for value in values]]
    shape = [2, len(values), 1]
    assert read(datatype, nested, shape).tolist() == read(datatype, [*values, *values], shape).tolist()


@pytest.mark.parametrize("datatype", VALUES)
def test_no_elements(datatype: str) -> None:
    assert read(datatype, []).shape == (0,)
    assert read(datatype, [[], []], [2, 0]).shape == (2, 0)
    assert write_elements("x", datatype, numpy.empty((0, 3), DTYPES[datatype])) == []


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [
        ("INT32", [1, 1.5], "has the element 1.5, INT32 takes whole numbers"),
        ("INT32", [1, 2.0], "has the element 2.0"),
        ("INT32", [1, True], "has the element true"),
        ("INT32", [1, None], "has the element null"),
        ("INT32", [1, "1"], 'has the element "1"'),
        ("INT32", [1, [2]], "nested data must be lists of the lengths"),
        ("INT32", {"a": 1}, 'data is {"a":1}, must be a list'),
        ("INT32", "abc", 'data is "abc", must be a list'),
        ("INT32", [2**31], "2147483648, out of the range of INT32"),
        ("INT8", [-129], "-129, out of the range of INT8"),
        ("UINT8", [-1], "-1, out of the range of UINT8"),
        ("UINT64", [2**64], "18446744073709551616, out of the range of UINT64"),
        ("UINT64", [[2**64]], "18446744073709551616, out of the range of UINT64"),
        ("INT64", [-(2**63) - 1], "out of the range of INT64"),
        ("INT64", [10**100], "out of the range of INT64"),
        ("BOOL", [1], "has the element 1, BOOL takes true or false"),
        ("FP32", [1e39], "1e39, out of the range of FP32"),
        ("FP32", [[-1e39]], "-1e39, out of the range of FP32"),
        ("FP32", ["NaN"], 'has the element "NaN", FP32 takes numbers'),
        ("FP64", [None], "has the element null, FP64 takes numbers"),
        ("FP64", [True], "has the element true, FP64 takes numbers"),
        ("BYTES", [1], "has the element 1, BYTES takes strings"),
        ("BYTES", ["a" * 100, 1], "has the element 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(datatype: str, data: Any, words: str) -> None:
    shape = [1, 1] if isinstance(data[0] if isinstance(data, list) else 0, list) else [1]
    with pytest.raises(InvalidRequest) as caught:
        read(datatype, data, shape)
    assert caught.value.message.startswith("tensor 'x': ")
    assert words in caught.value.message


def test_numbers_that_no_float_can_hold() -> None:
    with pytest.raises(InvalidRequest, match=r"tensor 'x': data cannot be read \(Number out of range"):
        read_elements("x", "FP64", [1], 1, b"[1e400]")
    with pytest.raises(InvalidRequest, match=r"tensor 'x': has the element 99999.*, out of the range of FP64"):
        read_elements("x", "FP64", [1], 1, b"[" + b"9" * 400 + b"]")


def test_strings_that_are_no_utf8() -> None:
    for data in (b'["a", "\xff"]', b'[["\xdc"], ["a"]]'):
        with pytest.raises(InvalidRequest, match=r"tensor 'x': data cannot be read \('utf-8' codec"):
            read_elements("x", "BYTES", [2, 1], 2, data)


def test_the_largest_fp32_is_the_largest_that_does_not_round_to_infinity() -> None:
    assert numpy.isfinite(read("FP32", [3.4028235677973362e38])).all()
    with pytest.raises(InvalidRequest, match="out of the range"):
        read("FP32", [3.4028235677973366e38])


def test_what_has_no_json_form() -> None:
    for datatype in BINARY_ONLY:
        with pytest.raises(InvalidRequest, match=f"tensor 'x': {datatype} has no JSON form"):
            write_elements("x", datatype, numpy.zeros(1, DTYPES[datatype]))
    with pytest.raises(InvalidRequest, match="tensor 'x': has bytes that are no UTF-8"):
        write_elements("x", "BYTES", numpy.array([b"\xff"], object))


def test_many_elements_are_written_piece_by_piece() -> None:
    numbers = numpy.arange(50_000, dtype="float32").reshape(2, -1)
    numbers[1, 7] = numpy.nan
    texts = numpy.array([b'"%d"' % place for place in range(50_000)], object)
    for datatype, array in (("FP32", numbers), ("BYTES", texts)):
        written = write_json("x", datatype, array)
        assert isinstance(written, msgspec.Raw)
        assert bytes(written) == msgspec.json.encode(write_elements("x", datatype, array))
    assert write_json("x", "FP32", numbers[0, :3]) == [0.0, 1.0, 2.0]
    texts[49_000] = b"\xff"
    with pytest.raises(InvalidRequest, match="no UTF-8"):
        write_json("x", "BYTES", texts)
    assert text_size(numbers) == 12 * 50_000
    assert text_size(texts[:3]) == 3 * 12 + 3 * 3
