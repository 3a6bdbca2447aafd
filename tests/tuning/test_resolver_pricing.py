"""What may be said to a running service about its prices."""

from typing import Any

import pytest

from weir.errors import InvalidRequest, SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.tuning.policy_tuner import changed_prices

BEFORE = Prices(2.0, 3.0, 100.0)


def test_what_is_not_said_stays() -> None:
    objective = LatencySLO(0.02)
    assert changed_prices(BEFORE, objective, {}) == (BEFORE, objective)
    assert changed_prices(BEFORE, objective, {"energy_weight": 1}) == (Prices(2.0, 1, 100.0), objective)


def test_null_takes_away() -> None:
    said = {"reference_rate": None, "latency_objective": None}
    assert changed_prices(BEFORE, LatencySLO(0.02), said) == (Prices(2.0, 3.0), None)


def test_an_objective_is_a_text() -> None:
    assert changed_prices(BEFORE, None, {"latency_objective": "p99=20ms"}) == (BEFORE, LatencySLO(0.02, 0.01))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([1], r"must be an object with some of latency_weight, .*; is \[1\]"),
        ({"weight": 1}, "weight: there is no such field; there are latency_weight"),
        ({"latency_weight": "1"}, "latency_weight='1': must be a number"),
        ({"latency_weight": None}, "latency_weight=None: must be a number$"),
        ({"energy_weight": True}, "energy_weight=True: must be a number"),
        ({"reference_rate": [1]}, r"reference_rate=\[1\]: must be a number, or null"),
        ({"latency_objective": 20}, "latency_objective=20: must be a text such as p99=20ms, or null"),
    ],
)
def test_what_is_no_price_is_refused(said: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        changed_prices(BEFORE, None, said)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"latency_weight": -1}, "latency_weight=-1"),
        ({"latency_weight": 0, "energy_weight": 0}, "one of them must be greater than 0"),
        ({"reference_rate": 0}, "reference_rate=0"),
        ({"energy_weight": float("inf")}, "energy_weight=inf"),
        ({"energy_weight": 10**400}, "energy_weight: must be less than 1e300"),
        ({"latency_objective": "soon"}, "latency_objective='soon'"),
    ],
)
def test_prices_that_cannot_be_are_refused_with_the_reason(said: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        changed_prices(BEFORE, None, said)
