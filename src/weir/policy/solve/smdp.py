"""The paper's model: a semi-Markov decision process with finitely many states (sections III and IV).

States 0 ... s_max are numbers of waiting rows at the instants of decision; state s_max + 1 is the overflow state S_o, which
stands for all above, behaves like s_max and pays `overflow_cost` more per millisecond. Action 0 waits for the next arrival,
action a > 0 starts a batch of a rows. Arrays over actions and states have shape [max_batch_size + 1, s_max + 2].

Service times with a coefficient of variation v are Gamma distributed: the arrivals during a batch are then negative
binomial and the expected square of its time is (1 + v²)τ²; at v = 0 this is the paper's deterministic model.

Inside this part times are in milliseconds and rates in rows per millisecond.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Floats, Profile

# What is to be expected after one decision: the mean of the next state's value, for each action and state at once.
#
# One matrix product: the law of the arrivals times the values seen from each number of rows left behind. Value iteration does
# this thousands of times and policy iteration a few, so all memory that it takes is taken once.


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


Actions = NDArray[np.int64]

# Numbers of arrivals less likely than this, for every batch size, are counted as the largest one that is kept. It is
# far below what any share of the cost is asked for (1e-14).
_LEAST_LIKELY = 1e-32
_OF_OVERFLOW = ("overflow_cost", "costs")  # what differs between models that differ in their overflow cost


def check_rate(profile: Profile, rate: float) -> None:
    """Raise SettingsError unless `rate` (rows per second) is greater than 0 and below what the profile can serve."""
    if not (np.isfinite(rate) and rate > 0.0):
        raise SettingsError(f"rate={rate!r}: must be a number of rows per second, greater than 0")
    if rate >= profile.max_rate:
        raise SettingsError(
            f"rate={rate:g}: must be less than the capacity of {profile.max_rate:g} rows per second "
            f"(batches of {profile.best_batch_size})"
        )


def arrivals(profile: Profile, rate_per_ms: float, most: int | None = None) -> Floats:
    """Return P[a - 1, k], the probability that k rows arrive during a batch of a rows (equation 4).

    The last column counts all that are at least that many, and is summed from the far end, never as 1 - the rest.
    There are as many columns as matter, at most `most`.
    """
    length = reach(profile, rate_per_ms)
    table = arrivals_up_to(profile, rate_per_ms, length - 1)
    likely = int(np.flatnonzero(table.max(axis=0) >= _LEAST_LIKELY)[-1]) + 1
    kept = likely if most is None else min(likely, most)
    table[:, kept - 1] = table[:, kept - 1 :][:, ::-1].sum(axis=1)
    return table[:, :kept].copy()


def reach(profile: Profile, rate_per_ms: float) -> int:
    """Return a number of arrivals during a batch beyond which their probability is below 1e-32: 12 standard deviations, and
    75 decays of the geometric tail."""
    mean = rate_per_ms * profile.service_time_ms
    excess = mean * profile.cv**2  # variance / mean - 1
    return int(np.max(mean + 12.0 * np.sqrt(mean * (1.0 + excess)) + 75.0 * (1.0 + excess))) + 2


def arrivals_up_to(profile: Profile, rate_per_ms: float, most: int) -> Floats:
    """Return P[a - 1, k] for k = 0 ... most; higher numbers are left out."""
    mean = rate_per_ms * profile.service_time_ms
    excess = mean * profile.cv**2  # variance / mean - 1
    counts = np.arange(1, most + 1)
    with np.errstate(divide="ignore"):
        shape = np.where(profile.cv > 0.0, 1.0 / profile.cv**2, np.inf)
    logs = np.empty((len(mean), most + 1))
    poisson = np.isinf(shape)
    logs[:, 0] = np.where(poisson, -mean, -np.where(poisson, 0.0, shape) * np.log1p(excess))
    # (shape + k - 1) / k · q, with q = excess / (1 + excess), and shape · excess = mean; mean / k for Poisson
    steps = np.log((mean[:, None] + excess[:, None] * (counts - 1)) / (counts * (1.0 + excess[:, None])))
    logs[:, 1:] = logs[:, :1] + np.cumsum(steps, axis=1)
    table: Floats = np.exp(logs)
    return table


@dataclass(frozen=True, eq=False)
class Model:
    """The truncated model (equations 12 and 13). See `model_of`."""

    profile: Profile
    rate_per_ms: float
    latency_weight: float
    energy_weight: float
    s_max: int
    overflow_cost: float

    def with_overflow(self, cost: float) -> "Model":
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


def weights_of(profile: Profile, rate_per_ms: float, prices: Prices) -> tuple[float, float]:
    """Return the weights to solve with: those of `prices` at that rate, except that time is never free.

    With latency_weight 0 every policy that wastes no energy is as good as any other, also those that never serve. A
    price of a hundred thousandth of the energy's then chooses the quickest of them.
    """
    latency = prices.latency_weight_at(1000.0 * rate_per_ms)
    if latency > 0.0:
        return latency, prices.energy_weight
    best = profile.energy_mj / profile.sizes
    power = prices.energy_weight * rate_per_ms * float(best.min())
    return (1e-5 * power / float(profile.service_time_ms.max()) or 1.0), prices.energy_weight


def model_of(profile: Profile, rate: float, prices: Prices, s_max: int, overflow_cost: float = 0.0) -> Model:
    """Return the model of a line at `rate` rows per second.

    Raises SettingsError for a rate that no policy can serve, an s_max below the largest batch, a negative overflow cost.
    """
    check_rate(profile, rate)
    if s_max < profile.max_batch_size:
        raise SettingsError(f"s_max={s_max}: must be at least max_batch_size={profile.max_batch_size}")
    if not (np.isfinite(overflow_cost) and overflow_cost >= 0.0):
        raise SettingsError(f"overflow_cost={overflow_cost!r}: must be a number, 0 or more")
    latency_weight, energy_weight = weights_of(profile, rate / 1000.0, prices)
    return Model(profile, rate / 1000.0, latency_weight, energy_weight, s_max, overflow_cost)
