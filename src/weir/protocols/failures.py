"""What callers get when a page fails or is not there: the same shape as for inference."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from weir.errors import MethodNotAllowed, ModelNotFound, WeirError
from weir.protocols.response import HttpResponse, encode_safely, error_answer
from weir.protocols.sending import as_response
from weir.protocols.settings import HttpSettings

_log = logging.getLogger("weir.http")

# Where clients of the Open Inference Protocol may come by, who know errors as texts only: AMD's ask here over WebSockets, and
# those that were given an address with a slash at its end, there.
_AMD_WEBSOCKET = "/models/infer"
_DOUBLED = "//v2"


def exception_handlers(settings: HttpSettings) -> Mapping[Any, ExceptionHandler]:
    """Return Starlette's table of handlers."""

    def ours(request: Request, error: Exception) -> Response:
        # Only a page about a model that there is has got as far as to fail.
        model = None if isinstance(error, ModelNotFound) else request.path_params.get("model")
        return as_response(error_answer(error, model, development=settings.development))

    def any_other(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        return ours(request, error)

    return {HTTPException: _router_error, WeirError: ours, Exception: any_other}


def _router_error(request: Request, error: Exception) -> Response:
    """Answer what Starlette's router refuses: a path that is not there, a method that does not belong."""
    path = request.scope["path"]
    allow = None
    message = f"{path}: there is no such path; GET / lists those there are"
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        where = "; GET / lists the paths that there are" if path == "/" else ""
        message = f"{request.method} {path}: takes {', '.join(allow)} only{where}"
    if path == _AMD_WEBSOCKET or path.startswith(_DOUBLED):
        headers = [(b"content-type", b"application/json")]
        headers += [] if allow is None else [(b"allow", ", ".join(allow).encode())]
        return as_response(HttpResponse(404 if allow is None else 405, headers, encode_safely({"error": message})))
    if allow is not None:
        return as_response(error_answer(MethodNotAllowed(message, details={"allow": allow})))
    return as_response(not_found(message))


def not_found(message: str) -> HttpResponse:
    """Return the answer for a path, other than a model's, that is not there."""
    error = {"type": "NotFound", "message": message, "model": None, "details": None}
    return HttpResponse(404, [(b"content-type", b"application/json")], encode_safely({"error": error}))
