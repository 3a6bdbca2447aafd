"""Policy iteration: solve for the cost of a policy exactly, improve it wherever an action is better, until none is.

Three to five steps where value iteration needs thousands of sweeps. Every policy met here serves in the overflow state, so
that its chain has one closed class: wherever it serves, any number of rows may arrive, which leads to S_o. (A policy that
waits there has S_o as a trap, and a linear solver would happily return the law of the states before it.)
"""

from dataclasses import dataclass

import numpy as np

from weir.policy.profile import Floats
from weir.policy.smdp import Actions, Model

# An action must be better by this share of the values' span to be taken: below it is rounding.
_BETTER = 1e-11
OVERFLOW_FACTOR = 1.5  # times the start policy's cost: safely above the optimal cost, which the model needs


@dataclass(frozen=True, eq=False)
class Solved:
    """A model, its best actions by state, their relative values (0 in state 0), their cost per millisecond g, a bound on
    how far g may be above the optimum, how many steps it took, and the states' stationary law (see `quick_law`)."""

    model: Model
    actions: Actions
    values: Floats
    cost: float
    error_bound: float
    steps: int
    law: Floats


def start_actions(model: Model) -> Actions:
    """Return the policy to start from: never wait, min(s, b*) rows, which is stable whenever any policy is."""
    return np.minimum(model.rows, model.profile.best_batch_size)


def iterate_policies(model: Model, start: Actions, *, overflow_cost: float | None = None) -> Solved:
    """Solve `model` from the actions `start`, which must serve in S_o. An `overflow_cost` of None is chosen
    safely, see `safe_overflow_cost`.
    """
    actions = start
    system = _system(model, actions)
    plain, extra = _values(model, actions, system)
    cost = _safe_cost(model, float(plain[0])) if overflow_cost is None else overflow_cost
    model = model.with_overflow(float(cost))
    met: set[bytes] = set()
    while True:  # there are finitely many policies, and each is evaluated once
        gain, relative = _split(plain + cost * extra)
        choices = _choices(model, gain, relative)
        better = _improved(model, actions, choices, relative)
        met.add(actions.tobytes())
        if better.tobytes() in met:  # the same one; or one of before, where rounding decides between equals
            # The largest improvement per time.
            bound = max(0.0, -float(((choices - relative) / model.sojourn[:, None]).min()))
            return Solved(model, actions, relative, gain, bound, len(met), _law(system))
        actions = better
        system = _system(model, actions)
        plain, extra = _values(model, actions, system)


def safe_overflow_cost(model: Model) -> float:
    """Return a cost of overflow that keeps policies from waiting, and from losing rows, in S_o."""
    actions = start_actions(model)
    plain, _ = _values(model, actions, _system(model, actions))
    return _safe_cost(model, float(plain[0]))


def _safe_cost(model: Model, start_cost: float) -> float:
    # Rows that come while S_o is reached are lost to the model, which may pay: fast batches in S_o, where overflow is
    # charged, and slow ones or waits below. A visit, however short, costs more than a turn from S_o and back can save.
    times = model.sojourn[1:]
    turn = float(times.max()) + len(times) / model.rate_per_ms
    return OVERFLOW_FACTOR * start_cost * turn / float(times.min())


def quick_law(model: Model, actions: Actions) -> Floats:
    """Return the stationary law of the states under `actions`, right to about 1e-15: not for what is rarer than that."""
    return _law(_system(model, actions))


def _law(system: Floats) -> Floats:
    first = np.zeros(len(system))
    first[0] = 1.0
    law = np.maximum(np.linalg.solve(system.T, first), 0.0)
    return np.asarray(law / law.sum(), dtype=np.float64)


def _system(model: Model, actions: Actions) -> Floats:
    """Return the matrix of the equations for the cost per millisecond (in the place of state 0) and the other values."""
    system = np.negative(model.law(actions))
    system.flat[:: len(actions) + 1] += 1.0
    system[:, 0] = model.sojourn[actions]
    return system


def _values(model: Model, actions: Actions, system: Floats) -> tuple[Floats, Floats]:
    """Return, for the costs without overflow and for a unit cost of overflow, the cost per millisecond (in the place of
    state 0, whose relative value is 0) and the relative values of the other states under `actions`."""
    sides = np.zeros((len(actions), 2))
    sides[:, 0] = model.chosen(model.costs_without_overflow, actions)
    sides[-1, 1] = model.sojourn[actions[-1]]
    plain, extra = np.linalg.solve(system, sides).T
    return plain, extra


def _split(values: Floats) -> tuple[float, Floats]:
    relative = values.copy()
    relative[0] = 0.0
    return float(values[0]), relative


def _choices(model: Model, gain: float, values: Floats) -> Floats:
    """Return what each action is worth in each state: the right side of equation 16."""
    choices = model.expected(values)
    choices += model.costs
    choices -= gain * model.sojourn[:, None]
    choices[0, -1] = np.inf  # S_o serves
    return choices


def _improved(model: Model, actions: Actions, choices: Floats, values: Floats) -> Actions:
    """Return the actions with the better ones in their place."""
    best = np.argmin(choices, axis=0)
    margin = _BETTER * max(float(np.ptp(values)), np.finfo(float).tiny)
    switch = model.chosen(choices, best) < model.chosen(choices, actions) - margin
    return np.where(switch, best, actions)
