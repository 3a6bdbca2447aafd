"""The routes of the Open Inference Protocol that are not inference, and the protocol's OpenAPI description.

The routes show the server and its models, or change them. The signature of a handler declares the types of its request and its response. Its
endpoint is made from it, and so is its description; inference is described for each model.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weir import errors
from weir.errors import MethodNotAllowed, ModelNotReady, NotFound, Unsupported
from weir.frontends.http.asgi import (
    AsgiCall,
    Endpoint,
    Handler,
    HttpEndpoint,
    as_response,
    described_paths,
    inner_path,
    routes_of,
    with_names,
)
from weir.frontends.http.openapi import EVENTS, Schema, described_errors, example_value
from weir.messages import JSON, OCTETS
from weir.model import OPTIONAL, Model, Tensor, is_tensor_model
from weir.profiling.machine import find_hardware
from weir.protocols import kserve_metadata as kserve
from weir.protocols.entries import ITEM_INPUTS
from weir.protocols.exchange import answered_once_read, inference_of
from weir.protocols.kserve import KserveContext, RegionStatus, error_answer
from weir.protocols.kserve_metadata import KserveError
from weir.protocols.offloading import off_loop
from weir.protocols.response import NO_STORE, HttpResponse, json_response
from weir.wire.inference import Parameter
from weir.wire.kserve_json import ReadOutput, ReadRequest, ReadResponse, ReadTensor
from weir.wire.schema import REF_TEMPLATE, json_schemas, read_document
from weir.wire.sse import CONTENT_TYPE
from weir.wire.status import kserve_code

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

Answer = Callable[..., Awaitable[Any]]

_ERROR = {"$ref": REF_TEMPLATE.format("KserveError")}
_ALWAYS: tuple[type[errors.WeirError], ...] = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.DeadlineExceeded,
    errors.TooLarge,
    errors.UnsupportedMediaType,
)
_OF_CONTROL = (
    errors.Forbidden,
    errors.Unauthorized,
    errors.ModelError,
    errors.Overloaded,
    errors.Draining,
    errors.Conflict,
)
_OF_HEALTH = (errors.ModelNotReady,)


class Changes:
    """The handlers of calls that change the server; each answers one path. The body is read as the declared type of `request`."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context

    async def load(self, call: AsgiCall, request: Annotated[dict[str, Any], kserve.LoadRequest]) -> kserve.Nothing:
        """Load a model of the repository, or load it again."""

        def read() -> kserve.LoadArguments:
            parameters = read_document(request, kserve.LoadRequest).parameters or {}
            # AMD's client writes the parameters of a model in addition to `parameters`.
            own = {name: value for name, value in request.items() if name != "parameters"}
            return kserve.load_arguments(parameters, self._context.control, own)

        arguments = await off_loop(len(call.body), read)  # the body may contain a long configuration as a JSON text
        version = call.path.get("version", "")
        await self._context.manager.load_model(call.path["model"], version=version, **arguments._asdict())
        return {}

    async def unload(self, call: AsgiCall, request: kserve.UnloadRequest) -> kserve.Nothing:
        """Stop serving a model."""
        dependents = request.parameters is not None and bool(request.parameters.unload_dependents)
        version = call.path.get("version", "")
        await self._context.manager.unload_model(call.path["model"], version=version, unload_dependents=dependents)
        return {}

    async def load_worker(self, call: AsgiCall, request: dict[str, Parameter]) -> str:
        """Start a worker, or use one that runs with the same parameters; the answer is the name of its endpoint."""
        return await self._context.manager.load_worker(call.path["worker"], request)

    async def unload_worker(self, call: AsgiCall) -> kserve.Nothing:
        """Drain and end a worker of an endpoint; the endpoint ends with its last worker."""
        await self._context.manager.unload_worker(call.path["worker"])
        return {}

    async def memory_status(self, call: AsgiCall) -> list[RegionStatus]:
        """List the regions, or show one."""
        return self._context.regions.status(call.path.get("region", ""))

    async def register_memory(self, call: AsgiCall, request: kserve.RegionRequest) -> kserve.Nothing:
        """Open a region."""
        self._context.regions.register(call.path["region"], request.key, request.offset or 0, request.byte_size)
        return {}

    async def unregister_memory(self, call: AsgiCall) -> kserve.Nothing:
        """Close a region, or all."""
        self._context.regions.unregister(call.path.get("region", ""))
        return {}


class KservePages:
    """The handlers of calls that change nothing; each answers one path."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context
        self._registry = context.registry

    async def live(self, call: AsgiCall) -> kserve.LiveState:
        """Return whether the server is live, as its setting `liveness` defines it."""
        if self._context.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._context.failed.items())
            raise ModelNotReady(f"not live: {reasons}")
        return {"live": True}

    async def ready(self, call: AsgiCall) -> kserve.ReadyState:
        """Return whether every model accepts requests."""
        if not self._registry.ready:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._registry.not_ready_reasons.items())
            raise ModelNotReady(f"not ready: {reasons}")
        return {"ready": True}

    async def server(self, call: AsgiCall) -> kserve.ServerMetadata:
        """Show the server's name, version and extensions."""
        return kserve.server_metadata(self._context.settings.server_name, self._context.extensions)

    async def models(self, call: AsgiCall) -> kserve.ModelNames:
        """Name the models."""
        return {"models": list(self._registry.services)}

    async def index(self, call: AsgiCall, request: kserve.IndexRequest) -> list[kserve.ModelIndexEntry]:
        """List the models that can be loaded, with their states."""
        states = await self._context.manager.index(ready_only=bool(request.ready))
        return [cast(kserve.ModelIndexEntry, state._asdict()) for state in states]

    async def model(self, call: AsgiCall) -> kserve.ModelMetadata:
        """Describe one model."""
        return kserve.model_metadata(self._registry, call.path["model"], call.path.get("version", ""))

    async def model_ready(self, call: AsgiCall) -> kserve.ReadyState:
        """Return whether one model accepts requests, without reading it."""
        name = call.path["model"]
        kserve.check_ready(self._registry, name, call.path.get("version", ""))
        return {"name": name, "ready": True}

    async def config(self, call: AsgiCall) -> kserve.ModelConfig:
        """Show the configuration of one model."""
        return kserve.config(self._service(call))

    async def statistics(self, call: AsgiCall) -> kserve.AllStatistics:
        """Show the statistics of one model, or of every model."""
        return kserve.all_statistics(self._registry, call.path.get("model", ""), call.path.get("version", ""))

    async def no_regions(self, call: AsgiCall) -> list[RegionStatus]:
        """List the regions of GPU memory: there are never any."""
        return []

    async def nothing_to_do(self, call: AsgiCall) -> kserve.Nothing:
        """Close regions of GPU memory: there are never any."""
        return {}

    async def hardware(self, call: AsgiCall) -> kserve.AllHardware:
        """List the CPUs and GPUs of this machine."""
        return {"hardware": find_hardware()}

    async def has_hardware(self, call: AsgiCall, request: kserve.HardwareRequest) -> kserve.HardwareRequest:
        """Return whether this machine has `num` devices of a kind or name."""
        found, least = kserve.device_count(find_hardware(), request.name), max(1, request.num or 1)
        if found < least:
            raise NotFound(f"hardware {request.name!r:.80}: there are {found}, not {least}")
        return kserve.HardwareRequest(request.name, found)

    def _service(self, call: AsgiCall) -> "ModelHandle":
        return kserve.find(self._registry, call.path["model"], call.path.get("version", ""))


def _handler(answer: Answer, reads: Any, context: KserveContext, *, controls: bool) -> Handler:
    """Return the handler of a call over HTTP, whose body is read as a value of `reads` (None: no body). A text is sent as such, everything else as JSON.
    `controls`: only callers who may control the server may call it."""

    async def handle(call: AsgiCall) -> HttpResponse:
        if controls:
            context.control.require_http(call.peer, call.headers)
        if reads is None:
            written = await answered_once_read(partial(answer, call))
        else:
            written = await answer(call, await call.read(reads))
        if isinstance(written, str):
            return HttpResponse(200, [(b"content-type", b"text/plain; charset=utf-8")], written.encode())
        return json_response(written, [NO_STORE])

    return handle


def _described(method: str, path: str, answer: Answer, hints: Mapping[str, Any], *, controls: bool) -> dict[str, Any]:
    """Return the operation of a handler in OpenAPI. Annotated[reads, shown] declares two types of a body."""
    reads, writes = hints.get("request"), hints["return"]
    body = get_args(reads)[1] if get_origin(reads) is Annotated else reads
    possible = _OF_CONTROL if controls else _OF_HEALTH if path.endswith("/ready") else ()
    described: dict[str, Any] = {
        "operationId": f"{method}_{path}".lower().replace("/", "_").replace("{", "").replace("}", ""),
        "tags": ["Open Inference Protocol"],
        "summary": (inspect.getdoc(answer) or "").partition("\n")[0].rstrip("."),
        "responses": responses_of({"text/plain" if writes is str else JSON: {"schema": writes}}, possible),
    }
    if body is not None:
        described["requestBody"] = {"required": _has_required(body), "content": {JSON: {"schema": body}}}
    return described


def _has_required(declared: Any) -> bool:
    """Return whether a body of the type `declared` cannot be left out."""
    return isinstance(declared, type(Struct)) and any(field.required for field in msgspec.structs.fields(declared))


def responses_of(content: Mapping[str, Any], possible: Sequence[type[errors.WeirError]]) -> dict[str, Any]:
    """Return the responses of a call in OpenAPI: its `content`, and the `possible` errors besides those of every call."""
    return {
        "200": {"description": "The response", "content": content},
        **described_errors((*_ALWAYS, *possible), kserve_code, _ERROR),
    }


PREFIX = "/v2"

# Paths of Triton's extensions that this server does not have.
_NOT_OFFERED = (
    "/trace/setting",
    "/models/{model}/trace/setting",
    "/logging",
    "/cudasharedmemory/region/{region}/status",
    "/cudasharedmemory/region/{region}/register",
)


class Kserve:
    """ASGI middleware that answers all paths of the protocol that are not inference: `endpoints`. All other requests go to `app`."""

    def __init__(self, app: ASGIApp, context: KserveContext, endpoints: Sequence[HttpEndpoint]) -> None:
        self._app = app
        self._kserve = Starlette(
            routes=routes_of(endpoints),
            exception_handlers=dict.fromkeys((HTTPException, MethodNotAllowed), partial(_router_error, context)),
        )
        self._kserve.router.redirect_slashes = False
        # Build it now: building it for the first request would delay others.
        self._kserve.middleware_stack = self._kserve.build_middleware_stack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = inner_path(scope) if scope["type"] == "http" else ""
        ours = path == PREFIX or path.startswith(PREFIX + "/")
        await (self._kserve if ours else self._app)(scope, receive, send)


def kserve_endpoints(context: KserveContext) -> list[HttpEndpoint]:
    """Return the endpoints of the protocol that are not inference. Those of a model are also there for one version of it. What this server does not offer is
    not described, and refused."""
    pages, changes = KservePages(context), Changes(context)
    shown: list[tuple[str, str, Answer]] = [
        ("GET", "", pages.server),
        ("GET", "/health/live", pages.live),
        ("GET", "/health/ready", pages.ready),
        ("GET", "/models", pages.models),
        ("GET", "/models/stats", pages.statistics),
        ("GET", "/models/{model}", pages.model),
        ("GET", "/models/{model}/ready", pages.model_ready),
        ("GET", "/models/{model}/config", pages.config),
        ("GET", "/models/{model}/stats", pages.statistics),
        ("POST", "/repository/index", pages.index),
        ("GET", "/hardware", pages.hardware),
        ("POST", "/hardware", pages.has_hardware),
        ("GET", "/cudasharedmemory/status", pages.no_regions),
        ("POST", "/cudasharedmemory/unregister", pages.nothing_to_do),
        ("POST", "/cudasharedmemory/region/{region}/unregister", pages.nothing_to_do),
    ]
    controlled: list[tuple[str, str, Answer]] = [
        ("POST", "/repository/models/{model}/load", changes.load),
        ("POST", "/repository/models/{model}/unload", changes.unload),
        ("POST", "/workers/{worker}/load", changes.load_worker),
        ("POST", "/workers/{worker}/unload", changes.unload_worker),
        ("GET", "/systemsharedmemory/status", changes.memory_status),
        ("GET", "/systemsharedmemory/region/{region}/status", changes.memory_status),
        ("POST", "/systemsharedmemory/region/{region}/register", changes.register_memory),
        ("POST", "/systemsharedmemory/unregister", changes.unregister_memory),
        ("POST", "/systemsharedmemory/region/{region}/unregister", changes.unregister_memory),
    ]
    missing: tuple[str, ...] = () if context.regions.allowed else ("/systemsharedmemory",)
    missing += () if context.has_manager else ("/repository", "/workers")
    refuse = partial(error_answer, development=context.http.development)
    found: list[HttpEndpoint] = []

    def add(method: str, path: str, handler: Handler, described: Mapping[str, Any] | None = None) -> None:
        found.append(
            HttpEndpoint(method, PREFIX + with_names(path), Endpoint(handler, context.http, refuse), described)
        )

    for controls, calls in ((False, shown), (True, controlled)):
        for method, path, answer in calls:
            hints = get_type_hints(answer, include_extras=True)
            handler = _handler(answer, hints.get("request"), context, controls=controls)
            for each in dict.fromkeys((path, path.replace("/models/{model}", "/models/{model}/versions/{version}"))):
                described = _described(method, PREFIX + each, answer, hints, controls=controls)
                add(method, each, handler, None if each.startswith(missing) else described)
    add("GET", "/", _handler(pages.server, None, context, controls=False))
    for path in _NOT_OFFERED:
        for method in ("GET", "POST"):
            add(method, path, not_offered(path))
    return found


def not_offered(path: str) -> Handler:
    """Return the handler that refuses the path of an extension that this server does not have."""

    async def refuse(call: AsgiCall) -> HttpResponse:
        raise Unsupported(f"{PREFIX}{path}: this server does not have this extension; GET {PREFIX} lists those it has")

    return refuse


async def _router_error(context: KserveContext, request: Request, error: Exception) -> Response:
    """Return the response for an error of the router: an unknown path, or a method that the path does not take."""
    path, named = request.scope["path"], request.path_params.get("model", "")
    # Else the rest of a path was taken for a part of the name.
    is_path = "/" not in named or context.registry.knows(named)
    if is_path and isinstance(error, MethodNotAllowed):
        return as_response(error_answer(error))
    return as_response(error_answer(NotFound(f"{path}: unknown path")))


class InferParameters(Struct, frozen=True):
    """What the server reads of the parameters of a request; there may be others: texts, numbers, true and false."""

    priority: Annotated[int, Meta(ge=0, description="1 is the highest; 0: not given")] = 0
    timeout: Annotated[int, Meta(ge=0, description="microseconds; 0: not given")] = 0
    binary_data_output: bool = False


class GenerateBody(Struct):
    """A request for inference that has a field for each input in addition to these."""

    id: str = ""
    parameters: InferParameters = InferParameters()


class GenerateAnswer(Struct):
    """The answer to such a request, with a field for each output in addition to these."""

    model_name: str
    model_version: str = ""


_PARAMETERS = {"$ref": REF_TEMPLATE.format("InferParameters")}

_OF_INFERENCE = (errors.Overloaded, errors.ModelError, errors.ModelNotReady, errors.Unsupported, errors.Forbidden)
_BYTES = {"schema": {"description": "bytes"}}
_HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "schema": {"type": "integer"},
    "description": "bytes of JSON before binary tensors; 0: the body is the one input, raw",
}


def kserve_openapi(context: KserveContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the OpenAPI paths of everything that `context` offers, inference once for each model, and the components that they refer to;
    types stand in place of their schemas."""
    _, components = json_schemas(
        [KserveError, InferParameters, ReadRequest, ReadResponse, GenerateBody, GenerateAnswer]
    )
    paths: dict[str, Any] = described_paths(kserve_endpoints(context))
    for service in context.registry.all:
        version = f"/versions/{service.facts.version}" if service.facts.version else ""
        for call, described in _ModelCalls(service, components).described().items():
            paths[f"{PREFIX}/models/{service.facts.name}{version}/{call}"] = {"post": described}
    return paths, components


class _ModelCalls:
    """The calls of one model: the declared bodies, narrowed to its tensors."""

    def __init__(self, service: "ModelHandle", components: Mapping[str, Schema]) -> None:
        self._service = service
        self._components = components
        self._inputs = inference_of(service).inputs(service)
        self._outputs = inference_of(service).outputs(service)

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the operation of each call."""
        names = {"enum": [tensor.name for tensor in self._outputs]}
        wanted = _list_of(self._narrowed(ReadOutput, {"name": names, "parameters": _PARAMETERS}))
        inputs = self._tensors(self._inputs)
        body = self._narrowed(ReadRequest, {"inputs": inputs, "outputs": wanted, "parameters": _PARAMETERS})
        answer = self._narrowed(ReadResponse, {"outputs": self._tensors(self._outputs)})
        needed = [tensor.name for tensor in self._inputs if not tensor.optional]
        flat = {JSON: {"schema": self._narrowed(GenerateBody, _flat(self._inputs), needed)}}
        flat_answer = {JSON: {"schema": self._narrowed(GenerateAnswer, _flat(self._outputs))}}
        events = {CONTENT_TYPE: EVENTS}
        examples = {"examples": found} if (found := _examples(self._service.facts.model)) else {}
        tensors = {JSON: {"schema": body, **examples}, OCTETS: _BYTES}
        return {
            "infer": self._call("infer", "with tensors", tensors, {JSON: {"schema": answer}, OCTETS: _BYTES}),
            "infer_stream": self._call("infer_stream", "with tensors, as a stream", tensors, events),
            "generate": self._call("generate", "by name", flat, flat_answer),
            "generate_stream": self._call("generate_stream", "by name, as a stream", flat, events),
        }

    def _call(self, call: str, how: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        label = self._service.facts.label
        return {
            "operationId": f"post_v2_models_{label.replace('/', '_')}_{call}",
            "tags": [label],
            "summary": f"Run {label} {how}",
            "parameters": [_HEADER_LENGTH] if OCTETS in body else [],
            "requestBody": {"required": True, "content": body},
            "responses": responses_of(answer, _OF_INFERENCE),
        }

    def _narrowed(self, declared: type[Struct], properties: Schema, required: Sequence[str] = ()) -> Schema:
        """Return the schema of a declared body with `properties` in place of its own, or added to them."""
        whole = self._components[declared.__name__]
        return whole | {"properties": whole["properties"] | properties, "required": [*whole["required"], *required]}

    def _tensors(self, tensors: Sequence[Tensor]) -> Schema:
        return _list_of({"oneOf": [self._tensor(tensor) for tensor in tensors]})

    def _tensor(self, tensor: Tensor) -> Schema:
        """Return the schema of a tensor. Of its shape only the length is described, for many tools cannot read a rule for each place."""
        rank = len(tensor.shape)
        bounds = {"minItems": rank - 1 if tensor.batch == OPTIONAL else rank, "maxItems": rank}
        shape = _list_of({"type": "integer", "minimum": 1}) | bounds
        fixed = {
            "name": {"const": tensor.name},
            "datatype": {"const": tensor.datatype},
            "shape": shape,
            "data": {"type": "array"},
        }
        return self._narrowed(ReadTensor, fixed) | _tensor_schema(tensor)


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _tensor_schema(tensor: Tensor) -> Schema:
    return {"description": f"{tensor.datatype}, shape {list(tensor.shape)}"}


def _flat(tensors: Sequence[Tensor]) -> Schema:
    return {tensor.name: _tensor_schema(tensor) for tensor in tensors}


def _examples(model: type[Model]) -> dict[str, Any]:
    """Return the model's examples, as far as JSON can hold them, as requests."""
    items = [example_value(example)["item"] for example in model.examples]
    if is_tensor_model(model):
        requests = [
            [_tensor_body(tensor, item[tensor.name]) for tensor in model.inputs if tensor.name in item]
            for item in items
            if isinstance(item, dict)
        ]
    else:
        requests = [[_tensor_body(ITEM_INPUTS[0], [_element(model, item)])] for item in items]
    return {str(number): {"value": {"inputs": inputs}} for number, inputs in enumerate(requests, 1)}


def _element(model: type[Model], item: Any) -> str:
    return item if model.plain_texts and isinstance(item, str) else msgspec.json.encode(item).decode()


def _tensor_body(tensor: Tensor, data: list[Any]) -> dict[str, Any]:
    shape = list(numpy.shape(numpy.array(data, object)))
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data}
