import json
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rings import subcases

from weir.errors import InvalidRequest, ModelError
from weir.messages import JSON, MSGPACK
from weir.model import DATATYPES, NONE, OPTIONAL, PAD, RAGGED, REQUIRED, Tensor
from weir.wire import tensors
from weir.wire.tensors import DTYPES, batch_key, check_bound, element_count, rows_of, shape_key, to_arrays
from weir.wire.values import decode, encode

T = Tensor("t", "BYTES", [-1])
XY = (Tensor("x", "FP32", [-1, 2]), Tensor("y", "INT64", [-1]))


def one(datatype: str, value: Any, shape: tuple[int, ...] = (-1,)) -> numpy.ndarray[Any, Any]:
    return to_arrays({"t": value}, [Tensor("t", datatype, shape)])["t"]


def test_lists_become_the_arrays_declared() -> None:
    arrays = to_arrays({"y": [5, 6, 7], "x": [[1, 2], [3, 4.5], [0, 0]]}, XY)
    assert list(arrays) == ["x", "y"]
    assert arrays["x"].dtype == numpy.float32
    assert arrays["x"].tolist() == [[1, 2], [3, 4.5], [0, 0]]
    assert rows_of(arrays) == 3
    assert to_arrays({"x": arrays["x"]}, XY[:1])["x"] is arrays["x"]


@subcases(
    ("value", "text"),
    [
        ([1], "a list, must be an object with 'x', 'y'"),
        ({"x": [[1, 2]]}, "tensor 'y': is missing, the model declares 'x', 'y'"),
        ({"x": [[1, 2]], "y": [1], "z": 0}, "tensor 'z': not one of 'x', 'y'"),
        ({"x": [[1, 2]], "y": [1, 2]}, "tensor 'y': has 2 rows, tensor 'x' has 1; they must be equal"),
        ({"x": [[1, 2, 3]], "y": [1]}, r"tensor 'x': has shape \[1, 3\], must be \[-1, 2\]"),
        ({"x": [1, 2], "y": [1]}, r"tensor 'x': has shape \[2\], must be \[-1, 2\]"),
        ({"x": 1, "y": [1]}, r"tensor 'x': has shape \[\], must be"),
        ({"x": numpy.zeros((0, 2)), "y": []}, "tensor 'x': has 0 rows, must have at least 1"),
        ({"x": [[1], [2, 3]], "y": [1]}, "tensor 'x': must be nested lists of equal lengths"),
        ({"x": [["1", "2"]], "y": [1]}, "tensor 'x': has strings, must be FP32"),
        ({"x": [[1, None]], "y": [1]}, "tensor 'x': has NoneType elements, must be FP32"),
        ({"x": [[1, {}]], "y": [1]}, "tensor 'x': has dict elements, must be FP32"),
        ({"x": [[True, False]], "y": [1]}, "tensor 'x': has elements of bool, must be FP32"),
        ({"x": [[1, 1e300]], "y": [1]}, r"tensor 'x': has 1e\+300, out of the range of FP32"),
        ({"x": [[1, 2]], "y": [1.5]}, "tensor 'y': has elements of float64, must be INT64"),
        ({"x": [[1, 2]], "y": [2**63]}, "tensor 'y': has 9223372036854775808, out of the range of INT64"),
        ({"x": [[1, 2]], "y": [10**30]}, "tensor 'y': has integers of more than 64 bits, must be INT64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_rule(value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        to_arrays(value, XY)
    with pytest.raises(ModelError, match=text):
        to_arrays(value, XY, ModelError)


DEEP: Any = 1.0
for _ in range(500):
    DEEP = [DEEP]
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "UINT8": ([[0, 255]], [[256], [-1]]),
    "INT8": ([[-128, 127]], [[-129]]),
    "UINT64": ([[2**64 - 1], [1, 2**64 - 1]], [[-1, 2**64 - 1], [1, 2**64]]),
    "INT64": ([[-(2**63), 2**63 - 1], [1, 2**53 + 1]], [[-(2**63) - 1]]),
    "FP64": ([[1, 2**64 - 1], [10**30, 0.5], [1, 2]], [[10**400]]),
    "BF16": ([[1]], [[10**400]]),
    "FP32": ([[math.nan, math.inf]], [[10**39], DEEP]),
    "INT32": ([[1, -1]], [[1, True]]),
    "BOOL": ([[True, False]], [[0, 1]]),
    "FP16": ([[65504, -0.5]], [[70000.0]]),
    "BYTES": ([["ä", b"\x00\xff"]], [[1], ["a", 1], ["a", None], [["a"], ["b", "c"]]]),
}


@subcases("datatype", RANGES)
def test_ranges(datatype: str) -> None:
    good, bad = RANGES[datatype]
    for value in good:
        array = one(datatype, value)
        assert array.dtype == DTYPES[datatype]
        if datatype in ("UINT64", "INT64"):
            assert array.tolist() == value
    for value in bad:
        with pytest.raises(InvalidRequest, match=f"tensor 't': .*({datatype}|lengths)"):
            one(datatype, value)


def test_bytes_are_bytes_objects_and_text_in_json() -> None:
    array = one("BYTES", [["ä", "b"], [b"c", "d"]], (-1, 2))
    assert array.tolist() == [["ä".encode(), b"b"], [b"c", b"d"]]
    assert one("BYTES", array, (-1, 2)) is array
    assert one("BYTES", [b"nul\0"]).tolist() == [b"nul\0"]
    assert decode(encode(tensors.to_text({"t": array}, [T]), JSON), JSON) == {"t": [["ä", "b"], ["c", "d"]]}
    with pytest.raises(UnicodeDecodeError):
        tensors.to_text({"t": one("BYTES", [b"\xff"])}, [T])


def test_arrays_come_back_through_json_and_msgpack() -> None:
    arrays = to_arrays({"x": [[1, 2], [3, 4.5]], "y": [5, 6]}, XY)
    for content_type in (JSON, MSGPACK):
        back = to_arrays(decode(encode(tensors.to_text(arrays, XY), content_type), content_type), XY)
        assert all((back[name] == arrays[name]).all() for name in arrays)


def test_only_equal_shapes_have_equal_keys() -> None:
    declared = [Tensor("x", "FP32", [-1, -1])]
    narrow, wide = (to_arrays({"x": [[0] * width] * rows}, declared) for rows, width in ((1, 2), (4, 3)))
    assert shape_key(narrow, declared) != shape_key(wide, declared)
    assert shape_key(narrow, declared) == shape_key(to_arrays({"x": [[1, 2]] * 9}, declared), declared)
    assert hash(shape_key(narrow, declared))


@subcases("varying", [PAD, RAGGED])
def test_the_key_leaves_out_where_inputs_may_differ(varying: str) -> None:
    declared = [Tensor("x", "FP32", [-1, -1, 3], varying=varying)]
    assert batch_key(declared, {"x": (1, 5, 3)}) == batch_key(declared, {"x": (2, 9, 3)}) == (("x", "<f4", (-1, 3)),)


@subcases(
    ("shape", "lengths", "key"),
    [
        *[((2000, -1), (2000, length), (2000, -1)) for length in (0, 1, 1024)],
        *[((2000, -1), (2000, length), (2000, -11)) for length in (1025, 2047)],
        *[((2000, -1), (2000, length), (2000, -12)) for length in (2048, 4095)],
        ((2000, -1), (2000, 1 << 20), (2000, -21)),
        *[((-1, -1), lengths, (-1, -1)) for lengths in ((32, 32), (1, 5))],  # not to a square of the longest
        *[((-1, -1), (1, 1024), (-1, -11)), ((-1, -1), (1024, 1), (-11, -1)), ((-1, -1), (33, 63), (-6, -6))],
    ],
)
def test_long_rows_are_padded_to_less_than_twice_their_length(shape: Any, lengths: Any, key: Any) -> None:
    declared = [Tensor("x", "FP32", [-1, *shape], varying=PAD)]
    assert batch_key(declared, {"x": (1, *lengths)})[0][2] == key


def test_bf16_is_its_bits() -> None:
    declared = [Tensor("x", "BF16", [-1])]
    bits = numpy.array([0x3F80, 0xC000], numpy.uint16)
    assert to_arrays({"x": bits}, declared)["x"] is bits
    there = numpy.array([1, -2], ml_dtypes.bfloat16)
    assert to_arrays({"x": there}, declared)["x"].tolist() == bits.tolist()
    for numbers in ([1, -2], [1.0, -2.0], numpy.array([1, -2], numpy.float64), numpy.array([1, -2], numpy.int8)):
        assert to_arrays({"x": numbers}, declared)["x"].tolist() == bits.tolist()
    assert to_arrays({"x": [1.0000001]}, declared)["x"].tolist() == [0x3F80]
    for wrong, words in (["1"], "has strings, must be BF16"), ([3.4e38], r"has 3.4e\+38, out of the range of BF16"):
        with pytest.raises(InvalidRequest, match=f"tensor 'x': {words}"):
            to_arrays({"x": wrong}, declared)
    assert tensors.to_plain({"x": bits}, declared)["x"].tolist() == [1, -2]
    assert decode(encode(tensors.to_text({"x": bits}, declared), JSON), JSON) == {"x": [1, -2]}


@subcases("datatype", ["FP32", "INT64", "UINT64", "BOOL", "BF16"])
def test_texts_are_refused_before_an_array_of_them_is_made(datatype: str) -> None:
    # numpy makes each as long as the longest: 4 GB here.
    value = ["x" * 100_000, *["y"] * 10_000]
    tracemalloc.start()
    for nested in (value, [value], [1, *value], "x" * 1_000_000):
        with pytest.raises(InvalidRequest, match=f"has strings, must be {datatype}"):
            one(datatype, nested)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_arrays_and_numbers_of_numpy_in_lists() -> None:
    assert one("FP32", [numpy.float32(1.5), 2]).tolist() == [1.5, 2]
    assert one("FP32", [numpy.ones(2), (3, 4)], (-1, 2)).tolist() == [[1, 1], [3, 4]]
    assert one("BYTES", (b"a", "b")).tolist() == [b"a", b"b"]


def test_without_a_batch_the_whole_shape_is_checked_and_nothing_is_shared() -> None:
    declared = [Tensor("x", "FP32", (3, -1), batch=NONE), Tensor("s", "INT32", (), batch=NONE)]
    arrays = to_arrays({"x": [[1.0]] * 3, "s": 4}, declared)
    assert (arrays["x"].shape, arrays["s"].shape, shape_key(arrays, declared)) == ((3, 1), (), ())
    assert to_arrays({"x": [[]] * 3, "s": 4}, declared)["x"].shape == (3, 0)
    assert check_bound({"x": ("FP32", (3, 5)), "s": ("INT32", ())}, declared) == 1
    for shape in ((2, 5), (3,), (1, 3, 5)):
        with pytest.raises(InvalidRequest, match=r"tensor 'x': has shape .*, must be \[3, -1\] \(-1: any length\)"):
            check_bound({"x": ("FP32", shape), "s": ("INT32", ())}, declared)


def test_an_optional_input_may_be_left_out() -> None:
    declared = [Tensor("x", "FP32", (-1,)), Tensor("y", "FP32", (-1,), optional=True)]
    alone, both = to_arrays({"x": [1.0]}, declared), to_arrays({"x": [1.0], "y": [2.0]}, declared)
    assert (list(alone), list(both)) == (["x"], ["x", "y"])
    assert shape_key(alone, declared) != shape_key(both, declared)  # predict gets either all or none
    assert check_bound({"x": ("FP32", (2,))}, declared) == 2
    every = [tensor._replace(optional=True) for tensor in declared]
    assert (check_bound({}, every), to_arrays({}, every), rows_of({}), shape_key({}, every)) == (1, {}, 1, ())
    assert not tensors.leaves_batch_out({}, [tensor._replace(batch=OPTIONAL) for tensor in every])


def test_a_request_may_leave_an_optional_batch_out_of_all_its_tensors() -> None:
    declared = [Tensor("x", "FP32", (-1, 2), batch=OPTIONAL), Tensor("y", "FP32", (-1,), batch=OPTIONAL)]
    assert tensors.leaves_batch_out({"x": (2,), "y": ()}, declared)
    assert not tensors.leaves_batch_out({"x": (1, 2), "y": (1,)}, declared)
    assert not tensors.leaves_batch_out({"x": (2,), "y": (1,)}, declared)
    assert not tensors.leaves_batch_out({"x": (2,), "y": ()}, [tensor._replace(batch=REQUIRED) for tensor in declared])
    with pytest.raises(InvalidRequest, match=r"has shape \[3\], must be \[-1, 2\] or \[2\] \(-1: any length\)"):
        check_bound({"x": ("FP32", (3,)), "y": ("FP32", (1,))}, declared)


@given(st.lists(st.floats(width=32), max_size=5))
def test_numbers_are_rounded_to_bf16_as_others_round_them(given_numbers: list[float]) -> None:
    numbers = numpy.array(given_numbers, numpy.float32)
    bits = tensors.to_bits(numbers)
    assert bits.dtype == numpy.uint16
    theirs = numbers.astype(ml_dtypes.bfloat16).astype(numpy.float32)
    assert numpy.array_equal(tensors.to_numbers(bits), theirs, equal_nan=True)


def test_every_pattern_comes_back() -> None:
    patterns = numpy.arange(1 << 16, dtype=numpy.uint16).reshape(256, 256)
    numbers = tensors.to_numbers(patterns)
    finite = ~numpy.isnan(numbers)
    assert (tensors.to_bits(numbers)[finite] == patterns[finite]).all()
    assert numpy.isnan(tensors.to_numbers(tensors.to_bits(numbers[~finite]))).all()


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_there_and_back(elements: list[bytes]) -> None:
    array = numpy.empty(len(elements), object)
    array[:] = elements
    raw = tensors.pack_elements(array)
    assert raw == b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    assert tensors.unpack_elements(memoryview(raw), len(elements), "x").tolist() == elements
    square = numpy.array([[b"a", b"b"], [b"c", b""]], object)  # in row-major order
    assert tensors.pack_elements(square) == b"\1\0\0\0a\1\0\0\0b\1\0\0\0c\0\0\0\0"


@subcases(
    ("raw", "count", "words"),
    [
        (b"\1\0\0", 1, "tensor 'x': 3 bytes cannot hold 1 BYTES elements"),
        (b"", 1 << 60, "0 bytes cannot hold 1152921504606846976 BYTES elements"),
        (b"\1\0\0\0", 1, "tensor 'x': element 0 is truncated: 0 of 1 bytes"),
        (b"\xff\xff\xff\xff", 1, "element 0 is truncated: 0 of 4294967295 bytes"),
        (b"\2\0\0\0ab\0\0", 2, "element 1 is truncated: 2 of 4 bytes of its length"),
        (b"\0\0\0\0\0", 1, "has 1 bytes after the last of its 1 elements"),
    ],
)
def test_what_is_cut_off(raw: bytes, count: int, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tensors.unpack_elements(raw, count, "x")
    assert words in caught.value.message


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
    return tensors.read_elements("x", datatype, shape, int(numpy.prod(shape)), json.dumps(data).encode())


def test_every_datatype_has_its_case() -> None:
    assert set(VALUES) | set(tensors.BINARY_ONLY) == set(DTYPES) == set(DATATYPES)


@subcases("datatype", VALUES)
def test_elements_there_and_back(datatype: str) -> None:
    values = VALUES[datatype]
    array = read(datatype, values)
    assert array.dtype == DTYPES[datatype]
    written = tensors.write_elements("x", datatype, array)
    assert written == values
    assert list(map(type, written)) == [float if array.dtype.kind == "f" else type(values[0])] * len(values)
    nested = [[[value] for value in values]] * 2
    shape = [2, len(values), 1]
    assert read(datatype, nested, shape).tolist() == read(datatype, [*values, *values], shape).tolist()
    assert (read(datatype, []).shape, read(datatype, [[], []], [2, 0]).shape) == ((0,), (2, 0))
    assert tensors.write_elements("x", datatype, numpy.empty((0, 3), DTYPES[datatype])) == []


WHOLE, RANGE = "{} takes whole numbers", "out of the range of {}"
WRONG = [
    ("INT32", WHOLE, ["[1, 1.5]", "[1, 2.0]", "[1, true]", "[1, null]", '[1, "1"]']),
    ("BOOL", "{} takes true or false", ["[1]"]),
    ("FP32", "{} takes numbers", ['["NaN"]']),
    ("FP64", "{} takes numbers", ["[null]", "[true]"]),
    ("BYTES", "{} takes strings", ["[1]", '["' + "a" * 100 + '", 1]']),
    ("INT32", RANGE, ["[2147483648]"]),
    ("INT8", RANGE, ["[-129]"]),
    ("UINT8", RANGE, ["[-1]"]),
    ("UINT64", RANGE, ["[18446744073709551616]", "[[18446744073709551616]]"]),
    ("INT64", RANGE, ["[-9223372036854775809]"]),
    ("FP32", RANGE, ["[1e39]", "[[-1e39]]"]),
]


@subcases(
    ("datatype", "rule", "data"), [(datatype, rule, data) for datatype, rule, all_data in WRONG for data in all_data]
)
def test_an_element_that_is_wrong_is_named(datatype: str, rule: str, data: str) -> None:
    shape = [1, 1] if data.startswith("[[") else [data.count(",") + 1]
    with pytest.raises(InvalidRequest) as caught:
        tensors.read_elements("x", datatype, shape, len(shape) if data.startswith("[[") else shape[0], data.encode())
    element = data.strip("[]").rpartition(", ")[2]
    assert caught.value.message == f"tensor 'x': has the element {element}, {rule.format(datatype)}"


@subcases(
    ("data", "words"),
    [
        (b"[1, [2]]", "nested data must be lists of the lengths"),
        (b'{"a": 1}', r'data is \{"a":1\}, must be a list'),
        (b'"abc"', 'data is "abc", must be a list'),
        (b"[1" + b"0" * 100 + b"]", "out of the range of INT64"),
    ],
)
def test_data_that_is_no_list_of_elements(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^tensor 'x': .*{words}"):
        tensors.read_elements("x", "INT64", [1], 1, data)


@subcases(
    ("datatype", "shape", "data", "words"),
    [
        ("FP64", [1], b"[1e400]", r"data cannot be read \(Number out of range"),
        ("FP64", [1], b"[" + b"9" * 400 + b"]", r"has the element 99999.*, out of the range of FP64"),
        ("BYTES", [2, 1], b'["a", "\xff"]', r"data cannot be read \(.*(utf-8' codec|UTF-8 encoded)"),
        ("BYTES", [2, 1], b'[["\xdc"], ["a"]]', r"data cannot be read \(.*(utf-8' codec|UTF-8 encoded)"),
    ],
)
def test_what_cannot_be_read_at_all(datatype: str, shape: list[int], data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tensor 'x': {words}"):
        tensors.read_elements("x", datatype, shape, shape[0], data)


def test_the_largest_fp32_is_the_largest_that_does_not_round_to_infinity() -> None:
    assert numpy.isfinite(read("FP32", [3.4028235677973362e38])).all()
    with pytest.raises(InvalidRequest, match="out of the range"):
        read("FP32", [3.4028235677973366e38])


def test_what_has_no_json_form() -> None:
    for datatype in tensors.BINARY_ONLY:
        with pytest.raises(InvalidRequest, match=f"tensor 'x': {datatype} has no JSON form"):
            tensors.write_elements("x", datatype, numpy.zeros(1, DTYPES[datatype]))
    with pytest.raises(InvalidRequest, match="tensor 'x': has bytes that are not UTF-8"):
        tensors.write_elements("x", "BYTES", numpy.array([b"\xff"], object))


def test_many_elements_are_written_piece_by_piece() -> None:
    numbers = numpy.arange(50_000, dtype="float32").reshape(2, -1)
    numbers[1, 7] = numpy.nan
    texts = numpy.array([b'"%d"' % place for place in range(50_000)], object)
    for datatype, array in (("FP32", numbers), ("BYTES", texts)):
        written = tensors.write_json("x", datatype, array)
        assert isinstance(written, msgspec.Raw)
        assert bytes(written) == msgspec.json.encode(tensors.write_elements("x", datatype, array))
    assert tensors.write_json("x", "FP32", numbers[0, :3]) == [0.0, 1.0, 2.0]
    texts[49_000] = b"\xff"
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        tensors.write_json("x", "BYTES", texts)
    assert tensors.text_size(numbers) == 12 * 50_000
    assert tensors.text_size(texts[:3]) == 3 * 12 + 3 * 3


def test_count() -> None:
    shapes: list[list[int]] = [[], [3], [2, 3, 4], [0, 5]]
    assert [element_count("x", shape) for shape in shapes] == [1, 3, 24, 0]


@subcases(
    ("shape", "words"),
    [
        ([-1], "tensor 'x': has shape [-1], dimensions must be from 0 to"),
        ([2, -(2**70)], "dimensions must be"),
        ([tensors.MAX_BYTES + 1], "dimensions must be"),
        ([10**200], "dimensions must be"),
        ([tensors.MAX_BYTES], "takes more than"),
        ([2**31, 2**31], "takes more than"),
        ([0, 2**60], "takes more than"),
        ([1] * 40, "has 40 dimensions, must have at most 32"),
    ],
)
def test_what_cannot_be(shape: Sequence[int], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        element_count("x", shape)
    assert words in caught.value.message
    assert len(caught.value.message) < 300


ROUNDED: list[tuple[str, str, list[list[Any]], list[list[Any]]]] = [
    ("FP32", "int64", [[2**24, -(2**24), 2**40]], [[1, 2**24 + 1], [2**63 - 1]]),
    ("FP32", "uint64", [[2**63]], [[2**64 - 1]]),
    ("FP64", "int64", [[-(2**63)]], [[2**53 + 1]]),
    ("FP64", "int32", [[2**31 - 1, -(2**31)]], []),
    ("FP16", "int32", [[2048]], [[2049], [-70000]]),
    ("BF16", "int64", [], [[2**24 + 1]]),
    ("FP32", "float64", [[0.1]], []),  # to the nearest, as any float
]


@subcases(("datatype", "dtype", "exact", "rounded"), ROUNDED)
def test_integers_that_a_float_can_only_round_are_refused(datatype: str, dtype: str, exact: Any, rounded: Any) -> None:
    for numbers in exact:
        assert one(datatype, numpy.array(numbers, dtype)).tolist() == numpy.array(numbers, DTYPES[datatype]).tolist()
    for numbers in rounded:
        with pytest.raises(InvalidRequest, match=f"which {datatype} cannot hold exactly"):
            one(datatype, numpy.array(numbers, dtype))
