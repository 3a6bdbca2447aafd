"""The Open Inference Protocol as JSON: requests and responses, Triton's generate extension, and outlines of requests that the worker reads.

Sources: specification/protocol/inference_rest.md of https://github.com/kserve/open-inference-protocol, and docs/protocol/extension_generate.md of
https://github.com/triton-inference-server/server.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
from msgspec import UNSET, UnsetType

from weir.errors import InvalidRequest, brief
from weir.messages import JSON
from weir.model import Tensor
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameter, Parameters, RequestedOutput, TensorValue
from weir.wire.tensors import (
    DTYPES,
    batch_key,
    check_bound,
    check_datatype,
    element_count,
    leaves_batch_out,
    read_elements,
    to_arrays,
    unpack_elements,
    write_json,
)
from weir.wire.values import (
    SMALL_BODY,
    UNREADABLE,
    decode_json,
    find_nonfinite,
    half_in,
    has_slow_floats,
    refuse_names,
    uncollected,
)

Body = bytes | bytearray | memoryview
# Returns the bytes of a tensor that are not in the JSON, by the tensor's name and parameters; None if the parameters name no such bytes.
Find = Callable[[str, Parameters], memoryview | None]

BINARY_SIZE = "binary_data_size"
REGION = "shared_memory_region"
# Parameters about the transport of one message. They are not kept with the tensor.
_ELSEWHERE = (BINARY_SIZE, REGION, "shared_memory_offset", "shared_memory_byte_size")


class ReadTensor(msgspec.Struct, gc=False):
    """A tensor in a message that is read. Its data are not decoded yet."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | None = None


class ReadOutput(msgspec.Struct, gc=False, omit_defaults=True):
    """A requested output, as it is read and written."""

    name: str
    parameters: Parameters | None = None


class ReadRequest(msgspec.Struct):
    """A request as it is read."""

    inputs: list[ReadTensor]
    id: str | None = None
    outputs: list[ReadOutput] | None = None
    parameters: Parameters | None = None


class ReadResponse(msgspec.Struct):
    """A response as it is read."""

    model_name: str
    outputs: list[ReadTensor]
    model_version: str | None = None
    id: str | None = None
    parameters: Parameters | None = None


class WrittenTensor(msgspec.Struct, omit_defaults=True):
    """A tensor as it is written. `data` is UNSET if they are not in the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Parameters = {}
    data: list[Any] | msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class WrittenRequest(msgspec.Struct, omit_defaults=True):
    """A request as it is written."""

    inputs: list[WrittenTensor]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[ReadOutput] | msgspec.UnsetType = msgspec.UNSET


class WrittenResponse(msgspec.Struct, omit_defaults=True):
    """A response as it is written."""

    model_name: str
    outputs: list[WrittenTensor]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = {}


decode_request = msgspec.json.Decoder(ReadRequest).decode
decode_response = msgspec.json.Decoder(ReadResponse).decode
encode = msgspec.json.Encoder().encode


def read_request(body: Body, model: str, version: str = "", *, find: Find | None = None) -> InferenceRequest:
    """Return the request to `model` in a JSON `body`.

    `find` returns the bytes of a tensor that is in shared memory. Raises InvalidRequest for a malformed request. Whether the tensors are those of the model
    is not checked here (see inference.bind).
    """
    read = parse(decode_request, body, "an inference request")
    return request_of(read, model, version, find or nowhere)


def read_response(body: Body, *, find: Find | None = None) -> InferenceResponse:
    """Return the response in a JSON `body`. Raises InvalidRequest for a malformed response."""
    read = parse(decode_response, body, "an inference response")
    return response_of(read, find or nowhere)


def write_request(request: InferenceRequest) -> bytes:
    """Return `request` as JSON. Raises InvalidRequest for a tensor without a JSON form."""
    return encode(request_to_write(request, [written(tensor) for tensor in request.inputs]))


def write_response(response: InferenceResponse) -> bytes:
    """Return `response` as JSON. Raises InvalidRequest for a tensor without a JSON form.

    A tensor in shared memory is written without its data.
    """
    return encode(response_to_write(response, [written(tensor) for tensor in response.outputs]))


def parse(decode: Callable[[Body], Any], body: Body, what: str) -> Any:
    """Return the result of `decode` for `body`, which must be `what`. Raises InvalidRequest if `decode` fails, and TooLarge for too many names."""
    try:
        return decode(body) if len(body) <= SMALL_BODY else _decode_long(decode, body)
    except RecursionError:
        raise InvalidRequest(f"body: must be {what} as JSON, nested less deeply") from None
    except UNREADABLE as error:
        if named := find_nonfinite(body):
            raise InvalidRequest(named) from None
        raise InvalidRequest(f"body: {half_in(body) or f'must be {what} as JSON ({error})'}") from None


def read_object(body: Body) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest for anything else, and TooLarge for too many lists, objects or names."""
    document = parse(decode_json, body, "an object")
    if not isinstance(document, dict):
        raise InvalidRequest(f"body: must be an object as JSON, is {brief(document, 40)}")
    return document


def _decode_long(decode: Callable[[Body], Any], body: Body) -> Any:
    refuse_names(body, JSON)
    with uncollected(len(body)):
        _check_parameters(body)
        return decode(body)


# Limit of the bytes of all parameters, for a body with floats that are slow to read (see values.py).
_MAX_PARAMETERS = 64 << 10


class _Parametrised(msgspec.Struct):
    """Anything with parameters, which are not decoded."""

    parameters: msgspec.Raw = msgspec.Raw()


class _AllParametrised(_Parametrised):
    inputs: list[_Parametrised] = []
    outputs: list[_Parametrised] | None = None


_decode_parametrised = msgspec.json.Decoder(_AllParametrised).decode


def _check_parameters(body: Body) -> None:
    """Raise InvalidRequest for parameters whose floats would block the interpreter for too long. Floats of data are read later, in another way."""
    if not has_slow_floats(body):
        return
    read = _decode_parametrised(body)
    size = sum(len(bytes(each.parameters)) for each in (read, *read.inputs, *(read.outputs or ())))
    if size > _MAX_PARAMETERS:
        raise InvalidRequest(f"parameters: have {size} bytes, must have at most {_MAX_PARAMETERS}")


def request_of(read: ReadRequest, model: str, version: str, find: Find) -> InferenceRequest:
    """Return the request in a decoded document."""
    return InferenceRequest(
        model,
        tensors_of(read.inputs, find),
        version=version,
        id=read.id or "",
        outputs=requested_outputs(read.outputs),
        parameters=read.parameters or {},
    )


def response_of(read: ReadResponse, find: Find) -> InferenceResponse:
    """Return the response in a decoded document."""
    return InferenceResponse(
        read.model_name,
        tensors_of(read.outputs, find),
        version=read.model_version or "",
        id=read.id or "",
        parameters=read.parameters or {},
    )


def requested_outputs(outputs: list[ReadOutput] | None) -> list[RequestedOutput] | None:
    """Return the requested outputs; None for all. Raises InvalidRequest for a repeated name."""
    if outputs is None:
        return None
    refuse_duplicates("output", [output.name for output in outputs])
    return [RequestedOutput(output.name, output.parameters or {}) for output in outputs] or None


def tensors_of(tensors: list[ReadTensor], find: Find) -> list[TensorValue]:
    """Return the tensors with their values. `find` is called in the order of the tensors. Raises InvalidRequest."""
    refuse_duplicates("tensor", [tensor.name for tensor in tensors])
    return [_value_of(tensor, find) for tensor in tensors]


# Limit of tensors, and of requested outputs, in one request: each costs microseconds, however few bytes it has.
MAX_TENSORS = 1024


def refuse_too_many(what: str, count: int) -> None:
    """Raise InvalidRequest if `count` exceeds MAX_TENSORS. `what` is "tensor" or "output"."""
    if count > MAX_TENSORS:
        raise InvalidRequest(f"{what}s: there are {count}, must be at most {MAX_TENSORS}")


def refuse_duplicates(what: str, names: list[str]) -> None:
    """Raise InvalidRequest for too many names, and for a repeated name."""
    refuse_too_many(what, len(names))
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"{what} {brief(name)}: is there twice, names must be unique")
        seen.add(name)


def _value_of(tensor: ReadTensor, find: Find) -> TensorValue:
    name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
    if datatype not in DTYPES:
        raise InvalidRequest(f"tensor {name!r}: has datatype {datatype!r}, not one of {', '.join(DTYPES)}")
    count = element_count(name, shape)
    parameters = tensor.parameters or {}
    raw = find(name, parameters) if parameters else None
    if raw is None:
        if tensor.data is msgspec.UNSET:
            raise InvalidRequest(f"tensor {name!r}: has no data")
        array = read_elements(name, datatype, shape, count, tensor.data)
    elif tensor.data is not msgspec.UNSET:
        raise InvalidRequest(f"tensor {name!r}: has data in the JSON and {', '.join(parameters)}, only one is allowed")
    else:
        array = read_raw(name, datatype, shape, count, raw)
        parameters = {key: value for key, value in parameters.items() if key not in _ELSEWHERE}
    return TensorValue(name, datatype, array, parameters)


def read_raw(name: str, datatype: str, shape: tuple[int, ...], count: int, raw: memoryview) -> Any:
    """Return the array with the bytes `raw`: a read-only view of them, except for BYTES. Raises InvalidRequest for too few or too many bytes."""
    if datatype == "BYTES":
        return unpack_elements(raw, count, name).reshape(shape)
    due = count * DTYPES[datatype].itemsize
    if len(raw) != due:
        raise InvalidRequest(f"tensor {name!r}: has {len(raw)} bytes, {datatype} {list(shape)} takes {due}")
    return view_of(raw, datatype).reshape(shape)


def view_of(raw: memoryview, datatype: str) -> Any:
    """Return the elements with the bytes `raw`, as a read-only view of them."""
    if not len(raw):
        return numpy.empty(0, DTYPES[datatype])
    view = numpy.frombuffer(raw, DTYPES[datatype])
    view.flags.writeable = False
    return view


def nowhere(name: str, parameters: Parameters) -> None:
    """A Find for messages without binary data and shared memory: raise InvalidRequest for a tensor whose parameters announce such bytes."""
    if BINARY_SIZE in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {BINARY_SIZE}, but the body has no binary data")
    if REGION in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {REGION}, but shared memory cannot be used here")


def request_to_write(request: InferenceRequest, inputs: list[WrittenTensor]) -> WrittenRequest:
    """Return `request` as the struct that is encoded."""
    outputs: list[ReadOutput] | msgspec.UnsetType = msgspec.UNSET
    if request.outputs is not None:
        outputs = [ReadOutput(output.name, output.parameters or None) for output in request.outputs]
    return WrittenRequest(inputs, request.id, request.parameters, outputs)


def response_to_write(response: InferenceResponse, outputs: list[WrittenTensor]) -> WrittenResponse:
    """Return `response` as the struct that is encoded."""
    return WrittenResponse(response.model, outputs, response.version, response.id, response.parameters)


def written(tensor: TensorValue) -> WrittenTensor:
    """Return `tensor` as the struct that is encoded. Raises InvalidRequest if it has no JSON form."""
    data: list[Any] | msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if REGION not in tensor.parameters:
        data = write_json(tensor.name, tensor.datatype, tensor.array)
    return WrittenTensor(tensor.name, tensor.datatype, tensor.array.shape, tensor.parameters, data)


def read_generate(body: Body, declared: Sequence[Tensor], model: str, version: str = "") -> InferenceRequest:
    """Return the request in `body`: `{"<input>": value, ..., "id": text, "parameters": {...}}`.

    A value is a number, a text or nested lists. One with fewer dimensions than the model declares gets leading dimensions of 1. Raises InvalidRequest naming
    tensor, value and rule, and TooLarge for too many lists, objects or names.
    """
    document = read_object(body)
    names = {tensor.name for tensor in declared}
    name = "" if "id" in names else document.pop("id", "")
    parameters = {} if "parameters" in names else document.pop("parameters", {})
    if not isinstance(name, str):
        raise InvalidRequest(f"id={brief(name)}: must be a text")
    try:
        checked: Parameters = msgspec.convert(parameters, Parameters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"parameters: {error}") from None
    rows = {tensor.name: _as_rows(document[tensor.name], tensor) for tensor in declared if tensor.name in document}
    arrays = to_arrays({**document, **rows}, declared)
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
    """Return `response` as `{"model_name", "model_version", "<output>": value, ...}`. A single element is a value, several are a flat list.

    Raises InvalidRequest for a tensor without a JSON form.
    """
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    for tensor in response.outputs:
        data = written(tensor).data
        document[tensor.name] = data[0] if numpy.size(tensor.array) == 1 and isinstance(data, list) else data
    return encode(document)


MAX_REMEMBERED = 256  # combinations of inputs and shapes that a BodyPeek remembers


class Outline(NamedTuple):
    """The facts of a body that the queue must know: rows, batch key and parameters.

    `for_server`: the worker cannot read the body or write the response, because a tensor is in shared memory, because an output is requested there, as
    binary data or as classes, or because the batch dimension is left out.
    """

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
    """Reads outlines of requests to one model, whose inputs are `declared`. It remembers the combinations of inputs that it has read."""

    def __init__(self, declared: Sequence[Tensor]) -> None:
        self._declared = tuple(declared)
        self._known: dict[tuple[_Tensor, ...], Outline] = {}  # of bodies with these inputs and without parameters

    def __call__(self, body: Body) -> Outline:
        """Return the outline of `body`.

        Raises InvalidRequest if it is not an inference request, or if the names, datatypes, shapes or numbers of rows of its tensors are not as declared. The
        data are not checked: the worker refuses wrong ones.
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
            check_datatype(tensor.name, tensor.datatype)
            element_count(tensor.name, tensor.shape)
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
