"""What callers give and get: arrays by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy
from numpy.typing import NDArray

from weir.errors import InvalidRequest
from weir.wire.inference import AskedOutput, InferenceRequest, InferenceResponse, Parameter, Parameters, TensorValue
from weir.wire.tensors import DTYPES

Array = NDArray[Any]
# Arrays by the names of the tensors; a TensorValue where the datatype cannot be told from the array (BF16).
Inputs = Mapping[str, Array | TensorValue]

# A model of items has one tensor each way, BYTES of JSON documents; these are what its metadata calls them.
ITEM_INPUT, ITEM_OUTPUT = "input", "output"

# In the parameters of each part of a stream: whether it is the last.
FINAL = "triton_final_response"

_DATATYPES = {
    dtype: datatype for datatype, dtype in DTYPES.items() if datatype not in ("BYTES", "BF16")
}  # what numpy calls them, to what the protocol does


class RequestExtras(TypedDict, total=False):
    """What may be said of a request beside its inputs.

    `version` of the model; names of the `outputs` wanted (all of them otherwise); `id`; `parameters` for the server;
    `priority` (1 is the highest, 0 the default); `timeout` in seconds, told to the server too.
    """

    version: str
    outputs: Sequence[str]
    id: str
    parameters: Mapping[str, Parameter]
    priority: int
    timeout: float


class Result(Mapping[str, Array]):
    """An answer: its arrays by the names of the outputs. BYTES are an object array of bytes, BF16 bits as uint16.

    Arrays that came over a connection are read-only views of what was received.
    """

    def __init__(self, response: InferenceResponse) -> None:
        self.model = response.model
        self.version = response.version
        self.id = response.id
        self.parameters: Parameters = {name: said for name, said in response.parameters.items() if name != FINAL}
        self.outputs = {output.name: output for output in response.outputs}

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        return f"Result({self.model!r}, {list(self.outputs.values())})"


def request_of(model: str, inputs: Inputs, asking: RequestExtras) -> InferenceRequest:
    """Return the request for `inputs`. Raises InvalidRequest for an array of no datatype of the protocol."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs {inputs!r:.80}: model {model!r} takes tensors, must be arrays by name")
    parameters: Parameters = dict(asking.get("parameters") or {})
    if asking.get("priority"):
        parameters["priority"] = asking["priority"]
    if asking.get("timeout"):
        parameters["timeout"] = max(1, round(asking["timeout"] * 1e6))
    outputs = asking.get("outputs")
    return InferenceRequest(
        model,
        [tensor_of(name, value) for name, value in inputs.items()],
        version=asking.get("version", ""),
        id=asking.get("id", ""),
        outputs=None if outputs is None else [AskedOutput(name, {}) for name in outputs],
        parameters=parameters,
    )


def is_tensors(value: Any) -> bool:
    """Tell whether `value` can only be arrays by name, and no item of a model of items."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(each, (TensorValue, numpy.ndarray)) for each in value.values())
    )


def takes_items(metadata: Mapping[str, Any]) -> bool:
    """Tell from a model's metadata whether it takes items, each a JSON document."""
    inputs, outputs = metadata.get("inputs") or [], metadata.get("outputs") or []
    named = [(tensor["name"], tensor["datatype"]) for tensor in (*inputs, *outputs)]
    return named == [(ITEM_INPUT, "BYTES"), (ITEM_OUTPUT, "BYTES")]


def item_request(model: str, item: Any, asking: RequestExtras) -> InferenceRequest:
    """Return the request for one plain `item`. Raises InvalidRequest for what JSON cannot write."""
    try:
        document = msgspec.json.encode(item)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"item {item!r:.80}: cannot be written as JSON ({error})") from error
    element = numpy.empty(1, object)
    element[0] = document
    return request_of(model, {ITEM_INPUT: TensorValue(ITEM_INPUT, "BYTES", element)}, asking)


def item_answer(response: InferenceResponse) -> Any:
    """Return the plain answer to one item: what its JSON document says, or the bytes of a model that answers in another form."""
    document = bytes(response.outputs[0].array[0])
    try:
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return document


def tensor_of(name: str, value: Array | TensorValue) -> TensorValue:
    """Return an array as a tensor. Texts and bytes are BYTES."""
    if isinstance(value, TensorValue):
        return value
    array = numpy.asarray(value)
    if array.dtype.kind in "OSU":
        return TensorValue(name, "BYTES", _bytes_of(name, array))
    native = array.dtype.newbyteorder("=")
    if native not in _DATATYPES:
        raise InvalidRequest(f"tensor {name!r}: an array of {array.dtype} is of no datatype of the protocol")
    return TensorValue(name, _DATATYPES[native], array.astype(native, copy=False))


def _bytes_of(name: str, array: Array) -> Array:
    found = numpy.empty(array.shape, object)
    for place, element in numpy.ndenumerate(array):
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise InvalidRequest(f"tensor {name!r}: {element!r:.80} is neither bytes nor a text")
        found[place] = element
    return found
