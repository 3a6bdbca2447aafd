"""A request of TorchServe's inference API and its response, between the server and a worker: both travel whole, and the worker reads the body."""

import msgspec

CONTENT_TYPE = "application/x-torchserve"

Headers = list[tuple[str, str]]


class PredictionRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request: its id, its headers, and its body as it came."""

    id: str
    headers: Headers
    body: bytes


class PredictionResponse(msgspec.Struct, array_like=True, frozen=True):
    """A response, with the status and the headers that the handler has set."""

    status: int
    headers: Headers
    body: bytes


write = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(PredictionRequest).decode
read_response = msgspec.msgpack.Decoder(PredictionResponse).decode
