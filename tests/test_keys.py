"""A server with an API key: every frontend asks for it, and nothing shows it. The real command, and clients of every kind."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import psutil
import pytest
from tests.served import MODELS, Served
from websockets.sync.client import connect

from weir.client import GrpcClient
from weir.frontends.grpc.services import ALL
from weir.frontends.grpc.services import OPEN as OPEN_CALLS
from weir.frontends.http.asgi import OPEN
from weir.wire.kserve_grpc import methods

KEY = "k-1234567890"
SENT = {"Authorization": f"Bearer {KEY}"}


class Running:
    """A server with a key, and what it has printed."""

    def __init__(self, served: Served) -> None:
        self.served = served
        log = served.until_logged(r"address=grpc://(\S+:\d+)")
        self.grpc = log[1]
        self.url = re.findall(r"address=(http\S+)", served.log)[0].rstrip("'")
        served.until_printed("Authorization")
        self.client = httpx.Client(base_url=self.url)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    jobs = str(tmp_path_factory.mktemp("jobs"))
    flags = ("--grpc-port", "0", "--log-level", "debug", "--cors-origins", "http://there", "--batch-dir", jobs)
    with Served(f"{MODELS}:Square", *flags, env={"WEIR_API_KEY": KEY}) as served:
        running = Running(served)
        with running.client:
            yield running


def request_to(running: Running, method: str, path: str, **more: Any) -> httpx.Response:
    return running.client.request(method, path, **more)


def described(running: Running) -> set[tuple[str, str]]:
    paths = request_to(running, "GET", "/openapi.json", headers=SENT).json()["paths"]
    return {(method.upper(), path) for path, methods_ in paths.items() for method in methods_}


def test_every_path_of_http_asks_for_it_but_those_of_probes(running: Running) -> None:
    pages = ("/", "/docs", "/nowhere", "/ping", "/dashboard", "/metrics")
    calls = described(running) | {("GET", path) for path in pages} | {("DELETE", "/v2/x")}
    assert len(calls) > 30 and {path for _, path in calls} > OPEN - {"*"}
    for method, path in sorted(calls):
        filled = re.sub(r"\{\w+\}", "square", path)
        for headers in ({}, {"Authorization": "Bearer other"}):
            answer = request_to(running, method, filled, headers=headers)
            assert (answer.status_code == 401) is (path not in OPEN), f"{method} {path}: {answer.status_code}"
    for path in OPEN - {"*"}:
        assert request_to(running, "GET", path).status_code == 200
    whole = httpx.Request("OPTIONS", running.url, extensions={"target": b"*"})
    with httpx.Client() as client:
        assert client.send(whole).status_code == 200


def test_pages_of_others_may_call_every_path_by_its_method(running: Running) -> None:
    calls = described(running)
    assert {method for method, _ in calls} == {"GET", "POST", "PUT", "DELETE"}
    for method, path in calls:
        asking = {"Origin": "http://there", "Access-Control-Request-Method": method}
        assert request_to(running, "OPTIONS", path, headers=asking).status_code == 200, f"{method} {path}"


def test_a_refusal_has_the_shape_of_its_protocol_and_names_the_way_in(running: Running) -> None:
    native = request_to(running, "POST", "/infer/square", json=3)
    assert native.json()["error"]["type"] == "Unauthorized" and native.headers["www-authenticate"] == "Bearer"
    kserve = request_to(running, "POST", "/v2/models/square/infer", json={})
    assert isinstance(kserve.json()["error"], str) and "API key" in kserve.json()["error"]
    page = request_to(running, "GET", "/dashboard", headers={"Accept": "text/html,*/*"})
    assert 'Basic realm="weir"' in page.headers.get_list("www-authenticate")


def test_the_fast_lane_asks_before_it_reads_a_body(running: Running) -> None:
    for size in (10, 100_000, 1_000_000):
        body = json.dumps([3] * (size // 3)).encode()
        for refused in ({}, {"Authorization": "Bearer no"}) * 3:  # the fast path remembers heads that come again
            with httpx.Client(base_url=running.url) as client:
                assert client.post("/infer/square", json=3, headers=SENT).json() == 9
                assert client.post("/infer/square/batch", content=body, headers=refused).status_code == 401
        waiting = request_to(running, "POST", "/infer/square", content=body, headers={"Expect": "100-continue"})
        assert waiting.status_code == 401


def test_browsers_send_it_as_a_password_and_ask_first_for_others_pages(running: Running) -> None:
    password = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert request_to(running, "GET", "/dashboard", headers={"Authorization": f"Basic {password}"}).status_code == 200
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    first = request_to(running, "OPTIONS", "/infer/square", headers={"Origin": "http://there", **asking})
    assert first.status_code == 200 and first.headers["access-control-allow-headers"] == "authorization"
    refused = request_to(running, "POST", "/infer/square", json=3, headers={"Origin": "http://there"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://there"


def test_every_call_of_grpc_asks_for_it_but_those_of_probes(running: Running) -> None:
    paths = {method.path for service in ALL for method in methods(service)}
    assert set(OPEN_CALLS) < paths
    with grpc.insecure_channel(running.grpc) as channel:
        for path in [*paths, "/nowhere/Nothing"]:
            for metadata in (None, (("authorization", "Bearer other"),)):
                code = code_of(channel, path, metadata)
                assert (code is grpc.StatusCode.UNAUTHENTICATED) is (path not in OPEN_CALLS), f"{path}: {code}"
        for path in paths:
            assert code_of(channel, path, (("authorization", f"Bearer {KEY}"),)) is not grpc.StatusCode.UNAUTHENTICATED


def code_of(channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str], ...] | None) -> grpc.StatusCode | None:
    ask: Any = channel.stream_stream(path, lambda body: body, lambda body: body)
    call = ask(iter([b""]), metadata=metadata, timeout=60)
    try:
        next(iter(call), None)
    except grpc.RpcError:
        return cast(grpc.StatusCode, call.code())
    call.cancel()
    return None


def test_nothing_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    log = tmp_path / "log"
    flags = ("--api-key-file", file, "--log-level", "debug", "--log-file", log, "--development", "--grpc-port", "0")
    with Served(f"{MODELS}:Square", *flags, stderr=subprocess.PIPE) as served:
        url = served.until_listening().url
        served.until_printed("Authorization")
        with connect(url.replace("http", "ws") + "/v2/ws", additional_headers=SENT) as socket:  # libraries log too
            socket.send(json.dumps({"model_name": "square", "id": "1", "inputs": []}))
            assert "error" in socket.recv()
        with GrpcClient(served.until_logged(r"address=grpc://(\S+:\d+)")[1], token=KEY) as rpc:
            assert rpc.server_metadata()["name"]
        for headers in (SENT, {"Authorization": f"Bearer {KEY}x"}):
            for path in ("/infer/square", "/v2/models/square/infer", "/nowhere"):
                assert KEY not in httpx.post(url + path, headers=headers, content=b"{").text
        words = [process.cmdline() for process in (psutil.Process(served.process.pid), *served.children())]
        served.process.terminate()
        assert served.wait() == 0
        assert served.process.stderr is not None and served.process.stdout is not None
        printed = served.log + served.table + served.process.stderr.read() + served.process.stdout.read()
    assert KEY not in printed + log.read_text() + str(words)
