from math import inf, nan
from typing import cast

import pytest

from weir.policy.cost import GOOGLENET_P4, LatencySLO, Prices
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.simulation import banks
from weir.simulation.banks import make_bank
from weir.simulation.results import Comparison
from weir.simulation.simulator import simulate
from weir.simulation.statistics import Estimate

POLICIES = ["greedy", "control-limit:8", "full:1"]


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return simulate(GOOGLENET_P4, POLICIES, "poisson:0.7", requests=3_000, prices=Prices(1.0, 1.0, 2000.0))


def test_the_best_is_first_and_the_others_say_how_far_they_are_from_it(compared: Comparison) -> None:
    assert compared.heading() == (
        "poisson:0.7: 2,071 rows/s, load 0.7 on 1 worker; cost = 1/ms, 1/W at 2000 rows/s; 2,666 requests counted, seed 1"
    )
    title, *rows = compared.table()
    assert " ".join(title) == "policy response ms p99 ms power W batch busy cost above best"
    assert [row[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[0][-1] == "best"
    assert rows[1][-1].startswith("+") and " ".join(rows[1]).count("±") == 3
    assert rows[2][1] == "unstable" and "±" not in " ".join(rows[2]) and len(rows[2]) == len(title)


def test_what_is_lost_has_a_column_where_something_is() -> None:
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.7", requests=3_000, deadline=0.008)
    title, *rows = compared.table()
    assert all("%" in row[title.index("lost")] for row in rows)
    assert [row[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[2][-1] == "loses more"
    assert compared.best == "control-limit:8"
    assert compared.outcomes["full:1"].cost.value < compared.outcomes["control-limit:8"].cost.value


def test_with_an_objective_policies_are_compared_by_power_if_they_keep_it() -> None:
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective="p99=6ms")
    assert "p99=6ms with the least energy" in compared.heading()
    title, *rows = compared.table()
    assert title[5:] == ["busy", "late %", "in time %", "W above best"]
    assert [row[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[0][-1] == "not kept"
    assert compared.best is None
    loose = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective="p99=40ms")
    assert (loose.best, loose.measure) == ("control-limit:8", "power_w")
    assert loose.to_dict()["objective"] == "p99=40ms"
    assert loose.table()[2][-1].startswith("+")


def test_with_the_most_in_time_as_objective_that_is_compared() -> None:
    text = "in-time=6ms,refusal=0.5"
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective=text)
    assert "in-time=6ms,refusal=0.5 for the most requests" in compared.heading()
    title, *rows = compared.table()
    assert title[-3:] == ["late %", "in time %", "% beside best"]
    assert compared.best == rows[0][0] == "greedy"
    assert rows[1][-1].startswith("-")
    for outcome in compared.outcomes.values():
        shares = outcome.in_time_share.value + outcome.late_share.value + outcome.refused_share
        assert shares == pytest.approx(1.0)


def test_refusing_more_than_it_takes_keeps_no_promise_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "PROMISE_REQUESTS", 8_000)
    monkeypatch.setattr(banks, "PROMISE_LOADS", (0.3, 0.6, 0.8, 0.9, 0.94, 0.97))
    refusing = SolvedPolicy(make_bank(GOOGLENET_P4.up_to(8), objective=LatencySLO.parse("p99=8ms")))
    policies: dict[str, str | Policy] = {"smdp": "smdp", "strict": cast(Policy, refusing), "greedy": "greedy"}
    compared = simulate(GOOGLENET_P4.up_to(8), policies, "poisson:0.93", requests=8_000, latency_objective="p99=40ms")
    assert not compared.is_eligible("strict")
    assert any(row[-1] == "loses more" for row in compared.table())


def test_without_a_stable_policy_none_is_best() -> None:
    compared = simulate(GOOGLENET_P4, ["full:1"], "poisson:0.7", requests=1_000)
    assert compared.table()[1][1] == "unstable"
    assert compared.best is None


def test_a_comparison_is_json_able(compared: Comparison) -> None:
    document = compared.to_dict()
    assert document["best"] == "control-limit:8"
    assert document["prices"] == {"latency_weight": 1.0, "energy_weight": 1.0, "reference_rate": 2000.0}
    greedy, unstable = document["outcomes"]["greedy"], document["outcomes"]["full:1"]
    assert greedy["response_time_ms"].keys() == {"value", "low", "high"}
    assert sum(greedy["batch_sizes"].values()) == pytest.approx(1.0)
    assert sum(greedy["reasons"].values()) == pytest.approx(1.0)
    assert unstable["cost"] == {"value": None, "low": None, "high": None}
    assert "observations" not in greedy
    assert Estimate(nan, -inf, inf).half_width == inf
