"""Requests and responses of the Open Inference Protocol (KServe v2) as Python objects. All frontends and clients share them.

The array of a tensor has the tensor's shape and the dtype of its datatype (tensors.DTYPES): BYTES is an object array of bytes, and BF16 an array of 16-bit
unsigned integers with the bits of the numbers. An array may be a read-only view of the body that it came in.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy

from weir.errors import InvalidRequest
from weir.messages import Block
from weir.model import Tensor
from weir.wire.tensors import Arrays, check_bound, leaves_batch_out

# The header, trailer or parameter of an error response that has the name of the error's class. The protocol itself has only a text.
ERROR_NAME = "weir-error"

Parameter = str | int | float | bool
Parameters = dict[str, Parameter]


@dataclass(slots=True, eq=False, repr=False)
class TensorValue:
    """One named tensor with its values."""

    name: str
    datatype: str
    array: numpy.ndarray[Any, Any]
    parameters: Parameters = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TensorValue({self.name!r}, {self.datatype}, shape {list(self.array.shape)})"


class RequestedOutput(NamedTuple):
    """An output that the caller requests. `parameters` say how it is sent."""

    name: str
    parameters: Parameters


@dataclass(slots=True, eq=False, repr=False)
class InferenceRequest:
    """A request for inference. `outputs` None: all outputs; `version` "": the default version; `id` "": no id.

    `without_batch`: its tensors came without the batch dimension, so those of its response have none either (see `add_batch`).
    """

    model: str
    inputs: list[TensorValue]
    _: KW_ONLY
    version: str = ""
    id: str = ""
    outputs: list[RequestedOutput] | None = None
    parameters: Parameters = field(default_factory=dict)
    without_batch: bool = False


@dataclass(slots=True, eq=False, repr=False)
class InferenceResponse:
    """A response of a model. An empty `version` or `id` is not written."""

    model: str
    outputs: list[TensorValue]
    _: KW_ONLY
    version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)


HEAD = "\0head"  # no tensor has this name


class ResponseHead(NamedTuple):
    """The options of a request besides its tensors, for the model or its response. `outputs`: the names of the wanted outputs; None for all."""

    id: str
    outputs: list[str] | None
    parameters: Parameters | None = None


def keep_head(arrays: Arrays, request: InferenceRequest, rows: int) -> Arrays:
    """Return `arrays`, which have `rows` rows, with the head of their `request` as one more that is divided as they are; without it if the request has
    neither an id nor parameters."""
    parameters = {name: value for name, value in request.parameters.items() if name != "binary_data_output"}
    if not (request.id or parameters):
        return arrays
    outputs = None if request.outputs is None else [output.name for output in request.outputs]
    head = numpy.empty(rows, object)
    head[:] = msgspec.json.encode(ResponseHead(request.id, outputs, parameters))
    return {**arrays, HEAD: head}


def take_head(arrays: Arrays) -> tuple[Arrays, ResponseHead | None]:
    """Return the arrays and the head that `keep_head` has put together."""
    if HEAD not in arrays:
        return arrays, None
    head = msgspec.json.decode(arrays[HEAD][0], type=ResponseHead)
    return {name: array for name, array in arrays.items() if name != HEAD}, head


class ArenaArrays(Arrays):
    """The payload of a TENSORS request. Some or all of its arrays are in `block`, which is in the request arena.

    It is itself a Block, and retaining and releasing it does so with `block`. It goes to a worker as a plain dict, in which arrays in the arena are
    references.
    """

    __slots__ = ("block",)

    def __init__(self, arrays: Arrays, block: Block) -> None:
        super().__init__(arrays)
        self.block = block

    @property
    def view(self) -> memoryview:
        """The bytes of the whole block."""
        return self.block.view

    def retain(self) -> None:
        """Count one more reference to the block."""
        self.block.retain()

    def release(self) -> None:
        """Count one reference to the block less."""
        self.block.release()

    def as_plain(self) -> Arrays:
        """Return the arrays without the block."""
        return dict(self)


def bind(inputs: Sequence[TensorValue], declared: Sequence[Tensor]) -> Arrays:
    """Return the arrays of `inputs` by name, in the order of the tensors that a model has `declared`.

    Raises InvalidRequest, naming tensor, value and rule, for a missing, unknown or repeated tensor, for another datatype (nothing is converted) or shape,
    and for different numbers of rows.
    """
    found: dict[str, TensorValue] = {}
    for value in inputs:
        if value.name in found:
            raise InvalidRequest(f"tensor {value.name!r}: is there twice, names must be unique")
        found[value.name] = value
    check_bound({name: (value.datatype, value.array.shape) for name, value in found.items()}, declared)
    return {tensor.name: found[tensor.name].array for tensor in declared if tensor.name in found}


def add_batch(request: InferenceRequest, declared: Sequence[Tensor]) -> None:
    """Make `request` one row if its tensors have no batch dimension and the `declared` inputs allow that."""
    if leaves_batch_out({value.name: value.array.shape for value in request.inputs}, declared):
        request.without_batch = True
        for value in request.inputs:
            value.array = value.array[None]


def take_batch(response: InferenceResponse) -> None:
    """Remove the batch dimension from the response to a request that had none."""
    for value in response.outputs:
        if len(value.array) == 1:  # responses of a stream may have other numbers of rows
            value.array = value.array[0] if value.array.ndim > 1 else value.array.reshape(())
