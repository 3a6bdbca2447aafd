"""Requests to try: for each model a command of curl, with the model's first example or an item of its type."""

import math
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from weir.messages import JSON
from weir.model import Example, Tensor, is_tensor_model
from weir.protocols.exchange import inference_of
from weir.serving.handle import ModelHandle
from weir.wire.schema import schema_of
from weir.wire.values import UNWRITABLE, encode

MULTIPART = "multipart/form-data"
_LONGEST_EXAMPLE = 200  # characters of JSON in a command to be copied
_DEEPEST = 8  # levels of a type that are followed


def request_to_try(service: ModelHandle, curl: str, base: str) -> str:
    """Return a command for a shell. `curl` is the program with its first options, and `base` the server's URL."""
    # Without declared inputs there are no items, as for most models of MLServer.
    path = (
        f"/infer/{service.facts.name}"
        if inference_of(service).inputs(service)
        else f"/v2/models/{service.facts.name}/infer"
    )
    return f"{curl} {_options(service)} {base}{path}"


def _options(service: ModelHandle) -> str:
    """Return the options of curl for a request to try: with the model's first example, or else a file of its content type, or an
    item of its type."""
    model = service.facts.model
    stream = "-N " if service.facts.streaming else ""
    for example in model.examples[:1]:
        if data := _quoted(example.item if isinstance(example, Example) else example):
            return f"{stream}-d {data}"
    if MULTIPART in model.content_types:
        return f"{stream}-F file=@FILE"
    if model.content_types:
        return f"{stream}-H {shlex.quote(f'Content-Type: {model.content_types[0]}')} --data-binary @FILE"
    if is_tensor_model(model):
        item: Any = {tensor.name: _zeros(tensor) for tensor in model.inputs if not tensor.optional}
        if any(math.prod(map(abs, tensor.shape)) > _LONGEST_EXAMPLE for tensor in model.inputs):
            return f"{stream}-d JSON"
    elif model.Input is not None:
        try:
            item = _sample(*schema_of(model.Input, "item").json_schema(output=False))
        except Exception:  # a type may describe itself in any way, and no server ends for want of an example
            return f"{stream}-d JSON"
    else:
        return f"{stream}-d {'TEXT' if model.plain_texts else 'JSON'}"
    return f"{stream}-d {_quoted(item) or 'JSON'}"


def _quoted(item: Any) -> str:
    """Return an item as JSON, quoted for a shell; "" if JSON cannot represent it, or if it is long."""
    try:
        text = encode(item, JSON).decode()
    except UNWRITABLE:
        return ""
    return shlex.quote(text) if len(text) <= _LONGEST_EXAMPLE else ""


def _zeros(tensor: Tensor) -> Any:
    """Return a tensor of zeros as nested lists, of length 1 where any length may be."""
    array: Any = "text" if tensor.datatype == "BYTES" else False if tensor.datatype == "BOOL" else 0
    for length in reversed(tensor.shape):
        array = [array] * abs(length)
    return array


_SAMPLES: Mapping[str, Any] = MappingProxyType(
    {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "null": None}
)


def _sample(schema: Mapping[str, Any], components: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of a JSON schema; it may break rules such as patterns and limits."""
    if "$ref" in schema and depth < _DEEPEST:
        return _sample(components[schema["$ref"].rpartition("/")[2]], components, depth + 1)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key) and depth < _DEEPEST:
            return _sample(schema[key][0], components, depth + 1)
    kind = schema.get("type")
    if kind == "array":
        return [_sample(schema.get("items") or {}, components, depth + 1)] if depth < _DEEPEST else []
    if kind == "object" and depth < _DEEPEST:
        needed = schema.get("required") or schema.get("properties", {})
        return {name: _sample(schema["properties"][name], components, depth + 1) for name in needed}
    return max(schema.get("minimum", 0), _SAMPLES[kind]) if kind in ("integer", "number") else _SAMPLES.get(str(kind))
