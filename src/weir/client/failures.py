"""What an answer that is an error becomes here: the error that a caller in process would have had."""

from weir import errors
from weir.errors import CapacityError, WeirError


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


def of_status(status: int, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error of an answer with that HTTP status and text, which calls itself `name`."""
    return _made(_named(name) or _BY_STATUS.get(status, WeirError), text or f"HTTP status {status}", retry_after)


def of_code(code: str, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
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
