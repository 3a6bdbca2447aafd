"""errors.py: what messages show of values that strangers choose, and how code in the same process catches errors of a model."""

import copy
import pickle
import socket
import ssl
import traceback
import tracemalloc
from typing import Any

from tests.rings import subcases

from weir import errors
from weir.wire.status import http_code


@subcases(
    "value",
    [
        None, True, 12, 1.5, "", "it's", 'a "b"', b"x", [], (), {}, (1,), [1, "a", [None, {}]], {"a": [1, (2, 3)], 1: {}},
        "x" * 100, ["y" * 100], list(range(100)), {"k" * 100: 1},
    ],
)  # fmt: skip
def test_it_is_the_beginning_of_the_repr(value: Any) -> None:
    for limit in (7, 80):
        assert errors.brief(value, limit) == f"{value!r:.{limit}}"


def test_no_more_of_a_value_is_looked_at_than_is_shown() -> None:
    nested: Any = "deep"
    for _ in range(100_000):
        nested = [nested]
    wide = ["\U000e0001" * 10_000_000, *range(1_000_000)]
    tracemalloc.start()
    try:
        assert errors.brief(nested) == "[" * 80
        assert len(errors.brief(wide)) == 80
        assert errors.brief({"a": wide}).startswith("{'a': [")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    while isinstance(nested, list):  # freed one by one: Python's own way is recursive
        (nested,) = nested


def test_messages_are_bounded() -> None:
    assert errors.bounded("short") == "short"
    assert errors.bounded("x" * 5000) == "x" * 4096 + "... (5000 characters)"
    assert errors.bounded("abcdef", 3) == "abc... (6 characters)"


class Picky(Exception):
    """Has a constructor and attributes of its own."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(code)
        self.code = code
        self.hint = hint


class Slotted(ValueError):
    __slots__ = ("place",)

    place: int


class Sealed(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no")


def raised(cause: BaseException | None, **options: Any) -> errors.WeirError:
    error = errors.ModelError(f"predict raised {type(cause).__name__}: {cause}", **options)
    error.__cause__ = cause
    return errors.for_caller(error)


def slotted() -> Slotted:
    made = Slotted("no")
    made.place = 7
    return made


@subcases(
    "cause",
    [
        ValueError("no"), KeyError("key"), FileNotFoundError(2, "not there", "weights.bin"), TimeoutError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), SyntaxError("no", ("f", 1, 2, "t")), Picky(3, hint="h"), slotted(),
    ],
)  # fmt: skip
def test_an_error_is_both_what_the_model_raised_and_ours(cause: Exception) -> None:
    error = raised(cause, original_type="x", remote_traceback="trace", details={"a": 1})
    assert isinstance(error, errors.ModelError)
    assert isinstance(error, type(cause))
    assert (error.original_type, error.remote_traceback, error.details) == ("x", "trace", {"a": 1})
    assert error.__cause__ is cause
    assert str(error) == error.message == error.args[0] == f"predict raised {type(cause).__name__}: {cause}"
    for name in ("errno", "filename", "encoding", "start", "lineno", "code", "hint", "place"):
        assert getattr(error, name, None) == getattr(cause, name, None)
    assert (type(error).__name__, type(error).__module__, http_code(error)) == ("ModelError", "weir.errors", 500)
    assert type(raised(cause)) is type(error)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is errors.ModelError
        assert (again.message, again.details) == (error.message, error.details)


@subcases(
    "cause",
    [
        None, StopIteration(), StopAsyncIteration(), SystemExit(1), KeyboardInterrupt(), Sealed(), errors.InvalidRequest("x"),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    ],
)  # fmt: skip
def test_what_nobody_should_catch_it_by_is_the_cause_alone(cause: BaseException | None) -> None:
    error = raised(cause)
    assert type(error) is errors.ModelError
    assert error.__cause__ is cause


def test_other_errors_are_as_they_were() -> None:
    for error in (errors.InvalidRequest("x"), errors.ModelCrashed("y")):
        assert errors.for_caller(error) is error


def test_the_traceback_of_the_worker_is_shown_once() -> None:
    error = raised(ValueError("no"), remote_traceback='  File "model.py", line 3, in predict\n')
    assert errors.for_caller(error) is error
    shown = "".join(traceback.format_exception(error))
    assert shown.count('File "model.py", line 3, in predict') == 1


def test_a_cause_with_a_traceback_of_its_own_needs_no_note() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        cause = error
    assert not hasattr(raised(cause, remote_traceback="trace"), "__notes__")


def test_an_error_of_an_element_says_which_as_data() -> None:
    plain = errors.InvalidRequest("must be short", details={"a": 1})
    assert (plain.field, plain.index, plain.renamed({"texts": "inputs"})) == ("", None, plain)
    located = plain.at("texts", 3)
    assert (located.field, located.index, located.rule) == ("texts", 3, "must be short")
    assert located.message == str(located) == "texts[3]: must be short" and located.details == {"a": 1}
    assert located.__cause__ is plain and plain.message == "must be short"
    renamed = located.renamed({"texts": "inputs"}).at("inputs", 4)
    assert type(renamed) is errors.InvalidRequest
    assert (renamed.message, renamed.field, renamed.index) == ("inputs[4]: must be short", "inputs", 4)
    back = pickle.loads(pickle.dumps(renamed))
    assert (back.message, back.field, back.index, back.rule) == (renamed.message, "inputs", 4, "must be short")
    texts_of_callers = errors.InvalidRequest("texts[0]: as a caller's own text may begin")
    assert texts_of_callers.renamed({"texts": "inputs"}) is texts_of_callers
    assert located.renamed({"dimensions": "output_dimension"}) is located
    busy = errors.Overloaded("full", retry_after=2.0).at("texts", 0)
    assert (type(busy), busy.retry_after) == (errors.Overloaded, 2.0)


def test_an_error_of_a_field_is_renamed_without_its_message() -> None:
    error = errors.InvalidRequest("must be 1 to 8", details={"a": 1}).of("dimensions", "9")
    assert (error.field, error.message, str(error)) == ("dimensions", "dimensions=9: must be 1 to 8", error.message)
    renamed = error.renamed({"texts": "inputs", "dimensions": "output_dimension"})
    assert (renamed.field, str(renamed)) == ("output_dimension", "output_dimension=9: must be 1 to 8")
    assert (renamed.details, renamed.__cause__) == ({"a": 1}, error)
    assert error.at("texts", 2).message == "texts[2]: dimensions=9: must be 1 to 8"
    callers = errors.InvalidRequest("dimensions=: as a caller's own text may begin")
    assert callers.renamed({"dimensions": "output_dimension"}) is callers


def test_an_error_about_a_field_that_is_renamed_keeps_its_message() -> None:
    error = errors.InvalidRequest("prompt, instruction: only one of them may be given").about("instruction")
    renamed = error.renamed({"instruction": "task"})
    assert (renamed.field, renamed.message) == ("task", error.message)


@subcases(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "No such file or directory", "weir.toml"), "No such file or directory"),
        (OSError(111, "Connect call failed ('127.0.0.1', 9)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (
            ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
            "[SSL: WRONG_VERSION_NUMBER] wrong version number",
        ),
        (KeyError("table"), "'table' is missing"),
        (ValueError("no number"), "no number"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_reason_has_neither_number_nor_file(error: Exception, reason: str) -> None:
    assert errors.reason_of(error) == reason
