"""`weir serve --fronts 2` is one server: what its fronts answer, what they hand over, and what one that ends takes with it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.fronts.kit import (
    SQUARE,
    Caller,
    Gate,
    Increase,
    admitted,
    binary,
    calling,
    connections_of,
    fronts_of,
    get,
    is_squared,
    limit_descriptors,
    metric,
    outcomes,
    owners,
    squares_around_a_page,
    texts_of,
)
from tests.rings import subcases
from tests.served import Served, still_running, until, weir_here
from tests.served_models import Square

import weir
from weir.app import App
from weir.client import HttpClient, WebSocketClient
from weir.settings import read_settings

TENSORS = {"inputs": [{"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
ROWS = numpy.array([[1, 2], [3, 4]], "<f4")


ALL_BINARY: dict[str, Any] = {"parameters": {"binary_data_output": True}}
IN_A_REGION = {
    "outputs": [{"name": "sum", "parameters": {"shared_memory_region": "mine", "shared_memory_byte_size": 8}}]
}
LONG = {"inputs": [{"name": "a", "shape": [2, 20_000], "datatype": "FP32", "data": [1.5] * 40_000}]}
# What a front answers, on a connection that it keeps.
KEPT = [
    ("/infer/square", b"3", ""),
    ("/v2/models/add/infer", json.dumps(TENSORS).encode(), ""),
    ("/v2/models/add/infer", *binary(ROWS)),
    ("/v2/models/add/infer", *binary(ROWS, **ALL_BINARY)),
    ("/v2/models/add/infer", json.dumps(TENSORS | ALL_BINARY).encode(), ""),
    ("/v2/models/texts/infer", *texts_of(b"hi", b"you")),
    ("/infer/square", b" " * 600_000 + b"3", ""),
    ("/v2/models/mean/infer", *binary(numpy.ones((2, 20_000), "<f4"), **ALL_BINARY)),
    ("/v2/models/mean/infer", json.dumps(LONG).encode(), ""),
]
REQUESTS = [
    *KEPT,
    ("/v2/models/add/infer", *binary(ROWS, id="mine", outputs=[{"name": "sum", "parameters": {"binary_data": True}}])),
    ("/v2/models/add/infer", *binary(ROWS, parameters={"priority": 1, "timeout": 1_000_000, "binary_data_output": True})),
    ("/v2/models/add/infer", *binary(ROWS, **IN_A_REGION)),
    ("/v2/models/add/infer", json.dumps(TENSORS | IN_A_REGION).replace("memory_region", "memory\\u005fregion").encode(), ""),
    ("/v2/models/add/infer", *binary(ROWS.astype("<f8"))),
    ("/v2/models/add/infer", binary(ROWS)[0][:-1], binary(ROWS)[1]),
    ("/v2/models/add/infer", binary(ROWS)[0], "Inference-Header-Content-Length: 9999\r\n"),
    ("/v2/models/add/infer", ROWS[:1].tobytes(), "Inference-Header-Content-Length: 0\r\n"),
    ("/v2/models/add/infer", *binary(numpy.ones((300, 2), "<f4"), **ALL_BINARY)),  # more rows than a batch has
    ("/infer/square", b"[1,2]", "X-Explain: 0\r\n"),
    ("/infer/square", b"not json", ""),
    ("/infer/square", b"3", "X-Request-Id: mine\r\n"),
    ("/infer/square", b"3", "Content-Type: text/strange\r\n"),
    ("/infer/square", b"3", "X-Request-Timeout: never\r\n"),
    ("/infer/square/batch", b"[1,2,3]", ""),
    ("/infer/nothing", b"3", ""),
    ("/infer/square", b" " * 40_000 + b"3", ""),
    ("/infer/square", b" " * 600_000 + b"3", "X-Explain: 0\r\n"),
    ("/infer/square", b" " * 600_000 + b"3", "Expect: 100-continue\r\n"),
    ("/infer/square", b"[" * 100_000, ""),
    ("/v2/models/add/infer", *binary(numpy.ones((20_000, 2), "<f4"))),
    ("/v2/models/mean/infer", *binary(numpy.ones((3, 20_000), "<f4"))),
    ("/v2/models/mean/infer", *binary(numpy.ones((1, 20_000), "<f4"), **ALL_BINARY)),
    ("/v2/models/mean/infer", *binary(numpy.ones((1, 20_000), "<f4"), outputs=[{"name": "none"}])),
    ("/v2/models/mean/infer", numpy.ones((1, 20_000), "<f4").tobytes(), "Inference-Header-Content-Length: 0\r\n"),
    ("/v2/models/mean/infer", json.dumps(LONG).encode()[:-9], ""),
    ("/infer/square", b" " * (1 << 21) + b"3", ""),
    ("/infer/measured", b"3", ""),
    ("/v2/models/add/infer", json.dumps(TENSORS | {"id": "mine", "parameters": {"priority": 1}}).encode(), ""),
    ("/v2/models/add/infer", json.dumps(TENSORS | {"outputs": [{"name": "sum", "parameters": {"binary_data": True}}]}).encode(), ""),
    ("/v2/models/add/versions/7/infer", json.dumps(TENSORS).encode(), ""),
    ("/v2/models/square/infer", b'{"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["3"]}]}', ""),
    ("/infer/add", b'{"a": [[1, 2]]}', ""),
    ("/v2/nonsense", b"3", ""),
]  # fmt: skip


@subcases(("path", "body", "headers"), REQUESTS)
def test_a_response_is_that_of_one_front(served: Served, single: Served, path: str, body: bytes, headers: str) -> None:
    assert outcomes(served, path, body, headers) == outcomes(single, path, body, headers)


def test_a_front_keeps_the_connection_of_what_it_answers(served: Served) -> None:
    front, _ = fronts_of(served)
    with calling(served, front) as caller:
        for path, body, headers in KEPT * 2:
            assert caller.call(path, body, headers=headers)[0] == 200
        assert owners(served, caller) == [front.pid]


def test_pipelined_requests_are_answered_in_order_across_a_hand_over(served: Served) -> None:
    assert squares_around_a_page(served.url) == [b"9", b"25"]


def test_streams_and_websockets_go_on_at_the_dispatcher(served: Served) -> None:
    with HttpClient(served.url) as client:
        assert list(client.stream("counts", 3)) == [0, 1, 2]
    with WebSocketClient(served.url) as client:
        arrays = client.infer("add", {"a": numpy.array([[1, 2], [3, 4]], numpy.float32)})
        assert arrays["sum"].tolist() == [3.0, 7.0]


def test_requests_and_bytes_are_counted_once(served: Served) -> None:
    more = Increase(served)
    for front in fronts_of(served):
        with calling(served, front) as caller:
            for _ in range(5):
                caller.call("/infer/square", b"12")
            caller.call("/infer/square", b"3", headers="X-Request-Timeout: never\r\n")
    assert more("weir_requests_total", model="square", code="200") == 10
    assert more("weir_requests_rejected_total", model="square", error="InvalidRequest") == 2
    until(lambda: more("weir_sent_bytes_total", model="square") >= 10 * len(b"144"))


def test_a_front_that_is_killed_loses_its_own_connections_only(served: Served) -> None:
    first, second = fronts_of(served)
    with calling(served, first) as lost, calling(served, second) as kept, calling(served, first) as passed:
        assert passed.call("/health/live", method="GET")[0] == 200  # it is the dispatcher's from now on
        first.kill()
        assert lost.answer()[0] == 0
        assert kept.call("/infer/square", b"7") == (200, b"49")
        assert passed.call("/health/live", method="GET")[0] == 200
        until(lambda: len(fronts_of(served)) == 2)
        (new,) = [front for front in fronts_of(served) if front.pid != second.pid]
        with calling(served, new) as caller:
            assert caller.call("/infer/square", b"8") == (200, b"64")


def test_a_front_that_is_replaced_has_the_keys_of_the_others(tmp_path: Path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    keys.write_text("first")
    token.write_text("control")
    with Served(SQUARE, "--fronts", 2, "--api-key-file", keys, "--control-token-file", token) as served:
        served.until_listening()
        served.until_logged("ready .*models=")
        keys.write_text("second")  # this counts at the next start of the server
        token.unlink()
        victim, kept = fronts_of(served)
        victim.kill()
        until(lambda: len({front.pid for front in fronts_of(served)} - {victim.pid}) == 2)
        (new,) = [front for front in fronts_of(served) if front.pid != kept.pid]
        with calling(served, new) as caller:
            for key, status in (("second", 401), ("first", 200), ("control", 200)):
                headers = f"Authorization: Bearer {key}\r\n"
                assert caller.call("/infer/square", b"3", headers=headers)[0] == status


def test_metrics_show_each_front(served: Served) -> None:
    def shown(name: str) -> list[float]:
        return sorted(metric(served, f"weir_front_{name}", front=front) for front in (0, 1))

    (first, second), before = fronts_of(served), shown("starts_total")
    with ExitStack() as stack:
        for caller in [stack.enter_context(calling(served, each)) for each in (first, first, second)]:
            assert caller.call("/infer/square", b"3") == (200, b"9")
        until(lambda: shown("connections") == [1, 2])
        assert all(shown("memory_bytes")) and shown("requests") == [0, 0]
    first.kill()
    first.wait()
    until(lambda: sum(shown("starts_total")) == sum(before) + 1)


def test_the_dashboard_has_a_row_for_each_front(served: Served) -> None:
    def rows() -> dict[int, Any]:
        return {each["pid"]: each for each in json.loads(get(served, "/dashboard/data"))["now"]["fronts"]}

    first, second = fronts_of(served)
    with calling(served, first) as caller:
        # A front that has just started may have used less than the kernel counts, and former tests may have connections.
        until(lambda: is_squared(caller, 3) and rows()[first.pid]["cpu"] > 0)
        until(lambda: [rows()[first.pid][each] for each in ("connections", "requests")] == [1, 0])
    assert rows().keys() == {first.pid, second.pid}
    assert rows()[first.pid]["starts"] >= 1 and rows()[first.pid]["memory_bytes"] > 1 << 20


def test_all_fronts_are_replaced_when_their_template_is_killed(served: Served) -> None:
    before = {front.pid for front in fronts_of(served)}
    psutil.Process(fronts_of(served)[0].ppid()).kill()
    until(lambda: len({front.pid for front in fronts_of(served)} - before) == 2)
    for front in fronts_of(served):
        with calling(served, front) as caller:
            assert caller.call("/infer/square", b"9") == (200, b"81")


def test_a_front_that_stands_still_holds_up_no_other(served: Served) -> None:
    first, second = fronts_of(served)
    with calling(served, first) as stopped, calling(served, second) as other:
        first.send_signal(signal.SIGSTOP)
        try:
            stopped.send("/infer/square", b"2")
            for number in range(30):
                assert other.call("/infer/square", b"%d" % number) == (200, b"%d" % number**2)
        finally:
            first.send_signal(signal.SIGCONT)
        assert stopped.answer()[2] == b"4"


def test_requests_are_withdrawn_when_nobody_waits_for_them(tmp_path: Path) -> None:
    """Because its caller leaves, its time is over, or its front is killed."""
    gate = Gate(tmp_path)
    with Served(*gate.arguments) as served, ExitStack() as stack:

        def until_waiting(count: int) -> None:
            until(lambda: metric(served, "weir_waiting_requests", model="gated") == count)

        first, second = fronts_of(served.until_ready())
        busy, lost = stack.enter_context(calling(served, second)), stack.enter_context(calling(served, first))
        busy.send("/infer/gated", b"1")
        gate.begun.read_text()
        with Caller(served.url) as caller:
            caller.send("/infer/gated", b"2")
            until_waiting(1)
        until_waiting(0)
        assert lost.call("/infer/gated", b"2", headers="X-Request-Timeout: 0.1\r\n")[0] == 504
        until_waiting(0)
        lost.send("/infer/gated", b"2")
        until_waiting(1)
        first.kill()
        first.wait()  # until then the system may give it the connection of who asks for the metrics
        until_waiting(0)
        gate.open()
        assert busy.answer()[2] == b"1"
        assert metric(served, "weir_requests_cancelled_total", model="gated") == 2


def test_fronts_end_with_their_dispatcher() -> None:
    with Served(SQUARE, "--fronts", 2) as served:
        served.until_ready()
        fronts = fronts_of(served)
        served.process.kill()
        assert not still_running(fronts)


def test_connections_are_limited_wherever_they_are() -> None:
    """Those that fronts hand over, too, also if that is all that their clients want. What is left suffices to replace a front."""
    with Served(SQUARE, "--fronts", 2, "--max-connections", 50) as served, ExitStack() as stack:
        served.until_ready()
        limit_descriptors(served)
        callers = [stack.enter_context(Caller(served.url)) for _ in range(600)]
        for each in callers:
            with suppress(ConnectionError):
                each.send("/infer", method="GET")
        until(lambda: connections_of(served) == 50)
        assert admitted(served, "/metrics", "GET") and admitted(served, "/health/ready", "GET")
        with Caller(served.url) as more:
            status, body = more.call("/infer/square", b"2")
            assert status == 429 and b"50 connections are open" in body
        victim, other = fronts_of(served)
        victim.kill()
        until(lambda: len(fronts_of(served)) == 2 and victim not in fronts_of(served))
        assert all(admitted(served, "/health/live", "GET") for _ in range(20))
        for each in callers:
            each.socket.close()
        until(lambda: admitted(served))
        assert other in fronts_of(served)


def test_auto_is_as_many_fronts_as_cpus_that_workers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, workers, fronts in ((8, 3, 5), (2, 1, 1), (1, 4, 1)):
        monkeypatch.setattr("weir.app.cpu_count", lambda cpus=cpus: cpus)
        given = {"port": 0, "fronts": "auto", "workers": workers}
        app = App(read_settings([SQUARE], {}, {}, given=given))
        assert app.fronts == fronts


def test_fronts_are_not_pinned_with_the_server() -> None:
    (first, *_), before = sorted(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    with Served(SQUARE, "--fronts", 2, "--server-cpu-affinity", first) as served:
        served.until_listening()
        assert psutil.Process(served.process.pid).cpu_affinity() == [first]
        assert [set(front.cpu_affinity() or ()) for front in fronts_of(served)] == [before] * 2


def test_nothing_is_left_of_a_server_in_a_program(nothing_is_left: None) -> None:
    with weir.running(Square, fronts=2) as server, HttpClient(server.address) as client:
        assert client.infer("square", 3) == 9


@contextmanager
def taken(shared: bool) -> Iterator[int]:
    """Give a port that is another's, who shares it or not."""
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_bad_settings_and_addresses_of_others_are_refused_by_one_line(tmp_path: Path) -> None:
    path, missing = tmp_path / "socket", tmp_path / "certificate"
    with taken(False) as port, taken(True) as shared, socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        for arguments, says in (
            (("--fronts", 0), "must be 1 or more, or auto"),
            (("--fronts", "many"), "must be 1 or more, or auto"),
            (
                ("--tls-certfile", missing),
                "must be a certificate and its private key, both PEM (No such file or directory)",
            ),
            (("--uds", path), "cannot listen there: Address already in use"),
            (("--port", port), f"port={port}: cannot listen there: Address already in use"),
            (("--port", shared), f"port={shared}: cannot listen there: Address already in use"),
            (("--grpc-port", shared), f"grpc_port={shared}: cannot listen there"),
        ):
            settings = {"--fronts": 2, **({} if arguments[0] == "--uds" else {"--port": 0}), **dict([arguments])}
            done = weir_here("serve", SQUARE, *chain(*settings.items()))
            assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_system_that_cannot_share_ports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    done = weir_here("serve", SQUARE, "--port", 0, "--fronts", 3)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "fronts=3: this system cannot share a port (SO_REUSEPORT); only fronts=1 works" in done.stderr


def test_too_few_descriptors_for_the_fronts_are_refused() -> None:
    command = f"ulimit -n 100; exec {sys.executable} -m weir serve {SQUARE} --port 0 --fronts 50"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "weir: fronts=50: this process may open 100 files (ulimit -n), too few for so many; raise that limit"
    assert "Traceback" not in done.stderr


def test_fronts_share_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Served(SQUARE, "--fronts", 2, "--uds", path) as served:
        served.until_logged("ready")
        before = {front.pid for front in fronts_of(served)}
        for _ in range(2):
            with HttpClient(f"unix:{path}") as client:
                assert [client.infer("square", number) for number in (3, 4)] == [9, 16]
                assert client.models()  # the dispatcher has the connection from now on
                assert client.infer("square", 5) == 25
            fronts_of(served)[0].kill()
            until(lambda: len({front.pid for front in fronts_of(served)} - before) >= 1)
        served.signal(signal.SIGTERM)
        assert served.wait() == 0 and not path.exists()


def test_more_fronts_than_cpus_are_warned_of() -> None:
    with Served(SQUARE, "--fronts", (os.cpu_count() or 1) + 1) as served:
        served.until_logged("more fronts than CPUs")
        served.until_ready()
        with Caller(served.url) as caller:
            assert caller.call("/infer/square", b"2") == (200, b"4")
