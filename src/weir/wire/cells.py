"""How one value travels between the server and its workers: as itself, as the bytes of an array, or pickled; errors with what is known of them."""

import io
import pickle
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from weir import errors
from weir.errors import WeirError
from weir.messages import OBJECT

if TYPE_CHECKING:
    import numpy


# Bytes and buffers of at least this size go through shared memory where there is some. Below it, one more copy through
# the socket costs less than an allocation in the arena.
LARGE_BYTES = 32 << 10

Ref = tuple[int, int]  # offset and length in an arena
Stowed = bytes | Ref


class BufferPlacer(Protocol):
    """Where an encoder puts large buffers."""

    def place(self, payload: Any) -> Ref | None:
        """Copy `payload` (a bytes-like object) into shared memory, or None if there is no room. For a payload that
        lies there already (a Block), return where."""

    def take_back(self, ref: Ref) -> None:
        """Free what `place` has returned: it goes into no frame after all."""


class Fetch(Protocol):
    """Where a decoder finds them again. Each reference in a frame is asked for exactly once; ValueError for one that
    lies outside of the arena."""

    def cell(self, ref: Ref) -> Any:
        """Return what stands for one whole payload or output: a memoryview or a Block."""

    def buffer(self, ref: Ref) -> Any:
        """Return a bytes-like object that is to back a Python value for as long as that lives."""


class Pickled:
    """One pickle, and the buffers that go with it.

    `foreign`: it names classes or functions other than builtins and numpy's, so that unpickling it may fail.
    """

    __slots__ = ("_places", "_placed", "buffers", "data", "foreign")

    def __init__(self, value: Any, places: BufferPlacer | None) -> None:
        """Pickle `value`. Raises what pickling it raises; nothing stays in `places` then."""
        self.buffers: list[Stowed] = []
        self._places = places
        self._placed: list[Ref] = []
        file = io.BytesIO()
        pickler = _Pickler(file, 5, buffer_callback=self._keep_in_band)
        try:
            pickler.dump(value)
            data = file.getvalue()
            self.data: Stowed = data if len(data) < LARGE_BYTES else self._stow(data)
        except BaseException:
            self.take_back()
            raise
        self.foreign: bool = pickler.foreign

    def take_back(self) -> None:
        """Free what lies in `places`."""
        for ref in self._placed:
            if self._places is not None:
                self._places.take_back(ref)

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        self.buffers.append(self._stow(raw))
        return False

    def _stow(self, raw: bytes | memoryview) -> Stowed:
        ref = None if self._places is None else self._places.place(raw)
        if ref is None:
            return bytes(raw)
        self._placed.append(ref)
        return ref


_NAMED = (type, FunctionType, BuiltinFunctionType)  # what is pickled as its name


class _Pickler(pickle.Pickler):
    """Notes what is not certain to be there where the pickle is read. Plain containers and values cost nothing: C
    handles them without asking."""

    foreign = False

    def reducer_override(self, value: Any) -> Any:
        module = value.__module__ if isinstance(value, _NAMED) else type(value).__module__
        if str(module).partition(".")[0] != "numpy":
            self.foreign = True
        return NotImplemented


def unpickle(data: Stowed, buffers: list[Stowed], fetch: Fetch | None) -> Any:
    """Return the value. Raises what unpickling it raises, after every reference has been fetched."""
    backing = [_fetched(buffer, fetch) for buffer in buffers]
    return pickle.loads(_fetched(data, fetch), buffers=backing)  # noqa: S301 - from our own parent or child process


def _fetched(stowed: Stowed, fetch: Fetch | None) -> Any:
    if isinstance(stowed, bytes):
        return stowed
    if fetch is None:
        raise ValueError(f"a reference {stowed} into an arena, but there is no arena")
    return fetch.buffer(stowed)


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


def pack_alike(values: list[Any], places: BufferPlacer) -> Alike | None:
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


def _place(value: dict[Any, Any], described: list[Any], places: BufferPlacer, refs: list[Ref]) -> bool:
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


# A cause whose pickle is larger than this (it may hold the batch) stays where it is.
MAX_CAUSE_BYTES = 64 << 10


class Failure(msgspec.Struct, array_like=True, gc=False):
    """An error as plain bytes. `kind` is its class in weir.errors, or the nearest one if `own_class` (a pickle of the
    class) is set; `state` the pickle of its attributes; `cause` that of `__cause__`."""

    kind: str
    state: bytes
    own_class: bytes | None = None
    cause: bytes | None = None


def pack_error(error: WeirError) -> Failure:
    """Return `error` ready to travel; never fails. What cannot be pickled of it is left out, or sent as its repr."""
    kind = type(error)
    nearest = next(base for base in kind.__mro__ if getattr(errors, base.__name__, None) is base)
    state = _pickle(error.__dict__) or pickle.dumps({**_plain_state(error), "details": repr(error.details)}, 5)
    cause = None if error.__cause__ is None else _pickle_cause(error.__cause__)
    return Failure(nearest.__name__, state, None if kind is nearest else _pickle(kind), cause)


def unpack_error(failure: Failure) -> WeirError:
    """Return the error again. Its class is the nearest one in weir.errors, and it has no cause, if the real ones
    cannot be imported here. ValueError if `failure` names no error of Weir's."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, WeirError)):
        raise ValueError(f"{failure.kind!r} is no error of Weir's")
    own = _unpickle(failure.own_class)
    made = own if isinstance(own, type) and issubclass(own, kind) else kind
    error = made.__new__(made)
    error.__dict__.update(kind("(lost on the way)").__dict__)  # what every error of this class has
    state = _unpickle(failure.state)
    if isinstance(state, dict):
        error.__dict__.update(state)
    Exception.__init__(error, error.message)
    cause = _unpickle(failure.cause)
    if isinstance(cause, BaseException):
        error.__cause__ = cause
    return error


def _pickle_cause(cause: BaseException) -> bytes | None:
    data = _pickle(cause)
    if data is not None and len(data) > MAX_CAUSE_BYTES:
        return None
    if _unpickle(data) is None:
        # Many exceptions cannot be made again from their `args`: their constructors take something else.
        state = {name: value for name, value in cause.__dict__.items() if _pickle(value) is not None}
        args = tuple(repr(value) if _pickle(value) is None else value for value in cause.args)
        data = _pickle(_Unmade(type(cause), args, state))
    return None if data is None or len(data) > MAX_CAUSE_BYTES else data


class _Unmade:
    """Pickles as a call of `_make`."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, self._parts


def _make(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    made = kind.__new__(kind)
    made.args = args
    made.__dict__.update(state)
    return made


def _plain_state(error: WeirError) -> dict[str, Any]:
    return {key: value for key, value in error.__dict__.items() if isinstance(value, (str, int, float, type(None)))}


def _pickle(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value, 5)
    except Exception:  # whatever a stranger's __reduce__ raises
        return None


def _unpickle(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return pickle.loads(data)  # noqa: S301 - from our own parent or child process
    except Exception:  # whatever a stranger's constructor raises; or its module is not here
        return None


# Columns of these types (exactly) and numpy's are tried as one pickle; others have classes of users.
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
    values: list[Any], places: BufferPlacer | None, complain: Complain, encodings: str | list[str] = OBJECT
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


def _pack_together(values: list[Any], places: BufferPlacer | None) -> Cells | None:
    try:
        pickled = Pickled(values, places)
    except Exception:  # whatever a stranger's __reduce__ raises: find out whose it is
        return None
    if pickled.foreign:
        pickled.take_back()
        return None
    return Cells(together=Together(len(values), pickled.data, pickled.buffers))


def _pack_apart(
    values: list[Any], places: BufferPlacer | None, complain: Complain, encodings: str | list[str]
) -> Cells:
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
    index: int, value: Any, places: BufferPlacer | None, complain: Complain, *, opaque: bool
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
    if (whole := cells.together or cells.alike or cells.small) is not None:
        return _unpack_whole(whole, fetch, complain)
    values: list[Any] = [] if cells.inline is None else cells.inline
    for cell in cells.apart or ():
        values[cell.index] = _unpack_cell(cell, fetch, complain)
    return values


def _unpack_whole(cell: Together | Alike | Small, fetch: Fetch | None, complain: Complain) -> list[Any]:
    try:
        if isinstance(cell, Small):
            return unpack_small(cell)
        if isinstance(cell, Alike):
            return unpack_alike(cell, fetch)
        values: list[Any] = unpickle(cell.data, cell.buffers, fetch)
    except Exception as error:  # not enough memory, or two versions of numpy that disagree
        return [_not_unpickled(error, complain) for _ in range(cell.count)]
    return values


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
