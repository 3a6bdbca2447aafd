"""What happens to requests that the server cannot take or finish, through every frontend."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.frontends.http.models import Echo, Moody, Square
from tests.frontends.http.servers import Running, Serve, running

from weir import errors
from weir.catalog.registry import Registry
from weir.messages import EventKind, Events, Timing
from weir.protocols import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeClock, FakeExecutor, RecordingObserver

POST = b"POST /infer/square HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"


def stuck(**settings: Any) -> tuple[Service, FakeExecutor]:
    """A service whose batches wait for the test to answer them."""
    executor = FakeExecutor()
    return Service(Square, executor=executor, **settings), executor


def square_all(server: Running, executor: FakeExecutor) -> None:
    server.call(executor.answer_next, lambda payloads: [str(int(each) ** 2).encode() for each in payloads])


def test_a_full_line_answers_429_with_retry_after(serve: Serve) -> None:
    service, executor = stuck(max_batch_size=1, max_queue_size=2)
    server = serve(service)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.client.post, "/infer/square", json=1)]
        server.until(lambda: bool(executor.pending))
        waiting += [pool.submit(server.client.post, "/infer/square", json=each) for each in (2, 3)]
        server.until(lambda: service.state()["waiting"] == 2)
        refused = server.client.post("/infer/square", json=4)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "Overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        for _ in waiting:
            server.until(lambda: bool(executor.pending))
            square_all(server, executor)
        assert sorted(each.result().json() for each in waiting) == [1, 4, 9]


def test_a_deadline_that_passes_answers_504(serve: Serve) -> None:
    clock = FakeClock()
    service, executor = stuck(clock=clock)
    server = serve(service)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client.post, "/infer/square", json=3, headers={"x-request-timeout": "5"})
        server.until(lambda: len(executor.pending) == 1)
        server.call(clock.advance, 5.1)
        answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "DeadlineExceeded")


def test_a_model_that_is_not_ready_answers_503_and_says_why(serve: Serve) -> None:
    service, executor = stuck()
    server = serve(service)
    server.call(executor.lose, 0)
    server.call(executor.end, "its last worker fell asleep")
    answer = server.client.post("/infer/square", json=3)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["model"]) == (503, "ModelNotReady", "square")
    assert "fell asleep" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    ready = server.client.get("/health/ready")
    assert ready.status_code == 503
    assert "fell asleep" in ready.text
    assert server.client.get("/health/live").status_code == 200


def test_a_draining_server_answers_503_and_finishes_what_it_took(serve: Serve) -> None:
    service, executor = stuck()
    server = serve(service)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.client.post, "/infer/square", json=3)
        server.until(lambda: bool(executor.pending))
        draining = server.start(service.drain(30))
        server.until(lambda: service.draining)
        refused = server.client.post("/infer/square", json=4)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Draining")
        assert "retry-after" in refused.headers
        assert server.client.get("/health/ready").status_code == 503
        square_all(server, executor)
        assert accepted.result().json() == 9
        draining.result(60)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.WorkerLost("gone"), 503), (errors.ModelCrashed("crashed"), 500), (errors.Unsupported("no"), 501),
        (errors.Conflict("two"), 409), (errors.ModelError("raised", original_type="x.Y", remote_traceback="secret"), 500),
        (errors.ValidationFailed("wrong \ud800", details=[{"nan": float("nan"), "object": {1}}]), 422),
    ],
)  # fmt: skip
def test_every_error_of_a_worker_has_its_code(serve: Serve, error: errors.WeirError, code: int) -> None:
    server = serve(Service(Square, executor=FakeExecutor(lambda items: [error for _ in items])))
    answer = server.client.post("/infer/square", json=3)
    assert (answer.status_code, answer.json()["error"]["type"]) == (code, type(error).__name__)
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (code == 503)


def test_a_traceback_reaches_callers_only_in_development(serve: Serve) -> None:
    strict, open_hearted = Service(Moody, executor="inline"), Service(Moody, executor="inline")
    hidden = serve(strict).client.post("/infer/moody", json="explode")
    shown = serve(open_hearted, development=True).client.post("/infer/moody", json="explode")
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
            connection.sendall(POST + b"\r\n3")
            if stage == "waiting":
                server.until(lambda: service.state()["waiting"] == 1)
            else:
                server.until(lambda: len(executor.batches) == 1)
        server.until(lambda: any(isinstance(error, errors.Cancelled) for _, error, _ in observer.answers))
        if stage == "waiting":
            square_all(server, executor)
            assert neighbour.result().json() == 4
        assert len(executor.batches) == 1
    assert server.client.get("/health/live").status_code == 200


def test_the_answer_to_a_client_that_left_moves_no_neighbour(serve: Serve) -> None:
    service, executor = stuck(policy="full", max_batch_size=3, max_queue_delay=20)
    server = serve(service)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.client.post, "/infer/square", json=1)
        server.until(lambda: service.state()["waiting"] == 1)
        with server.connect() as leaver:
            leaver.sendall(POST + b"\r\n2")
            server.until(lambda: service.state()["waiting"] == 2)
            last = pool.submit(server.client.post, "/infer/square", json=3)
            server.until(lambda: bool(executor.pending))
        server.until(lambda: bool(executor.cancelled))
        square_all(server, executor)
        assert (first.result().json(), last.result().json()) == (1, 9)


def test_observers_hear_of_bytes_and_refusals(serve: Serve) -> None:
    observer = RecordingObserver()
    server = serve(Service(Echo, executor="inline", observers=[observer]))
    server.client.post("/infer/echo", content=b'"hello"')
    server.client.post("/infer/echo", content=b"1", headers={"accept": "image/png"})
    server.client.post("/infer/echo", content=b"")
    server.client.get("/")  # whoever asks hears everything up to now: the fast path tells of bytes in bulk
    assert observer.transfers[0] == ("echo", "http", 7, 7)
    kinds = [(model, frontend, type(error)) for model, frontend, error in observer.refusals]
    assert kinds == [("echo", "http", errors.UnsupportedMediaType), ("echo", "http", errors.InvalidRequest)]
    assert observer.ends == 1


def test_a_batch_refused_as_a_whole_has_one_error(serve: Serve) -> None:
    service, executor = stuck(max_batch_size=1, max_queue_size=2)
    server = serve(service)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.client.post, "/infer/square", json=each) for each in (1, 2)]
        server.until(lambda: bool(executor.pending) and service.state()["waiting"] == 1)
        refused = server.client.post("/infer/square/batch", json=[3, 4])
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "Overloaded")
        for _ in waiting:
            server.until(lambda: bool(executor.pending))
            square_all(server, executor)


def test_events_may_come_in_any_order(serve: Serve) -> None:
    service, executor = stuck(policy="full", max_batch_size=2, max_queue_delay=20)
    server = serve(service)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.client.post, "/infer/square", json=1)
        server.until(lambda: service.state()["waiting"] == 1)
        second = pool.submit(server.client.post, "/infer/square", json=2)
        server.until(lambda: bool(executor.pending))
        (worker, batch), done = executor.pending[0], [EventKind.DONE]
        events = [
            Events(batch.batch_id, [b"4"], indices=[1], kinds=done, final=False),
            Events(batch.batch_id, [b"1"], indices=[0], kinds=done, timing=Timing(0.0, 0.0, 0.0)),
        ]
        for each in events:
            server.call(executor.reply, worker, each)
        assert (first.result().json(), second.result().json()) == (1, 4)


def test_an_output_that_is_no_bytes_is_our_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry([Service(Echo, executor=FakeExecutor(lambda items: [5 for _ in items]))])
    with running("asgi", registry, HttpSettings()) as server:
        answer = server.client.post("/infer/echo", json=1, headers={"accept": "application/octet-stream"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalError")
        assert "cannot be written" in caplog.text
        assert server.client.post("/infer/echo", json=1).json() == 5
