"""The paper's finite model (sections III and IV), solved by policy iteration and by relative value iteration.

States 0 ... s_max are numbers of waiting rows at the instants of decision; state s_max + 1 is the overflow state S_o, which
stands for all above, behaves like s_max and pays `overflow_cost` more per millisecond. Action 0 waits for the next arrival,
action a > 0 starts a batch of a rows. Arrays over actions and states have shape [max_batch_size + 1, s_max + 2].

Service times with a coefficient of variation v are Gamma distributed: the arrivals during a batch are then negative
binomial and the expected square of its time is (1 + v²)τ²; at v = 0 this is the paper's deterministic model.
Times are in milliseconds and rates in rows per millisecond, but for the `rate` of the functions, in rows per second.

Weir's own solver truncates nothing (weir/policy/solve/smdp.py); this one is what it is held against.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from reproduction.bounded import arrivals, band
from weir.errors import SettingsError
from weir.policy.cost import Floats, Prices, Profile, unavoidable_power_w
from weir.policy.solve.bank import NOTHING, TOLERANCE, Solution
from weir.policy.solve.smdp import VISITED, Actions, check_rate, weights_of
from weir.policy.solve.tables import Table, checked_table, decay, extended, stationary, with_full_batches

METHODS = ("policy-iteration", "value-iteration")
MOST_STATES = 1_000  # with which a step of policy iteration takes a tenth of a second, and 50 MB
_STRIDE = 16  # states between the truncations that are tried first
ETA_SHARE = 0.99  # of eta's bound: the larger, the fewer sweeps
# An action must be better by this share of the values' span to be taken: below it is rounding.
_BETTER = 1e-11
OVERFLOW_FACTOR = 1.5  # times the start policy's cost: safely above the optimal cost, which the model needs

# The model, and what is to be expected after one decision: one matrix product, the law of the arrivals times the values seen
# from each number of rows left behind. Value iteration does it thousands of times, so all memory that it takes is taken once.

# Numbers of arrivals less likely than this, for every batch size, are lost in a sum of floats.
_LEAST_ADDED = 1e-18


class Lookahead:
    """E[values(next state)] of a model with states 0 ... `s_max` and S_o, whose arrivals during a batch have the law
    `arrivals` (see smdp.py). Each is multiplied by its action's entry of `shares`, if they are given."""

    def __init__(self, arrivals: Floats, s_max: int, shares: Floats | None = None) -> None:
        kept = int(np.flatnonzero(arrivals.max(axis=0) > _LEAST_ADDED)[-1]) + 1
        width, batches = s_max + 1, len(arrivals)
        self._width = width
        self._arrivals = arrivals[:, :kept].copy() if shares is None else arrivals[:, :kept] * shares[1:, None]
        self._waits = 1.0 if shares is None else float(shares[0])
        self._values = np.empty(width + kept)  # beyond s_max all are that of S_o
        self._seen = as_strided(self._values, (kept, width), (8, 8))
        self._packed = np.empty((kept, width))
        flat = np.zeros(1 + batches * width + 1)
        self._left = flat[1:-1].reshape(batches, width)  # [a - 1, rows left behind]
        # Row a - 1 shifted right by a: element (a, s) is left[a - 1, s - a].
        self._by_state = as_strided(flat, (batches, width), ((width - 1) * 8, 8))

    def add(self, values: Floats, table: Floats) -> None:
        """Add to `table` [action, state] what is expected of `values` [state]; to what is not allowed, some finite number."""
        width = self._width
        self._values[:width] = values[:-1]
        self._values[width:] = values[-1]
        np.copyto(self._packed, self._seen)
        np.matmul(self._arrivals, self._packed, out=self._left)
        table[0, :width] += self._waits * self._values[1 : width + 1]
        table[0, width] += self._waits * values[-1]
        table[1:, :width] += self._by_state
        table[1:, width] += self._by_state[:, width - 1]


_OF_OVERFLOW = ("overflow_cost", "costs")  # what differs between models that differ in their overflow cost


@dataclass(frozen=True, eq=False)
class TruncatedModel:
    """The truncated model (equations 12 and 13). See `model_of`."""

    profile: Profile
    rate_per_ms: float
    latency_weight: float
    energy_weight: float
    s_max: int
    overflow_cost: float

    def with_overflow(self, cost: float) -> "TruncatedModel":
        """Return the same model with another `overflow_cost`; what does not depend on it is not made again."""
        other = replace(self, overflow_cost=cost)
        other.__dict__.update({name: made for name, made in self.__dict__.items() if name not in _OF_OVERFLOW})
        return other

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of waiting rows in each state: S_o counts as s_max."""
        return np.minimum(np.arange(self.s_max + 2), self.s_max)

    @cached_property
    def sojourn(self) -> Floats:
        """Mean time until the next decision for each action, y of equation 7; shape [max_batch_size + 1]."""
        return np.concatenate(([1.0 / self.rate_per_ms], self.profile.service_time_ms))

    @cached_property
    def arrivals(self) -> Floats:
        """The law of the arrivals during a batch, see `arrivals`."""
        return arrivals(self.profile, self.rate_per_ms, self.s_max + 2)

    @cached_property
    def tails(self) -> Floats:
        """The probability of at least k arrivals during a batch, indexed as `arrivals` is."""
        return np.asarray(np.cumsum(self.arrivals[:, ::-1], axis=1)[:, ::-1], dtype=np.float64)

    @cached_property
    def _shifted(self) -> Floats:
        """The law of the arrivals until the next decision (one, if it is to wait) seen from any number of rows left behind:
        [a, s_max + 2 - left] is a row of states."""
        size = self.s_max + 2
        padded = np.zeros((len(self.sojourn), 2 * size))
        padded[0, size + 1] = 1.0
        padded[1:, size : size + self.arrivals.shape[1]] = self.arrivals
        return sliding_window_view(padded, size, axis=1)

    @cached_property
    def _tails_by_room(self) -> Floats:
        """`tails` by action, continued with zeros to s_max + 1; of waiting too."""
        tails = np.zeros((len(self.sojourn), self.s_max + 2))
        tails[0, :2] = 1.0
        tails[1:, : self.tails.shape[1]] = self.tails
        return tails

    @cached_property
    def costs(self) -> Floats:
        """Expected cost until the next decision, equations 9 and 13; infinite where the action is not allowed."""
        costs = self.costs_without_overflow.copy()
        costs[:, -1] += self.overflow_cost * self.sojourn
        return costs

    @cached_property
    def costs_without_overflow(self) -> Floats:
        """`costs` if the overflow state cost nothing more than s_max."""
        profile, price = self.profile, self.latency_weight / self.rate_per_ms
        once = np.zeros(len(self.sojourn))
        squares = (1.0 + profile.cv**2) * profile.service_time_ms**2
        once[1:] = self.energy_weight * profile.energy_mj + self.latency_weight * squares / 2.0
        costs = once[:, None] + price * self.sojourn[:, None] * self.rows
        costs[np.arange(len(once))[:, None] > self.rows] = np.inf
        return costs

    def expected(self, values: Floats) -> Floats:
        """Return E[values(next state)] for each action and state; what is not allowed holds arbitrary finite numbers."""
        table = np.zeros((len(self.sojourn), self.s_max + 2))
        Lookahead(self.arrivals, self.s_max).add(values, table)
        return table

    def law(self, actions: Actions) -> Floats:
        """Return the transition matrix of the chain under `actions` [state] (equation 12)."""
        last = self.s_max + 1
        left = self.rows - actions
        law: Floats = self._shifted[actions, last + 1 - left]
        law[:, last] = self._tails_by_room[actions, last - left]
        return law

    def chosen(self, table: Floats, actions: Actions) -> Floats:
        """Return the entries of `table` [action, state] that `actions` choose, by state."""
        return table[actions, np.arange(len(actions))]


def model_of(profile: Profile, rate: float, prices: Prices, s_max: int, overflow_cost: float = 0.0) -> TruncatedModel:
    """Return the model of a line at `rate` rows per second.

    Raises SettingsError for a rate that no policy can serve, an s_max below the largest batch, a negative overflow cost.
    """
    check_rate(profile, rate)
    if s_max < profile.max_batch_size:
        raise SettingsError(f"s_max={s_max}: must be at least max_batch_size={profile.max_batch_size}")
    if not (np.isfinite(overflow_cost) and overflow_cost >= 0.0):
        raise SettingsError(f"overflow_cost={overflow_cost!r}: must be a number, 0 or more")
    latency_weight, energy_weight = weights_of(profile, rate / 1000.0, prices)
    return TruncatedModel(profile, rate / 1000.0, latency_weight, energy_weight, s_max, overflow_cost)


# Policy iteration: solve for the cost of a policy exactly, improve it wherever an action is better, until none is.
#
# Three to five steps where value iteration needs thousands of sweeps. Every policy met here serves in the overflow state, so
# that its chain has one closed class: wherever it serves, any number of rows may arrive, which leads to S_o. (A policy that
# waits there has S_o as a trap, and a linear solver would happily return the law of the states before it.)


@dataclass(frozen=True, eq=False)
class SolvedModel:
    """A model, its best actions by state, their relative values (0 in state 0), their cost per millisecond g, a bound on
    how far g may be above the optimum, how many steps it took, and the states' stationary law (see `quick_law`)."""

    model: TruncatedModel
    actions: Actions
    values: Floats
    cost: float
    error_bound: float
    steps: int
    law: Floats


def start_actions(model: TruncatedModel) -> Actions:
    """Return the policy to start from: never wait, min(s, b*) rows, which is stable whenever any policy is."""
    return np.minimum(model.rows, model.profile.best_batch_size)


def iterate_policies(model: TruncatedModel, start: Actions, *, overflow_cost: float | None = None) -> SolvedModel:
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
            return SolvedModel(model, actions, relative, gain, bound, len(met), equations.law())
        actions = better
        equations = _Equations(model, actions)
        plain, extra = equations.values()


def safe_overflow_cost(model: TruncatedModel) -> float:
    """Return a cost of overflow that keeps policies from waiting, and from losing rows, in S_o."""
    plain, _ = _Equations(model, start_actions(model)).values()
    return _safe_cost(model, float(plain[0]))


def _safe_cost(model: TruncatedModel, start_cost: float) -> float:
    # Rows that come while S_o is reached are lost to the model, which may pay: fast batches in S_o, where overflow is
    # charged, and slow ones or waits below. A visit, however short, costs more than a turn from S_o and back can save.
    times = model.sojourn[1:]
    turn = float(times.max()) + len(times) / model.rate_per_ms
    return OVERFLOW_FACTOR * start_cost * turn / float(times.min())


def quick_law(model: TruncatedModel, actions: Actions) -> Floats:
    """Return the stationary law of the states under `actions`, right to about 1e-15: not for what is rarer than that."""
    return _Equations(model, actions).law()


class _Equations:
    """The linear equations for the cost per millisecond (in the place of state 0) and the relative values of the other states
    under `actions`. Their matrix is decomposed once, for the values and for the stationary law.

    Raises SettingsError if to a float's precision the states fall into parts that do not reach each other.
    """

    def __init__(self, model: TruncatedModel, actions: Actions) -> None:
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


def _choices(model: TruncatedModel, lookahead: Lookahead, gain: float, values: Floats) -> Floats:
    """Return what each action is worth in each state: the right side of equation 16."""
    choices = model.costs - gain * model.sojourn[:, None]
    lookahead.add(values, choices)
    choices[0, -1] = np.inf  # S_o serves
    return choices


def _improved(model: TruncatedModel, actions: Actions, choices: Floats, values: Floats) -> Actions:
    """Return the actions with the better ones in their place."""
    best = np.argmin(choices, axis=0)
    margin = _BETTER * max(float(np.ptp(values)), np.finfo(float).tiny)
    switch = model.chosen(choices, best) < model.chosen(choices, actions) - margin
    return np.where(switch, best, actions)


# Relative value iteration on the equivalent model in discrete time (section IV-B and C).


@dataclass(frozen=True, eq=False)
class Swept:
    """The actions and relative values after so many sweeps, and the span of the last change: the cost of the actions and
    the least possible cost both lie in a range of that width (if the actions serve in S_o)."""

    actions: Actions
    values: Floats
    span: float
    iterations: int


def eta_bound(model: TruncatedModel) -> float:
    """Return what eta must be less than, equation 19, in ms."""
    times, arrivals = model.profile.service_time_ms, model.arrivals
    sizes = np.minimum(model.profile.sizes, arrivals.shape[1] - 1)
    batch = np.arange(len(times))
    with np.errstate(divide="ignore"):
        exact = times / (1.0 - arrivals[batch, sizes])
        at_most = times / np.cumsum(arrivals, axis=1)[batch, sizes]
    return float(min(1.0 / model.rate_per_ms, exact.min(), at_most.min()))


def iterate_values(
    model: TruncatedModel, *, eta: float | None = None, epsilon: float = 0.01, max_iterations: int = 10_000
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

    def __init__(self, model: TruncatedModel, eta: float) -> None:
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


# How far the model must reach: its law and the cost it pays beyond its last state (section IV-A and equation 15).


def enough_states(profile: Profile, rate: float, tolerance: float) -> int:
    """Return an s_max beyond which about `tolerance` of the cost falls, from how long lines decay under batches of b*."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    longest = profile.max_batch_size + int(np.sqrt(profile.max_batch_size))
    return min(MOST_STATES, longest + ceil(-log(tolerance) / fall))


def law_of(model: TruncatedModel, actions: Actions) -> Floats:
    """Return the stationary law of the model's states under `actions`, which serve in S_o."""
    return stationary(*band(model.arrivals, actions, model.rows))


def cost_of(model: TruncatedModel, actions: Actions, law: Floats) -> float:
    """Return g, the mean cost per ms under `actions` (equation 14)."""
    costs = model.chosen(model.costs, actions)
    return float(law @ costs) / float(law @ model.sojourn[actions])


def overflow_cost_rate(model: TruncatedModel, actions: Actions, law: Floats) -> float:
    """Return Δ, the mean cost per ms that is paid in the overflow state (equation 15)."""
    return float(law[-1] * model.costs[actions[-1], -1]) / float(law @ model.sojourn[actions])


def overflow_share(model: TruncatedModel, actions: Actions, law: Floats) -> float:
    """Return Δ / g, 0 where nothing costs anything."""
    cost = cost_of(model, actions, law)
    return overflow_cost_rate(model, actions, law) / cost if cost else 0.0


def served_table(profile: Profile, actions: Actions, law: Floats) -> Table:
    """Return the table that `actions` are, with the full-batch rule from the first state that is not visited on: what the
    model does there matters to nothing it was solved for, and the rule is right for every rate above."""
    visited = np.flatnonzero(law >= VISITED)
    return with_full_batches(actions.astype(np.uint16), int(visited[-1]) + 1, profile)


class Truncation(NamedTuple):
    """A truncation that is acceptable, as the paper's Table I has it: found by so many `iterations` of value iteration,
    with the cost g per ms of its policy and `delta` of that paid in S_o, and the paper's measures of memory and work."""

    s_max: int
    overflow_cost: float
    iterations: int
    actions: Actions
    cost: float
    delta: float
    space: int
    time: int


def minimum_s_max(
    profile: Profile,
    rate: float,
    prices: Prices,
    overflow_cost: float,
    tolerance: float = 0.001,
    *,
    epsilon: float = 0.01,
    max_iterations: int = 10_000,
    longest: int = 1000,
) -> Truncation:
    """Return the smallest s_max, from the largest batch on, with which value iteration finds a policy that serves and
    whose Δ is less than `tolerance` (section V-C, Table I); `rate` is in rows per second.

    A model is swept only where policy iteration, which is a hundred times quicker, does not rule it out: where to wait in
    S_o for ever is cheaper than any policy that serves, and where the best policy's Δ is clearly too large. From the first
    that is left on, value iteration may still be short of sweeps to find out that serving pays; the longer the
    truncated line, the sooner it does, so that the first that does is found by halving.

    Raises SettingsError if there is none up to `longest`.
    """
    s_max = profile.max_batch_size
    while not _possible(profile, rate, prices, s_max, overflow_cost, tolerance):
        s_max += 1
        _check_length(s_max, longest, overflow_cost)
    below = s_max - 1
    found = _swept(profile, rate, prices, s_max, overflow_cost, epsilon, max_iterations)
    while not (found and found.delta < tolerance):
        below = s_max
        s_max += _STRIDE
        _check_length(s_max, longest, overflow_cost)
        found = _swept(profile, rate, prices, s_max, overflow_cost, epsilon, max_iterations)
    while found.s_max - below > 1:
        middle = (below + found.s_max) // 2
        tried = _swept(profile, rate, prices, middle, overflow_cost, epsilon, max_iterations)
        if tried and tried.delta < tolerance:
            found = tried
        else:
            below = middle
    return found


def _check_length(s_max: int, longest: int, overflow_cost: float) -> None:
    if s_max > longest:
        raise SettingsError(f"overflow_cost={overflow_cost:g}: no s_max up to {longest} is acceptable")


def _possible(
    profile: Profile, rate: float, prices: Prices, s_max: int, overflow_cost: float, tolerance: float
) -> bool:
    """Say whether value iteration could end in an acceptable policy. What it ends in is near the optimum, so a Δ within 5 %
    of the tolerance is left to it."""
    model = model_of(profile, rate, prices, s_max, overflow_cost)
    best = iterate_policies(model, start_actions(model), overflow_cost=overflow_cost)
    if overflow_cost + model.latency_weight * s_max / model.rate_per_ms <= best.cost:
        return False
    return overflow_cost_rate(model, best.actions, law_of(model, best.actions)) < 1.05 * tolerance


def _swept(
    profile: Profile,
    rate: float,
    prices: Prices,
    s_max: int,
    overflow_cost: float,
    epsilon: float,
    max_iterations: int,
) -> Truncation | None:
    """Return what value iteration ends in; None for a policy that does not serve."""
    model = model_of(profile, rate, prices, s_max, overflow_cost)
    swept = iterate_values(model, epsilon=epsilon, max_iterations=max_iterations)
    if not swept.actions[-1]:
        return None
    law = law_of(model, swept.actions)
    cost, delta = cost_of(model, swept.actions, law), overflow_cost_rate(model, swept.actions, law)
    space = profile.max_batch_size * s_max
    time = swept.iterations * profile.max_batch_size * s_max**2
    return Truncation(s_max, overflow_cost, swept.iterations, swept.actions, cost, delta, space, time)


@dataclass(frozen=True, eq=False)
class TruncatedSolution(Solution):
    """A table that was solved in the truncated model; `cost` and `error_bound` are of that model.

    Attributes:
        overflow_cost: what overflow costs per ms.
        tail_share: the share of the cost that is paid so (equation 15, relative to g).
        method: how it was solved.
    """

    overflow_cost: float
    tail_share: float
    method: str


def solve_truncated(
    profile: Profile,
    rate: float,
    prices: Prices | None = None,
    *,
    method: str = "policy-iteration",
    s_max: int | None = None,
    overflow_cost: float | None = None,
    tail_tolerance: float = 1e-9,
    eta: float | None = None,
    epsilon: float = 0.01,
    max_iterations: int = 10_000,
    start: Table | None = None,
) -> TruncatedSolution:
    """Return the table with the least cost in the truncated model at `rate` rows per second.

    Args:
        method: "policy-iteration", or "value-iteration" (equations 21 and 22, slower).
        s_max: the longest queue; None: it is grown until the tail share is at most `tail_tolerance`, up to 1000.
        overflow_cost: c_o of equation 13, per ms; None: so much that neither waiting in the overflow state nor losing rows
            there pays.
        eta, epsilon, max_iterations: of value iteration, see `iterate_values`.
        start: a table from which policy iteration starts.

    Warns with a RuntimeWarning that says by how much, if the cost may be more than a thousandth above the least.
    Raises SettingsError naming the value: a rate that no policy can serve, an unknown method, a table that cannot be, an
    s_max below the largest batch, an overflow cost so small that value iteration finds it best never to serve.
    """
    if method not in METHODS:
        raise SettingsError(f"method={method!r}: must be one of {', '.join(METHODS)}")
    if not tail_tolerance > 0.0:
        raise SettingsError(f"tail_tolerance={tail_tolerance!r}: must be greater than 0")
    prices = prices or Prices()
    check_rate(profile, rate)
    first = None if start is None else checked_table(start, profile.max_batch_size, "start")
    size = s_max if s_max is not None else enough_states(profile, rate, tail_tolerance)
    while True:
        model = model_of(profile, rate, prices, size, overflow_cost or 0.0)
        begin = start_actions(model) if first is None else extended(first, size + 2).astype(np.int64)
        if method == METHODS[0]:
            solved = iterate_policies(model, begin, overflow_cost=overflow_cost)
        else:
            solved = _by_values(model, overflow_cost, eta, epsilon, max_iterations)
        law = solved.law
        tail_share = overflow_share(solved.model, solved.actions, law)
        if s_max is not None or tail_share <= tail_tolerance or size >= MOST_STATES:
            break
        size = min(ceil(1.5 * size), MOST_STATES)
    cost, bound = solved.cost, solved.error_bound
    if not prices.latency_weight:  # it was solved with time at a price, whose optimum is near the one asked for
        cost = cost_of(replace(solved.model, latency_weight=0.0), solved.actions, law)
        bound = max(0.0, cost - prices.energy_weight * unavoidable_power_w(profile, rate))
    if bound > TOLERANCE * max(cost, NOTHING):
        warnings.warn(
            f"rate={rate:g}: the table costs {cost:g}, which may be {bound:g} above the least",
            RuntimeWarning,
            stacklevel=2,
        )
    return TruncatedSolution(
        profile, rate, prices, served_table(profile, solved.actions, law), solved.actions, solved.values, cost, bound, size,
        solved.steps, None, solved.model.overflow_cost, tail_share, method,
    )  # fmt: skip


def _by_values(
    model: TruncatedModel, overflow_cost: float | None, eta: float | None, epsilon: float, max_iterations: int
) -> SolvedModel:
    """Solve `model` by value iteration. Raises SettingsError if it then waits in S_o, that is, never serves."""
    if overflow_cost is None:
        model = model.with_overflow(safe_overflow_cost(model))
    swept = iterate_values(model, eta=eta, epsilon=epsilon, max_iterations=max_iterations)
    if not swept.actions[-1]:
        raise SettingsError(
            f"overflow_cost={model.overflow_cost:g}: too small for s_max={model.s_max} and {swept.iterations} iterations: "
            "never to serve looks cheapest; it must exceed the least cost"
        )
    law = quick_law(model, swept.actions)
    gain = cost_of(model, swept.actions, law)
    return SolvedModel(model, swept.actions, swept.values, gain, swept.span, swept.iterations, law)
