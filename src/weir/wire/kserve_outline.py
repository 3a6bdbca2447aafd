"""What the line must know of a JSON inference request, read without reading the data: rows, batch key, parameters.

The body then travels undecoded to the worker (content type messages.KSERVE).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from weir.errors import InvalidRequest
from weir.model import Tensor
from weir.wire.inference import Parameter, Parameters
from weir.wire.kserve_json import REGION, Body, parse, refuse_duplicates
from weir.wire.shapes import element_count
from weir.wire.tensors import DTYPES, batch_key, check_bound, leaves_batch_out

MAX_REMEMBERED = 256  # shapes; there are few where it matters


class Outline(NamedTuple):
    """What a body says besides its data. `for_server`: the worker cannot read it or write the answer, as a tensor lies in shared
    memory, as an output is asked for there, as binary data or as classes, or as the batch dimension is left out."""

    rows: int
    key: tuple[Any, ...]
    parameters: Parameters
    for_server: bool


class _Place(msgspec.Struct, frozen=True, gc=False):
    shared_memory_region: Parameter | UnsetType = UNSET


class _Tensor(msgspec.Struct, frozen=True, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _Place | None = None


class _Output(msgspec.Struct, gc=False):
    parameters: Parameters | None = None


class _Head(msgspec.Struct, gc=False):
    inputs: tuple[_Tensor, ...]
    outputs: list[_Output] | None = None
    parameters: Parameters | None = None


_decode = msgspec.json.Decoder(_Head).decode
_NO_PARAMETERS: Parameters = {}


class BodyPeek:
    """Reads outlines for one model, whose inputs are `declared`. Remembers the shapes that it has met."""

    def __init__(self, declared: Sequence[Tensor]) -> None:
        self._declared = tuple(declared)
        self._known: dict[tuple[_Tensor, ...], Outline] = {}  # of bodies with these inputs, and nothing else

    def __call__(self, body: Body) -> Outline:
        """Return the outline of `body`.

        Raises InvalidRequest if it is no inference request, or if its tensors' names, datatypes, shapes or numbers of rows
        are not those declared. Of the data it looks only at the brackets: the worker refuses what is wrong there.
        """
        head = parse(_decode, body, "an inference request")
        known = self._known.get(head.inputs) or self._learn(head.inputs)
        if head.outputs is None and not head.parameters:
            return known
        parameters = head.parameters or _NO_PARAMETERS
        by_server = parameters.get("binary_data_output") is True or any(map(_is_by_server, head.outputs or ()))
        return Outline(known.rows, known.key, parameters, by_server or known.for_server)

    def _learn(self, inputs: tuple[_Tensor, ...]) -> Outline:
        refuse_duplicates("tensor", [tensor.name for tensor in inputs])
        shapes = {tensor.name: tensor.shape for tensor in inputs}
        for tensor in inputs:
            if tensor.datatype not in DTYPES:
                raise InvalidRequest(
                    f"tensor {tensor.name!r}: has datatype {tensor.datatype!r}, not one of {', '.join(DTYPES)}"
                )
            element_count(tensor.name, tensor.shape, 1)
        without_batch = leaves_batch_out(shapes, self._declared)
        if without_batch:
            shapes = {name: (1, *shape) for name, shape in shapes.items()}
        rows = check_bound({tensor.name: (tensor.datatype, shapes[tensor.name]) for tensor in inputs}, self._declared)
        elsewhere = any(tensor.parameters and tensor.parameters.shared_memory_region is not UNSET for tensor in inputs)
        found = Outline(rows, batch_key(self._declared, shapes), _NO_PARAMETERS, elsewhere or without_batch)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[inputs] = found
        return found


def _is_by_server(output: _Output) -> bool:
    parameters = output.parameters or _NO_PARAMETERS
    return bool(parameters.get("binary_data")) or REGION in parameters or "classification" in parameters
