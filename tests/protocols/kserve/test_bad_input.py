"""What is wrong with a request (tests/wire has every rule of a body) comes back as `{"error": text}` with the right code, and the server goes on as before."""

import gzip
import json
import socket
import zlib
from typing import Any

import httpx
import pytest
from tests.rings import subcases
from tests.served import Served

SIMPLE = "/v2/models/simple/infer"
VECTOR = "/v2/models/vector/infer"


def tensor(name: str = "INPUT0", datatype: str = "INT32", shape: Any = (1, 16), **more: Any) -> dict[str, Any]:
    """Return a tensor of a request."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def request(*inputs: Any, **more: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"inputs": list(inputs), **more}).encode()


DATA: dict[str, Any] = {"data": list(range(16))}
GOOD = request(tensor(**DATA), tensor("INPUT1", **DATA))


def vector(shape: Any = (1, 2), size: Any = 8, **more: Any) -> bytes:
    """Return the JSON of a request with a binary tensor for the model `vector`."""
    return request(tensor("x", "FP32", shape, parameters={"binary_data_size": size, **more}))


def binary(header: bytes, raw: bytes, length: int | str | None = None) -> dict[str, Any]:
    """Return what httpx sends for a request of JSON and binary data."""
    text = str(len(header) if length is None else length)
    return {"content": header + raw, "headers": {"inference-header-content-length": text}}


CASES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "no body": (SIMPLE, {"content": b""}, 400, ("body: is empty",)),
    "a wrong datatype": (SIMPLE, {"content": GOOD.replace(b"INT32", b"INT64")}, 400, ("'INPUT0'", "'INT64'", "INT32")),
    "a wrong priority": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"priority": -1}}'}, 400, ("'priority'=-1",)),
    "a sequence": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"sequence_id": 1}}'}, 501, ("'sequence_id'=1",)),
    "a header of no number": (VECTOR, binary(vector(), bytes(8), "eight"), 400, ("'eight'",)),
    "an unknown region": (
        SIMPLE, {"content": request(tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 64}), tensor("INPUT1", **DATA))},
        400, ("'r'",),
    ),
    "an unknown coding": (SIMPLE, {"content": GOOD, "headers": {"content-encoding": "br"}}, 415, ("'br'", "gzip")),
    "a bomb": (SIMPLE, {"content": gzip.compress(bytes(16 << 20)), "headers": {"content-encoding": "gzip"}}, 413, ("4194304",)),
    "a bomb without a header": (SIMPLE, {"content": zlib.compress(bytes(16 << 20))}, 413, ("4194304",)),
    "a body too large": (SIMPLE, {"content": bytes(5 << 20)}, 413, ("4194304",)),
    "an unknown model": ("/v2/models/x/infer", {"content": GOOD}, 404, ("Request for unknown model: 'x'",)),
    "an unknown version": ("/v2/models/simple/versions/7/infer", {"content": GOOD}, 404, ("'simple' version '7'",)),
    "an unknown path": ("/v2/models/simple/inferr", {"content": GOOD}, 404, ("unknown path",)),
    "a document for an item": (
        "/v2/models/square/infer", {"content": request(tensor("input", "BYTES", (2,), data=["1", "x"]))}, 400,
        ("'input'[1]",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("in_chunks", [False, True])  # a chunked upload goes through the ASGI application
@subcases("case", CASES)
def test_what_is_wrong_is_named(client: httpx.Client, in_chunks: bool, case: str) -> None:
    path, sent, code, text = CASES[case]
    content = sent["content"]
    pieces = iter([content[:10], content[10:]]) if in_chunks else content
    answer = client.post(path, **{**sent, "content": pieces})
    error = answer.json()["error"]
    assert (answer.status_code, list(answer.json())) == (code, ["error"]), error
    assert all(word in error for word in text) and len(error) < 2000, error
    assert answer.headers["weir-error"]
    assert client.post(SIMPLE, content=GOOD).status_code == 200


def test_a_body_that_does_not_come_whole_harms_nobody(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {VECTOR} HTTP/1.1\r\nHost: t\r\nInference-Header-Content-Length: 50\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + bytes(100_000))
    assert httpx.post(server.url + SIMPLE, content=GOOD).status_code == 200
