"""The pages of a server through every frontend of HTTP: state, health, metrics, and policies with their changes."""

import asyncio
import html
import re
from functools import cache
from typing import Any

import httpx
import pytest
from tests.described import answer_faults, body_faults
from tests.frontends.http.models import Echo, Square
from tests.frontends.http.servers import Running, Serve, refusal
from tests.tuning.banks import QuickSolver

import weir
from weir import tuning
from weir.catalog.registry import Registry
from weir.errors import Overloaded
from weir.frontends.http.application import held, make_app, make_exposition
from weir.model import Model
from weir.policy.cost import Prices, Profile
from weir.policy.decision import ControlLimit
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import Bank, solve_bank
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor

LIVE = {"live": True}
POLICY = "/models/{model}/policy"


def squares(**settings: Any) -> Service:
    return Service(Square, executor=FakeExecutor(lambda items: [item * item for item in items]), **settings)


def wrong(version: str = "") -> Service:
    return Service(Square, name="wrong", version=version, executor=FakeExecutor(lambda items: [0 for _ in items]))


def get(server: Running, path: str) -> Any:
    """Return the document at `path`."""
    return server.client.get(path).raise_for_status().json()


class Priced(Model):
    """Prices things.

    This is how it works inside.
    """

    examples = ("<b>",)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def test_a_browser_gets_a_page_of_links_that_work_and_commands_to_try(serve: Serve) -> None:
    server = serve(Service(Priced, executor=FakeExecutor(lambda items: items)), Service(Echo, executor=FakeExecutor()))
    browser = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
    page = server.client.get("/", headers=browser)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert html.unescape(page.text).count(f"curl -d '\"<b>\"' {server.url}/infer/priced</pre>") == 1
    assert "<b>" not in page.text
    links = re.findall(r'href="(http[^"]+)"', page.text)
    assert {link.removeprefix(server.url) for link in links} >= {"/docs", "/health", "/models/priced", "/models/echo"}
    assert {server.client.get(link).status_code for link in links} == {200}
    health = server.client.get("/health", headers=browser)
    assert '"ready": true' in html.unescape(health.text) and "<h2>/health</h2>" in health.text
    for accept in ("*/*", "application/json"):
        assert server.client.get("/", headers={"Accept": accept}).json()["server"] == "weir"
    docs = server.client.get("/docs")  # it needs nothing from elsewhere
    assert docs.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in docs.headers["content-security-policy"]
    assert "http://" not in docs.text and "https://" not in docs.text


async def test_refusals_of_pages_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette has a thread call a handler that is no coroutine: damaged requests would fill the pool."""
    threads: list[Any] = []
    monkeypatch.setattr("anyio.to_thread.run_sync", threads.append)
    transport = httpx.ASGITransport(make_app(KserveContext(Registry([squares()]), HttpSettings())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, status in (("/nothing", 404), ("/models/nothing", 404), ("/infer/square", 405)):
            assert (await client.get(path)).status_code == status
    assert threads == []


def test_the_description_is_for_callers_and_of_the_models_that_there_are(serve: Serve) -> None:
    server = serve(Service(Priced, executor=FakeExecutor()))
    document = get(server, "/openapi.json")
    paths = document["paths"]
    run = paths["/infer/priced"]["post"]
    assert (run["summary"], run["description"]) == ("Run priced", "Prices things.")
    assert paths["/infer/priced/batch"]["post"]["summary"] == "Run priced on each item of a list"
    assert paths["/"]["get"]["summary"] == "List the models and pages"
    assert document["servers"] == [{"url": "."}]
    for path, calls in paths.items():
        for call in calls.values():
            assert len(call["summary"]) <= 80 and "\n" not in call["summary"], path
    assert get(server, "/openapi.json") == document
    server.call(server.registry.put, [Service(Echo, executor=FakeExecutor())])
    assert "/infer/echo" in get(server, "/openapi.json")["paths"]


def test_the_index_says_what_there_is(serve: Serve) -> None:
    server = serve(squares(), Service(Echo, executor=FakeExecutor()), routes={"square": "/api/sq"})
    index = get(server, "/")
    assert [model["name"] for model in index["models"]] == ["square", "echo"]
    assert index["models"][0]["paths"] == ["/infer/square", "/infer/square/batch", "/api/sq", "/api/sq/batch"]
    assert "/inference" not in str(index) and "/metrics" not in index["pages"]
    for path in index["pages"]:
        if "{" not in path:
            assert server.client.get(path).status_code == 200


def test_health_and_the_state_of_a_model(serve: Serve) -> None:
    service = squares(max_batch_size=7)
    server = serve(service)
    assert get(server, "/health/live") == LIVE
    ready = {"name": "square", "ready": True, "reason": "", "workers": "1 of 1"}
    assert get(server, "/health/ready") == {"ready": True, "models": [ready]}
    deep = get(server, "/health/deep")
    assert deep["healthy"] is True and len(deep["models"][0]["examples"]) == 2
    assert server.client.head("/health/live").status_code == 200
    server.client.post("/infer/square", json=3)
    state = get(server, "/models/square")
    assert state["settings"]["max_batch_size"] == 7
    assert (state["recent"][-1]["reason"], state["workers"][0]["state"]) == ("idle", "ready")
    assert set(state) == set(server.call(service.state))
    assert get(server, "/models")["models"][0]["name"] == "square"
    server.run(server.registry.stop())  # it may listen before its models are ready
    for path, status in (("live", 200), ("ready", 503), ("deep", 503)):
        assert server.client.get(f"/health/{path}").status_code == status
    assert get(server, "/models/square")["ready"] is False
    assert server.client.get("/openapi.json").status_code == 200


@pytest.mark.parametrize("liveness", ["process", "models"])
def test_a_server_is_not_live_while_a_model_has_no_worker_if_that_counts(serve: Serve, liveness: str) -> None:
    executor = FakeExecutor(lambda items: items)
    server = serve(squares(), Service(Echo, executor=executor), liveness=liveness)
    assert get(server, "/health/live") == get(server, "/v2/health/live") == LIVE
    server.call(executor.lose, 0)  # another is being started
    assert get(server, "/health/live") == get(server, "/v2/health/live") == LIVE
    server.call(executor.end, "no weights")
    native, kserve = server.client.get("/health/live"), server.client.get("/v2/health/live")
    if liveness == "process":
        assert native.json() == kserve.json() == LIVE
    else:
        assert (native.status_code, kserve.status_code) == (503, 503)
        assert native.json() == {"live": False, "models": {"echo": "no weights"}}
        assert kserve.json() == {"error": "not live: echo: no weights"}
    server.call(executor.revive, 0)
    assert get(server, "/health/live") == get(server, "/v2/health/live") == LIVE
    assert server.client.post("/infer/echo", json="again").status_code == 200


def test_a_model_with_wrong_answers_is_not_healthy(serve: Serve) -> None:
    server = serve(squares(), wrong("2"), wrong("1"))
    answer = server.client.get("/health/deep")
    assert (answer.status_code, answer.json()["healthy"]) == (503, False)
    assert "retry-after" in answer.headers
    page = server.client.get("/health/deep", headers={"Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html") and "retry-after" in page.headers
    healthy = {model["model"]: model["healthy"] for model in answer.json()["models"]}
    assert healthy == {"square": True, "wrong/2": False, "wrong/1": False}
    assert server.client.get("/health/ready").status_code == 200


def test_what_pages_refuse(serve: Serve) -> None:
    server = serve(squares())
    for path in ("/models/cube", "/models/cube/policy"):
        answer = server.client.get(path)
        assert refusal(answer) == (404, "ModelNotFound")
        assert "square" in answer.json()["error"]["message"] and answer.json()["error"]["model"] is None
    for path in ("/", "/models", "/health/live", "/docs"):
        answer = server.client.post(path, content=b"1")
        assert (*refusal(answer), answer.headers["allow"]) == (405, "MethodNotAllowed", "GET, HEAD")
        assert ("GET / lists the paths that there are" in answer.text) == (path == "/")
    for path in ("/nowhere", "/metrics"):  # it was given none
        answer = server.client.get(path)
        assert refusal(answer) == (404, "NotFound") and "GET /" in answer.json()["error"]["message"]
    answer = server.client.delete("/models/square/policy")
    assert (answer.status_code, answer.json()["error"]["details"]) == (405, {"allow": ["GET", "HEAD", "PUT"]})
    answer = server.client.put("/models/square/policy", json={"energy_weight": 1.0})
    assert refusal(answer) == (409, "Conflict")
    assert "the policy of model 'square' is 'greedy'" in answer.json()["error"]["message"]


def test_metrics_are_what_the_server_was_given(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def render(accept: str) -> tuple[bytes, str]:
        if accept == "fail":
            raise KeyError("secret")
        return f"# for {accept}\n".encode(), "text/plain; version=0.0.4"

    server = serve(squares(), metrics=render)
    answer = server.client.get("/metrics", headers={"accept": "text/plain"})
    assert (answer.text, answer.headers["content-type"]) == ("# for text/plain\n", "text/plain; version=0.0.4")
    assert "/metrics" in get(server, "/")["pages"]
    failed = server.client.get("/metrics", headers={"accept": "fail"})
    assert refusal(failed) == (500, "InternalError")
    assert "secret" not in failed.text and "secret" in caplog.text


def test_pages_of_other_origins_are_let_in_by_name_only(serve: Serve) -> None:
    origin, allowed = {"origin": "http://page.example"}, "access-control-allow-origin"
    server = serve(squares(), cors_origins=["http://page.example"])
    answer = server.client.post("/infer/square", json=3, headers=origin)
    assert (answer.json(), answer.headers[allowed]) == (9, "http://page.example")
    assert "X-Batch-Size" in answer.headers["access-control-expose-headers"]
    refused = server.client.post("/infer/square", content=b"", headers=origin)
    assert refused.headers[allowed] == "http://page.example"
    stranger = server.client.post("/infer/square", json=3, headers={"origin": "http://other.example"})
    assert allowed not in stranger.headers
    assert allowed not in serve(squares()).client.post("/infer/square", json=3, headers=origin).headers


async def test_levels_are_those_of_the_running_models() -> None:
    metrics = Metrics()
    service = weir.Service(Square, executor=FakeExecutor(), observers=[metrics], max_batch_size=2)
    exposition = make_exposition(metrics, weir.Registry([service]))
    await service.start()
    calls = [service.infer(n) for n in range(5)]
    await asyncio.sleep(0)
    text = exposition.render()[0].decode()
    for call in calls:
        call.cancel()
    await service.stop(0.0)
    assert 'weir_waiting_rows{model="square"} 3.0' in text
    assert 'weir_waiting_requests{model="square"} 3.0' in text
    assert 'weir_running_batches{model="square"} 1.0' in text
    assert 'weir_workers{model="square",state="ready"} 1.0' in text
    assert 'weir_worker_restarts_total{model="square"} 0.0' in text


def test_versions_of_a_model_are_distinguished_and_slashes_are_no_version() -> None:
    metrics = Metrics()
    named = {("acme/sq", ""): "", ("acme/sq", "v2"): ',version="v2"', ("acme/sq", "v3"): ',version="v3"'}
    services = {key: weir.Service(Square, name=key[0], version=key[1], executor=FakeExecutor()) for key in named}
    for key, service in services.items():
        metrics.transferred(service.label, "http", 3, 4)
        registry = weir.Registry([service])
        exposition = make_exposition(metrics, registry)
        line = f'weir_received_bytes_total{{frontend="http",model="acme/sq"{named[key]}}} 3.0'
        assert line in exposition.render()[0].decode()
        registry.remove("acme/sq")
        assert line in exposition.render()[0].decode()
    text = make_exposition(metrics, weir.Registry(list(services.values())[1:])).render()[0].decode()
    found = [f'weir_waiting_rows{{model="acme/sq",version="{version}"}} 0.0' in text for version in ("v2", "v3", "v4")]
    assert found == [True, True, False]


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


def test_a_rule_says_what_is_measured_and_nothing_else(serve: Serve) -> None:
    server = serve(squares(policy="control-limit:1"), squares(name="object", policy=ControlLimit(3)))
    for _ in range(3):
        assert server.client.post("/infer/square", json=3).status_code == 200
    policy = get(server, "/models/square/policy")
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
    other = get(server, "/models/object/policy")
    assert (other["policy"], other["table"]["limit"]) == ("ControlLimit(limit=3)", None)  # nothing was decided yet


class Hooked(Service):
    """Times with hooks in them are not held against the profile, which a fake executor does not keep to."""

    async def after_batch(self, results: list[Any]) -> list[Any]:
        return results


@cache
def bank() -> Bank:
    """Solved once: it never changes."""
    profile = Profile.linear(alpha_ms=0.02, tau0_ms=0.08, max_batch_size=4)
    return solve_bank(profile, Prices(1.0, 1.0), rates=[load * profile.max_rate for load in (0.1, 0.5, 0.9)])


def solved(**settings: Any) -> Service:
    """A model whose tables are solved by real processes."""
    executor = FakeExecutor(lambda items: [item * item for item in items])
    return Hooked(Square, executor=executor, policy=SolvedPolicy(bank()), max_batch_size=4, **settings)


def test_every_page_answers_as_the_description_says(serve: Serve) -> None:
    lost = FakeExecutor()
    models = [squares(), solved(name="dear"), wrong(), Service(Echo, executor=lost)]
    server = serve(*models, metrics=lambda accept: (b"# none\n", "text/plain; version=0.0.4"), liveness="models")
    document = get(server, "/openapi.json")
    server.client.post("/infer/dear/batch", json=[3] * 20)
    paths = [path for path, page in document["paths"].items() if page.get("get", {}).get("tags") == ["server"]]
    assert {"/", "/health/deep", POLICY, "/metrics", "/docs"} <= set(paths)
    for alive in (True, False):
        if not alive:
            server.call(lost.end, "no weights")
        for path in paths:
            for model in ("square", "dear", "cube") if "{model}" in path else ("",):
                answer = server.client.get(path.replace("{model}", model))
                content = document["paths"][path]["get"]["responses"].get(str(answer.status_code), {}).get("content")
                assert answer.headers["content-type"].startswith(tuple(content or ["application/json"])), path
                if "json" in answer.headers["content-type"]:
                    assert answer_faults(document, path, answer) == [], (path, answer.text)
    for body in ({"energy_weight": "2"}, {"energy": 2}):
        answer = server.client.put("/models/dear/policy", json=body)
        assert answer.status_code == 400 and answer_faults(document, POLICY, answer) == [], answer.text
        assert body_faults(document, POLICY, body, "put")


def test_a_solved_policy_says_what_it_goes_by(serve: Serve) -> None:
    server = serve(solved())
    for _ in range(3):
        server.client.post("/infer/square/batch", json=[3] * 20)
    policy = get(server, "/models/square/policy")
    assert policy["rate"] > 0.0
    assert policy["capacity"] == pytest.approx(25_000.0)
    assert policy["prices"] == {"latency_weight": 1.0, "energy_weight": 1.0, "reference_rate": None}
    table, solution, measured = policy["table"], policy["solved"], policy["measured"]
    assert table["rate"] == solution["rates"][table["index"]]
    assert table["limit"] == solution["limits"][table["index"]]
    assert policy["profile"]["service_time_ms"] == pytest.approx([0.1, 0.12, 0.14, 0.16])
    assert measured["rows"] == 60 and measured["power_w"] > 0.0
    assert measured["cost"] == pytest.approx(measured["response_time_ms"] + measured["power_w"])
    assert (policy["workers"], solution["count"], policy["learning"]) == (1, 0, False)
    assert (policy["drift"], policy["objective"]) == ({"factor": 1.0}, None)


def test_prices_can_be_changed_and_metrics_show_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "Solver", QuickSolver)
    metrics = Metrics()
    service, rule = solved(observers=[metrics]), squares(name="rule", observers=[metrics])
    server = serve(service, rule, metrics=make_exposition(metrics, Registry([service, rule])).render)
    for _ in range(3):
        server.client.post("/infer/square/batch", json=[3] * 20)
    before = get(server, "/models/square/policy")
    body = {"energy_weight": 500.0, "reference_rate": 100, "latency_objective": None}
    answer, document = server.client.put("/models/square/policy", json=body), get(server, "/openapi.json")
    assert answer.status_code == 200
    assert answer_faults(document, POLICY, answer) == body_faults(document, POLICY, body, "put") == []
    changed = answer.json()
    assert changed["prices"] == {"latency_weight": 1.0, "energy_weight": 500.0, "reference_rate": 100}
    assert changed["solved"]["reason"] == "prices"
    assert sum(changed["solved"]["limits"]) > sum(before["solved"]["limits"])  # energy is dear now: it waits for more
    assert get(server, "/models/square/policy")["prices"] == changed["prices"]
    assert get(server, "/models/square")["policy"]["resolves"] == {"prices": 1}
    text = server.client.get("/metrics").text
    assert 'weir_policy_resolves_total{model="square",reason="prices"} 1.0' in text
    assert 'weir_policy_drift{model="square"} 1.0' in text
    assert 'weir_policy_drift{model="rule"}' not in text
    for name in ("rate", "limit", "predicted_response_time_seconds", "predicted_power_watts"):
        assert f'weir_policy_{name}{{model="square"}}' in text


def test_what_is_unsound_is_refused_with_the_reason(serve: Serve, subtests: pytest.Subtests) -> None:
    server = serve(solved())
    for body, status, kind, says in (
        (b'{"energy_wait": 1}', 400, "InvalidRequest", "energy_wait: unknown field"),
        (b'{"self": 1}', 400, "InvalidRequest", "self: unknown field"),
        (b'{"energy_weight": "1"}', 400, "InvalidRequest", "energy_weight='1': must be a number"),
        (b"[1]", 400, "InvalidRequest", "body: must be a JSON object"),
        (b"", 400, "InvalidRequest", "body: must be application/json"),
        (b"{" * 70_000, 413, "TooLarge", "at most 65536 bytes"),
        (b'{"energy_weight": -1}', 422, "ValidationFailed", "energy_weight=-1"),
        (b'{"energy_weight": 0, "latency_weight": 0}', 422, "ValidationFailed", "must be greater than 0"),
        (b'{"latency_objective": "p99=0.05ms"}', 422, "ValidationFailed", "a row alone takes"),
    ):
        with subtests.test(says):
            answer = server.client.put("/models/square/policy", content=body)
            error = answer.json()["error"]
            assert (*refusal(answer), error["model"]) == (status, kind, "square")
            assert says in error["message"]
    policy = get(server, "/models/square/policy")
    assert (policy["prices"]["energy_weight"], policy["solved"]["count"]) == (1.0, 0)
