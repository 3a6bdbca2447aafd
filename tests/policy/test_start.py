"""adaptive.py, from a cold start: never worse than greedy while it learns, whatever the load and the prices."""

from functools import cache

import numpy as np
import pytest
from tests.rings import spread

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import Greedy
from weir.policy.solve.bank import Bank, default_rates, solve_bank
from weir.simulation.simulator import run

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
PRICES = (Prices(1.0, 0.0), Prices(1.0, 1.0), Prices(1.0, 10.0), Prices(1.0, 1.0, 1000.0))
STARTS = 25
REQUESTS = 300


@cache
def solved(prices: Prices) -> Bank:
    """Return a bank of those prices, of half the rates."""
    return solve_bank(GOOGLENET_P4, prices, rates=default_rates(GOOGLENET_P4.max_rate)[::2])


def cost(policy: Policy, times: Floats, rate: float, prices: Prices) -> float:
    """Return what a run from a cold start costs."""
    done = run(GOOGLENET_P4, policy, times)
    energy = float(GOOGLENET_P4.energy_mj[done.batches.rows - 1].sum()) / 1000.0
    response = float(done.response_time_ms.mean())
    return prices.latency_weight_at(rate) * response + prices.energy_weight * energy / float(times[-1])


@pytest.mark.no_cover
@pytest.mark.parametrize("prices", spread(PRICES, 2))
@pytest.mark.parametrize("load", spread(LOADS))
def test_the_first_requests_cost_no_more_than_under_greedy(load: float, prices: Prices) -> None:
    rate = load * GOOGLENET_P4.max_rate
    policy = SolvedPolicy(solved(prices))
    greedy, more = [], []
    for seed in range(STARTS):
        times = np.cumsum(np.random.default_rng([seed, 7]).exponential(1.0 / rate, REQUESTS))
        greedy.append(cost(Greedy(), times, rate, prices))
        more.append(cost(policy.fresh(), times, rate, prices) - greedy[-1])
    bound = np.mean(more) + 2.06 * np.std(more, ddof=1) / np.sqrt(STARTS)  # 95 %, Student's t
    assert bound <= 0.01 * np.mean(greedy)
