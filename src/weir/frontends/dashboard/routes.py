"""The routes of the dashboard: the page, its files, and its data.

The page uses only files of this server. Its Content-Security-Policy forbids everything else: files of other servers, and scripts inside the page.
"""

from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from weir.frontends.dashboard.sampling import (
    DashboardSampler,
    ListClients,
    ListFronts,
    ListJobs,
    ShowMemory,
    no_clients,
)
from weir.frontends.dashboard.watching import Ring, Watch
from weir.frontends.http.application import Added
from weir.frontends.http.asgi import as_response
from weir.frontends.http.endpoints import HttpEndpoint, answered
from weir.protocols.response import Headers, HttpResponse
from weir.telemetry.recorder import Metrics

if TYPE_CHECKING:
    from weir.serving.handle import Models

_TYPES = {
    "svg": b"image/svg+xml",
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_PAGE = "page.html"


def _described(name: str, summary: str, content_type: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "The response", "content": {content_type: {}}}}
    call = {"operationId": f"get_{name}", "tags": ["server"], "summary": summary, "responses": responses}
    return call | ({"parameters": list(parameters)} if parameters else {})


_DESCRIBED = {
    _PAGE: _described("dashboard", "Show the dashboard", "text/html"),
    "data": _described(
        "dashboard_data",
        "Return the data of the dashboard",
        "application/json",
        {"name": "life", "in": "query", "description": "the process asked before", "schema": {"type": "string"}},
        {"name": "since", "in": "query", "description": "its last number", "schema": {"type": "integer", "minimum": 0}},
    ),
}


def make_dashboard(
    registry: "Models",
    metrics: Metrics | None,
    collectors: Sequence[Collector] = (),
    clients: ListClients = no_clients,
    jobs: ListJobs = lambda: None,
    fronts: ListFronts = no_clients,
    memory: ShowMemory = lambda: None,
) -> Added:
    """Return the dashboard of the services of `registry`, to be added to the HTTP frontend.

    `metrics` must be one of their observers. Without it the page shows queues and workers, and a note that nothing is counted. `collectors` and `clients`
    are those of a product; `jobs` returns the batch jobs, `fronts` the fronts, `memory` what models on demand take.
    """
    return pages_of(
        Watch(
            DashboardSampler(registry, metrics, collectors, clients, jobs, fronts, memory),
            Ring(),
            counted=metrics is not None,
        )
    )


def pages_of(watch: Watch) -> Added:
    """Return the endpoints of a dashboard whose data come from `watch`."""
    found = {"data": _data(watch), **{name: _asset(name) for name in assets()}}
    endpoints = [
        HttpEndpoint(
            "GET", "/dashboard" if name == _PAGE else f"/dashboard/{name}", answered(page), _DESCRIBED.get(name)
        )
        for name, page in found.items()
    ]
    return Added(endpoints, watch.timer.begin)


def assets() -> list[str]:
    """Return the names of the page's files."""
    return sorted(each.name for each in (files("weir.frontends.dashboard") / "assets").iterdir())


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = (files("weir.frontends.dashboard") / "assets" / name).read_bytes()
        kind = (b"content-type", _TYPES[name.rpartition(".")[2]])
        return as_response(HttpResponse(200, [kind, (b"cache-control", b"no-cache"), *_SECURITY], body))

    return endpoint


def _data(watch: Watch) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        since = request.query_params.get("since", "")
        number = int(since) if since.isdecimal() and len(since) < 16 else 0
        body = watch.look(request.query_params.get("life", ""), number)
        headers: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store"), *_SECURITY]
        return as_response(HttpResponse(200, headers, body))

    return endpoint
