"""Python values as pickles, their large buffers out of band.

Pickles travel only between a server and the worker processes that it started itself; nothing that came in through a
door is ever unpickled.
"""

import io
import pickle
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

# Bytes and buffers of at least this size go through shared memory where there is some. Below it, one more copy through
# the socket costs less than an allocation in the arena.
LARGE_BYTES = 32 << 10

Ref = tuple[int, int]  # offset and length in an arena
Stowed = bytes | Ref


class Places(Protocol):
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

    def __init__(self, value: Any, places: Places | None) -> None:
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
