"""The table of status codes by error, which servers and clients read. No other module maps an error to a code, or a code to an error."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple, cast

from weir import errors

# What a request may have that timed out, and what a client takes each for.
TIMEOUTS: dict[int, type[errors.WeirError]] = {504: errors.DeadlineExceeded, 408: errors.RequestTimeout}


class Codes(NamedTuple):
    """The HTTP status code and the name of the gRPC status code."""

    http: int
    grpc: str


# An error without an entry has the codes of its nearest ancestor. Of errors with the same code, the first is what a client takes it for. 499 is nginx's code for a caller that has left: metrics have it for those,
# and a response if a model itself says that a request was cancelled.
TABLE: dict[type[BaseException], Codes] = {
    errors.RequestError: Codes(400, "INVALID_ARGUMENT"),
    errors.ValidationFailed: Codes(422, "INVALID_ARGUMENT"),
    errors.ModelNotFound: Codes(404, "NOT_FOUND"),
    errors.NotFound: Codes(404, "NOT_FOUND"),
    errors.TooLarge: Codes(413, "RESOURCE_EXHAUSTED"),
    errors.UnsupportedMediaType: Codes(415, "INVALID_ARGUMENT"),
    errors.Unsupported: Codes(501, "UNIMPLEMENTED"),
    errors.MethodNotAllowed: Codes(405, "UNIMPLEMENTED"),
    errors.Conflict: Codes(409, "ALREADY_EXISTS"),
    errors.Unauthorized: Codes(401, "UNAUTHENTICATED"),
    errors.Forbidden: Codes(403, "PERMISSION_DENIED"),
    errors.DeadlineExceeded: Codes(504, "DEADLINE_EXCEEDED"),
    errors.RequestTimeout: Codes(408, "DEADLINE_EXCEEDED"),
    errors.Cancelled: Codes(499, "CANCELLED"),
    errors.CapacityError: Codes(503, "UNAVAILABLE"),
    errors.Overloaded: Codes(429, "RESOURCE_EXHAUSTED"),
    BaseException: Codes(500, "INTERNAL"),
}


# The head of a request exceeds `max_header_size` (RFC 6585, section 5). The 413 of TooLarge is for bodies.
HEAD_TOO_LARGE = 431


_PHRASES = {499: "Client Closed Request"} | {status.value: status.phrase for status in HTTPStatus}


def phrase(http_code: int) -> str:
    """Return the reason phrase of an HTTP status; "" for one that nobody has named (RFC 9112, section 4)."""
    return _PHRASES.get(http_code, "")


def set_timeout_status(http: int) -> None:
    """Give DeadlineExceeded one of TIMEOUTS, in this process. A process has one table, as it has one server."""
    TABLE[errors.DeadlineExceeded] = TABLE[errors.DeadlineExceeded]._replace(http=http)


def codes(error: BaseException) -> Codes:
    """Return the codes of `error`. An exception that is not Weir's has those of an internal error."""
    return codes_of_type(type(error))


def codes_of_type(kind: type[BaseException]) -> Codes:
    """Return the codes of errors of this type."""
    return next(TABLE[base] for base in kind.__mro__ if base in TABLE)


def http_code(error: BaseException) -> int:
    """Return the HTTP status code for `error`."""
    return codes(error).http


# The Open Inference Protocol has fewer codes: its clients expect 400 for every error of a request.
_KSERVE = {422: 400, 409: 400}


def kserve_code(error: BaseException) -> int:
    """Return the HTTP status code for `error` at the frontends of the Open Inference Protocol."""
    code = http_code(error)
    return _KSERVE.get(code, code)


def grpc_code(error: BaseException) -> str:
    """Return the name of the gRPC status code for `error`."""
    return codes(error).grpc


# What a client takes for the error where a response names none, and its code has the entry of a base class.
_OF_BASE: dict[type[BaseException], type[errors.WeirError]] = {
    errors.RequestError: errors.InvalidRequest,
    BaseException: errors.ModelError,
}


def error_of_http(status: int) -> type[errors.WeirError]:
    """Return the class of the error that a response with this HTTP status stands for, if it names none."""
    return TIMEOUTS.get(status) or _first(kind for kind, codes in TABLE.items() if codes.http == status)


def error_of_grpc(code: str, *, for_now: bool) -> type[errors.WeirError]:
    """Return the class of the error that a gRPC status stands for. `for_now`: the response says when the call may be sent again."""
    kinds = [kind for kind, codes in TABLE.items() if codes.grpc == code]
    return _first([kind for kind in kinds if for_now and issubclass(kind, errors.CapacityError)] or kinds)


def _first(kinds: Iterable[type[BaseException]]) -> type[errors.WeirError]:
    kind = next(iter(kinds), errors.WeirError)
    return _OF_BASE.get(kind) or cast(type[errors.WeirError], kind)
