"""What happens to requests that the server cannot take or finish, through every frontend."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.fakes import RecordingObserver
from tests.frontends.http.models import Echo, Moody, Square
from tests.frontends.http.servers import Running, Serve, running

from weir.catalog.registry import Registry
from weir.errors import Cancelled
from weir.protocols import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeClock, FakeExecutor

POST = b"POST /infer/square HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"


def stuck(**settings: Any) -> tuple[Service, FakeExecutor]:
    """A service whose batches wait for the test to answer them."""
    executor = FakeExecutor()
    return Service(Square, executor=executor, **settings), executor


def square_all(server: Running, executor: FakeExecutor) -> None:
    server.until(lambda: bool(executor.pending))
    server.call(executor.respond_next, lambda payloads: [str(int(each) ** 2).encode() for each in payloads])


def refusal(answer: httpx.Response) -> tuple[int, str, bool]:
    """Return the status and the type of an error, and whether it says when to try again."""
    return answer.status_code, answer.json()["error"]["type"], int(answer.headers.get("retry-after", 0)) >= 1


def test_a_full_line_answers_429_with_retry_after(serve: Serve) -> None:
    service, executor = stuck(max_batch_size=1, max_queue_size=2)
    server = serve(service)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.client.post, "/infer/square", json=1)]
        server.until(lambda: bool(executor.pending))
        waiting += [pool.submit(server.client.post, "/infer/square", json=2)]
        server.until(lambda: service.state()["waiting"] == 1)
        as_a_whole = server.client.post("/infer/square/batch", json=[3, 4])
        waiting += [pool.submit(server.client.post, "/infer/square", json=3)]
        server.until(lambda: service.state()["waiting"] == 2)
        for refused in (as_a_whole, server.client.post("/infer/square", json=4)):
            assert refusal(refused) == (429, "Overloaded", True)
        for _ in waiting:
            square_all(server, executor)
        assert sorted(each.result().json() for each in waiting) == [1, 4, 9]


def test_a_deadline_that_passes_answers_504(serve: Serve) -> None:
    clock = FakeClock(time.monotonic())  # as fronts have it
    service, executor = stuck(clock=clock)
    server = serve(service)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client.post, "/infer/square", json=3, headers={"x-request-timeout": "5"})
        server.until(lambda: len(executor.pending) == 1)
        server.call(clock.advance, 60.0)
        assert refusal(waiting.result()) == (504, "DeadlineExceeded", False)


def test_a_model_that_is_not_ready_answers_503_and_says_why(serve: Serve) -> None:
    service, executor = stuck()
    server = serve(service)
    server.call(executor.lose, 0)
    server.call(executor.end, "its last worker fell asleep")
    answer = server.client.post("/infer/square", json=3)
    assert refusal(answer) == (503, "ModelNotReady", True)
    assert answer.json()["error"]["model"] == "square" and "fell asleep" in answer.json()["error"]["message"]
    ready = server.client.get("/health/ready")
    assert ready.status_code == 503 and "fell asleep" in ready.text
    assert server.client.get("/health/live").status_code == 200


def test_a_draining_server_answers_503_and_finishes_what_it_took(serve: Serve) -> None:
    service, executor = stuck()
    server = serve(service)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.client.post, "/infer/square", json=3)
        server.until(lambda: bool(executor.pending))
        draining = server.start(service.drain(30))
        server.until(lambda: service.draining)
        assert refusal(server.client.post("/infer/square", json=4)) == (503, "Draining", True)
        assert server.client.get("/health/ready").status_code == 503
        square_all(server, executor)
        assert accepted.result().json() == 9
        draining.result(60)


def test_a_traceback_reaches_callers_only_in_development(serve: Serve, all_models: Running) -> None:
    hidden = all_models.client.post("/infer/moody", json="explode")
    shown = serve(Service(Moody, executor="inline"), development=True).client.post("/infer/moody", json="explode")
    assert (hidden.status_code, shown.status_code) == (500, 500)
    assert "Traceback" not in hidden.text
    assert "Traceback" in shown.json()["error"]["details"]["traceback"]
    assert hidden.json()["error"]["details"]["original_type"].endswith("KeyError")


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_a_client_that_leaves_has_its_request_cancelled(serve: Serve, stage: str) -> None:
    observer = RecordingObserver()
    service, executor = stuck(max_batch_size=1, observers=[observer])
    server = serve(service)
    with ThreadPoolExecutor(1) as pool:
        if stage == "waiting":
            neighbour = pool.submit(server.client.post, "/infer/square", json=2)
            server.until(lambda: len(executor.batches) == 1)
        with server.connect() as connection:
            connection.sendall(POST + b"3")
            server.until(lambda: len(executor.batches) == 1 and service.state()["waiting"] == (stage == "waiting"))
        server.until(lambda: any(isinstance(error, Cancelled) for _, error, _ in observer.responses))
        if stage == "waiting":
            square_all(server, executor)
            assert neighbour.result().json() == 4
        assert len(executor.batches) == 1
    assert server.client.get("/health/live").status_code == 200


def test_an_output_that_is_no_bytes_is_our_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry([Service(Echo, executor=FakeExecutor(lambda items: [5 for _ in items]))])
    with running("asgi", registry, HttpSettings()) as server:
        answer = server.client.post("/infer/echo", json=1, headers={"accept": "application/octet-stream"})
        assert refusal(answer) == (500, "InternalError", False)
        assert "cannot be written" in caplog.text
        assert server.client.post("/infer/echo", json=1).json() == 5
