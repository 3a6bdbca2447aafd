import pickle
from typing import Any

import pytest

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
from weir.wire.cells import MAX_CAUSE_BYTES, Failure, pack_error, unpack_error


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


@pytest.mark.parametrize("kind", ["Any", "nothing", "__name__"])
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
