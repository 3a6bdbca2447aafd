"""Tensors as numpy arrays: checks datatypes and shapes against those that a model declares, and converts from and to nested lists and bytes.

Arrays as packed bytes (`pack`, `Unpacker`) have a head that says what they are, and their elements. Who only passes them on reads neither. A front packs
the arrays of a request, and the worker those of its response; the dispatcher between them knows only how many rows there are. Arrays that follow one another
have the same head for the same names, datatypes and shapes, so each reader checks and reads a head once.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any, TypeVar

import msgspec
import numpy

from weir.errors import InvalidRequest, WeirError, brief, kind_of
from weir.model import DATATYPES, GROUP, NONE, OPTIONAL, RAGGED, Tensor
from weir.wire.values import UNREADABLE, decode_json, has_slow_floats, uncollected

Array = numpy.ndarray[Any, Any]

_HALF, _EVEN = numpy.uint32(0x7FFF), numpy.uint32(1)
_QUIET_NAN = numpy.uint16(0x7FC0)


def to_bits(numbers: Array) -> Array:
    """Return the BF16 bits of FP32 `numbers`, rounded to nearest, ties to even."""
    wide = numpy.ascontiguousarray(numbers, numpy.float32).view(numpy.uint32)
    rounded = wide + _HALF + (wide >> 16 & _EVEN)
    return numpy.where(numpy.isnan(numbers), _QUIET_NAN, (rounded >> 16).astype(numpy.uint16))


def to_numbers(bits: Array) -> Array:
    """Return the numbers with these BF16 `bits`, as FP32, which is exact."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


MAX_DIMENSIONS = 32  # the limit of numpy 1
MAX_BYTES = (1 << 63) - 1
ELEMENT_BYTES = 8  # of the largest number, and of a reference to a text


def element_count(name: str, shape: Sequence[int]) -> int:
    """Return how many elements a tensor of this shape has.

    Raises InvalidRequest naming the tensor for too many dimensions, a negative dimension, and a product of the other dimensions that exceeds MAX_BYTES, even
    if one dimension is 0: numpy makes no such array, and a text takes as much in it as the largest number.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"tensor {name!r}: has {len(shape)} dimensions, must have at most {MAX_DIMENSIONS}")
    for length in shape:
        if not 0 <= length <= MAX_BYTES:
            raise InvalidRequest(
                f"tensor {name!r}: has shape {_short(shape)}, dimensions must be from 0 to {MAX_BYTES}"
            )
    if math.prod([length or 1 for length in shape]) * ELEMENT_BYTES > MAX_BYTES:
        raise InvalidRequest(f"tensor {name!r}: shape {_short(shape)} takes more than {MAX_BYTES} bytes")
    return math.prod(shape)


def _short(shape: Sequence[int]) -> str:
    text = str(list(shape))
    return text if len(text) <= 100 else f"{text[:100]}..."


Arrays = dict[str, numpy.ndarray[Any, Any]]
Complain = Callable[[str], WeirError]
T = TypeVar("T")

DTYPES: dict[str, numpy.dtype[Any]] = {datatype: numpy.dtype(name) for datatype, name in DATATYPES.items()}
# Rows with up to this many padded elements share batches whatever their lengths are. With n variable lengths, each may go up to the n-th root.
# Longer rows share batches only with lengths between the same two powers of two.
FREELY_PADDED = 1024
# By kind of a dtype (numpy's letters): the kinds of arrays that may be converted to it.
_SOURCES = {"b": "b", "u": "ui", "i": "ui", "f": "fui"}
# By kind of a dtype: the types of list elements that may be converted to it. And the words for elements of another type.
_ELEMENTS: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str, bytes}}
_WORDS: dict[type, str] = {
    str: "strings",
    bytes: "strings",
    bool: "elements of bool",
    float: "elements of float64",
    int: "elements of int64",
}


def check_datatype(name: str, datatype: str) -> None:
    """Raise InvalidRequest, naming the tensor, for an unknown datatype."""
    if datatype not in DTYPES:
        raise InvalidRequest(f"tensor {name!r}: has datatype {datatype!r}, not one of {', '.join(DTYPES)}")


def to_arrays(value: Any, declared: Sequence[Tensor], complain: Complain = InvalidRequest) -> Arrays:
    """Return `value` (a dict of nested lists or arrays) as arrays of the `declared` tensors, in that order.

    Names, datatypes and shapes must be as declared. If the first dimension is the batch, it must be equal in all arrays and at least 1. Otherwise raises what
    `complain` makes of a text that names tensor, value and rule.
    """
    arrays = read_arrays(value, declared, complain)
    if arrays and declared[0].batch != NONE:
        _check_rows(arrays, complain)
    return arrays


def read_arrays(value: Any, declared: Sequence[Tensor], complain: Complain) -> Arrays:
    """Do what `to_arrays` does, but do not check the first dimension."""
    if not isinstance(value, dict):
        raise complain(f"tensors: {kind_of(value)}, must be an object with {_names(declared)}")
    arrays: Arrays = {}
    for tensor, given in _matched(value, declared, complain):
        array = given
        if type(given) is not numpy.ndarray or given.dtype != DTYPES[tensor.datatype] or given.dtype.hasobject:
            array = _array(given, tensor, complain)
        _check_shape(array.shape, tensor, complain)
        arrays[tensor.name] = array
    return arrays


def _matched(found: Mapping[str, T], declared: Sequence[Tensor], complain: Complain) -> list[tuple[Tensor, T]]:
    """Return each of the `declared` tensors that was found, and what was. Raises for an unknown name, and for one that is missing."""
    pairs = [(tensor, found[tensor.name]) for tensor in declared if tensor.name in found]
    if len(pairs) < len(found):
        known = {tensor.name for tensor in declared}
        unknown = next(name for name in found if name not in known)
        raise complain(f"tensor {brief(unknown)}: not one of {_names(declared)}")
    if len(pairs) < len(declared):
        for tensor in declared:
            if tensor.name not in found and not tensor.optional:
                raise complain(f"tensor {tensor.name!r}: is missing, the model declares {_names(declared)}")
    return pairs


def check_bound(found: Mapping[str, tuple[str, Sequence[int]]], declared: Sequence[Tensor]) -> int:
    """Check the datatypes and shapes `found`, by name, against the `declared` tensors. Return the number of rows; 1 if there is no batch dimension
    or no tensor.

    Names, datatypes and shapes must be as declared. If the first dimension is the batch, it must be equal in all tensors and at least 1. Otherwise raises
    InvalidRequest naming tensor, value and rule.
    """
    rows = 0
    for tensor, (datatype, shape) in _matched(found, declared, InvalidRequest):
        if datatype != tensor.datatype:
            raise InvalidRequest(f"tensor {tensor.name!r}: has datatype {datatype!r}, must be {tensor.datatype}")
        _check_shape(shape, tensor, InvalidRequest)
        if tensor.batch == NONE:
            rows = 1
            continue
        if not shape[0]:
            raise InvalidRequest(f"tensor {tensor.name!r}: has 0 rows, must have at least 1")
        if shape[0] != (rows or shape[0]):
            first = declared[0].name
            raise InvalidRequest(
                f"tensor {tensor.name!r}: has {shape[0]} rows, tensor {first!r} has {rows}; they must be equal"
            )
        rows = shape[0]
    return rows or 1


def leaves_batch_out(shapes: Mapping[str, Sequence[int]], declared: Sequence[Tensor]) -> bool:
    """Return whether tensors with these `shapes`, by name, have no batch dimension, and the `declared` tensors allow that."""
    if declared[0].batch != OPTIONAL or not shapes:
        return False
    return all(len(shapes[tensor.name]) + 1 == len(tensor.shape) for tensor in declared if tensor.name in shapes)


def rows_of(arrays: Arrays) -> int:
    """Return the number of rows: the length of the first dimension; 1 if all inputs are optional and there are none."""
    for array in arrays.values():
        return len(array)
    return 1


def shape_key(arrays: Arrays, declared: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the batch key of a request with these `arrays`, which have been checked against `declared`."""
    return batch_key(declared, {name: array.shape for name, array in arrays.items()})


def batch_key(declared: Sequence[Tensor], shapes: Mapping[str, Sequence[int]]) -> tuple[Any, ...]:
    """Return the batch key of a request whose tensors have these `shapes`, by name (rows first).

    Requests to one model share a batch if their keys are equal. A key has names, dtypes and all dimensions except the first one. A variable dimension of a
    padded or ragged input is -1 in it; a great length of a padded input is its magnitude instead, so that one very long row does not pad many short ones.
    Without a batch dimension nothing is shared, and the key is empty.
    """
    if declared[0].batch == NONE:
        return ()
    return tuple(
        [
            (tensor.name, DTYPES[tensor.datatype].str, _lengths_in_key(tensor, shapes[tensor.name]))
            for tensor in declared
            if tensor.name in shapes
        ]
    )


def _lengths_in_key(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    if tensor.varying == GROUP:
        return tuple(shape[1:])
    if tensor.varying == RAGGED:
        return tuple(tensor.shape[1:])
    free = round(FREELY_PADDED ** (1 / len(tensor.variable)))
    return tuple(
        -length.bit_length() if rule == -1 and length > free else rule
        for rule, length in zip(tensor.shape[1:], shape[1:], strict=True)
    )


def to_plain(arrays: Arrays, declared: Sequence[Tensor]) -> Arrays:
    """Return `arrays`, which have been checked against `declared`, with the bits of BF16 converted to numbers."""
    bits = [tensor.name for tensor in declared if tensor.datatype == "BF16" and tensor.name in arrays]
    return {**arrays, **{name: to_numbers(arrays[name]) for name in bits}} if bits else arrays


def to_text(arrays: Arrays, declared: Sequence[Tensor]) -> dict[str, Any]:
    """Return what `to_plain` returns, with elements of BYTES as strings for JSON. Raises UnicodeDecodeError for one that is not UTF-8."""
    plain = to_plain(arrays, declared)
    return {name: _texts(array.tolist()) if array.dtype.kind == "O" else array for name, array in plain.items()}


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_texts, value))
    return value.decode() if isinstance(value, bytes) else value


def _names(declared: Sequence[Tensor]) -> str:
    return ", ".join(repr(tensor.name) for tensor in declared)


def _array(value: Any, tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any]:
    listed = _listed(value, tensor, complain) if isinstance(value, (list, str, bytes)) else None
    return _converted(value, tensor, complain) if listed is None else listed


def _listed(value: Any, tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any] | None:
    """Return nested lists of plain elements as an array; None if they contain other elements, which numpy may be able to convert.

    Types are checked before numpy makes an array. numpy would allocate the longest text's length for each text, and would convert integers to floats if one
    of them needs 64 bits without a sign.
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while (types := set(map(type, level))) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1 or len(shape) == MAX_DIMENSIONS:
            raise _uneven(tensor, complain)
        shape.append(lengths.pop())
        level = list(chain.from_iterable(level))
    wanted = _ELEMENTS["f" if tensor.datatype == "BF16" else DTYPES[tensor.datatype].kind]
    wrong = next((kind for kind in _WORDS if kind in types and kind not in wanted), None)
    if list in types and types <= {list, dict, type(None), *_WORDS}:
        raise _uneven(tensor, complain)
    if wrong in (str, bytes) or (wrong is not None and types <= _WORDS.keys()):
        raise complain(f"tensor {tensor.name!r}: has {_WORDS[wrong]}, must be {tensor.datatype}")
    return _of_elements(level, types, tensor, complain).reshape(shape) if types <= wanted else None


def _uneven(tensor: Tensor, complain: Complain) -> WeirError:
    rule = f"must be nested lists of equal lengths ({tensor.datatype}, at most {MAX_DIMENSIONS} deep)"
    return complain(f"tensor {tensor.name!r}: {rule}")


def _of_elements(elements: list[Any], types: set[type], tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any]:
    """Return `elements` as an array of one dimension. The tensor's datatype accepts their `types`."""
    dtype = DTYPES[tensor.datatype]
    if dtype.kind == "O":
        array = numpy.empty(len(elements), object)
        array[:] = elements if str not in types else [_as_bytes(each) for each in elements]
        return array
    floats = dtype.kind == "f" or tensor.datatype == "BF16"
    if elements and not floats and dtype.kind in "ui":
        for extreme in (min(elements), max(elements)):
            _check_range(extreme, dtype, tensor, complain)
    if not floats:
        return numpy.array(elements, dtype)
    try:
        numbers = numpy.array(elements, numpy.float64)
        return _cast(numbers, dtype, tensor, complain) if dtype.kind == "f" else _bf16_array(numbers, tensor, complain)
    except OverflowError:
        raise complain(
            f"tensor {tensor.name!r}: has an integer that is out of the range of {tensor.datatype}"
        ) from None


def _as_bytes(element: str | bytes) -> bytes:
    return element.encode() if isinstance(element, str) else element


def _check_range(value: int, dtype: numpy.dtype[Any], tensor: Tensor, complain: Complain) -> None:
    bounds = numpy.iinfo(dtype)
    if not -(1 << 63) <= value < 1 << 64:
        raise complain(f"tensor {tensor.name!r}: has integers of more than 64 bits, must be {tensor.datatype}")
    if not bounds.min <= value <= bounds.max:
        raise complain(f"tensor {tensor.name!r}: has {value}, out of the range of {tensor.datatype}")


def _converted(value: Any, tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any]:
    dtype = DTYPES[tensor.datatype]
    try:
        array = numpy.asarray(value, dtype=object if dtype.kind == "O" else None)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise complain(f"tensor {tensor.name!r}: must be nested lists of equal lengths ({error})") from None
    if dtype.kind == "O":
        return _bytes_array(array, tensor, complain)
    if array.dtype == dtype:
        return array
    if tensor.datatype == "BF16":
        if array.dtype.name == "bfloat16":  # the dtype of the package ml_dtypes, which jax and others use
            return array.view(dtype)
        return _bf16_array(array, tensor, complain)
    if not array.size and array.dtype == numpy.float64:
        return array.astype(dtype)  # an empty list has no elements of a wrong type
    if array.dtype.kind not in _SOURCES[dtype.kind]:
        raise complain(f"tensor {tensor.name!r}: has {_described(array)}, must be {tensor.datatype}")
    return _cast(array, dtype, tensor, complain)


def _bf16_array(array: numpy.ndarray[Any, Any], tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any]:
    if array.dtype.kind not in _SOURCES["f"]:
        raise complain(f"tensor {tensor.name!r}: has {_described(array)}, must be BF16")
    bits = to_bits(_cast(array, numpy.dtype(numpy.float32), tensor, complain))
    lost = numpy.isinf(to_numbers(bits)) & numpy.isfinite(array)
    if lost.any():
        raise complain(f"tensor {tensor.name!r}: has {array[lost][0]}, out of the range of BF16")
    return bits


def _described(array: numpy.ndarray[Any, Any]) -> str:
    if array.dtype.kind in "US":
        return "strings"
    if array.dtype.kind == "O":
        odd = [type(value).__name__ for value in array.flat if not isinstance(value, (int, float))]
        return f"{odd[0]} elements" if odd else "integers of more than 64 bits"
    return f"elements of {array.dtype}"


def _cast(
    array: numpy.ndarray[Any, Any], dtype: numpy.dtype[Any], tensor: Tensor, complain: Complain
) -> numpy.ndarray[Any, Any]:
    if dtype.kind == "f" and array.dtype.kind in "ui":
        return _as_floats(array, dtype, tensor, complain)
    if numpy.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    if dtype.kind in "ui" and array.size:
        for extreme in (int(array.min()), int(array.max())):
            _check_range(extreme, dtype, tensor, complain)
    with numpy.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":
        lost = numpy.isinf(cast) & numpy.isfinite(array)
        if lost.any():
            raise complain(f"tensor {tensor.name!r}: has {array[lost][0]}, out of the range of {tensor.datatype}")
    return cast


def _as_floats(
    integers: numpy.ndarray[Any, Any], dtype: numpy.dtype[Any], tensor: Tensor, complain: Complain
) -> numpy.ndarray[Any, Any]:
    with numpy.errstate(over="ignore"):
        cast = integers.astype(dtype)
    wide = cast.astype(numpy.float64, copy=False)
    above = 2.0 ** numpy.iinfo(integers.dtype).max.bit_length()  # a float that was rounded up to it cannot be cast back
    lost = ~numpy.isfinite(wide) | (wide >= above)
    lost |= numpy.where(lost, 0, wide).astype(integers.dtype) != integers
    if lost.any():
        raise complain(f"tensor {tensor.name!r}: has {integers[lost][0]}, which {tensor.datatype} cannot hold exactly")
    return cast


def _bytes_array(array: numpy.ndarray[Any, Any], tensor: Tensor, complain: Complain) -> numpy.ndarray[Any, Any]:
    if all(type(value) is bytes for value in array.flat):
        return array
    elements = numpy.empty(array.shape, object)
    for index, value in enumerate(array.flat):
        if not isinstance(value, (str, bytes)):
            kind = type(value).__name__
            raise complain(f"tensor {tensor.name!r}: has an element of type {kind}, must be {tensor.datatype}")
        elements.flat[index] = value.encode() if isinstance(value, str) else bytes(value)
    return elements


def _check_shape(shape: Sequence[int], tensor: Tensor, complain: Complain) -> None:
    """Raise what `complain` makes unless `shape` is as declared. The first dimension may have any length if it is the batch."""
    rules = tensor.shape
    first = 0 if tensor.batch == NONE else 1
    if len(shape) == len(rules):
        for index in range(first, len(rules)):
            if rules[index] not in (-1, shape[index]):
                break
        else:
            return
    rules = (-1,) * first + tuple(rules[first:])
    without = f" or {list(rules[1:])}" if tensor.batch == OPTIONAL else ""
    raise complain(f"tensor {tensor.name!r}: has shape {list(shape)}, must be {list(rules)}{without} (-1: any length)")


def _check_rows(arrays: Arrays, complain: Complain) -> None:
    (first, array), *others = arrays.items()
    if not len(array):
        raise complain(f"tensor {first!r}: has 0 rows, must have at least 1")
    for name, other in others:
        if len(other) != len(array):
            raise complain(
                f"tensor {name!r}: has {len(other)} rows, tensor {first!r} has {len(array)}; they must be equal"
            )


# The least number that rounds to infinity. The magnitude of a number must be less.
_TOO_LARGE = {"FP32": 3.4028235677973366e38}
BINARY_ONLY = ("FP16", "BF16")


def _element_type(datatype: str) -> Any:
    dtype = DTYPES[datatype]
    if dtype.kind in "ui":
        bounds = numpy.iinfo(dtype)
        return Annotated[int, msgspec.Meta(ge=max(int(bounds.min), -(1 << 63)), le=min(int(bounds.max), (1 << 63) - 1))]
    if datatype in _TOO_LARGE:
        return Annotated[float, msgspec.Meta(gt=-_TOO_LARGE[datatype], lt=_TOO_LARGE[datatype])]
    return {"b": bool, "f": float, "O": str}[dtype.kind]


# msgspec's bounds are signed 64-bit integers, so numpy checks the upper bound of UINT64.
ELEMENT_TYPES: dict[str, Any] = {
    datatype: Annotated[int, msgspec.Meta(ge=0)] if datatype == "UINT64" else _element_type(datatype)
    for datatype in DTYPES
    if datatype not in BINARY_ONLY
}
_FLAT: dict[str, msgspec.json.Decoder[Any]] = {
    datatype: msgspec.json.Decoder(GenericAlias(list, (kind,))) for datatype, kind in ELEMENT_TYPES.items()
}


def read_elements(name: str, datatype: str, shape: Sequence[int], count: int, data: Any) -> numpy.ndarray[Any, Any]:
    """Return the array in the JSON text `data` (a msgspec.Raw or bytes): a flat list of `count` elements, or lists nested as in `shape`.

    Raises InvalidRequest naming tensor, value and rule.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no JSON form, it must be sent as binary data")
    try:
        is_slow = DTYPES[datatype].kind == "f" and has_slow_floats(memoryview(data))
        flat = None if is_slow else _FLAT[datatype].decode(data)
    except UNREADABLE:  # nested, or wrong
        flat = None
    if flat is None:
        flat = _flattened(name, shape, _decoded(name, data))
        _check_elements(name, datatype, flat)
    if len(flat) != count:
        raise InvalidRequest(f"tensor {name!r}: has {len(flat)} elements, its shape {list(shape)} takes {count}")
    return array_of(name, datatype, flat).reshape(shape)


def _decoded(name: str, data: Any) -> Any:
    try:
        with uncollected(len(bytes(data))):
            return decode_json(memoryview(data))
    except UNREADABLE as error:  # nested too deeply, or a number beyond the range of floats
        raise InvalidRequest(f"tensor {name!r}: data cannot be read ({error})") from None


def array_of(name: str, datatype: str, flat: list[Any]) -> numpy.ndarray[Any, Any]:
    """Return the elements `flat` as an array of one dimension. Their types have been checked."""
    if datatype == "BYTES":
        array = numpy.empty(len(flat), object)
        array[:] = _encoded(name, flat)
        return array
    try:
        return numpy.array(flat, DTYPES[datatype])
    except OverflowError:
        raise _out_of_range(name, datatype, max(flat)) from None


def _encoded(name: str, texts: list[str]) -> list[bytes]:
    try:
        return list(map(str.encode, texts))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"tensor {name!r}: has a string that is not valid Unicode ({error})") from None


# The usual number of bytes of a number as text; few numbers take more.
TEXT_BYTES = 12

# Elements of a tensor that are written at a time. That takes a few milliseconds; other threads may run in between.
_PIECE = 20_000


def text_size(array: numpy.ndarray[Any, Any]) -> int:
    """Return about how many bytes the elements of a tensor take in JSON."""
    size = TEXT_BYTES * array.size
    if array.dtype.kind == "O" and array.size <= 2 * _PIECE:  # with more texts, their number is precise enough
        size += sum(map(len, array.ravel().tolist()))
    return size


def write_json(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> list[Any] | msgspec.Raw:
    """Return the elements of a tensor for JSON, flat. Many elements are already encoded, piece by piece. Raises what `write_elements` raises."""
    if array.size <= _PIECE:
        return write_elements(name, datatype, array)
    flat = array.ravel()
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return msgspec.Raw(b"[%b]" % b",".join([_encode(write_elements(name, datatype, piece))[1:-1] for piece in pieces]))


_encode = msgspec.json.Encoder().encode


def write_elements(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> list[Any]:
    """Return the elements for JSON, flat. Raises InvalidRequest if they have no JSON form, so that the caller must request binary data."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no JSON form, it must be requested as binary data")
    flat: list[Any] = array.ravel().tolist()
    if datatype != "BYTES":
        return flat
    try:
        return list(map(bytes.decode, flat))
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"tensor {name!r}: has bytes that are not UTF-8 ({error.reason}), it must be requested as binary data"
        ) from None


def _flattened(name: str, shape: Sequence[int], data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidRequest(f"tensor {name!r}: data is {_described_element(data)}, must be a list")
    if not any(map(list.__instancecheck__, data)):
        return data
    level: list[Any] = [data]
    for length in shape:
        if set(map(type, level)) - {list} or set(map(len, level)) - {length}:
            raise InvalidRequest(
                f"tensor {name!r}: nested data must be lists of the lengths in its shape {list(shape)}"
            )
        level = list(chain.from_iterable(level))
    return level


_KINDS: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "f": ({int, float}, "numbers"),
    "O": ({str}, "strings"),
}


def _check_elements(name: str, datatype: str, flat: list[Any]) -> None:
    dtype = DTYPES[datatype]
    allowed, words = _KINDS[dtype.kind]
    if set(map(type, flat)) - allowed:
        wrong = next(element for element in flat if type(element) not in allowed)
        raise InvalidRequest(f"tensor {name!r}: has the element {_described_element(wrong)}, {datatype} takes {words}")
    if not flat:
        return
    if dtype.kind in "ui":
        bounds = numpy.iinfo(dtype)
        for extreme in (min(flat), max(flat)):
            if not bounds.min <= extreme <= bounds.max:
                raise _out_of_range(name, datatype, extreme)
    elif dtype.kind == "f":
        for extreme in (min(flat), max(flat)):
            if not abs(extreme) < _TOO_LARGE.get(datatype, float("inf")):
                raise _out_of_range(name, datatype, extreme)


def _out_of_range(name: str, datatype: str, value: Any) -> InvalidRequest:
    return InvalidRequest(
        f"tensor {name!r}: has the element {_described_element(value)}, out of the range of {datatype}"
    )


def _described_element(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else f"{text[:40]}..."


_LENGTH = struct.Struct("<I")
_MAX_LENGTH = 0xFFFFFFFF


def pack_elements(array: numpy.ndarray[Any, Any]) -> bytes:
    """Return the elements of an object array of bytes as raw bytes: each is preceded by its length (4 bytes, little-endian), in row-major order.

    Raises InvalidRequest for an element of 4 GiB or more.
    """
    elements = array.ravel().tolist()
    if elements and max(map(len, elements)) > _MAX_LENGTH:
        raise InvalidRequest(f"an element of BYTES has over {_MAX_LENGTH} bytes, the most that can be written")
    lengths = map(_LENGTH.pack, map(len, elements))
    return b"".join([part for pair in zip(lengths, elements, strict=True) for part in pair])


def elements_bytes(raw: bytes | bytearray | memoryview) -> int:
    """Return how many bytes of memory the elements in `raw` take at most in addition to their characters. Each shorter than 64 KiB has two NULs in its length."""
    return _ELEMENT_MEMORY * (bytes(raw).count(b"\0\0") + len(raw) // (64 << 10) + 1)


_ELEMENT_MEMORY = 64  # of an object of bytes and its place in a list and an array


def unpack_elements(raw: bytes | memoryview, count: int, name: str) -> numpy.ndarray[Any, Any]:
    """Return the `count` elements in `raw` (see `pack_elements`) as an object array of one dimension.

    Raises InvalidRequest, naming the tensor `name`, if an element is cut off or if there are more or fewer elements.
    """
    data, at, end = memoryview(raw), 0, len(raw)
    if count * _LENGTH.size > end:
        raise InvalidRequest(
            f"tensor {name!r}: {end} bytes cannot hold {count} BYTES elements of 4 bytes and more each"
        )
    elements: list[bytes] = []
    for index in range(count):
        start = at + _LENGTH.size
        if start > end:
            raise _cut_off(name, index, end - at, _LENGTH.size, "of its length")
        (length,) = _LENGTH.unpack_from(data, at)
        at = start + length
        if at > end:
            raise _cut_off(name, index, end - start, length, "")
        elements.append(bytes(data[start:at]))
    if at != end:
        raise InvalidRequest(f"tensor {name!r}: has {end - at} bytes after the last of its {count} elements")
    array = numpy.empty(count, object)
    array[:] = elements
    return array


def _cut_off(name: str, index: int, found: int, due: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"tensor {name!r}: element {index} is truncated: {found} of {due} bytes {what}".rstrip())


_LENGTHS = struct.Struct("<II")  # of the head, and of what precedes the elements
_ALIGNMENT = 16  # bytes: the elements of each array begin at a multiple of it
_SMALL = 4 << 10  # bytes of an array that are copied faster than a view of them is made
MAX_REMEMBERED = 256  # heads that are kept, on either side


class _Column(msgspec.Struct, array_like=True, gc=False):
    """An array: the kind of its elements (numpy's text, "" for BYTES), its shape, and where its elements begin and how many bytes they have."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


_encode_columns = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(list[_Column]).decode
_heads: dict[tuple[Any, ...], bytes] = {}


def pack(arrays: Arrays) -> bytes:
    """Return `arrays` as bytes. Raises InvalidRequest for an element of BYTES that is too long."""
    described = tuple([(name, array.dtype.str, array.shape) for name, array in arrays.items()])
    elements = [_elements(array) for array in arrays.values()]
    parts: list[bytes | memoryview] = [_heads.get(described) or _remembered(described, elements)]
    for each in elements:
        parts.append(each)
        if rest := -len(each) % _ALIGNMENT:
            parts.append(bytes(rest))
    return b"".join(parts)


def _elements(array: numpy.ndarray[Any, Any]) -> bytes | memoryview:
    if array.dtype.kind == "O":
        return pack_elements(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.nbytes <= _SMALL:
        return array.tobytes()
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data


def _remembered(described: tuple[Any, ...], elements: list[bytes | memoryview]) -> bytes:
    columns, offset = [], 0
    for (name, dtype, shape), raw in zip(described, elements, strict=True):
        kind = "" if dtype == "|O" else dtype.replace(">", "<")
        columns.append(_Column(name, kind, shape, offset, len(raw)))
        offset += len(raw) + -len(raw) % _ALIGNMENT
    head = _head_of(columns)
    if all(column.dtype for column in columns):  # the elements of BYTES have lengths of their own
        if len(_heads) >= MAX_REMEMBERED:
            _heads.clear()
        _heads[described] = head
    return head


def _head_of(columns: list[_Column]) -> bytes:
    described = _encode_columns(columns)
    length = _LENGTHS.size + len(described)
    room = length + -length % _ALIGNMENT
    return (_LENGTHS.pack(len(described), room) + described).ljust(room, b"\0")


def head_of_views(arrays: Arrays, address: int, size_bytes: int) -> bytes | None:
    """Return the head that makes packed arrays of the memory at `address` if it is written to its beginning; all `arrays` are views of that memory.

    Returns None if they are not, or if there is no room before the first of them.
    """
    columns, first = [], size_bytes
    for name, array in arrays.items():
        offset = int(array.__array_interface__["data"][0]) - address if array.nbytes else 0
        inside = not array.nbytes or 0 <= offset <= size_bytes - array.nbytes
        if array.dtype.kind == "O" or not array.flags.c_contiguous or not inside:
            return None
        columns.append(_Column(name, array.dtype.str, array.shape, offset, array.nbytes))
        first = min(first, offset) if array.nbytes else first
    described = _encode_columns(columns)
    head = _LENGTHS.pack(len(described), 0) + described
    return head if len(head) <= first else None


class Unpacker:
    """Reads packed arrays. `check` is called with the first arrays of each head; what it raises refuses them."""

    def __init__(self, check: Callable[[Arrays], Any] = lambda arrays: None) -> None:
        self._check = check
        self._known: dict[bytes, list[tuple[str, numpy.dtype[Any] | None, tuple[int, ...], int, int]]] = {}

    def __call__(self, packed: bytes | memoryview) -> Arrays:
        """Return the arrays, as read-only views of `packed` except for BYTES. Raises InvalidRequest for bytes that are not packed arrays."""
        try:
            return self._read(memoryview(packed).toreadonly())
        except (struct.error, msgspec.MsgspecError, TypeError, ValueError) as error:
            raise InvalidRequest(f"packed arrays: malformed ({error})") from None

    def _read(self, packed: memoryview) -> Arrays:
        length, start = _LENGTHS.unpack_from(packed)
        head = bytes(packed[_LENGTHS.size : _LENGTHS.size + length])
        known = self._known.get(head)
        columns = self._columns(head) if known is None else known
        rest = packed[start:]
        arrays: Arrays = {}
        for name, dtype, shape, offset, size_bytes in columns:
            if dtype is None:
                raw = rest[offset : offset + size_bytes]
                arrays[name] = unpack_elements(raw, element_count(name, shape), name).reshape(shape)
            else:
                arrays[name] = numpy.ndarray(shape, dtype, rest, offset)
        if known is None:
            self._check(arrays)
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[head] = columns
        return arrays

    def _columns(self, head: bytes) -> list[tuple[str, numpy.dtype[Any] | None, tuple[int, ...], int, int]]:
        return [
            (each.name, numpy.dtype(each.dtype) if each.dtype else None, each.shape, each.offset, each.size_bytes)
            for each in _decode_columns(head)
        ]
