"""Every route, call and port of every product charges what it is sent: this walks them all, as the servers describe or declare them."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from starlette.routing import WebSocketRoute
from tests.fronts.kit import metric
from tests.served import Served, until
from tests.text_models import tiny
from tests.text_server.bert_as_service.opened import Opened
from tests.text_server.test_server import SETTINGS
from websockets.sync.client import connect

import weir.embedding
from weir.catalog.registry import Registry
from weir.frontends.grpc import core
from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.core import Core
from weir.frontends.http.application import make_app
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.text_server.bert_as_service.frames import GREETING, frame, ready
from weir.text_server.bert_as_service.port import Port
from weir.wire.kserve_grpc import ModelInferRequest

BODY, SENT = 200_000, 60_000  # bytes: how long a body is, and how much of it is sent
NAMES = {"model": "length", "model_name": "length", "model_version": "1"}
# Added to those of the descriptions, which leave out what is there for other clients.
MORE = {
    "post": ("/inference", "/", "/invocations", "/vertex", "/terminate", "/v1/x"),
    "put": ("/models/length/policy",),
}


@pytest.fixture(scope="module", params=["serve", "embed serve"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run each product with all that it has."""
    folder: Path = tmp_path_factory.mktemp("charged")
    models: tuple[object, ...] = tuple(
        f"{Path(__file__).parent}/charged_models.py:{name}" for name in ("Length", "Grid", "Words")
    )
    if request.param != "serve":
        models = (tiny.model(folder / "text"), "--cache", folder / "cache", "--no-calibrate")
    more = "--batch-dir", folder / "jobs", "--arena-bytes", 0  # the arena has a limit of its own
    with Served(*models, *more, command=request.param) as running:
        yield running.until_ready() if request.param == "serve" else until_encoding(running)


def until_encoding(running: Served) -> Served:
    running.until_listening()
    until(lambda: httpx.get(f"{running.url}/health/ready").status_code == 200, 120.0)
    return running


def test_every_route_charges_what_it_is_sent(served: Served) -> None:
    described = httpx.get(f"{served.url}/openapi.json", timeout=60.0).json()["paths"]
    calls = [(method, path) for path, methods in described.items() for method in methods]
    calls += [(method, path) for method, paths in MORE.items() for path in paths]
    reading = [call for call in calls if reads(served, *call)]
    assert {path for method, path in reading} >= {"/v1/files", "/v1/batches", "/v2/repository/index"}
    assert len(reading) > 20, reading


def reads(served: Served, method: str, path: str) -> bool:
    """Send the beginning of a body; return whether the route waits for the rest, or answers without. It must not wait and charge nothing."""
    for name in re.findall(r"{(\w+)}", path):
        path = path.replace(f"{{{name}}}", NAMES.get(name, "x"))
    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    begin = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' if path == "/v1/files" else b'["'
    )
    head = f"{method.upper()} {path} HTTP/1.1\r\nHost: t\r\nContent-Type: {kind}\r\nContent-Length: {BODY}\r\n\r\n"
    until(lambda: metric(served, "weir_held_bytes") < SENT)
    url = urlsplit(served.url)
    with socket.create_connection((url.hostname, url.port), 30.0) as sender:
        sender.sendall(head.encode() + begin + b"x" * (SENT - len(begin)))
        sender.setblocking(False)
        try:
            until(lambda: answers(sender) or metric(served, "weir_held_bytes") >= SENT, 10.0)
        except AssertionError:
            raise AssertionError(f"{method} {path} waits for its body and charges nothing") from None
        return not answers(sender)


def answers(sender: socket.socket) -> bool:
    """Return whether an answer has come."""
    try:
        return bool(sender.recv(1, socket.MSG_PEEK)) or True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


SIZE = 100_000


@pytest.fixture(params=[Core, AioCore])
def grpc_calls(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, list[str], list[int]]]:
    """Serve texts over gRPC; give the address, the paths of all calls that the server has, and how many bytes were charged each time."""
    calls: list[str] = []
    charged: list[int] = []
    begin, take = request.param.__init__, Account.take

    def beginning(self: Any, handlers: dict[str, Any], *arguments: Any, **options: Any) -> None:
        calls.extend(handlers)
        begin(self, handlers, *arguments, **options)

    def taking(account: Account, size_bytes: int) -> None:
        take(account, size_bytes)
        charged.append(size_bytes)

    monkeypatch.setattr(request.param, "__init__", beginning)
    monkeypatch.setattr(core, "Core", request.param)
    monkeypatch.setattr(Account, "take", taking)
    with weir.embedding.serve(
        tiny.model(tmp_path / "text"), cache=str(tmp_path / "cache"), grpc_port=0, **SETTINGS
    ) as server:
        yield server.addresses[1].removeprefix("grpc://"), calls, charged


def test_every_grpc_call_charges_what_it_is_sent(grpc_calls: tuple[str, list[str], list[int]]) -> None:
    address, calls, charged = grpc_calls
    assert len(calls) > 30 and {path.split("/")[1].partition(".")[0] for path in calls} >= {"inference", "tei", "grpc"}
    with grpc.insecure_channel(address) as channel:
        for path in calls:
            charged.clear()
            answers = channel.stream_stream(path, None, None)(iter([b"\xff" * SIZE]), timeout=30.0)
            with suppress(grpc.RpcError):
                list(answers)
            assert SIZE in charged, path


def test_every_websocket_charges_what_it_is_sent(served: Served) -> None:
    app = make_app(KserveContext(Registry([]), HttpSettings()))
    paths = [route.path for route in app.routes if isinstance(route, WebSocketRoute) and "{" not in route.path]
    assert paths
    url = urlsplit(served.url)
    for path in paths:
        until(lambda: metric(served, "weir_held_bytes") < SENT)
        with socket.create_connection((url.hostname, url.port), 30.0) as sender:
            opening = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            sender.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\n{opening}\r\n".encode())
            assert sender.recv(12) == b"HTTP/1.1 101"
            sender.sendall(b"\x81\xff" + BODY.to_bytes(8) + bytes(4) + b"x" * SENT)
            until(lambda: metric(served, "weir_held_bytes") >= SENT, 10.0)


def test_every_zeromq_port_charges_what_it_is_sent() -> None:
    account = Account(HttpSettings())
    with Opened(account=account) as opened:
        ports = [each for each in vars(opened.frontend).values() if isinstance(each, Port)]
        assert len(ports) == 2
        for port in ports:
            kind = {"PULL": "PUSH", "PUB": "SUB"}[port.socket_type]
            with socket.create_connection(("127.0.0.1", port.number), 20.0) as sender:
                sender.sendall(GREETING + ready(kind) + frame(b"x" * 1000)[:900])
                opened.until(lambda: account.held_bytes >= 800)
            opened.until(lambda: account.held_bytes == 0)


# What is read in the server's process, as values that take many times the room of the body.
NUMBERS = [1] * 250_000
TENSOR = {"name": "x", "datatype": "FP32", "shape": [len(NUMBERS) // 3, 3], "data": NUMBERS}
INFERENCE = json.dumps({"model_name": "grid", "inputs": [TENSOR]}).encode()
# With these parameters the server reads the tensor, otherwise a worker does.
READ_HERE = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [TENSOR]}).encode()


def over_http(path: str, body: bytes) -> Callable[[Served, int], str]:
    def ask(served: Served, port: int) -> str:
        return httpx.post(f"{served.url}{path}", content=body, headers={"content-type": "application/json"}).text

    return ask


def over_websocket(served: Served, port: int) -> str:
    with connect(served.url.replace("http", "ws") + "/v2/ws", max_size=None) as socket:
        socket.send(INFERENCE.decode())
        return str(socket.recv())


def over_grpc(served: Served, port: int) -> str:
    contents = {"int64_contents": NUMBERS}
    inputs = [{"name": "x", "datatype": "INT64", "shape": [1, len(NUMBERS)], "contents": contents}]
    request = ModelInferRequest(model_name="whole", inputs=inputs).SerializeToString()
    call: Any  # grpcio's type stubs require serializers, which bytes do not need
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        call(request)
    return str(refused.value)


READ = {
    "a measured item": over_http("/infer/measured", json.dumps(NUMBERS).encode()),
    "a list of items": over_http("/infer/measured/batch", json.dumps(NUMBERS).encode()),
    "a tensor": over_http("/infer/grid", json.dumps({"x": [NUMBERS[:3]] * 90_000}).encode()),
    "KServe": over_http("/v2/models/grid/infer", READ_HERE),
    "generate": over_http("/v2/models/grid/generate", json.dumps({"x": NUMBERS}).encode()),
    "WebSocket": over_websocket, "gRPC": over_grpc,
}  # fmt: skip


@pytest.fixture(scope="module")
def narrow() -> Iterator[tuple[Served, int]]:
    """Run a server with room for the bodies, but not for what is read from them."""
    models = [f"{Path(__file__).parent}/charged_models.py:{name}" for name in ("Grid", "Whole", "Measured")]
    with Served(*models, "--max-waiting-bytes", 2_500_000, "--arena-bytes", 0, "--grpc-port", 0) as running:
        port = int(running.until_logged(r"address=grpc://\S+?:(\d+)")[1])
        yield running.until_ready(), port


@pytest.mark.parametrize("way", READ)
def test_values_need_room_while_they_are_read(way: str, narrow: tuple[Served, int]) -> None:
    said = READ[way](*narrow)
    assert "a body of" in said
    assert "values" in said
    assert "max_waiting_bytes" in said


def test_numbers_that_a_worker_reads_need_no_room_here(narrow: tuple[Served, int]) -> None:
    row = {"name": "x", "datatype": "INT64", "shape": [1, len(NUMBERS)], "data": NUMBERS}
    answer = over_http("/v2/models/whole/infer", json.dumps({"inputs": [row]}).encode())(*narrow)
    assert json.loads(answer)["outputs"][0]["data"] == [len(NUMBERS)], answer
