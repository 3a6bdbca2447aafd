"""The pages of a server through every frontend of HTTP: state, health, metrics, and policies with their changes."""

import asyncio
import html
import re
from functools import cache
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.described import answer_faults, body_faults
from tests.frontends.http.models import Echo, Square
from tests.frontends.http.servers import Serve

import weir
from weir.catalog.registry import Registry
from weir.errors import Cancelled, DeadlineExceeded, ModelCrashed, Overloaded, WeirError, WorkerLost
from weir.frontends.http import openapi as documents
from weir.frontends.http.application import code_of, held, make_app, make_exposition
from weir.model import Model
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import ControlLimit
from weir.policy.solve.bank import Bank, solve_bank
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor


def squares(**settings: Any) -> Service:
    return Service(Square, executor=FakeExecutor(lambda items: [item * item for item in items]), **settings)


def wrong() -> Service:
    return Service(Square, name="wrong", executor=FakeExecutor(lambda items: [0 for _ in items]))


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_browser_gets_a_page_of_links_that_work_and_commands_to_try(serve: Serve) -> None:
    server = serve(Service(Priced, executor=FakeExecutor(lambda items: items)), Service(Echo, executor=FakeExecutor()))
    page = server.client.get("/", headers={"Accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    base = str(server.client.base_url).rstrip("/")
    assert html.unescape(page.text).count(f"curl -d '\"<b>\"' {base}/infer/priced</pre>") == 1
    assert "<b>" not in page.text
    links = re.findall(r'href="(http[^"]+)"', page.text)
    assert {link.removeprefix(base) for link in links} >= {"/docs", "/health", "/models/priced", "/models/echo"}
    for link in links:
        assert server.client.get(link).status_code == 200
    health = server.client.get("/health", headers={"Accept": BROWSER})
    assert '"ready": true' in html.unescape(health.text) and "<h2>/health</h2>" in health.text
    for accept in ("*/*", "application/json"):
        assert server.client.get("/", headers={"Accept": accept}).json()["server"] == "weir"


def test_refusals_of_pages_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette has a thread call a handler that is no coroutine: damaged requests would fill the pool."""

    async def main() -> list[int]:
        transport = httpx.ASGITransport(make_app(KserveContext(Registry([squares()]), HttpSettings())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.get(path)).status_code for path in ("/nothing", "/models/nothing", "/infer/square")]

    threads: list[Any] = []
    monkeypatch.setattr("anyio.to_thread.run_sync", threads.append)
    assert asyncio.run(main()) == [404, 404, 405]
    assert threads == []


class Priced(Model):
    """Prices things.

    This is how it works inside.
    """

    examples = ("<b>",)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def test_the_description_is_for_callers(serve: Serve) -> None:
    paths = serve(Service(Priced, executor=FakeExecutor())).client.get("/openapi.json").json()["paths"]
    run = paths["/infer/priced"]["post"]
    assert (run["summary"], run["description"]) == ("Run priced", "Prices things.")
    assert paths["/infer/priced/batch"]["post"]["summary"] == "Run priced on each item of a list"
    assert paths["/"]["get"]["summary"] == "List the models and pages"
    for path, calls in paths.items():
        for call in calls.values():
            assert len(call["summary"]) <= 80 and "\n" not in call["summary"], path


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
    assert ready == {"ready": True, "models": [{"name": "square", "ready": True, "reason": "", "workers": "1 of 1"}]}
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

    def test_are_not_let_in_by_default(self, serve: Serve) -> None:
        answer = serve(squares()).client.post("/infer/square", json=3, headers={"origin": "http://page.example"})
        assert "access-control-allow-origin" not in answer.headers

    def test_are_let_in_by_name(self, serve: Serve) -> None:
        server = serve(squares(), cors_origins=["http://page.example"])
        origin = {"origin": "http://page.example"}
        answer = server.client.post("/infer/square", json=3, headers=origin)
        assert (answer.json(), answer.headers["access-control-allow-origin"]) == (9, "http://page.example")
        assert "X-Batch-Size" in answer.headers["access-control-expose-headers"]
        refused = server.client.post("/infer/square", content=b"", headers=origin)
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        stranger = server.client.post("/infer/square", json=3, headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_applications_are_made_whole_before_the_first_request() -> None:
    # Starlette otherwise puts the parts together with the first request, while all others wait.
    app = make_app(KserveContext(Registry([]), HttpSettings()))
    layer: Any = app.middleware_stack
    found = [app]
    while layer is not None:
        found += [part for part in vars(layer).values() if isinstance(part, Starlette)]
        layer = getattr(layer, "app", None) or getattr(layer, "_app", None)
    assert len(found) == 2
    assert all(each.middleware_stack is not None for each in found)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(None, "200"), (Overloaded, "429"), (DeadlineExceeded, "504"), (WorkerLost, "503"), (ModelCrashed, "500"),
     (Cancelled, "499")],
)  # fmt: skip
def test_the_code_of_the_http_frontend_is_http_s(kind: type[WeirError] | None, code: str) -> None:
    assert code_of("http", kind) == code
    assert code_of("python", kind) == ("ok" if kind is None else kind.__name__)


def test_levels_are_those_of_the_running_models() -> None:
    async def shown() -> str:
        metrics, executor = Metrics(), FakeExecutor()
        service = weir.Service(Square, executor=executor, observers=[metrics], max_batch_size=2)
        exposition = make_exposition(metrics, weir.Registry([service]))
        await service.start()
        calls = [service.infer(n) for n in range(5)]
        await asyncio.sleep(0)
        text = exposition.render()[0].decode()
        for call in calls:
            call.cancel()
        await service.stop(0.0)
        return text

    text = asyncio.run(shown())
    assert 'weir_waiting_rows{model="square"} 3.0' in text
    assert 'weir_waiting_requests{model="square"} 3.0' in text
    assert 'weir_running_batches{model="square"} 1.0' in text
    assert 'weir_workers{model="square",state="ready"} 1.0' in text
    assert 'weir_worker_restarts_total{model="square"} 0.0' in text


@pytest.mark.parametrize(("version", "shown"), [("", ""), ("v2", ',version="v2"')])
def test_a_name_with_slashes_is_no_version(version: str, shown: str) -> None:
    metrics = Metrics()
    service = weir.Service(Square, name="acme/sq", version=version, executor=FakeExecutor())
    metrics.transferred(service.label, "http", 3, 4)
    registry = weir.Registry([service])
    exposition = make_exposition(metrics, registry)
    labels = f'frontend="http",model="acme/sq"{shown}'
    assert f"weir_received_bytes_total{{{labels}}} 3.0" in exposition.render()[0].decode()
    registry.remove("acme/sq")
    assert f"weir_received_bytes_total{{{labels}}} 3.0" in exposition.render()[0].decode()


def test_versions_of_a_model_are_distinguished() -> None:
    metrics = Metrics()
    services = [weir.Service(Square, name="sq", version=version, executor=FakeExecutor()) for version in ("1", "2")]
    metrics.transferred(services[0].label, "http", 3, 4)
    text = make_exposition(metrics, weir.Registry(services)).render()[0].decode()
    assert 'weir_received_bytes_total{frontend="http",model="sq",version="1"} 3.0' in text
    assert [f'weir_waiting_rows{{model="sq",version="{version}"}} 0.0' in text for version in ("1", "2", "3")] == [
        True, True, False,
    ]  # fmt: skip


def test_what_clients_hold_is_shown() -> None:
    account = Account(HttpSettings(max_waiting_bytes=100, max_connections=7))
    account.take(60)
    with pytest.raises(Overloaded):
        account.take(60)
    account.counters.append(lambda: 3)
    assert {name: value for _, name, _, value in held(account)} == {
        "weir_held_bytes": 60, "weir_max_held_bytes": 100, "weir_connections": 3, "weir_max_connections": 7,
        "weir_held_refusals": 1,
    }  # fmt: skip


PROFILE = Profile.linear(alpha_ms=0.02, tau0_ms=0.08, max_batch_size=4)


def test_a_rule_says_what_is_measured_and_nothing_else(serve: Serve) -> None:
    server = serve(squares(policy="control-limit:1"))
    for _ in range(3):
        assert server.client.post("/infer/square", json=3).status_code == 200
    policy = server.client.get("/models/square/policy").json()
    assert (policy["model"], policy["policy"], policy["workers"]) == ("square", "control-limit:1", 1)
    assert policy["table"] == {"index": None, "rate": None, "limit": 1}
    assert (policy["measured"]["requests"], policy["measured"]["batches"]) == (3, 3)
    assert 0.0 < policy["measured"]["response_time_ms"] < 300_000
    assert policy["rate"] == policy["measured"]["rate"] > 0.0
    assert set(policy["predicted"].values()) == {None}
    assert [policy[key] for key in ("capacity", "prices", "objective", "profile", "drift", "solved")] == [None] * 6
    assert policy["learning"] is False
    text = server.client.get("/models/square/policy", headers={"Accept": "text/plain"}).text
    assert text.startswith("model: square\npolicy: control-limit:1\n") and "\ntable:\n  limit: 1\n" in text


def test_a_policy_object_is_shown_by_what_it_is(serve: Serve) -> None:
    policy = serve(squares(policy=ControlLimit(3))).client.get("/models/square/policy").json()
    assert policy["policy"] == "ControlLimit(limit=3)"
    assert policy["table"]["limit"] is None  # nothing was decided yet


def test_of_no_model(serve: Serve) -> None:
    answer = serve(squares()).client.get("/models/cube/policy")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["model"]) == (404, "ModelNotFound", None)


class Hooked(Service):
    """Times with hooks in them are not held against the profile, which a fake executor does not keep to."""

    async def after_batch(self, results: list[Any]) -> list[Any]:
        return results


@cache
def bank() -> Bank:
    """Solved once: it never changes."""
    return solve_bank(PROFILE, Prices(1.0, 1.0), rates=[load * PROFILE.max_rate for load in (0.1, 0.5, 0.9)])


def solved(**settings: Any) -> Service:
    """A model whose tables are solved by real processes."""
    executor = FakeExecutor(lambda items: [item * item for item in items])
    policy = SolvedPolicy(bank())
    return Hooked(Square, executor=executor, policy=policy, max_batch_size=4, **settings)


def test_every_page_answers_as_the_description_says(serve: Serve) -> None:
    lost = FakeExecutor()
    models = [squares(), solved(name="dear"), wrong(), Service(Echo, executor=lost)]
    server = serve(*models, metrics=lambda accept: (b"# none\n", "text/plain; version=0.0.4"), liveness="models")
    client = server.client
    document = client.get("/openapi.json").json()
    client.post("/infer/dear/batch", json=[3] * 20)
    paths = [path for path, page in document["paths"].items() if page.get("get", {}).get("tags") == ["server"]]
    assert {"/", "/health/deep", "/models/{model}/policy", "/metrics", "/docs"} <= set(paths)
    for alive in (True, False):
        if not alive:
            server.call(lost.end, "no weights")
        for path in paths:
            for model in ("square", "dear", "cube") if "{model}" in path else ("",):
                answer = client.get(path.replace("{model}", model))
                content = document["paths"][path]["get"]["responses"].get(str(answer.status_code), {}).get("content")
                assert answer.headers["content-type"].startswith(tuple(content or ["application/json"])), path
                if "json" in answer.headers["content-type"]:
                    assert answer_faults(document, path, answer) == [], (path, answer.text)
    path = "/models/{model}/policy"
    for body in ({"energy_weight": 2.0, "latency_objective": None}, {"energy_weight": "2"}, {"energy": 2}):
        answer = client.put("/models/dear/policy", json=body)
        assert answer_faults(document, path, answer) == [], answer.text
        assert bool(body_faults(document, path, body, "put")) == (answer.status_code == 400)


def test_a_solved_policy_says_what_it_goes_by(serve: Serve) -> None:
    server = serve(solved())
    for _ in range(3):
        server.client.post("/infer/square/batch", json=[3] * 20)
    policy = server.client.get("/models/square/policy").json()
    assert policy["rate"] > 0.0
    assert policy["capacity"] == pytest.approx(25_000.0)
    assert policy["prices"] == {"latency_weight": 1.0, "energy_weight": 1.0, "reference_rate": None}
    assert policy["table"]["rate"] == policy["solved"]["rates"][policy["table"]["index"]]
    assert policy["table"]["limit"] == policy["solved"]["limits"][policy["table"]["index"]]
    assert policy["profile"]["service_time_ms"] == pytest.approx([0.1, 0.12, 0.14, 0.16])
    assert policy["measured"]["rows"] == 60
    assert policy["measured"]["power_w"] > 0.0
    assert policy["measured"]["cost"] == pytest.approx(
        policy["measured"]["response_time_ms"] + policy["measured"]["power_w"]
    )
    assert (policy["workers"], policy["solved"]["count"], policy["learning"]) == (1, 0, False)
    assert (policy["drift"], policy["objective"]) == ({"factor": 1.0}, None)


def test_prices_can_be_changed(serve: Serve) -> None:
    server = serve(solved())
    before = server.client.get("/models/square/policy").json()
    answer = server.client.put("/models/square/policy", json={"energy_weight": 500.0, "reference_rate": 100})
    assert answer.status_code == 200
    changed = answer.json()
    assert changed["prices"] == {"latency_weight": 1.0, "energy_weight": 500.0, "reference_rate": 100}
    assert changed["solved"]["reason"] == "prices"
    assert sum(changed["solved"]["limits"]) > sum(before["solved"]["limits"])  # energy is dear now: it waits for more
    assert server.client.get("/models/square/policy").json()["prices"] == changed["prices"]
    assert server.client.get("/models/square").json()["policy"]["resolves"] == {"prices": 1}


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        (b'{"energy_wait": 1}', 400, "InvalidRequest", "energy_wait: unknown field"),
        (b'{"self": 1}', 400, "InvalidRequest", "self: unknown field"),
        (b'{"energy_weight": "1"}', 400, "InvalidRequest", "energy_weight='1': must be a number"),
        (b"[1]", 400, "InvalidRequest", "body: must be a JSON object"),
        (b"", 400, "InvalidRequest", "body: must be application/json"),
        (b"{" * 70_000, 413, "TooLarge", "at most 65536 bytes"),
        (b'{"energy_weight": -1}', 422, "ValidationFailed", "energy_weight=-1"),
        (b'{"energy_weight": 0, "latency_weight": 0}', 422, "ValidationFailed", "must be greater than 0"),
        (b'{"latency_objective": "p99=0.05ms"}', 422, "ValidationFailed", "a row alone takes"),
    ],
)
def test_what_is_unsound_is_refused_with_the_reason(
    serve: Serve, body: bytes, status: int, kind: str, says: str
) -> None:
    server = serve(solved())
    answer = server.client.put("/models/square/policy", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["model"]) == (status, kind, "square")
    assert says in error["message"]
    policy = server.client.get("/models/square/policy").json()
    assert (policy["prices"]["energy_weight"], policy["solved"]["count"]) == (1.0, 0)


def test_a_rule_has_no_prices(serve: Serve) -> None:
    answer = serve(squares()).client.put("/models/square/policy", json={"energy_weight": 1.0})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "Conflict")
    assert "the policy of model 'square' is 'greedy'" in answer.json()["error"]["message"]


def test_other_methods_are_refused(serve: Serve) -> None:
    answer = serve(squares()).client.delete("/models/square/policy")
    assert (answer.status_code, answer.json()["error"]["details"]) == (405, {"allow": ["GET", "HEAD", "PUT"]})


def test_metrics_show_it(serve: Serve) -> None:
    metrics = Metrics()
    service, rule = solved(observers=[metrics]), squares(name="rule", observers=[metrics])
    server = serve(service, rule, metrics=make_exposition(metrics, Registry([service, rule])).render)
    for _ in range(3):
        server.client.post("/infer/square/batch", json=[3] * 20)
    server.client.put("/models/square/policy", json={"energy_weight": 2.0})
    text = server.client.get("/metrics").text
    assert 'weir_policy_resolves_total{model="square",reason="prices"} 1.0' in text
    assert 'weir_policy_drift{model="square"} 1.0' in text
    assert 'weir_policy_drift{model="rule"}' not in text
    for name in ("rate", "limit", "predicted_response_time_seconds", "predicted_power_watts"):
        assert f'weir_policy_{name}{{model="square"}}' in text


def test_the_description_is_made_once_for_the_models_that_there_are(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, describe = list[Any](), documents.openapi

    def counted(*arguments: Any, **named: Any) -> Any:
        made.append(arguments)
        return describe(*arguments, **named)

    monkeypatch.setattr(documents, "openapi", counted)
    server = serve(squares())
    first = server.client.get("/openapi.json").json()
    assert [server.client.get("/openapi.json").json() for _ in range(3)] == [first] * 3
    assert first["servers"] == [{"url": "."}]
    assert len(made) == 1
    server.call(server.registry.put, [Service(Echo, executor=FakeExecutor())])
    assert "/infer/echo" in server.client.get("/openapi.json").json()["paths"]
    assert len(made) == 2
