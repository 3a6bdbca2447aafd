import math
import tracemalloc
from typing import Any

import numpy
import pytest

from weir.errors import InvalidRequest, ModelError
from weir.messages import JSON, MSGPACK
from weir.model import DATATYPES, NONE, OPTIONAL, PAD, RAGGED, REQUIRED, Tensor
from weir.wire.tensors import (
    DTYPES,
    batch_key,
    check_bound,
    leaves_batch_out,
    rows_of,
    shape_key,
    to_arrays,
    to_plain,
    to_text,
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "UINT64", "BOOL", "BF16"])
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
    with pytest.raises(InvalidRequest, match="there are none, must be at least one of 'x', 'y'"):
        check_bound({}, every)
    with pytest.raises(InvalidRequest, match="there are none, must be at least one of 'x', 'y'"):
        to_arrays({}, every)


def test_a_request_may_leave_an_optional_batch_out_of_all_its_tensors() -> None:
    tensors = [Tensor("x", "FP32", (-1, 2), batch=OPTIONAL), Tensor("y", "FP32", (-1,), batch=OPTIONAL)]
    assert leaves_batch_out({"x": (2,), "y": ()}, tensors)
    assert not leaves_batch_out({"x": (1, 2), "y": (1,)}, tensors)
    assert not leaves_batch_out({"x": (2,), "y": (1,)}, tensors)
    assert not leaves_batch_out({"x": (2,), "y": ()}, [tensor._replace(batch=REQUIRED) for tensor in tensors])
    with pytest.raises(InvalidRequest, match=r"has shape \[3\], must be \[-1, 2\] or \[2\] \(-1: any length\)"):
        check_bound({"x": ("FP32", (3,)), "y": ("FP32", (1,))}, tensors)
