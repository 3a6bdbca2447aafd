"""What is wrong with a request comes back as `{"error": text}` with the right code, and the server goes on as before."""

import gzip
import json
import socket
import struct
import zlib
from typing import Any

import httpx
import pytest
from tests.served import Served

SIMPLE = "/v2/models/simple/infer"
IDENTITY = "/v2/models/simple_identity/infer"
VECTOR = "/v2/models/vector/infer"
HUGE = 1 << 62


def tensor(name: str = "INPUT0", datatype: str = "INT32", shape: Any = (1, 16), **more: Any) -> dict[str, Any]:
    """Return a tensor of a request."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def request(*inputs: Any, **more: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"inputs": list(inputs), **more}).encode()


DATA: dict[str, Any] = {"data": list(range(16))}
GOOD = request(tensor(**DATA), tensor("INPUT1", **DATA))


def shaped(shape: Any, count: int) -> bytes:
    """Return the body of a request whose inputs have so many elements."""
    return request(*(tensor(name, shape=shape, data=[0] * count) for name in ("INPUT0", "INPUT1")))


def vector(shape: Any = (1, 2), size: Any = 8, **more: Any) -> bytes:
    """Return the JSON of a request with a binary tensor for the model `vector`."""
    return request(tensor("x", "FP32", shape, parameters={"binary_data_size": size, **more}))


def binary(header: bytes, raw: bytes, length: int | str | None = None) -> dict[str, Any]:
    """Return what httpx sends for a request of JSON and binary data."""
    text = str(len(header) if length is None else length)
    return {"content": header + raw, "headers": {"inference-header-content-length": text}}


CASES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "no body": (SIMPLE, {"content": b""}, 400, ("body: is empty",)),
    "no JSON": (SIMPLE, {"content": b"no"}, 400, ("body", "JSON")),
    "a list": (SIMPLE, {"content": b"[]"}, 400, ("body",)),
    "no inputs": (SIMPLE, {"content": b"{}"}, 400, ("inputs",)),
    "deep JSON": (SIMPLE, {"content": b"[" * 200_000}, 400, ("body",)),
    "deep data": (SIMPLE, {"content": request(tensor(data=0)).replace(b"0}", b"[" * 5000 + b"]" * 5000 + b"}")}, 400, ()),
    "a missing input": (SIMPLE, {"content": request(tensor(**DATA))}, 400, ("'INPUT1'", "missing")),
    "an unknown input": (SIMPLE, {"content": request(tensor("z", **DATA))}, 400, ("'z'", "'INPUT0'")),
    "an input twice": (SIMPLE, {"content": request(tensor(**DATA), tensor(**DATA))}, 400, ("'INPUT0'", "twice")),
    "a wrong datatype": (SIMPLE, {"content": GOOD.replace(b"INT32", b"INT64")}, 400, ("'INPUT0'", "'INT64'", "INT32")),
    "an unknown datatype": (SIMPLE, {"content": GOOD.replace(b"INT32", b"INT31")}, 400, ("'INPUT0'", "'INT31'")),
    "a wrong shape": (SIMPLE, {"content": shaped((1, 8), 8)}, 400, ("'INPUT0'", "[1, 8]", "[-1, 16]")),
    "a shape of no rows": (SIMPLE, {"content": shaped((0, 16), 0)}, 400, ("'INPUT0'", "0 rows")),
    "a negative dimension": (SIMPLE, {"content": GOOD.replace(b"[1, 16]", b"[-1, 16]")}, 400, ("'INPUT0'", "[-1, 16]")),
    "a dimension too large": (SIMPLE, {"content": GOOD.replace(b"[1, 16]", b"[%d, 16]" % HUGE)}, 400, ("'INPUT0'",)),
    "no integer dimension": (SIMPLE, {"content": GOOD.replace(b"[1, 16]", b"[1.5, 16]")}, 400, ("shape",)),
    "a product too large": (
        SIMPLE, {"content": GOOD.replace(b"[1, 16]", b"[4294967296, 4294967296, 4294967296]")}, 400, ("'INPUT0'",),
    ),
    "too few elements": (SIMPLE, {"content": GOOD.replace(b" 15]", b" 15, 16]", 1)}, 400, ("'INPUT0'", "17", "16")),
    "no data": (SIMPLE, {"content": request(tensor(), tensor("INPUT1"))}, 400, ("'INPUT0'", "no data")),
    "a float for an integer": (SIMPLE, {"content": GOOD.replace(b" 15]", b" 1.5]", 1)}, 400, ("'INPUT0'",)),
    "a text for an integer": (SIMPLE, {"content": GOOD.replace(b" 15]", b' "x"]', 1)}, 400, ("'INPUT0'",)),
    "NaN for an integer": (SIMPLE, {"content": GOOD.replace(b" 15]", b" NaN]", 1)}, 400, ()),
    "out of range": (SIMPLE, {"content": GOOD.replace(b" 15]", b" 2147483648]", 1)}, 400, ("'INPUT0'", "2147483648")),
    "an unknown output": (SIMPLE, {"content": GOOD[:-1] + b', "outputs": [{"name": "z"}]}'}, 400, ("'z'",)),
    "an output twice": (
        SIMPLE, {"content": GOOD[:-1] + b', "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]}'}, 400,
        ("'OUTPUT0'", "twice"),
    ),
    "a wrong priority": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"priority": -1}}'}, 400, ("'priority'=-1",)),
    "a wrong timeout": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"timeout": 0.5}}'}, 400, ("'timeout'=0.5",)),
    "a nested parameter": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"a": {}}}'}, 400, ("parameters",)),
    "a sequence": (SIMPLE, {"content": GOOD[:-1] + b', "parameters": {"sequence_id": 1}}'}, 501, ("'sequence_id'=1",)),
    "a header longer than the body": (VECTOR, binary(vector(), bytes(8), 9999), 400, ("9999", "body's length")),
    "a header of no number": (VECTOR, binary(vector(), bytes(8), "eight"), 400, ("'eight'",)),
    "a negative header": (VECTOR, binary(vector(), bytes(8), "-1"), 400, ("'-1'",)),
    "a header of many digits": (VECTOR, binary(vector(), bytes(8), "9" * 40), 400, ("999",)),
    "a negative size": (VECTOR, binary(vector(size=-8), bytes(8)), 400, ("'x'", "-8")),
    "a size too large": (VECTOR, binary(vector(size=HUGE), bytes(8)), 400, ("'x'", str(HUGE))),
    "a size of no number": (VECTOR, binary(vector(size="8"), bytes(8)), 400, ("'x'", "'8'")),
    "a size that is not the shape's": (VECTOR, binary(vector(shape=(1, 3)), bytes(8)), 400, ("'x'", "8 bytes", "12")),
    "bytes left over": (VECTOR, binary(vector(), bytes(9)), 400, ("1 bytes after",)),
    "a binary size without binary data": (VECTOR, {"content": vector()}, 400, ("'x'", "binary_data_size")),
    "data twice": (
        VECTOR,
        binary(request(tensor("x", "FP32", (1, 2), data=[1, 2], parameters={"binary_data_size": 8})), bytes(8)), 400,
        ("'x'", "data"),
    ),
    "a raw body for two inputs": (SIMPLE, binary(b"", bytes(64), 0), 400, ("2 inputs",)),
    "a raw body of half an element": (VECTOR, binary(b"", bytes(7), 0), 400, ("'x'", "7 bytes")),
    "truncated BYTES": (
        IDENTITY, binary(request(tensor(datatype="BYTES", shape=(1, 1), parameters={"binary_data_size": 6})), b"\x09\0\0\0ab"),
        400, ("'INPUT0'",),
    ),
    "BYTES of huge length": (
        IDENTITY,
        binary(request(tensor(datatype="BYTES", shape=(1, 1), parameters={"binary_data_size": 4})), struct.pack("<I", 2**32 - 1)),
        400, ("'INPUT0'",),
    ),
    "an unknown region": (
        SIMPLE, {"content": request(tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 64}), tensor("INPUT1", **DATA))},
        400, ("'r'",),
    ),
    "an unknown coding": (SIMPLE, {"content": GOOD, "headers": {"content-encoding": "br"}}, 415, ("'br'", "gzip")),
    "no gzip": (SIMPLE, {"content": GOOD, "headers": {"content-encoding": "gzip"}}, 400, ("gzip",)),
    "a bomb": (SIMPLE, {"content": gzip.compress(bytes(16 << 20)), "headers": {"content-encoding": "gzip"}}, 413, ("4194304",)),
    "a bomb without a header": (SIMPLE, {"content": zlib.compress(bytes(16 << 20))}, 413, ("4194304",)),
    "no zlib after all": (SIMPLE, {"content": b"xyz"}, 400, ("body",)),
    "a body too large": (SIMPLE, {"content": bytes(5 << 20)}, 413, ("4194304",)),
    "an unknown model": ("/v2/models/x/infer", {"content": GOOD}, 404, ("Request for unknown model: 'x'",)),
    "an unknown version": ("/v2/models/simple/versions/7/infer", {"content": GOOD}, 404, ("'simple' version '7'",)),
    "an unknown path": ("/v2/models/simple/inferr", {"content": GOOD}, 404, ("unknown path",)),
    "a document for an item": (
        "/v2/models/square/infer", {"content": request(tensor("input", "BYTES", (2,), data=["1", "x"]))}, 400,
        ("'input'[1]",),
    ),
    "an empty item": (
        "/v2/models/square/infer", {"content": request(tensor("input", "BYTES", (1,), data=[""]))}, 400, ("'input'[0]",),
    ),
    "a region without a key": (
        "/v2/systemsharedmemory/region/r/register", {"content": b'{"byte_size": 4}'}, 400, ("key", "missing"),
    ),
    "a region outside of the folder": (
        "/v2/systemsharedmemory/region/r/register", {"content": b'{"key": "/../etc/passwd", "byte_size": 4}'}, 400,
        ("'r'", "'/../etc/passwd'"),
    ),
    "a region of negative size": (
        "/v2/systemsharedmemory/region/r/register", {"content": b'{"key": "/x", "byte_size": -4}'}, 400, ("'r'", "-4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(client: httpx.Client, case: str) -> None:
    path, sent, code, text = CASES[case]
    answer = client.post(path, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, list(answer.json())) == (code, ["error"]), error
    assert all(each in error for each in text), error
    assert len(error) < 2000
    assert answer.headers["weir-error"]
    assert client.post(SIMPLE, content=GOOD).status_code == 200


@pytest.mark.parametrize("case", CASES)
def test_the_same_in_chunks(client: httpx.Client, case: str) -> None:
    """A chunked upload goes through the ASGI application, which says the same."""
    path, sent, code, text = CASES[case]
    content = sent["content"]
    pieces = [content[:10], content[10:]]
    answer = client.post(path, **{**sent, "content": iter(pieces)})
    error = answer.json()["error"]
    assert (answer.status_code, list(answer.json())) == (code, ["error"]), error
    assert all(each in error for each in text), error
    assert client.post(SIMPLE, content=iter([GOOD])).status_code == 200


@pytest.mark.parametrize(("method", "allow"), [("GET", "POST"), ("PUT", "POST"), ("DELETE", "POST")])
def test_methods_that_do_not_belong(server: Served, method: str, allow: str) -> None:
    answer = httpx.request(method, server.url + SIMPLE)
    assert (answer.status_code, answer.headers["allow"], list(answer.json())) == (405, allow, ["error"])


def test_a_body_that_does_not_come_whole_harms_nobody(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {VECTOR} HTTP/1.1\r\nHost: t\r\nInference-Header-Content-Length: 50\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + bytes(100_000))
    assert httpx.post(server.url + SIMPLE, content=GOOD).status_code == 200
