import pickle
import subprocess
import sys
from typing import Any

import numpy
import pytest

from weir.wire.cells import LARGE_BYTES, Pickled, Ref, unpickle


class OwnArray(numpy.ndarray[Any, Any]):
    pass


class Arena:
    """Counts what lies in it."""

    def __init__(self) -> None:
        self.places: dict[Ref, bytes] = {}

    def place(self, payload: Any) -> Ref | None:
        ref = (len(self.places), len(bytes(payload)))
        self.places[ref] = bytes(payload)
        return ref

    def take_back(self, ref: Ref) -> None:
        del self.places[ref]

    def cell(self, ref: Ref) -> Any:
        return self.places[ref]

    buffer = cell


@pytest.mark.parametrize(
    ("value", "foreign"),
    [
        ([1, "a", {"b": (2.5, None)}, {3}, bytearray(b"x")], False),
        (numpy.zeros(3), False),
        ({"x": numpy.float32(1), "names": numpy.array(["a"])}, False),
        (numpy.array([Arena()], dtype=object), True),
        (numpy.zeros(3).view(OwnArray), True),
        ([Arena()], True),
        ({"deep": [print, Arena]}, True),
    ],
    ids=["plain", "numbers", "in a dict", "objects", "own array", "own object", "functions and classes"],
)
def test_foreign_tells_whether_the_other_side_needs_somebodys_classes(value: Any, foreign: bool) -> None:
    pickled = Pickled(value, None)
    assert pickled.foreign is foreign
    assert repr(unpickle(pickled.data, pickled.buffers, None))[:20] == repr(value)[:20]


def test_large_buffers_and_large_pickles_lie_in_the_arena() -> None:
    arena = Arena()
    value = [numpy.zeros(LARGE_BYTES, numpy.uint8), list(range(LARGE_BYTES)), numpy.zeros(8)]
    pickled = Pickled(value, arena)
    assert len(arena.places) == 2
    back = unpickle(pickled.data, pickled.buffers, arena)
    assert all(
        (one == other).all() for one, other in zip(map(numpy.asarray, back), map(numpy.asarray, value), strict=True)
    )
    pickled.take_back()
    assert not arena.places


def test_nothing_stays_in_the_arena_when_pickling_fails() -> None:
    arena = Arena()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Pickled([numpy.zeros(LARGE_BYTES, numpy.uint8), lambda: 0], arena)
    assert not arena.places


def test_a_reference_without_an_arena() -> None:
    with pytest.raises(ValueError, match="no arena"):
        unpickle((0, 40_000), [], None)


def test_numpy_is_not_imported_for_those_who_do_not_use_it() -> None:
    code = "import sys, weir.wire.frames, weir.workers.run.runner; assert 'numpy' not in sys.modules, 'numpy'"
    subprocess.run([sys.executable, "-c", code], check=True)
