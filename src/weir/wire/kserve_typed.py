"""Tensors as lists of numbers in a gRPC message (InferTensorContents): several datatypes share one field."""

from collections.abc import Sequence
from typing import Any

import numpy

from weir.errors import InvalidRequest
from weir.wire.tensors import DTYPES

# FP16 and BF16 have no field: they travel raw.
FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
# Elements that are read or written at a time: about a millisecond, after which another thread may have its turn.
_PIECE = 20_000
_NARROW = {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32", "UINT16": "UINT32"}  # what the shared field holds


def has_typed_form(datatype: str) -> bool:
    """Tell whether there is a field for elements of this type."""
    return datatype in FIELDS


def read_typed(name: str, datatype: str, shape: Sequence[int], count: int, contents: Any) -> numpy.ndarray[Any, Any]:
    """Return the array of this shape whose `count` elements are in `contents`.

    Raises InvalidRequest naming the tensor, the value and the rule: elements in another datatype's field, too few or too many
    of them, out of the datatype's range.
    """
    field = FIELDS.get(datatype)
    if field is None:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no typed form, it must be sent in raw_input_contents")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if filled not in ([], [field]):
        raise InvalidRequest(f"tensor {name!r}: has {', '.join(filled)}, {datatype} takes {field} only")
    elements = getattr(contents, field)
    if len(elements) != count:
        raise InvalidRequest(
            f"tensor {name!r}: has {len(elements)} elements in {field}, its shape {list(shape)} takes {count}"
        )
    if datatype == "BYTES":
        array: numpy.ndarray[Any, Any] = numpy.empty(count, object)
    else:
        array = numpy.empty(count, DTYPES[_NARROW.get(datatype, datatype)])
    for start in range(0, count, _PIECE):
        array[start : start + _PIECE] = elements[start : start + _PIECE]
    if datatype in _NARROW:
        array = _narrowed(name, datatype, array)
    return array.reshape(shape)


def _narrowed(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    bounds = numpy.iinfo(DTYPES[datatype])
    for extreme in (array.min(), array.max()) if array.size else ():
        if not bounds.min <= extreme <= bounds.max:
            raise InvalidRequest(f"tensor {name!r}: has the element {extreme}, out of the range of {datatype}")
    return array.astype(DTYPES[datatype])


def write_typed(datatype: str, array: numpy.ndarray[Any, Any], contents: Any) -> None:
    """Put the elements of `array` into `contents`; `datatype` must have a typed form."""
    elements, flat = getattr(contents, FIELDS[datatype]), array.ravel()
    for start in range(0, flat.size, _PIECE):
        elements.extend(flat[start : start + _PIECE].tolist())
