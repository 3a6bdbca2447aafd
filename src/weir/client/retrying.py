"""What is sent again, and when."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, TypeVar

from weir import errors
from weir.client.calls import Program, Sleep
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, SettingsError, WeirError, WorkerLost

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How often, and after which waits, a call is sent again that the server refused for now.

    Only what was refused before it was begun is sent again: the line was full, the model or the server not ready, no
    connection could be made. Never what a model was given, so no ModelCrashed and no stream that has begun. The server's Retry-After
    is the shortest wait; without one it is `first_wait` seconds, and twice as much each time, `longest_wait` at most.
    """

    times: int = 2
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def wait(self, error: BaseException, tried: int) -> float | None:
        """Return the seconds to wait after `error` ended attempt number `tried` (from 0); None: it is not sent again."""
        if not isinstance(error, CapacityError) or isinstance(error, WorkerLost) or tried >= self.times:
            return None
        return max(error.retry_after or 0.0, min(self.longest_wait, self.first_wait * 2.0**tried))


NEVER = Retry(times=0)


def retried(retry: Retry, attempt: Callable[[], Program[T]]) -> Program[T]:
    """Run `attempt` until it succeeds, or fails with what is not to be tried again, or there is no time left."""
    tried = 0
    while True:
        try:
            return (yield from attempt())
        except CapacityError as error:
            wait = retry.wait(error, tried)
            if wait is None:
                raise
            refused = error
        try:
            yield Sleep(wait)
        except DeadlineExceeded:
            raise refused from None
        tried += 1


# How long a call may take: the call's own timeout, or else the client's.


_RULE = "must be a finite number of seconds greater than 0"


def of_client(timeout: Any) -> float:
    """Return `timeout`, which a client is made with, in seconds. Raises SettingsError."""
    if not _is_timeout(timeout):
        raise SettingsError(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def of_call(timeout: Any, otherwise: float) -> float:
    """Return `timeout` in seconds; `otherwise` if it is None. Raises InvalidRequest."""
    if timeout is None:
        return otherwise
    if not _is_timeout(timeout):
        raise InvalidRequest(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def _is_timeout(seconds: Any) -> bool:
    is_number = isinstance(seconds, Real)
    return is_number and bool(0 < seconds <= TIMEOUT_MAX)


# What an answer that is an error becomes here: the error that a caller in process would have had.


class Unreachable(CapacityError):
    """No connection could be made: nothing was sent."""


class ConnectionLost(WeirError):
    """The connection ended before the answer: nobody knows whether the request was served."""


# Where an answer does not name its error: the class that its code stands for.
_BY_STATUS: dict[int, type[WeirError]] = {
    400: errors.InvalidRequest, 401: errors.Unauthorized, 403: errors.Forbidden, 404: errors.ModelNotFound,
    405: errors.MethodNotAllowed, 408: errors.DeadlineExceeded, 409: errors.Conflict, 413: errors.TooLarge,
    415: errors.UnsupportedMediaType, 422: errors.ValidationFailed, 429: errors.Overloaded, 499: errors.Cancelled,
    500: errors.ModelError, 501: errors.Unsupported, 503: errors.CapacityError,
}  # fmt: skip
_BY_CODE: dict[str, type[WeirError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest, "NOT_FOUND": errors.ModelNotFound, "ALREADY_EXISTS": errors.Conflict,
    "UNIMPLEMENTED": errors.Unsupported, "UNAUTHENTICATED": errors.Unauthorized, "PERMISSION_DENIED": errors.Forbidden,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded, "CANCELLED": errors.Cancelled, "INTERNAL": errors.ModelError,
    "RESOURCE_EXHAUSTED": errors.Overloaded, "UNAVAILABLE": errors.CapacityError,
}  # fmt: skip


def error_of_status(status: int, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error of an answer with that HTTP status and text, which calls itself `name`."""
    return _made(_named(name) or _BY_STATUS.get(status, WeirError), text or f"HTTP status {status}", retry_after)


def error_of_code(code: str, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error of a gRPC call that ended with the status code of that name.

    Without a wait to be kept, RESOURCE_EXHAUSTED is a message over a limit and UNAVAILABLE a connection that broke.
    """
    kind = _named(name) or _BY_CODE.get(code, WeirError)
    if not name and retry_after is None and code == "RESOURCE_EXHAUSTED":
        kind = errors.TooLarge
    elif not name and retry_after is None and code == "UNAVAILABLE":
        kind = Unreachable if text.startswith("failed to connect") else ConnectionLost
    return _made(kind, text or code, retry_after)


def _named(name: str) -> type[WeirError] | None:
    kind = getattr(errors, name, None) if name else None
    return kind if isinstance(kind, type) and issubclass(kind, WeirError) else None


def _made(kind: type[WeirError], text: str, retry_after: float | None) -> WeirError:
    return kind(text, retry_after=retry_after) if issubclass(kind, CapacityError) else kind(text)
