"""gzip and zstd both ways, through every frontend."""

import json

import httpx
import pytest
from tests.frontends.http.servers import Running
from tests.rings import subcases

from weir.protocols.response import CODINGS, compress, decompress

LONG = json.dumps("x" * 5000).encode()
VERY_LONG = json.dumps("x" * 600_000).encode()  # it is compressed beside the loop


def post(server: Running, body: bytes, coding: str, path: str = "/infer/echo") -> httpx.Response:
    return server.client.post(path, content=body, headers={"content-encoding": coding})


@subcases("coding", CODINGS)
def test_a_compressed_body_is_read_and_a_damaged_one_refused(all_models: Running, coding: str) -> None:
    body = compress(b"[1,2]", coding)
    assert post(all_models, body, coding).json() == [1, 2]
    assert post(all_models, body, coding, "/infer/echo/batch").json() == [{"output": 1}, {"output": 2}]
    for damaged in (b"[1, 2]", body[:-2], b""):
        answer = post(all_models, damaged, coding)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest")


@subcases("coding", CODINGS)
@pytest.mark.parametrize("body", [LONG, VERY_LONG, None])
def test_large_answers_and_pages_are_compressed_on_request(
    all_models: Running, body: bytes | None, coding: str
) -> None:
    method, path = ("GET", "/openapi.json") if body is None else ("POST", "/infer/echo")
    headers = {"accept-encoding": coding}
    with all_models.client.stream(method, path, content=body, headers=headers) as answer:
        packed = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == coding
    assert answer.headers["vary"].lower() == "accept-encoding"
    plain = decompress(packed, coding, 1_000_000)
    assert plain == body and 10 * len(packed) < len(body) if body else "openapi" in json.loads(plain)


@subcases(("body", "accepts"), [(b"1", "gzip, zstd"), (LONG, "br, gzip;q=0")])
def test_a_small_answer_and_one_for_others_are_not(all_models: Running, body: bytes, accepts: str) -> None:
    answer = all_models.client.post("/infer/echo", content=body, headers={"accept-encoding": accepts})
    assert "content-encoding" not in answer.headers and answer.content == body
