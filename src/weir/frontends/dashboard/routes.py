"""The routes of the dashboard: the page, what it is made of, and its data.

Nothing on the page comes from elsewhere, and the browser may load nothing else: no script but ours, none in the page.
"""

from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weir.frontends.dashboard.sampling import DashboardSampler, TellClients, nobody
from weir.frontends.dashboard.watching import Ring, Watch
from weir.frontends.http.application import Added
from weir.frontends.http.asgi import as_response
from weir.protocols.response import Headers, HttpResponse
from weir.telemetry.recorder import Metrics

if TYPE_CHECKING:
    from weir.catalog.registry import Registry

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
    responses = {"200": {"description": "The answer", "content": {content_type: {}}}}
    call = {"operationId": f"get_{name}", "tags": ["server"], "summary": summary, "responses": responses}
    return {"get": call | ({"parameters": list(parameters)} if parameters else {})}


# The routes, as OpenAPI describes them.
PATHS = {
    "/dashboard": _described("dashboard", "Show the server while it works, to people", "text/html"),
    "/dashboard/data": _described(
        "dashboard_data", "Return what the dashboard shows", "application/json",
        {"name": "life", "in": "query", "description": "the process asked before", "schema": {"type": "string"}},
        {"name": "since", "in": "query", "description": "its last number", "schema": {"type": "integer", "minimum": 0}},
    ),
}  # fmt: skip


def make_dashboard(
    registry: "Registry", metrics: Metrics | None, collectors: Sequence[Collector] = (), clients: TellClients = nobody
) -> Added:
    """Return a page about the services of `registry`, as what is added to the HTTP frontend.

    `metrics` must be among their observers; without it the page shows what waits and works, and a note that nothing is counted.
    `collectors` and `clients` are those of a product.
    """
    return pages_of(
        Watch(DashboardSampler(registry, metrics, collectors, clients), Ring(), counted=metrics is not None)
    )


def pages_of(watch: Watch) -> Added:
    """Return the page that shows what `watch` sees."""
    routes = [
        Route("/dashboard", _asset(_PAGE)),
        Route("/dashboard/data", _data(watch)),
        *[Route(f"/dashboard/{name}", _asset(name)) for name in assets() if name != _PAGE],
    ]
    return Added(routes, PATHS, begin=watch.beat.begin)


def assets() -> list[str]:
    """Return the names of the files that the page is made of."""
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
