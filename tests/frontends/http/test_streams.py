"""Streams of events through every frontend of HTTP."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes import RecordingObserver
from tests.frontends.http.servers import Serve
from tests.simulated.loop import SimulatedLoop
from tests.streaming_models import Count, Prefixes, Script, Ticking

from weir.frontends.http.asgi import AsgiCall, EventStream
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.exchange import EventSource
from weir.serving.service import Service
from weir.wire.sse import Event, EventParser

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def streaming(*models: type[Model], **settings: Any) -> list[Service]:
    return [Service(model, executor="thread", **settings) for model in models]


def data(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = EventParser().feed(response.content)
    return [json.loads(event.data) if event.name == "message" else event for event in events]


def test_every_answer_is_an_event(serve: Serve) -> None:
    heard = RecordingObserver()
    server = serve(*streaming(Count, observers=[heard]))
    for headers in ({}, {"accept": "text/event-stream"}, {"accept": "application/json;q=0.1, text/event-stream"}):
        response = server.client.post("/infer/count", content=b"3", headers={**headers, "x-request-id": "mine"})
        assert data(response) == [1, 2, 3]
        assert (response.headers["cache-control"], response.headers["x-request-id"]) == ("no-store", "mine")
        assert "content-length" not in response.headers
    packed = server.client.post("/infer/count", content=gzip.compress(b"2"), headers={"content-encoding": "gzip"})
    assert data(packed) == [1, 2]
    server.until(lambda: len(heard.transfers) == 4)
    assert heard.transfers[0] == ("count", "http", 1, len(response.content))
    assert {request.form.frontend for requests, _, _ in heard.responses for request in requests} == {"http"}
    explained = server.client.post("/infer/count", content=b"3", headers={"x-explain": "1"})
    assert explained.headers["x-batch-size"] == "1"
    assert server.client.post("/inference", content=b"1").text == "data: 1\n\n"
    for path, accept in (("/infer/count", "application/json"), ("/infer/count/batch", "text/event-stream")):
        response = server.client.post(path, content=b"3", headers={"accept": accept})
        assert (response.status_code, response.json()["error"]["type"]) == (501, "Unsupported")


def test_tensors_nothing_and_errors_in_streams(serve: Serve) -> None:
    server = serve(*streaming(Prefixes, Script))
    assert data(server.client.post("/infer/prefixes", json={"x": [[1, 2], [3, 4]]})) == [
        {"sum": [[1, 2]], "rows": [1]}, {"sum": [[4, 6]], "rows": [2]},
    ]  # fmt: skip
    assert data(server.client.post("/infer/script", json=[None, None])) == []
    first, last = data(server.client.post("/infer/script", json=["a", {"error": "enough"}]))
    error = json.loads(last.data)["error"]
    assert (first, error["message"], error["model"]) == ("a", "enough", "script")
    assert [server.client.post("/infer/script", content=body).status_code for body in (b"{", b"")] == [400, 400]
    late = {"x-request-timeout": "0.000001"}
    assert server.client.post("/infer/script", json=[], headers=late).status_code == 504


@pytest.mark.parametrize("fails", [False, True])
def test_silence_is_broken_by_comments_and_after_them_errors_are_events(serve: Serve, fails: bool) -> None:
    heard = threading.Event()

    class Silent(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            assert heard.wait(60)
            if fails:
                raise RuntimeError("no")
            yield {0: "at last"}

    server = serve(*streaming(Silent), stream_keep_alive=0.02)
    with server.client.stream("POST", "/infer/silent", json=1) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()
        got = next(parts)
        assert got.startswith(b": keep-alive\n\n")
        heard.set()
        for part in parts:
            got += part
            assert len(got) < 100_000
    (event,) = EventParser().feed(got)
    assert event.name == "error" if fails else json.loads(event.data) == "at last"


def test_answers_come_one_by_one_and_who_leaves_ends_his_part(serve: Serve, tmp_path: Path) -> None:
    ledger, heard = tmp_path / "ledger", RecordingObserver()
    server = serve(Service(Ticking, executor="process", params={"ledger": str(ledger)}, observers=[heard]))
    got: list[Event] = []
    with server.client.stream("POST", "/infer/ticking", json="go") as response:
        parser, chunks = EventParser(), response.iter_raw()
        while len(got) < 5:
            got += parser.feed(next(chunks))
    assert [int(event.data) for event in got[:5]] == [0, 1, 2, 3, 4]
    server.until(lambda: bool(heard.timings))
    assert ledger.read_text() == "closed"


def test_a_reader_who_does_not_read_is_ended_and_holds_back_nobody(serve: Serve) -> None:
    heard, received = RecordingObserver(), b""
    params = {"seconds": 0.001, "size": 100_000}
    server = serve(*streaming(Ticking, observers=[heard], params=params, stream_buffer=8))
    with server.connect() as connection:
        connection.sendall(b'POST /infer/ticking HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"go"')
        server.until(lambda: any(error is not None for _, error, _ in heard.responses))
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 16)
    assert b"event: error" in received and b'"Overloaded"' in received and b"stream_buffer" in received


class CountingLoop(SimulatedLoop):
    """An event loop in virtual time whose timers are early as those of uvloop are."""

    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()


# Not in whole milliseconds: a timer of uvloop's fires before.
@pytest.mark.parametrize("pause", [3.0, 3.0004])
@pytest.mark.parametrize("times", [(0.5, 100.0), (2.9, 3.1, 5.0, 100.0), (100.0,), (3.1, 6.0, 9.0)])
def test_a_comment_comes_when_silence_lasts_as_long_as_set_and_none_spins(
    times: tuple[float, ...], pause: float
) -> None:
    loop, sent = CountingLoop(coarse=True), list[tuple[float, bytes]]()

    async def parts() -> AsyncGenerator[bytes, None]:
        for time in times:
            await asyncio.sleep(time - loop.time())
            yield b"1"

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        if body := message.get("body"):
            sent.append((loop.time(), body))
            assert len(sent) < 100, "it never pauses"

    def refusal(error: BaseException) -> Any:
        raise AssertionError(error)

    source = EventSource(parts(), lambda _: b"", lambda: [])
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        call = AsgiCall({"headers": [], "http_version": "1.1"}, receive, send, HttpSettings())
        runner.run(EventStream(source, refusal, call, pause).run())
    gaps = [after - before for before, after in pairwise([0.0, *[moment for moment, _ in sent]])]
    assert max(gaps) == pytest.approx(pause, abs=0.001)
    comments = [gap for gap, (_, body) in zip(gaps, sent, strict=True) if body.startswith(b":")]
    assert comments == pytest.approx([pause] * len(comments), abs=0.001)
    assert [moment for moment, body in sent if body.startswith(b"data")] == pytest.approx(times)
    assert loop.turns < 15 * len(sent) + 50
