"""A column of payloads or outputs, one cell per entry of a batch.

Bytes lie in the frame as they are, dicts of small arrays as the bytes of those, and dicts of large arrays that are alike in the arena. Python values made of builtins and arrays travel as one pickle for all; if anything
else is among them, each is a pickle of its own, so that one that cannot be pickled or unpickled fails alone. Large ones
are references.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from weir.errors import WeirError
from weir.messages import OBJECT
from weir.wire.array_cells import Alike, Small, pack_alike, pack_small, unpack_alike, unpack_small
from weir.wire.failures import Failure, pack_error, unpack_error
from weir.wire.pickles import LARGE_BYTES, Fetch, Pickled, Places, Ref, Stowed, unpickle

# Columns of these types (exactly) and numpy's are tried as one pickle; others have classes of somebody's own.
BUILTIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set})

Complain = Callable[[str], WeirError]


class Placed(msgspec.Struct, array_like=True, tag=0, gc=False):
    """The entry's bytes are in the arena."""

    index: int
    ref: Ref


class Single(msgspec.Struct, array_like=True, tag=1):
    """The entry is a pickle of its own."""

    index: int
    data: Stowed
    buffers: list[Stowed]


class Failed(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The entry is an error."""

    index: int
    failure: Failure


class Together(msgspec.Struct, array_like=True):
    """All entries, as one pickle of a list."""

    count: int
    data: Stowed
    buffers: list[Stowed]


class Cells(msgspec.Struct, array_like=True):
    """A column: `together`, `alike` or `small`, or else `inline` with None where an entry is among `apart`."""

    inline: list[bytes | None] | None = None
    together: Together | None = None
    apart: list[Placed | Single | Failed] | None = None
    alike: Alike | None = None
    small: Small | None = None

    def refs(self) -> list[Ref]:
        """Return every reference in the column."""
        stowed: list[Stowed] = [] if self.together is None else [self.together.data, *self.together.buffers]
        stowed += [] if self.alike is None else self.alike.refs
        for cell in self.apart or ():
            if isinstance(cell, Placed):
                stowed.append(cell.ref)
            elif isinstance(cell, Single):
                stowed += [cell.data, *cell.buffers]
        return [ref for ref in stowed if not isinstance(ref, bytes)]


def pack_cells(
    values: list[Any], places: Places | None, complain: Complain, encodings: str | list[str] = OBJECT
) -> Cells:
    """Return `values` as a column. One that cannot be pickled is replaced by the error that `complain` makes of a text.

    `encodings`: of all values, or of each. One that is not OBJECT means that the value is bytes, bytes-like, or
    something in the arena that `places` knows. A value with a method `as_plain` travels as what that returns.
    """
    types = set(map(type, values))
    if any(hasattr(kind, "as_plain") for kind in types):
        values = [value.as_plain() if hasattr(value, "as_plain") else value for value in values]
        types = set(map(type, values))
    if types == {bytes}:
        if places is None or max(map(len, values)) < LARGE_BYTES:
            return Cells(inline=values)
    elif types == {dict} and places is not None and (alike := pack_alike(values, places)) is not None:
        return Cells(alike=alike)
    elif types == {dict} and (small := pack_small(values)) is not None:
        return Cells(small=small)
    elif types <= BUILTIN or all(kind in BUILTIN or kind.__module__ == "numpy" for kind in types):
        together = _pack_together(values, places)
        if together is not None:
            return together
    return _pack_apart(values, places, complain, encodings)


def _pack_together(values: list[Any], places: Places | None) -> Cells | None:
    try:
        pickled = Pickled(values, places)
    except Exception:  # whatever a stranger's __reduce__ raises: find out whose it is
        return None
    if pickled.foreign:
        pickled.take_back()
        return None
    return Cells(together=Together(len(values), pickled.data, pickled.buffers))


def _pack_apart(values: list[Any], places: Places | None, complain: Complain, encodings: str | list[str]) -> Cells:
    column = [encodings] * len(values) if isinstance(encodings, str) else encodings
    inline: list[bytes | None] = []
    apart: list[Placed | Single | Failed] = []
    for index, (value, encoding) in enumerate(zip(values, column, strict=True)):
        cell = _pack_cell(index, value, places, complain, opaque=encoding != OBJECT)
        if isinstance(cell, bytes):
            inline.append(cell)
        else:
            inline.append(None)
            apart.append(cell)
    return Cells(inline=inline, apart=apart)


def _pack_cell(
    index: int, value: Any, places: Places | None, complain: Complain, *, opaque: bool
) -> bytes | Placed | Single | Failed:
    if isinstance(value, WeirError):
        return Failed(index, pack_error(value))
    if type(value) is bytes or opaque:
        small = isinstance(value, (bytes, bytearray)) and len(value) < LARGE_BYTES
        ref = None if small or places is None else places.place(value)
        return bytes(value) if ref is None else Placed(index, ref)
    try:
        pickled = Pickled(value, places)
    except Exception as error:  # whatever a stranger's __reduce__ raises
        return Failed(index, pack_error(complain(f"{type(value).__name__} cannot be pickled: {error}")))
    return Single(index, pickled.data, pickled.buffers)


def unpack_cells(cells: Cells, fetch: Fetch | None, complain: Complain) -> list[Any]:
    """Return the values again; one that cannot be unpickled here is replaced by the error that `complain` makes."""
    if cells.together is not None:
        return _unpack_together(cells.together, fetch, complain)
    if cells.alike is not None:
        return _unpack_alike(cells.alike, fetch, complain)
    if cells.small is not None:
        return _unpack_small(cells.small, complain)
    values: list[Any] = [] if cells.inline is None else cells.inline
    for cell in cells.apart or ():
        values[cell.index] = _unpack_cell(cell, fetch, complain)
    return values


def _unpack_together(cell: Together, fetch: Fetch | None, complain: Complain) -> list[Any]:
    try:
        values: list[Any] = unpickle(cell.data, cell.buffers, fetch)
    except Exception as error:  # not enough memory, or two versions of numpy that disagree
        return [_not_unpickled(error, complain) for _ in range(cell.count)]
    return values


def _unpack_alike(cell: Alike, fetch: Fetch | None, complain: Complain) -> list[Any]:
    try:
        return unpack_alike(cell, fetch)
    except Exception as error:  # not enough memory
        return [_not_unpickled(error, complain) for _ in range(cell.count)]


def _unpack_small(cell: Small, complain: Complain) -> list[Any]:
    try:
        return unpack_small(cell)
    except Exception as error:  # not enough memory
        return [_not_unpickled(error, complain) for _ in range(cell.count)]


def _unpack_cell(cell: Placed | Single | Failed, fetch: Fetch | None, complain: Complain) -> Any:
    if isinstance(cell, Failed):
        return unpack_error(cell.failure)
    if isinstance(cell, Placed):
        if fetch is None:
            raise ValueError(f"a reference {cell.ref} into an arena, but there is no arena")
        return fetch.cell(cell.ref)
    try:
        return unpickle(cell.data, cell.buffers, fetch)
    except Exception as error:  # whatever a stranger's constructor raises; or its module is not here
        return _not_unpickled(error, complain)


def _not_unpickled(error: Exception, complain: Complain) -> WeirError:
    return complain(f"cannot be unpickled: {type(error).__name__}: {error}")
