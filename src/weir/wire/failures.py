"""WeirErrors on their way between processes, with the exception that caused them where it can travel."""

import pickle
from typing import Any

import msgspec

from weir import errors
from weir.errors import WeirError

# A cause whose pickle is larger than this (it holds the batch, say) stays where it is.
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
