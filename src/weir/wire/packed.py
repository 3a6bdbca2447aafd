"""Arrays as bytes: a head that says what they are, and their elements. Who only passes them on reads neither.

A front packs the arrays of a request, and the worker those of its answer; the dispatcher between them knows only how many rows there are. Arrays that
follow one another have the same head for the same names, datatypes and shapes, so each reader checks and reads a head once.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy

from weir.errors import InvalidRequest
from weir.wire.tensors import Arrays, element_count, pack_elements, unpack_elements

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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Column]).decode
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
    described = _encode(columns)
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
    described = _encode(columns)
    head = _LENGTHS.pack(len(described), 0) + described
    return head if len(head) <= first else None


class Unpacker:
    """Reads packed arrays. `check` is called with the first arrays of each head; what it raises refuses them."""

    def __init__(self, check: Callable[[Arrays], Any] = lambda arrays: None) -> None:
        self._check = check
        self._known: dict[bytes, list[tuple[str, numpy.dtype[Any] | None, tuple[int, ...], int, int]]] = {}

    def __call__(self, packed: bytes | memoryview) -> Arrays:
        """Return the arrays, as read-only views of `packed` except for BYTES. Raises InvalidRequest for bytes that are no packed arrays."""
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
                arrays[name] = unpack_elements(raw, element_count(name, shape, 4), name).reshape(shape)
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
            for each in _decode(head)
        ]
