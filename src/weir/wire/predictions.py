"""A request of TorchServe's inference API and its response, between the server and a worker: both travel whole, and the worker reads the body."""

import json

import msgspec

CONTENT_TYPE = "application/x-torchserve"

Request = tuple[str, list[tuple[str, str]], bytes]  # its id, its headers, and its body as it came
Response = tuple[int, list[tuple[str, str]], bytes]  # with the status and the headers that the handler has set

write = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(Request).decode
read_response = msgspec.msgpack.Decoder(Response).decode


def write_response(value: object) -> bytes:
    """Write a response. Raises msgspec.ValidationError for a status or a header of another type, which a handler may set."""
    return write(msgspec.convert(value, Response))


def error_document(code: int, kind: str, message: str) -> bytes:
    """Return an error as TorchServe writes it."""
    return json.dumps({"code": code, "type": f"{kind}Exception", "message": message}, indent=2).encode()
