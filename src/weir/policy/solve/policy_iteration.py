"""Policy iteration: solve for the cost of a policy exactly, improve it wherever an action is better, until none is.

Three to five steps where value iteration needs thousands of sweeps. Every policy met here serves in the overflow state, so
that its chain has one closed class: wherever it serves, any number of rows may arrive, which leads to S_o. (A policy that
waits there has S_o as a trap, and a linear solver would happily return the law of the states before it.)
"""

from dataclasses import dataclass

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.profile import Floats
from weir.policy.solve.smdp import Actions, Lookahead, Model

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
    equations = _Equations(model, actions)
    plain, extra = equations.values()
    cost = _safe_cost(model, float(plain[0])) if overflow_cost is None else overflow_cost
    model = model.with_overflow(float(cost))
    lookahead = Lookahead(model.arrivals, model.s_max)
    met: set[bytes] = set()
    while True:  # there are finitely many policies, and each is evaluated once
        gain, relative = _split(plain + cost * extra)
        choices = _choices(model, lookahead, gain, relative)
        better = _improved(model, actions, choices, relative)
        met.add(actions.tobytes())
        if better.tobytes() in met:  # the same one; or one of before, where rounding decides between equals
            # The largest improvement per time.
            bound = max(0.0, -float(((choices - relative) / model.sojourn[:, None]).min()))
            return Solved(model, actions, relative, gain, bound, len(met), equations.law())
        actions = better
        equations = _Equations(model, actions)
        plain, extra = equations.values()


def safe_overflow_cost(model: Model) -> float:
    """Return a cost of overflow that keeps policies from waiting, and from losing rows, in S_o."""
    plain, _ = _Equations(model, start_actions(model)).values()
    return _safe_cost(model, float(plain[0]))


def _safe_cost(model: Model, start_cost: float) -> float:
    # Rows that come while S_o is reached are lost to the model, which may pay: fast batches in S_o, where overflow is
    # charged, and slow ones or waits below. A visit, however short, costs more than a turn from S_o and back can save.
    times = model.sojourn[1:]
    turn = float(times.max()) + len(times) / model.rate_per_ms
    return OVERFLOW_FACTOR * start_cost * turn / float(times.min())


def quick_law(model: Model, actions: Actions) -> Floats:
    """Return the stationary law of the states under `actions`, right to about 1e-15: not for what is rarer than that."""
    return _Equations(model, actions).law()


class _Equations:
    """The linear equations for the cost per millisecond (in the place of state 0) and the relative values of the other states
    under `actions`. Their matrix is decomposed once, for the values and for the stationary law.

    Raises SettingsError if to a float's precision the states fall into parts that do not reach each other.
    """

    def __init__(self, model: Model, actions: Actions) -> None:
        from scipy.linalg import lapack  # only those who solve need it

        self._model, self._actions = model, actions
        system = model.law(actions)
        np.negative(system, out=system)
        system.flat[:: len(actions) + 1] += 1.0
        system[:, 0] = model.sojourn[actions]
        self._solve = lapack.dgetrs
        # LAPACK's arrays go by columns: it is given the transposed matrix, in place.
        self._factors, self._pivots, singular = lapack.dgetrf(system.T, overwrite_a=True)
        if singular:
            raise SettingsError(
                f"rate={1000.0 * model.rate_per_ms:g}: too low for these actions: some lines would, to a float's "
                "precision, never become as short as others"
            )

    def values(self) -> tuple[Floats, Floats]:
        """Return the solutions for the costs without overflow and for a unit cost of overflow."""
        model, actions = self._model, self._actions
        sides = np.zeros((len(actions), 2), order="F")
        sides[:, 0] = model.chosen(model.costs_without_overflow, actions)
        sides[-1, 1] = model.sojourn[actions[-1]]
        found, _ = self._solve(self._factors, self._pivots, sides, trans=1, overwrite_b=True)
        return found[:, 0], found[:, 1]

    def law(self) -> Floats:
        """Return the stationary law of the states."""
        first = np.zeros(len(self._actions))
        first[0] = 1.0
        found, _ = self._solve(self._factors, self._pivots, first, overwrite_b=True)
        law = np.maximum(found, 0.0)
        return np.asarray(law / law.sum(), dtype=np.float64)


def _split(values: Floats) -> tuple[float, Floats]:
    relative = values.copy()
    relative[0] = 0.0
    return float(values[0]), relative


def _choices(model: Model, lookahead: Lookahead, gain: float, values: Floats) -> Floats:
    """Return what each action is worth in each state: the right side of equation 16."""
    choices = model.costs - gain * model.sojourn[:, None]
    lookahead.add(values, choices)
    choices[0, -1] = np.inf  # S_o serves
    return choices


def _improved(model: Model, actions: Actions, choices: Floats, values: Floats) -> Actions:
    """Return the actions with the better ones in their place."""
    best = np.argmin(choices, axis=0)
    margin = _BETTER * max(float(np.ptp(values)), np.finfo(float).tiny)
    switch = model.chosen(choices, best) < model.chosen(choices, actions) - margin
    return np.where(switch, best, actions)
