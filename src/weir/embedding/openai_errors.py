"""What goes wrong, as OpenAI says it: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

from weir.embedding.texts import TOO_LONG
from weir.errors import (
    CapacityError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unsupported,
    WeirError,
)  # fmt: skip
from weir.protocols.response import HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.status import http_code

JSON_HEADER = (b"content-type", b"application/json")


def of_input(error: BaseException) -> BaseException:
    """Return what is wrong with a text as what is wrong with `input`: an encoder knows texts, whatever the field is called."""
    if type(error) is InvalidRequest and error.message.startswith("texts["):
        details = error.details if isinstance(error.details, dict) else {}
        return InvalidRequest("input" + error.message.removeprefix("texts"), details={**details, "param": "input"})
    return error


def wrong(message: str, param: str | None = None) -> InvalidRequest:
    """Return the error about the field `param`."""
    return InvalidRequest(message, details={"param": param})


def error_answer(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the answer for `error` in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    value = error_value(error, development=development)
    document = {
        "message": value["message"], "type": _type_of(error), "param": details.get("param"), "code": _code_of(error, details),
    }  # fmt: skip
    if isinstance(error, ModelNotFound):
        document["param"] = "model"
    return HttpResponse(http_code(error), error_headers(error), encode_safely({"error": document}))


def no_such_path(path: str, there_are: str) -> HttpResponse:
    """Return the answer for a path that is not there."""
    document = {
        "message": f"{path}: there is no such path; there are {there_are}", "type": "invalid_request_error", "param": None,
        "code": "unknown_url",
    }  # fmt: skip
    return HttpResponse(404, [JSON_HEADER], encode_safely({"error": document}))


def _type_of(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "requests"
    return "invalid_request_error" if isinstance(error, RequestError) else "server_error"


def _code_of(error: BaseException, details: Mapping[str, Any]) -> str | None:
    if TOO_LONG in details:
        return "context_length_exceeded"
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)


# OpenAI's own words where it has any; the others say what our error is called.
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
