"""truncated.py: how far a policy may be above the optimum, also one that is."""

import numpy as np
import pytest
from reproduction.truncated import TruncatedModel, cost_of, iterate_policies, law_of, model_of, start_actions

from reproduction import truncated
from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.smdp import Actions

# Times far from 1 ms, so that a bound per decision is not one per time.
QUICK = Profile.linear(alpha_ms=0.02, tau0_ms=0.05, beta_mj=3.0, zeta0_mj=9.0, max_batch_size=4)
SLOW = Profile.linear(alpha_ms=20.0, tau0_ms=50.0, beta_mj=3.0, zeta0_mj=900.0, max_batch_size=4, cv=0.7)


def policies(model: TruncatedModel) -> list[Actions]:
    """Return policies that are not the best: never waiting, single rows, and some by chance; all serve in S_o."""
    rng, most = np.random.default_rng(1), np.minimum(model.rows, 4)
    by_chance = [np.floor(rng.random(len(most)) * (most + 1)).astype(np.int64) for _ in range(6)]
    made = [start_actions(model), np.minimum(most, 1), *by_chance]
    for actions in made:
        actions[-1] = max(int(actions[-1]), 1)
    return made


@pytest.mark.parametrize("profile", [QUICK, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize("load", [0.2, 0.8])
def test_the_optimum_is_within_the_bound_of_any_policy(
    profile: Profile, load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(profile, load * profile.max_rate, Prices(1.0, 2.0), 12, 500.0)
    best = iterate_policies(model, start_actions(model), overflow_cost=500.0)
    assert best.error_bound < 1e-9 * best.cost
    # As if it stopped at the policy it starts from.
    monkeypatch.setattr(truncated, "_improved", lambda model, actions, choices, values: actions)
    for actions in policies(model):
        met = iterate_policies(model, actions, overflow_cost=500.0)
        assert met.cost == pytest.approx(cost_of(model, actions, law_of(model, actions)), rel=1e-9)
        assert met.cost - met.error_bound <= best.cost * (1.0 + 1e-9) <= met.cost * (1.0 + 2e-9)
        assert met.error_bound == pytest.approx(largest_gain(model, actions, met.cost), rel=1e-6, abs=1e-9 * met.cost)


def test_a_line_in_two_parts_is_refused() -> None:
    """Batches of 2 from 5, a wait at 3: where hardly anything arrives during a batch, a line of 3 never gets to 2."""
    model = model_of(QUICK, 1e-10, Prices(), 12)
    actions = np.array([0, 0, 2, 0, 0, *[2] * 9])
    with pytest.raises(SettingsError, match="rate=1e-10: too low for these actions"):
        iterate_policies(model, actions)


def largest_gain(model: TruncatedModel, actions: Actions, gain: float) -> float:
    """Return by how much per ms one action may be better than that of the policy, by h = c - g·y + P h."""
    values = np.zeros(len(actions))
    system = np.eye(len(actions)) - model.law(actions)
    sides = model.chosen(model.costs, actions) - gain * model.sojourn[actions]
    values[1:] = np.linalg.lstsq(system[:, 1:], sides, rcond=None)[0]
    choices = model.costs - gain * model.sojourn[:, None] + model.expected(values)
    gaps = (values - choices) / model.sojourn[:, None]
    gaps[0, -1] = 0.0  # S_o serves
    return max(0.0, float(gaps.max()))
