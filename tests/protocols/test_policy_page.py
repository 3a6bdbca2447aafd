"""What can be read of a model's policy, through every door."""

from typing import Any

from tests.protocols.doors import Serve
from tests.protocols.models import Square

from weir.manager.service import Service
from weir.policy.rules import ControlLimit
from weir.testing import FakeExecutor


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
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "ModelNotFound")
