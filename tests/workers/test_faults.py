from weir.errors import InvalidRequest
from weir.workers.faults import MAX_TEXT, MAX_TRACEBACK, copies, fault_of, model_error


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_a_model_error_names_step_type_and_text_and_keeps_the_exception() -> None:
    error = caught(KeyError("x"))
    failure = model_error("predict", error)
    assert failure.message == "predict raised KeyError: 'x'"
    assert failure.original_type == "KeyError"
    assert "test_faults.py" in failure.remote_traceback
    assert failure.__cause__ is error
    assert model_error("predict", caught(Rude())).original_type.endswith("test_faults.Rude")


def test_an_exception_whose_text_raises() -> None:
    assert model_error("predict", caught(Rude())).message == "predict raised Rude: (its text cannot be had)"


def test_a_text_without_end_is_cut() -> None:
    failure = model_error("predict", caught(ValueError("x" * 10_000_000)))
    assert len(failure.message) < MAX_TEXT + 100
    assert len(failure.remote_traceback) <= MAX_TRACEBACK
    assert "test_faults.py" in failure.remote_traceback


def test_our_own_errors_are_passed_through() -> None:
    error = InvalidRequest("too loud")
    assert fault_of("preprocess")(error, 3) is error
    assert fault_of("preprocess")(ValueError("no"), 3).message == "preprocess raised ValueError: no"


def test_copies_are_objects_of_their_own_with_all_that_is_in_them() -> None:
    error = model_error("predict", caught(KeyError("x")))
    first, second, third = copies(error, 3)
    assert first is error
    assert second is not third
    assert type(second) is type(error)
    assert second.__dict__ == error.__dict__
    assert second.__cause__ is error.__cause__
