"""Columns of dicts of arrays, which is what a tensor model's batches are: large arrays that are all alike, as places in the arena,
and small ones as their bytes.

As pickles, arrays would take longer than all the rest of a frame.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from weir.wire.pickles import LARGE_BYTES, Fetch, Places, Ref

if TYPE_CHECKING:
    import numpy


class Alike(msgspec.Struct, array_like=True, gc=False):
    """Each entry has arrays of these names, datatypes and shapes, and one reference for each of them."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    refs: list[Ref]

    @property
    def count(self) -> int:
        """How many entries there are."""
        return len(self.refs) // len(self.names)


def pack_alike(values: list[Any], places: Places) -> Alike | None:
    """Return `values`; None if they are anything else than dicts of large arrays that are alike, or there is no room."""
    first = values[0]
    described = [(name, _description(array)) for name, array in first.items()] if type(first) is dict else []
    if not described or any(description is None for _, description in described):
        return None
    refs: list[Ref] = []
    for value in values:
        if type(value) is not dict or len(value) != len(described) or not _place(value, described, places, refs):
            for ref in refs:
                places.take_back(ref)
            return None
    return Alike(
        list(first), [array.dtype.str for array in first.values()], [array.shape for array in first.values()], refs
    )


def _place(value: dict[Any, Any], described: list[Any], places: Places, refs: list[Ref]) -> bool:
    for name, description in described:
        array = value.get(name)
        ref = places.place(array) if array is not None and _description(array) == description else None
        if ref is None:
            return False
        refs.append(ref)
    return True


class Small(msgspec.Struct, array_like=True, gc=False):
    """Each entry has arrays of these names and datatypes, with a shape and the bytes of each."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    data: list[bytearray]  # what an array may be written to

    @property
    def count(self) -> int:
        """How many entries there are."""
        return len(self.data) // len(self.names)


def pack_small(values: list[dict[Any, Any]]) -> Small | None:
    """Return `values`; None if they are anything else than dicts of small arrays of the same names and datatypes."""
    described = [(name, array.dtype) for name, array in values[0].items() if _is_plain(name, array)]
    if not described or len(described) < len(values[0]):
        return None
    kind = type(next(iter(values[0].values())))
    shapes: list[tuple[int, ...]] = []
    data: list[Any] = []
    for value in values:
        if len(value) != len(described):
            return None
        for name, dtype in described:
            array: Any = value.get(name)
            if type(array) is not kind or array.dtype != dtype or array.nbytes >= LARGE_BYTES:
                return None
            if not array.flags.c_contiguous:
                return None
            shapes.append(array.shape)
            data.append(array.tobytes())
    return Small([name for name, _ in described], [dtype.str for _, dtype in described], shapes, data)


def _is_plain(name: Any, array: Any) -> bool:
    """Tell whether a named array travels as its bytes."""
    kind = type(array)
    return (
        type(name) is str and kind.__module__ == "numpy" and kind.__name__ == "ndarray" and array.dtype.kind in "biuf"
    )


def unpack_small(cell: Small) -> list[Any]:
    """Return the values again; their arrays may be written to."""
    from numpy import dtype, ndarray

    described = list(zip(cell.names, map(dtype, cell.dtypes), strict=True))
    arrays = zip(cell.shapes, cell.data, strict=True)
    values = []
    for _ in range(cell.count):
        value: dict[str, Any] = {}
        for name, kind in described:
            shape, data = next(arrays)
            value[name] = ndarray(shape, kind, data)
        values.append(value)
    return values


def _description(array: Any) -> "tuple[numpy.dtype[Any], tuple[int, ...]] | None":
    """Return datatype and shape of an array that is large and travels as its bytes; None for anything else."""
    kind = type(array)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return None
    if array.nbytes < LARGE_BYTES or array.dtype.kind not in "biuf" or not array.flags.c_contiguous:
        return None
    return array.dtype, array.shape


def unpack_alike(cell: Alike, fetch: Fetch | None) -> list[Any]:
    """Return the values again."""
    from numpy import frombuffer

    if fetch is None:
        raise ValueError("references into an arena, but there is no arena")
    arrays = [fetch.buffer(ref) for ref in cell.refs]
    described = list(zip(cell.names, cell.dtypes, cell.shapes, strict=True))
    count = len(described)
    return [
        {
            name: frombuffer(arrays[start + index], dtype).reshape(shape)
            for index, (name, dtype, shape) in enumerate(described)
        }
        for start in range(0, len(arrays), count)
    ]
