"""Exceptions of a model as the errors that its callers get."""

import copy
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from weir.errors import ModelError, WeirError

# In a worker process these end it, which the server notices; anything else, a Rust panic or a CancelledError too,
# is the item's or the batch's.
ENDS_THE_PROCESS: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt)

# An exception may hold a whole array as its text; nobody reads more than this of it.
MAX_TEXT = 2_000
MAX_TRACEBACK = 50_000

Fault = Callable[[BaseException, Any], WeirError]


def model_error(what: str, error: BaseException) -> ModelError:
    """Return the ModelError for an exception that `what` (predict, postprocess, ...) raised; the cause is `error`."""
    failure = ModelError(
        f"{what} raised {type(error).__name__}: {_text(error)}",
        original_type=_qualified_name(type(error)),
        remote_traceback=_traceback(error),
    )
    failure.__cause__ = error
    return failure


def fault_of(what: str) -> Fault:
    """Return the function from an exception that `what` raised for an item to what becomes of the item: the exception
    itself if it is one of ours."""

    def fault(error: BaseException, _item: Any) -> WeirError:
        return error if isinstance(error, WeirError) else model_error(what, error)

    return fault


def copies(error: WeirError, count: int) -> list[WeirError]:
    """Return `error` for `count` callers, an object for each: they raise it independently of each other."""
    made = [error]
    for _ in range(count - 1):
        another = copy.copy(error)
        another.__cause__ = error.__cause__
        made.append(another)
    return made


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a __str__ that raises must not cost more than the text
        return "(its text cannot be had)"
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def _qualified_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _traceback(error: BaseException) -> str:
    """The traceback from the model's first line on, without ours above it."""
    try:
        lines = traceback.format_exception(type(error), error, _of_the_model(error.__traceback__))
        return "".join(lines)[:MAX_TRACEBACK]
    except Exception:  # as for _text
        return ""


def _of_the_model(frames: TracebackType | None) -> TracebackType | None:
    below = frames
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith("weir."):
        below = below.tb_next
    return below or frames
