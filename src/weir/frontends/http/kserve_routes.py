"""The routes of the Open Inference Protocol that are not inference, and the protocol's OpenAPI description.

The table DATA_PLANE has the routes. The signature of a method of DataPlane declares the types of its request and its response, from which the call is
described; inference is described for each model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import msgspec
import numpy
from msgspec import Meta, Struct

from weir import errors
from weir.frontends.http.asgi import (
    AsgiCall,
    Endpoint,
    Handler,
    HttpEndpoint,
    described_paths,
    with_names,
)
from weir.frontends.http.openapi import EVENTS, Schema, described_call, described_errors, example_value
from weir.messages import JSON, OCTETS
from weir.model import OPTIONAL, Model, Tensor, is_tensor_model
from weir.protocols.access import Control
from weir.protocols.data_plane import DataPlane, KserveError
from weir.protocols.entries import ITEM_INPUTS
from weir.protocols.exchange import inference_of
from weir.protocols.kserve import KserveContext, error_response
from weir.protocols.response import NO_STORE, HttpResponse, json_response
from weir.wire.data_plane import DATA_PLANE, DataPlaneCall
from weir.wire.kserve_json import ReadOutput, ReadRequest, ReadResponse, ReadTensor
from weir.wire.schema import REF_TEMPLATE, json_schemas
from weir.wire.sse import CONTENT_TYPE
from weir.wire.status import kserve_code

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

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


def _handler(plane: DataPlane, call: DataPlaneCall, control: Control) -> Handler:
    """Return the handler of a call over HTTP. A text is sent as such, everything else as JSON."""
    respond, declared = getattr(plane, call.name), plane.body_of(call)

    async def handle(incoming: AsgiCall) -> HttpResponse:
        if call.controls:
            control.require_http(incoming.peer, incoming.headers)
        body = {} if declared is None else {"request": await incoming.read(declared)}
        document = await respond(**incoming.path, **body)
        if isinstance(document, str):
            return HttpResponse(200, [(b"content-type", b"text/plain; charset=utf-8")], document.encode())
        return json_response(document, [NO_STORE])

    return handle


def _described(method: str, path: str, call: DataPlaneCall, respond: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the operation in OpenAPI of a call to which the method `respond` responds; None if it only refuses the call. Annotated[reads, shown] declares two
    types of a body."""
    hints = get_type_hints(respond, include_extras=True)
    reads, writes = hints.get("request"), hints["return"]
    if writes is NoReturn:
        return None
    body = get_args(reads)[1] if get_origin(reads) is Annotated else reads
    possible = _OF_CONTROL if call.controls else _OF_HEALTH if path.endswith("/ready") else ()
    return described_call(
        f"{method}_{path}".lower().replace("/", "_").replace("{", "").replace("}", ""),
        "Open Inference Protocol",
        (inspect.getdoc(respond) or "").partition("\n")[0].rstrip("."),
        {"text/plain" if writes is str else JSON: {"schema": writes}},
        _failures(possible),
        body=None if body is None else {JSON: {"schema": body}},
        needs_body=_has_required(body),
    )


def _has_required(declared: Any) -> bool:
    """Return whether a body of the type `declared` cannot be left out."""
    return isinstance(declared, type(Struct)) and any(field.required for field in msgspec.structs.fields(declared))


def _failures(possible: Sequence[type[errors.WeirError]]) -> dict[str, Any]:
    """Return the responses in OpenAPI of the `possible` errors of a call and of those of every call."""
    return described_errors((*_ALWAYS, *possible), kserve_code, _ERROR)


PREFIX = "/v2"


def kserve_endpoints(context: KserveContext) -> list[HttpEndpoint]:
    """Return the endpoints of DATA_PLANE. What this server does not offer is not described, and refused."""
    plane, refuse = DataPlane(context), partial(error_response, development=context.http.development)
    hidden: tuple[str, ...] = () if context.regions.allowed else (f"{PREFIX}/systemsharedmemory",)
    hidden += () if context.has_manager else (f"{PREFIX}/repository", f"{PREFIX}/workers")
    found: list[HttpEndpoint] = []
    for call in DATA_PLANE.values():
        app = Endpoint(_handler(plane, call, context.control), context.http, refuse)
        for method, path in call.routes():
            shown = not (path.startswith(hidden) or path.endswith("/"))
            described = _described(method, path, call, getattr(plane, call.name)) if shown else None
            found.append(HttpEndpoint(method, with_names(path), app, described))
    return found


class InferParameters(Struct, frozen=True):
    """The parameters of a request that the server reads; there may be others: texts, numbers, true and false."""

    priority: Annotated[int, Meta(ge=0, description="1 is the highest; 0: not given")] = 0
    timeout: Annotated[int, Meta(ge=0, description="microseconds; 0: not given")] = 0
    binary_data_output: bool = False


class GenerateBody(Struct):
    """A request for inference that has a field for each input in addition to these."""

    id: str = ""
    parameters: InferParameters = InferParameters()


class GenerateResponse(Struct):
    """The response to such a request, with a field for each output in addition to these."""

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
        [KserveError, InferParameters, ReadRequest, ReadResponse, GenerateBody, GenerateResponse]
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
        response = self._narrowed(ReadResponse, {"outputs": self._tensors(self._outputs)})
        needed = [tensor.name for tensor in self._inputs if not tensor.optional]
        flat = {JSON: {"schema": self._narrowed(GenerateBody, _flat(self._inputs), needed)}}
        flat_response = {JSON: {"schema": self._narrowed(GenerateResponse, _flat(self._outputs))}}
        events = {CONTENT_TYPE: EVENTS}
        examples = {"examples": found} if (found := _examples(self._service.facts.model)) else {}
        tensors = {JSON: {"schema": body, **examples}, OCTETS: _BYTES}
        return {
            "infer": self._call("infer", "with tensors", tensors, {JSON: {"schema": response}, OCTETS: _BYTES}),
            "infer_stream": self._call("infer_stream", "with tensors, as a stream", tensors, events),
            "generate": self._call("generate", "by name", flat, flat_response),
            "generate_stream": self._call("generate_stream", "by name, as a stream", flat, events),
        }

    def _call(self, call: str, how: str, body: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
        label = self._service.facts.label
        name, parameters = (
            f"post_v2_models_{label.replace('/', '_')}_{call}",
            [_HEADER_LENGTH] if OCTETS in body else [],
        )
        failures = _failures(_OF_INFERENCE)
        return described_call(name, label, f"Run {label} {how}", response, failures, body=body, parameters=parameters)

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
