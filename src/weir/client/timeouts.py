"""How long a call of a client may take: what was said for the call, else what was said for the client."""

from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any

from weir.errors import InvalidRequest, SettingsError

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
