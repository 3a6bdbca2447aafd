"""The WebSocket frontend: a real server, and the client of the websockets library."""

import asyncio
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import numpy
import pytest
from starlette.websockets import WebSocket
from tests.fakes import RecordingObserver
from tests.frontends.dashboard.browser.site import hosted
from tests.frontends.websocket_kit import Sum, answer, answers, failure, item, next_answer, rows, serving
from tests.rings import subcases
from tests.streaming_models import Count, Prefixes, Ticking
from tests.waiting import turns, until
from tests.workers.models import Echo
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import weir
from weir import Service
from weir.catalog.registry import Registry
from weir.frontends.websocket import WebSockets
from weir.protocols import HttpSettings
from weir.protocols.access import allowed
from weir.protocols.account import Account
from weir.testing import FakeExecutor
from weir.wire.inference import InferenceResponse, RequestedOutput
from weir.wire.websocket import read_response, write_cancel

pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def test_json_and_binary_on_both_paths_and_nothing_is_compressed() -> None:
    async with serving(Sum) as server:
        for path in ("/v2/ws", "/models/infer"):
            async with server.connect(path, compression="deflate") as client:
                assert not client.protocol.extensions
                for binary in (False, True):
                    wanted = [RequestedOutput("sum", {"binary_data": binary})]
                    await client.send(rows([[1] * 3] * 2, id=f"{binary}", outputs=wanted, binary=binary))
                    message = await client.recv()
                    assert isinstance(message, bytes) is binary
                    got = read_response(message)
                    assert isinstance(got, InferenceResponse)
                    assert (got.model, got.id, got.outputs[0].array.tolist()) == ("sum", f"{binary}", [3.0, 3.0])
                    assert got.parameters == {"triton_final_response": True}


async def test_many_are_under_way_and_answered_by_id_in_one_batch() -> None:
    async with serving(Count) as server, server.connect() as client, server.connect() as other:
        for number in (3, 1, 2):
            await client.send(item("count", number, str(number)))
        await other.send(item("count", 2, "other"))
        got: dict[str, list[Any]] = {}
        ended = 0
        while ended < 3:
            name, value, last = await answer(client)
            got.setdefault(name, []).append(value)
            ended += last
        assert {name: [value for value in values if value] for name, values in got.items()} == {
            "1": [1], "2": [1, 2], "3": [1, 2, 3],
        }  # fmt: skip
        assert await answers(other) == [1, 2]
        assert sum(dispatch.rows for dispatch in server.observer.dispatches) == 4
        frontends = {request.form.frontend for requests, _, _ in server.observer.responses for request in requests}
        assert frontends == {"websocket"}


class Faulty(Service):
    """Cannot take a request."""

    def submit(self, request: Any, now: float | None = None) -> None:
        raise RuntimeError("no way")


async def test_errors_are_messages_end_no_connection_and_hold_nothing(caplog: pytest.LogCaptureFixture) -> None:
    faulty = Faulty(Echo, name="faulty", executor="inline")
    async with serving(Sum, Count, faulty) as server, server.connect() as client:
        for message, name, kind, status, text in (
            ("{", "", "InvalidRequest", 400, "must be a message as JSON"),
            ('{"id": "7"}', "7", "InvalidRequest", 400, "has neither 'model_name' nor 'cancel'"),
            (item("nobody", 1, "8"), "8", "ModelNotFound", 404, "Request for unknown model: 'nobody' is not found"),
            (item("x" * 100_000, 1, "8"), "8", "ModelNotFound", 404, " characters)"),
            (item("sum", 1, "9"), "9", "InvalidRequest", 400, "tensor 'input'"),
            (b"\0\0\0\x02{}", "", "InvalidRequest", 400, "has neither 'model_name' nor 'cancel'"),
            (item("count", 1, "a", parameters={"timeout": 1}), "a", "DeadlineExceeded", 504, "timeout"),
            (rows([[-1]], id="b"), "b", "InvalidRequest", 400, "numbers must not be negative"),
            (item("faulty", 1, "1"), "1", "InternalError", 500, "internal error"),
            (item("faulty", 1, "1"), "1", "InternalError", 500, "internal error"),
        ):
            await client.send(message)
            got = await failure(client)
            assert (got.id, got.type, got.status) == (name, kind, status)
            assert text in got.error and len(got.error) < 5000
            await until(lambda: not server.server.account.held_bytes)
        await client.send(item("count", 2, "1"))
        assert await answers(client) == [1, 2]
    assert "no way" in caplog.text


async def test_an_id_is_of_one_request_at_a_time_and_can_be_cancelled() -> None:
    async with serving(Ticking) as server, server.connect() as client:

        async def next_failure() -> tuple[str, str, int]:
            while isinstance(got := await next_answer(client), InferenceResponse):
                pass
            return got.id, got.type, got.status

        await client.send(item("ticking", "go", "1"))
        assert await answer(client) == ("1", 0, False)
        await client.send(item("ticking", "go", "1"))
        assert await next_failure() == ("1", "Conflict", 400)
        for name in ("1", "1", "unknown"):
            await client.send(write_cancel(name))
        assert await next_failure() == ("1", "Cancelled", 499)
        await client.send(item("ticking", "again", "1"))
        assert await answer(client) == ("1", 0, False)


async def test_a_client_that_leaves_ends_its_requests() -> None:
    async with serving(Ticking) as server:
        client = await server.connect()
        await client.send(item("ticking", "go"))
        await client.recv()
        client.transport.abort()
        async with asyncio.timeout(60):
            await server.websockets.closed()
        await server.registry.get("ticking").stop()  # which waits until the model has been told
        assert server.observer.timings


async def test_nothing_is_read_while_too_much_is_under_way() -> None:
    executor = FakeExecutor()
    service = Service(Sum, executor=executor, max_batch_size=1)
    async with serving(service, websocket_in_flight=2) as server, server.connect() as client:
        for number in range(10):
            await client.send(rows([[1]], id=str(number)))
        for taken in (2, 3):
            await turns(2000)
            assert int(service.state()["waiting"]) + len(executor.batches) == taken
            executor.respond_next(lambda payloads: [{"sum": numpy.ones(1, "float32")}])
            assert (await next_answer(client)).id == str(taken - 2)


async def test_a_reader_who_does_not_read_is_ended_and_holds_back_nobody(tmp_path: Path) -> None:
    """The model waits for the quick one, which would be as slow as the other on a busy machine."""
    pace, heard = tmp_path / "pace", RecordingObserver()
    pace.touch()
    params = {"seconds": 0.001, "size": 100_000, "pace": str(pace)}
    service = Service(
        Ticking, executor="thread", observers=[heard], params=params, stream_buffer=8, policy="full:2", max_queue_delay=60.0
    )  # fmt: skip
    async with (
        serving(service) as server,
        server.connect(max_queue=1, compression=None) as slow,
        server.connect() as quick,
    ):
        await slow.send(item("ticking", "slow", "slow"))
        await quick.send(item("ticking", "quick", "quick"))
        for number in count(1):
            if heard.responses:
                break
            assert isinstance(await next_answer(quick), InferenceResponse)
            pace.write_bytes(bytes(number))
        while isinstance(got := await next_answer(slow), InferenceResponse):
            assert got.id == "slow"
        assert (got.id, got.type, got.status, got.retry_after) == ("slow", "Overloaded", 429, 0.0)


async def test_every_frontend_feeds_the_same_batch() -> None:
    heard = RecordingObserver()
    service = Service(Prefixes, observers=[heard], policy="full:6", max_queue_delay=20.0)
    values = [[1.0, 2.0], [3.0, 4.0]]

    async def in_process() -> list[Any]:
        return [part["rows"].tolist() async for part in service.infer_stream({"x": values})]

    async def by_events(port: int) -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.post(f"http://127.0.0.1:{port}/infer/prefixes", json={"x": values})).text

    async with serving(service) as server, server.connect() as client:
        await client.send(rows(values, "prefixes"))
        found, events = await asyncio.gather(in_process(), by_events(server.server.port))
        parts: list[Any] = [await next_answer(client) for _ in range(3)]
    assert found == [[1], [2]]
    assert events.count("data: ") == 2
    assert [len(part.outputs) for part in parts] == [2, 2, 0]
    assert [dispatch.rows for dispatch in heard.dispatches] == [6]
    frontends = [request.form.frontend for requests, _, _ in heard.responses for request in requests]
    assert sorted(frontends) == ["http", "python", "websocket"]


async def test_a_client_who_never_reads_again_is_left_and_holds_nothing() -> None:
    """Neither of responses nor of the message that waits for room."""
    ticking = Service(Ticking, executor="thread", params={"seconds": 0.0, "size": 100_000})
    streamed = [item("ticking", "go"), item("echo", 1, "late")]
    async with serving(ticking, Echo, body_timeout=0.2, websocket_in_flight=1) as server:
        for messages in (streamed, [item("echo", "x" * 100_000, str(number)) for number in range(100)]):
            client = await server.connect(max_queue=1, compression=None)
            with suppress(ConnectionClosed):  # before all of them
                for message in messages:
                    await client.send(message)
            async with asyncio.timeout(60):
                await server.websockets.closed()
            client.transport.abort()
            await until(lambda: server.server.account.held_bytes == 0)


async def test_a_drain_answers_what_is_under_way_and_says_good_bye() -> None:
    async with serving(Count, Sum) as server, server.connect() as client, server.connect() as idle:
        await client.send(item("count", 400, "long"))
        assert await answer(client) == ("long", 1, False)
        server.server.refuse()
        assert await server.server.drain(20)
        assert await answers(client) == list(range(2, 401))
        for closed in (client, idle):
            await check_closed(closed, 1001)
    assert server.websockets.open == 0


async def check_closed(client: Any, code: int) -> None:
    with pytest.raises(ConnectionClosed) as raised:
        await client.recv()
    assert raised.value.rcvd is not None and raised.value.rcvd.code == code


async def test_a_message_over_the_limit_closes_the_connection() -> None:
    async with serving(Sum, max_body_size=1000) as server, server.connect() as client:
        await client.send("x" * 1001)
        await check_closed(client, 1009)


@subcases(
    ("origins", "cors", "fine"),
    [
        ([], [], True), (["http://here:8000"], [], True), (["https://HERE:8000"], [], True), (["http://there"], [], False),
        (["http://there"], ["http://there"], True), (["http://there"], ["*"], True), (["null"], [], False),
        (["http://there", "http://here:8000"], [], False),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused_unless_cors_lets_them(
    origins: list[str], cors: list[str], fine: bool
) -> None:
    assert allowed(origins, "here:8000", cors) is fine


async def test_any_asgi_server_can_host_them() -> None:
    with hosted(weir.asgi(Service(Count, executor="thread")), ws="wsproto") as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws{url[4:]}/infer/count")
        assert (
            refused.value.response.status_code,
            b"available: /v2/ws, /models/infer" in refused.value.response.body,
        ) == (404, True)
        async with connect(f"ws{url[4:]}/v2/ws") as client:
            await client.send(item("count", 2))
            assert await answers(client) == [1, 2]


async def test_a_connection_holds_no_more_than_its_share_of_the_account() -> None:
    executor = FakeExecutor()
    service = Service(Echo, name="slow", executor=executor, max_batch_size=1)
    async with serving(service, max_waiting_bytes=4_000_000) as server, server.connect() as client:
        account = server.server.account

        async def send() -> None:
            for number in range(20):
                await client.send(item("slow", "x" * 300_000, str(number)))

        sending = asyncio.ensure_future(send())
        for _ in range(20):
            await until(lambda: bool(executor.pending))
            assert account.held_bytes < 2_500_000
            executor.respond_next(lambda batch: [b"1"] * len(batch))
            assert await answer(client)
        await sending
        await until(lambda: account.held_bytes == 0)


async def test_a_response_without_memory_is_the_error_of_its_request() -> None:
    executor, observer = FakeExecutor(), RecordingObserver()
    service = Service(Echo, name="echo", executor=executor, observers=[observer])
    async with serving(service, max_waiting_bytes=1_000_000) as server, server.connect() as client:
        await client.send(item("echo", "x", "a"))
        await until(lambda: bool(executor.pending))
        server.server.account.take(950_000)
        executor.respond_next(lambda batch: [b"x" * 80_000])
        refused = await failure(client)
        assert (refused.id, refused.type, refused.status) == ("a", "Overloaded", 429)
        assert observer.kinds == {"Overloaded": 1}


@pytest.mark.parametrize("error", [RuntimeError("unexpected message, or already closed"), OSError("gone")])
@pytest.mark.parametrize("refused", ["websocket.accept", "websocket.close"])
async def test_a_client_that_is_gone_is_no_error(refused: str, error: Exception) -> None:
    """Before it is accepted, or as the server closes the connection: as uvicorn says of what is no WebSocket, or of nobody."""
    sent: list[Any] = []
    received = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "x" * 2000}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == refused:
            raise error

    websockets = WebSockets(Registry([]), HttpSettings(max_body_size=1024))
    await websockets.serve(WebSocket({"type": "websocket", "headers": [], "path": "/v2/ws"}, receive, send))
    assert sent[-1] == refused and websockets.open == 0


async def test_errors_for_a_client_that_has_left_are_charged_no_more() -> None:
    """Nothing can be written to it, but the server has not been told yet that it has left."""
    account, held = Account(HttpSettings()), list[int]()
    kinds = iter(("connect", "receive", "receive", "disconnect"))

    async def receive() -> Any:
        await turns(5)  # what was posted before is written
        held.append(account.held_bytes)
        return {"type": f"websocket.{next(kinds)}", "text": "no request"}

    send = AsyncMock(side_effect=chain([None], repeat(OSError("gone"))))  # it is accepted, and gone
    await WebSockets(Registry([]), HttpSettings(), account).serve(
        WebSocket({"type": "websocket", "headers": []}, receive, send)
    )
    assert [*held, account.held_bytes] == [0] * 5
