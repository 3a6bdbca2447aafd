"""Every error that Weir raises or answers with.

    WeirError
    ├── RequestError               the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest         malformed, wrong shape, datatype or size
    │   ├── ValidationFailed       the schema refused it; `details` is the schema's own list of errors
    │   ├── ModelNotFound          names the models there are
    │   ├── TooLarge               refused before the body was read
    │   ├── MethodNotAllowed
    │   ├── UnsupportedMediaType
    │   ├── Unsupported            a call that this server does not offer
    │   ├── Conflict               contradicts what is running
    │   ├── Unauthorized           this call needs the API key or the control token
    │   └── Forbidden              who calls from there may not control this server
    ├── DeadlineExceeded           also when the deadline could no longer be met (refused early)
    ├── Cancelled                  the caller left
    ├── CapacityError              the server is at fault, for now; safe to send again after `retry_after`
    │   ├── Overloaded             the queue is full
    │   ├── ModelNotReady          loading, or failed; the message says which
    │   ├── Draining               the server is about to stop
    │   └── WorkerLost             the worker died, through no fault of this request
    ├── ModelError                 the model raised, or returned something it must not
    │   └── ModelCrashed           this request ended its worker process
    └── SettingsError              at start-up only: names the key, the value and the rule

Codes of HTTP and gRPC are not here: protocols/status.py has the one table.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, cast

MAX_MESSAGE = (
    4096  # characters of a message that leaves the server: 600 models are named in more than gRPC's clients take
)


def brief(value: Any, limit: int = 80) -> str:
    """Return the first `limit` characters of `repr(value)`.

    For texts and bytes, lists, tuples and dicts no more of the value is looked at than is shown: a stranger's may be as large as
    a body, and its whole `repr` ten times as large.
    """
    shown = ""
    for piece in _pieces(value, limit):
        shown += piece
        if len(shown) >= limit:
            break
    return shown[:limit]


def _pieces(value: Any, limit: int) -> Iterator[str]:
    kind = type(value)
    if kind is str or kind is bytes:
        yield repr(value[:limit])
    elif kind is list or kind is tuple:
        yield "[" if kind is list else "("
        for place, each in enumerate(value):
            yield ", " if place else ""
            yield from _pieces(each, limit)
        yield "]" if kind is list else ",)" if len(value) == 1 else ")"
    elif kind is dict:
        yield "{"
        for place, (key, each) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(each, limit)
        yield "}"
    else:
        yield repr(value)


def bounded(message: str, limit: int = MAX_MESSAGE) -> str:
    """Return `message`, or its beginning and how long it was, in at most `limit` characters and a few."""
    return message if len(message) <= limit else f"{message[:limit]}... ({len(message)} characters)"


class WeirError(Exception):
    """Base of all of Weir's errors.

    `message` names the thing, the value and the rule. `details` is a JSON-able value for machines, or None.
    """

    def __init__(self, message: str = "", *, details: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[WeirError], state: dict[str, Any]) -> WeirError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class RequestError(WeirError):
    """The request is at fault."""


class InvalidRequest(RequestError):
    """Malformed, or of the wrong shape, datatype or size."""


class ValidationFailed(RequestError):
    """The model's `Input` type refused the item; `details` is the validator's own list of errors."""


class ModelNotFound(RequestError):
    """No model of that name; the message names those there are."""


class TooLarge(RequestError):
    """Larger than a limit; refused before the body was read."""


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""


class UnsupportedMediaType(RequestError):
    """A content type or content coding that the model does not read."""


class Unsupported(RequestError):
    """A call that this server, or this kind of model over this protocol, does not offer."""


class Conflict(RequestError):
    """Contradicts what is running."""


class Unauthorized(RequestError):
    """The call needs the server's API key or control token, and came without it or with another one."""


class Forbidden(RequestError):
    """The call is not allowed from where the caller is, or not on this server."""


class DeadlineExceeded(WeirError, TimeoutError):
    """The deadline passed, or could no longer be met when the work would have started."""


class Cancelled(WeirError):
    """The caller left before the answer."""


class CapacityError(WeirError):
    """The server cannot do it now; the same request may succeed after `retry_after` seconds."""

    def __init__(self, message: str = "", *, details: Any = None, retry_after: float | None = None) -> None:
        super().__init__(message, details=details)
        self.retry_after = retry_after


class Overloaded(CapacityError):
    """The queue is full."""


class ModelNotReady(CapacityError):
    """The model is loading, or has failed; the message says why."""


class Draining(CapacityError):
    """The server finishes the requests that it has accepted, and accepts no more."""


class WorkerLost(CapacityError):
    """The worker died while this request was with it, through no fault of the request."""


class ModelError(WeirError):
    """The model raised, or returned something it must not.

    `original_type` is the qualified name of the exception that the model raised ("" when it raised none),
    `remote_traceback` the traceback in the worker. Where the exception's class can be imported here, the
    exception itself is `__cause__`.
    """

    told = False  # whether the observers of the model have been notified

    def __init__(
        self, message: str = "", *, details: Any = None, original_type: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message, details=details)
        self.original_type = original_type
        self.remote_traceback = remote_traceback


class ModelCrashed(ModelError):
    """This request ended its worker process, also when it was run alone."""


class SettingsError(WeirError):
    """A setting is wrong: the message names the key, the value and the rule."""


class _AsRaised:
    """Part of errors that are both a ModelError and what the model raised."""

    message: str

    def __str__(self) -> str:
        return self.message  # a KeyError's would be its repr

    def __reduce__(self) -> tuple[Any, ...]:
        plain = type(self).__mro__[2]  # such a class exists in this process alone
        return _rebuild, (plain, vars(self))


def for_caller(error: WeirError) -> WeirError:
    """Return `error` as code in this process is to catch it. The error of a model is also of the type that the model raised, where
    that is known here, with its attributes; and it notes the traceback in the worker, which is shown where it is not caught.

    `message`, `details` and `args` are Weir's. An exception that ends iterations, or more than itself, is no type to catch it by.
    """
    if not isinstance(error, ModelError):
        return error
    cause = error.__cause__
    while isinstance(cause, ModelError):  # of a step, where this is the error of a chain
        cause = cause.__cause__
    if isinstance(cause, Exception) and not isinstance(cause, (WeirError, StopIteration, StopAsyncIteration)):
        error = _as_raised(error, cause)
    noted = getattr(error, "__notes__", ())
    if error.remote_traceback and not noted and (cause is None or cause.__traceback__ is None):
        error.add_note(error.remote_traceback.rstrip())
    return error


def _as_raised(error: ModelError, cause: Exception) -> ModelError:
    if isinstance(error, _AsRaised):
        return error
    ours, raised = cast(Any, type(error)), cast(Any, type(cause))
    try:
        kind = _both(ours, raised)
        made = kind.__new__(kind)
    except Exception:  # a class may refuse to have subclasses, or to be made without what it wants
        return error
    Exception.__init__(made, error.message)
    made.__dict__.update({**vars(cause), **vars(error)})
    for name in _inner(raised):
        with suppress(Exception):
            setattr(made, name, getattr(cause, name))
    made.__cause__ = error.__cause__
    return made


@lru_cache(maxsize=256)
def _both(kind: Any, raised: Any) -> type[ModelError]:
    described = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_AsRaised, kind, raised), described)


@lru_cache(maxsize=256)
def _inner(kind: Any) -> list[str]:
    """Return the names of attributes that are not in an exception's dictionary, as `errno` of an OSError."""
    classes = [base for base in kind.__mro__ if base not in Exception.__mro__]
    kinds = MemberDescriptorType, GetSetDescriptorType
    return [
        name for base in classes for name, value in vars(base).items() if isinstance(value, kinds) and name[:2] != "__"
    ]
