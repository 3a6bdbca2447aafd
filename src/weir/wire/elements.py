"""The elements of a tensor in JSON: flat or nested lists to arrays, arrays to flat lists.

What JSON can say of a datatype is strict: whole numbers for integers and in their range, true and false for BOOL, strings
for BYTES (as UTF-8), numbers for floats. FP16 and BF16 have no JSON form. NaN and infinities are written as null.
"""

from collections.abc import Sequence
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy

from weir.errors import InvalidRequest
from weir.wire.tensors import DTYPES
from weir.wire.values import UNREADABLE, decode_json, has_slow_floats, uncollected

# The least number that rounds to an infinity, for each float: numbers must be nearer to 0.
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


# msgspec's bounds are 64-bit integers with a sign: UINT64 is left to numpy.
ELEMENT_TYPES: dict[str, Any] = {
    datatype: Annotated[int, msgspec.Meta(ge=0)] if datatype == "UINT64" else _element_type(datatype)
    for datatype in DTYPES
    if datatype not in BINARY_ONLY
}
_FLAT: dict[str, msgspec.json.Decoder[Any]] = {
    datatype: msgspec.json.Decoder(GenericAlias(list, (kind,))) for datatype, kind in ELEMENT_TYPES.items()
}


def read_elements(name: str, datatype: str, shape: Sequence[int], count: int, data: Any) -> numpy.ndarray[Any, Any]:
    """Return the array in the JSON text `data` (a msgspec.Raw or bytes), flat or nested as `shape` says.

    Raises InvalidRequest that names the tensor, the value and the rule.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no JSON form, it must be sent as binary data")
    try:
        flat = None if _is_slow(datatype, data) else _FLAT[datatype].decode(data)
    except UNREADABLE:  # nested, or wrong
        flat = None
    if flat is None:
        flat = _flattened(name, shape, _decoded(name, data))
        _check_elements(name, datatype, flat)
    if len(flat) != count:
        raise InvalidRequest(f"tensor {name!r}: has {len(flat)} elements, its shape {list(shape)} takes {count}")
    return array_of(name, datatype, flat).reshape(shape)


def _is_slow(datatype: str, data: Any) -> bool:
    return DTYPES[datatype].kind == "f" and has_slow_floats(memoryview(data))


def _decoded(name: str, data: Any) -> Any:
    try:
        with uncollected(len(bytes(data))):
            return decode_json(memoryview(data))
    except UNREADABLE as error:  # nested too deeply, or a number beyond all floats
        raise InvalidRequest(f"tensor {name!r}: data cannot be read ({error})") from None


def array_of(name: str, datatype: str, flat: list[Any]) -> numpy.ndarray[Any, Any]:
    """Return elements whose types have been checked as an array of one dimension."""
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
        raise InvalidRequest(f"tensor {name!r}: has a string that is no Unicode text ({error})") from None


# Bytes that a number takes as text, but for few that take more.
TEXT_BYTES = 12

# Elements of a tensor that are written at a time: a few milliseconds, after which another thread may have its turn.
_PIECE = 20_000


def text_size(array: numpy.ndarray[Any, Any]) -> int:
    """Return about how many bytes the elements of a tensor have in JSON."""
    size = TEXT_BYTES * array.size
    if array.dtype.kind == "O" and array.size <= 2 * _PIECE:  # of more texts the number says enough
        size += sum(map(len, array.ravel().tolist()))
    return size


def write_json(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> list[Any] | msgspec.Raw:
    """Return what is to be encoded as the elements of a tensor, flat; of many, already as JSON, written piece by piece. InvalidRequest as in
    `write_elements`."""
    if array.size <= _PIECE:
        return write_elements(name, datatype, array)
    flat = array.ravel()
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return msgspec.Raw(b"[%b]" % b",".join([_encode(write_elements(name, datatype, piece))[1:-1] for piece in pieces]))


_encode = msgspec.json.Encoder().encode


def write_elements(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> list[Any]:
    """Return the elements for JSON, flat. InvalidRequest if they have no JSON form: binary data must be asked for."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no JSON form, it must be asked for as binary data")
    flat: list[Any] = array.ravel().tolist()
    if datatype != "BYTES":
        return flat
    try:
        return list(map(bytes.decode, flat))
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"tensor {name!r}: has bytes that are no UTF-8 ({error.reason}), it must be asked for as binary data"
        ) from None


def _flattened(name: str, shape: Sequence[int], data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidRequest(f"tensor {name!r}: data is {_described(data)}, must be a list")
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
        raise InvalidRequest(f"tensor {name!r}: has the element {_described(wrong)}, {datatype} takes {words}")
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
    return InvalidRequest(f"tensor {name!r}: has the element {_described(value)}, out of the range of {datatype}")


def _described(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else f"{text[:40]}..."
