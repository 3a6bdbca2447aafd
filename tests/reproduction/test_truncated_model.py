"""truncated.py: the model's parts against their definitions; eta's bound and one sweep of value iteration."""

import numpy as np
import pytest
from reproduction.bounded import arrivals
from reproduction.truncated import TruncatedModel, eta_bound, law_of, model_of, quick_law
from tests.rings import subcases

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile

SMALL = Profile(np.array([1.0, 1.5, 3.0]), np.array([2.0, 3.0, 7.0]), np.array([0.0, 0.5, 1.0]))
RATE = 600.0
MODEL = model_of(SMALL, RATE, Prices(1.0, 2.0), 6, 5.0)


def written_out(model: TruncatedModel, action: int, state: int) -> Floats:
    """Return the law of the next state, as equation 12 has it."""
    law = np.zeros(model.s_max + 2)
    rows = min(state, model.s_max)
    if not action:
        law[min(state + 1, model.s_max + 1)] = 1.0
        return law
    come = arrivals(model.profile, model.rate_per_ms)[action - 1]
    for number, probability in enumerate(come):
        following = rows - action + number
        law[following if following <= model.s_max else model.s_max + 1] += probability
    return law


@subcases("state", range(8))
def test_costs_and_laws_are_the_papers(state: int) -> None:
    values = np.arange(8.0) ** 2
    rows, lam = min(state, 6), RATE / 1000.0
    extra = 5.0 if state == 7 else 0.0
    wait = rows / lam**2 + extra / lam
    assert MODEL.costs[0, state] == pytest.approx(wait)
    assert MODEL.expected(values)[0, state] == values[min(state + 1, 7)]
    for action in range(1, 4):
        if action > rows:
            assert MODEL.costs[action, state] == np.inf
            continue
        tau, cv, zeta = (table[action - 1] for table in (SMALL.service_time_ms, SMALL.cv, SMALL.energy_mj))
        cost = 2.0 * zeta + rows * tau / lam + (1 + cv**2) * tau**2 / 2 + extra * tau
        assert MODEL.costs[action, state] == pytest.approx(cost)
        assert MODEL.expected(values)[action, state] == pytest.approx(written_out(MODEL, action, state) @ values)


def test_the_law_under_a_policy() -> None:
    actions = np.array([0, 0, 2, 1, 3, 2, 3, 1])
    law = MODEL.law(actions)
    for state, action in enumerate(actions.tolist()):
        assert law[state] == pytest.approx(written_out(MODEL, action, state), abs=1e-15)
    exact = law_of(MODEL, actions)
    assert exact @ law == pytest.approx(exact, rel=1e-12)
    assert quick_law(MODEL, actions) == pytest.approx(exact, rel=1e-10)


def test_eta_keeps_every_probability_positive() -> None:
    """Equation 18, over all states and actions, is equation 19."""
    least = np.inf
    for state in range(8):
        for action in range(min(state, 3) + 1):
            stays = written_out(MODEL, action, state)[state]
            if stays < 1.0:
                least = min(least, MODEL.sojourn[action] / (1.0 - stays))
    assert eta_bound(MODEL) == pytest.approx(least, rel=1e-12)
