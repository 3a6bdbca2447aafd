"""The address, the certificate, the limits and the end of the gRPC frontend."""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy
import pytest
from tests.frontends.grpc.kit import (
    ACK,
    CONTINUATION,
    ENDS,
    GOAWAY,
    HEADERS,
    INFER,
    PING,
    PREFACE,
    RST_STREAM,
    Double,
    Rig,
    http2_frame,
    make_request,
    refused,
    run,
    serving,
)
from tests.frontends.http.sockets import until
from tests.served import MODELS, Served
from tests.served import until as wait_until
from tests.text_models import tiny

from weir.catalog.registry import Registry
from weir.errors import Cancelled, SettingsError
from weir.frontends.grpc import GrpcSettings, make_frontend
from weir.frontends.grpc.call import cygrpc
from weir.frontends.grpc.core import Core
from weir.frontends.grpc.server import GrpcServer, channel_options
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import methods, write_request

TLS = Path(__file__).parents[1] / "http" / "tls"
FILES = {"tls_certfile": str(TLS / "certificate.pem"), "tls_keyfile": str(TLS / "key.pem")}


def made(http: dict[str, Any] | None = None, **settings: Any) -> GrpcServer:
    http_settings = HttpSettings(**(http or {}))
    return GrpcServer(KserveContext(Registry([]), http_settings), GrpcSettings(**settings), http_settings, Core)


def test_without_a_port_there_is_no_frontend() -> None:
    http = HttpSettings()
    assert make_frontend(KserveContext(Registry([]), http), GrpcSettings(), http) is None
    assert isinstance(make_frontend(KserveContext(Registry([]), http), GrpcSettings(grpc_port=0), http), GrpcServer)


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf"])
def test_without_its_library_the_setting_is_refused(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from weir.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "examples.square:Square", "--grpc-port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 2
    assert run.stderr.startswith("weir: grpc_port=0: needs grpcio and protobuf, which are not installed")
    assert "pip install 'weir-serving[grpc]'" in run.stderr


def test_a_server_without_grpc_loads_none_of_it() -> None:
    code = "import sys, weir.app; sys.exit(any(name in sys.modules for name in ('grpc', 'google.protobuf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("command", ["serve", "embed serve"])
def test_what_a_stranger_sends_is_not_logged(command: str, fronts: int, tmp_path: Path) -> None:
    """gRPC's core would write the text of a GOAWAY frame to stderr as it is, and log a traceback for metadata that are no UTF-8."""
    forged = b"no error\r\x1b[2J\n2026-01-01 00:00:00 ERROR forged"
    fields = {
        b":method": b"POST", b":scheme": b"http", b":authority": b"here", b":path": b"/unknown", b"te": b"trailers",
        b"content-type": b"application/grpc", b"text": b"forged\x88",
    }  # fmt: skip
    head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields.items())
    frames = [
        http2_frame(HEADERS, head, stream=1, flags=ENDS),
        http2_frame(GOAWAY, bytes(7) + b"\2" + forged),
        http2_frame(PING, bytes(8)),
    ]
    model = f"{MODELS}:Square" if command == "serve" else tiny.model(tmp_path)
    with Served(model, "--grpc-port", "0", "--fronts", fronts, command=command) as served:
        host, _, port = served.until_grpc().grpc.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=200) as stranger:
            stranger.sendall(PREFACE + b"".join(frames))
            received = b""
            while b"grpc-status" not in received or http2_frame(PING, bytes(8), flags=ACK) not in received:
                more = stranger.recv(1 << 16)
                assert more
                received += more
        served.process.send_signal(signal.SIGTERM)
        served.until_logged("stopped")  # the last line
        assert "forged" not in served.log


def test_a_port_that_is_taken() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(SettingsError, match=rf"host='127.0.0.1', grpc_port={rig.server.port}: cannot listen there"):
            await made(grpc_port=rig.server.port).start()

    run(test)


async def test_an_address_of_its_own() -> None:
    server = made({"host": "192.0.2.1"}, grpc_port=0, grpc_host="::1")
    assert server.address == "grpc://[::1]:0"
    await server.stop()  # harmless before the start
    assert await server.drain()


def test_tls_with_the_certificate_of_http() -> None:
    async def test(rig: Rig) -> None:
        assert rig.server.address.startswith("grpcs://127.0.0.1:")
        assert (await rig.infer(make_request(1, 2))).outputs[0].array.tolist() == [[2, 4]]
        plain: Any = grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.port}")
        async with plain:
            code, _ = await refused(plain.unary_unary(INFER)(write_request(make_request())))
            assert code is grpc.StatusCode.UNAVAILABLE

    root = (TLS / "certificate.pem").read_bytes()
    run(test, http=FILES, credentials=grpc.ssl_channel_credentials(root))


async def test_a_certificate_that_cannot_be_used() -> None:
    with pytest.raises(SettingsError, match=r"tls_certfile='/nowhere\.pem'"):
        await made({"tls_certfile": "/nowhere.pem"}, grpc_port=0).start()


def test_the_options_that_grpc_gets() -> None:
    options = dict(
        channel_options(
            GrpcSettings(grpc_max_message_size=7, grpc_keepalive=2.5, grpc_keepalive_timeout=1.0),
            HttpSettings(idle_timeout=4.0, header_timeout=3.0, max_header_size=5000),
            9,
        )
    )
    assert options["grpc.max_allowed_incoming_connections"] == 9
    assert options["grpc.max_receive_message_length"] == 7
    assert (options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]) == (2500, 1000)
    assert options["grpc.so_reuseport"] == 0
    assert (options["grpc.max_connection_idle_ms"], options["grpc.server_handshake_timeout_ms"]) == (4000, 3000)
    assert options["grpc.absolute_max_metadata_size"] == 5000


def test_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def test(rig: Rig) -> None:
        fake: Any = rig.registry.get("double").executor
        accepted = rig.raw(INFER, write_request(make_request()))
        await until(lambda: bool(fake.pending))
        rig.server.refuse()
        code, text = await refused(rig.infer(make_request()))
        assert code is grpc.StatusCode.UNAVAILABLE and "is shutting down" in text
        draining = asyncio.ensure_future(rig.drain())
        await asyncio.sleep(0)
        fake.answer_next(lambda payloads: [{"y": payloads[0]["x"]}])
        assert await accepted
        assert await draining

    run(test, executor=FakeExecutor())


async def test_drain_does_not_wait_for_ever() -> None:
    executor = FakeExecutor()
    async with serving(Service(Double, executor=executor)) as rig:
        call = rig.raw(INFER, write_request(make_request()))
        await until(lambda: bool(executor.pending))
        assert not await rig.drain(0.01)
        assert (await refused(call))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


ASKING_FOR_EVER = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary(sys.argv[2]).future(bytes.fromhex(sys.argv[3]))
print(flush=True)
call.result()
"""


def test_a_client_that_is_gone_without_a_word_leaves_the_line() -> None:
    async def test(rig: Rig) -> None:
        heard = next(
            each for each in rig.registry.get("double").generation.observers if isinstance(each, RecordingObserver)
        )
        state = rig.registry.get("double").state
        arguments = [f"127.0.0.1:{rig.server.port}", INFER, write_request(make_request()).hex()]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", ASKING_FOR_EVER, *arguments)
        try:
            await until(lambda: state()["waiting"] + state()["in_flight"] == 1)
            client.send_signal(signal.SIGSTOP)  # its connection stays open, and nobody answers
            await until(lambda: heard.ends == 1)
        finally:
            client.kill()
            await client.wait()

    observer = run(test, executor=FakeExecutor(), grpc_keepalive=0.2, grpc_keepalive_timeout=0.2)
    assert [type(error) for _, error, _ in observer.answers] == [Cancelled]


def test_a_call_that_there_is_not() -> None:
    async def test(rig: Rig) -> None:
        assert (await refused(rig.raw("/inference.GRPCInferenceService/Nothing", b"")))[
            0
        ] is grpc.StatusCode.UNIMPLEMENTED

    run(test)


def test_a_unary_call_without_its_message() -> None:
    async def test(rig: Rig) -> None:
        call = rig.channel.stream_unary(INFER)()
        await call.done_writing()
        code, text = await refused(call)
        assert code is grpc.StatusCode.UNIMPLEMENTED and "exactly one request message" in text

    run(test)


def test_many_calls_at_once_keep_their_answers_apart() -> None:
    async def test(rig: Rig) -> None:
        answers = await asyncio.gather(*[rig.infer(make_request(index, -index)) for index in range(200)])
        assert [each.outputs[0].array.tolist() for each in answers] == [[[2 * i, -2 * i]] for i in range(200)]

    run(test)


class Script:
    """The core's queue, with events that the test puts there."""

    def __init__(self, entries: int) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._metadata = (None,) * entries

    def poll(self, until: float | None = None) -> Any:
        try:
            return self.events.get(until is None)
        except queue.Empty:
            return SimpleNamespace(completion_type=cygrpc.CompletionType.queue_timeout, tag=None)

    def say(self, heard: Callable[[Any], object]) -> None:
        """Have `heard` called with an event."""
        kind = cygrpc.CompletionType.operation_complete
        self.events.put(SimpleNamespace(completion_type=kind, tag=heard, invocation_metadata=self._metadata))

    def shutdown(self) -> None:
        """Have the last event come."""
        self.events.put(SimpleNamespace(completion_type=cygrpc.CompletionType.queue_shutdown, tag=None))


@asynccontextmanager
async def scripted(*heard: Callable[[Any], object], entries: int = 0) -> AsyncIterator[Script]:
    """Run the thread of a Core whose queue has these events first, each with so many entries of metadata; end it."""
    account, script = Account(HttpSettings()), Script(entries)
    core: Any = Core(
        {}, [], lambda path, call: True, lambda error, call: None, account, max_message_size=1000, patience=1.0
    )
    core._queue, core._next = script, script.poll
    for each in heard:
        script.say(each)
    core._thread.start()
    yield script
    script.say(core._shut)
    await core._ended
    core._thread.join()
    core.discard()


def test_an_event_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        taken = asyncio.Event()
        async with scripted(lambda event: 1 // 0, lambda event: taken.set()):
            await taken.wait()

    asyncio.run(main())
    assert "could not be answered" in caplog.text


def test_what_happens_at_once_wakes_the_loop_once_and_is_heard_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits while nothing happens; then the loop asks the queue itself until nothing more has happened."""
    threads: list[str] = []

    async def main() -> None:
        loop, wakes, all_heard = asyncio.get_running_loop(), [], asyncio.Event()
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            wakes.append(arguments)
            return wake(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def heard(event: Any) -> None:
            threads.append(threading.current_thread().name)

        async with scripted(*[heard] * 500, lambda event: all_heard.set()) as script:
            await all_heard.wait()
            assert len(wakes) == 1
            again = asyncio.Event()
            while len(wakes) == 1:  # until the thread has the queue again, the loop hears of it without being woken
                again.clear()
                script.say(lambda event: again.set())
                await again.wait()
                await asyncio.sleep(0)

    asyncio.run(main())
    assert threads == ["MainThread"] * 500


@pytest.mark.parametrize(("entries", "most"), [(0, 100), (100_000, 3)], ids=["", "with much metadata"])
async def test_others_have_their_turns_between_events(entries: int, most: int) -> None:
    order: list[str] = []
    done = asyncio.Event()

    def first(event: Any) -> None:
        asyncio.get_running_loop().call_soon(order.append, "other")

    events = [lambda event: order.append("event")] * 200
    async with scripted(first, *events, lambda event: done.set(), entries=entries):
        await done.wait()
    assert order.index("other") < most


def test_calls_that_nobody_has_looked_at_are_not_cancelled() -> None:
    """While the server stands still, two clients send more calls than gRPC would hold for it of its own accord."""
    with Served(f"{MODELS}:Square", "--grpc-port", "0", "--max-queue-size", "2000") as served:
        address = served.until_logged(r"listening.*?address=\S*?grpc://(\S+:\d+)")[1]
        served.until_ready()
        codes = asyncio.run(_burst(address, served.process.pid, 1000, 2))
    assert codes == {"OK": 2000}


def test_streams_that_are_reset_take_no_memory() -> None:
    """The core keeps those that it has not accepted: 60,000 of them took 500 MB."""
    opened = [opening(stream) + http2_frame(RST_STREAM, bytes(4), stream=stream) for stream in range(1, 3001, 2)]
    with Served(f"{MODELS}:Square", "--grpc-port", "0", "--max-connections", 2000) as served:
        served.until_grpc().until_ready()
        host, _, port = served.grpc.rpartition(":")
        before = peak_bytes(served.process.pid)
        for _ in range(40):
            with socket.create_connection((host, int(port)), timeout=60) as client, suppress(ConnectionError):
                client.sendall(PREFACE + b"".join(opened))
        wait_until(lambda: asyncio.run(_burst(served.grpc, None, 1, 1)) == {"OK": 1})
        assert peak_bytes(served.process.pid) - before < 200 << 20


def test_metadata_without_end_is_refused() -> None:
    """The core's limit counts the bytes of each frame alone."""
    more = b"\0\1a\1b" * 100

    async def test(rig: Rig) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        frames = [http2_frame(CONTINUATION, more, stream=1, flags=4 * (number == 9)) for number in range(10)]
        writer.write(PREFACE + opening(1, flags=0) + b"".join(frames))
        async with asyncio.timeout(60):
            await reader.readuntil(b"metadata: must have at most 256 entries")
        writer.close()

    run(test)


def opening(stream: int, *, flags: int = 4) -> bytes:
    """Return the frame that opens a stream: its headers are literals, none of them indexed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": INFER,
        ":authority": "t",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode()) for name, value in fields.items()
    )
    return http2_frame(HEADERS, block, stream=stream, flags=flags)


def peak_bytes(pid: int) -> int:
    """Return how much memory the process has had at most."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_a_burst_of_calls_on_one_connection_is_queued() -> None:
    """More calls than may be in flight on one connection: the client keeps the others back, and none is cancelled."""
    with Served(f"{MODELS}:Square", "--grpc-port", "0", "--max-queue-size", "5000") as served:
        served.until_grpc().until_ready()
        codes = [asyncio.run(_burst(served.grpc, None, 4000, 1)) for _ in range(2)]
    assert codes == [{"OK": 4000}] * 2


async def _burst(address: str, pid: int | None, calls: int, channels: int) -> dict[str, int]:
    """Return how the calls end. The process `pid`, if any, stands still while they are sent."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    opened = [grpc.aio.insecure_channel(address, options=options) for _ in range(channels)]
    for channel in opened:
        await channel.channel_ready()
    element = numpy.array([b"3"], object)
    body = write_request(InferenceRequest("square", [TensorValue("input", "BYTES", element)]))
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    try:
        pending = [channel.unary_unary(INFER, None, None)(body, timeout=60) for channel in opened for _ in range(calls)]
        await asyncio.sleep(0.5)  # a server that stands still says nothing of what has reached its sockets
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
    codes = Counter([(await call.code()).name for call in pending])
    for channel in opened:
        await channel.close(None)
    return dict(codes)


def test_a_call_whose_end_is_reported_after_the_server_stopped_does_no_harm() -> None:
    """The core aborts the process if an operation comes after its queue was shut; who watches is told of the end at that time."""
    (watch,) = [method for method in methods("grpc.health.v1.Health") if method.name == "Watch"]
    request = watch.request().SerializeToString()

    async def test(rig: Rig) -> None:
        for each in [rig.channel.unary_stream(watch.path)(request) for _ in range(3)]:
            await each.read()
            each.cancel()

    for _ in range(20):
        run(test)
