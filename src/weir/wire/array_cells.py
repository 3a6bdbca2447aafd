"""A column of dicts of large arrays that are all alike, as places in the arena.

What a tensor model's batch of large tensors is. As pickles, arrays would take as long as all the rest of a frame.
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
