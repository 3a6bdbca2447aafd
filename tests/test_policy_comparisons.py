"""The harness of the comparisons beyond the paper: intervals, what is shown, and the page. The figures are no tests."""

import pytest
from benchmarks.policies import harness
from benchmarks.policies.bursts import ALLOWED, arrivals, beside_greedy, traffics
from tests.rings import spread

from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import Poisson
from weir.simulation.search import Rule


def test_every_player_meets_the_same_lines() -> None:
    steps: list[str] = []
    process = Poisson(0.5 * GOOGLENET_P4.max_rate)
    players = {
        "batcher": harness.real(GOOGLENET_P4, "control-limit:8"),
        "short cut": harness.ruled(GOOGLENET_P4, Rule(limit_table(8, 32).tolist())),
        "best": harness.tuned_limit(GOOGLENET_P4, Prices(1.0, 0.0)),
        "none can": harness.tuned_limit(GOOGLENET_P4, Prices(), objective=LatencySLO(0.002)),
    }
    seen = harness.play_all(process, players, harness.Effort(2, 3_000, steps.append))
    assert len(steps) == 8
    for one, other in zip(harness.known(seen["batcher"]), harness.known(seen["short cut"]), strict=True):
        assert harness.response(one) == pytest.approx(harness.response(other), rel=0.01)
    spared = harness.saved(seen["best"], seen["batcher"], harness.response)
    assert spared is not None and 0.0 < spared.value < 1.0
    assert harness.saved(seen["none can"], seen["batcher"], harness.response) is None and harness.show(None) == "–"


# By traffic, the energy weight at which solved policies cost more than greedy before they kept an account, in MMPP, on/off and recorded traffic: up to 5 %.
CASES = {
    "on/off, load 0.1: 0.1 s on, 1 s off": 10.0,
    "MMPP, load 0.1: 20 times, every 20 s": 1.0,
    "MMPP, load 0.1: 20 times, every 0.02 s": 1.0,
    "MMPP, load 0.3: 5 times, every 0.2 s": 0.0,
    "on/off, load 0.1: 0.3 s on, 1 s off": 1.0,
    "on/off, load 0.5: 0.05 s on, 0.05 s off": 0.0,
    "Azure code, load 0.3": 1.0,
}


@pytest.mark.parametrize(("name", "weight"), spread(CASES.items()))
def test_no_policy_costs_more_than_greedy_on_traffic_that_no_table_is_for(name: str, weight: float) -> None:
    traffic = next(each for each in traffics() if each.name == name)
    rate = traffic.load * GOOGLENET_P4.max_rate
    seen = beside_greedy(arrivals(traffic, rate, traffic.requests), rate, weight)
    assert max(seen["solved"].value, seen["auto"].value) < ALLOWED


# The best hand-tuned rules are the best: nothing in their family does better on the same line.
