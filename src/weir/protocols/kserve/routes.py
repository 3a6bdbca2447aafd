"""All routes of the protocol but those of inference (infer.py) as one ASGI application."""

import re
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import MethodNotAllowed, Unsupported
from weir.protocols.endpoint import Call, Endpoint, Handler
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.control import Changes
from weir.protocols.kserve.pages import Pages
from weir.protocols.kserve.replies import JSON_TYPE, error_answer
from weir.protocols.response import HttpResponse, encode_safely
from weir.protocols.sending import as_response, inner_path

PREFIX = "/v2"

# Extensions of Triton that its clients know and this server has not.
_NOT_OFFERED = (
    "/trace/setting", "/models/{model}/trace/setting", "/logging", "/cudasharedmemory/region/{region}/status",
    "/cudasharedmemory/region/{region}/register",
)  # fmt: skip

_VERSIONED = re.compile(r"/models/\{model\}")


class Kserve:
    """ASGI middleware that answers every path of the protocol but those of inference, and leaves the rest to `app`."""

    def __init__(self, app: ASGIApp, site: KServeContext) -> None:
        self._app = app
        refuse = partial(error_answer, development=site.http.development)
        self._kserve = Starlette(
            routes=[
                Route(PREFIX + path, Endpoint(handler, site.http, refuse), methods=[method])
                for (method, path), handler in handlers(site).items()
            ],
            exception_handlers={HTTPException: _router_error},
        )
        self._kserve.router.redirect_slashes = False
        self._kserve.middleware_stack = (
            self._kserve.build_middleware_stack()
        )  # not with the first request, which would hold up others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = inner_path(scope) if scope["type"] == "http" else ""
        ours = path == PREFIX or path.startswith(PREFIX + "/")
        await (self._kserve if ours else self._app)(scope, receive, send)


def handlers(site: KServeContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path below PREFIX: what is offered, and what says that it is not."""
    refused = {(method, path): not_offered(path) for path in _NOT_OFFERED for method in ("GET", "POST")}
    return every(site) | {("GET", "/"): Pages(site).server} | refused


def offered(site: KServeContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path that this server really has."""
    missing: tuple[str, ...] = () if site.regions.allowed else ("/systemsharedmemory",)
    missing += () if site.has_manager else ("/repository", "/workers")
    return {(method, path): handler for (method, path), handler in every(site).items() if not path.startswith(missing)}


def every(site: KServeContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path that servers may have."""
    pages, changes = Pages(site), Changes(site)
    plain: dict[tuple[str, str], Handler] = {
        ("GET", ""): pages.server,
        ("GET", "/health/live"): pages.live,
        ("GET", "/health/ready"): pages.ready,
        ("GET", "/models"): pages.models,
        ("GET", "/models/stats"): pages.statistics,
        ("GET", "/models/{model}"): pages.model,
        ("GET", "/models/{model}/ready"): pages.model_ready,
        ("GET", "/models/{model}/config"): pages.config,
        ("GET", "/models/{model}/stats"): pages.statistics,
        ("POST", "/repository/index"): changes.index,
        ("POST", "/repository/models/{model}/load"): changes.load,
        ("POST", "/repository/models/{model}/unload"): changes.unload,
        ("POST", "/workers/{worker}/load"): changes.load_worker,
        ("POST", "/workers/{worker}/unload"): changes.unload_worker,
        ("GET", "/hardware"): pages.hardware,
        ("POST", "/hardware"): pages.has_hardware,
        ("GET", "/systemsharedmemory/status"): changes.memory_status,
        ("GET", "/systemsharedmemory/region/{region}/status"): changes.memory_status,
        ("POST", "/systemsharedmemory/region/{region}/register"): changes.register_memory,
        ("POST", "/systemsharedmemory/unregister"): changes.unregister_memory,
        ("POST", "/systemsharedmemory/region/{region}/unregister"): changes.unregister_memory,
        ("GET", "/cudasharedmemory/status"): pages.no_regions,
        ("POST", "/cudasharedmemory/unregister"): pages.nothing_to_do,
        ("POST", "/cudasharedmemory/region/{region}/unregister"): pages.nothing_to_do,
    }
    versioned = {
        (method, _VERSIONED.sub("/models/{model}/versions/{version}", path)): handler
        for (method, path), handler in plain.items()
        if _VERSIONED.search(path)
    }
    return plain | versioned


def not_offered(path: str) -> Handler:
    """Return what answers a path of an extension that this server has not."""

    async def refuse(call: Call) -> HttpResponse:
        raise Unsupported(f"{PREFIX}{path}: this server does not have this extension; GET {PREFIX} lists those it has")

    return refuse


async def _router_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: a path that is not there, a method that does not belong."""
    path = request.scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = sorted((error.headers or {}).get("Allow", "").split(", "))
        refusal = MethodNotAllowed(f"{request.method} {path}: takes {', '.join(allow)} only", details={"allow": allow})
        return as_response(error_answer(refusal))
    return as_response(HttpResponse(404, [JSON_TYPE], encode_safely({"error": f"{path}: there is no such path"})))
