"""Inference through every frontend of HTTP: one answer, lists, and streams of events."""

import asyncio
import gc
import json
import socket
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy
import pytest
from tests.frontends.http.models import (
    Add,
    Blob,
    Count,
    Echo,
    Length,
    Moody,
    Reader,
    Shout,
    Square,
    Upload,
    Upper,
    Words,
)
from tests.frontends.http.servers import Running, Serve
from tests.frontends.http.sockets import Run, until
from tests.serving.kit import Watch
from tests.streaming_models import Count as Counting
from tests.streaming_models import Prefixes, Raising, Script, Ticking

from weir.catalog.registry import Registry
from weir.errors import Cancelled
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import unless_left
from weir.frontends.http.fast.shared import Clocks
from weir.frontends.http.server import HttpServer
from weir.messages import JSON, MSGPACK, OCTETS, Request
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver
from weir.wire.sse import Event, EventParser


def inline(model: Any, **settings: Any) -> Service:
    return Service(model, executor="inline", **settings)


@pytest.mark.parametrize(
    "content_type",
    [None, "", "*/*", "application/x-www-form-urlencoded", JSON, "application/json; charset=utf-8", "APPLICATION/JSON"],
)
def test_what_clients_say_without_meaning_it_is_json(serve: Serve, content_type: str | None) -> None:
    server = serve(inline(Square))
    headers = {} if content_type is None else {"content-type": content_type}
    answer = server.client.post("/infer/square", content=b"3", headers=headers)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"9", JSON)


def test_json_keeps_every_value(serve: Serve) -> None:
    server = serve(inline(Echo))
    values: tuple[Any, ...] = (None, True, 0, -1.5, 2**63, "ä\u0000😀", [], {"a": [{"b": []}]})
    for value in values:
        answer = server.client.post("/infer/echo", content=json.dumps(value))
        assert answer.json() == value


def test_msgpack_in_and_out(serve: Serve) -> None:
    server = serve(inline(Square))
    for content_type in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
        answer = server.client.post(
            "/infer/square", content=msgspec.msgpack.encode(3), headers={"content-type": content_type}
        )
        assert answer.headers["content-type"] == MSGPACK
        assert msgspec.msgpack.decode(answer.content) == 9


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/msgpack", MSGPACK), ("application/json", JSON), ("*/*", JSON), ("application/*", JSON),
        ("application/json;q=0.1, application/msgpack", MSGPACK), ("text/html, */*;q=0.1", JSON),
        ("application/json;q=0, */*", MSGPACK), ("application/x-msgpack", MSGPACK),
    ],
)  # fmt: skip
def test_the_answer_has_the_accepted_content_type(serve: Serve, accept: str, expected: str) -> None:
    server = serve(inline(Square))
    answer = server.client.post("/infer/square", content=b"3", headers={"accept": accept})
    assert answer.headers["content-type"] == expected
    assert (json.loads if expected == JSON else msgspec.msgpack.decode)(answer.content) == 9


@pytest.mark.parametrize("name", ["content-type", "accept"])
def test_a_type_that_nobody_speaks_is_refused_by_name(serve: Serve, name: str) -> None:
    server = serve(inline(Square))
    answer = server.client.post("/infer/square", content=b"3", headers={name: "image/png"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["model"]) == (415, "UnsupportedMediaType", "square")
    assert "image/png" in error["message"]
    assert JSON in error["message"]


def test_octets_are_one_item_of_bytes(serve: Serve) -> None:
    server = serve(inline(Blob))
    answer = server.client.post("/infer/blob", content=b"\x00\xff12", headers={"content-type": OCTETS})
    assert (answer.content, answer.headers["content-type"]) == (b"21\xff\x00", OCTETS)


def test_octets_are_answered_in_json_by_a_model_that_does_not_promise_bytes(serve: Serve) -> None:
    class Size(Model):
        def predict(self, batch: list[bytes]) -> list[int]:
            return [len(item) for item in batch]

    server = serve(inline(Size))
    answer = server.client.post("/infer/size", content=b"\x00\xff12", headers={"content-type": OCTETS})
    assert (answer.content, answer.headers["content-type"]) == (b"4", JSON)


def test_a_models_own_content_types(serve: Serve) -> None:
    server = serve(inline(Shout), inline(Reader))
    answer = server.client.post("/infer/shout", content=b"hello", headers={"content-type": "text/plain; charset=utf-8"})
    assert (answer.content, answer.headers["content-type"]) == (b"HELLO", "text/plain")
    loud = {"content-type": "text/plain", "accept": "text/x-loud"}
    assert server.client.post("/infer/shout", content=b"hi", headers=loud).headers["content-type"] == "text/x-loud"
    read = server.client.post("/infer/reader", content=b"hello", headers={"content-type": "text/plain"})
    assert (read.content, read.headers["content-type"]) == (b"5", JSON)


def test_a_form_with_files_is_read_by_its_boundary(serve: Serve) -> None:
    server = serve(inline(Upload))
    for files in ({"file": ("a.txt", b"abc")}, {"one": ("b.bin", b"\r\n--x"), "two": ("c.bin", b"\x00" * 50)}):
        answer = server.client.post("/infer/upload", files=files)
        assert answer.json() == {name: len(content) for name, content in files.values()}


def test_an_empty_body_reaches_a_model_that_could_take_it(serve: Serve) -> None:
    server = serve(inline(Blob), inline(Reader), inline(Echo))
    assert server.client.post("/infer/blob", content=b"", headers={"content-type": OCTETS}).content == b""
    assert server.client.post("/infer/reader", content=b"", headers={"content-type": "text/plain"}).json() == 0
    refused = server.client.post("/infer/echo", content=b"", headers={"content-type": JSON})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "InvalidRequest")


def test_declared_types_are_validated(serve: Serve) -> None:
    server = serve(inline(Length), inline(Count))
    assert server.client.post("/infer/length", json={"x": 3, "y": 4}).json() == 5
    assert server.client.post("/infer/count", json={"name": "a", "children": [{"name": "b"}]}).json() == 2
    for model, item in (("length", {"x": "far"}), ("count", {"name": 7})):
        answer = server.client.post(f"/infer/{model}", json=item)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["model"]) == (422, "ValidationFailed", model)
        assert error["details"][0]["loc"] in (["x"], ["name"])


def test_tensors(serve: Serve) -> None:
    server = serve(inline(Add))
    body = {"a": [[1, 2], [3, 4]], "b": [[0.5, 0.5], [1, 1]]}
    assert server.client.post("/infer/add", json=body).json() == {"sum": [[1.5, 2.5], [4.0, 5.0]]}
    packed = server.client.post("/infer/add", content=msgspec.msgpack.encode(body), headers={"content-type": MSGPACK})
    assert msgspec.msgpack.decode(packed.content) == {"sum": [[1.5, 2.5], [4.0, 5.0]]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"a": [[1, 2]]}, "'b': is missing"),
        ({"a": [[1, 2]], "b": [[1, 2]], "c": []}, "'c'"),
        ({"a": [[1, 2, 3]], "b": [[1, 2]]}, "shape"),
        ({"a": [[1, 2]], "b": [["x", 2]]}, "'b'"),
        ({"a": [[1, 2], [1]], "b": [[1, 2]]}, "'a'"),
        ([1], "object"),
    ],
)
def test_wrong_tensors_are_refused_by_name(serve: Serve, body: Any, says: str) -> None:
    server = serve(inline(Add))
    answer = server.client.post("/infer/add", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest")
    assert says in answer.json()["error"]["message"]


def test_tensors_of_bytes_that_are_no_text_need_msgpack(serve: Serve) -> None:
    server = serve(inline(Upper))
    assert server.client.post("/infer/upper", json={"text": ["a", "ä"]}).json() == {"text": ["A", "ä"]}
    answer = server.client.post("/infer/upper", json={"text": ["bad"]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "ModelError")
    packed = server.client.post("/infer/upper", json={"text": ["bad"]}, headers={"accept": MSGPACK})
    assert msgspec.msgpack.decode(packed.content) == {"text": [b"\xff"]}


def test_measured_items_carry_their_size(serve: Serve) -> None:
    server = serve(inline(Words))
    answer = server.client.post("/infer/words", json="one two three", headers={"x-explain": "1"})
    assert (answer.json(), answer.headers["x-batch-size"]) == (13, "3")
    refused = server.client.post("/infer/words", json=7)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "InvalidRequest")


class TestBatch:
    """POST .../batch"""

    def test_a_list_is_answered_item_by_item(self, serve: Serve) -> None:
        server = serve(inline(Square, max_batch_size=4))
        answer = server.client.post("/infer/square/batch", json=list(range(10)))
        assert answer.status_code == 200
        assert answer.json() == [{"output": x * x} for x in range(10)]

    def test_in_msgpack(self, serve: Serve) -> None:
        server = serve(inline(Square))
        body = msgspec.msgpack.encode([1, "x", 3])
        answer = server.client.post("/infer/square/batch", content=body, headers={"content-type": MSGPACK})
        first, second, third = msgspec.msgpack.decode(answer.content)
        assert (first, third) == ({"output": 1}, {"output": 9})
        assert second["code"] == 500

    def test_errors_stand_in_their_items_places(self, serve: Serve) -> None:
        server = serve(inline(Moody))
        items = ["fine", "invalid", "unprocessable", "explode", {"a": 1}]
        answer = server.client.post("/infer/moody/batch", json=items)
        assert answer.status_code == 200
        results = answer.json()
        assert [result.get("code") for result in results] == [None, 400, 422, 500, None]
        assert [results[0]["output"], results[4]["output"]] == ["fine", {"a": 1}]
        assert results[2]["error"]["details"] == [{"loc": ["x"], "msg": "no"}]
        assert set(results[1]["error"]) == {"type", "message", "model", "details"}

    def test_an_empty_list_has_an_empty_answer(self, serve: Serve) -> None:
        server = serve(inline(Square))
        assert server.client.post("/infer/square/batch", json=[]).json() == []

    @pytest.mark.parametrize("body", [b"3", b'{"a": 1}', b"[1, 2", b"[1,]", b"", b"[" * 100_000])
    def test_what_is_no_list_is_refused(self, serve: Serve, body: bytes) -> None:
        server = serve(inline(Square))
        answer = server.client.post("/infer/square/batch", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest")

    def test_a_list_longer_than_the_line_is_too_large(self, serve: Serve) -> None:
        server = serve(inline(Square, max_queue_size=10))
        answer = server.client.post("/infer/square/batch", json=list(range(11)))
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "TooLarge")

    def test_measured_items_fail_alone(self, serve: Serve) -> None:
        server = serve(inline(Words))
        answer = server.client.post("/infer/words/batch", json=[7, "a b", "c", None, "d e f"])
        results = answer.json()
        assert [result.get("code") for result in results] == [400, None, None, 400, None]
        assert [result.get("output") for result in results] == [None, 3, 1, None, 5]
        refused = server.client.post("/infer/words/batch", json=[7])
        assert [result["code"] for result in refused.json()] == [400]

    def test_tensors(self, serve: Serve) -> None:
        server = serve(inline(Add))
        item = {"a": [[1, 2]], "b": [[3, 4]]}
        first, second, third = server.client.post("/infer/add/batch", json=[item, {"a": []}, item]).json()
        assert first == third == {"output": {"sum": [[4.0, 6.0]]}}
        assert (second["code"], second["error"]["type"]) == (400, "InvalidRequest")

    def test_an_answer_that_cannot_be_written_fails_alone(self, serve: Serve) -> None:
        server = serve(inline(Upper))
        first, second = server.client.post("/infer/upper/batch", json=[{"text": ["a"]}, {"text": ["bad"]}]).json()
        assert first == {"output": {"text": ["A"]}}
        assert (second["code"], second["error"]["type"]) == (500, "ModelError")

    def test_octets_cannot_be_a_list(self, serve: Serve) -> None:
        server = serve(inline(Blob))
        answer = server.client.post("/infer/blob/batch", content=b"12", headers={"content-type": OCTETS})
        assert answer.status_code == 415


class TestPaths:
    """Which model a path means."""

    def test_the_only_model_has_a_short_path(self, serve: Serve) -> None:
        server = serve(inline(Square))
        assert server.client.post("/inference", json=3).json() == 9
        assert server.client.post("/inference/batch", json=[3]).json() == [{"output": 9}]

    def test_an_unknown_model_and_the_short_path_of_several_name_them(self, serve: Serve) -> None:
        server = serve(inline(Square), inline(Echo))
        for path in ("/inference", "/infer/cube"):
            answer = server.client.post(path, json=3)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "ModelNotFound")
            assert "square, echo" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(("name", "quoted"), [("square", "square"), ("v1.2~b", "v1%2E2%7Eb")])
    def test_routes_of_a_models_own_and_names_that_need_quoting(self, serve: Serve, name: str, quoted: str) -> None:
        server = serve(inline(Square, name=name), inline(Echo), routes={name: "/api/sq", "echo": "/api/batch"})
        assert server.client.post("/api/sq", json=3).json() == 9
        assert server.client.post("/api/sq/batch", json=[3]).json() == [{"output": 9}]
        assert server.client.post("/api/batch", json=3).json() == 3
        assert server.client.post(f"/infer/{quoted}", json=3).json() == 9

    def test_other_paths_are_not_found(self, serve: Serve) -> None:
        server = serve(inline(Square))
        for path in ("/infer", "/infer/", "/infer/square/", "/nowhere", "/infer//x"):
            answer = server.client.post(path, json=3)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFound")

    def test_other_methods_are_not_allowed(self, serve: Serve) -> None:
        server = serve(inline(Square))
        for path in ("/infer/square", "/infer/square/batch", "/inference"):
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                answer = server.client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
                assert method == "HEAD" or answer.json()["error"]["type"] == "MethodNotAllowed"


class TestHeaders:
    """What a request's headers can ask for."""

    def call(self, serve: Serve, **headers: str) -> httpx.Response:
        server = serve(inline(Square))
        return server.client.post(
            "/infer/square", json=3, headers={f"x-{key}": value for key, value in headers.items()}
        )

    def test_a_batch_is_explained_on_request(self, serve: Serve) -> None:
        headers = self.call(serve, explain="1").headers
        assert (headers["x-batch-size"], headers["x-batch-reason"], headers["x-batch-waiting"]) == ("1", "idle", "1")
        assert headers["x-batch-wakeup"] == "arrival"
        assert 0 <= float(headers["x-batch-oldest-age"]) < 300
        assert 0 <= float(headers["x-queue-time"]) < 300

    def test_or_when_the_server_always_does(self, serve: Serve) -> None:
        server = serve(inline(Square), explain=True)
        assert "x-batch-size" in server.client.post("/infer/square", json=3).headers
        assert "x-batch-size" not in server.client.post("/infer/square", json=3, headers={"x-explain": "0"}).headers

    def test_the_limit_is_there_if_the_policy_has_one(self, serve: Serve) -> None:
        server = serve(inline(Square, policy="control-limit:2"))
        answer = server.client.post("/infer/square/batch", json=[1, 2], headers={"x-explain": "1"})
        assert answer.headers["x-batch-limit"] == "2"

    def test_a_request_id_comes_back(self, serve: Serve) -> None:
        answer = self.call(serve, **{"request-id": "abc-123"})
        assert answer.headers["x-request-id"] == "abc-123"

    @pytest.mark.parametrize(
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
        self, serve: Serve, name: str, value: str, rule: str
    ) -> None:
        answer = self.call(serve, **{name.lower(): value})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["model"]) == (400, "InvalidRequest", "square")
        assert f"X-{name}" in error["message"]
        assert value[:20] in error["message"]
        assert rule in error["message"]


def test_an_item_of_a_list_lets_go_of_its_tensors_when_it_has_its_answer(run: Run) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        service = Service(Add, executor=executor, max_batch_size=1)
        async with service:
            transport = httpx.ASGITransport(make_app(KserveContext(Registry([service]), HttpSettings())))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                item = {"a": [[1.0, 2.0]], "b": [[3.0, 4.0]]}
                request = asyncio.ensure_future(client.post("/infer/add/batch", json=[item, item]))
                await until(lambda: bool(executor.pending))
                held = weakref.ref(executor.pending[0][1].payloads[0]["a"])
                executor.answer_next(lambda payloads: [{"sum": numpy.zeros((1, 2), numpy.float32)}])
                executor.batches.clear()
                await until(lambda: bool(executor.pending))
                gc.collect()
                assert held() is None
                executor.answer_next(lambda payloads: [{"sum": numpy.zeros((1, 2), numpy.float32)}])
                answer = await request
                assert answer.json() == [{"output": {"sum": [[0.0, 0.0]]}}] * 2

    run(scenario)


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody comes here")


async def leaves() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def forever() -> int:
    await asyncio.Event().wait()
    return 1


async def at_once() -> int:
    return 1


def test_who_stays_gets_what_comes_of_it() -> None:
    async def main() -> int:
        return await unless_left(at_once(), stays)

    assert asyncio.run(main()) == 1


async def test_who_leaves_has_it_cancelled() -> None:
    with pytest.raises(Cancelled, match="the caller disconnected"):
        await unless_left(forever(), leaves)
    await asyncio.sleep(0)  # nothing is left of the cancellation


async def test_who_leaves_when_all_is_done_cancels_nothing() -> None:
    gone, done = asyncio.Event(), asyncio.Event()

    async def leaves_then() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def until_done() -> bool:
        return await done.wait()

    def both() -> None:
        gone.set()
        done.set()

    asyncio.get_running_loop().call_later(0.0, both)
    assert await unless_left(until_done(), leaves_then)
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_server_that_ends_is_no_caller_who_left() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(unless_left(forever(), stays))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def events(response: httpx.Response) -> list[Event]:
    return EventParser().feed(response.content)


def data(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [json.loads(event.data) if event.name == "message" else event for event in events(response)]


def after_a_comment(server: Running, path: str, heard: threading.Event) -> list[Event]:
    """Ask; set `heard` once a comment has broken the silence, and return the events that follow."""
    with server.client.stream("POST", path, json=1) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()
        first = next(parts)
        assert first.startswith(b": keep-alive\n\n")
        heard.set()
        return EventParser().feed(b"".join((first, *parts)))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_every_answer_is_an_event(serve: Serve) -> None:
    server = serve(Service(Counting, executor="thread"))
    for headers in ({}, {"accept": "text/event-stream"}, {"accept": "application/json;q=0.1, text/event-stream"}):
        response = server.client.post("/infer/count", content=b"3", headers={**headers, "x-request-id": "mine"})
        assert data(response) == [1, 2, 3]
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-request-id"] == "mine"
        assert "content-length" not in response.headers
    explained = server.client.post("/infer/count", content=b"3", headers={"x-explain": "1"})
    assert explained.headers["x-batch-size"] == "1"
    assert server.client.post("/inference", content=b"1").text == "data: 1\n\n"


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_tensors_are_events_too(serve: Serve) -> None:
    server = serve(Service(Prefixes, executor="thread"))
    assert data(server.client.post("/infer/prefixes", json={"x": [[1, 2], [3, 4]]})) == [
        {"sum": [[1, 2]], "rows": [1]}, {"sum": [[4, 6]], "rows": [2]},
    ]  # fmt: skip


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_one_answer_is_refused_where_there_are_several(serve: Serve) -> None:
    server = serve(Service(Counting, executor="thread"))
    for path, accept in (("/infer/count", "application/json"), ("/infer/count/batch", "text/event-stream")):
        response = server.client.post(path, content=b"3", headers={"accept": accept})
        assert response.status_code == 501
        assert response.json()["error"]["type"] == "Unsupported"


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_an_error_before_the_first_answer_has_its_own_status(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"), Service(Raising, executor="thread"))
    response = server.client.post("/infer/script", json=[{"error": "not you"}])
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "not you"
    assert server.client.post("/infer/raising", json="now").status_code == 500
    assert server.client.post("/infer/script", content=b"{").status_code == 400
    assert server.client.post("/infer/script", content=b"").status_code == 400
    late = {"x-request-timeout": "0.000001"}
    assert server.client.post("/infer/script", json=[], headers=late).status_code == 504


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_a_later_error_is_an_event(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"))
    first, last = data(server.client.post("/infer/script", json=["a", {"error": "enough"}]))
    assert first == "a"
    assert last.name == "error"
    error = json.loads(last.data)["error"]
    assert (error["type"], error["message"], error["model"]) == ("InvalidRequest", "enough", "script")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_a_stream_without_an_answer_is_empty(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"))
    assert data(server.client.post("/infer/script", json=[None, None])) == []


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_silence_is_broken_by_comments(serve: Serve) -> None:
    heard = threading.Event()

    class Silent(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            assert heard.wait(60)
            yield {0: "at last"}

    server = serve(Service(Silent, executor="thread"), stream_keep_alive=0.02)
    answer = after_a_comment(server, "/infer/silent", heard)
    assert [json.loads(event.data) for event in answer] == ["at last"]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_after_a_comment_even_the_first_error_is_an_event(serve: Serve) -> None:
    heard = threading.Event()

    class Grumbling(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            assert heard.wait(60)
            if batch:
                raise RuntimeError("no")
            yield {}

    server = serve(Service(Grumbling, executor="thread"), stream_keep_alive=0.02)
    (error,) = after_a_comment(server, "/infer/grumbling", heard)
    assert error.name == "error"


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_answers_come_one_by_one_and_who_leaves_ends_his_part(serve: Serve, tmp_path: Path) -> None:
    ledger, heard = tmp_path / "ledger", RecordingObserver()
    server = serve(Service(Ticking, executor="process", params={"ledger": str(ledger)}, observers=[heard]))
    got: list[Event] = []
    with server.client.stream("POST", "/infer/ticking", json="go") as response:
        parser = EventParser()
        for chunk in response.iter_raw():
            got += parser.feed(chunk)
            if len(got) >= 5:
                break
    assert [int(event.data) for event in got[:5]] == [0, 1, 2, 3, 4]
    server.until(lambda: bool(heard.timings))
    assert ledger.read_text() == "closed"


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_who_leaves_without_a_word_ends_his_part_too(serve: Serve) -> None:
    heard = RecordingObserver()
    server = serve(Service(Ticking, executor="thread", observers=[heard]))
    with server.connect() as connection:
        connection.sendall(b'POST /infer/ticking HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"go"')
        assert connection.recv(1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
    server.until(lambda: bool(heard.timings))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_a_reader_who_does_not_read_is_ended_and_holds_back_nobody(serve: Serve) -> None:
    heard = RecordingObserver()
    params = {"seconds": 0.001, "size": 100_000}
    service = Service(Ticking, executor="thread", observers=[heard], params=params, stream_buffer=8)
    server = serve(service)
    with server.connect() as connection:
        connection.sendall(b'POST /infer/ticking HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"slow"')
        server.until(lambda: any(error is not None for _, error, _ in heard.answers))
        body = read_to_end(connection)
    assert b"event: error" in body
    assert b'"Overloaded"' in body
    assert b"stream_buffer" in body


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 16)
    return received


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_bytes_are_counted(serve: Serve) -> None:
    heard = RecordingObserver()
    server = serve(Service(Counting, executor="thread", observers=[heard]))
    response = server.client.post("/infer/count", content=b"2")
    server.until(lambda: bool(heard.transfers))
    assert heard.transfers == [("count", "http", 1, len(response.content))]
    frontends: set[str] = {request.frontend for requests, _, _ in heard.answers for request in _all(requests)}
    assert frontends == {"http"}


def _all(requests: list[Request]) -> list[Request]:
    return requests


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
def test_a_compressed_body_is_read(serve: Serve) -> None:
    import gzip

    server = serve(Service(Counting, executor="thread"))
    response = server.client.post("/infer/count", content=gzip.compress(b"2"), headers={"content-encoding": "gzip"})
    assert data(response) == [1, 2]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.usefixtures("nothing_is_left")
async def test_a_reader_who_never_reads_again_loses_the_connection() -> None:
    clock = [0.0]
    heard = Watch()
    params = {"seconds": 0.0, "size": 100_000}
    registry = Registry([Service(Ticking, executor="thread", params=params, observers=[heard])])
    settings = HttpSettings(port=0, body_timeout=5.0)
    context = KserveContext(registry, settings)
    server = HttpServer(context, make_app(context), clocks=Clocks(lambda: clock[0]))
    await registry.start()
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b'POST /infer/ticking HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"slow"')
    await heard.until(lambda: heard.answers)  # its part is ended, as it does not read
    for seconds in (4.0, 2.0):
        assert server.connections == 1
        clock[0] += seconds
        server.sweep()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not server.connections
    writer.transport.abort()
    await registry.stop()
    await server.stop()
