"""All routes of the protocol but those of inference: what shows the server and its models, and what changes them. `Control` checks each call that changes something."""

import re
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import InvalidRequest, MethodNotAllowed, ModelNotReady, Unsupported, brief
from weir.frontends.http.asgi import AsgiCall, Endpoint, Handler, as_response, inner_path
from weir.profiling.machine import find_hardware
from weir.protocols.kserve.context import KserveContext
from weir.protocols.kserve.metadata import (
    config,
    device_count,
    find,
    load_arguments,
    metadata,
    server_metadata,
    statistics,
)
from weir.protocols.kserve.protocol import JSON_TYPE, error_answer
from weir.protocols.offloading import off_loop
from weir.protocols.response import HttpResponse, encode_safely

if TYPE_CHECKING:
    from weir.serving.service import Service


def document(value: Any) -> HttpResponse:
    """Return the answer that is this JSON document."""
    return HttpResponse(200, [JSON_TYPE, (b"cache-control", b"no-store")], encode_safely(value))


T = TypeVar("T", str, int, bool)


def text_of(said: dict[str, Any], name: str) -> str:
    """Return the text `name` of a document. Raises InvalidRequest."""
    return _of_type(said, name, str, "a text")


def count_of(said: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return the integer `name` of a document; `default` if it is not there, or null. Raises InvalidRequest."""
    if default is not None and said.get(name) is None:
        return default
    return _of_type(said, name, int, "an integer")


def flag_of(said: dict[str, Any], name: str) -> bool:
    """Return the truth value `name` of a document; False if it is not there, or null. Raises InvalidRequest."""
    return False if said.get(name) is None else _of_type(said, name, bool, "true or false")


def _of_type(said: dict[str, Any], name: str, kind: type[T], rule: str) -> T:
    if name not in said:
        raise InvalidRequest(f"{name}: is missing, must be {rule}")
    value = said[name]
    if type(value) is not kind:
        raise InvalidRequest(f"{name}={brief(value)}: must be {rule}")
    return value


class Changes:
    """The handlers; each answers one path."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context

    # Models.

    async def index(self, call: AsgiCall) -> HttpResponse:
        """List the models that there are to be loaded, with their states. Anybody may ask."""
        states = self._context.manager.index(ready_only=flag_of(await call.document(), "ready"))
        return document([state._asdict() for state in states])

    async def load(self, call: AsgiCall) -> HttpResponse:
        """Load a model of the repository, or load it anew."""
        self._check(call)
        whole = await call.document()
        own = {name: value for name, value in whole.items() if name != "parameters"}  # AMD's client has them there
        read = partial(load_arguments, parameters_of(whole), self._context.control, own)
        said = await off_loop(len(call.body), read)  # a configuration is a document in a text of this one
        version = call.path.get("version", "")
        await self._context.manager.load_model(call.path["model"], version=version, **said._asdict())
        return document({})

    async def unload(self, call: AsgiCall) -> HttpResponse:
        """Serve a model no longer."""
        self._check(call)
        dependents = flag_of(parameters_of(await call.document()), "unload_dependents")
        version = call.path.get("version", "")
        await self._context.manager.unload_model(call.path["model"], version=version, unload_dependents=dependents)
        return document({})

    # Workers, as the AMD Inference Server has them.

    async def load_worker(self, call: AsgiCall) -> HttpResponse:
        """Start a worker, or join one that runs with the same parameters; the answer is its endpoint."""
        self._check(call)
        endpoint = await self._context.manager.load_worker(call.path["worker"], await call.document())
        return HttpResponse(200, [(b"content-type", b"text/plain; charset=utf-8")], endpoint.encode())

    async def unload_worker(self, call: AsgiCall) -> HttpResponse:
        """Drain and end a worker of an endpoint; the last one takes the endpoint with it."""
        self._check(call)
        await self._context.manager.unload_worker(call.path["worker"])
        return document({})

    # Shared memory.

    async def memory_status(self, call: AsgiCall) -> HttpResponse:
        """List the regions, or show one."""
        self._check(call)
        return document(self._context.regions.status(call.path.get("region", "")))

    async def register_memory(self, call: AsgiCall) -> HttpResponse:
        """Open a region."""
        self._check(call)
        said = await call.document()
        key, offset, size = text_of(said, "key"), count_of(said, "offset", 0), count_of(said, "byte_size")
        self._context.regions.register(call.path["region"], key, offset, size)
        return document({})

    async def unregister_memory(self, call: AsgiCall) -> HttpResponse:
        """Close a region, or all."""
        self._check(call)
        self._context.regions.unregister(call.path.get("region", ""))
        return document({})

    def _check(self, call: AsgiCall) -> None:
        self._context.control.require_http(call.peer, call.headers)


def parameters_of(said: dict[str, Any]) -> dict[str, Any]:
    """Return the object `parameters` of a document; {} if there is none, or null. Raises InvalidRequest."""
    parameters = said.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"parameters={brief(parameters)}: must be an object")
    return parameters


class KservePages:
    """The handlers; each answers one path."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context
        self._registry = context.registry

    async def live(self, call: AsgiCall) -> HttpResponse:
        """Say that this process answers, and that its models can start workers, where liveness counts them."""
        if self._context.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._context.failed.items())
            raise ModelNotReady(f"not live: {reasons}")
        return document({"live": True})

    async def ready(self, call: AsgiCall) -> HttpResponse:
        """Say whether every model takes requests."""
        if not self._registry.ready:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._registry.not_ready_reasons.items())
            raise ModelNotReady(f"not ready: {reasons}")
        return document({"ready": True})

    async def server(self, call: AsgiCall) -> HttpResponse:
        """Say what this server is and what it offers."""
        return document(server_metadata(self._context.settings.server_name, self._context.extensions))

    async def models(self, call: AsgiCall) -> HttpResponse:
        """Name the models."""
        return document({"models": list(self._registry.services)})

    async def model(self, call: AsgiCall) -> HttpResponse:
        """Describe one model."""
        service = self._service(call)
        return document(metadata(service, [each for each in self._registry.versions(service.name) if each]))

    async def model_ready(self, call: AsgiCall) -> HttpResponse:
        """Say whether one model takes requests."""
        service = self._service(call)
        if not service.ready:
            raise ModelNotReady(f"model {service.label!r} is not ready: {service.not_ready_reason}")
        return document({"name": service.name, "ready": True})

    async def config(self, call: AsgiCall) -> HttpResponse:
        """Show the configuration of one model."""
        return document(config(self._service(call)))

    async def statistics(self, call: AsgiCall) -> HttpResponse:
        """Count what one model has done, or every model."""
        return document({"model_stats": [statistics(service) for service in self._asked_for(call)]})

    async def no_regions(self, call: AsgiCall) -> HttpResponse:
        """Say that there are no regions of a device's memory: there never are any."""
        return document([])

    async def nothing_to_do(self, call: AsgiCall) -> HttpResponse:
        """Take away regions of a device's memory, of which there are none."""
        return document({})

    async def hardware(self, call: AsgiCall) -> HttpResponse:
        """List the CPUs and GPUs of this machine."""
        return document({"hardware": [each.to_dict() for each in find_hardware()]})

    async def has_hardware(self, call: AsgiCall) -> HttpResponse:
        """Say whether there are as many devices of a kind or name as asked for, or one: 200, or 404."""
        said = await call.document()
        name, count = text_of(said, "name"), count_of(said, "num", 1)
        found = device_count(find_hardware(), name)
        if found < max(1, count):
            error = f"hardware {name!r:.80}: there are {found}, not {max(1, count)}"
            return HttpResponse(404, [JSON_TYPE], encode_safely({"error": error}))
        return document({"name": name, "num": found})

    def _asked_for(self, call: AsgiCall) -> "list[Service]":
        if "model" not in call.path:
            return self._registry.all
        if "version" in call.path:
            return [self._service(call)]
        return list(self._registry.versions(self._service(call).name).values())

    def _service(self, call: AsgiCall) -> "Service":
        return find(self._registry, call.path["model"], call.path.get("version", ""))


PREFIX = "/v2"

# Extensions of Triton that its clients know and this server has not.
_NOT_OFFERED = (
    "/trace/setting", "/models/{model}/trace/setting", "/logging", "/cudasharedmemory/region/{region}/status",
    "/cudasharedmemory/region/{region}/register",
)  # fmt: skip

_VERSIONED = re.compile(r"/models/\{model\}")


class Kserve:
    """ASGI middleware that answers every path of the protocol but those of inference, and leaves the rest to `app`."""

    def __init__(self, app: ASGIApp, context: KserveContext) -> None:
        self._app = app
        refuse = partial(error_answer, development=context.http.development)
        self._kserve = Starlette(
            routes=[
                Route(PREFIX + path, Endpoint(handler, context.http, refuse), methods=[method])
                for (method, path), handler in handlers(context).items()
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


def handlers(context: KserveContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path below PREFIX: what is offered, and what says that it is not."""
    refused = {(method, path): not_offered(path) for path in _NOT_OFFERED for method in ("GET", "POST")}
    return every(context) | {("GET", "/"): KservePages(context).server} | refused


def offered(context: KserveContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path that this server really has."""
    missing: tuple[str, ...] = () if context.regions.allowed else ("/systemsharedmemory",)
    missing += () if context.has_manager else ("/repository", "/workers")
    return {
        (method, path): handler for (method, path), handler in every(context).items() if not path.startswith(missing)
    }


def every(context: KserveContext) -> dict[tuple[str, str], Handler]:
    """Return what answers each method and path that servers may have."""
    pages, changes = KservePages(context), Changes(context)
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

    async def refuse(call: AsgiCall) -> HttpResponse:
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
