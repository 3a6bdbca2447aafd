"""How far the model must reach: its law and the cost it pays beyond its last state (section IV-A and equation 15)."""

from math import ceil, log

import numpy as np

from weir.policy.evaluation import decay
from weir.policy.profile import Floats, Profile
from weir.policy.smdp import Actions, Model
from weir.policy.stationary import band, stationary
from weir.policy.tables import Table, with_full_batches

MOST_STATES = 20_000
VISITED = 1e-6  # a state that fewer of the decisions meet is not visited


def enough_states(profile: Profile, rate: float, tolerance: float) -> int:
    """Return an s_max beyond which about `tolerance` of the cost falls, from how long lines decay under batches of b*."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    longest = profile.max_batch_size + int(np.sqrt(profile.max_batch_size))
    return min(MOST_STATES, longest + ceil(-log(tolerance) / fall))


def law_of(model: Model, actions: Actions) -> Floats:
    """Return the stationary law of the model's states under `actions`, which serve in S_o."""
    return stationary(*band(model.arrivals, actions, model.rows))


def cost_of(model: Model, actions: Actions, law: Floats) -> float:
    """Return g, the mean cost per ms under `actions` (equation 14)."""
    costs = model.chosen(model.costs, actions)
    return float(law @ costs) / float(law @ model.sojourn[actions])


def overflow_cost_rate(model: Model, actions: Actions, law: Floats) -> float:
    """Return Δ, the mean cost per ms that is paid in the overflow state (equation 15)."""
    return float(law[-1] * model.costs[actions[-1], -1]) / float(law @ model.sojourn[actions])


def overflow_share(model: Model, actions: Actions, law: Floats) -> float:
    """Return Δ / g."""
    return overflow_cost_rate(model, actions, law) / cost_of(model, actions, law)


def served_table(profile: Profile, actions: Actions, law: Floats) -> Table:
    """Return the table that `actions` are, with the full-batch rule from the first state that is not visited on: what the
    model does there matters to nothing it was solved for, and the rule is right for every rate above."""
    visited = np.flatnonzero(law >= VISITED)
    return with_full_batches(actions.astype(np.uint16), int(visited[-1]) + 1, profile)
