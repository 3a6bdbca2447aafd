"""Bodies that are wrong: a clear error for each, and the server goes on."""

import json
from typing import Any

import pytest
from tests.frontends.http.models import Echo
from tests.frontends.http.servers import Running, Serve

from weir.messages import JSON, MSGPACK
from weir.serving.service import Service

BAD = {
    JSON: [
        b"", b" ", b"{", b"[1, 2", b'"abc', b"nul", b"NaN", b"Infinity", b"-Infinity", b"[1,]", b"{1: 2}", b"1 2", b"'a'",
        b"\xff\xfe", b'"\xff"', b'"\\ud800"x', b"1e999", b"-1e999", b"0x10", b"01", b"[" * 100_000, b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000, b"\x00", b"1\x00", b"3" * 5000 + b".",
    ],
    MSGPACK: [
        b"", b"\x93\x01", b"\xc1", b"\xa5ab", b"\x91" * 100_000, b"\x01\x01", b"\xdf\xff\xff\xff\xff", b"\xa2\xff\xff",
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/infer/echo", "/infer/length", "/infer/echo/batch"])
def test_malformed_bodies_are_answered_400(all_models: Running, path: str) -> None:
    for content_type, bodies in BAD.items():
        for body in bodies:
            answer = all_models.client.post(path, content=body, headers={"content-type": content_type})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest"), body[:50]


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**30, 2**64])
def test_huge_integers_never_hurt_the_server(all_models: Running, number: int) -> None:
    for path, body in (("/infer/square", str(number)), ("/infer/length", json.dumps({"x": number}))):
        answer = all_models.client.post(path, content=body)
        assert answer.status_code in (200, 400, 422, 500)
        assert answer.status_code == 200 or set(answer.json()["error"]) == {"type", "message", "model", "details"}
    assert all_models.client.post("/infer/square", json=2).json() == 4


def test_an_answer_that_json_cannot_say_is_the_models_error_or_null(serve: Serve) -> None:
    class Odd(Echo):
        def predict(self, batch: list[Any]) -> list[Any]:
            return [{"nan": float("nan"), "object": object(), "half": "\ud800"}[item] for item in batch]

    server = serve(Service(Odd, executor="inline"))
    assert server.client.post("/infer/odd", json="nan").content == b"null"
    for item in ("object", "half"):
        answer = server.client.post("/infer/odd", json=item)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "ModelError")
