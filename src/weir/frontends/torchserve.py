"""TorchServe's management API, on a port of its own: models are listed, registered, scaled and unregistered. All else is as on the server's other port.

Weir's own rules hold: who may make these calls, and that models come from the server's TARGETs and its repository only.
"""

import asyncio
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qsl

from weir.catalog.adapters.torchserve import number_in, settings_from
from weir.catalog.sources import default_name
from weir.errors import Conflict, InvalidRequest, ModelNotFound, SettingsError, brief
from weir.frontends.frontend import FrontendContext
from weir.frontends.http.application import AddedEndpoints, make_app
from weir.frontends.http.asgi import AsgiCall, Endpoint, HttpEndpoint, with_names
from weir.frontends.http.server import HttpServer
from weir.protocols.kserve import KserveContext
from weir.protocols.response import HttpResponse, json_response
from weir.protocols.torchserve import archive_version, error_response, find
from weir.serving import is_name
from weir.serving.handle import ModelHandle

_MOST_WORKERS = 1000


def make_management(context: FrontendContext) -> HttpServer:
    """Return the frontend, not started. Its option is a port, or HOST:PORT. Raises SettingsError."""
    assert context.kserve is not None, "a server gives it to its frontends: this is a bug"
    host, _, port = str(8081 if context.options in (None, "") else context.options).rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"frontend torchserve={brief(context.options)}: must be a port or HOST:PORT, such as 8081")
    shared, http = copy(context.kserve), context.settings.http
    shared.http = replace(http, host=host.strip("[]") or http.host, port=int(port), uds=None)
    app = make_app(shared, added=AddedEndpoints(_Management(shared).endpoints()))
    server = HttpServer(shared, app, context.observers)
    context.registry.changed.append(server.routes_changed)
    return server


_Query = dict[str, str]
_Call = Callable[[str, _Query], Awaitable[HttpResponse]]  # takes what the path names, and the query


class _Management:
    def __init__(self, context: KserveContext) -> None:
        self._context, self._registry, self._manager = context, context.registry, context.manager
        self._scaling = asyncio.Lock()  # else two calls might take the last worker together

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints of the API."""
        calls: list[tuple[str, str, _Call]] = [
            ("GET", "/models", self.models),
            ("POST", "/models", self.register),
            ("GET", "/models/{model}", self.describe),
            ("PUT", "/models/{model}", self.scale),
            ("DELETE", "/models/{model}", self.unregister),
        ]
        made = partial(Endpoint, settings=self._context.http, refuse=error_response)
        return [
            HttpEndpoint(method, with_names(path), made(partial(self._answer, method, call)), refuse=error_response)
            for method, path, call in calls
        ]

    async def _answer(self, method: str, call: _Call, given: AsgiCall) -> HttpResponse:
        if method != "GET":
            self._context.control.require_http(given.peer, given.headers)
        return await call(given.path.get("model", ""), dict(parse_qsl(given.scope["query_string"].decode("latin-1"))))

    async def models(self, model: str, query: _Query) -> HttpResponse:
        """List all models: there are no pages."""
        return json_response({"models": [_line(service) for service in self._registry.services.values()]})

    async def describe(self, model: str, query: _Query) -> HttpResponse:
        """Describe a model."""
        service = find(self._registry, model.removesuffix("/all"))
        state, batching, count = service.control.state(), service.facts.batching, service.control.worker_count
        free = max(0, batching.max_queue_size - state["waiting"])
        described = {
            **_line(service),
            "modelVersion": archive_version(service),
            "runtime": "python",
            "minWorkers": count,
            "maxWorkers": count,
            "batchSize": batching.max_batch_size,
            "maxBatchDelay": round(1000 * batching.max_queue_delay),
            "workers": [{"id": str(each["index"]), "status": each["state"].upper()} for each in state["workers"]],
            "jobQueueStatus": {"remainingCapacity": free, "pendingRequests": state["waiting"]},
        }
        return json_response([described])

    async def register(self, model: str, query: _Query) -> HttpResponse:
        """Load a model: an archive of the repository, also by another name, or one that the server was started with."""
        url = query.get("url", "")
        if "/" in url or not is_name(url):
            rule = "must be the name of a file in the model store; nothing is downloaded"
            raise ModelNotFound(f"url={brief(url)}: {rule}")
        own = default_name(url)
        name = query.get("model_name") or own
        if name in self._registry.services:
            raise Conflict(f"Model {name!r} is already registered; unregister it first")
        config = None if name == own else {"file": url}
        await self._manager.load_model(name, config=config, parameters=settings_from(query, "query"))
        service = self._registry.get(name)
        state = f"Version: {archive_version(service)} registered with {service.control.worker_count} initial workers"
        return json_response({"status": f'Model "{name}" {state}'})

    async def scale(self, model: str, query: _Query) -> HttpResponse:
        """Give a model as many workers as `min_worker` states."""
        service = find(self._registry, model)
        wanted = number_in(query.get("min_worker") or query.get("max_worker", "1"))
        if not isinstance(wanted, int) or not 1 <= wanted <= _MOST_WORKERS:
            rule = f"must be a number from 1 to {_MOST_WORKERS}; to have none, unregister the model"
            raise InvalidRequest(f"min_worker={brief(wanted)}: {rule}")
        name = service.facts.name
        async with self._scaling:
            count = service.control.worker_count
            for _ in range(wanted - count):
                await self._manager.load_worker(name, {"share": False})
            for _ in range(count - wanted):
                await self._manager.unload_worker(name)
        return json_response({"status": f"Workers scaled to {wanted} for model: {name}"})

    async def unregister(self, model: str, query: _Query) -> HttpResponse:
        """Unload a model."""
        service = find(self._registry, model)
        name = service.facts.name
        await self._manager.unload_model(name, version="" if model == name else service.facts.version)
        return json_response({"status": f'Model "{name}" unregistered'})


def _line(service: ModelHandle) -> dict[str, object]:
    name = service.facts.name
    return {"modelName": name, "modelUrl": getattr(service.facts.model, "archive", name)}
