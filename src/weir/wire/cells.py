"""Columns of values between a server and its workers: each value is sent as bytes, as the bytes of arrays, as a pickle, or as an error."""

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


# Bytes and buffers of at least this size go through shared memory, if there is any. For smaller ones, copying them through the socket costs less
# than an allocation in the arena.
LARGE_BYTES = 32 << 10

Ref = tuple[int, int]  # offset and length in an arena
Stowed = bytes | Ref


class BufferPlacer(Protocol):
    """Puts large buffers into shared memory, for an encoder."""

    def place(self, payload: Any) -> Ref | None:
        """Copy `payload` (a bytes-like object) into shared memory and return its reference; None if there is no room.

        A payload that is in shared memory already (a Block) is not copied.
        """

    def take_back(self, ref: Ref) -> None:
        """Free what `place` has returned, because no frame will refer to it."""


class Fetch(Protocol):
    """Returns buffers in shared memory, for a decoder. It is called exactly once for each reference in a frame.

    Raises ValueError for a reference outside the arena.
    """

    def cell(self, ref: Ref) -> Any:
        """Return one whole payload or output: a memoryview or a Block."""

    def buffer(self, ref: Ref) -> Any:
        """Return a bytes-like object that a Python value may refer to as long as the value lives."""


class Pickled:
    """A pickle and its out-of-band buffers (PEP 574).

    `foreign`: it names classes or functions other than those of Python and numpy, so unpickling it may fail.
    """

    __slots__ = ("_places", "_placed", "buffers", "data", "foreign")

    def __init__(self, value: Any, places: BufferPlacer | None) -> None:
        """Pickle `value`. Raises what pickling it raises; then nothing stays in `places`."""
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
        """Free what is in `places`."""
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


_NAMED = (type, FunctionType, BuiltinFunctionType)  # pickled by name


class _Pickler(pickle.Pickler):
    """Notes classes and functions that the reading process may not have. Plain containers and values cost nothing: C code pickles them without a call."""

    foreign = False

    def reducer_override(self, value: Any) -> Any:
        module = value.__module__ if isinstance(value, _NAMED) else type(value).__module__
        if str(module).partition(".")[0] != "numpy":
            self.foreign = True
        return NotImplemented


def unpickle(data: Stowed, buffers: list[Stowed], fetch: Fetch | None) -> Any:
    """Return the unpickled value. Raises what unpickling raises, but only after every reference has been fetched."""
    backing = [_fetched(buffer, fetch) for buffer in buffers]
    return pickle.loads(_fetched(data, fetch), buffers=backing)  # noqa: S301 - from our own parent or child process


def _fetched(stowed: Stowed, fetch: Fetch | None) -> Any:
    if isinstance(stowed, bytes):
        return stowed
    if fetch is None:
        raise ValueError(f"a reference {stowed} into an arena, but there is no arena")
    return fetch.buffer(stowed)


class Alike(msgspec.Struct, array_like=True, gc=False):
    """A column of dicts of large arrays. All have the same names, dtypes and shapes; `refs` has a reference for each array."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    refs: list[Ref]

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.refs) // len(self.names)


def pack_alike(values: list[Any], places: BufferPlacer) -> Alike | None:
    """Return `values` as a column of Alike; None unless they are dicts of such arrays and shared memory has room."""
    first = values[0]
    described = [(name, _description(array)) for name, array in first.items()] if type(first) is dict else []
    if not described or not all(dict(described).values()):
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
    """A column of dicts of small arrays, or without `names` of small arrays. All have the same names and dtypes; `shapes` and `data` have an element for
    each array."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    data: list[bytearray]  # mutable, so that the arrays can be written to

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.data) // (len(self.names) or 1)


def _pack_arrays(values: list[Any]) -> Small | None:
    first = values[0]
    if not _is_plain("", first):
        return None
    dtype, data = first.dtype, []
    for array in values:
        if array.dtype != dtype or array.nbytes >= LARGE_BYTES or not array.flags.c_contiguous:
            return None
        data.append(array.tobytes())
    return Small([], [dtype.str], [array.shape for array in values], data)


def pack_small(values: list[Any]) -> Small | None:
    """Return `values`, which are of one type, as a column of Small; None unless they are such arrays or dicts of them."""
    if type(values[0]) is not dict:
        return _pack_arrays(values)
    dtypes = {name: array.dtype for name, array in values[0].items() if _is_plain(name, array)}
    if not dtypes or len(dtypes) < len(values[0]):
        return None
    kind = type(next(iter(values[0].values())))
    shapes: list[tuple[int, ...]] = []
    data: list[Any] = []
    for value in values:
        if len(value) != len(dtypes):
            return None
        for name, dtype in dtypes.items():
            array: Any = value.get(name)
            if type(array) is not kind or array.dtype != dtype or array.nbytes >= LARGE_BYTES:
                return None
            if not array.flags.c_contiguous:
                return None
            shapes.append(array.shape)
            data.append(array.tobytes())
    return Small(list(dtypes), [dtype.str for dtype in dtypes.values()], shapes, data)


def _is_plain(name: Any, array: Any) -> bool:
    """Return whether `array` is a numpy array of numbers and `name` a str, so that it can be sent as bytes."""
    kind = type(array)
    return (
        type(name) is str and kind.__module__ == "numpy" and kind.__name__ == "ndarray" and array.dtype.kind in "biuf"
    )


def unpack_small(cell: Small) -> list[Any]:
    """Return the values of a column. Their arrays can be written to."""
    import numpy

    if not cell.names:
        kind = numpy.dtype(cell.dtypes[0])
        return [numpy.ndarray(shape, kind, data) for shape, data in zip(cell.shapes, cell.data, strict=True)]
    described = list(zip(cell.names, map(numpy.dtype, cell.dtypes), strict=True))
    arrays = zip(cell.shapes, cell.data, strict=True)
    values = []
    for _ in range(cell.count):
        value: dict[str, Any] = {}
        for name, kind in described:
            shape, data = next(arrays)
            value[name] = numpy.ndarray(shape, kind, data)
        values.append(value)
    return values


def _description(array: Any) -> "tuple[numpy.dtype[Any], tuple[int, ...]] | None":
    """Return dtype and shape of a large contiguous numpy array of numbers; None for anything else."""
    kind = type(array)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return None
    if array.nbytes < LARGE_BYTES or array.dtype.kind not in "biuf" or not array.flags.c_contiguous:
        return None
    return array.dtype, array.shape


def unpack_alike(cell: Alike, fetch: Fetch | None) -> list[Any]:
    """Return the values of a column."""
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


# The `__cause__` of an error is not sent if its pickle is larger than this: it may contain the batch.
MAX_CAUSE_BYTES = 64 << 10


class Failure(msgspec.Struct, array_like=True, gc=False):
    """An error, encoded.

    `kind` is its class in weir.errors, or the nearest base class there if the class is another; `own_class` is then a pickle of the class. `state` is a
    pickle of the attributes, and `cause` one of `__cause__`.
    """

    kind: str
    state: bytes
    own_class: bytes | None = None
    cause: bytes | None = None


def pack_error(error: WeirError) -> Failure:
    """Return `error` encoded. It never fails: parts that cannot be pickled are left out or replaced by their repr."""
    kind = type(error)
    nearest = next(base for base in kind.__mro__ if getattr(errors, base.__name__, None) is base)
    state = _pickle(error.__dict__) or pickle.dumps({**_plain_state(error), "details": repr(error.details)}, 5)
    cause = None if error.__cause__ is None else _pickle_cause(error.__cause__)
    return Failure(nearest.__name__, state, None if kind is nearest else _pickle(kind), cause)


def unpack_error(failure: Failure) -> WeirError:
    """Return the error in `failure`. A class or a cause that cannot be imported here is replaced: by the nearest class in weir.errors, by no cause.

    Raises ValueError if `failure` names no error of Weir.
    """
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, WeirError)):
        raise ValueError(f"{failure.kind!r} is no error of Weir's")
    own = _unpickle(failure.own_class)
    made = own if isinstance(own, type) and issubclass(own, kind) else kind
    error = made.__new__(made)
    error.__dict__.update(kind("(lost on the way)").__dict__)  # the attributes of every error of this class
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
        # Many exceptions cannot be unpickled, because their constructors take other arguments than `args`.
        state = {name: value for name, value in cause.__dict__.items() if _pickle(value) is not None}
        args = tuple(repr(value) if _pickle(value) is None else value for value in cause.args)
        data = _pickle(_Unmade(type(cause), args, state))
    return None if data is None or len(data) > MAX_CAUSE_BYTES else data


class _Unmade:
    """Is pickled as a call of `_make`."""

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
    except Exception:  # a user's __reduce__ may raise anything
        return None


def _unpickle(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return pickle.loads(data)  # noqa: S301 - from our own parent or child process
    except Exception:  # a user's constructor may raise anything, and its module may be missing here
        return None


# A column of values of exactly these types, and of numpy's, is tried as one pickle. Other columns contain classes of users.
BUILTIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set})

Complain = Callable[[str], WeirError]
_BYTES = {bytes}


class Placed(msgspec.Struct, array_like=True, tag=0, gc=False):
    """An entry whose bytes are in the arena."""

    index: int
    ref: Ref


class Single(msgspec.Struct, array_like=True, tag=1):
    """An entry with a pickle of its own."""

    index: int
    data: Stowed
    buffers: list[Stowed]


class Failed(msgspec.Struct, array_like=True, tag=2, gc=False):
    """An entry that is an error."""

    index: int
    failure: Failure


class Together(msgspec.Struct, array_like=True):
    """All entries of a column, as one pickle of a list."""

    count: int
    data: Stowed
    buffers: list[Stowed]


class Cells(msgspec.Struct, array_like=True):
    """A column of values. Either `together`, `alike` or `small` is set, or `inline` has the bytes of each entry, with None for those in `apart`."""

    inline: list[bytes | None] | None = None
    together: Together | None = None
    apart: list[Placed | Single | Failed] | None = None
    alike: Alike | None = None
    small: Small | None = None

    def refs(self) -> list[Ref]:
        """Return all references in the column."""
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
    """Return `values` as a column. A value that cannot be pickled is replaced by the error that `complain` makes of a text.

    `encodings` has the content type of all values, or of each. A content type other than OBJECT means that the value is bytes, bytes-like, or a block of the
    arena that `places` knows. For a value with a method `as_plain`, its result is sent.
    """
    types = set(map(type, values))
    if not (is_builtin := types <= BUILTIN) and any(hasattr(kind, "as_plain") for kind in types):
        values = [value.as_plain() if hasattr(value, "as_plain") else value for value in values]
        types = set(map(type, values))
        is_builtin = types <= BUILTIN
    if types == _BYTES:
        if places is None or max(map(len, values)) < LARGE_BYTES:
            return Cells(inline=values)
    elif len(types) == 1 and (not is_builtin or dict in types) and (small := pack_small(values)) is not None:
        return Cells(small=small)
    elif types == {dict} and places is not None and (alike := pack_alike(values, places)) is not None:
        return Cells(alike=alike)
    elif is_builtin or all(kind in BUILTIN or kind.__module__ == "numpy" for kind in types):
        together = _pack_together(values, places)
        if together is not None:
            return together
    return _pack_apart(values, places, complain, encodings)


def _pack_together(values: list[Any], places: BufferPlacer | None) -> Cells | None:
    try:
        pickled = Pickled(values, places)
    except Exception:  # a user's __reduce__ may raise anything; packing each value apart finds the one that does
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
    except Exception as error:  # a user's __reduce__ may raise anything
        return Failed(index, pack_error(complain(f"{type(value).__name__} cannot be pickled: {error}")))
    return Single(index, pickled.data, pickled.buffers)


def unpack_cells(cells: Cells, fetch: Fetch | None, complain: Complain) -> list[Any]:
    """Return the values of a column. A value that cannot be unpickled here is replaced by the error that `complain` makes of a text."""
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
    except Exception as error:  # for example too little memory, or another version of numpy
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
    except Exception as error:  # a user's constructor may raise anything, and its module may be missing here
        return _not_unpickled(error, complain)


def _not_unpickled(error: Exception, complain: Complain) -> WeirError:
    return complain(f"cannot be unpickled: {type(error).__name__}: {error}")
