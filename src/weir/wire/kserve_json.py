"""The Open Inference Protocol as JSON: requests and responses, Triton's flat generate form, and what the queue must know of a body that the worker reads."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
from msgspec import UNSET, UnsetType

from weir.errors import InvalidRequest, brief
from weir.messages import JSON
from weir.model import Tensor
from weir.wire.inference import AskedOutput, InferenceRequest, InferenceResponse, Parameter, Parameters, TensorValue
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
    find_half,
    find_nonfinite,
    has_slow_floats,
    refuse_names,
    uncollected,
)

Body = bytes | bytearray | memoryview
# What finds the bytes of a tensor that are not in the JSON: by its name and parameters; None if they name none.
Find = Callable[[str, Parameters], memoryview | None]

BINARY_SIZE = "binary_data_size"
REGION = "shared_memory_region"
# Parameters that hold for one message only: they are not kept with the tensor.
_ELSEWHERE = (BINARY_SIZE, REGION, "shared_memory_offset", "shared_memory_byte_size")


class ReadTensor(msgspec.Struct, gc=False):
    """A tensor as it is read, its data not yet decoded."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | None = None


class ReadOutput(msgspec.Struct, gc=False, omit_defaults=True):
    """An asked output as it is read and written."""

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
    """A tensor as it is written; `data` UNSET where it is not in the JSON."""

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
    """Return the request in a JSON `body`, for `model`.

    `find` returns the bytes of a tensor that lie elsewhere (shared memory). Raises InvalidRequest for what is malformed;
    whether the tensors are the model's is not looked at (see inference.bind).
    """
    read = parse(decode_request, body, "an inference request")
    return request_of(read, model, version, find or nowhere)


def read_response(body: Body, *, find: Find | None = None) -> InferenceResponse:
    """Return the response in a JSON `body`. Raises InvalidRequest for what is malformed."""
    read = parse(decode_response, body, "an inference response")
    return response_of(read, find or nowhere)


def write_request(request: InferenceRequest) -> bytes:
    """Return `request` as JSON. InvalidRequest for a tensor that has no JSON form."""
    return encode(request_to_write(request, [written(tensor) for tensor in request.inputs]))


def write_response(response: InferenceResponse) -> bytes:
    """Return `response` as JSON. InvalidRequest for a tensor that has no JSON form.

    A tensor whose parameters name a region of shared memory is written without its data.
    """
    return encode(response_to_write(response, [written(tensor) for tensor in response.outputs]))


def parse(decode: Callable[[Body], Any], body: Body, what: str) -> Any:
    """Return what `decode` makes of `body`; InvalidRequest whatever is wrong with it, and TooLarge for too many names."""
    try:
        return decode(body) if len(body) <= SMALL_BODY else _decode_long(decode, body)
    except RecursionError:
        raise InvalidRequest(f"body: must be {what} as JSON, nested less deeply") from None
    except UNREADABLE as error:
        named = find_nonfinite(body) or find_half(body)
        raise InvalidRequest(str(named) if named else f"body: must be {what} as JSON ({error})") from None


def _decode_long(decode: Callable[[Body], Any], body: Body) -> Any:
    refuse_names(body, JSON)
    with uncollected(len(body)):
        _check_parameters(body)
        return decode(body)


# Bytes of all parameters of a body that has floats which take long to read.
_MAX_PARAMETERS = 64 << 10


class _Parametrised(msgspec.Struct):
    """What has parameters, which are not looked into."""

    parameters: msgspec.Raw = msgspec.Raw()


class _AllParametrised(_Parametrised):
    inputs: list[_Parametrised] = []
    outputs: list[_Parametrised] | None = None


_decode_parametrised = msgspec.json.Decoder(_AllParametrised).decode


def _check_parameters(body: Body) -> None:
    """Raise InvalidRequest for so many parameters that their floats would keep the interpreter; those of data are not read yet."""
    if not has_slow_floats(body):
        return
    read = _decode_parametrised(body)
    size = sum(len(bytes(each.parameters)) for each in (read, *read.inputs, *(read.outputs or ())))
    if size > _MAX_PARAMETERS:
        raise InvalidRequest(f"parameters: {size} bytes of them, there may be {_MAX_PARAMETERS}")


def request_of(read: ReadRequest, model: str, version: str, find: Find) -> InferenceRequest:
    """Return the request that was `read`."""
    return InferenceRequest(
        model,
        tensors_of(read.inputs, find),
        version=version,
        id=read.id or "",
        outputs=asked_of(read.outputs),
        parameters=read.parameters,
    )


def response_of(read: ReadResponse, find: Find) -> InferenceResponse:
    """Return the response that was `read`."""
    return InferenceResponse(
        read.model_name,
        tensors_of(read.outputs, find),
        version=read.model_version or "",
        id=read.id or "",
        parameters=read.parameters,
    )


def asked_of(outputs: list[ReadOutput] | None) -> list[AskedOutput] | None:
    """Return the outputs asked for; None for all. InvalidRequest for a name that is there twice."""
    if outputs is None:
        return None
    refuse_duplicates("output", [output.name for output in outputs])
    return [AskedOutput(output.name, output.parameters or {}) for output in outputs] or None


def tensors_of(tensors: list[ReadTensor], find: Find) -> list[TensorValue]:
    """Return the tensors that were read, with their values. Bytes that `find` is asked for are asked for in order."""
    refuse_duplicates("tensor", [tensor.name for tensor in tensors])
    return [_value_of(tensor, find) for tensor in tensors]


# Tensors, or outputs asked for, of one request: each costs microseconds, however few bytes it has.
MAX_TENSORS = 1024


def refuse_too_many(what: str, count: int) -> None:
    """Raise InvalidRequest for more tensors, or outputs asked for, than a request may have."""
    if count > MAX_TENSORS:
        raise InvalidRequest(f"{what}s: {count} of them, a request may have {MAX_TENSORS}")


def refuse_duplicates(what: str, names: list[str]) -> None:
    """Raise InvalidRequest if there are too many names, or if one is there twice."""
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
    count = element_count(name, shape, item_bytes(datatype))
    parameters = tensor.parameters or {}
    raw = find(name, parameters) if parameters else None
    if raw is None:
        if tensor.data is msgspec.UNSET:
            raise InvalidRequest(f"tensor {name!r}: has no data")
        array = read_elements(name, datatype, shape, count, tensor.data)
    elif tensor.data is not msgspec.UNSET:
        raise InvalidRequest(f"tensor {name!r}: has data in the JSON and {', '.join(parameters)}, only one may be")
    else:
        array = read_raw(name, datatype, shape, count, raw)
        parameters = {key: value for key, value in parameters.items() if key not in _ELSEWHERE}
    return TensorValue(name, datatype, array, parameters)


def item_bytes(datatype: str) -> int:
    """Return how many bytes an element takes (BYTES: at least) as raw bytes."""
    return 4 if datatype == "BYTES" else DTYPES[datatype].itemsize


def read_raw(name: str, datatype: str, shape: tuple[int, ...], count: int, raw: memoryview) -> Any:
    """Return the array whose bytes are `raw`: a read-only view, but for BYTES. InvalidRequest if they are too few or many."""
    if datatype == "BYTES":
        return unpack_elements(raw, count, name).reshape(shape)
    due = count * DTYPES[datatype].itemsize
    if len(raw) != due:
        raise InvalidRequest(f"tensor {name!r}: has {len(raw)} bytes, {datatype} {list(shape)} takes {due}")
    return view_of(raw, datatype).reshape(shape)


def view_of(raw: memoryview, datatype: str) -> Any:
    """Return the elements whose bytes are `raw`, as a read-only view of them."""
    if not len(raw):
        return numpy.empty(0, DTYPES[datatype])
    view = numpy.frombuffer(raw, DTYPES[datatype])
    view.flags.writeable = False
    return view


def nowhere(name: str, parameters: Parameters) -> None:
    """Find nothing: raise InvalidRequest for a tensor whose parameters place its bytes elsewhere."""
    if BINARY_SIZE in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {BINARY_SIZE}, but the body has no binary data")
    if REGION in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {REGION}, but shared memory cannot be used here")


def request_to_write(request: InferenceRequest, inputs: list[WrittenTensor]) -> WrittenRequest:
    """Return what is encoded for `request`."""
    outputs: list[ReadOutput] | msgspec.UnsetType = msgspec.UNSET
    if request.outputs is not None:
        outputs = [ReadOutput(asked.name, asked.parameters or None) for asked in request.outputs]
    return WrittenRequest(inputs, request.id, request.parameters, outputs)


def response_to_write(response: InferenceResponse, outputs: list[WrittenTensor]) -> WrittenResponse:
    """Return what is encoded for `response`."""
    return WrittenResponse(response.model, outputs, response.version, response.id, response.parameters)


def written(tensor: TensorValue) -> WrittenTensor:
    """Return `tensor` as it is written into JSON."""
    data: list[Any] | msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    if REGION not in tensor.parameters:
        data = write_json(tensor.name, tensor.datatype, tensor.array)
    return WrittenTensor(tensor.name, tensor.datatype, tensor.array.shape, tensor.parameters, data)


def read_generate(body: Body, declared: Sequence[Tensor], model: str, version: str = "") -> InferenceRequest:
    """Return the request in `body`: `{"<input>": value, ..., "id": text, "parameters": {...}}`.

    A value is nested lists; where it has fewer dimensions than the model declares, it stands for one row. Raises
    InvalidRequest naming tensor, value and rule, and TooLarge for too many lists and objects, or names.
    """
    document = parse(decode_json, body, "an object")
    if not isinstance(document, dict):
        raise InvalidRequest(f"body: must be an object as JSON, is {brief(document, 40)}")
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
    """Return `response` as `{"model_name", "model_version", "<output>": value, ...}`: one value by itself, several as a flat
    list. InvalidRequest for a tensor without a JSON form."""
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    for tensor in response.outputs:
        data = written(tensor).data
        document[tensor.name] = data[0] if numpy.size(tensor.array) == 1 and isinstance(data, list) else data
    return encode(document)


MAX_REMEMBERED = 256  # shapes; there are few where it matters


class Outline(NamedTuple):
    """What a body holds besides its data. `for_server`: the worker cannot read it or write the answer, as a tensor lies in shared
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
            check_datatype(tensor.name, tensor.datatype)
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
