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
from weir.wire.tensors import (
    BINARY_ONLY,
    DTYPES,
    MAX_BYTES,
    batch_key,
    check_bound,
    element_count,
    leaves_batch_out,
    pack_elements,
    read_elements,
    rows_of,
    shape_key,
    text_size,
    to_arrays,
    to_bits,
    to_numbers,
    to_plain,
    to_text,
    unpack_elements,
    write_elements,
    write_json,
)
from weir.wire.values import decode, encode

T = Tensor("t", "BYTES", [-1])
XY = (Tensor("x", "FP32", [-1, 2]), Tensor("y", "INT64", [-1]))


def one(datatype: str, value: Any, shape: tuple[int, ...] = (-1,)) -> numpy.ndarray[Any, Any]:
    return to_arrays({"t": value}, [Tensor("t", datatype, shape)])["t"]


def test_every_datatype_has_a_dtype() -> None:
    assert set(DTYPES) == set(DATATYPES)


def test_lists_become_the_arrays_declared() -> None:
    arrays = to_arrays({"y": [5, 6, 7], "x": [[1, 2], [3, 4.5], [0, 0]]}, XY)
    assert list(arrays) == ["x", "y"]
    assert arrays["x"].dtype == numpy.float32
    assert arrays["x"].tolist() == [[1, 2], [3, 4.5], [0, 0]]
    assert rows_of(arrays) == 3


def test_a_fitting_array_is_taken_as_it_is() -> None:
    array = numpy.zeros((3, 2), numpy.float32)
    assert to_arrays({"x": array}, XY[:1])["x"] is array


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


def test_nesting_deeper_than_any_array() -> None:
    value: Any = 1.0
    for _ in range(500):
        value = [value]
    with pytest.raises(InvalidRequest, match="tensor 't'"):
        one("FP32", value)


@subcases(
    ("datatype", "value", "good"),
    [
        ("UINT8", [0, 255], True),
        ("UINT8", [256], False),
        ("UINT8", [-1], False),
        ("INT8", [-128, 127], True),
        ("INT8", [-129], False),
        ("UINT64", [2**64 - 1], True),
        ("UINT64", [1, 2**64 - 1], True),
        ("UINT64", [-1, 2**64 - 1], False),
        ("UINT64", [1, 2**64], False),
        ("INT64", [-(2**63), 2**63 - 1], True),
        ("INT64", [-(2**63) - 1], False),
        ("FP64", [1, 2**64 - 1], True),
        ("FP64", [10**30, 0.5], True),
        ("FP64", [10**400], False),
        ("BF16", [10**400], False),
        ("FP32", [10**39], False),
        ("INT32", [1, True], False),
        ("BOOL", [True, False], True),
        ("BOOL", [0, 1], False),
        ("FP16", [65504, -0.5], True),
        ("FP16", [70000.0], False),
        ("FP64", [1, 2], True),
        ("FP32", [math.nan, math.inf], True),
        ("BYTES", ["ä", b"\x00\xff"], True),
        ("BYTES", [1], False),
        ("BYTES", ["a", 1], False),
        ("BYTES", ["a", None], False),
        ("BYTES", [["a"], ["b", "c"]], False),
    ],
)
def test_ranges(datatype: str, value: list[Any], good: bool) -> None:
    if not good:
        with pytest.raises(InvalidRequest, match=f"tensor 't': .*{datatype}"):
            one(datatype, value)
        return
    array = one(datatype, value)
    assert array.dtype == DTYPES[datatype]


def test_bytes_are_bytes_objects_and_text_in_json() -> None:
    array = one("BYTES", [["ä", "b"], [b"c", "d"]], (-1, 2))
    assert array.tolist() == [["ä".encode(), b"b"], [b"c", b"d"]]
    assert one("BYTES", array, (-1, 2)) is array
    assert one("BYTES", [b"nul\0"]).tolist() == [b"nul\0"]
    assert decode(encode(to_text({"t": array}, [T]), JSON), JSON) == {"t": [["ä", "b"], ["c", "d"]]}
    with pytest.raises(UnicodeDecodeError):
        to_text({"t": one("BYTES", [b"\xff"])}, [T])


def test_arrays_come_back_through_json_and_msgpack() -> None:
    arrays = to_arrays({"x": [[1, 2], [3, 4.5]], "y": [5, 6]}, XY)
    for content_type in (JSON, MSGPACK):
        back = to_arrays(decode(encode(to_text(arrays, XY), content_type), content_type), XY)
        assert all((back[name] == arrays[name]).all() for name in arrays)


def test_only_equal_shapes_have_equal_keys() -> None:
    tensors = [Tensor("x", "FP32", [-1, -1])]
    narrow, wide = (to_arrays({"x": [[0] * width] * rows}, tensors) for rows, width in ((1, 2), (4, 3)))
    assert shape_key(narrow, tensors) != shape_key(wide, tensors)
    assert shape_key(narrow, tensors) == shape_key(to_arrays({"x": [[1, 2]] * 9}, tensors), tensors)
    assert hash(shape_key(narrow, tensors))


@pytest.mark.parametrize("varying", [PAD, RAGGED])
def test_the_key_leaves_out_where_inputs_may_differ(varying: str) -> None:
    tensors = [Tensor("x", "FP32", [-1, -1, 3], varying=varying)]
    assert batch_key(tensors, {"x": (1, 5, 3)}) == batch_key(tensors, {"x": (2, 9, 3)}) == (("x", "<f4", (-1, 3)),)


def test_long_rows_are_padded_to_less_than_twice_their_length() -> None:
    tensors = [Tensor("x", "FP32", [-1, 2000, -1], varying=PAD)]
    keys = [
        batch_key(tensors, {"x": (1, 2000, length)})[0][2] for length in (0, 1, 1024, 1025, 2047, 2048, 4095, 1 << 20)
    ]
    free, short, long = (2000, -1), (2000, -11), (2000, -12)
    assert keys == [free, free, free, short, short, long, long, (2000, -21)]


def test_rows_long_in_different_directions_are_not_padded_to_a_square() -> None:
    tensors = [Tensor("x", "FP32", [-1, -1, -1], varying=PAD)]
    keys = [
        batch_key(tensors, {"x": (1, *lengths)})[0][2] for lengths in ((32, 32), (1, 5), (1, 1024), (1024, 1), (33, 63))
    ]
    assert keys == [(-1, -1), (-1, -1), (-1, -11), (-11, -1), (-6, -6)]


def test_bf16_is_its_bits() -> None:
    import ml_dtypes

    tensors = [Tensor("x", "BF16", [-1])]
    bits = numpy.array([0x3F80, 0xC000], numpy.uint16)
    assert to_arrays({"x": bits}, tensors)["x"] is bits
    there = numpy.array([1, -2], ml_dtypes.bfloat16)
    assert to_arrays({"x": there}, tensors)["x"].tolist() == bits.tolist()
    for numbers in ([1, -2], [1.0, -2.0], numpy.array([1, -2], numpy.float64), numpy.array([1, -2], numpy.int8)):
        assert to_arrays({"x": numbers}, tensors)["x"].tolist() == bits.tolist()
    assert to_arrays({"x": [1.0000001]}, tensors)["x"].tolist() == [0x3F80]
    for wrong, words in (["1"], "has strings, must be BF16"), ([3.4e38], r"has 3.4e\+38, out of the range of BF16"):
        with pytest.raises(InvalidRequest, match=f"tensor 'x': {words}"):
            to_arrays({"x": wrong}, tensors)
    assert to_plain({"x": bits}, tensors)["x"].tolist() == [1, -2]
    assert decode(encode(to_text({"x": bits}, tensors), JSON), JSON) == {"x": [1, -2]}


def test_the_elements_of_integers_are_exact() -> None:
    assert one("UINT64", [[1], [2**64 - 1]], (-1, 1)).tolist() == [[1], [2**64 - 1]]
    assert one("INT64", [1, 2**53 + 1]).tolist() == [1, 2**53 + 1]


@subcases("datatype", ["FP32", "INT64", "UINT64", "BOOL", "BF16"])
def test_texts_are_refused_before_an_array_of_them_is_made(datatype: str) -> None:
    # numpy makes each as long as the longest: 4 GB here.
    value = ["x" * 100_000, *["y"] * 10_000]
    tracemalloc.start()
    try:
        for nested in (value, [value], [1, *value], "x" * 1_000_000):
            with pytest.raises(InvalidRequest, match=f"has strings, must be {datatype}"):
                one(datatype, nested)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_arrays_and_numbers_of_numpy_in_lists() -> None:
    assert one("FP32", [numpy.float32(1.5), 2]).tolist() == [1.5, 2]
    assert one("FP32", [numpy.ones(2), (3, 4)], (-1, 2)).tolist() == [[1, 1], [3, 4]]
    assert one("BYTES", (b"a", "b")).tolist() == [b"a", b"b"]


def test_without_a_batch_the_whole_shape_is_checked_and_nothing_is_shared() -> None:
    tensors = [Tensor("x", "FP32", (3, -1), batch=NONE), Tensor("s", "INT32", (), batch=NONE)]
    arrays = to_arrays({"x": [[1.0]] * 3, "s": 4}, tensors)
    assert (arrays["x"].shape, arrays["s"].shape, shape_key(arrays, tensors)) == ((3, 1), (), ())
    assert to_arrays({"x": [[]] * 3, "s": 4}, tensors)["x"].shape == (3, 0)
    assert check_bound({"x": ("FP32", (3, 5)), "s": ("INT32", ())}, tensors) == 1
    for shape in ((2, 5), (3,), (1, 3, 5)):
        with pytest.raises(InvalidRequest, match=r"tensor 'x': has shape .*, must be \[3, -1\] \(-1: any length\)"):
            check_bound({"x": ("FP32", shape), "s": ("INT32", ())}, tensors)


def test_an_optional_input_may_be_left_out() -> None:
    tensors = [Tensor("x", "FP32", (-1,)), Tensor("y", "FP32", (-1,), optional=True)]
    alone, both = to_arrays({"x": [1.0]}, tensors), to_arrays({"x": [1.0], "y": [2.0]}, tensors)
    assert (list(alone), list(both)) == (["x"], ["x", "y"])
    assert shape_key(alone, tensors) != shape_key(both, tensors)  # predict gets either all or none
    assert check_bound({"x": ("FP32", (2,))}, tensors) == 2
    every = [tensor._replace(optional=True) for tensor in tensors]
    assert (check_bound({}, every), to_arrays({}, every), rows_of({}), shape_key({}, every)) == (1, {}, 1, ())
    assert not leaves_batch_out({}, [tensor._replace(batch=OPTIONAL) for tensor in every])


def test_a_request_may_leave_an_optional_batch_out_of_all_its_tensors() -> None:
    tensors = [Tensor("x", "FP32", (-1, 2), batch=OPTIONAL), Tensor("y", "FP32", (-1,), batch=OPTIONAL)]
    assert leaves_batch_out({"x": (2,), "y": ()}, tensors)
    assert not leaves_batch_out({"x": (1, 2), "y": (1,)}, tensors)
    assert not leaves_batch_out({"x": (2,), "y": (1,)}, tensors)
    assert not leaves_batch_out({"x": (2,), "y": ()}, [tensor._replace(batch=REQUIRED) for tensor in tensors])
    with pytest.raises(InvalidRequest, match=r"has shape \[3\], must be \[-1, 2\] or \[2\] \(-1: any length\)"):
        check_bound({"x": ("FP32", (3,)), "y": ("FP32", (1,))}, tensors)


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


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_there_and_back(elements: list[bytes]) -> None:
    array = numpy.empty(len(elements), object)
    array[:] = elements
    raw = pack_elements(array)
    assert len(raw) == sum(4 + len(element) for element in elements)
    assert unpack_elements(memoryview(raw), len(elements), "x").tolist() == elements


def test_elements_are_in_row_major_order() -> None:
    assert pack_elements(numpy.array([[b"a", b"b"], [b"c", b""]], object)) == b"".join(
        [b"\1\0\0\0a", b"\1\0\0\0b", b"\1\0\0\0c", b"\0\0\0\0"]
    )


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
        unpack_elements(raw, count, "x")
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
    return read_elements("x", datatype, shape, int(numpy.prod(shape)), json.dumps(data).encode())


def test_every_datatype_has_its_case() -> None:
    assert set(VALUES) == set(DTYPES) - set(BINARY_ONLY)


@subcases("datatype", VALUES)
def test_elements_there_and_back(datatype: str) -> None:
    values = VALUES[datatype]
    array = read(datatype, values)
    assert array.dtype == DTYPES[datatype]
    written = write_elements("x", datatype, array)
    assert written == values
    assert list(map(type, written)) == [float if array.dtype.kind == "f" else type(values[0])] * len(values)


@subcases("datatype", VALUES)
def test_nested_is_the_same_as_flat(datatype: str) -> None:
    values = VALUES[datatype]
    nested = [[[value] for value in values], [[value] for value in values]]
    shape = [2, len(values), 1]
    assert read(datatype, nested, shape).tolist() == read(datatype, [*values, *values], shape).tolist()


@subcases("datatype", VALUES)
def test_no_elements(datatype: str) -> None:
    assert read(datatype, []).shape == (0,)
    assert read(datatype, [[], []], [2, 0]).shape == (2, 0)
    assert write_elements("x", datatype, numpy.empty((0, 3), DTYPES[datatype])) == []


@subcases(
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
    with pytest.raises(InvalidRequest, match="tensor 'x': has bytes that are not UTF-8"):
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
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        write_json("x", "BYTES", texts)
    assert text_size(numbers) == 12 * 50_000
    assert text_size(texts[:3]) == 3 * 12 + 3 * 3


@subcases(("shape", "count"), [([], 1), ([3], 3), ([2, 3, 4], 24), ([0, 5], 0)])
def test_count(shape: Sequence[int], count: int) -> None:
    assert element_count("x", shape, 8) == count


@subcases(
    ("shape", "words"),
    [
        ([-1], "tensor 'x': has shape [-1], dimensions must be from 0 to"),
        ([2, -(2**70)], "dimensions must be"),
        ([MAX_BYTES + 1], "dimensions must be"),
        ([10**200], "dimensions must be"),
        ([MAX_BYTES], "takes more than"),
        ([2**31, 2**31], "takes more than"),
        ([0, 2**62], "takes more than"),
        ([1] * 40, "has 40 dimensions, must have at most 32"),
    ],
)
def test_what_cannot_be(shape: Sequence[int], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        element_count("x", shape, 8)
    assert words in caught.value.message
    assert len(caught.value.message) < 300


@subcases(
    ("datatype", "numbers", "fits"),
    [
        ("FP32", numpy.array([2**24, -(2**24), 2**40], "int64"), True),
        ("FP32", numpy.array([1, 2**24 + 1], "int64"), False),
        ("FP32", numpy.array([2**63 - 1], "int64"), False),
        ("FP32", numpy.array([2**64 - 1], "uint64"), False),
        ("FP32", numpy.array([2**63], "uint64"), True),
        ("FP64", numpy.array([2**53 + 1], "int64"), False),
        ("FP64", numpy.array([-(2**63)], "int64"), True),
        ("FP64", numpy.array([2**31 - 1, -(2**31)], "int32"), True),
        ("FP16", numpy.array([2049], "int16"), False),
        ("FP16", numpy.array([-70000], "int32"), False),
        ("BF16", numpy.array([2**24 + 1], "int64"), False),
        ("FP32", numpy.array([0.1], "float64"), True),  # to the nearest, as any float
    ],
)
def test_integers_that_a_float_can_only_round_are_refused(datatype: str, numbers: Any, fits: bool) -> None:
    declared = [Tensor("x", datatype, [-1])]
    if fits:
        exact = [float(numpy.float32(number) if number == 0.1 else number) for number in numbers]
        assert to_arrays({"x": numbers}, declared)["x"].tolist() == exact
    else:
        with pytest.raises(InvalidRequest, match=f"which {datatype} cannot hold exactly"):
            to_arrays({"x": numbers}, declared)
