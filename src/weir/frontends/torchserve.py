"""TorchServe's APIs: inference, POST or PUT /predictions/NAME[/VERSION], and management, on a port of its own, where models are listed, registered, scaled
and unregistered and all else is as on the server's other port.

A model archive's handler gets the whole request, and decides the status and the headers of the response. Other models get one item.

Weir's own rules hold: who may manage, and that models come from the server's TARGETs and its repository only.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qsl

from weir.catalog.adapters.torchserve import number_in, settings_from
from weir.catalog.sources import default_name
from weir.errors import (
    Conflict,
    InvalidRequest,
    MethodNotAllowed,
    ModelError,
    ModelNotFound,
    SettingsError,
    WeirError,
    brief,
)
from weir.frontends.frontend import FrontendContext
from weir.frontends.http.application import AddedEndpoints, make_app
from weir.frontends.http.asgi import AsgiCall, Endpoint, HttpEndpoint, with_names
from weir.frontends.http.server import HttpServer
from weir.protocols.account import charge
from weir.protocols.exchange import Exchange
from weir.protocols.kserve import KserveContext
from weir.protocols.native import NativeProtocol, RequestHead, read_head_for
from weir.protocols.response import HttpResponse, error_headers, json_response
from weir.serving import NAME_IN_PATH, is_name
from weir.serving.handle import ModelHandle, Models
from weir.wire.predictions import CONTENT_TYPE, error_document, read_response, write
from weir.wire.status import http_code

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
        name, more = service.facts.name, wanted - service.control.worker_count
        for _ in range(abs(more)):  # others may unregister it between two workers
            await self._manager.resize(name, 1 if more > 0 else -1)
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


_PATH = re.compile(rf"/predictions/({NAME_IN_PATH})")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OF_THE_SERVER = re.compile("connection|content-(encoding|length)|date|keep-alive|server|transfer-encoding|upgrade")
_KINDS = {404: "ModelNotFound", 405: "MethodNotAllowed", 409: "ConflictStatus", 413: "RequestEntityTooLarge"}


def archive_version(service: ModelHandle) -> str:
    """Return the version that a model archive states; that of the model for any other."""
    return service.facts.version or getattr(service.facts.model, "archive_version", "")


def find(registry: Models, named: str) -> ModelHandle:
    """Return the service that the end of a path names: NAME or NAME/VERSION, of which a name may have a slash too. Raises ModelNotFound."""
    name, _, version = named.rpartition("/")
    if not name or registry.knows(named):
        return registry.get(named)
    service = registry.get(name)
    return service if version == archive_version(service) else registry.get(name, version)


class TorchServe(NativeProtocol):
    """The protocol of /predictions, see HttpProtocol."""

    prefix = b"/predictions"

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """See HttpProtocol."""
        if (service := self.service_at(path)) is None:
            return None
        if method not in ("POST", "PUT"):
            raise MethodNotAllowed(f"{method} {path}: takes POST and PUT only", details={"allow": ["POST", "PUT"]})
        if CONTENT_TYPE in service.facts.model.content_types:  # the handler reads what they say of the body
            kept = [each for each in headers if each[0] not in (b"accept", b"content-type")]
            headers = [*kept, (b"accept", CONTENT_TYPE.encode()), (b"content-type", CONTENT_TYPE.encode())]
        return read_head_for(service, self._settings, "POST", path, headers)

    def service_at(self, path: str) -> ModelHandle | None:
        """See NativeProtocol."""
        found = _PATH.fullmatch(path)
        return None if found is None else find(self._registry, found[1])

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """See HttpProtocol."""
        if head.content_type != CONTENT_TYPE:
            return await super().respond(exchange, head, body)
        charge(len(body))
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        body = write(((head.request_id or b"").decode("latin-1"), sent, body))
        return _response((await super().respond(exchange, head, body)).body)

    def error_response(self, error: BaseException, service: ModelHandle | None) -> HttpResponse:
        """See HttpProtocol."""
        return error_response(error)


def _response(output: bytes) -> HttpResponse:
    """Return the response that a handler has made. Raises ModelError for one that HTTP cannot carry."""
    status, headers, body = read_response(output)
    if not 200 <= status <= 599:
        raise ModelError(f"the handler set the status {status}, must be from 200 to 599")
    for name, value in headers:
        if _OF_THE_SERVER.fullmatch(name) or not (_NAME.fullmatch(name) and value.isprintable() and value.isascii()):
            rule = "which no model may, or to a value that no header has"
            raise ModelError(f"the handler set the header {name!r:.80}, {rule}")
    if status in (204, 304):  # which have no body
        return HttpResponse(status, [], b"")
    return HttpResponse(status, [(name.encode(), value.encode()) for name, value in headers], body)


def error_response(error: BaseException) -> HttpResponse:
    """Write an error as TorchServe does, whose status of a handler that fails is 503. Settings may come in a query."""
    code = 503 if isinstance(error, ModelError) else 400 if isinstance(error, SettingsError) else http_code(error)
    kind = _KINDS.get(code) or ("BadRequest" if code < 429 else "InternalServer")
    if isinstance(error, ModelNotFound) and error.message.startswith("unknown version"):
        kind = "ModelVersionNotFound"
    message = error.message if isinstance(error, WeirError) else "internal error"
    return HttpResponse(code, error_headers(error), error_document(code, kind, message))
