"""What is sent again, and when."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, TypeVar

from weir.client.programs import Program, Sleep
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, SettingsError, WorkerLost

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
