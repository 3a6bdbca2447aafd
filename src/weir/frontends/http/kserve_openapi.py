"""The OpenAPI description of the protocol's routes."""

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy

from weir import errors
from weir.frontends.http.kserve_routes import PREFIX, offered
from weir.frontends.http.openapi import Schema, example_value
from weir.messages import JSON, OCTETS
from weir.model import OPTIONAL, Model, Tensor, is_tensor_model
from weir.protocols.kserve.context import KserveContext
from weir.protocols.status import kserve_code
from weir.serving.inference import ITEM_INPUTS
from weir.wire.sse import CONTENT_TYPE

if TYPE_CHECKING:
    from weir.serving.service import Service

_ERROR: Schema = {
    "type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"], "additionalProperties": False,
}  # fmt: skip
_PARAMETERS: Schema = {
    "type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]},
    "properties": {
        "priority": {"type": "integer", "minimum": 0, "description": "1 is the highest; 0 says nothing"},
        "timeout": {"type": "integer", "minimum": 0, "description": "microseconds; 0 says nothing"},
        "binary_data_output": {"type": "boolean"},
    },
}  # fmt: skip

_ALWAYS: tuple[type[errors.WeirError], ...] = (
    errors.InvalidRequest, errors.ModelNotFound, errors.DeadlineExceeded, errors.TooLarge, errors.UnsupportedMediaType,
)  # fmt: skip
_OF_INFERENCE = (errors.Overloaded, errors.ModelError, errors.ModelNotReady, errors.Unsupported, errors.Forbidden)
_OF_CONTROL = (
    errors.Forbidden, errors.Unauthorized, errors.ModelError, errors.Overloaded, errors.Draining, errors.Conflict,
)  # fmt: skip
_OF_HEALTH = (errors.ModelNotReady,)

# What bodies hold, by path below PREFIX. A path without an entry takes none.
_BODIES: dict[str, Schema] = {
    "/repository/index": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
    "/repository/models/{model}/load": {
        "type": "object", "properties": {"parameters": {"type": "object", "properties": {"config": {"type": "string"}}}},
    },
    "/repository/models/{model}/unload": {
        "type": "object",
        "properties": {"parameters": {"type": "object", "properties": {"unload_dependents": {"type": "boolean"}}}},
    },
    "/workers/{worker}/load": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
    "/hardware": {
        "type": "object", "properties": {"name": {"type": "string"}, "num": {"type": "integer"}}, "required": ["name"],
    },
    "/systemsharedmemory/region/{region}/register": {
        "type": "object", "required": ["key", "byte_size"],
        "properties": {
            "key": {"type": "string"}, "offset": {"type": "integer", "minimum": 0},
            "byte_size": {"type": "integer", "minimum": 1},
        },
    },
}  # fmt: skip

_NAME = re.compile(r"\{(\w+)\}")


def kserve_paths(context: KserveContext) -> dict[str, Any]:
    """Return the OpenAPI paths of everything that `context` offers; inference once for each model."""
    paths: dict[str, Any] = {}
    for (method, path), handler in offered(context).items():
        paths.setdefault(PREFIX + path, {})[method.lower()] = _operation(method, path, inspect.getdoc(handler) or "")
    for service in context.registry.all:
        version = f"/versions/{service.version}" if service.version else ""
        path = f"{PREFIX}/models/{service.name}{version}"
        inference = _inference(service)
        paths[f"{path}/infer"] = {"post": inference}
        paths[f"{path}/infer_stream"] = {"post": _streamed(inference, "infer", inference["requestBody"])}
        flat = {"required": True, "content": {JSON: {"schema": _generate(service.inference.inputs(service))}}}
        paths[f"{path}/generate"] = {"post": _generated(inference, flat, service.inference.outputs(service))}
        paths[f"{path}/generate_stream"] = {"post": _streamed(inference, "generate", flat) | {"parameters": []}}
    return paths


def _operation(method: str, path: str, text: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": f"{method}_{PREFIX}{path}".lower().replace("/", "_").replace("{", "").replace("}", ""),
        "tags": ["Open Inference Protocol"],
        "summary": text.partition("\n")[0].rstrip("."),
        "parameters": [_in_path(name) for name in _NAME.findall(path)],
        "responses": _responses(path, {JSON: {"schema": {}}}),
    }
    if path == "/workers/{worker}/load":
        described["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    schema = _BODIES.get(path.replace("/versions/{version}", ""))
    if schema is not None:
        described["requestBody"] = {"required": "required" in schema, "content": {JSON: {"schema": schema}}}
    return described


def _responses(path: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": "As said", "content": content}, **_errors((*_ALWAYS, *_possible(path)))}


def _possible(path: str) -> Sequence[type[errors.WeirError]]:
    if path.startswith(("/repository", "/workers", "/systemsharedmemory")):
        return _OF_CONTROL
    return _OF_HEALTH if path.endswith("/ready") else ()


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _errors(possible: Sequence[type[errors.WeirError]]) -> dict[str, Any]:
    kinds: dict[str, list[str]] = {}
    for kind in possible:
        kinds.setdefault(str(kserve_code(kind())), []).append(f"{kind.__name__}: {(kind.__doc__ or '').strip()}")
    return {
        code: {"description": " ".join(texts), "content": {JSON: {"schema": _ERROR}}}
        for code, texts in sorted(kinds.items())
    }


def _inference(service: "Service") -> dict[str, Any]:
    label, inputs, outputs = service.label, service.inference.inputs(service), service.inference.outputs(service)
    request: dict[str, Any] = {"schema": _request(inputs, outputs)}
    if examples := _examples(service.model):
        request["examples"] = examples
    length = {
        "name": "Inference-Header-Content-Length", "in": "header", "required": False, "schema": {"type": "integer"},
        "description": "bytes of JSON before binary tensors; 0: the body is the one input, raw",
    }  # fmt: skip
    return {
        "operationId": f"post_v2_models_{label.replace('/', '_')}_infer",
        "tags": [label],
        "summary": f"Ask {label} with tensors",
        "parameters": [length],
        "requestBody": {
            "required": True,
            "content": {JSON: request, OCTETS: {"schema": {"description": "bytes"}}},
        },
        "responses": {
            "200": {
                "description": "The answer",
                "content": {JSON: {"schema": _response(outputs)}, OCTETS: {"schema": {"description": "bytes"}}},
            },
            **_errors((*_ALWAYS, *_OF_INFERENCE)),
        },
    }


def _streamed(inference: dict[str, Any], name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the operation that answers with events, instead of the `inference` that answers once."""
    events = {"description": "Each answer as an event", "content": {CONTENT_TYPE: {"schema": {"type": "string"}}}}
    return inference | {
        "operationId": inference["operationId"].removesuffix("infer") + f"{name}_stream",
        "summary": f"{inference['summary']}, answer by answer",
        "requestBody": body,
        "responses": inference["responses"] | {"200": events},
    }


def _generated(inference: dict[str, Any], body: dict[str, Any], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the operation that takes and gives flat objects, instead of the `inference` that does so with tensors."""
    schema = {
        "type": "object",
        "required": ["model_name"],
        "properties": {"model_name": {"type": "string"}, "model_version": {"type": "string"}, **_flat(outputs)},
    }
    answer = {"description": "The answer", "content": {JSON: {"schema": schema}}}
    return inference | {
        "operationId": inference["operationId"].removesuffix("infer") + "generate",
        "summary": f"{inference['summary']} by name",
        "parameters": [],
        "requestBody": body,
        "responses": inference["responses"] | {"200": answer},
    }


def _flat(tensors: Sequence[Tensor]) -> Schema:
    return {tensor.name: {"description": f"{tensor.datatype}, shape {list(tensor.shape)}"} for tensor in tensors}


def _generate(inputs: Sequence[Tensor]) -> Schema:
    return {
        "type": "object",
        "required": [tensor.name for tensor in inputs if not tensor.optional],
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            **_flat(inputs),
        },
    }


def _examples(model: type[Model]) -> dict[str, Any]:
    """Return the model's examples, as far as JSON can say them, as requests."""
    items = [example_value(example)["item"] for example in model.examples]
    if is_tensor_model(model):
        requests = [_asked(model, item) for item in items if isinstance(item, dict)]
    else:
        requests = [[_given(ITEM_INPUTS[0], [_element(model, item)])] for item in items]
    return {str(number): {"value": {"inputs": inputs}} for number, inputs in enumerate(requests, 1)}


def _element(model: type[Model], item: Any) -> str:
    return item if model.plain_texts and isinstance(item, str) else msgspec.json.encode(item).decode()


def _asked(model: type[Model], item: dict[str, Any]) -> list[dict[str, Any]]:
    return [_given(tensor, item[tensor.name]) for tensor in model.inputs if tensor.name in item]


def _given(tensor: Tensor, data: list[Any]) -> dict[str, Any]:
    shape = list(numpy.shape(numpy.array(data, object)))
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data}


def _request(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Schema:
    asked = {
        "type": "object", "required": ["name"],
        "properties": {"name": {"enum": [tensor.name for tensor in outputs]}, "parameters": _PARAMETERS},
    }  # fmt: skip
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "inputs": {"type": "array", "items": {"oneOf": [_tensor(tensor) for tensor in inputs]}},
            "outputs": {"type": "array", "items": asked},
        },
    }


def _response(outputs: Sequence[Tensor]) -> Schema:
    return {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"}, "model_version": {"type": "string"}, "id": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {"type": "array", "items": {"oneOf": [_tensor(tensor) for tensor in outputs]}},
        },
    }  # fmt: skip


def _tensor(tensor: Tensor) -> Schema:
    """Return the schema of a tensor; its data may also be nested, or binary and not there."""
    return {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "description": f"{tensor.datatype}, shape {list(tensor.shape)}",
        "properties": {
            "name": {"const": tensor.name}, "datatype": {"const": tensor.datatype}, "shape": _shape(tensor),
            "data": {"type": "array"}, "parameters": {"type": "object"},
        },
    }  # fmt: skip


def _shape(tensor: Tensor) -> Schema:
    """Return the schema of a shape: its length alone, for too many tools cannot read a rule for each place."""
    rank = len(tensor.shape)
    least = rank - 1 if tensor.batch == OPTIONAL else rank
    return {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": least, "maxItems": rank}
