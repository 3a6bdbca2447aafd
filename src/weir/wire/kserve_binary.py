"""The binary tensor data extension of the Open Inference Protocol: JSON, followed by the raw bytes of tensors, in order.

Source: docs/protocol/extension_binary_data.md of https://github.com/triton-inference-server/server. Bytes are little-endian and row-major. Nothing is
copied: arrays are views of the body that was read, and a body is written as a list of parts that includes the memory of the arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from weir.errors import InvalidRequest, brief
from weir.model import NONE, Tensor
from weir.wire import kserve_json as plain
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, TensorValue
from weir.wire.kserve_json import BINARY_SIZE, REGION, Body, Find, WrittenTensor, encode
from weir.wire.tensors import DTYPES, element_count, pack_elements, text_size

# With the `lead` of its header, the raw bytes of a body begin at a multiple of this. Arrays of every datatype are aligned then.
ALIGNMENT = 64


class Written(NamedTuple):
    """A body in parts. `header_length` is the length of the JSON in bytes; None if there is nothing but JSON."""

    parts: list[bytes | memoryview]
    header_length: int | None

    @property
    def length(self) -> int:
        """The number of bytes of all parts."""
        return sum(len(part) for part in self.parts)


def lead(header_length: int) -> int:
    """Return how many bytes to leave free before a body whose header has this length, so that the bytes after the header are aligned."""
    return -header_length % ALIGNMENT


def may_have_texts(header: bytes) -> bool:
    """Return whether tensors may be BYTES by the JSON `header` before them, in which the word may be written with escapes."""
    return b"BYTES" in header or b"\\" in header


def read_request(
    body: Body, header_length: int, model: str, version: str = "", *, find: Find | None = None
) -> InferenceRequest:
    """Return the request in `body`, whose first `header_length` bytes are JSON. Its arrays are read-only views of `body`.

    `find` returns the bytes of a tensor that is in shared memory. Raises InvalidRequest for a malformed request.
    """
    rest = _Rest(body, header_length, find)
    read = plain.parse(plain.decode_request, rest.header, "an inference request")
    request = plain.request_of(read, model, version, rest)
    rest.end()
    return request


def read_response(body: Body, header_length: int, *, find: Find | None = None) -> InferenceResponse:
    """Return the response in `body`, whose first `header_length` bytes are JSON. Its arrays are read-only views of `body`.

    Raises InvalidRequest for a malformed response.
    """
    rest = _Rest(body, header_length, find)
    read = plain.parse(plain.decode_response, rest.header, "an inference response")
    response = plain.response_of(read, rest)
    rest.end()
    return response


def read_raw_request(body: Body, declared: Sequence[Tensor], model: str, version: str = "") -> InferenceRequest:
    """Return the request whose `body` is one raw tensor of one row ("Raw Binary Request" of the extension). All outputs are requested as binary data.

    The model must have one input with at most one variable dimension besides the batch. For BYTES the whole body is one element. Raises InvalidRequest
    otherwise.
    """
    if len(declared) != 1:
        raise InvalidRequest(f"body: is one raw tensor, but the model has {len(declared)} inputs")
    name, datatype = declared[0].name, declared[0].datatype
    shape = _raw_shape(declared[0], len(body))
    if datatype == "BYTES":
        array: numpy.ndarray[Any, Any] = numpy.empty(1, object)
        array[0] = bytes(body)
    else:
        count = element_count(name, shape)
        array = plain.read_raw(name, datatype, shape, count, memoryview(body))
    value = TensorValue(name, datatype, array.reshape(shape))
    return InferenceRequest(model, [value], version=version, parameters={"binary_data_output": True})


def binary_outputs(request: InferenceRequest) -> Callable[[str], bool]:
    """Return a function of an output's name: whether `request` wants that output as binary data."""
    default = request.parameters.get("binary_data_output") is True
    binary = {output.name: output.parameters.get("binary_data", default) is True for output in request.outputs or ()}
    return lambda name: binary.get(name, default)


def write_request(request: InferenceRequest, binary: Callable[[str], bool] = lambda _: True) -> Written:
    """Return `request` in parts. Inputs for whose names `binary` returns True are binary data. The arrays are not copied."""
    inputs, raw = _written(request.inputs, binary)
    return _parts(encode(plain.request_to_write(request, inputs)), raw)


def write_response(response: InferenceResponse, binary: Callable[[str], bool]) -> Written:
    """Return `response` in parts. Outputs for whose names `binary` returns True are binary data. The arrays are not copied.

    An output in shared memory is written with a binary size of 0, because Triton's C++ client needs a size for each output.
    """
    outputs, raw = _written(response.outputs, binary)
    for output in outputs:
        if REGION in output.parameters:
            output.parameters = output.parameters | {BINARY_SIZE: 0}
    return _parts(encode(plain.response_to_write(response, outputs)), raw)


def bytes_to_write(response: InferenceResponse, binary: Callable[[str], bool] = lambda _: False) -> int:
    """Return about how many bytes of text `write_response` makes. Binary numbers do not count, because they are not converted."""
    return sum(
        [text_size(each.array) for each in response.outputs if each.datatype == "BYTES" or not binary(each.name)]
    )


def raw_bytes(tensor: TensorValue) -> bytes | memoryview:
    """Return the raw bytes of `tensor`: its own memory, if that is contiguous and little-endian."""
    if tensor.datatype == "BYTES":
        return pack_elements(tensor.array)
    return contiguous_bytes(numpy.asarray(tensor.array, DTYPES[tensor.datatype].newbyteorder("<")))


def contiguous_bytes(array: numpy.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array of numbers: its own memory, if that is contiguous."""
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data


class _Rest:
    """The bytes after the JSON. Calling it returns the bytes of the next tensor."""

    def __init__(self, body: Body, header_length: int, find: Find | None) -> None:
        view = memoryview(body)
        if not 0 <= header_length <= len(view):
            raise InvalidRequest(
                f"Inference-Header-Content-Length {header_length}: must be from 0 to the body's length, {len(view)}"
            )
        self.header = view[:header_length]
        self._rest = view[header_length:].toreadonly()
        self._find = find or plain.nowhere

    def __call__(self, name: str, parameters: Parameters) -> memoryview | None:
        size = parameters.get(BINARY_SIZE)
        if size is None:
            return self._find(name, parameters)
        if REGION in parameters:
            if size == 0:
                return self._find(name, parameters)
            raise InvalidRequest(f"tensor {name!r}: has {BINARY_SIZE} and {REGION}, only one is allowed")
        if type(size) is not int or not 0 <= size <= len(self._rest):
            left = f"a number of bytes from 0 to those left in the body, {len(self._rest)}"
            raise InvalidRequest(f"tensor {name!r}: has {BINARY_SIZE} {brief(size, 40)}, must be {left}")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def end(self) -> None:
        """Raise InvalidRequest unless all bytes belong to tensors."""
        if len(self._rest):
            raise InvalidRequest(f"body: has {len(self._rest)} bytes after the last binary tensor")


def _raw_shape(tensor: Tensor, size: int) -> tuple[int, ...]:
    rest = list(tensor.shape if tensor.batch == NONE else tensor.shape[1:])
    one_row = () if tensor.batch == NONE else (1,)
    variable = [axis for axis, length in enumerate(rest) if length < 0]
    if tensor.datatype == "BYTES":
        if any(length > 1 for length in rest):
            raise InvalidRequest(f"tensor {tensor.name!r}: BYTES {list(tensor.shape)} cannot be one raw element")
        return (*one_row, *[1] * len(rest))
    if len(variable) > 1:
        raise InvalidRequest(
            f"tensor {tensor.name!r}: {list(tensor.shape)} has {len(variable)} variable dimensions besides the batch, a raw "
            "body can have at most 1"
        )
    if variable:
        row = DTYPES[tensor.datatype].itemsize
        for length in rest:
            row *= abs(length)
        if not size or size % row:
            raise InvalidRequest(f"tensor {tensor.name!r}: {size} bytes, must be a multiple of {row}")
        rest[variable[0]] = size // row
    return (*one_row, *rest)


def _written(
    tensors: Sequence[TensorValue], binary: Callable[[str], bool]
) -> tuple[list[WrittenTensor], list[bytes | memoryview]]:
    written: list[WrittenTensor] = []
    raw: list[bytes | memoryview] = []
    for tensor in tensors:
        if REGION in tensor.parameters or not binary(tensor.name):
            written.append(plain.written(tensor))
            continue
        data = raw_bytes(tensor)
        parameters = tensor.parameters | {BINARY_SIZE: len(data)}
        written.append(WrittenTensor(tensor.name, tensor.datatype, tensor.array.shape, parameters))
        raw.append(data)
    return written, raw


def _parts(header: bytes, raw: list[bytes | memoryview]) -> Written:
    if not raw:
        return Written([header], None)
    return Written([header, *raw], len(header))
