"""WebSocket messages: inference requests and responses of the Open Inference Protocol, which are matched by id.

A text message is the protocol's JSON. A request also contains `model_name` (or `model`) and, if needed, `model_version`, because there is no path for each
request. A binary message has the form of the binary tensor extension: the length of the JSON (4 bytes, big-endian), the JSON, and the raw bytes of the
tensors in order.

A client can also send `{"cancel": id}`. For a request that failed, a server sends `{"id", "error", "type", "status"}`, with `retry_after` (seconds) if the
request may be sent again.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from weir.errors import InvalidRequest
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_json import encode, parse
from weir.wire.tensors import elements_bytes
from weir.wire.values import UNREADABLE, json_bytes

# The parameter of every response that says whether it is the last one of its request.
FINAL = "triton_final_response"

_LENGTH = struct.Struct(">I")
_LONGEST_ID = 1024  # characters of the id in the error for a message that cannot be read

Message = str | bytes


class CancelMessage(NamedTuple):
    """The client cancels the request with this id."""

    id: str


class ErrorMessage(msgspec.Struct, omit_defaults=True):
    """The error of a request. `type` is the name of its class, `status` its HTTP status; `retry_after` is in seconds."""

    error: str
    id: str = ""
    type: str = ""
    status: int = 500
    retry_after: float | None = None


class _Envelope(msgspec.Struct):
    """The fields that distinguish the kinds of messages."""

    model_name: str | None = None
    model: str | None = None  # the name of the field in clients of the AMD Inference Server
    model_version: str | None = None
    cancel: str | None = None
    error: str | None = None


class _Identified(msgspec.Struct):
    """The id of any message."""

    id: msgspec.Raw = msgspec.Raw()  # not decoded: it may be of any type


_decode_id = msgspec.json.Decoder(_Identified).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_failure = msgspec.json.Decoder(ErrorMessage).decode
_dumps = msgspec.json.encode


def message_bytes(message: Message) -> int:
    """Return how many bytes of memory the values of a client's message take at most while it is read."""
    header, length = _header(message)
    size = json_bytes(header)
    if length is None or not kserve_binary.may_have_texts(header):
        return size
    return size + elements_bytes(memoryview(message)[_LENGTH.size + length :])  # type: ignore[arg-type]  # only bytes have a length


def read_request(message: Message) -> InferenceRequest | CancelMessage:
    """Return the request or the cancellation in a client's message. Arrays of a binary message are read-only views of it.

    Raises InvalidRequest for a malformed message (see kserve_json and kserve_binary).
    """
    header, length = _header(message)
    envelope: _Envelope = parse(_decode_envelope, header, "a message")
    if envelope.cancel is not None:
        return CancelMessage(envelope.cancel)
    model = envelope.model_name or envelope.model
    if not model:
        raise InvalidRequest("message: has neither 'model_name' nor 'cancel'")
    version = envelope.model_version or ""
    if length is None:
        return kserve_json.read_request(header, model, version)
    return kserve_binary.read_request(memoryview(message)[4:], length, model, version)  # type: ignore[arg-type]  # only bytes have a length


def read_response(message: Message) -> InferenceResponse | ErrorMessage:
    """Return the response or the error in a server's message. Raises InvalidRequest for a malformed message."""
    header, length = _header(message)
    if b'"error"' in header and parse(_decode_envelope, header, "a message").error is not None:
        failure: ErrorMessage = parse(_decode_failure, header, "an error")
        return failure
    if length is None:
        return kserve_json.read_response(header)
    return kserve_binary.read_response(memoryview(message)[4:], length)  # type: ignore[arg-type]  # as above


class WrittenMessage(NamedTuple):
    """A request that has been written without an id: its JSON, and the raw bytes of its tensors. It may be sent several times."""

    header: bytes
    raw: Sequence[bytes | memoryview]

    def message(self, id: str) -> Message:
        """Return the message that sends the request under `id`."""
        return _message(b'{"id":%b,%b' % (_dumps(id), self.header[1:]), self.raw)


def write_request(request: InferenceRequest, *, binary: bool = True) -> WrittenMessage:
    """Return `request` without its id, as a binary message with `binary`. Otherwise raises InvalidRequest for a tensor without a JSON form."""
    named = {"model_name": request.model} | ({"model_version": request.version} if request.version else {})
    unnamed = InferenceRequest(request.model, request.inputs, outputs=request.outputs, parameters=request.parameters)
    written = kserve_binary.write_request(unnamed, lambda _: binary)
    return WrittenMessage(b"%b,%b" % (encode(named)[:-1], bytes(written.parts[0])[1:]), written.parts[1:])


def write_response(request: InferenceRequest, response: InferenceResponse) -> Message:
    """Return `response` as a message: a binary one if `request` wants any output as binary data."""
    written = kserve_binary.write_response(response, kserve_binary.binary_outputs(request))
    return _message(bytes(written.parts[0]), written.parts[1:])


def write_cancel(id: str) -> str:
    """Return the message that cancels the request with this id."""
    return _dumps({"cancel": id}).decode()


def write_failure(failure: ErrorMessage) -> str:
    """Return the message that reports an error."""
    return _dumps(failure).decode()


def id_of(message: Message) -> str:
    """Return the id in a message that cannot be read otherwise; "" if there is none."""
    try:
        found = bytes(_decode_id(_header(message)[0]).id)
        return msgspec.json.decode(found, type=str)[:_LONGEST_ID] if found.startswith(b'"') else ""
    except (InvalidRequest, *UNREADABLE):
        return ""


def _header(message: Message) -> tuple[bytes, int | None]:
    """Return the JSON of a message, and its length if the message is binary, else None."""
    if isinstance(message, str):
        return message.encode("utf-8", "surrogatepass"), None
    if len(message) < _LENGTH.size:
        raise InvalidRequest(f"message: has {len(message)} bytes, must begin with the length of its JSON in 4")
    (length,) = _LENGTH.unpack_from(message)
    rest = len(message) - _LENGTH.size
    if length > rest:
        raise InvalidRequest(f"message: says that its JSON has {length} bytes, but {rest} follow")
    return message[_LENGTH.size : _LENGTH.size + length], length


def _message(header: bytes, raw: Sequence[bytes | memoryview]) -> Message:
    if not raw:
        return header.decode()
    return b"".join((_LENGTH.pack(len(header)), header, *raw))
