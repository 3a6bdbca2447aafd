"""Relative value iteration on the equivalent model in discrete time: the paper's method (section IV-B and C)."""

from dataclasses import dataclass

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.profile import Floats
from weir.policy.solve.smdp import Actions, Lookahead, Model

ETA_SHARE = 0.99  # of its bound: the larger, the fewer sweeps


@dataclass(frozen=True, eq=False)
class Swept:
    """The actions and relative values after so many sweeps, and the span of the last change: the cost of the actions and
    the least possible cost both lie in a range of that width (if the actions serve in S_o)."""

    actions: Actions
    values: Floats
    span: float
    iterations: int


def eta_bound(model: Model) -> float:
    """Return what eta must be less than, equation 19, in ms."""
    times, arrivals = model.profile.service_time_ms, model.arrivals
    sizes = np.minimum(model.profile.sizes, arrivals.shape[1] - 1)
    batch = np.arange(len(times))
    with np.errstate(divide="ignore"):
        exact = times / (1.0 - arrivals[batch, sizes])
        at_most = times / np.cumsum(arrivals, axis=1)[batch, sizes]
    return float(min(1.0 / model.rate_per_ms, exact.min(), at_most.min()))


def iterate_values(
    model: Model, *, eta: float | None = None, epsilon: float = 0.01, max_iterations: int = 10_000
) -> Swept:
    """Sweep equation 21 from J = 0, with state 0 as s*, until the change's span is less than `epsilon` (equation 22) or
    `max_iterations` sweeps are done. An `eta` of None is 0.99 of its bound. `epsilon` is absolute, as in the paper: in the
    unit of the cost per millisecond.

    Raises SettingsError for an eta outside its bound, an epsilon or a number of sweeps that is not greater than 0.
    """
    bound = eta_bound(model)
    eta = ETA_SHARE * bound if eta is None else eta
    if not 0.0 < eta < bound:
        raise SettingsError(f"eta={eta!r}: must be greater than 0 and less than {bound:g} ms (equation 19)")
    for name, value in (("epsilon", epsilon), ("max_iterations", max_iterations)):
        if not value > 0:
            raise SettingsError(f"{name}={value!r}: must be greater than 0")
    sweep = _Sweep(model, eta)
    values = np.zeros(model.s_max + 2)
    span, done = np.inf, 0
    while span >= epsilon and done < max_iterations:
        change = sweep.best(values) - values
        values = values + change - values[0]
        span = float(change.max() - change.min())
        done += 1
    actions = np.argmin(sweep.choices, axis=0)
    return Swept(actions, eta * (values - values[0]), span, done)


class _Sweep:
    """One application of equation 21, all that stays the same made once."""

    def __init__(self, model: Model, eta: float) -> None:
        moved = eta / model.sojourn
        self._costs = model.costs / model.sojourn[:, None]
        self._stays = (1.0 - moved)[:, None]
        self._moves = Lookahead(model.arrivals, model.s_max, moved)
        self.choices = np.empty(self._costs.shape)

    def best(self, values: Floats) -> Floats:
        """Return the least of `choices` by state, which hold for the actions what equation 21 minimises, before J(s*) is
        subtracted."""
        choices = self.choices
        np.multiply(self._stays, values, out=choices)
        choices += self._costs
        self._moves.add(values, choices)
        least: Floats = choices.min(axis=0)
        return least
