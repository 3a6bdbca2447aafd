"""gzip and zstd both ways, through every frontend."""

import json

import pytest
from tests.frontends.http.models import Echo
from tests.frontends.http.servers import Serve

from weir.protocols.response import CODINGS, compress, decompress
from weir.serving.service import Service
from weir.testing import FakeExecutor

both = pytest.mark.parametrize("coding", CODINGS)
LONG = json.dumps("x" * 5000).encode()


def echo() -> Service:
    return Service(Echo, executor=FakeExecutor(lambda items: items))


@both
@pytest.mark.parametrize("path", ["/infer/echo", "/infer/echo/batch"])
def test_a_compressed_body_is_read(serve: Serve, coding: str, path: str) -> None:
    server = serve(echo())
    body = compress(b"[1,2]", coding)
    answer = server.client.post(path, content=body, headers={"content-encoding": coding})
    assert answer.json() in ([1, 2], [{"output": 1}, {"output": 2}])


@both
def test_the_limit_holds_after_decompression(serve: Serve, coding: str) -> None:
    server = serve(echo(), max_body_size=10_000)
    bomb = compress(b" " * 900_000 + b"1", coding)
    assert len(bomb) < 10_000
    answer = server.client.post("/infer/echo", content=bomb, headers={"content-encoding": coding})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "TooLarge")
    assert server.client.post("/infer/echo", json=1).json() == 1


@both
def test_a_damaged_body_is_refused(serve: Serve, coding: str) -> None:
    server = serve(echo())
    for body in (b"[1, 2]", compress(b"[1, 2]", coding)[:-2], b""):
        answer = server.client.post("/infer/echo", content=body, headers={"content-encoding": coding})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest")


@both
def test_a_large_answer_is_compressed_on_request(serve: Serve, coding: str) -> None:
    server = serve(echo())
    with server.client.stream("POST", "/infer/echo", content=LONG, headers={"accept-encoding": coding}) as answer:
        packed = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == coding
    assert answer.headers["vary"].lower() == "accept-encoding"
    assert len(packed) < 500
    assert decompress(packed, coding, 10_000) == LONG


@pytest.mark.parametrize(("body", "accepts"), [(b"1", "gzip, zstd"), (LONG, "br, gzip;q=0")])
def test_a_small_answer_and_one_for_others_are_not(serve: Serve, body: bytes, accepts: str) -> None:
    answer = serve(echo()).client.post("/infer/echo", content=body, headers={"accept-encoding": accepts})
    assert "content-encoding" not in answer.headers and answer.content == body


@both
def test_pages_are_compressed_too(serve: Serve, coding: str) -> None:
    server = serve(echo())
    with server.client.stream("GET", "/openapi.json", headers={"accept-encoding": coding}) as answer:
        packed = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == coding
    assert "openapi" in json.loads(decompress(packed, coding, 1_000_000))


def test_a_very_large_answer_is_compressed_beside_the_loop(serve: Serve) -> None:
    body = json.dumps("x" * 600_000).encode()
    answer = serve(echo()).client.post("/infer/echo", content=body, headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == body
