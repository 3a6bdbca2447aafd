"""BYTES tensors as raw bytes: each element is its length (4 bytes, least significant first) and the bytes themselves."""

import struct
from typing import Any

import numpy

from weir.errors import InvalidRequest

_LENGTH = struct.Struct("<I")
_MAX_LENGTH = 0xFFFFFFFF


def pack_elements(array: numpy.ndarray[Any, Any]) -> bytes:
    """Return the elements of an object array of bytes, in row-major order. InvalidRequest for one of 4 GiB or more."""
    elements = array.ravel().tolist()
    if elements and max(map(len, elements)) > _MAX_LENGTH:
        raise InvalidRequest(f"an element of BYTES has over {_MAX_LENGTH} bytes, the most that can be written")
    lengths = map(_LENGTH.pack, map(len, elements))
    return b"".join([part for pair in zip(lengths, elements, strict=True) for part in pair])


def unpack_elements(raw: bytes | memoryview, count: int, name: str) -> numpy.ndarray[Any, Any]:
    """Return the `count` elements in `raw` as an object array of one dimension.

    Raises InvalidRequest that names the tensor `name` if an element is cut off, or if there are more or fewer.
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
    return InvalidRequest(f"tensor {name!r}: element {index} is cut off: {found} of {due} bytes {what}".rstrip())
