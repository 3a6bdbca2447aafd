import pickle
import subprocess
import sys
from typing import Any

import msgspec
import numpy
import pytest
from tests.rings import subcases
from tests.wire.arena import FakeArena

from weir import errors
from weir.errors import InvalidRequest, ModelError, WeirError
from weir.messages import JSON, OBJECT
from weir.wire.cells import (
    LARGE_BYTES,
    MAX_CAUSE_BYTES,
    Cells,
    Failure,
    Pickled,
    Placed,
    Together,
    pack_cells,
    pack_error,
    unpack_cells,
    unpack_error,
    unpickle,
)


def come_back(values: list[Any], encodings: str | list[str] = OBJECT) -> list[Any]:
    return unpack_cells(pack_cells(values, None, InvalidRequest, encodings), None, InvalidRequest)


def test_encoded_bodies_come_back_as_bytes() -> None:
    assert come_back([memoryview(b"1"), bytearray(b"2"), b"3"], JSON) == [b"1", b"2", b"3"]
    mixed = come_back([memoryview(b"1"), bytearray(b"2")], [JSON, OBJECT])
    assert (mixed, type(mixed[1])) == ([b"1", bytearray(b"2")], bytearray)


def test_one_pickle_that_cannot_be_read_fails_all_its_entries() -> None:
    values: list[WeirError] = unpack_cells(Cells(together=Together(3, b"garbage", [])), None, InvalidRequest)
    assert [type(value) for value in values] == [InvalidRequest] * 3 and len(set(map(id, values))) == 3
    assert "cannot be unpickled" in values[0].message


def test_a_reference_without_an_arena() -> None:
    with pytest.raises(ValueError, match="no arena"):
        unpack_cells(Cells(inline=[None], apart=[Placed(0, (0, 1))]), None, InvalidRequest)
    with pytest.raises(ValueError, match="no arena"):
        unpickle((0, 40_000), [], None)


def test_refs_are_all_that_lies_in_the_arena() -> None:
    cells = msgspec.convert([[None, None], [2, [0, 1], [[2, 3], b""]], [[0, 0, [4, 5]], [1, 1, [6, 7], [b""]]]], Cells)
    assert cells.refs() == [(0, 1), (2, 3), (4, 5), (6, 7)]


class Dressed(dict[str, int]):
    def as_plain(self) -> dict[str, int]:
        return dict(self)


def test_a_value_that_says_so_travels_as_something_plain() -> None:
    first, second = come_back([Dressed(a=1), {"b": 2}])
    assert (type(first), first, second) == (dict, {"a": 1}, {"b": 2})


LARGE = LARGE_BYTES // 4


def large(value: float, *shape: int, dtype: Any = numpy.float32) -> Any:
    return numpy.full(shape or (1, LARGE), value, dtype)


def there_and_back(values: list[Any], arena: FakeArena) -> tuple[Cells, list[Any]]:
    cells = pack_cells(values, arena, InvalidRequest)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(cells), type=Cells)
    assert sorted(travelled.refs()) == sorted(arena.blocks)
    return cells, unpack_cells(travelled, arena, InvalidRequest)


ONE = numpy.zeros(1)
MASKED = numpy.ma.masked_array([1, 2], [False, True])
# As the bytes of arrays, in the arena or among those of the column; in one pickle; or each by itself.
FORMS: dict[str, Any] = {
    "alike": [[{"a": large(index), "b": large(-index, 2, 3, LARGE, dtype=numpy.int64)} for index in range(3)]],
    "small": [
        [{"a": numpy.full((rows, 2), rows, numpy.int32), "b": numpy.array([[rows > 1]])} for rows in (1, 2, 5)],
        [{"a": ONE, "b": numpy.ones(1, int)}, {"b": numpy.zeros(2, int), "a": numpy.ones(1)}],
        [{"a": numpy.zeros((0, 3)), "b": numpy.array(7)}],
        [{"a": numpy.arange(3, dtype=">i4")}],
        [{"a": numpy.arange(6).reshape(3, 2)[1:2]}],
        [{"a": numpy.zeros(LARGE - 1, numpy.float32), "b": numpy.zeros(1, numpy.float16)}],
        *[[numpy.full((rows, 2), rows, numpy.int32) for rows in (1, 2, 5)], [numpy.array(7)], [numpy.zeros((0, 3))]],
    ],
    "together": [
        *[[], [{}], [1, b"2", [3.0, {"a": None}]], [numpy.zeros(2), numpy.float32(1), 5], [numpy.float32(1)]],
        *[
            [{"a": large(1), "b": numpy.zeros(3)}],
            [{"a": large(1)}, {"a": 5}],
            [{}, {"a": ONE}],
            [{"a": ONE}, {"a": 5}],
        ],
        *[[{"a": large(1)}, {"a": large(1, 2, LARGE)}], [{"a": large(1)}, {"a": large(1, dtype=numpy.int32)}]],
        *[[{"a": large(1)}, {"b": large(1)}], [{"a": large(1)}, {"a": large(1), "b": large(2)}]],
        *[[{"a": array}] for array in (large(1, LARGE, 2).T, numpy.zeros((3, 2)).T, MASKED, numpy.zeros(1, "M8[s]"))],
        *[[{"a": numpy.array([b"x"] * count, object)}] for count in (1, LARGE)],
        *[[array] for array in (numpy.zeros((3, 2)).T, numpy.array([b"x"], object))],
        *[[ONE, numpy.zeros(1, int)], [numpy.zeros(1, numpy.float32), large(1)]],
        *[[{"a": large(1)}, {"a": numpy.zeros(1, numpy.float32)}], [{"a": ONE, "b": 5}], [{5: ONE}]],
        *[[{"a": ONE}, {"a": numpy.zeros(1, int)}], [{"a": ONE}, {"a": ONE, "b": ONE}], [{"a": ONE}, {"b": ONE}]],
    ],
    "apart": [[1, InvalidRequest("no")], [1, {"a": JSON, "b": InvalidRequest}], [MASKED]],
    "inline": [[b"1", b"2"]],
}


@subcases(("form", "values"), [(form, values) for form, columns in FORMS.items() for values in columns])
def test_what_is_sent_comes_back_whichever_form_it_takes(form: str, values: list[Any]) -> None:
    cells, came = there_and_back(values, FakeArena())
    assert getattr(cells, form) is not None
    assert form == "small" or repr(came) == repr(values)
    for sent, received in zip(values, came, strict=True):
        if isinstance(sent, dict):
            assert received.keys() == sent.keys()
        arrays = [(sent[key], received[key]) for key in sent] if isinstance(sent, dict) else [(sent, received)]
        for before, after in arrays:
            if isinstance(before, numpy.ndarray):
                assert (after.dtype, after.shape) == (before.dtype, before.shape)
                numpy.testing.assert_array_equal(after, before)
                assert form != "small" or after.flags.writeable


def test_without_room_for_all_none_stays() -> None:
    cells, came = there_and_back([{"a": large(1)}, {"a": large(2)}], FakeArena(LARGE_BYTES + 1))
    assert cells.alike is None
    assert [value["a"][0, 0] for value in came] == [1, 2]


def test_arrays_that_cannot_be_had_again_are_an_error_for_each() -> None:
    cells = pack_cells([{"a": large(1)}, {"a": large(2)}], FakeArena(), InvalidRequest)
    assert [type(value) for value in unpack_cells(cells, None, InvalidRequest)] == [InvalidRequest] * 2
    columns: list[list[Any]] = [[{"a": numpy.zeros(1)}, {"a": numpy.zeros(2)}], [numpy.zeros(1), numpy.zeros(2)]]
    for values in columns:
        cells = pack_cells(values, None, InvalidRequest)
        assert cells.small is not None
        cells.small.shapes[1] = (300,)
        assert [type(value) for value in unpack_cells(cells, None, InvalidRequest)] == [InvalidRequest] * 2


class OwnError(InvalidRequest):
    def __init__(self, colour: str) -> None:
        super().__init__(f"{colour} is no colour")
        self.colour = colour


@subcases(
    "error",
    [
        WeirError(),
        InvalidRequest("wrong"),
        errors.ValidationFailed("wrong", details=[{"loc": ["a", 0], "msg": "no", "type": "int"}]),
        errors.Overloaded("full", retry_after=1.5),
        errors.ModelCrashed("gone", original_type="builtins.OSError", remote_traceback="Traceback ..."),
        OwnError("loud"),
    ],
)
def test_an_error_comes_back_whole(error: WeirError) -> None:
    back = unpack_error(pack_error(error))
    assert (type(back), back.__dict__, str(back)) == (type(error), error.__dict__, str(error))


def caused(cause: Exception) -> BaseException | None:
    """Return what comes of a cause at the other side."""
    error = ModelError("raised", original_type="KeyError")
    error.__cause__ = cause
    back = unpack_error(pack_error(error))
    assert back.message == "raised"
    return back.__cause__


def local_class(base: type) -> Any:
    return type("Local", (base,), {"__qualname__": "local_class.Local"})


def test_the_cause_comes_along_if_it_can_travel() -> None:
    cause = caused(KeyError("x"))
    assert isinstance(cause, KeyError) and cause.args == ("x",)
    assert caused(local_class(Exception)("x")) is None
    assert caused(ValueError("x" * MAX_CAUSE_BYTES)) is None


class Coded(Exception):
    def __init__(self, code: int, *, text: Any) -> None:
        super().__init__(code, text)
        self.code = code
        self.held = lambda: code  # cannot be pickled


@subcases("text", ["seven", pytest, (lambda: 0)])
def test_a_cause_whose_constructor_takes_other_arguments_keeps_its_class(text: Any) -> None:
    cause = caused(Coded(7, text=text))
    assert isinstance(cause, Coded)
    assert (cause.code, cause.args) == (7, (7, text if text == "seven" else repr(text)))
    assert not hasattr(cause, "held")


def test_details_that_cannot_be_pickled_come_as_their_repr() -> None:
    back = unpack_error(pack_error(errors.Overloaded("full", details=lambda: 0, retry_after=2.0)))
    assert isinstance(back, errors.CapacityError)
    assert "<lambda>" in back.details and back.retry_after == 2.0


def test_a_class_that_is_not_there_becomes_the_nearest_of_ours() -> None:
    failure = pack_error(OwnError("loud"))
    failure.own_class = b"cnowhere\nNothing\n."
    for travelled, kind, text in (
        (failure, InvalidRequest, "loud is no colour"),
        (pack_error(local_class(errors.RequestError)("here")), errors.RequestError, "here"),
        (Failure("InvalidRequest", b""), InvalidRequest, "(lost on the way)"),
        (Failure("InvalidRequest", pickle.dumps(3)), InvalidRequest, "(lost on the way)"),
    ):
        back = unpack_error(travelled)
        assert (type(back), str(back)) == (kind, text)


@subcases("kind", ["Any", "nothing", "__name__"])
def test_no_error_of_ours(kind: str) -> None:
    with pytest.raises(ValueError, match="no error of Weir's"):
        unpack_error(Failure(kind, b""))


class OwnArray(numpy.ndarray[Any, Any]):
    pass


PLAIN: list[Any] = [[1, {"b": (2.5, None)}, {3}, bytearray(b"x")], numpy.zeros(3), {"x": numpy.array(["a"])}]
FOREIGN = [
    numpy.array([FakeArena()], object),
    numpy.zeros(3).view(OwnArray),
    [FakeArena()],
    {"deep": [print, FakeArena]},
]


@subcases("value", [*PLAIN, *FOREIGN])
def test_foreign_tells_whether_the_other_side_needs_somebodys_classes(value: Any) -> None:
    pickled = Pickled(value, None)
    assert pickled.foreign is any(value is each for each in FOREIGN)
    assert repr(unpickle(pickled.data, pickled.buffers, None))[:20] == repr(value)[:20]


def test_large_buffers_and_large_pickles_lie_in_the_arena() -> None:
    arena = FakeArena()
    value = [numpy.zeros(LARGE_BYTES, numpy.uint8), list(range(LARGE_BYTES)), numpy.zeros(8)]
    pickled = Pickled(value, arena)
    assert len(arena.blocks) == 2
    for after, before in zip(unpickle(pickled.data, pickled.buffers, arena), value, strict=True):
        numpy.testing.assert_array_equal(after, before)
    pickled.take_back()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Pickled([numpy.zeros(LARGE_BYTES, numpy.uint8), lambda: 0], arena)
    assert not arena.blocks


def test_numpy_is_not_imported_for_those_who_do_not_use_it() -> None:
    code = "import sys, weir.wire.frames, weir.workers.run.runner; assert 'numpy' not in sys.modules, 'numpy'"
    subprocess.run([sys.executable, "-c", code], check=True)
