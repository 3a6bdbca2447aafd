"""Messages of the Open Inference Protocol as protobuf. The raw bytes of tensors are read and written here, so that they do not pass through protobuf.

Sources: grpc_predict_v2.proto of https://github.com/kserve/open-inference-protocol, with the additions of Triton's grpc_service.proto
(https://github.com/triton-inference-server/common), and the encoding of protobuf (https://protobuf.dev/programming-guides/encoding/).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from weir.errors import InvalidRequest, brief
from weir.wire.inference import (
    ERROR_NAME,
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestedOutput,
    TensorValue,
)
from weir.wire.kserve_binary import raw_bytes
from weir.wire.kserve_json import (
    MAX_TENSORS,
    REGION,
    Find,
    nowhere,
    read_raw,
    refuse_duplicates,
    refuse_too_many,
)
from weir.wire.tensors import DTYPES, MAX_DIMENSIONS, check_datatype, element_count, elements_bytes, text_size

# The field of typed contents by datatype. FP16 and BF16 have none: they are always raw.
FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
# Elements that are read or written at a time. That takes about a millisecond; other threads may run in between.
_PIECE = 20_000
_NARROW = {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32", "UINT16": "UINT32"}  # what their shared field holds


def read_typed(name: str, datatype: str, shape: Sequence[int], count: int, contents: Any) -> numpy.ndarray[Any, Any]:
    """Return the array of this `shape` whose `count` elements are in `contents`.

    Raises InvalidRequest, naming tensor, value and rule, for elements in the field of another datatype, too few or too many elements, and elements outside
    the range of the datatype.
    """
    field = FIELDS.get(datatype)
    if field is None:
        raise InvalidRequest(f"tensor {name!r}: {datatype} has no typed form, it must be sent in raw_input_contents")
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if filled not in ([], [field]):
        raise InvalidRequest(f"tensor {name!r}: has {', '.join(filled)}, {datatype} takes {field} only")
    elements = getattr(contents, field)
    if len(elements) != count:
        raise InvalidRequest(
            f"tensor {name!r}: has {len(elements)} elements in {field}, its shape {list(shape)} takes {count}"
        )
    if datatype == "BYTES":
        array: numpy.ndarray[Any, Any] = numpy.empty(count, object)
    else:
        array = numpy.empty(count, DTYPES[_NARROW.get(datatype, datatype)])
    for start in range(0, count, _PIECE):
        array[start : start + _PIECE] = elements[start : start + _PIECE]
    if datatype in _NARROW:
        array = _narrowed(name, datatype, array)
    return array.reshape(shape)


def _narrowed(name: str, datatype: str, array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    bounds = numpy.iinfo(DTYPES[datatype])
    for extreme in (array.min(), array.max()) if array.size else ():
        if not bounds.min <= extreme <= bounds.max:
            raise InvalidRequest(f"tensor {name!r}: has the element {extreme}, out of the range of {datatype}")
    return array.astype(DTYPES[datatype])


def write_typed(datatype: str, array: numpy.ndarray[Any, Any], contents: Any) -> None:
    """Put the elements of `array` into `contents`. `datatype` must be one of FIELDS."""
    elements, flat = getattr(contents, FIELDS[datatype]), array.ravel()
    for start in range(0, flat.size, _PIECE):
        elements.extend(flat[start : start + _PIECE].tolist())


PROTOS = files("weir.wire") / "protos"
COMPILED = "messages.binpb"


class Method(NamedTuple):
    """One method of a gRPC service, with the classes of its request and response messages."""

    service: str
    name: str
    request: Any
    response: Any
    requests_stream: bool
    responses_stream: bool

    @property
    def path(self) -> str:
        """The path of the method, which names it in a call."""
        return f"/{self.service}/{self.name}"


def _load() -> DescriptorPool:
    compiled = descriptor_pb2.FileDescriptorSet.FromString((PROTOS / COMPILED).read_bytes())
    pool = DescriptorPool()
    for file in compiled.file:  # each file comes after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load()


def message(name: str) -> Any:
    """Return the class of the message with this full name, such as `inference.ModelInferRequest`."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))


def methods(service: str) -> list[Method]:
    """Return the methods of the service with this full name, in the order of its source."""
    return [
        Method(
            service,
            each.name,
            GetMessageClass(each.input_type),
            GetMessageClass(each.output_type),
            each.client_streaming,
            each.server_streaming,
        )
        for each in POOL.FindServiceByName(service).methods
    ]


def write_varint(value: int) -> bytes:
    """Return `value`, which is not negative, as a varint."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at `at` and the offset after it. Raises IndexError if it is cut off, and ValueError if it is too long."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


ModelInferRequest = message("inference.ModelInferRequest")
ModelInferResponse = message("inference.ModelInferResponse")
ModelStreamInferResponse = message("inference.ModelStreamInferResponse")

Raw = bytes | memoryview

RAW_INPUTS = "raw_input_contents"
RAW_OUTPUTS = "raw_output_contents"
_NUMBERS = {RAW_INPUTS: 7, RAW_OUTPUTS: 6}
_ID = 3  # field number of `id` in ModelInferResponse
_INFER_RESPONSE = 2  # field number of `infer_response` in ModelStreamInferResponse
# In a shorter message, letting protobuf copy the raw bytes is faster than finding them.
_SCAN_ABOVE = 8192  # bytes
# The element count of a tensor is cached only if its name, datatype and shape are short: callers choose them.
_SHORT = 256
# Limits of the parameters of one request or tensor, and of the fields of a message that are read one by one. Each costs a microsecond,
# however few bytes it has.
MAX_PARAMETERS = 1024
_MAX_FIELDS = 3 * MAX_TENSORS + MAX_PARAMETERS

# Costs of writing, in bytes of text that take as long.
_COPIED = 16  # this many copied bytes cost one byte of text
_NUMBER_BYTES = 16  # an element of a typed tensor
_TEXT_BYTES = 48  # an element of BYTES

_FEW_FIELDS = 64  # a message with more fields gets no form (frontends/grpc/inference.py)

# Wire types.
_VARINT = 0
_SIZED = 2  # a length, followed by that many bytes
_GROUP = (3, 4)  # the start and the end of a group
_FIXED = {1: 8, 5: 4}  # wire type: its fixed number of bytes


class Parsed(NamedTuple):
    """A message and its raw tensors. If the message is large, it does not contain the raw tensors."""

    message: Any
    raw: Sequence[Raw]


def parse_request(body: bytes) -> Parsed:
    """Return the ModelInferRequest in `body`. Raises InvalidRequest if there is none."""
    return _parse(ModelInferRequest, body, RAW_INPUTS)


def bytes_to_read(body: bytes) -> int:
    """Return about how many bytes of a ModelInferRequest must be parsed: not those of raw tensors, unless they are BYTES."""
    if len(body) < _SCAN_ABOVE:
        return len(body)
    try:
        rest, _ = _parts(memoryview(body), _NUMBERS[RAW_INPUTS])
    except (IndexError, ValueError):
        return len(body)
    size = sum(map(len, rest))
    return len(body) if size > _SCAN_ABOVE or b"BYTES" in b"".join(rest) else size


def typed_bytes(body: bytes) -> int:
    """Return how many bytes of memory the values of a ModelInferRequest take at most while it is parsed and arrays are made of them.

    Raw tensors take none, unless they are BYTES. Of typed ones each byte counts as many as its field says, up to the first texts: then all that follow do.
    """
    try:
        rest, raw = _parts(memoryview(body), _NUMBERS[RAW_INPUTS])
        size = sum([_contents_bytes(part) for part in rest])
    except (IndexError, ValueError):  # parsing refuses it, or parses what is not understood here
        return _TEXT_MEMORY * len(body)
    return size + (sum(map(elements_bytes, raw)) if b"BYTES" in b"".join(rest) else 0)


# Bytes of memory for each byte of a field of InferTensorContents, by its number: its elements in protobuf's array, whose room doubles, and in ours. A number
# may have one byte, a text two.
_FIXED_MEMORY, _TEXT_MEMORY = 3, 36
_FIELD_MEMORY = {1: 6, 2: 24, 3: 40, 4: 24, 5: 40, 6: _FIXED_MEMORY, 7: _FIXED_MEMORY}
_INPUTS, _CONTENTS = 5, 5


def _contents_bytes(part: memoryview) -> int:
    """Return what `typed_bytes` does for one encoded field of the request."""
    number, kind, start, end = _field(part, 0)
    if number != _INPUTS or kind != _SIZED:
        return 0
    size = 0
    while start < end:
        number, kind, content, after = _field(part, start)
        if number == _CONTENTS and kind == _SIZED:
            size += _elements_bytes(part[content:after])
        start = after
    return size


def _elements_bytes(contents: memoryview) -> int:
    size = start = 0
    while start < len(contents):
        number, kind, content, end = _field(contents, start)
        if kind != _SIZED or number not in _FIELD_MEMORY:  # texts, or elements that are not packed: they may be many
            return size + _TEXT_MEMORY * (len(contents) - start)
        size += _FIELD_MEMORY[number] * (end - content)
        start = end
    return size


def read_request(parsed: Parsed, *, find: Find | None = None) -> InferenceRequest:
    """Return the request in a parsed message.

    `find` returns the bytes of a tensor that is in shared memory. Raises InvalidRequest for a malformed request. Whether the tensors are those of the model
    is not checked here (see inference.bind).
    """
    read = parsed.message
    refuse_too_many("output", len(read.outputs))
    outputs = [RequestedOutput(each.name, read_parameters(each.parameters)) for each in read.outputs]
    if outputs:
        refuse_duplicates("output", [each.name for each in outputs])
    inputs = _tensors(read.inputs, parsed.raw, RAW_INPUTS, find or nowhere)
    parameters = read_parameters(read.parameters) if read.parameters else {}
    return InferenceRequest(
        read.model_name, inputs, version=read.model_version, id=read.id, outputs=outputs or None, parameters=parameters
    )


def is_typed(parsed: Parsed) -> bool:
    """Return whether the tensors of a request are typed. Those of its response are typed then too."""
    return not parsed.raw and any(tensor.HasField("contents") for tensor in parsed.message.inputs)


def write_request(request: InferenceRequest) -> bytes:
    """Return `request` as an encoded ModelInferRequest with raw tensors."""
    written = ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    write_parameters(request.parameters, written.parameters)
    for tensor in request.inputs:
        _add(written.inputs, tensor)
    for output in request.outputs or ():
        write_parameters(output.parameters, written.outputs.add(name=output.name).parameters)
    raw = [raw_bytes(tensor) for tensor in request.inputs if REGION not in tensor.parameters]
    return b"".join([written.SerializeToString(), *_sized(_NUMBERS[RAW_INPUTS], raw)])


def read_response(body: bytes) -> InferenceResponse:
    """Return the response in an encoded ModelInferResponse. Raises InvalidRequest for a malformed response."""
    parsed = _parse(ModelInferResponse, body, RAW_OUTPUTS)
    read = parsed.message
    outputs = _tensors(read.outputs, parsed.raw, RAW_OUTPUTS, nowhere)
    parameters = read_parameters(read.parameters)
    return InferenceResponse(read.model_name, outputs, version=read.model_version, id=read.id, parameters=parameters)


def write_response(response: InferenceResponse, *, typed: bool = False) -> bytes:
    """Return `response` as an encoded ModelInferResponse. Its tensors are raw, or with `typed` typed if all of them can be.

    A tensor in shared memory is written without its data.
    """
    if typed and all(tensor.datatype in FIELDS for tensor in response.outputs):
        return _typed_response(response)
    # One element for each output, because clients assign them by index. That of an output in shared memory is empty.
    raw = [b"" if REGION in tensor.parameters else raw_bytes(tensor) for tensor in response.outputs]
    if response.parameters or any(tensor.parameters for tensor in response.outputs):
        head = _response_head(response).SerializeToString()
    else:
        described = [(tensor.name, tensor.datatype, tensor.array.shape) for tensor in response.outputs]
        head = _plain_head(response.model, response.version, *described)
        if response.id:
            head += b"".join(_sized(_ID, [response.id.encode()]))
    return b"".join([head, *_sized(_NUMBERS[RAW_OUTPUTS], raw)])


def bytes_to_write(response: InferenceResponse, *, typed: bool = False) -> int:
    """Return how many bytes of text take about as long to write as `response`."""
    one_by_one = typed and all(tensor.datatype in FIELDS for tensor in response.outputs)
    size = 0
    for tensor in response.outputs:
        if REGION in tensor.parameters:
            continue
        if tensor.datatype == "BYTES":
            size += _TEXT_BYTES * tensor.array.size
        else:
            size += _NUMBER_BYTES * tensor.array.size if one_by_one else tensor.array.nbytes // _COPIED
    return size


def message_bytes(response: InferenceResponse) -> int:
    """Return about how many bytes the message of `response` has."""
    sent = [tensor for tensor in response.outputs if REGION not in tensor.parameters]
    return sum([text_size(each.array) if each.datatype == "BYTES" else each.array.nbytes for each in sent])


def response_pieces(response: InferenceResponse) -> list[bytes]:
    """Return the bytes that precede the raw bytes of each output, for a `response` without id and parameters. With the raw bytes they are the message."""
    described = [(tensor.name, tensor.datatype, tensor.array.shape) for tensor in response.outputs]
    head, tag = _plain_head(response.model, response.version, *described), bytes([_NUMBERS[RAW_OUTPUTS] << 3 | _SIZED])
    pieces = [tag + write_varint(tensor.array.nbytes) for tensor in response.outputs]
    return [head + pieces[0], *pieces[1:]]


@lru_cache(maxsize=1024)
def _plain_head(model: str, version: str, *outputs: tuple[str, str, tuple[int, ...]]) -> bytes:
    """Return an encoded ModelInferResponse without id, parameters and data. These fields can be appended, because their order is free."""
    written = ModelInferResponse(model_name=model, model_version=version)
    for name, datatype, shape in outputs:
        written.outputs.add(name=name, datatype=datatype, shape=shape)
    head: bytes = written.SerializeToString()
    return head


def _response_head(response: InferenceResponse) -> Any:
    written = ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    write_parameters(response.parameters, written.parameters)
    for tensor in response.outputs:
        _add(written.outputs, tensor)
    return written


def _typed_response(response: InferenceResponse) -> bytes:
    written = _response_head(response)
    for tensor, target in zip(response.outputs, written.outputs, strict=True):
        if REGION not in tensor.parameters:
            write_typed(tensor.datatype, tensor.array, target.contents)
    body: bytes = written.SerializeToString()
    return body


def in_stream(response: bytes) -> bytes:
    """Return an encoded ModelStreamInferResponse with `response`, an encoded ModelInferResponse."""
    return b"".join(_sized(_INFER_RESPONSE, [response]))


def error_in_stream(text: str, model: str, id: str, name: str = "") -> bytes:
    """Return an encoded ModelStreamInferResponse with the error `text` of the request `id`. `name` is the error's class. The stream continues."""
    written = ModelStreamInferResponse(error_message=text)
    written.infer_response.model_name, written.infer_response.id = model, id
    if name:
        write_parameters({ERROR_NAME: name}, written.infer_response.parameters)
    body: bytes = written.SerializeToString()
    return body


def read_stream_response(body: bytes) -> tuple[str, InferenceResponse]:
    """Return the error text ("": none) and the response in an encoded ModelStreamInferResponse. Raises InvalidRequest for a malformed one."""
    raw: list[memoryview] = []
    try:
        rest, raw = _split(memoryview(body), _INFER_RESPONSE)
        text: str = ModelStreamInferResponse.FromString(rest).error_message
    except (DecodeError, IndexError, ValueError) as error:
        raise InvalidRequest(f"body: must be a {ModelStreamInferResponse.DESCRIPTOR.full_name} ({error})") from None
    return text, read_response(bytes(raw[0]) if raw else b"")


def read_parameters(parameters: Any) -> Parameters:
    """Return a map of InferParameter as a dict. Raises InvalidRequest for a parameter without a value, and for too many."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"parameters: there are {len(parameters)}, must be at most {MAX_PARAMETERS}")
    read: Parameters = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {name!r}: has no value, must be a bool, a number or a string")
        read[name] = getattr(parameter, choice)
    return read


def write_parameters(parameters: Parameters, target: Any) -> None:
    """Put `parameters` into a map of InferParameter."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            setattr(target[name], "int64_param" if value < 1 << 63 else "uint64_param", value)
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            target[name].string_param = value


def _add(tensors: Any, tensor: TensorValue) -> Any:
    written = tensors.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
    if tensor.parameters:
        write_parameters(tensor.parameters, written.parameters)
    return written


def _tensors(tensors: Any, raw: Sequence[Raw], field: str, find: Find) -> list[TensorValue]:
    refuse_too_many("tensor", len(tensors))
    refuse_duplicates("tensor", [tensor.name for tensor in tensors])
    rest = iter(raw)
    values = [_value(tensor, raw, rest, field, find) for tensor in tensors]
    if left := len(list(rest)):
        raise InvalidRequest(f"{field}: has {len(raw)} elements, {left} more than tensors without contents")
    return values


def _value(tensor: Any, raw: Sequence[Raw], rest: Iterator[Raw], field: str, find: Find) -> TensorValue:
    name, datatype = tensor.name, tensor.datatype
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"tensor {brief(name)}: has {len(tensor.shape)} dimensions, must have at most {MAX_DIMENSIONS}"
        )
    shape = tuple(tensor.shape)
    count_of = _count if len(name) + len(datatype) + len(shape) <= _SHORT else _count.__wrapped__
    count = count_of(name, datatype, shape)
    parameters = read_parameters(tensor.parameters) if tensor.parameters else {}
    found = find(name, parameters) if parameters else None
    typed = tensor.HasField("contents") and (bool(tensor.contents.ListFields()) or not (raw or found is not None))
    if typed and (raw or found is not None):
        raise InvalidRequest(f"tensor {name!r}: has contents, but {field} or shared memory too; only one is allowed")
    if typed:
        array = read_typed(name, datatype, shape, count, tensor.contents)
    else:
        data = next(rest, None) if found is None else found
        if data is None and not count:
            data = b""
        if data is None:
            raise InvalidRequest(f"tensor {name!r}: has no data, neither contents nor an element of {field}")
        array = read_raw(name, datatype, shape, count, memoryview(data))
    return TensorValue(name, datatype, array, parameters)


@lru_cache(maxsize=1024)
def _count(name: str, datatype: str, shape: tuple[int, ...]) -> int:
    """Return how many elements a tensor has. Raises InvalidRequest for an unknown datatype or an impossible shape."""
    check_datatype(name, datatype)
    return element_count(name, shape)


class _Unsplit(ValueError):
    """The message contains a group, whose length is unknown. protobuf must parse the whole message, and skips the group."""


def _parse(kind: Any, body: bytes, field: str) -> Parsed:
    try:
        if len(body) >= _SCAN_ABOVE:
            with suppress(_Unsplit):
                rest, raw = _split(memoryview(body), _NUMBERS[field])
                return Parsed(kind.FromString(rest), raw)
        parsed = kind.FromString(body)
        return Parsed(parsed, getattr(parsed, field))
    except (DecodeError, IndexError, ValueError) as error:
        raise InvalidRequest(f"body: must be a {kind.DESCRIPTOR.full_name} ({error})") from None


def _split(body: memoryview, wanted: int) -> tuple[bytes, list[memoryview]]:
    """Return `body` without the fields with the number `wanted`, and the contents of those fields."""
    rest, raw = _parts(body, wanted)
    return b"".join(rest), raw


def _parts(body: memoryview, wanted: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the encoded fields of `body` except those with the number `wanted`, and the contents of those."""
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    start = 0
    while start < len(body):
        if len(rest) + len(raw) == _MAX_FIELDS:
            raise ValueError(f"more than {_MAX_FIELDS} fields")
        number, kind, content, end = _field(body, start)
        if end > len(body):
            raise ValueError(f"field {number} is cut off")
        if number == wanted and kind == _SIZED:
            raw.append(body[content:end])
        else:
            rest.append(body[start:end])
        start = end
    return rest, raw


def raw_at_end(body: bytes, count: int) -> list[tuple[int, int, int]] | None:
    """Return three offsets for each of the `count` raw tensors of a ModelInferRequest: of its field, of its bytes, and of their end.

    Returns None if the raw tensors are not the last fields, if their number is another, or if the message has too many fields.
    """
    found: list[tuple[int, int, int]] = []
    view, start = memoryview(body), 0
    with suppress(IndexError, ValueError):
        for _ in range(_FEW_FIELDS):
            number, kind, content, end = _field(view, start)
            if number == _NUMBERS[RAW_INPUTS] and kind == _SIZED:
                found.append((start, content, end))
            elif found:
                return None
            start = end
            if start == len(view):
                return found if len(found) == count else None
    return None


def _field(body: memoryview, start: int) -> tuple[int, int, int, int]:
    """Return the number and the wire type of the field at `start`, and the offsets at which its content begins and ends."""
    tag, content = read_varint(body, start)
    number, kind = tag >> 3, tag & 7
    if kind == _SIZED:
        length, content = read_varint(body, content)
        return number, kind, content, content + length
    if kind == _VARINT:
        return number, kind, content, read_varint(body, content)[1]
    if kind in _GROUP:
        raise _Unsplit
    if kind not in _FIXED:
        raise ValueError(f"field {number} has wire type {kind}")
    return number, kind, content, content + _FIXED[kind]


def _sized(number: int, contents: Sequence[Raw]) -> list[Raw]:
    """Return the parts of encoded fields with this number, one for each of `contents`."""
    tag = bytes([number << 3 | _SIZED])
    return [part for content in contents for part in (tag, write_varint(len(content)), content)]
