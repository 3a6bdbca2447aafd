"""All errors that Weir raises or sends as responses.

    WeirError
    ├── RequestError               the request is at fault; sending it again unchanged fails again
    │   ├── InvalidRequest         malformed, wrong shape, datatype or size
    │   ├── ValidationFailed       the schema refused it; `details` is the schema's own list of errors
    │   ├── NotFound               nothing has this name or id
    │   │   └── ModelNotFound      names the models that exist
    │   ├── TooLarge               refused before the body was read
    │   ├── MethodNotAllowed
    │   ├── UnsupportedMediaType
    │   ├── Unsupported            a call that this server does not offer
    │   ├── Conflict               contradicts what is running
    │   ├── Unauthorized           this call needs the API key or the control token
    │   └── Forbidden              the caller may not do this from where it is, or not on this server
    ├── DeadlineExceeded           the server was late, or could not be in time (refused early)
    │   └── RequestTimeout         the client took too long to send its request
    ├── Cancelled                  the caller disconnected
    ├── CapacityError              the server is at fault, for now; safe to send again after `retry_after`
    │   ├── Overloaded             the queue is full
    │   ├── ModelNotReady          loading, or failed; the message says which
    │   ├── Draining               the server or the model is shutting down
    │   └── WorkerLost             the worker died, but not because of this request
    ├── ModelError                 the model raised, or returned something it must not
    │   └── ModelCrashed           this request ended its worker process
    └── SettingsError              at start-up only: names the key, the value and the rule

The codes of HTTP and gRPC are in wire/status.py.
"""

import copy
import errno
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Self, cast

# Characters of a message that leaves the server. A list of 600 models, for example, is more than clients of gRPC accept.
MAX_MESSAGE = 4096


def brief(value: Any, limit: int = 80) -> str:
    """Return the first `limit` characters of `repr(value)`.

    Of strings, bytes, lists, tuples and dicts, only the part that is shown is read: a value from a request may be as large as its
    body, and its whole `repr` ten times as large.
    """
    shown = ""
    for piece in _pieces(value, limit):
        shown += piece
        if len(shown) >= limit:
            break
    return shown[:limit]


def kind_of(value: Any) -> str:
    """Return the name of the type of `value` with its article: an int, a list; and nothing for None."""
    if value is None:
        return "nothing (None)"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 item, 2 items, 2 processes."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def _pieces(value: Any, limit: int) -> Iterator[str]:
    kind = type(value)
    if kind is str or kind is bytes:
        yield repr(value[:limit])
    elif kind is list or kind is tuple:
        yield "[" if kind is list else "("
        for index, each in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(each, limit)
        yield "]" if kind is list else ",)" if len(value) == 1 else ")"
    elif kind is dict:
        yield "{"
        for index, (key, each) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(each, limit)
        yield "}"
    else:
        yield repr(value)


def bounded(message: str, limit: int = MAX_MESSAGE) -> str:
    """Return `message`; if it has more than `limit` characters, its first `limit` characters and its length."""
    return message if len(message) <= limit else f"{message[:limit]}... ({len(message)} characters)"


class WeirError(Exception):
    """The base class of all errors of Weir.

    `message` names the thing, the value and the rule. `details` is a JSON-able value for programs, or None.

    An error of one field of the request has `field`, its name, with which `message` begins if `leads`. An error of one element of a list also has `index`,
    the element's index, and `rule`, the message without both. Whoever knows the field by another name renames it; nothing reads the message.
    """

    field = ""
    leads = True
    index: int | None = None
    rule = ""
    reported = False  # whether the observers have been notified; see Service.notify
    ran = False  # whether a worker has run the request

    def __init__(self, message: str = "", *, details: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def at(self, field: str, index: int) -> Self:
        """Return a copy that says which element of the list `field` is at fault. This error, or its cause, is the cause of the copy."""
        located = copy.copy(self)
        located.rule = self.message if self.index is None else self.rule
        located.field, located.index = field, index
        located.message = f"{field}[{index}]: {located.rule}"
        located.args = (located.message,)
        located.__cause__ = self.__cause__ or self
        return located

    def of(self, field: str, value: str | None = None) -> Self:
        """Return this error as one of the field `field`, whose value reads `value`, if it is shown: its message begins with both."""
        self.field, self.message = field, f"{field if value is None else f'{field}={value}'}: {self.message}"
        self.args = (self.message,)
        return self

    def about(self, field: str) -> Self:
        """Return this error as one of the field `field`, with which its message does not begin, or not alone."""
        self.field, self.leads = field, False
        return self

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return a copy with the caller's name of the field, which `names` has under ours; the error itself if it is about none of them."""
        name = names.get(self.field)
        if name is None:
            return self
        named = copy.copy(self)
        named.field = name
        if self.leads:
            named.message = name + self.message[len(self.field) :]
        named.args = (named.message,)
        named.__cause__ = self.__cause__ or self
        return named

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[WeirError], state: dict[str, Any]) -> WeirError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class RequestError(WeirError):
    """The request is wrong: the caller must change it."""


class InvalidRequest(RequestError):
    """The request is malformed, or has the wrong shape, datatype or size."""


class ValidationFailed(RequestError):
    """The model's `Input` type refused the item; `details` is the validator's own list of errors."""


class NotFound(RequestError):
    """Nothing has the name or id that the request states, such as a file's or a batch's."""


class ModelNotFound(NotFound):
    """No model has this name; the message lists the available models."""


def unknown_model(name: str, available: Iterable[str], version: str = "") -> ModelNotFound:
    """Return the error for a model, or a version of one, that is not there; it names those that are."""
    what = f"version {version!r} of model {name!r}" if version else f"model {name!r}"
    return ModelNotFound(f"unknown {what}; available: {', '.join(dict.fromkeys(available)) or 'none'}")


class TooLarge(RequestError):
    """The request exceeds a size limit; it was refused before its body was read."""


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method."""


class UnsupportedMediaType(RequestError):
    """The model does not read this content type or content coding."""


class Unsupported(RequestError):
    """The server does not support this call, or not for this kind of model and protocol."""


class Conflict(RequestError):
    """The request contradicts what is running."""


class Unauthorized(RequestError):
    """The call lacks the server's API key or control token, or has a wrong one."""


class Forbidden(RequestError):
    """The call is not allowed from the caller's address, or not on this server."""


class DeadlineExceeded(WeirError, TimeoutError):
    """The deadline passed, or could no longer be met, so the request was dropped before it ran."""


class RequestTimeout(DeadlineExceeded):
    """The client took too long to send its request."""


class Cancelled(WeirError):
    """The caller disconnected or cancelled before the response was ready."""


class CapacityError(WeirError):
    """The server cannot serve the request now; the same request may succeed after `retry_after` seconds (None: unknown)."""

    def __init__(self, message: str = "", *, details: Any = None, retry_after: float | None = None) -> None:
        super().__init__(message, details=details)
        self.retry_after = retry_after


class Overloaded(CapacityError):
    """The queue is full."""


class ModelNotReady(CapacityError):
    """The model is loading or has failed; the message says which."""

    # Reads the description of the model, which has not been needed before. A request waits for that, and looks for the model again.
    read: Callable[[], Awaitable[None]] | None = None


def unread_model(name: str, read: Callable[[], Awaitable[None]]) -> ModelNotReady:
    """Return the error for a model whose description `read` will read."""
    error = ModelNotReady(f"model {name!r} is not ready: it has not been read yet")
    error.read = read
    return error


class Draining(CapacityError):
    """The server or the model is shutting down: it finishes accepted requests and accepts no new ones."""


_WAY_OUT = "try again later, or on another replica"


def draining(what: str = "the server", retry_after: float | None = None) -> Draining:
    """Return the error for a new request to `what`, the server or a model."""
    return Draining(f"{what} is shutting down and accepts no new requests; {_WAY_OUT}", retry_after=retry_after)


def stopped(what: str, before: str) -> Draining:
    """Return the error for a request that `what`, the server or a model, has accepted but not finished."""
    return Draining(f"{what} was stopped before {before}; {_WAY_OUT}")


class WorkerLost(CapacityError):
    """The worker died while it ran this request, for another reason."""


class ModelError(WeirError):
    """The model raised an exception or returned an invalid result.

    `original_type` is the qualified name of the exception that the model raised ("" if it raised none), and `remote_traceback` is
    the traceback in the worker. If the exception's class can be imported in this process, the exception is the `__cause__`.
    """

    def __init__(
        self, message: str = "", *, details: Any = None, original_type: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message, details=details)
        self.original_type = original_type
        self.remote_traceback = remote_traceback


class ModelCrashed(ModelError):
    """This request killed its worker process, even when it ran alone."""


class SettingsError(WeirError):
    """A setting is wrong: the message names the key, the value and the rule."""


class _AsRaised:
    """Base class of errors that are both a ModelError and of the type that the model raised."""

    message: str

    def __str__(self) -> str:
        return self.message  # KeyError would return its repr

    def __reduce__(self) -> tuple[Any, ...]:
        plain = type(self).__mro__[2]  # the combined class exists in this process only
        return _rebuild, (plain, vars(self))


def for_caller(error: WeirError) -> WeirError:
    """Return `error` in the form in which code in this process gets it.

    An error of a model also has the type and the attributes of the exception that the model raised, if that type is known here;
    but not StopIteration and the like, nor exceptions that are not an Exception. A note has the traceback in the worker, which Python
    shows if nothing catches the error. `message`, `details` and `args` are Weir's own.
    """
    if not isinstance(error, ModelError):
        return error
    cause = error.__cause__
    while isinstance(cause, ModelError):  # the error of a chain is caused by the error of a step
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
    except Exception:  # a class may refuse to have subclasses, or to be made without arguments
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
    """Return the names of attributes that an exception has outside of its dictionary, such as `errno` of OSError."""
    classes = [base for base in kind.__mro__ if base not in Exception.__mro__]
    kinds = MemberDescriptorType, GetSetDescriptorType
    return [
        name for base in classes for name, value in vars(base).items() if isinstance(value, kinds) and name[:2] != "__"
    ]


def add_extra(extra: str) -> str:
    """Return how to install an extra. It works wherever Weir came from, since pip keeps the Weir that is installed."""
    return f"add Weir's extra {extra!r}: pip install 'weir-serving[{extra}]'"


def reason_of(error: BaseException) -> str:
    """Return why something failed, without the number and the file name that the text of an OSError has: the message names them."""
    if verified := getattr(error, "verify_message", ""):  # of a certificate
        return str(verified)
    # OpenSSL has its own numbers.
    number: Any = None if type(error).__module__ == "ssl" else getattr(error, "errno", None)
    if number in errno.errorcode:
        return os.strerror(number)  # the event loop's own text, "Connect call failed", gives no reason
    text = f"{error} is missing" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__


def printable(text: str) -> str:
    """Return `text` with all that is not printable escaped, such as line ends and escape sequences: in a log, what came from a caller cannot look
    like another line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def printable_lines(text: str) -> str:
    """Return the lines of `text`, such as a traceback, each printable and indented, so that none looks like a line of the log."""
    return "\n".join(f"  {printable(line)}" for line in text.rstrip("\n").split("\n"))
