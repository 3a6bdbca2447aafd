"""The address, the certificate, the limits and the end of the gRPC frontend."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
from tests.frontends.grpc.kit import INFER, PREFACE, make_request, refuses, serving
from tests.frontends.http.sockets import FILES
from tests.served import MODELS, Served
from tests.served import until as wait_until
from tests.text_models import tiny
from tests.waiting import until

from weir.catalog.registry import Registry
from weir.errors import Cancelled, SettingsError
from weir.frontends.grpc import GrpcSettings, make_frontend
from weir.frontends.grpc.core import Core
from weir.frontends.grpc.server import GrpcServer
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.testing import FakeExecutor
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import methods, write_request

Code = grpc.StatusCode
CREDENTIALS = grpc.ssl_channel_credentials(Path(FILES["tls_certfile"]).read_bytes())


# HTTP/2, RFC 9113: kinds of frames, and flags.
HEADERS, RST_STREAM, PING, GOAWAY, CONTINUATION = 1, 3, 6, 7, 9
ACK, ENDS = 1, 1 | 4  # the latter: the head and the stream


def http2_frame(kind: int, payload: bytes, *, stream: int = 0, flags: int = 0) -> bytes:
    """Return a frame of a stream; 0 is the whole connection."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def made(http: dict[str, Any] | None = None, **settings: Any) -> GrpcServer:
    http_settings = HttpSettings(**(http or {}))
    return GrpcServer(KserveContext(Registry([]), http_settings), GrpcSettings(**settings), http_settings, Core)


WITHOUT = """
import sys, weir.app
from weir.cli import main
for missing in ("grpc", "google.protobuf"):
    assert missing not in sys.modules
    sys.modules[missing] = None
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
    del sys.modules[missing]
"""


def test_grpc_is_loaded_for_a_port_only_and_needs_its_libraries() -> None:
    http = HttpSettings()
    assert make_frontend(KserveContext(Registry([]), http), GrpcSettings(), http) is None
    command = [sys.executable, "-c", WITHOUT, "serve", "examples.square:Square", "--grpc-port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    for said in run.stderr.splitlines():
        assert said.startswith("weir: grpc_port=0: needs grpcio and protobuf, which are not installed"), said
        assert "pip install 'weir-serving[grpc]'" in said
    assert run.stderr.count("weir: ") == 2


def opening(path: str, *, flags: int = 4, stream: int = 1, **more: bytes) -> bytes:
    """Return the frame that opens a stream: its headers are literals, none of them indexed."""
    fields = {
        ":method": b"POST", ":scheme": b"http", ":path": path.encode(), ":authority": b"t", "content-type": b"application/grpc",
        "te": b"trailers", **more,
    }  # fmt: skip
    block = b"".join(b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value) for name, value in fields.items())
    return http2_frame(HEADERS, block, stream=stream, flags=flags)


@pytest.mark.parametrize(("command", "fronts"), [("serve", 2), ("embed serve", 1)])
def test_what_a_stranger_sends_is_not_logged(command: str, fronts: int, tmp_path: Path) -> None:
    """gRPC's core would write the text of a GOAWAY frame to stderr as it is, and log a traceback for metadata that are no UTF-8."""
    forged = b"no error\r\x1b[2J\n2026-01-01 00:00:00 ERROR forged"
    frames = [
        opening("/unknown", flags=ENDS, text=b"forged\x88"),
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


async def test_addresses_and_certificates() -> None:
    async with serving() as rig:
        taken = rig.server.port
        for server, refusal in (
            (made(grpc_port=taken), rf"host='127.0.0.1', grpc_port={taken}: cannot listen there"),
            (made({"tls_certfile": "/nowhere.pem"}, grpc_port=0), r"tls_certfile='/nowhere\.pem'"),
        ):
            with pytest.raises(SettingsError, match=refusal):
                await server.start()
    server = made({"host": "192.0.2.1"}, grpc_port=0, grpc_host="::1")
    assert server.address == "grpc://[::1]:0"
    await server.stop()  # harmless before the start
    assert await server.drain()


async def test_tls_with_the_certificate_of_http() -> None:
    async with serving(http=FILES, credentials=CREDENTIALS) as rig:
        assert rig.server.address.startswith("grpcs://127.0.0.1:")
        assert (await rig.infer(make_request(1, 2))).outputs[0].array.tolist() == [[2, 4]]
        plain: Any = grpc.aio.insecure_channel(f"127.0.0.1:{rig.server.port}")
        async with plain:
            await refuses(plain.unary_unary(INFER)(write_request(make_request())), Code.UNAVAILABLE)


async def test_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    executor = FakeExecutor()
    async with serving(executor=executor) as rig:
        accepted = rig.raw(INFER, write_request(make_request()))
        await until(lambda: bool(executor.pending))
        rig.server.refuse()
        await refuses(rig.infer(make_request()), Code.UNAVAILABLE, "is shutting down")
        draining = asyncio.ensure_future(rig.drain())
        await asyncio.sleep(0)
        executor.respond_next(lambda payloads: [{"y": payloads[0]["x"]}])
        assert await accepted
        assert await draining


async def test_drain_does_not_wait_for_ever() -> None:
    executor = FakeExecutor()
    async with serving(executor=executor) as rig:
        call = rig.raw(INFER, write_request(make_request()))
        await until(lambda: bool(executor.pending))
        assert not await rig.drain(0.01)
        assert await call.code() in (Code.UNAVAILABLE, Code.CANCELLED)


ASKING_FOR_EVER = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary(sys.argv[2]).future(bytes.fromhex(sys.argv[3]))
print(flush=True)
call.result()
"""


async def test_a_client_that_is_gone_without_a_word_leaves_the_line() -> None:
    async with serving(executor=FakeExecutor(), grpc_keepalive=0.2, grpc_keepalive_timeout=0.2) as rig:
        arguments = [f"127.0.0.1:{rig.server.port}", INFER, write_request(make_request()).hex()]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", ASKING_FOR_EVER, *arguments)
        try:
            await until(lambda: rig.under_way == 1)
            client.send_signal(signal.SIGSTOP)  # its connection stays open, and nobody answers
            await until(lambda: rig.observer.ends == 1)
        finally:
            client.kill()
            await client.wait()
    assert [type(error) for _, error, _ in rig.observer.responses] == [Cancelled]


def test_bursts_of_calls_are_queued_and_none_is_cancelled() -> None:
    """While the server stands still, two clients send more calls than gRPC would hold for it of its own accord; then one sends
    more than may be in flight on one connection, and keeps the others back."""
    with Served(f"{MODELS}:Square", "--grpc-port", "0", "--max-queue-size", "5000") as served:
        served.until_grpc().until_ready()
        assert asyncio.run(_burst(served.grpc, served.process.pid, 1000, 2)) == {"OK": 2000}
        assert asyncio.run(_burst(served.grpc, None, 4000, 1)) == {"OK": 4000}


def test_streams_that_are_reset_take_no_memory() -> None:
    """The core keeps those that it has not accepted: 60,000 of them took 500 MB."""
    opened = [
        opening(INFER, stream=each) + http2_frame(RST_STREAM, bytes(4), stream=each) for each in range(1, 3001, 2)
    ]
    with Served(f"{MODELS}:Square", "--grpc-port", "0", "--max-connections", 2000) as served:
        served.until_grpc().until_ready()
        host, _, port = served.grpc.rpartition(":")
        before = peak_bytes(served.process.pid)
        for _ in range(40):
            with socket.create_connection((host, int(port)), timeout=60) as client, suppress(ConnectionError):
                client.sendall(PREFACE + b"".join(opened))
        wait_until(lambda: asyncio.run(_burst(served.grpc, None, 1, 1)) == {"OK": 1})
        assert peak_bytes(served.process.pid) - before < 200 << 20


async def test_metadata_without_end_is_refused() -> None:
    """The core's limit counts the bytes of each frame alone."""
    more = b"\0\1a\1b" * 100
    frames = [http2_frame(CONTINUATION, more, stream=1, flags=4 * (number == 9)) for number in range(10)]
    async with serving() as rig, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(PREFACE + opening(INFER, flags=0) + b"".join(frames))
        await reader.readuntil(b"metadata: must have at most 256 entries")
        writer.close()


def peak_bytes(pid: int) -> int:
    """Return how much memory the process has had at most."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


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


async def test_a_call_whose_end_is_reported_after_the_server_stopped_is_harmless() -> None:
    """The core aborts the process if an operation comes after its queue was shut; who watches is told of the end at that time."""
    (watch,) = [method for method in methods("grpc.health.v1.Health") if method.name == "Watch"]
    request = watch.request().SerializeToString()
    for _ in range(20):
        async with serving() as rig:
            for each in [rig.channel.unary_stream(watch.path)(request) for _ in range(3)]:
                await each.read()
                each.cancel()
