"""Triton's generate extension: a flat JSON object in, whose names are those of tensors, and one out."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from weir.errors import InvalidRequest, brief
from weir.model import Tensor
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, TensorValue
from weir.wire.kserve_json import Body, encode, parse, written
from weir.wire.tensors import to_arrays
from weir.wire.values import decode_json


def read_generate(body: Body, declared: Sequence[Tensor], model: str, version: str = "") -> InferenceRequest:
    """Return the request in `body`: `{"<input>": value, ..., "id": text, "parameters": {...}}`.

    A value is nested lists; where it has fewer dimensions than the model declares, it stands for one row. Raises
    InvalidRequest naming tensor, value and rule, and TooLarge for too many lists and objects, or names.
    """
    said = parse(decode_json, body, "an object")
    if not isinstance(said, dict):
        raise InvalidRequest(f"body: must be an object as JSON, is {brief(said, 40)}")
    names = {tensor.name for tensor in declared}
    name = "" if "id" in names else said.pop("id", "")
    parameters = {} if "parameters" in names else said.pop("parameters", {})
    if not isinstance(name, str):
        raise InvalidRequest(f"id={brief(name)}: must be a text")
    try:
        checked: Parameters = msgspec.convert(parameters, Parameters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"parameters: {error}") from None
    rows = {tensor.name: _as_rows(said[tensor.name], tensor) for tensor in declared if tensor.name in said}
    arrays = to_arrays({**said, **rows}, declared)
    inputs = [
        TensorValue(tensor.name, tensor.datatype, arrays[tensor.name]) for tensor in declared if tensor.name in arrays
    ]
    return InferenceRequest(model, inputs, version=version, id=name, parameters=checked)


def _as_rows(value: Any, tensor: Tensor) -> Any:
    depth, inner = 0, value
    while isinstance(inner, list) and depth < len(tensor.shape):
        depth, inner = depth + 1, inner[0] if inner else None
    for _ in range(len(tensor.shape) - depth):
        value = [value]
    return value


def write_generated(response: InferenceResponse) -> bytes:
    """Return `response` as `{"model_name", "model_version", "<output>": value, ...}`: one value by itself, several as a flat
    list. InvalidRequest for a tensor without a JSON form."""
    said: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        said["id"] = response.id
    for tensor in response.outputs:
        data = written(tensor).data
        said[tensor.name] = data[0] if numpy.size(tensor.array) == 1 and isinstance(data, list) else data
    return encode(said)
