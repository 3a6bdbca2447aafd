"""Inference through every frontend of HTTP: one answer and lists."""

import asyncio
import gc
import json
import weakref
from typing import Any

import httpx
import msgspec
import numpy
import pytest
from tests.frontends.http.models import Add, Echo, Square
from tests.frontends.http.servers import Running, Serve, refusal
from tests.rings import subcases
from tests.waiting import turns, until

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import unless_left
from weir.messages import JSON, MSGPACK, OCTETS
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def inline(model: Any, **settings: Any) -> Service:
    return Service(model, executor="inline", **settings)


def post(server: Running, model: str, content: bytes, content_type: str = JSON, **headers: str) -> httpx.Response:
    return server.client.post(f"/infer/{model}", content=content, headers={"content-type": content_type, **headers})


@subcases("content_type", ["", "*/*", "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
def test_what_clients_say_without_meaning_it_is_json(all_models: Running, content_type: str) -> None:
    for answer in (
        post(all_models, "square", b"3", content_type),
        all_models.client.post("/infer/square", content=b"3"),
    ):
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"9", JSON)


@subcases("value", [None, True, 0, -1.5, 2**63, "ä\u0000😀", [], {"a": [{"b": []}]}])
def test_json_keeps_every_value(all_models: Running, value: Any) -> None:
    assert all_models.client.post("/infer/echo", content=json.dumps(value)).json() == value


@subcases(("content", "headers"), [
    (pack(3), (MSGPACK, {})), (pack(3), ("application/x-msgpack", {})), (b"3", (JSON, {"accept": MSGPACK})),
    (b"3", (JSON, {"accept": "application/json;q=0.1, application/x-msgpack"})),
])  # fmt: skip
def test_msgpack_in_and_out(all_models: Running, content: bytes, headers: tuple[str, dict[str, str]]) -> None:
    answer = post(all_models, "square", content, headers[0], **headers[1])
    assert (answer.headers["content-type"], unpack(answer.content)) == (MSGPACK, 9)


@subcases(("path", "content_type", "body"), [
    *[(path, JSON, body) for path in ("echo", "length", "echo/batch") for body in (b"", b"[1, 2", b'"\\ud800"x', b"[" * 100_000)],
    *[(path, MSGPACK, body) for path in ("echo", "length", "echo/batch") for body in (b"", b"\x93\x01", b"\x91" * 100_000)],
])  # fmt: skip
def test_malformed_bodies_are_refused(all_models: Running, path: str, content_type: str, body: bytes) -> None:
    assert refusal(post(all_models, path, body, content_type)) == (400, "InvalidRequest")


@subcases("number", [10**400, -(10**400), 10**30, 2**64])
def test_huge_integers_never_hurt_the_server(all_models: Running, number: int) -> None:
    for model, body in (("square", number), ("length", {"x": number})):
        answer = post(all_models, model, json.dumps(body).encode())
        assert answer.status_code in (200, 400, 422, 500)
        assert answer.status_code == 200 or set(answer.json()["error"]) == {"type", "message", "model", "details"}
    assert all_models.client.post("/infer/square", json=2).json() == 4


def test_an_answer_that_json_cannot_say_is_null_or_the_models_error(serve: Serve) -> None:
    class Odd(Echo):
        def predict(self, batch: list[Any]) -> list[Any]:
            return [{"nan": float("nan"), "object": object(), "half": "\ud800"}[item] for item in batch]

    server = serve(inline(Odd))
    assert server.client.post("/infer/odd", json="nan").content == b"null"
    for item in ("object", "half"):
        assert refusal(server.client.post("/infer/odd", json=item)) == (500, "ModelError")


@subcases("name", ["content-type", "accept"])
def test_a_type_that_nobody_speaks_is_refused_by_name(all_models: Running, name: str) -> None:
    answer = all_models.client.post("/infer/square", content=b"3", headers={name: "image/png"})
    assert refusal(answer) == (415, "UnsupportedMediaType")
    error = answer.json()["error"]
    assert error["model"] == "square" and "image/png" in error["message"] and JSON in error["message"]


@subcases(("model", "sent", "headers", "expected"), [
    ("blob", b"\x00\xff12", (OCTETS,), (b"21\xff\x00", OCTETS)), ("blob", b"", (OCTETS,), (b"", OCTETS)),
    ("words", b'"a b"', (JSON,), (b"3", JSON)), ("shout", b"hello", ("text/plain; charset=utf-8",), (b"HELLO", "text/plain")),
    ("shout", b"hi", ("text/plain", "text/x-loud"), (b"HI", "text/x-loud")), ("reader", b"hello", ("text/plain",), (b"5", JSON)),
    ("reader", b"", ("text/plain",), (b"0", JSON)), ("size", b"\x00\xff12", (OCTETS,), (b"4", JSON)), ("square", b"3", (JSON, "text/html, */*;q=0.1"), (b"9", JSON)),
])  # fmt: skip
def test_the_types_of_a_model(
    all_models: Running, model: str, sent: bytes, headers: tuple[str, ...], expected: tuple[bytes, str]
) -> None:
    answer = post(all_models, model, sent, headers[0], **dict(zip(["accept"], headers[1:], strict=False)))
    assert (answer.content, answer.headers["content-type"]) == expected


def test_a_form_with_files_is_read_by_its_boundary(all_models: Running) -> None:
    for files in ({"file": ("a.txt", b"abc")}, {"one": ("b.bin", b"\r\n--x"), "two": ("c.bin", b"\x00" * 50)}):
        answer = all_models.client.post("/infer/upload", files=files)
        assert answer.json() == {name: len(content) for name, content in files.values()}


def test_declared_types_are_validated(all_models: Running) -> None:
    assert all_models.client.post("/infer/length", json={"x": 3, "y": 4}).json() == 5
    assert all_models.client.post("/infer/count", json={"name": "a", "children": [{"name": "b"}]}).json() == 2
    for model, item, place in (("length", {"x": "far"}, ["x"]), ("count", {"name": 7}, ["name"])):
        answer = all_models.client.post(f"/infer/{model}", json=item)
        assert refusal(answer) == (422, "ValidationFailed")
        error = answer.json()["error"]
        assert (error["model"], error["details"][0]["loc"]) == (model, place)


def test_tensors(all_models: Running) -> None:
    body = {"a": [[1, 2], [3, 4]], "b": [[0.5, 0.5], [1, 1]]}
    assert all_models.client.post("/infer/add", json=body).json() == {"sum": [[1.5, 2.5], [4.0, 5.0]]}
    assert unpack(post(all_models, "add", pack(body), MSGPACK).content) == {"sum": [[1.5, 2.5], [4.0, 5.0]]}
    answer = all_models.client.post("/infer/add", json={"a": [[1, 2]]})
    assert refusal(answer) == (400, "InvalidRequest") and "'b': is missing" in answer.json()["error"]["message"]


def test_tensors_of_bytes_that_are_no_text_need_msgpack(all_models: Running) -> None:
    assert all_models.client.post("/infer/upper", json={"text": ["a", "ä"]}).json() == {"text": ["A", "ä"]}
    assert refusal(all_models.client.post("/infer/upper", json={"text": ["bad"]})) == (500, "ModelError")
    assert unpack(post(all_models, "upper", b'{"text": ["bad"]}', accept=MSGPACK).content) == {"text": [b"\xff"]}


def test_measured_items_carry_their_size(all_models: Running) -> None:
    answer = post(all_models, "words", b'"one two three"', **{"x-explain": "1"})
    assert (answer.json(), answer.headers["x-batch-size"]) == (13, "3")
    assert refusal(all_models.client.post("/infer/words", json=7)) == (400, "InvalidRequest")


class TestBatch:
    """POST .../batch"""

    def test_a_list_is_answered_item_by_item(self, serve: Serve) -> None:
        server = serve(inline(Square, max_batch_size=4, max_queue_size=10))
        answer = server.client.post("/infer/square/batch", json=list(range(10)))
        assert (answer.status_code, answer.json()) == (200, [{"output": x * x} for x in range(10)])
        assert server.client.post("/infer/square/batch", json=[]).json() == []
        too_long = server.client.post("/infer/square/batch", json=list(range(11)))
        assert refusal(too_long) == (413, "TooLarge")

    def test_in_msgpack(self, all_models: Running) -> None:
        first, second, third = unpack(post(all_models, "square/batch", pack([1, "x", 3]), MSGPACK).content)
        assert (first, second["code"], third) == ({"output": 1}, 500, {"output": 9})

    def test_errors_stand_in_their_items_places(self, all_models: Running) -> None:
        items = ["fine", "invalid", "unprocessable", "explode", {"a": 1}]
        answer = all_models.client.post("/infer/moody/batch", json=items)
        assert answer.status_code == 200
        results = answer.json()
        assert [result.get("code") for result in results] == [None, 400, 422, 500, None]
        assert [results[0]["output"], results[4]["output"]] == ["fine", {"a": 1}]
        assert results[2]["error"]["details"] == [{"loc": ["x"], "msg": "no"}]
        assert set(results[1]["error"]) == {"type", "message", "model", "details"}

    def test_what_is_no_list_is_refused(self, all_models: Running) -> None:
        for body in (b"3", b'{"a": 1}'):
            assert refusal(post(all_models, "square/batch", body)) == (400, "InvalidRequest")
        assert post(all_models, "blob/batch", b"12", OCTETS).status_code == 415

    def test_measured_items_fail_alone(self, all_models: Running) -> None:
        results = all_models.client.post("/infer/words/batch", json=[7, "a b", "c", None, "d e f"]).json()
        assert [result.get("code") for result in results] == [400, None, None, 400, None]
        assert [result.get("output") for result in results] == [None, 3, 1, None, 5]
        assert [result["code"] for result in all_models.client.post("/infer/words/batch", json=[7]).json()] == [400]

    def test_tensors_fail_alone_when_read_and_when_written(self, all_models: Running) -> None:
        item = {"a": [[1, 2]], "b": [[3, 4]]}
        first, second, third = all_models.client.post("/infer/add/batch", json=[item, {"a": []}, item]).json()
        assert first == third == {"output": {"sum": [[4.0, 6.0]]}}
        assert (second["code"], second["error"]["type"]) == (400, "InvalidRequest")
        first, second = all_models.client.post("/infer/upper/batch", json=[{"text": ["a"]}, {"text": ["bad"]}]).json()
        assert first == {"output": {"text": ["A"]}}
        assert (second["code"], second["error"]["type"]) == (500, "ModelError")


class TestPaths:
    """Which model a path means."""

    def test_the_only_model_has_a_short_path(self, serve: Serve) -> None:
        server = serve(inline(Square))
        assert server.client.post("/inference", json=3).json() == 9
        assert server.client.post("/inference/batch", json=[3]).json() == [{"output": 9}]

    def test_an_unknown_model_and_the_short_path_of_several_name_them(self, all_models: Running) -> None:
        for path in ("/inference", "/infer/cube"):
            answer = all_models.client.post(path, json=3)
            assert refusal(answer) == (404, "ModelNotFound")
            assert "shout, size, square" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(("name", "quoted"), [("square", "square"), ("v1.2~b", "v1%2E2%7Eb")])
    def test_routes_of_a_models_own_and_names_that_need_quoting(self, serve: Serve, name: str, quoted: str) -> None:
        server = serve(inline(Square, name=name), inline(Echo), routes={name: "/api/sq", "echo": "/api/batch"})
        assert server.client.post("/api/sq", json=3).json() == 9
        assert server.client.post("/api/sq/batch", json=[3]).json() == [{"output": 9}]
        assert server.client.post("/api/batch", json=3).json() == 3
        assert server.client.post(f"/infer/{quoted}", json=3).json() == 9

    def test_other_paths_are_not_found_and_other_methods_not_allowed(self, all_models: Running) -> None:
        for path in ("/infer", "/infer/", "/infer/square/", "/nowhere", "/infer//x"):
            assert refusal(all_models.client.post(path, json=3)) == (404, "NotFound")
        for path in ("/infer/square", "/infer/square/batch"):
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                answer = all_models.client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
                assert method == "HEAD" or answer.json()["error"]["type"] == "MethodNotAllowed"


class TestHeaders:
    """What a request's headers can ask for."""

    def test_a_batch_is_explained_on_request(self, all_models: Running) -> None:
        headers = post(all_models, "square", b"3", **{"x-explain": "1", "x-request-id": "abc-123"}).headers
        assert (headers["x-batch-size"], headers["x-batch-reason"], headers["x-batch-waiting"]) == ("1", "idle", "1")
        assert (headers["x-batch-wakeup"], headers["x-request-id"]) == ("arrival", "abc-123")
        assert 0 <= float(headers["x-batch-oldest-age"]) < 300
        assert 0 <= float(headers["x-queue-time"]) < 300

    def test_or_when_the_server_always_does_with_the_limit_of_the_policy(self, serve: Serve) -> None:
        server = serve(inline(Square, policy="control-limit:2"), explain=True)
        answer = server.client.post("/infer/square/batch", json=[1, 2])
        assert (answer.headers["x-batch-size"], answer.headers["x-batch-limit"]) == ("2", "2")
        assert "x-batch-size" not in post(server, "square", b"3", **{"x-explain": "0"}).headers

    @subcases(
        ("name", "value", "rule"),
        [
            ("Request-Timeout", "soon", "number of seconds"), ("Request-Timeout", "0", "greater than 0"),
            ("Request-Timeout", "-1", "greater than 0"), ("Request-Timeout", "nan", "number"),
            ("Request-Timeout", "inf", "number"), ("Request-Timeout", "1e999", "number"), ("Request-Timeout", "", "number"),
            ("Request-Priority", "high", "integer"), ("Request-Priority", "1.5", "integer"),
            ("Request-Priority", "9999999999", "nine digits"), ("Batch-Key", "", "1 to 256"),
            ("Batch-Key", "x" * 257, "1 to 256"), ("Explain", "yes", "0 or 1"), ("Request-Id", "x" * 257, "at most 256"),
        ],
    )  # fmt: skip
    def test_a_bad_value_is_refused_with_name_value_and_rule(
        self, all_models: Running, name: str, value: str, rule: str
    ) -> None:
        answer = post(all_models, "square", b"3", **{f"x-{name.lower()}": value})
        error = answer.json()["error"]
        assert (*refusal(answer), error["model"]) == (400, "InvalidRequest", "square")
        assert f"X-{name}" in error["message"] and value[:20] in error["message"] and rule in error["message"]


async def test_an_item_of_a_list_lets_go_of_its_tensors_when_it_has_its_answer() -> None:
    executor, answered = FakeExecutor(), list[Any]()
    async with Service(Add, executor=executor, max_batch_size=1) as service:
        transport = httpx.ASGITransport(make_app(KserveContext(Registry([service]), HttpSettings())))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            item = {"a": [[1.0, 2.0]], "b": [[3.0, 4.0]]}
            request = asyncio.ensure_future(client.post("/infer/add/batch", json=[item, item]))
            for _ in range(2):
                await until(lambda: bool(executor.pending))
                gc.collect()
                assert [each() for each in answered] == [None] * len(answered)
                answered.append(weakref.ref(executor.pending[0][1].payloads[0]["a"]))
                executor.respond_next(lambda payloads: [{"sum": numpy.zeros((1, 2), numpy.float32)}])
                executor.batches.clear()
            assert (await request).json() == [{"output": {"sum": [[0.0, 0.0]]}}] * 2


async def test_who_leaves_when_all_is_done_cancels_nothing() -> None:
    gone, done = asyncio.Event(), asyncio.Event()

    async def leaves_then() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    def both() -> None:
        gone.set()
        done.set()

    asyncio.get_running_loop().call_later(0.0, both)
    assert await unless_left(done.wait(), leaves_then)
    await turns(5)


async def test_a_server_that_ends_is_no_caller_who_left() -> None:
    never: Any = asyncio.Event().wait
    task = asyncio.ensure_future(unless_left(never(), never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
