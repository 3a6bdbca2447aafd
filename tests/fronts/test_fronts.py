"""`weir serve --fronts 2` is one server: what its fronts answer, what they hand over, and what one that ends takes with it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.fronts.kit import (
    SQUARE,
    Caller,
    Callers,
    Gate,
    calling,
    connections_of,
    fronts_of,
    limit_descriptors,
    metrics_of,
    owners,
    squares_around_a_page,
    total,
)
from tests.served import Served, still_running, until, weir_here
from tests.served_models import Square

import weir
from weir.app import App
from weir.client import HttpClient, WebSocketClient
from weir.settings import read_settings

ADD = f"{Path(__file__).parents[2]}/tests/fronts/models.py"


ALL = [
    SQUARE,
    *[f"{ADD}:{name}" for name in ("Add", "Texts", "Mean", "Counts", "Measured")],
    "--max-body-size",
    1 << 20,
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*ALL, "--fronts", 2) as running:
        yield running.until_ready()


@pytest.fixture(scope="module")
def single() -> Iterator[Served]:
    with Served(*ALL, "--fronts", 1) as running:
        yield running.until_ready()


def test_every_front_answers_over_one_queue(served: Served) -> None:
    for front in fronts_of(served):
        with calling(served, front) as caller:
            assert [caller.call("/infer/square", b"%d" % number) for number in (3, 4)] == [(200, b"9"), (200, b"16")]


TENSORS = {"inputs": [{"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
ROWS = numpy.array([[1, 2], [3, 4]], "<f4")


def binary(*arrays: numpy.ndarray[Any, Any], names: Any = "a", **more: Any) -> tuple[bytes, str]:
    """Return the body and the header of a request with binary tensors."""
    inputs = [
        {"name": name, "shape": array.shape, "datatype": DATATYPES[array.dtype.str], "parameters": {"binary_data_size": array.nbytes}}
        for name, array in zip(names, arrays, strict=True)
    ]  # fmt: skip
    header = json.dumps({"inputs": inputs} | more).encode()
    body = header + b"".join(array.tobytes() for array in arrays)
    return body, f"Inference-Header-Content-Length: {len(header)}\r\n"


DATATYPES = {"<f4": "FP32", "<f8": "FP64"}
ALL_BINARY: dict[str, Any] = {"parameters": {"binary_data_output": True}}
LONG = {"inputs": [{"name": "a", "shape": [2, 20_000], "datatype": "FP32", "data": [1.5] * 40_000}]}
TEXTS_HEADER = b'{"inputs": [{"name": "a", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 13}}], "parameters": {"binary_data_output": true}}'
TEXTS = TEXTS_HEADER + b"\2\0\0\0hi\3\0\0\0you", f"Inference-Header-Content-Length: {len(TEXTS_HEADER)}\r\n"
REQUESTS = [
    ("/v2/models/add/infer", *binary(ROWS)),
    ("/v2/models/add/infer", *binary(ROWS, **ALL_BINARY)),
    ("/v2/models/add/infer", *binary(ROWS, id="mine", outputs=[{"name": "sum", "parameters": {"binary_data": True}}])),
    ("/v2/models/add/infer", *binary(ROWS, parameters={"priority": 1, "timeout": 1_000_000, "binary_data_output": True})),
    ("/v2/models/add/infer", *binary(ROWS, outputs=[{"name": "none"}])),
    ("/v2/models/add/infer", *binary(ROWS, outputs=[{"name": "sum", "parameters": {"shared_memory_region": "mine", "shared_memory_byte_size": 8}}])),
    ("/v2/models/add/infer", *binary(ROWS.astype("<f8"))),
    ("/v2/models/add/infer", *binary(ROWS, names="b")),
    ("/v2/models/add/infer", binary(ROWS)[0][:-1], binary(ROWS)[1]),
    ("/v2/models/add/infer", binary(ROWS)[0], "Inference-Header-Content-Length: 9999\r\n"),
    ("/v2/models/add/infer", binary(ROWS)[0], "Inference-Header-Content-Length: many\r\n"),
    ("/v2/models/add/infer", ROWS[:1].tobytes(), "Inference-Header-Content-Length: 0\r\n"),
    ("/v2/models/add/infer", *binary(numpy.ones((300, 2), "<f4"), **ALL_BINARY)),  # more rows than a batch has
    ("/v2/models/texts/infer", *TEXTS),
    ("/infer/square", b"3", ""),
    ("/inference/square", b"3", ""),
    ("/infer/square", b"[1,2]", "X-Explain: 0\r\n"),
    ("/infer/square", b"not json", ""),
    ("/infer/square", b"", ""),
    ("/infer/square", b"3", "X-Request-Id: mine\r\n"),
    ("/infer/square", b"3", "Content-Type: text/strange\r\n"),
    ("/infer/square", b"3", "X-Request-Timeout: never\r\n"),
    ("/infer/square", b"3", "Accept: application/msgpack\r\n"),
    ("/infer/square/batch", b"[1,2,3]", ""),
    ("/infer/nothing", b"3", ""),
    ("/infer/square", b" " * 40_000 + b"3", ""),
    ("/infer/square", b" " * 600_000 + b"3", "X-Explain: 0\r\n"),
    ("/infer/square", b" " * 600_000 + b"3", "Expect: 100-continue\r\n"),
    ("/infer/square", b"[" * 100_000, ""),
    ("/v2/models/add/infer", *binary(numpy.ones((20_000, 2), "<f4"))),
    ("/v2/models/mean/infer", *binary(numpy.ones((3, 20_000), "<f4"))),
    ("/v2/models/mean/infer", *binary(numpy.ones((1, 20_000), "<f4"), **ALL_BINARY)),
    ("/v2/models/mean/infer", *binary(numpy.ones((1, 20_000), "<f8"))),
    ("/v2/models/mean/infer", *binary(numpy.ones((1, 20_000), "<f4"), outputs=[{"name": "none"}])),
    ("/v2/models/mean/infer", numpy.ones((1, 20_000), "<f4").tobytes(), "Inference-Header-Content-Length: 0\r\n"),
    ("/v2/models/mean/infer", json.dumps(LONG).encode(), ""),
    ("/v2/models/mean/infer", json.dumps(LONG | ALL_BINARY).encode(), ""),
    ("/v2/models/mean/infer", json.dumps(LONG).encode()[:-9], ""),
    ("/infer/square", b" " * (1 << 21) + b"3", ""),
    ("/infer/measured", b"3", ""),
    ("/v2/models/add/infer", json.dumps(TENSORS).encode(), ""),
    ("/v2/models/add/infer", json.dumps(TENSORS | {"id": "mine", "parameters": {"priority": 1}}).encode(), ""),
    ("/v2/models/add/infer", json.dumps(TENSORS | {"outputs": [{"name": "sum", "parameters": {"binary_data": True}}]}).encode(), ""),
    ("/v2/models/add/infer", b'{"inputs": []}', ""),
    ("/v2/models/add/versions/7/infer", json.dumps(TENSORS).encode(), ""),
    ("/v2/models/square/infer", b'{"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["3"]}]}', ""),
    ("/infer/add", b'{"a": [[1, 2]]}', ""),
    ("/v2/nonsense", b"3", ""),
]  # fmt: skip


@pytest.mark.parametrize("path,body,headers", REQUESTS)
def test_a_response_is_that_of_one_front(served: Served, single: Served, path: str, body: bytes, headers: str) -> None:
    answers = []
    for each in (served, single):
        with Caller(each.url) as caller:
            for _ in range(2):  # the second request finds its head in the memo, or a connection that was handed over
                caller.send(path, body, headers=headers)
                status, fields, answered = caller.answer()
                if status == 100:
                    status, fields, answered = caller.answer()
                fields.pop("date", None)
                answers.append((status, fields, answered))
                if fields.get("connection") == "close":
                    break
    half = len(answers) // 2
    assert answers[:half] == answers[half:]


@pytest.mark.parametrize(
    "path,body,headers,answer",
    [
        ("/infer/square", b"3", "", b"9"),
        ("/v2/models/add/infer", json.dumps(TENSORS).encode(), "", b'"data":[3.0,7.0]'),
        ("/v2/models/add/infer", *binary(ROWS), b'"data":[3.0,7.0]'),
        ("/v2/models/add/infer", *binary(ROWS, **ALL_BINARY), numpy.array([3, 7], "<f4").tobytes()),
        ("/v2/models/add/infer", json.dumps(TENSORS | ALL_BINARY).encode(), "", numpy.array([3, 7], "<f4").tobytes()),
        ("/v2/models/texts/infer", *TEXTS, b"hihi\6\0\0\0youyou"),
        ("/infer/square", b" " * 600_000 + b"3", "", b"9"),
        (
            "/v2/models/mean/infer",
            *binary(numpy.ones((2, 20_000), "<f4"), **ALL_BINARY),
            numpy.ones(2, "<f4").tobytes(),
        ),
        ("/v2/models/mean/infer", json.dumps(LONG).encode(), "", b'"data":[1.5,1.5]'),
    ],
)
def test_a_front_keeps_the_connection_of_what_it_answers(
    served: Served, path: str, body: bytes, headers: str, answer: bytes
) -> None:
    front, _ = fronts_of(served)
    with calling(served, front) as caller:
        for _ in range(3):
            status, answered = caller.call(path, body, headers=headers)
            assert status == 200 and answer in answered
        assert owners(served, caller) == [front.pid]


def test_pipelined_requests_are_answered_in_order_across_a_hand_over(served: Served) -> None:
    assert squares_around_a_page(served.url) == [b"9", b"25"]


def test_streams_and_websockets_go_on_at_the_dispatcher(served: Served) -> None:
    with HttpClient(served.url) as client:
        assert list(client.stream("counts", 3)) == [0, 1, 2]
    with WebSocketClient(served.url) as client:
        arrays = client.infer("add", {"a": numpy.array([[1, 2], [3, 4]], numpy.float32)})
        assert arrays["sum"].tolist() == [3.0, 7.0]


def test_a_page_is_the_dispatchers(served: Served) -> None:
    for front in fronts_of(served):
        with calling(served, front) as caller:
            status, body = caller.call("/models", method="GET")
            assert status == 200 and b"square" in body
            assert caller.call("/infer/square", b"6") == (200, b"36")  # on the connection that was handed over


def test_requests_and_bytes_are_counted_once(served: Served) -> None:
    before = metrics_of(served)
    for front in fronts_of(served):
        with calling(served, front) as caller:
            for _ in range(5):
                caller.call("/infer/square", b"12")
            caller.call("/infer/square", b"3", headers="X-Request-Timeout: never\r\n")
    after = metrics_of(served)

    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert more("weir_requests_total", model="square", code="200") == 10
    assert more("weir_requests_rejected_total", model="square", error="InvalidRequest") == 2
    sent = total(before, "weir_sent_bytes_total", model="square")
    until(lambda: total(metrics_of(served), "weir_sent_bytes_total", model="square") >= sent + 10 * len(b"144"))


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
    first, second = fronts_of(served)

    def shown(name: str) -> dict[str, float]:
        return {front: total(metrics_of(served), f"weir_front_{name}", front=front) for front in ("0", "1")}

    before = shown("starts_total")
    with ExitStack() as stack:
        callers = [stack.enter_context(calling(served, each)) for each in (first, first, second)]
        for caller in callers:
            assert caller.call("/infer/square", b"3") == (200, b"9")
        until(lambda: sorted(shown("connections").values()) == [1, 2])
        assert all(shown("memory_bytes").values()) and set(shown("requests").values()) == {0}
    first.kill()
    until(lambda: sum(shown("starts_total").values()) == sum(before.values()) + 1)


def test_the_dashboard_has_a_row_for_each_front(served: Served) -> None:
    first, second = fronts_of(served)
    with calling(served, first) as caller, Caller(served.url) as watching:

        def rows() -> dict[int, Any]:
            shown = json.loads(watching.call("/dashboard/data", method="GET")[1])["now"]["fronts"]
            return {each["pid"]: each for each in shown}

        def worked() -> bool:
            assert caller.call("/infer/square", b"3") == (200, b"9")
            return bool(rows()[first.pid]["cpu"] > 0)

        until(worked)  # a front that has just started may have used less than the kernel counts
        # The connections of former tests are closed, and no request is under way in what was sampled.
        until(lambda: [rows()[first.pid][each] for each in ("connections", "requests")] == [1, 0])
        assert rows().keys() == {first.pid, second.pid}
        shown = rows()[first.pid]
    assert shown["starts"] >= 1 and shown["memory_bytes"] > 1 << 20


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


def test_the_access_log_is_that_of_the_server() -> None:
    with Served(SQUARE, "--fronts", 2, "--access-log") as served:
        served.until_ready()
        for front in fronts_of(served):
            with calling(served, front) as caller:
                caller.call("/infer/square", b"5", headers="X-Request-Id: a\r\n")
        lines = [served.until_logged(r"http .*path=/infer/square").string for _ in range(2)]
        assert all("client=127.0.0.1" in line and "status=200" in line and "bytes=2" in line for line in lines)


def test_the_requests_of_a_front_that_is_killed_are_withdrawn(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Served(*gate.arguments) as served, ExitStack() as stack:
        served.until_ready()
        first, second = fronts_of(served)
        other = stack.enter_context(calling(served, second))
        other.send("/infer/gated", b"1")
        gate.begun.read_text()
        lost = stack.enter_context(calling(served, first))
        lost.send("/infer/gated", b"2")
        until(lambda: total(metrics_of(served), "weir_waiting_requests", model="gated") == 1)
        first.kill()
        until(lambda: total(metrics_of(served), "weir_waiting_requests", model="gated") == 0)
        gate.open()
        assert other.answer()[2] == b"1"
        assert total(metrics_of(served), "weir_requests_cancelled_total", model="gated") == 1


def test_a_request_whose_caller_leaves_is_withdrawn(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Served(*gate.arguments) as served, Caller((served.until_ready()).url) as busy:
        busy.send("/infer/gated", b"1")
        gate.begun.read_text()
        with Caller(served.url) as caller:
            caller.send("/infer/gated", b"2")
            until(lambda: total(metrics_of(served), "weir_waiting_requests", model="gated") == 1)
        until(lambda: total(metrics_of(served), "weir_waiting_requests", model="gated") == 0)
        gate.open()
        assert busy.answer()[2] == b"1"


def test_a_request_expires_in_the_queue(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Served(*gate.arguments) as served, Caller((served.until_ready()).url) as busy:
        busy.send("/infer/gated", b"1")
        gate.begun.read_text()
        with Caller(served.url) as caller:
            assert caller.call("/infer/gated", b"2", headers="X-Request-Timeout: 0.1\r\n")[0] == 504
        gate.open()
        assert busy.answer()[2] == b"1"


def refused_or_closed(caller: Caller) -> bool:
    """Ask once more. A request that comes before the front knows of the drain is accepted, expires, and ends its connection."""
    try:
        return caller.call("/infer/gated", b"2", headers="X-Request-Timeout: 0.2\r\n")[0] in (0, 503)
    except OSError:
        return True


def refused_at_once(served: Served) -> bool:
    """Ask on a new connection, which may be that of any front."""
    with Caller(served.url) as late:
        late.send("/infer/gated", b"3", headers="X-Request-Timeout: 0.2\r\n")
        status, headers, _ = late.answer()
    return status == 503 and headers["connection"] == "close"


def test_a_drain_answers_what_was_accepted_and_refuses_the_rest(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Served(*gate.arguments) as served, ExitStack() as stack:
        served.until_ready()
        callers = [stack.enter_context(calling(served, front)) for front in fronts_of(served)]
        callers[0].send("/infer/gated", b"1")
        gate.begun.read_text()
        served.signal(signal.SIGTERM)
        served.until_logged("draining")
        until(lambda: refused_or_closed(callers[1]))
        until(lambda: refused_at_once(served))
        gate.open()
        assert callers[0].answer()[2] == b"1"
        assert served.wait() == 0


def test_fronts_end_with_their_dispatcher() -> None:
    with Served(SQUARE, "--fronts", 2) as served:
        served.until_ready()
        fronts = fronts_of(served)
        served.process.kill()
        assert not still_running(fronts)


ADDS = "import weir\nclass Model(weir.Model):\n    def predict(self, batch):\n        return [x + {} for x in batch]\n"


def test_a_reload_reaches_all_fronts(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(ADDS.format(1))
    with Served(f"{file}:Model", "--fronts", 2, env={"PYTHONDONTWRITEBYTECODE": "1"}) as served, ExitStack() as stack:
        served.until_ready()
        callers = [stack.enter_context(calling(served, front)) for front in fronts_of(served)]
        control = stack.enter_context(Caller(served.url))
        assert [caller.call("/infer/model", b"1") for caller in callers] == [(200, b"2")] * 2
        file.write_text(ADDS.format(100))
        assert control.call("/v2/repository/models/model/load")[0] == 200
        assert [caller.call("/infer/model", b"1") for caller in callers] == [(200, b"101")] * 2
        assert control.call("/v2/repository/models/model/unload")[0] == 200
        assert [caller.call("/infer/model", b"1")[0] for caller in callers] == [404] * 2
        assert control.call("/v2/repository/models/model/load")[0] == 200
        assert [caller.call("/infer/model", b"1") for caller in callers] == [(200, b"101")] * 2


def test_reloads_under_load_lose_no_request_and_mix_no_answers(tmp_path: Path) -> None:
    """What is asked after a load call has been answered is answered by the new model; all else by the old or the new one, whole."""
    file, adds = (
        tmp_path / "model.py",
        [1],
    )  # what the model adds, from its first version to the one that is about to be loaded
    file.write_text(ADDS.format(1))
    done = 0  # the last version whose load call has been answered

    def is_right(caller: Caller, number: int) -> bool:
        least = done
        if number % 5:
            status, body = caller.ask("/infer/model", b"%d" % number)
            added = {int(body) - number} if status == 200 else set()
        else:  # the dispatcher's
            status, body = caller.ask("/infer/model/batch", b"[%d,%d]" % (number, number))
            added = {each["output"] - number for each in json.loads(body)} if status == 200 else set()
        return len(added) == 1 and added <= set(adds[least:])

    with Served(f"{file}:Model", "--fronts", 2, env={"PYTHONDONTWRITEBYTECODE": "1"}) as served:
        served.until_ready()
        with Callers(served, 6, is_right) as callers, Caller(served.url) as control:
            for version in range(1, 6):
                callers.until_more(100)
                adds.append(10_000 * version)
                file.write_text(ADDS.format(adds[-1]))
                assert control.call("/v2/repository/models/model/load")[0] == 200
                done = version
            callers.until_more(100)
        assert callers.wrong == [] and callers.lost == 0 and all(callers.answered)


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


def admitted(served: Served, path: str = "/infer/square", method: str = "POST") -> bool:
    with Caller(served.url) as caller:
        return caller.call(path, b"2" if method == "POST" else b"", method)[0] == 200


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


def test_bad_settings_are_refused_by_one_line(tmp_path: Path) -> None:
    for arguments, says in (
        (("--fronts", 0), "must be 1 or more, or auto"),
        (("--fronts", "many"), "must be 1 or more, or auto"),
        (
            ("--fronts", 2, "--tls-certfile", tmp_path / "certificate"),
            "not a usable certificate and key: [Errno 2] No such file or directory",
        ),
    ):
        done = weir_here("serve", SQUARE, "--port", 0, *arguments)
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


def test_a_unix_socket_of_another_server_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        done = weir_here("serve", SQUARE, "--fronts", 2, "--uds", path)
    assert done.returncode == 2 and "cannot listen there: Address already in use" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_of_another_server_is_an_error(shared: bool) -> None:
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = weir_here("serve", SQUARE, "--port", port, "--fronts", 2)
    assert done.returncode == 2 and f"port={port}: cannot listen there: Address already in use" in done.stderr


def test_more_fronts_than_cpus_are_warned_of() -> None:
    with Served(SQUARE, "--fronts", (os.cpu_count() or 1) + 1) as served:
        served.until_logged("more fronts than CPUs")
        served.until_ready()
        with Caller(served.url) as caller:
            assert caller.call("/infer/square", b"2") == (200, b"4")
