"""Binary tensors on the fast path: not copied, and what comes again is not read again.

The request that the batcher knows.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import SpanProcessor
from tests.fakes import RecordingObserver
from tests.frontends.http.fast.kit import answers, post, settled, site
from tests.frontends.http.servers import Running, running
from tests.garbage import no_cycles_of
from tests.protocols.kserve.models import Vector, Where

from weir.batching.request_state import RequestBase
from weir.catalog.registry import Registry
from weir.client import HttpClient
from weir.errors import InvalidRequest, Overloaded
from weir.frontends.http.fast import inference as tested
from weir.frontends.http.fast.connection import Connection
from weir.frontends.http.fast.inference import HttpRequest, KserveRequest
from weir.frontends.http.fast.plan import HeadReader, make_plan
from weir.messages import MSGPACK, Dispatch
from weir.protocols import HttpSettings
from weir.protocols import kserve as layouts
from weir.protocols.access import Access
from weir.protocols.call import InferenceCall
from weir.protocols.entries import item_entry
from weir.serving.service import Service
from weir.telemetry.tracing import Tracing

LARGE = 50_000


@contextmanager
def serving(service: Service, **settings: Any) -> Iterator[Running]:
    """Serve on the fast path."""
    with running("fastlane", Registry([service]), HttpSettings(port=0, **settings)) as server:
        yield server


def binary(x: Any) -> dict[str, Any]:
    """Return content and headers of a request with `x` as binary data, that asks for such answers."""
    size = {"binary_data_size": x.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": size}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return {"content": header + x.tobytes(), "headers": {"inference-header-content-length": str(len(header))}}


def infer(server: Running, x: Any, outputs: Any = None, **parameters: Any) -> Any:
    """Ask with binary data; return the outputs by name."""
    [name] = server.registry.services
    with HttpClient(server.url) as client:
        return client.infer(name, {"x": x}, outputs=outputs, parameters=parameters)


def test_a_large_input_is_read_where_it_was_received() -> None:
    """One request is the batch: its array lies in the worker's mapping of the arena, in the place that the socket wrote."""
    x = np.arange(LARGE, dtype=np.float32).reshape(1, LARGE)
    with serving(Service(Where, max_batch_size=1)) as server:
        for _ in range(4):
            found = infer(server, x)
            assert found["shared"].all() and found["aligned"].all() and found["sum"].tolist() == [x.sum(dtype=float)]
        service = server.registry.services["where"]
        gauges = server.call(service.state)["gauges"]
        assert gauges["arena_free_bytes"] == gauges["arena_bytes"]  # every place has been given back


def test_a_long_reply_for_which_there_is_no_room_is_refused() -> None:
    x = np.ones((1, 100_000), np.float32)
    observer = RecordingObserver()
    with serving(Service(Vector, executor="inline", observers=[observer]), max_waiting_bytes=600_000) as server:
        for _ in range(4):
            assert infer(server, x, ["sum"])["sum"].tolist() == [x.sum()]
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                infer(server, x, ["twice"])
    assert observer.kinds == {"": 4, "Overloaded": 12}  # the client tries each three times


def test_a_reply_that_a_thread_cannot_write_is_no_second_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(*_: Any) -> Any:
        assert threading.current_thread().name.startswith("weir-write")
        raise InvalidRequest("the region is too short")

    monkeypatch.setattr(tested, "reply_to", reply)
    observer, asked = RecordingObserver(), binary(np.ones((1, 100_000), np.float32))
    asked["content"] = asked["content"].replace(b'"binary_data_output": true', b'"binary_data_output":false')
    with serving(Service(Vector, executor="inline", observers=[observer])) as server:
        answer = server.client.post("/v2/models/vector/infer", **asked)
        assert (answer.status_code, "too short" in answer.json()["error"]) == (400, True)
    assert observer.kinds == {"": 1}  # counted when the model had responded


def test_several_requests_are_gathered() -> None:
    x = np.ones((2, LARGE), np.float32)
    with serving(Service(Where, max_batch_size=8, policy="control-limit:4")) as server, ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda times: infer(server, x * times)["sum"].tolist(), (1, 2))
        assert list(found) == [[LARGE] * 2, [2 * LARGE] * 2]


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("outputs", [None, ["sum"], ["twice", "sum"]])
def test_what_comes_again_is_answered_the_same(size: int, outputs: list[str] | None) -> None:
    with serving(Service(Vector, executor="inline")) as server:
        for step in range(5):
            x = np.full((2, size), step, np.float32)
            found = infer(server, x, outputs, priority=1, timeout=9_000_000)
            assert list(found) == [each for each in ("sum", "twice") if each in (outputs or found)]
            assert found["sum"].tolist() == [step * size] * 2
            if "twice" in found:
                np.testing.assert_array_equal(found["twice"], x * 2)


def test_a_request_is_freed_without_the_garbage_collector() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    with serving(Service(Vector, executor="inline")) as server, no_cycles_of(KserveRequest, Dispatch):
        for step in range(5):
            infer(server, np.full((2, 3), step, np.float32))
            assert server.client.post("/v2/models/vector/infer", json={"inputs": [tensor]}).status_code == 200


def test_requests_of_one_length_and_several_shapes_are_told_apart() -> None:
    shapes = [np.ones((1, 4), np.float32), np.ones((4, 1), np.float32)]
    with serving(Service(Vector, executor="inline")) as server:
        for times in (3, 1, 1, 1):
            sums = [infer(server, x)["sum"].tolist() for x in shapes for _ in range(times)]
            assert sums == [[4]] * times + [[1, 1, 1, 1]] * times


def test_long_headers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts.Layout, "arrays", None)  # to be used by none
    with serving(Service(Vector, executor="inline")) as server:
        for _ in range(5):
            infer(server, np.ones((1, 4), np.float32), note="x" * 5000)


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_reply_that_comes_again_has_the_headers_of_its_own_request(
    coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatch, "started_for", lambda self, arrival: 1.5)
    request = binary(np.ones((1, 1000), np.float32))
    request["headers"]["accept-encoding"] = coding
    service = Service(Vector, executor="inline", observers=[Tracing(SpanProcessor())])
    with serving(service, compress_above=10) as server:
        spans = set()
        for _ in range(4):
            reply = server.client.post("/v2/models/vector/infer", **request)
            assert reply.headers.get("content-encoding", "identity") == coding
            assert reply.headers.get_list("x-start-time") == ["1.500000"]
            [span] = reply.headers.get_list("traceparent")
            spans.add(span)
        assert len(spans) == 4


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_compressed_request_is_answered_with_the_same_headers(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through ASGI."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1000], "data": [1.5] * 1000}
    body = json.dumps({"inputs": [tensor]}).encode()
    ways: list[tuple[bytes, dict[str, str]]] = [(body, {}), (gzip.compress(body), {"content-encoding": "gzip"})]
    with serving(Service(Vector, executor="inline"), compress_above=10) as server:
        for waited in (0.0, 1.5):
            if waited:  # woken so many seconds after each arrival
                monkeypatch.setattr(Dispatch, "woken_at", property(lambda self: 0.0, lambda self, value: None))
                monkeypatch.setattr(Dispatch, "started_for", lambda self, arrival: 1.5)
            replies = [
                server.client.post(
                    "/v2/models/vector/infer", content=content, headers={"accept-encoding": coding, **more}
                )
                for content, more in ways
            ]
            names = [{name for name in reply.headers if name != "date"} for reply in replies]
            assert names[0] == names[1]
            assert [reply.headers.get("x-start-time") for reply in replies] == [f"{waited:.6f}" if waited else None] * 2
            assert replies[0].json() == replies[1].json()


def test_outputs_of_other_shapes_are_written_anew() -> None:
    class Growing(Vector):
        def __init__(self) -> None:
            self.calls = 0

        def predict(self, batch: Any) -> Any:
            self.calls += 1
            count = len(batch["x"])
            return {"sum": np.zeros(count, np.float32), "twice": np.zeros((count, self.calls // 2), np.float32)}

    with serving(Service(Growing, name="vector", executor="inline")) as server:
        widths = [infer(server, np.ones((1, 4), np.float32))["twice"].shape[1] for _ in range(8)]
        assert widths == sorted(widths) and widths[-1] >= widths[0] + 3


async def test_a_lane_that_drains_says_so_as_the_protocol_does() -> None:
    async with site(model=Vector) as here:
        transport = here.connect()
        here.shared.drain()
        transport.receive(post(b'{"inputs": []}', path="/v2/models/square/infer"))
        await settled()
        [answer] = answers(transport.sent)
        assert answer.status == 503 and list(json.loads(answer.body)) == ["error"]


HEAD = b"POST /infer/square HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nX-Request-Priority: 4\r\nX-Batch-Key: k\r\nAccept: application/msgpack"


async def test_its_constructor_sets_what_that_of_a_queued_request_sets() -> None:
    async with site() as here:
        plan = make_plan(HeadReader().read(HEAD), here.shared.route_handlers, here.shared.settings, Access())
        request = HttpRequest(Connection(here.shared), plan, b"3")
        queued = RequestBase(*item_entry(plan.head, b"3"), here.service.now())
        assert (request.form.priority, request.form.key, request.form.accept) == (4, "k", MSGPACK)
        call = InferenceCall(here.shared.account, 1)
        for name, other in (*dict.fromkeys(RequestBase.__slots__, queued).items(), ("over", call), ("_stop", call)):
            assert getattr(request, name) == getattr(other, name), name
