"""TLS before two fronts, which end it: what is relayed to the dispatcher is answered as if the client were connected to it."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy
import psutil
import pytest
from tests.frontends.http.sockets import FILES
from tests.fronts.kit import (
    ENCRYPTED,
    MODELS,
    SQUARE,
    TLS,
    Caller,
    Gate,
    calling,
    fronts_of,
    metric,
    outcomes,
    owners,
    squares_around_a_page,
    total,
)
from tests.rings import subcases
from tests.served import Served, until

from weir.client import GrpcClient, HttpClient, WebSocketClient

ROWS = numpy.array([[1, 2], [3, 4]], "<f4")
LONG = json.dumps({"inputs": [{"name": "a", "shape": [1, 20_000], "datatype": "FP32", "data": [1.5] * 20_000}]}).encode()  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    models = (SQUARE, *[f"{MODELS}:{name}" for name in ("Add", "Mean", "Counts")])
    with Served(*models, *ENCRYPTED, "--fronts", 2, "--grpc-port", 0, "--access-log") as running:
        running.grpc = running.until_logged(r"listening.*address=\S*?grpcs://(\S+:\d+)")[1]
        yield running.until_ready()


@subcases(
    ("path", "body", "headers"),
    [
        ("/infer/square", b"3", ""),
        ("/infer/square", b" " * 600_000 + b"3", "Expect: 100-continue\r\n"),
        ("/infer/square", b"not json", ""),
        ("/infer/square/batch", b"[" + b" " * 600_000 + b"3]", ""),
        ("/infer/square/batch", json.dumps(list(range(100_000))).encode(), ""),  # more than a megabyte comes back
        ("/v2/models/mean/infer", LONG, ""),
    ],
)
def test_a_response_is_that_of_one_front(served: Served, single: Served, path: str, body: bytes, headers: str) -> None:
    assert outcomes(served, path, body, headers) == outcomes(single, path, body, headers)


def test_pipelined_requests_are_answered_in_order_across_a_relay(served: Served) -> None:
    assert squares_around_a_page(served.url) == [b"9", b"25"]


def test_streams_and_websockets_are_relayed(served: Served) -> None:
    with HttpClient(served.url, tls=TLS) as client:
        assert list(client.stream("counts", 3)) == [0, 1, 2]
        assert client.infer("square", 3) == 9
    with WebSocketClient(served.url, tls=TLS) as socket:
        assert socket.infer("add", {"a": ROWS})["sum"].tolist() == [3.0, 7.0]


def test_a_session_is_resumed_at_any_front(served: Served) -> None:
    first, second = fronts_of(served)
    with calling(served, first) as caller:
        assert caller.call("/infer/square", b"3") == (200, b"9")  # its ticket has come with the response
        session = caller.socket.session  # type: ignore[attr-defined]  # its socket has TLS
    for _ in range(100):
        with Caller(served.url, session) as again:
            assert again.call("/infer/square", b"4") == (200, b"16")
            assert again.socket.session_reused  # type: ignore[attr-defined]  # as above
            if owners(served, again) == [second.pid]:
                return
    raise AssertionError("no connection has come to the second front")


def test_a_relayed_connection_has_the_address_of_its_client(served: Served) -> None:
    for front in fronts_of(served):
        with calling(served, front) as caller:
            assert caller.call("/infer/square", b"5") == (200, b"25")
            assert caller.call("/models", method="GET")[0] == 200
            assert caller.call("/infer/square", b"6") == (200, b"36")  # on the connection that is relayed
            assert owners(served, caller) == [front.pid]
        for path in ("/infer/square", "/models", "/infer/square"):
            assert "client=127.0.0.1" in served.until_logged(rf"http .*path={path} ").string


def test_connections_are_counted_once_and_nothing_is_left_of_them(served: Served) -> None:
    processes = [psutil.Process(served.process.pid), *fronts_of(served)]
    until(lambda: metric(served, "weir_connections") == 1)
    descriptors = [each.num_fds() for each in processes]
    with ExitStack() as stack:
        callers = [stack.enter_context(Caller(served.url)) for _ in range(20)]
        for each in callers:
            assert each.call("/models", method="GET")[0] == 200
        assert metric(served, "weir_connections") == 21
    until(lambda: metric(served, "weir_connections") == 1)
    until(lambda: all(each.num_fds() <= before for each, before in zip(processes, descriptors, strict=True)))


def test_calls_of_grpc_are_answered_and_passed_on(served: Served) -> None:
    credentials = grpc.ssl_channel_credentials(Path(FILES["tls_certfile"]).read_bytes())
    with GrpcClient(served.grpc, credentials=credentials) as client:
        assert client.infer("add", {"a": ROWS})["sum"].tolist() == [3.0, 7.0]
        assert "add" in client.models()


def test_a_drain_sends_what_is_relayed(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Served(*gate.arguments, *ENCRYPTED) as served, Caller(served.until_ready().url) as caller:
        caller.send("/infer/gated/batch", json.dumps(["x" * 3_000_000]).encode())
        gate.begun.read_text()
        served.signal(signal.SIGTERM)
        served.until_logged("draining")
        gate.open()
        status, _, body = caller.answer()
        assert status == 200 and json.loads(body) == [{"output": "x" * 3_000_000}]
        assert served.wait() == 0


def test_a_front_that_is_killed_ends_its_relayed_connections_everywhere() -> None:
    with Served(SQUARE, *ENCRYPTED, "--fronts", 2) as served:
        served.until_ready()
        first, second = fronts_of(served)
        with calling(served, first) as lost, calling(served, second) as other:
            assert lost.call("/models", method="GET")[0] == other.call("/models", method="GET")[0] == 200
            first.kill()
            assert lost.answer()[0] == 0
            until(lambda: total(other.call("/metrics", method="GET")[1].decode(), "weir_connections") == 1)
