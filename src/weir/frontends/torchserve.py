"""TorchServe's management API, on a port of its own: models are listed, registered, scaled and unregistered.

Weir's own rules hold: who may make these calls, and that models come from the server's TARGETs and its repository only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from weir.catalog.adapters.torchserve import settings_from
from weir.catalog.sources import default_name
from weir.errors import Conflict, InvalidRequest, ModelNotFound, NotFound, SettingsError, Unsupported, WeirError, brief
from weir.frontends.frontend import FrontendContext
from weir.frontends.http.asgi import AsgiCall, Endpoint, Gate, HttpEndpoint, as_response, routes_of, with_names
from weir.frontends.http.server import HttpServer
from weir.protocols.account import Counted
from weir.protocols.response import HttpResponse, json_response
from weir.protocols.torchserve import archive_version, error_response, find
from weir.serving import is_name

if TYPE_CHECKING:
    from weir.catalog.manager import Manager

PORT = 8081
_MOST_WORKERS, _MOST_FIELDS = 1000, 100
# The settings of a model in a query, by TorchServe's names elsewhere.
_IN_QUERY = {
    "batch_size": "batchSize",
    "initial_workers": "minWorkers",
    "max_batch_delay": "maxBatchDelay",
    "response_timeout": "responseTimeout",
    "startup_timeout": "startupTimeout",
}


class ManagementServer(HttpServer):
    """Listens for calls of the management API."""

    asks_for_key = True


def make_management(context: FrontendContext) -> ManagementServer:
    """Return the frontend, not started. Its option is a port, or HOST:PORT. Raises SettingsError."""
    assert context.kserve is not None, "a server gives it to its frontends: this is a bug"
    http = context.settings.http
    host, _, port = str(PORT if context.options in (None, "") else context.options).rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise SettingsError(
            f"frontend torchserve={brief(context.options)}: must be a port or HOST:PORT, such as {PORT}"
        )
    shared = copy(context.kserve)
    shared.http = replace(http, host=host.strip("[]") or http.host, port=int(port), uds=None)
    middleware = [Middleware(Counted, shared.account)]
    if context.access.required:
        middleware.insert(0, Middleware(Gate, context.access, {"/": error_response}, http))
    routes = routes_of(_Management(context).endpoints())
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _refused, WeirError: _refused}
    )
    server = ManagementServer(shared, app, context.observers)
    context.registry.changed.append(server.routes_changed)
    return server


async def _refused(request: Request, error: Exception) -> Response:
    return as_response(
        error_response(error if isinstance(error, WeirError) else NotFound(f"{request.url.path}: unknown path"))
    )


Query = Mapping[str, str]


class _Management:
    def __init__(self, context: FrontendContext) -> None:
        self._context = context
        self._registry = context.registry
        self._scaling = asyncio.Lock()  # else two calls might take the last worker together

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints of the API."""
        calls: list[tuple[str, str, Callable[[str, Query], Awaitable[HttpResponse]]]] = [
            ("GET", "/models", self.models),
            ("POST", "/models", self.register),
            ("PUT", "/models/{model}/set-default", self.set_default),
            ("GET", "/models/{model}", self.describe),
            ("PUT", "/models/{model}", self.scale),
            ("DELETE", "/models/{model}", self.unregister),
        ]
        http = self._context.settings.http
        return [
            HttpEndpoint(method, with_names(path), Endpoint(partial(self._answer, method, call), http, error_response))
            for method, path, call in calls
        ]

    async def _answer(
        self, method: str, call: Callable[[str, Query], Awaitable[HttpResponse]], given: AsgiCall
    ) -> HttpResponse:
        if method != "GET":
            self._context.control.require_http(given.peer, given.headers)
        try:
            query = parse_qs(given.scope["query_string"].decode("latin-1"), max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise InvalidRequest(f"query: must have at most {_MOST_FIELDS} parameters") from None
        return await call(given.path.get("model", ""), {name: values[-1] for name, values in query.items()})

    async def models(self, model: str, query: Query) -> HttpResponse:
        """List the models."""
        names, first = [*self._registry.services], _number(query, "next_page_token", 0)
        limit = max(1, _number(query, "limit", 100))
        listed = [{"modelName": name, "modelUrl": self._url(name)} for name in names[first : first + limit]]
        more = {"nextPageToken": str(first + limit)} if first + limit < len(names) else {}
        return json_response({**more, "models": listed})

    async def describe(self, model: str, query: Query) -> HttpResponse:
        """Describe a model."""
        service = find(self._registry, model.removesuffix("/all"))
        state, facts = service.control.state(), service.facts
        workers = [
            {
                "id": str(each["index"]),
                "status": "READY" if each["state"] == "ready" else str(each["state"]).upper(),
                "gpu": False,
            }
            for each in state["workers"]
        ]
        count = service.control.worker_count
        described = {
            "modelName": facts.name,
            "modelVersion": archive_version(service),
            "modelUrl": self._url(facts.name),
            "runtime": "python",
            "minWorkers": count,
            "maxWorkers": count,
            "batchSize": facts.batching.max_batch_size,
            "maxBatchDelay": round(1000 * facts.batching.max_queue_delay),
            "workers": workers,
            "jobQueueStatus": {
                "remainingCapacity": max(0, facts.batching.max_queue_size - state["waiting"]),
                "pendingRequests": state["waiting"],
            },
        }
        return json_response([described])

    async def register(self, model: str, query: Query) -> HttpResponse:
        """Load a model: an archive of the repository, also by another name, or one that the server was started with."""
        url = query.get("url")
        if not url:
            raise InvalidRequest("is required; must be the name of an archive in the model store").of("url")
        if "/" in url or not is_name(url):
            raise ModelNotFound(
                f"url={brief(url)}: must be the name of a file in the model store; nothing is downloaded"
            )
        own = default_name(url)
        name = query.get("model_name") or own
        if not is_name(name):
            raise InvalidRequest(f"model_name={brief(name)}: must be of letters, digits and . _ ~ -")
        if name in self._registry.services:
            raise Conflict(f"Model {name!r} is already registered; unregister it first")
        given = {ours: _number(query, theirs, 0) for theirs, ours in _IN_QUERY.items() if theirs in query}
        config = None if name == own else {"file": url}
        await self._manager.load_model(name, config=config, parameters=settings_from(given, "query"))
        service = self._registry.get(name)
        count = service.control.worker_count
        return _status(f'Model "{name}" Version: {archive_version(service)} registered with {count} initial workers')

    async def scale(self, model: str, query: Query) -> HttpResponse:
        """Give a model as many workers as `min_worker` states."""
        service = find(self._registry, model)
        wanted = _number(query, "min_worker", _number(query, "max_worker", 1))
        if not 1 <= wanted <= _MOST_WORKERS:
            raise InvalidRequest(
                f"min_worker={wanted}: must be from 1 to {_MOST_WORKERS}; to have none, unregister the model"
            )
        name = service.facts.name
        async with self._scaling:
            count = service.control.worker_count
            for _ in range(wanted - count):
                await self._manager.load_worker(name, {"share": False})
            for _ in range(count - wanted):
                await self._manager.unload_worker(name)
        return _status(f"Workers scaled to {wanted} for model: {name}")

    async def unregister(self, model: str, query: Query) -> HttpResponse:
        """Unload a model."""
        service = find(self._registry, model)
        name = service.facts.name
        await self._manager.unload_model(name, version="" if model == name else service.facts.version)
        return _status(f'Model "{name}" unregistered')

    async def set_default(self, model: str, query: Query) -> HttpResponse:
        """Do nothing for the version that is the default already, and refuse any other."""
        service = find(self._registry, model)
        if service is not self._registry.get(service.facts.name):
            raise Unsupported(f"{model}: the default is the highest version, or the one that the model's file names")
        return _status(
            f'Default version successfully updated for model "{service.facts.name}" to "{archive_version(service)}"'
        )

    @property
    def _manager(self) -> "Manager":
        assert self._context.manager is not None, "a server has one: this is a bug"
        return self._context.manager

    def _url(self, name: str) -> str:
        return getattr(self._registry.get(name).facts.model, "archive", name)


def _status(text: str) -> HttpResponse:
    return json_response({"status": text})


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"{name}={brief(text)}: must be a whole number")
    return int(text)
