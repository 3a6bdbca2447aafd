"""Streaming models over HTTP: Server-Sent Events, through the server and through a plain ASGI server."""

import asyncio
import json
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.frontends.http.doors import Running, Serve
from tests.serving.kit import Watch
from tests.streaming_models import Count, Prefixes, Raising, Script, Ticking

from weir import Model, Service
from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.messages import Request
from weir.protocols.settings import HttpSettings
from weir.testing import RecordingObserver
from weir.wire.sse import Event, EventParser

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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


def test_every_answer_is_an_event(serve: Serve) -> None:
    server = serve(Service(Count, executor="thread"))
    for headers in ({}, {"accept": "text/event-stream"}, {"accept": "application/json;q=0.1, text/event-stream"}):
        response = server.client.post("/infer/count", content=b"3", headers={**headers, "x-request-id": "mine"})
        assert data(response) == [1, 2, 3]
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-request-id"] == "mine"
        assert "content-length" not in response.headers
    explained = server.client.post("/infer/count", content=b"3", headers={"x-explain": "1"})
    assert explained.headers["x-batch-size"] == "1"
    assert server.client.post("/inference", content=b"1").text == "data: 1\n\n"


def test_tensors_are_events_too(serve: Serve) -> None:
    server = serve(Service(Prefixes, executor="thread"))
    assert data(server.client.post("/infer/prefixes", json={"x": [[1, 2], [3, 4]]})) == [
        {"sum": [[1, 2]], "rows": [1]}, {"sum": [[4, 6]], "rows": [2]},
    ]  # fmt: skip


def test_one_answer_is_refused_where_there_are_several(serve: Serve) -> None:
    server = serve(Service(Count, executor="thread"))
    for path, accept in (("/infer/count", "application/json"), ("/infer/count/batch", "text/event-stream")):
        response = server.client.post(path, content=b"3", headers={"accept": accept})
        assert response.status_code == 501
        assert response.json()["error"]["type"] == "Unsupported"


def test_an_error_before_the_first_answer_has_its_own_status(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"), Service(Raising, executor="thread"))
    response = server.client.post("/infer/script", json=[{"error": "not you"}])
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "not you"
    assert server.client.post("/infer/raising", json="now").status_code == 500
    assert server.client.post("/infer/script", content=b"{").status_code == 400
    assert server.client.post("/infer/script", content=b"").status_code == 400
    late = {"x-request-timeout": "0.000001"}
    assert server.client.post("/infer/script", json=[], headers=late).status_code == 408


def test_a_later_error_is_an_event(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"))
    first, last = data(server.client.post("/infer/script", json=["a", {"error": "enough"}]))
    assert first == "a"
    assert last.name == "error"
    error = json.loads(last.data)["error"]
    assert (error["type"], error["message"], error["model"]) == ("InvalidRequest", "enough", "script")


def test_a_stream_without_an_answer_is_empty(serve: Serve) -> None:
    server = serve(Service(Script, executor="thread"))
    assert data(server.client.post("/infer/script", json=[None, None])) == []


def test_silence_is_broken_by_comments(serve: Serve) -> None:
    heard = threading.Event()

    class Silent(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            assert heard.wait(30)
            yield {0: "at last"}

    server = serve(Service(Silent, executor="thread"), stream_keep_alive=0.02)
    said = after_a_comment(server, "/infer/silent", heard)
    assert [json.loads(event.data) for event in said] == ["at last"]


def test_after_a_comment_even_the_first_error_is_an_event(serve: Serve) -> None:
    heard = threading.Event()

    class Grumbling(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            assert heard.wait(30)
            if batch:
                raise RuntimeError("no")
            yield {}

    server = serve(Service(Grumbling, executor="thread"), stream_keep_alive=0.02)
    (error,) = after_a_comment(server, "/infer/grumbling", heard)
    assert error.name == "error"


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


def test_who_leaves_without_a_word_ends_his_part_too(serve: Serve) -> None:
    heard = RecordingObserver()
    server = serve(Service(Ticking, executor="thread", observers=[heard]))
    with server.connect() as connection:
        connection.sendall(b'POST /infer/ticking HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"go"')
        assert connection.recv(1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
    server.until(lambda: bool(heard.timings))


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


def test_bytes_are_counted(serve: Serve) -> None:
    heard = RecordingObserver()
    server = serve(Service(Count, executor="thread", observers=[heard]))
    response = server.client.post("/infer/count", content=b"2")
    server.until(lambda: bool(heard.transfers))
    assert heard.transfers == [("count", "http", 1, len(response.content))]
    doors: set[str] = {request.door for requests, _, _ in heard.answers for request in _all(requests)}
    assert doors == {"http"}


def _all(requests: list[Request]) -> list[Request]:
    return requests


def test_a_compressed_body_is_read(serve: Serve) -> None:
    import gzip

    server = serve(Service(Count, executor="thread"))
    response = server.client.post("/infer/count", content=gzip.compress(b"2"), headers={"content-encoding": "gzip"})
    assert data(response) == [1, 2]


def test_a_reader_who_never_reads_again_loses_the_connection() -> None:
    async def main() -> None:
        clock = [0.0]
        heard = Watch()
        params = {"seconds": 0.0, "size": 100_000}
        registry = Registry([Service(Ticking, executor="thread", params=params, observers=[heard])])
        settings = HttpSettings(port=0, body_timeout=5.0)
        server = HttpServer(registry, make_app(registry, settings), settings, clock=lambda: clock[0])
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

    asyncio.run(main())
