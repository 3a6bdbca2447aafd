"""The one table from errors to codes. No other file knows a code for an error."""

from typing import NamedTuple

from weir import errors


class Codes(NamedTuple):
    """What an error is called outside: the HTTP status and the gRPC code's name."""

    http: int
    grpc: str


# An error without an entry has its nearest ancestor's. HTTP 499 is never sent: the connection is gone; metrics show it.
TABLE: dict[type[BaseException], Codes] = {
    errors.RequestError: Codes(400, "INVALID_ARGUMENT"),
    errors.ValidationFailed: Codes(422, "INVALID_ARGUMENT"),
    errors.ModelNotFound: Codes(404, "NOT_FOUND"),
    errors.TooLarge: Codes(413, "RESOURCE_EXHAUSTED"),
    errors.MethodNotAllowed: Codes(405, "UNIMPLEMENTED"),
    errors.UnsupportedMediaType: Codes(415, "INVALID_ARGUMENT"),
    errors.Unsupported: Codes(501, "UNIMPLEMENTED"),
    errors.Conflict: Codes(409, "ALREADY_EXISTS"),
    errors.Unauthorized: Codes(401, "UNAUTHENTICATED"),
    errors.Forbidden: Codes(403, "PERMISSION_DENIED"),
    errors.DeadlineExceeded: Codes(408, "DEADLINE_EXCEEDED"),
    errors.Cancelled: Codes(499, "CANCELLED"),
    errors.CapacityError: Codes(503, "UNAVAILABLE"),
    errors.Overloaded: Codes(429, "RESOURCE_EXHAUSTED"),
    BaseException: Codes(500, "INTERNAL"),
}


# Of HTTP alone: the head of a request is over `max_header_size` (TooLarge is about bodies).
HEAD_TOO_LARGE = 431


def codes(error: BaseException) -> Codes:
    """Return the codes of `error`; of an exception that is none of ours, those of an internal error."""
    return codes_of_type(type(error))


def codes_of_type(kind: type[BaseException]) -> Codes:
    """Return the codes of errors of this type."""
    return next(TABLE[base] for base in kind.__mro__ if base in TABLE)


def http_code(error: BaseException) -> int:
    """Return the HTTP status code for `error`."""
    return codes(error).http


# The Open Inference Protocol knows fewer: its clients expect 400 for whatever is wrong with a request.
_KSERVE = {422: 400, 409: 400}


def kserve_code(error: BaseException) -> int:
    """Return the HTTP status code for `error` at the frontends of the Open Inference Protocol."""
    code = http_code(error)
    return _KSERVE.get(code, code)


def grpc_code(error: BaseException) -> str:
    """Return the name of the gRPC status code for `error`."""
    return codes(error).grpc
