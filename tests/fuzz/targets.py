"""What is fuzzed: each target takes bytes as a stranger may send them, and raises if a promise is broken.

The promise is the same for all: what is malformed is an InvalidRequest, and nothing is larger than what was sent.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.fuzz.checkpoints import CHECKPOINTS

from weir.errors import InvalidRequest, TooLarge
from weir.frontends.http.fast.plan import END_OF_HEAD, HeadReader
from weir.images import ImageLimits
from weir.images.preparation import Preparation
from weir.messages import JSON, MSGPACK, OBJECT, Batch
from weir.model import DATATYPES, Model, Tensor
from weir.text_server.bert_as_service import frames as zeromq_frames
from weir.text_server.bert_as_service.frames import GREETING, Received, ZmtpParser
from weir.wire import kserve_binary, kserve_grpc, kserve_json
from weir.wire import websocket as messages
from weir.wire.frames import FrameError, LockstepParser, decode_reply, make_ids
from weir.wire.inference import InferenceRequest, bind
from weir.wire.kserve_json import BodyPeek, read_generate
from weir.wire.tensors import Arrays, pack_elements, unpack_elements
from weir.workers.remote import LockstepBatch
from weir.workers.run.tensors import BodyReader, Listed


class Declared(Model):
    """Has inputs of several kinds."""

    inputs = (Tensor("x", "INT8", [-1, -1]), Tensor("y", "FP32", [-1]), Tensor("s", "BYTES", [-1]))
    outputs = (Tensor("z", "FP32", [-1]),)

    def predict(self, batch: Any) -> Any:
        return batch


_outline = BodyPeek(Declared.inputs)
_read = BodyReader(Declared)
_heads = HeadReader()
_preparation = Preparation(16, 16, 16, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_limits = ImageLimits(max_image_pixels=10_000)


def json(data: bytes) -> None:
    """The JSON body of a request, and of a response; what was read can be written and is read again the same."""
    with contextlib.suppress(InvalidRequest):
        request = kserve_json.read_request(data, "m")
        _modest(request, data)
        again = kserve_json.read_request(kserve_json.write_request(request), "m")
        assert [value.array.shape for value in again.inputs] == [value.array.shape for value in request.inputs]
    with contextlib.suppress(InvalidRequest):
        kserve_json.read_response(data)


def binary(data: bytes) -> None:
    """A body with binary tensors; the first two bytes say how long its header is."""
    body, length = data[2:], int.from_bytes(data[:2], "little")
    with contextlib.suppress(InvalidRequest):
        _modest(kserve_binary.read_request(body, length, "m"), body)
    with contextlib.suppress(InvalidRequest):
        kserve_binary.read_response(body, length)


def worker(data: bytes) -> None:
    """The JSON body of a request, by the way that leads to the worker: it takes all that the other way takes, and reads it the
    same. (It takes more: what it skips, parameters and unknown fields, it does not look into.)"""
    other = _outcome(lambda: _read_by_frontend(data))
    assert other in (None, _outcome(lambda: _read_in_the_worker(data)))
    with contextlib.suppress(InvalidRequest):
        outline = _outline(data)
        with contextlib.suppress(InvalidRequest):
            assert len(_read_in_the_worker(data)["y"]) == outline.rows


def elements(data: bytes) -> None:
    """The elements of a BYTES tensor; the first byte says how many there are to be."""
    raw, count = data[1:], int.from_bytes(data[:1], "little")
    with contextlib.suppress(InvalidRequest):
        array = unpack_elements(raw, count, "s")
        assert pack_elements(array) == raw


def raw(data: bytes) -> None:
    """A body that is one tensor; the first byte chooses the datatype, the second the shape."""
    datatype = list(DATATYPES)[int.from_bytes(data[:1], "little") % len(DATATYPES)]
    shapes = ([-1], [-1, 3], [-1, -1], [-1, 2, -1], [-1, -1, -1])
    shape = shapes[int.from_bytes(data[1:2], "little") % len(shapes)]
    with contextlib.suppress(InvalidRequest):
        _modest(kserve_binary.read_raw_request(data[2:], [Tensor("x", datatype, shape)], "m"), data)


def websocket(data: bytes) -> None:
    """A WebSocket message: text if the first byte is even, binary otherwise."""
    message = data[1:] if data[:1] > b"\x7f" else data[1:].decode("utf-8", "replace")
    with contextlib.suppress(InvalidRequest):
        said = messages.read_request(message)
        if isinstance(said, InferenceRequest):
            _modest(said, data)
    with contextlib.suppress(InvalidRequest):
        messages.read_response(message)
    assert isinstance(messages.id_of(message), str)


def grpc(data: bytes) -> None:
    """The body of a ModelInferRequest: where raw tensors are found without a copy they are what protobuf finds."""
    plain = _outcome(lambda: _read_grpc(data, 1 << 30))
    assert plain in (None, _outcome(lambda: _read_grpc(data, 0)))
    with contextlib.suppress(InvalidRequest):
        kserve_grpc.read_response(data)
    with contextlib.suppress(InvalidRequest):
        kserve_grpc.read_stream_response(data)


def head(data: bytes) -> None:
    """The head of an HTTP request: all up to the first empty line."""
    with contextlib.suppress(InvalidRequest):
        assert _heads.read((data + END_OF_HEAD).partition(END_OF_HEAD)[0]).length >= 0
    assert _heads.read(b"GET / HTTP/1.1\r\nHost: a").url == b"/"  # what came before has left nothing


def generate(data: bytes) -> None:
    """The body of the generate extension."""
    with contextlib.suppress(InvalidRequest):
        _modest(read_generate(data, Declared.inputs, "m"), data)


def lockstep(data: bytes) -> None:
    """The bytes of an external worker: frames, and what they say of a batch of three."""
    parser, ids = LockstepParser(1 << 20), make_ids(7, 1, 3)
    batch = Batch(1, [b"1", b"2", 3], [JSON, MSGPACK, OBJECT], [MSGPACK, JSON, OBJECT])
    with contextlib.suppress(FrameError):
        for body in (parser.feed(data), [data]):
            for frame in body:
                events = LockstepBatch(batch, 7).events(decode_reply(frame, ids), 0.0)
                assert len(events.outputs) == 3
                assert None not in events.outputs[:2]


def zmtp(data: bytes) -> None:
    """What a peer sends after the greeting; the first byte chooses the socket and whether it comes in pieces."""
    kind, size = ("PULL", "PUB")[data[:1] > b"\x7f"], (5, 4096)[data[:1] > b"\x3f"]
    parser, stream = ZmtpParser(kind, 1024, zeromq_frames.MAX_FRAMES), GREETING + data[1:]
    with contextlib.suppress(InvalidRequest, TooLarge):
        for start in range(0, len(stream), size):
            for event in parser.feed(stream[start : start + size]):
                assert not isinstance(event, Received) or sum(map(len, event.frames)) <= 1024
            assert parser.held <= 1024 + size + 9


def zeromq(data: bytes) -> None:
    """The frames of a request, cut at each 0xFF."""
    with contextlib.suppress(InvalidRequest):
        ask = zeromq_frames.read_request(data.split(b"\xff"))
        assert len(zeromq_frames.read_texts(ask)) == ask.size


def image(data: bytes) -> None:
    """An image file, from its header to its pixels."""
    with contextlib.suppress(InvalidRequest):
        assert _preparation.prepare(data, _limits).shape == (3, 16, 16)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (json, binary, worker, elements, raw, websocket, grpc, head, generate, lockstep, zmtp, zeromq, image)
} | CHECKPOINTS


def _read_by_frontend(data: bytes) -> Arrays:
    request = kserve_json.read_request(data, "m")
    if any(output.name != "z" for output in request.outputs or ()):
        raise InvalidRequest("the model has no such output")
    return bind(request.inputs, Declared.inputs)


def _read_in_the_worker(data: bytes) -> Arrays:
    entry = _read(data)
    return entry.arrays(Declared.inputs) if isinstance(entry, Listed) else entry


def _read_grpc(data: bytes, scan_above: int) -> Arrays:
    with mock.patch.object(kserve_grpc, "_SCAN_ABOVE", scan_above):
        request = kserve_grpc.read_request(kserve_grpc.parse_request(data))
    _modest(request, data)
    return {value.name: value.array for value in request.inputs}


def _modest(request: InferenceRequest, data: bytes) -> None:
    assert sum(value.array.size for value in request.inputs) <= len(data)


def _outcome(read: Callable[[], Arrays]) -> Any:
    try:
        return {
            name: (array.shape, array.tobytes() if array.dtype != object else array.ravel().tolist())
            for name, array in read().items()
        }
    except InvalidRequest:
        return None
