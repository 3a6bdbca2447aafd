"""Errors in the form of OpenAI's API, for all endpoints that follow it: texts, models, files and batches."""

from typing import TypedDict

from weir.errors import (
    CapacityError,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unsupported,
)
from weir.protocols.response import HttpResponse, encode_safely, error_headers, error_value
from weir.wire.status import http_code

# OpenAI's codes where it has one; the other codes are named after our errors.
_CODES: dict[type[BaseException], str] = {
    ModelNotFound: "model_not_found",
    MethodNotAllowed: "method_not_allowed",
    Overloaded: "rate_limit_exceeded",
    Unauthorized: "invalid_api_key",
    TooLarge: "request_too_large",
    Unsupported: "unsupported",
    CapacityError: "service_unavailable",
    TimeoutError: "timeout",
}


class OpenAIErrorValue(TypedDict):
    """The inner part of an error's document. `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """The document of an error."""

    error: OpenAIErrorValue


def error_document(error: BaseException, *, code: str | None = None, development: bool = False) -> OpenAIError:
    """Return `{"error": {"message", "type", "param", "code"}}` for `error`. `code` is its code, unless it is that of its class."""
    message = error_value(error, development=development)["message"]
    kind = next((of for each, of in _CODES.items() if isinstance(error, each)), None)
    value: OpenAIErrorValue = {
        "message": message,
        "type": _type_of(error),
        "param": _param_of(error),
        "code": code or kind,
    }
    return {"error": value}


def error_answer(error: BaseException, *, code: str | None = None, development: bool = False) -> HttpResponse:
    """Return the response for `error`; see `error_document`."""
    document = error_document(error, code=code, development=development)
    return HttpResponse(http_code(error), error_headers(error), encode_safely(document))


def _param_of(error: BaseException) -> str | None:
    """Return the field that is wrong, if the error is the request's."""
    if not isinstance(error, RequestError):
        return None
    return "model" if isinstance(error, ModelNotFound) else error.field or None


def _type_of(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "requests"
    return "invalid_request_error" if isinstance(error, RequestError) else "server_error"
