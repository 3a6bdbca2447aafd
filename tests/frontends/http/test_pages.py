"""What can be read of a server with GET, through every door."""

from typing import Any

import pytest
from starlette.applications import Starlette
from tests.frontends.http.doors import Serve
from tests.frontends.http.models import Echo, Square

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeExecutor


def squares(**settings: Any) -> Service:
    return Service(Square, executor=FakeExecutor(lambda items: [item * item for item in items]), **settings)


def wrong() -> Service:
    return Service(Square, name="wrong", executor=FakeExecutor(lambda items: [0 for _ in items]))


def test_the_index_says_what_there_is(serve: Serve) -> None:
    server = serve(squares(), Service(Echo, executor=FakeExecutor()), routes={"square": "/api/sq"})
    index = server.client.get("/").json()
    assert [model["name"] for model in index["models"]] == ["square", "echo"]
    assert index["models"][0]["paths"] == ["/infer/square", "/infer/square/batch", "/api/sq", "/api/sq/batch"]
    assert "/inference" not in str(index)
    assert "/metrics" not in index["pages"]
    for path in index["pages"]:
        if "{" not in path:
            assert server.client.get(path).status_code == 200


def test_health(serve: Serve) -> None:
    server = serve(squares())
    assert server.client.get("/health/live").json() == {"live": True}
    ready = server.client.get("/health/ready").json()
    assert ready == {"ready": True, "models": [{"name": "square", "ready": True, "reason": ""}]}
    deep = server.client.get("/health/deep").json()
    assert deep["healthy"] is True
    assert len(deep["models"][0]["examples"]) == 2
    assert server.client.head("/health/live").status_code == 200


@pytest.mark.parametrize("liveness", ["process", "models"])
def test_a_server_is_not_live_while_a_model_can_start_no_worker_if_that_counts(serve: Serve, liveness: str) -> None:
    executor = FakeExecutor(lambda items: items)
    server = serve(squares(), Service(Echo, executor=executor), liveness=liveness)
    live = {"live": True}
    assert server.client.get("/health/live").json() == server.client.get("/v2/health/live").json() == live
    server.call(executor.lose, 0)  # another is being started
    assert server.client.get("/health/live").json() == server.client.get("/v2/health/live").json() == live
    server.call(executor.end, "no weights")
    native, kserve = server.client.get("/health/live"), server.client.get("/v2/health/live")
    if liveness == "process":
        assert native.json() == kserve.json() == live
    else:
        assert (native.status_code, kserve.status_code) == (503, 503)
        assert native.json() == {"live": False, "models": {"echo": "no weights"}}
        assert kserve.json() == {"error": "not live: echo: no weights"}
    server.call(executor.revive, 0)
    assert server.client.get("/health/live").json() == server.client.get("/v2/health/live").json() == live
    assert server.client.post("/infer/echo", json="again").status_code == 200


def test_a_model_with_wrong_answers_is_not_healthy(serve: Serve) -> None:
    server = serve(squares(), wrong())
    answer = server.client.get("/health/deep")
    assert (answer.status_code, answer.json()["healthy"]) == (503, False)
    assert "retry-after" in answer.headers
    assert [model["healthy"] for model in answer.json()["models"]] == [True, False]
    assert server.client.get("/health/ready").status_code == 200


def test_the_state_of_a_model(serve: Serve) -> None:
    service = squares(max_batch_size=7)
    server = serve(service)
    server.client.post("/infer/square", json=3)
    state = server.client.get("/models/square").json()
    assert state["settings"]["max_batch_size"] == 7
    assert state["recent"][-1]["reason"] == "idle"
    assert state["workers"][0]["state"] == "ready"
    assert set(state) == set(server.call(service.state))
    assert server.client.get("/models").json()["models"][0]["name"] == "square"


def test_the_state_of_a_model_that_is_not_there(serve: Serve) -> None:
    answer = serve(squares()).client.get("/models/cube")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "ModelNotFound")
    assert "square" in answer.json()["error"]["message"]


def test_metrics_are_what_the_server_was_given(serve: Serve) -> None:
    def render(accept: str) -> tuple[bytes, str]:
        return f"# for {accept}\n".encode(), "text/plain; version=0.0.4"

    server = serve(squares(), metrics=render)
    answer = server.client.get("/metrics", headers={"accept": "text/plain"})
    assert (answer.text, answer.headers["content-type"]) == ("# for text/plain\n", "text/plain; version=0.0.4")
    assert "/metrics" in server.client.get("/").json()["pages"]


def test_without_metrics_there_is_no_such_page(serve: Serve) -> None:
    answer = serve(squares()).client.get("/metrics")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFound")


@pytest.mark.parametrize("path", ["/", "/models", "/health/live", "/docs"])
def test_pages_are_only_read(serve: Serve, path: str) -> None:
    answer = serve(squares()).client.post(path, content=b"1")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "MethodNotAllowed")
    assert answer.headers["allow"] == "GET, HEAD"
    assert ("GET / lists the paths that there are" in answer.text) == (path == "/")


def test_an_unknown_path_says_where_to_look(serve: Serve) -> None:
    answer = serve(squares()).client.get("/nowhere")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFound")
    assert "GET /" in answer.json()["error"]["message"]


def test_the_docs_page_needs_nothing_from_elsewhere(serve: Serve) -> None:
    answer = serve(squares()).client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text
    assert "https://" not in answer.text


def test_a_page_that_fails_says_nothing_of_itself(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def render(accept: str) -> tuple[bytes, str]:
        raise KeyError("secret")

    answer = serve(squares(), metrics=render).client.get("/metrics")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalError")
    assert "secret" not in answer.text
    assert "secret" in caplog.text


def test_pages_while_models_load(serve: Serve) -> None:
    """The server may listen before its models are ready."""
    server = serve(squares())
    server.run(server.registry.stop())
    assert server.client.get("/health/live").status_code == 200
    assert server.client.get("/health/ready").status_code == 503
    assert server.client.get("/health/deep").status_code == 503
    assert server.client.get("/models/square").json()["ready"] is False
    assert server.client.get("/openapi.json").status_code == 200


class TestCors:
    """Pages of other origins."""

    def test_are_not_let_in_unasked(self, serve: Serve) -> None:
        answer = serve(squares()).client.post("/infer/square", json=3, headers={"origin": "http://page.example"})
        assert "access-control-allow-origin" not in answer.headers

    def test_are_let_in_by_name(self, serve: Serve) -> None:
        server = serve(squares(), cors_origins=["http://page.example"])
        origin = {"origin": "http://page.example"}
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-explain"}
        preflight = server.client.options("/infer/square", headers=origin | asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        assert "x-explain" in preflight.headers["access-control-allow-headers"]
        answer = server.client.post("/infer/square", json=3, headers=origin)
        assert (answer.json(), answer.headers["access-control-allow-origin"]) == (9, "http://page.example")
        assert "X-Batch-Size" in answer.headers["access-control-expose-headers"]
        refused = server.client.post("/infer/square", content=b"", headers=origin)
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        stranger = server.client.post("/infer/square", json=3, headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_applications_are_made_whole_before_the_first_request() -> None:
    # Starlette otherwise puts the parts together with the first request, while all others wait.
    app = make_app(Registry([]), HttpSettings())
    layer: Any = app.middleware_stack
    found = [app]
    while layer is not None:
        found += [part for part in vars(layer).values() if isinstance(part, Starlette)]
        layer = getattr(layer, "app", None) or getattr(layer, "_app", None)
    assert len(found) == 2
    assert all(each.middleware_stack is not None for each in found)
