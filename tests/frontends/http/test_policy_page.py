"""What can be read of a model's policy and changed of it, through every door."""

from functools import cache
from typing import Any

import pytest
from tests.frontends.http.doors import Serve
from tests.frontends.http.models import Square

from weir.catalog.registry import Registry
from weir.frontends.http.pages import make_exposition
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import ControlLimit
from weir.policy.solve.bank import Bank, solve_bank
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor

PROFILE = Profile.linear(alpha_ms=0.02, tau0_ms=0.08, max_batch_size=4)


def squares(**settings: Any) -> Service:
    return Service(Square, executor=FakeExecutor(lambda items: [item * item for item in items]), **settings)


def test_a_rule_says_what_is_measured_and_nothing_else(serve: Serve) -> None:
    server = serve(squares(policy="control-limit:1"))
    for _ in range(3):
        assert server.client.post("/infer/square", json=3).status_code == 200
    policy = server.client.get("/models/square/policy").json()
    assert (policy["model"], policy["policy"], policy["workers"]) == ("square", "control-limit:1", 1)
    assert policy["table"] == {"index": None, "rate": None, "limit": 1}
    assert (policy["measured"]["requests"], policy["measured"]["batches"]) == (3, 3)
    assert 0.0 < policy["measured"]["response_time_ms"] < 10_000
    assert policy["rate"] == policy["measured"]["rate"] > 0.0
    assert set(policy["predicted"].values()) == {None}
    assert [policy[key] for key in ("capacity", "prices", "objective", "profile", "drift", "solved")] == [None] * 6
    assert policy["learning"] is False


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
    """Solved once: it never changes, and takes seconds."""
    return solve_bank(PROFILE, Prices(1.0, 1.0))


def solved(**settings: Any) -> Service:
    """A model whose tables are solved by real processes."""
    executor = FakeExecutor(lambda items: [item * item for item in items])
    policy = SolvedPolicy(bank())
    return Hooked(Square, executor=executor, policy=policy, max_batch_size=4, **settings)


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
        (b'{"energy_wait": 1}', 400, "InvalidRequest", "energy_wait: there is no such field"),
        (b'{"self": 1}', 400, "InvalidRequest", "self: there is no such field"),
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
