"""The whole HTTP frontend as one ASGI application, which any ASGI server can run."""

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from weir.errors import CapacityError, ModelNotFound, WeirError
from weir.frontends.frontend import open_protocols
from weir.frontends.http.access_log import HttpLog, Logged
from weir.frontends.http.asgi import AsgiInference, inner_path
from weir.frontends.http.endpoints import Gate, HttpEndpoint, refusals_of, routes_of
from weir.frontends.http.kserve_routes import PREFIX, Kserve
from weir.frontends.http.pages import Pages, RenderMetrics, exception_handlers
from weir.frontends.websocket import WebSockets
from weir.protocols.account import Counted
from weir.protocols.exchange import HttpProtocol
from weir.protocols.kserve import KserveContext, KserveProtocol
from weir.protocols.kserve import error_answer as kserve_error
from weir.protocols.native import PREFIX as NATIVE
from weir.protocols.native import NativeProtocol
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.serving.handle import Models

_SHOWN_TO_PAGES = (
    "Retry-After", "X-Request-Id", "X-Batch-Size", "X-Batch-Reason", "X-Batch-Waiting", "X-Batch-Oldest-Age",
    "X-Batch-Limit", "X-Batch-Wakeup", "X-Queue-Time", "X-Weir-Truncated",
)  # fmt: skip


class Added(NamedTuple):
    """What a product adds to the application. `begin` is called on the event loop when the server runs."""

    endpoints: Sequence[HttpEndpoint] = ()
    begin: Callable[[], None] = lambda: None


NOTHING = Added()


class InferencePaths(Container[str]):
    """The paths at which a POST of JSON is a request for inference with one response: those of `protocols` and of `endpoints`."""

    def __init__(self, protocols: Sequence[HttpProtocol], endpoints: Sequence[HttpEndpoint] = ()) -> None:
        self._protocols = protocols
        self._more = {each.path for each in endpoints if each.infers}

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and (path in self._more or any(_takes(each, path) for each in self._protocols))


def _takes(protocol: HttpProtocol, path: str) -> bool:
    try:
        head = protocol.read_head("POST", path, ())
    except (ModelNotFound, CapacityError):  # the model may be loaded later
        return True
    except WeirError:
        return False
    return head is not None and not head.stream


class Shortcut:
    """ASGI middleware that finds those of `endpoints` that have no parameters in one look-up: a router would try all routes, one after the other."""

    def __init__(self, app: ASGIApp, endpoints: Sequence[HttpEndpoint]) -> None:
        self._app = app
        self._found = {(each.method, each.path): each.app for each in reversed(endpoints) if "{" not in each.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = self._found.get((scope["method"], inner_path(scope))) if scope["type"] == "http" else None
        if found is None:
            return await self._app(scope, receive, send)
        await found({**scope, "path_params": {}}, receive, send)


def inference_protocols(context: KserveContext) -> Sequence[HttpProtocol]:
    """Return the protocols of inference: those that the settings name, and Weir's own. Raises SettingsError for one that cannot be made."""
    registry, settings = context.registry, context.http
    return (*open_protocols(registry, settings), KserveProtocol(context), NativeProtocol(registry, settings))


def make_app(
    registry: "Models",
    settings: HttpSettings,
    *,
    metrics: RenderMetrics | None = None,
    context: KserveContext | None = None,
    lifespan: Lifespan[Any] | None = None,
    websockets: WebSockets | None = None,
    added: Added = NOTHING,
    log: HttpLog | None = None,
    protocols: Sequence[HttpProtocol] | None = None,
) -> Starlette:
    """Return the application that serves the models of `registry`.

    The caller starts and stops the models: before and after, or in `lifespan`. Without `metrics` there is no /metrics. `context` is shared by the frontends
    of the Open Inference Protocol; without it anybody may call the server, and callers on this machine may control it. `websockets` are the WebSockets of
    the application, if the caller wants to drain them. `added` has the endpoints of a product. `log` gets a line for each request.
    `protocols` are those of `inference_protocols`.

    No model's route may begin as a path of the application does. Raises SettingsError if one does already.
    """
    context = context or KserveContext(registry, settings)
    protocols = inference_protocols(context) if protocols is None else protocols
    middleware = [Middleware(AsgiInference, protocols, settings), Middleware(Kserve, context)]
    if added.endpoints:
        middleware.insert(0, Middleware(Shortcut, added.endpoints))
    middleware.insert(0, Middleware(Counted, context.account))
    if context.access.required:
        refusals = {**refusals_of(added.endpoints), PREFIX: kserve_error}
        middleware.insert(0, Middleware(Gate, context.access, refusals, settings.body_timeout))
    if settings.cors_origins:  # outermost: a browser's preflight request has no key
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_SHOWN_TO_PAGES,
        )
        middleware.insert(0, cors)
    if log is not None:
        middleware.insert(0, Middleware(Logged, log))
    routes = [
        *routes_of([*added.endpoints, *Pages(context, settings, metrics, added.endpoints).endpoints()]),
        *(websockets or WebSockets(registry, settings, context.account)).routes(),
    ]
    own = [each.prefix.decode() for each in protocols] + [getattr(each, "path", "/") for each in routes]
    registry.reserve(path.split("/")[1] for path in (NATIVE, *own))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=exception_handlers(settings),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # its redirects repeat whatever Host the client sent
    # Build it now: building it for the first request would delay all others by tens of milliseconds.
    app.middleware_stack = app.build_middleware_stack()
    return app
