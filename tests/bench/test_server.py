"""Real sockets: a server that is well, and servers that are not."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from tests.bench.stubs import GOOD, Behaviour, Stub, good, stub
from tests.rings import subcases
from tests.served import buffered_bytes

from weir.bench import HttpOptions, LoadSettings, ServerTarget, run_bench, server
from weir.bench.run import Clock, Outcome, Round, make_load, make_outcome, run_round
from weir.bench.server import DeclaredInput, TargetEndpoint, declared_inputs, endpoint_of, made_request, outcome_of
from weir.client.http import HttpCalls
from weir.client.http_connection import HttpReply, NotConnected
from weir.errors import DeadlineExceeded, Overloaded, SettingsError
from weir.wire.websocket import ErrorMessage

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")

TLS = Path(__file__).parents[1] / "frontends" / "http" / "tls"


async def put_load(
    url: str, settings: LoadSettings, options: HttpOptions | None = None, clock: Clock = time.monotonic
) -> tuple[Outcome, Round]:
    load = make_load(settings, 1)
    target = ServerTarget(url, "3", options)
    try:
        await target.open()
        made = await run_round(target, load, 0, clock=clock)
    finally:
        await target.close()
    return make_outcome("it", load, [made], target.connections, target.held), made


def steady(rate: float = 400.0, duration: float = 0.25) -> LoadSettings:
    return LoadSettings("constant", rate=rate, duration=duration, warm_up=0.0)


def measure(
    behave: Behaviour,
    settings: LoadSettings | None = None,
    options: HttpOptions | None = None,
    clock: Clock = time.monotonic,
) -> tuple[Outcome, Stub]:
    async def run() -> tuple[Outcome, Stub]:
        async with stub(behave) as (server, url):
            return (await put_load(url, settings or steady(), options, clock))[0], server

    return uvloop.run(run())


def on(number: int, do: Callable[[asyncio.StreamWriter], Awaitable[bool]]) -> Behaviour:
    """Answer the first request, which only looks, and every other but the one of that number, which gets `do`."""

    async def behave(asked: int, writer: asyncio.StreamWriter) -> bool:
        return await do(writer) if asked == number else await good(asked, writer)

    return behave


def test_every_request_is_sent_and_answered() -> None:
    outcome, server = measure(good)
    assert outcome.requests == outcome.answered == 99 and server.asked == 100
    assert not outcome.errors and not outcome.timeouts and not outcome.unfinished and outcome.held == 0
    assert server.bodies[5] == b"3" and b"\r\nhost: 127.0.0.1:" in server.heads[5]
    assert b"\r\ncontent-type: application/json" in server.heads[5]
    assert outcome.batches is None  # it is no Weir


def test_a_server_that_stalls_shows_in_the_percentiles() -> None:
    """Half a second of standing still is waited for by all who were to ask in it, not by one who asks and waits."""
    stalled = asyncio.Event()
    instants: list[float] = []

    async def behave(number: int, writer: asyncio.StreamWriter) -> bool:
        if number == 50:
            instants.append(time.monotonic())
            await asyncio.sleep(0.5)
            instants.append(time.monotonic())
            stalled.set()
        elif number > 50:
            await stalled.wait()
        return await good(number, writer)

    async def run() -> tuple[Outcome, Round]:
        async with stub(behave) as (_, url):
            return await put_load(url, steady(200.0, 1.5))

    outcome, made = uvloop.run(run())
    assert outcome.answered == outcome.requests == 299
    begin, end = instants
    intended, ended = np.array(made.ledger.intended), np.array(made.ledger.ended)
    during = (intended > begin) & (intended < end)
    assert np.all(ended[during] >= end)
    # At 200 requests/s at least 20 were to leave in the first tenth of a second, and waited for four tenths or more.
    assert outcome.p95_ms.value >= 350.0 and outcome.p99_ms.value >= 400.0 and outcome.max_ms >= 450.0


@pytest.mark.parametrize(
    ("name", "error"), [("close", "closed"), ("half", "closed"), ("reset", "reset"), ("garbage", "garbage")]
)
def test_a_connection_that_breaks_costs_its_own_request_only(name: str, error: str) -> None:
    async def misbehave(writer: asyncio.StreamWriter) -> bool:
        if name == "half":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n9")
        elif name == "garbage":
            writer.write(b"\x00\x01 no answer\r\n\r\n")
        elif name == "reset":
            transport = writer.transport
            linger = bytes([1, 0, 0, 0, 0, 0, 0, 0])  # on, 0 s: close with RST
            transport.get_extra_info("socket").setsockopt(1, 13, linger)
            transport.abort()
        return name == "garbage"

    outcome, _ = measure(on(20, misbehave))
    errors = {error if name == "garbage" else f"connection {error}": 1}
    assert outcome.errors == errors and outcome.answered == outcome.requests - 1


def test_what_waits_for_a_connection_within_the_bound_is_our_own_lag() -> None:
    release = asyncio.Event()

    async def behave(number: int, writer: asyncio.StreamWriter) -> bool:
        if number == 50:
            release.set()
        if 0 < number <= 3:
            await release.wait()
        elif number:
            await asyncio.sleep(0.01)
        return await good(number, writer)

    outcome, _ = measure(behave, options=HttpOptions(max_connections=4))
    assert outcome.connections == 4 and outcome.held > 0
    assert outcome.answered == outcome.requests
    assert outcome.lag.max_ms > 10.0


def test_https_requires_a_trusted_certificate_by_default() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")

    async def run(insecure: bool) -> Outcome:
        async with stub(ssl=tls) as (_, url):
            return (await put_load(url, steady(), HttpOptions(insecure=insecure)))[0]

    assert uvloop.run(run(True)).answered == 99
    with pytest.raises(SettingsError, match="certificate"):
        uvloop.run(run(False))


def test_what_answers_nothing_is_reported_in_one_line() -> None:
    async def sleep(number: int, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(30.0)
        return False

    async def hang_up(number: int, writer: asyncio.StreamWriter) -> bool:
        return False

    async def refuse(number: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\nwhy")
        return True

    for behave, timeout, wrong in (
        (sleep, 0.2, "no response within 0.2 s"), (hang_up, 60.0, "connection closed"), (refuse, 60.0, "400: why"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=wrong) as caught:
            measure(behave, options=HttpOptions(timeout=timeout))
        assert "\n" not in str(caught.value)


def test_an_answer_before_the_end_of_a_large_request_ends_its_connection() -> None:
    """The rest of the request is still to be sent: nothing may follow it."""
    large = '"' + "x" * buffered_bytes() + '"'

    class Hasty(Stub):
        async def answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            assert head.startswith(b"POST")
            self.asked += 1
            if self.asked == 1:
                await reader.readexactly(len(large))
            writer.write(GOOD)
            if self.asked > 1:
                await asyncio.sleep(30.0)  # and reads nothing
            return True

    async def run() -> tuple[Outcome, int]:
        async with stub(server=Hasty()) as (server, url):
            load = make_load(steady(20.0, 0.3), 1)
            target = ServerTarget(url, large)
            await target.open()
            made = await run_round(target, load, 0)
            await target.close()
            return make_outcome("it", load, [made], target.connections, 0), server.asked

    outcome, asked = uvloop.run(run())
    assert outcome.answered == outcome.requests == asked - 1 == 5 and not outcome.errors


def test_more_connections_than_files_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"max_connections=\d+: must be at most \d+, as this process may open"):
        uvloop.run(put_load("http://127.0.0.1:1/", steady(), HttpOptions(max_connections=10**9)))


def test_where_there_is_no_server_that_is_reported() -> None:
    for url, wrong in (
        ("http://127.0.0.1:1/x", "no server there: Connection refused"),
        ("http://unix:/nowhere.sock:/x", "no server there: No such file"),
        ("http://nowhere.invalid/x", "nowhere.invalid: "),
    ):
        with pytest.raises(SettingsError, match=wrong):
            uvloop.run(put_load(url, steady()))


def test_without_data_the_server_must_describe_an_example() -> None:
    async def run() -> None:
        async with stub() as (_, url):
            await ServerTarget(url).open()

    with pytest.raises(SettingsError, match="the server describes no example to send; give something with --data"):
        uvloop.run(run())


@subcases(
    ("status", "body", "outcome"),
    [
        (200, b"9", "ok"), (204, b"", "ok"), (429, b'{"error":{"type":"Overloaded","message":"full"}}', "429 Overloaded"),
        (500, b"<html>", "500"), (500, b'{"error":"text"}', "500"), (500, b'{"error":{"type":5}}', "500"), (500, b"[1]", "500"),
        (301, b"", "301"),
    ],
)  # fmt: skip
def test_errors_have_a_code_and_a_type(status: int, body: bytes, outcome: str) -> None:
    assert outcome_of(HttpReply(status, {}, body)) == outcome
    assert outcome_of(ErrorMessage("full", type="Overloaded", status=429)) == "Overloaded"


class FakeSender(server.HttpSender):
    """A sender whose requests end as the test says: with None, they do not end by themselves."""

    def __init__(self, end: object, *, sent: bool = True) -> None:
        super().__init__(endpoint_of("http://a/x"), HttpOptions())
        self._end = end
        self._sent = sent

    async def connect(self) -> None:
        pass

    async def send(self, step: Any, within: float, index: int = 0) -> HttpReply:
        return HttpReply(200, {}, b"")

    def start(self, step: bytes, index: int, sent: Callable[[], object]) -> "asyncio.Future[HttpReply]":
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._sent:
            sent()
        if isinstance(self._end, Exception):
            reply.set_exception(self._end)
        elif self._end is not None:
            reply.set_result(self._end)
        return reply


@pytest.mark.parametrize(
    ("sender", "field", "value"),
    [
        (FakeSender(HttpReply(200, {}, b"9")), "answered", 9),
        (FakeSender(None), "timeouts", 9),
        (FakeSender(None, sent=False), "unfinished", 9),
        (FakeSender(DeadlineExceeded("late")), "timeouts", 9),
        (FakeSender(Overloaded("full")), "errors", {"Overloaded": 9}),
        (FakeSender(OSError("connection reset")), "errors", {"connection reset": 9}),
        (FakeSender(NotConnected("Connection refused")), "errors", {"connect: Connection refused": 9}),
        (FakeSender(ZeroDivisionError()), "errors", {"ZeroDivisionError": 9}),
    ],
)
async def test_every_request_ends_and_counts_once(
    sender: FakeSender, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that does not end by itself is given up."""
    monkeypatch.setitem(server._PROTOCOLS, "http", lambda endpoint, options: (HttpCalls(), sender))
    target = ServerTarget("http://a/x", "3", HttpOptions(timeout=0.2))
    load = LoadSettings("constant", rate=100, duration=0.1, warm_up=0.0, max_lag_ms=1e9)
    outcome = (await run_bench([target], load)).outcome
    assert getattr(outcome, field) == value
    assert outcome.answered + outcome.timeouts + outcome.unfinished + sum(outcome.errors.values()) == 9


# What a URL means.


@subcases(
    ("url", "endpoint"),
    [
        ("http://localhost:8000/infer/square", TargetEndpoint("http", "http://localhost:8000", "/infer/square")),
        ("https://a.example?y=1", TargetEndpoint("http", "https://a.example", "/?y=1")),
        ("http://[::1]:80", TargetEndpoint("http", "http://[::1]:80", "/")),
        ("http://unix:/run/weir.sock:/infer/square", TargetEndpoint("http", "unix:/run/weir.sock", "/infer/square")),
        ("http://host/v2/models/a%20b/infer", TargetEndpoint("kserve", "http://host", "/v2/models/a%20b/infer", "a b")),
        (
            "http://host/v2/models/sums/versions/2/infer#binary",
            TargetEndpoint("kserve", "http://host", "/v2/models/sums/versions/2/infer", "sums", "2", binary=True),
        ),
        (
            "http://unix:weir.sock:/v2/models/sums/infer",
            TargetEndpoint("kserve", "unix:weir.sock", "/v2/models/sums/infer", "sums"),
        ),
        ("grpc://localhost:8001/sums", TargetEndpoint("grpc", "localhost:8001", "", "sums")),
        ("grpcs://[::1]:8001/sums/3", TargetEndpoint("grpc", "[::1]:8001", "", "sums", "3", tls=True)),
        ("ws://localhost:8000/sums", TargetEndpoint("ws", "http://localhost:8000", "", "sums")),
        (
            "wss://localhost:8000/sums/1#binary",
            TargetEndpoint("ws", "https://localhost:8000", "", "sums", "1", tls=True, binary=True),
        ),
    ],
)
def test_a_url_names_an_endpoint(url: str, endpoint: TargetEndpoint) -> None:
    assert endpoint_of(url) == endpoint


@subcases(
    ("url", "message"),
    [
        ("grpc://localhost/sums", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:8001", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:99999/sums", "Port out of range"),
        ("ws://localhost:8000/a/b/c", "must be like"),
        ("ws://localhost:8000/sums#raw", "only #binary may follow"),
        ("http://localhost:8000/infer/square#binary", "only #binary may follow, and only where"),
        ("grpc://localhost:8001/sums#binary", "only #binary may follow"),
        *(
            (url, "must be")
            for url in ("localhost:8000/x", "ftp://a/x", "http:///x", "http://a:port/", "http://unix:/x")
        ),
        *((url, "must be percent-encoded") for url in ("http://a/ä", "http://a/x y")),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        endpoint_of(url)
    assert "\n" not in str(caught.value)


# The inference requests that are sent.


ENDPOINT = TargetEndpoint("kserve", "http://host", "/v2/models/sums/versions/2/infer", "sums", "2")


def test_a_request_is_made_of_ones() -> None:
    request = made_request(
        ENDPOINT, [DeclaredInput("x", "FP32", (-1, -1, 3)), DeclaredInput("n", "INT64", (-1,))], rows=2
    )
    assert (request.model, request.version) == ("sums", "2")
    first, second = request.inputs
    assert (first.array.shape, first.array.dtype, second.array.shape) == ((2, 1, 3), np.float32, (2,))
    assert first.array.all() and second.array.all()


def test_nobody_knows_what_bytes_are() -> None:
    with pytest.raises(
        SettingsError, match="model 'sums': its metadata do not say what 'input' is; give it with --data"
    ):
        made_request(ENDPOINT, [DeclaredInput("input", "BYTES", (-1,))], rows=1)


@subcases("metadata", [None, {}, {"inputs": []}, {"inputs": [{"name": "x"}]}, {"inputs": 3}])
def test_metadata_without_inputs_are_of_no_use(metadata: object) -> None:
    with pytest.raises(SettingsError, match="model 'sums': the server has no metadata about its inputs"):
        declared_inputs("sums", metadata)
