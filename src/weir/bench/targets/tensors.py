"""The inference requests that are sent at the doors of the Open Inference Protocol: `--data`, or what the metadata ask for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weir.bench.targets.doors import Door
from weir.bench.targets.payloads import read_payloads
from weir.errors import InvalidRequest, SettingsError
from weir.model import DATATYPES
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_json import read_request

_ALL = 1  # what every number of a made-up tensor is


class Declared(NamedTuple):
    """An input as the metadata have it."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def said_requests(data: str | Sequence[Any], door: Door) -> list[InferenceRequest]:
    """Return the requests whose JSON is `data` (see read_payloads). Raises SettingsError."""
    try:
        return [read_request(body, door.model, door.version) for body in read_payloads(data)]
    except InvalidRequest as error:
        raise SettingsError(f"data: must be inference requests as JSON: {error.message}") from error


def made_request(door: Door, inputs: Sequence[Declared], rows: int, example: Any = None) -> InferenceRequest:
    """Return a request of `rows` rows: of ones, or with the item `example` of an item model.

    A length that is free is 1. Raises SettingsError where nobody can know what to send.
    """
    tensors = [_made(door, tensor, rows, example) for tensor in inputs]
    return InferenceRequest(door.model, tensors, version=door.version)


def _made(door: Door, tensor: Declared, rows: int, example: Any) -> TensorValue:
    first = [
        rows if length == -1 else length for length in tensor.shape[:1]
    ]  # without a batch it may be fixed, or not there
    shape = (*first, *(1 if length == -1 else length for length in tensor.shape[1:]))
    if tensor.datatype != "BYTES":
        return TensorValue(tensor.name, tensor.datatype, np.full(shape, _ALL, DATATYPES[tensor.datatype]))
    if example is None:
        raise SettingsError(f"model {door.model!r}: nobody knows what its {tensor.name!r} is; say what with --data")
    array = np.empty(shape, object)
    array[...] = msgspec.json.encode(example)
    return TensorValue(tensor.name, tensor.datatype, array)


def declared_inputs(model: str, metadata: Any) -> list[Declared]:
    """Return the inputs that the metadata of `model` name. Raises SettingsError if there are none in it."""
    try:
        inputs = [Declared(each["name"], each["datatype"], tuple(each["shape"])) for each in metadata["inputs"]]
    except (KeyError, TypeError):
        inputs = []
    if not inputs or any(each.datatype not in DATATYPES for each in inputs):
        raise SettingsError(
            f"model {model!r}: the server has no metadata of it that name inputs; is it there? Say what to send with --data"
        )
    return inputs
