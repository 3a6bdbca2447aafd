"""The requests and responses of the Open Inference Protocol (KServe v2), as values: every frontend and every client makes and reads these.

A tensor's array is exactly of its shape and of its datatype's dtype (tensors.DTYPES): BYTES are an object array of
bytes, BF16 the bit patterns as 16-bit unsigned integers. It may be a read-only view of the body that it came in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy

from weir.errors import InvalidRequest
from weir.model import Tensor
from weir.wire.tensors import Arrays, check_bound, leaves_batch_out

# The header, trailer or parameter in which an answer that is an error has the name of its class. The protocol has
# only a text for it.
ERROR_NAME = "weir-error"

Parameter = str | int | float | bool
Parameters = dict[str, Parameter]


class TensorValue:
    """One named tensor with its values."""

    __slots__ = ("array", "datatype", "name", "parameters")

    def __init__(
        self, name: str, datatype: str, array: numpy.ndarray[Any, Any], parameters: Parameters | None = None
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array
        self.parameters: Parameters = parameters or {}

    def __repr__(self) -> str:
        return f"TensorValue({self.name!r}, {self.datatype}, shape {list(self.array.shape)})"


class AskedOutput(NamedTuple):
    """An output that the caller asks for, and how."""

    name: str
    parameters: Parameters


class InferenceRequest:
    """What a caller asks of a model. `outputs` None: all of them; `version` "": the default one; `id` "": none given.

    `without_batch`: its tensors came without the batch dimension, and its answer goes without it (see `add_batch`).
    """

    __slots__ = ("id", "inputs", "model", "outputs", "parameters", "version", "without_batch")

    def __init__(
        self, model: str, inputs: list[TensorValue], *, version: str = "", id: str = "",
        outputs: list[AskedOutput] | None = None, parameters: Parameters | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters: Parameters = parameters or {}
        self.without_batch = False


class InferenceResponse:
    """What a model answers. `version` "" and `id` "" are left out when it is written."""

    __slots__ = ("id", "model", "outputs", "parameters", "version")

    def __init__(
        self, model: str, outputs: list[TensorValue], *, version: str = "", id: str = "",
        parameters: Parameters | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self.id = id
        self.outputs = outputs
        self.parameters: Parameters = parameters or {}


class Shared(Protocol):
    """A place in shared memory that counts its shares (workers.executor.Block)."""

    @property
    def view(self) -> memoryview:
        """Its bytes."""

    def retain(self) -> None:
        """Take a further share in it."""

    def release(self) -> None:
        """Give one share back."""


class ArenaArrays(Arrays):
    """The payload of a TENSORS request whose arrays lie, some or all of them, in `block`, a place in the request arena.

    It is itself a Block: retained and released like one, it keeps the place for as long as there is a share. It
    travels to a worker as a plain dict, and what lies in the arena as a reference.
    """

    __slots__ = ("block",)

    def __init__(self, arrays: Arrays, block: Shared) -> None:
        super().__init__(arrays)
        self.block = block

    @property
    def view(self) -> memoryview:
        """The bytes of the whole place."""
        return self.block.view

    def retain(self) -> None:
        """Take a further share in the place."""
        self.block.retain()

    def release(self) -> None:
        """Give one share back."""
        self.block.release()

    def as_plain(self) -> Arrays:
        """Return the arrays without their place."""
        return dict(self)


def bind(inputs: Sequence[TensorValue], declared: Sequence[Tensor]) -> Arrays:
    """Return the arrays of `inputs` as a model's `declared` ones, in that order.

    Raises InvalidRequest, naming tensor, value and rule, for a tensor that is missing, unknown or there twice, for
    another datatype (nothing is converted), another shape, or different numbers of rows.
    """
    found: dict[str, TensorValue] = {}
    for value in inputs:
        if value.name in found:
            raise InvalidRequest(f"tensor {value.name!r}: is there twice, names must be unique")
        found[value.name] = value
    check_bound({name: (value.datatype, value.array.shape) for name, value in found.items()}, declared)
    return {tensor.name: found[tensor.name].array for tensor in declared if tensor.name in found}


def add_batch(request: InferenceRequest, declared: Sequence[Tensor]) -> None:
    """Make `request` one row if its tensors came without the batch dimension and the model, whose inputs are `declared`,
    allows it."""
    if leaves_batch_out({value.name: value.array.shape for value in request.inputs}, declared):
        request.without_batch = True
        for value in request.inputs:
            value.array = value.array[None]


def take_batch(response: InferenceResponse) -> None:
    """Write the answer to a request that came without the batch dimension as such."""
    for value in response.outputs:
        if len(value.array) == 1:  # a stream's answers may have other numbers of rows
            value.array = value.array[0] if value.array.ndim > 1 else value.array.reshape(())
