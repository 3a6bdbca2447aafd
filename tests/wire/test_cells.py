import pickle
import subprocess
import sys
from typing import Any

import msgspec
import numpy
import pytest
from tests.rings import subcases

from weir.errors import (
    CapacityError,
    InvalidRequest,
    ModelCrashed,
    ModelError,
    Overloaded,
    RequestError,
    ValidationFailed,
    WeirError,
)
from weir.messages import JSON, OBJECT
from weir.wire.cells import (
    LARGE_BYTES,
    MAX_CAUSE_BYTES,
    Cells,
    Failure,
    Pickled,
    Placed,
    Ref,
    Together,
    pack_cells,
    pack_error,
    unpack_cells,
    unpack_error,
    unpickle,
)


def packed(values: list[Any], encodings: str | list[str] = OBJECT) -> Cells:
    return pack_cells(values, None, InvalidRequest, encodings)


@subcases(
    ("values", "shape"),
    [
        ([b"1", b"2"], "inline"),
        ([1, b"2", [3.0, {"a": None}]], "together"),
        ([numpy.zeros(2), numpy.float32(1), 5], "together"),
        ([], "together"),
        ([1, InvalidRequest("no")], "apart"),
        ([1, {"a": JSON, "b": InvalidRequest}], "apart"),
    ],
)
def test_what_shares_a_pickle(values: list[Any], shape: str) -> None:
    cells = packed(values)
    assert (cells.together is not None) is (shape == "together")
    assert (cells.apart is not None) is (shape == "apart")
    assert [str(value) for value in unpack_cells(cells, None, InvalidRequest)] == [str(value) for value in values]


def test_encoded_bodies_come_back_as_bytes() -> None:
    values = [memoryview(b"1"), bytearray(b"2"), b"3"]
    assert unpack_cells(packed(values, JSON), None, InvalidRequest) == [b"1", b"2", b"3"]
    mixed = unpack_cells(packed([memoryview(b"1"), bytearray(b"2")], [JSON, OBJECT]), None, InvalidRequest)
    assert (mixed, type(mixed[1])) == ([b"1", bytearray(b"2")], bytearray)


def test_one_pickle_that_cannot_be_read_fails_all_its_entries() -> None:
    values: list[WeirError] = unpack_cells(Cells(together=Together(3, b"garbage", [])), None, InvalidRequest)
    assert [type(value) for value in values] == [InvalidRequest] * 3
    assert len(set(map(id, values))) == 3
    assert "cannot be unpickled" in values[0].message


def test_a_reference_without_an_arena() -> None:
    with pytest.raises(ValueError, match="no arena"):
        unpack_cells(Cells(inline=[None], apart=[Placed(0, (0, 1))]), None, InvalidRequest)


def test_refs_are_all_that_lies_in_the_arena() -> None:
    cells = msgspec.convert([[None, None], [2, [0, 1], [[2, 3], b""]], [[0, 0, [4, 5]], [1, 1, [6, 7], [b""]]]], Cells)
    assert cells.refs() == [(0, 1), (2, 3), (4, 5), (6, 7)]


class Dressed(dict[str, int]):
    def as_plain(self) -> dict[str, int]:
        return dict(self)


def test_a_value_that_says_so_travels_as_something_plain() -> None:
    cells = packed([Dressed(a=1), {"b": 2}])
    assert cells.together is not None
    first, second = unpack_cells(cells, None, InvalidRequest)
    assert type(first) is dict
    assert (first, second) == ({"a": 1}, {"b": 2})


LARGE = LARGE_BYTES // 4


class Memory:
    """Places and Fetch in one: `room` places, one after the other."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.places: dict[Ref, bytes] = {}
        self._end = 0

    def place(self, payload: Any) -> Ref | None:
        if len(self.places) == self.room:
            return None
        raw = bytes(payload)
        ref = (self._end, len(raw))
        self._end += len(raw)
        self.places[ref] = raw
        return ref

    def take_back(self, ref: Ref) -> None:
        del self.places[ref]

    def buffer(self, ref: Ref) -> bytes:
        return self.places[ref]

    def cell(self, ref: Ref) -> bytes:
        return self.places[ref]


def large(value: float, *shape: int, dtype: Any = numpy.float32) -> Any:
    return numpy.full(shape or (1, LARGE), value, dtype)


def there_and_back(values: list[Any], memory: Memory) -> tuple[Cells, list[Any]]:
    cells = pack_cells(values, memory, InvalidRequest)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(cells), type=Cells)
    assert sorted(travelled.refs()) == sorted(memory.places)
    return cells, unpack_cells(travelled, memory, InvalidRequest)


def unchanged(values: list[Any]) -> Cells:
    """Return how `values` travel, of which the same must arrive."""
    cells, came = there_and_back(values, Memory())
    assert repr(came) == repr(values)
    return cells


def test_alike() -> None:
    values = [{"a": large(index), "b": large(-index, 2, 3, LARGE, dtype=numpy.int64)} for index in range(3)]
    cells, came = there_and_back(values, Memory())
    assert cells.alike is not None and cells.together is None and len(cells.alike.refs) == 6
    for sent, received in zip(values, came, strict=True):
        assert list(received) == ["a", "b"]
        for name in sent:
            assert (received[name].dtype, received[name].shape) == (sent[name].dtype, sent[name].shape)
            numpy.testing.assert_array_equal(received[name], sent[name])


OTHERS: dict[str, list[Any]] = {
    "small": [{"a": numpy.zeros(3)}],
    "one of them small": [{"a": large(1), "b": numpy.zeros(3)}],
    "no arrays": [{}],
    "a value that is none": [{"a": large(1)}, {"a": 5}],
    "other shapes": [{"a": large(1)}, {"a": large(1, 2, LARGE)}],
    "other datatypes": [{"a": large(1)}, {"a": large(1, dtype=numpy.int32)}],
    "other names": [{"a": large(1)}, {"b": large(1)}],
    "more names": [{"a": large(1)}, {"a": large(1), "b": large(2)}],
    "objects": [{"a": numpy.array([b"x"] * LARGE, object)}],
    "not contiguous": [{"a": large(1, LARGE, 2).T}],
}


@subcases("name", OTHERS)
def test_all_else_travels_as_before(name: str) -> None:
    assert unchanged(OTHERS[name]).alike is None


def test_without_room_for_all_none_stays() -> None:
    memory = Memory(room=1)
    cells, came = there_and_back([{"a": large(1)}, {"a": large(2)}], memory)
    assert cells.alike is None
    assert [value["a"][0, 0] for value in came] == [1, 2]


def test_what_cannot_be_had_again_is_an_error_for_each() -> None:
    cells = pack_cells([{"a": large(1)}, {"a": large(2)}], Memory(), InvalidRequest)
    came = unpack_cells(cells, None, InvalidRequest)
    assert [type(value) for value in came] == [InvalidRequest] * 2


SMALL: dict[str, list[Any]] = {
    "one": [{"a": numpy.arange(3.0)}],
    "several": [{"a": numpy.full((rows, 2), rows, numpy.int32), "b": numpy.array([[rows > 1]])} for rows in (1, 2, 5)],
    "another order of names": [
        {"a": numpy.zeros(1), "b": numpy.ones(1, int)}, {"b": numpy.zeros(2, int), "a": numpy.ones(1)},
    ],
    "without elements, or dimensions": [{"a": numpy.zeros((0, 3)), "b": numpy.array(7)}],
    "another byte order": [{"a": numpy.arange(3, dtype=">i4")}],
    "part of another array": [{"a": numpy.arange(6).reshape(3, 2)[1:2]}],
    "half as long": [{"a": numpy.zeros(LARGE - 1, numpy.float32), "b": numpy.zeros(1, numpy.float16)}],
}  # fmt: skip


@subcases("name", SMALL)
def test_small_arrays_travel_as_their_bytes_and_may_be_written_to(name: str) -> None:
    values = SMALL[name]
    cells, came = there_and_back(values, Memory())
    assert cells.small is not None and cells.together is None
    assert len(came) == len(values)
    for sent, received in zip(values, came, strict=True):
        assert received.keys() == sent.keys()
        for key, array in received.items():
            assert (array.dtype, array.shape, array.flags.writeable) == (sent[key].dtype, sent[key].shape, True)
            numpy.testing.assert_array_equal(array, sent[key])


@subcases("name", SMALL)
def test_small_arrays_alone_travel_as_their_bytes_too(name: str) -> None:
    values = [value["a"] for value in SMALL[name]]
    cells, came = there_and_back(values, Memory())
    assert cells.small is not None and cells.together is None
    for sent, received in zip(values, came, strict=True):
        assert (received.dtype, received.shape, received.flags.writeable) == (sent.dtype, sent.shape, True)
        numpy.testing.assert_array_equal(received, sent)


NOT_SMALL: dict[str, list[Any]] = {
    "arrays, one of them large": [numpy.zeros(1, numpy.float32), large(1)],
    "arrays of other datatypes": [numpy.zeros(1), numpy.zeros(1, int)],
    "an array that is not contiguous": [numpy.zeros((3, 2)).T],
    "an array of objects": [numpy.array([b"x"], object)],
    "an array of a class of its own": [numpy.ma.masked_array([1, 2], [False, True])],
    "numbers of numpy": [numpy.float32(1)],
    "no arrays": [{}],
    "none, then some": [{}, {"a": numpy.zeros(1)}],
    "large": [{"a": large(1)}, {"a": numpy.zeros(1, numpy.float32)}],
    "one value that is none": [{"a": numpy.zeros(1), "b": 5}],
    "a later value that is none": [{"a": numpy.zeros(1)}, {"a": 5}],
    "other datatypes": [{"a": numpy.zeros(1)}, {"a": numpy.zeros(1, int)}],
    "more names": [{"a": numpy.zeros(1)}, {"a": numpy.zeros(1), "b": numpy.zeros(1)}],
    "other names": [{"a": numpy.zeros(1)}, {"b": numpy.zeros(1)}],
    "a name that is none": [{5: numpy.zeros(1)}],
    "objects": [{"a": numpy.array([b"x"], object)}],
    "times": [{"a": numpy.zeros(1, "M8[s]")}],
    "not contiguous": [{"a": numpy.zeros((3, 2)).T}],
    "a class of its own": [{"a": numpy.ma.masked_array([1, 2], [False, True])}],
}


@subcases("name", NOT_SMALL)
def test_what_is_not_small_arrays_travels_as_before(name: str) -> None:
    assert unchanged(NOT_SMALL[name]).small is None


@pytest.mark.parametrize("values", [[{"a": numpy.zeros(1)}, {"a": numpy.zeros(2)}], [numpy.zeros(1), numpy.zeros(2)]])
def test_small_arrays_that_cannot_be_had_again_are_an_error_for_each(values: list[Any]) -> None:
    cells = pack_cells(values, None, InvalidRequest)
    assert cells.small is not None
    cells.small.shapes[1] = (300,)
    came = unpack_cells(cells, None, InvalidRequest)
    assert [type(value) for value in came] == [InvalidRequest] * 2


class OwnError(InvalidRequest):
    def __init__(self, colour: str) -> None:
        super().__init__(f"{colour} is no colour")
        self.colour = colour


def _local_exception() -> Exception:
    class Local(Exception):
        pass

    return Local("x")


@pytest.mark.parametrize(
    "error",
    [
        WeirError(),
        InvalidRequest("wrong"),
        ValidationFailed("wrong", details=[{"loc": ["a", 0], "msg": "no", "type": "int"}]),
        Overloaded("full", retry_after=1.5),
        ModelCrashed("gone", original_type="builtins.OSError", remote_traceback="Traceback ..."),
        OwnError("loud"),
    ],
    ids=repr,
)
def test_comes_back_whole(error: WeirError) -> None:
    back = unpack_error(pack_error(error))
    assert type(back) is type(error)
    assert back.__dict__ == error.__dict__
    assert str(back) == str(error)


def test_the_cause_comes_along() -> None:
    error = ModelError("raised", original_type="KeyError")
    error.__cause__ = KeyError("x")
    back = unpack_error(pack_error(error))
    assert isinstance(back.__cause__, KeyError)
    assert back.__cause__.args == ("x",)


@pytest.mark.parametrize("cause", [_local_exception(), ValueError("x" * MAX_CAUSE_BYTES)])
def test_a_cause_that_cannot_travel_stays_behind(cause: Exception) -> None:
    error = ModelError("raised", original_type="X")
    error.__cause__ = cause
    back = unpack_error(pack_error(error))
    assert back.__cause__ is None
    assert back.message == "raised"


def test_details_that_cannot_be_pickled_come_as_their_repr() -> None:
    back = unpack_error(pack_error(Overloaded("full", details=lambda: 0, retry_after=2.0)))
    assert "<lambda>" in back.details
    assert isinstance(back, CapacityError)
    assert back.retry_after == 2.0


def test_a_class_that_is_not_there_becomes_the_nearest_of_ours() -> None:
    failure = pack_error(OwnError("loud"))
    failure.own_class = b"cnowhere\nNothing\n."
    back = unpack_error(failure)
    assert type(back) is InvalidRequest
    assert str(back) == "loud is no colour"
    local = unpack_error(pack_error(_local_class()("here")))
    assert type(local) is RequestError
    assert str(local) == "here"


def _local_class() -> type[RequestError]:
    class Local(RequestError):
        pass

    return Local


@subcases("kind", ["Any", "nothing", "__name__"])
def test_no_error_of_ours(kind: str) -> None:
    with pytest.raises(ValueError, match="no error of Weir's"):
        unpack_error(Failure(kind, b""))


@pytest.mark.parametrize("state", [b"", pickle.dumps(3)])
def test_a_state_that_was_lost(state: bytes) -> None:
    back: Any = unpack_error(Failure("InvalidRequest", state))
    assert str(back) == "(lost on the way)"


class Coded(Exception):
    def __init__(self, code: int, *, text: Any) -> None:
        super().__init__(code, text)
        self.code = code
        self.held = lambda: code  # cannot be pickled


@pytest.mark.parametrize("text", ["seven", pytest, (lambda: 0)], ids=["plain", "module", "function"])
def test_a_cause_whose_constructor_takes_other_arguments_keeps_its_class(text: Any) -> None:
    error = ModelError("broken")
    error.__cause__ = Coded(7, text=text)
    cause = unpack_error(pack_error(error)).__cause__
    assert isinstance(cause, Coded)
    assert cause.code == 7
    assert cause.args == (7, text if text == "seven" else repr(text))
    assert not hasattr(cause, "held")


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


def test_a_pickle_refers_to_no_arena() -> None:
    with pytest.raises(ValueError, match="no arena"):
        unpickle((0, 40_000), [], None)


def test_numpy_is_not_imported_for_those_who_do_not_use_it() -> None:
    code = "import sys, weir.wire.frames, weir.workers.run.runner; assert 'numpy' not in sys.modules, 'numpy'"
    subprocess.run([sys.executable, "-c", code], check=True)
