"""WebSocket messages: inference requests and responses of the Open Inference Protocol, answered by id.

A text message is the JSON of the protocol; a request has `model_name` (or `model`) in it, and `model_version` where one is meant, since
a connection has no path for each. A binary message is the binary tensor extension: the length of the JSON (4 bytes, most
significant first), the JSON, and after it the raw bytes of tensors, in order.

Beside requests a client sends `{"cancel": id}`, and a server `{"id", "error", "type", "status"}` for one that failed, with
`retry_after` (seconds) where it may be sent again.
"""

import struct
from typing import NamedTuple

import msgspec

from weir.errors import InvalidRequest
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_json import encode, parse
from weir.wire.values import UNREADABLE

# In the parameters of every response: whether it is the last one to its request.
FINAL = "triton_final_response"

_LENGTH = struct.Struct(">I")
_LONGEST_ID = 1024  # characters of one that is given back with the error of a message that cannot be read

Message = str | bytes


class CancelMessage(NamedTuple):
    """The client waits no longer for the request of this id."""

    id: str


class ErrorMessage(msgspec.Struct, omit_defaults=True):
    """A request that failed: `type` is the error's name, `status` its HTTP code, `retry_after` in seconds."""

    error: str
    id: str = ""
    type: str = ""
    status: int = 500
    retry_after: float | None = None


class _Envelope(msgspec.Struct):
    """What tells messages apart."""

    model_name: str | None = None
    model: str | None = None  # as the AMD Inference Server's client calls it
    model_version: str | None = None
    cancel: str | None = None
    error: str | None = None


class _Identified(msgspec.Struct):
    """What a message is called, whatever else there is in it."""

    id: msgspec.Raw = msgspec.Raw()  # not looked into: it may be anything


_decode_id = msgspec.json.Decoder(_Identified).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_failure = msgspec.json.Decoder(ErrorMessage).decode
_dumps = msgspec.json.encode


def read_request(message: Message) -> InferenceRequest | CancelMessage:
    """Return what a client sends. Arrays of a binary message are read-only views into it.

    Raises InvalidRequest for what is malformed (see kserve_json, kserve_binary).
    """
    header, length = _header(message)
    envelope: _Envelope = parse(_decode_envelope, header, "a message")
    if envelope.cancel is not None:
        return CancelMessage(envelope.cancel)
    model = envelope.model_name or envelope.model
    if not model:
        raise InvalidRequest("message: has no 'model_name', and none to 'cancel' either")
    version = envelope.model_version or ""
    if length is None:
        return kserve_json.read_request(header, model, version)
    return kserve_binary.read_request(memoryview(message)[4:], length, model, version)  # type: ignore[arg-type]  # bytes, for it has a length


def read_answer(message: Message) -> InferenceResponse | ErrorMessage:
    """Return what a server sends. Raises InvalidRequest for what is malformed."""
    header, length = _header(message)
    envelope: _Envelope = parse(_decode_envelope, header, "a message")
    if envelope.error is not None:
        failure: ErrorMessage = parse(_decode_failure, header, "an error")
        return failure
    if length is None:
        return kserve_json.read_response(header)
    return kserve_binary.read_response(memoryview(message)[4:], length)  # type: ignore[arg-type]  # as above


def write_request(request: InferenceRequest, *, binary: bool = True) -> Message:
    """Return `request` as a message; with `binary` its tensors as raw bytes. InvalidRequest for one without a JSON form."""
    named = {"model_name": request.model} | ({"model_version": request.version} if request.version else {})
    written = kserve_binary.write_request(request, lambda _: binary)
    header = b"%b,%b" % (encode(named)[:-1], bytes(written.parts[0])[1:])
    return _message(header, written.parts[1:])


def write_response(request: InferenceRequest, response: InferenceResponse) -> Message:
    """Return `response` as a message: a binary one if `request` asked for an output as binary data."""
    written = kserve_binary.write_response(response, kserve_binary.binary_outputs(request))
    return _message(bytes(written.parts[0]), written.parts[1:])


def write_cancel(id: str) -> str:
    """Return the message that a client no longer waits for the request of this id."""
    return _dumps({"cancel": id}).decode()


def write_failure(failure: ErrorMessage) -> str:
    """Return the message that a request failed."""
    return _dumps(failure).decode()


def id_of(message: Message) -> str:
    """Return the id in a message that cannot be read; "" if none can be found in it."""
    try:
        found = bytes(_decode_id(_header(message)[0]).id)
        return msgspec.json.decode(found, type=str)[:_LONGEST_ID] if found.startswith(b'"') else ""
    except (InvalidRequest, *UNREADABLE):
        return ""


def _header(message: Message) -> tuple[bytes, int | None]:
    """Return the JSON of a message; of a binary one its length too."""
    if isinstance(message, str):
        return message.encode("utf-8", "surrogatepass"), None
    if len(message) < _LENGTH.size:
        raise InvalidRequest(f"message: has {len(message)} bytes, a binary one begins with the JSON's length in 4")
    (length,) = _LENGTH.unpack_from(message)
    rest = len(message) - _LENGTH.size
    if length > rest:
        raise InvalidRequest(f"message: says that its JSON has {length} bytes, but {rest} follow")
    return message[_LENGTH.size : _LENGTH.size + length], length


def _message(header: bytes, raw: list[bytes | memoryview]) -> Message:
    if not raw:
        return header.decode()
    return b"".join((_LENGTH.pack(len(header)), header, *raw))
