"""Relative value iteration as the paper runs it (sections IV-B, IV-C, V-C): also where it comes to wait for ever.

`weir.policy.solve.bank.solve` refuses such a truncation; here it is part of what is reproduced.
"""

from typing import NamedTuple

from reproduction.published import EPSILON, LOAD, MOST_SWEEPS, PRICES, PROFILE, TOLERANCE
from reproduction.truncated import cost_of, eta_bound, iterate_values, law_of, model_of, overflow_cost_rate
from weir.policy.solve.smdp import Actions

ETA_SHARE = 0.99  # η as a share of its bound: close to it gives the paper's numbers of sweeps


class Sweep(NamedTuple):
    """What came of one truncation.

    `delta` is Δ, the cost per millisecond that is paid in S_o; `mass` the number of
    visits to S_o per millisecond, `span` that of the last change of the values.
    """

    overflow_cost: float
    s_max: int
    iterations: int
    actions: Actions
    cost: float
    delta: float
    mass: float
    span: float

    @property
    def waits(self) -> bool:
        """Whether the policy never leaves the overflow state: it waits there."""
        return not self.actions[-1]

    @property
    def accepted(self) -> bool:
        """Whether the policy serves, and Δ is tolerated."""
        return not self.waits and self.delta < TOLERANCE

    @property
    def space(self) -> int:
        """The paper's measure of the memory that is needed: Bmax·s_max."""
        return PROFILE.max_batch_size * self.s_max

    @property
    def time(self) -> int:
        """The paper's measure of the work: sweeps·Bmax·s_max²."""
        return self.iterations * PROFILE.max_batch_size * self.s_max**2


def sweep(overflow_cost: float, s_max: int, *, eta_share: float = ETA_SHARE, load: float = LOAD) -> Sweep:
    """Run relative value iteration from J = 0 (equations 21 and 22), η being that share of its bound (equation 19), and
    evaluate the policy it ends with (equations 14 and 15)."""
    model = model_of(PROFILE, load * PROFILE.max_rate, PRICES, s_max, overflow_cost)
    eta = eta_share * eta_bound(model)
    swept = iterate_values(model, eta=eta, epsilon=EPSILON, max_iterations=MOST_SWEEPS)
    law = law_of(model, swept.actions)
    cost, delta = cost_of(model, swept.actions, law), overflow_cost_rate(model, swept.actions, law)
    mass = float(law[-1]) / float(law @ model.sojourn[swept.actions])
    return Sweep(overflow_cost, s_max, swept.iterations, swept.actions, cost, delta, mass, swept.span)
