"""Inference requests and responses of the Open Inference Protocol as JSON, both ways.

kserve_binary.py adds raw bytes after the JSON; both share what is here.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy

from weir.errors import InvalidRequest, brief
from weir.messages import JSON
from weir.wire.bytes_tensors import unpack_elements
from weir.wire.elements import read_elements, write_json
from weir.wire.inference import AskedOutput, InferenceRequest, InferenceResponse, Parameters, TensorValue
from weir.wire.nonfinite import find_nonfinite
from weir.wire.shapes import element_count
from weir.wire.surrogates import find_half
from weir.wire.tensors import DTYPES
from weir.wire.values import SMALL_BODY, UNREADABLE, has_slow_floats, refuse_names, uncollected

Body = bytes | bytearray | memoryview
# What finds the bytes of a tensor that are not in the JSON: by its name and parameters; None if they say of none.
Find = Callable[[str, Parameters], memoryview | None]

BINARY_SIZE = "binary_data_size"
REGION = "shared_memory_region"
# What these say holds for one message only: it is not kept with the tensor.
_ELSEWHERE = (BINARY_SIZE, REGION, "shared_memory_offset", "shared_memory_byte_size")


class ReadTensor(msgspec.Struct, gc=False):
    """A tensor as it is read, its data not yet decoded."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | None = None


class ReadOutput(msgspec.Struct, gc=False):
    """An asked output as it is read."""

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


class WrittenOutput(msgspec.Struct, omit_defaults=True):
    """An asked output as it is written."""

    name: str
    parameters: Parameters = {}


class WrittenRequest(msgspec.Struct, omit_defaults=True):
    """A request as it is written."""

    inputs: list[WrittenTensor]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[WrittenOutput] | msgspec.UnsetType = msgspec.UNSET


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
    """Find nothing: raise InvalidRequest for a tensor that says its bytes are elsewhere."""
    if BINARY_SIZE in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {BINARY_SIZE}, but the body has no binary data")
    if REGION in parameters:
        raise InvalidRequest(f"tensor {name!r}: has {REGION}, but shared memory cannot be used here")


def request_to_write(request: InferenceRequest, inputs: list[WrittenTensor]) -> WrittenRequest:
    """Return what is encoded for `request`."""
    outputs: list[WrittenOutput] | msgspec.UnsetType = msgspec.UNSET
    if request.outputs is not None:
        outputs = [WrittenOutput(*asked) for asked in request.outputs]
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
