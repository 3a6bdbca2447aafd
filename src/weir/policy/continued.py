"""The model of a line of any length, solved on its short part: beyond it all batches are of one size, and the values of
the states are continued as they must be there.

Under batches of b rows from every long line, the value of a state solves h(s) = c(s) - g·τ + E h(s - b + K) with a cost
that is linear in s. Its solution is a quadratic in s, known up to a constant, and terms that die out within a few batches.
So the states 0 ... `longest` are enough for the cost of a policy, however long its lines grow and however much the
service time varies. The constant is the mean over the last b states: terms that turn with the batch cancel there.

Times are in milliseconds and rates in rows per millisecond, as in smdp.py.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from weir.policy.profile import Floats, Profile
from weir.policy.smdp import Actions, arrivals_up_to


class Costs(NamedTuple):
    """What a decision costs: `once` for each action (0: to wait), and `price` per row waiting and ms until the next."""

    once: Floats
    price: float


class Values(NamedTuple):
    """The cost per ms g, the relative values of the states 0 ... longest, and their continuation: for x rows above the
    longest `constant` + `slope`·x + `bend`·x²."""

    cost: float
    states: Floats
    constant: float
    slope: float
    bend: float


@dataclass(frozen=True, eq=False)
class Continued:
    """Lines at `rate_per_ms`, looked at up to `longest` rows; from longer ones batches of `size` rows are served, which must
    serve more rows than arrive."""

    profile: Profile
    rate_per_ms: float
    size: int
    longest: int

    @cached_property
    def sojourn(self) -> Floats:
        """Mean time until the next decision for each action; shape [max_batch_size + 1]."""
        return np.concatenate(([1.0 / self.rate_per_ms], self.profile.service_time_ms))

    @cached_property
    def early(self) -> Floats:
        """P[a - 1, k], the probability that k = 0 ... longest rows arrive during a batch of a."""
        return arrivals_up_to(self.profile, self.rate_per_ms, self.longest)

    @cached_property
    def over(self) -> tuple[Floats, Floats, Floats]:
        """The probability that a batch of a rows, with r left behind, ends with x > 0 rows above the longest, and E x and E x²
        of these; each of shape [a - 1, r], r = 0 ... longest."""
        counts = np.arange(self.longest + 1)
        mean = self.rate_per_ms * self.profile.service_time_ms
        moments = (np.ones_like(mean), mean, mean + (1.0 + self.profile.cv**2) * mean**2)
        rest = [moment[:, None] - np.cumsum(self.early * counts**i, axis=1) for i, moment in enumerate(moments)]
        first = rest[1] - counts * rest[0]
        second = rest[2] - 2.0 * counts * rest[1] + counts**2 * rest[0]
        # The room above r is longest - r. What is left of 1 is right to 1e-15, far below what the values need.
        none, once, twice = (np.maximum(part[:, ::-1], 0.0) for part in (rest[0], first, second))
        return none, once, twice

    def beyond(self, size: int) -> "Continued":
        """Return the same lines with batches of another size from those that are longer; nothing else is made again."""
        other = replace(self, size=size)
        for name in ("early", "over"):
            other.__dict__[name] = getattr(self, name)
        return other

    def start(self) -> Actions:
        """Return the policy that never waits: at most `size` rows."""
        return np.minimum(np.arange(self.longest + 1), self.size)

    def values(self, costs: Costs, actions: Actions) -> Values:
        """Return the values of the states under `actions`, which serve in the longest."""
        bend, slope, less = self._continuation(costs)
        own = costs.once[actions] + costs.price * np.arange(self.longest + 1) * self.sojourn[actions]
        once, twice = self._above(actions)
        found = np.linalg.solve(self._system(actions), own + bend * twice + slope * once)
        gain, states = float(found[0]), np.concatenate(([0.0], found[1:]))
        slope -= gain * less
        constant = float(states[-self.size :].mean()) - bend * self._squares + slope * (self.size - 1) / 2.0
        return Values(gain, states, constant, slope, bend)

    def choices(self, costs: Costs, values: Values) -> Floats:
        """Return, by action and state, the cost until the next decision and the value then, less g·time; infinite where the
        action is not allowed, and for waiting in the longest."""
        width, batches = self.longest + 1, len(self.early)
        padded = np.concatenate((values.states, np.zeros(width)))
        none, once, twice = self.over
        flat = np.zeros(1 + batches * width + 1)
        left = flat[1:-1].reshape(batches, width)
        np.matmul(self.early, as_strided(padded, (width, width), (8, 8)).copy(), out=left)
        left += values.constant * none + values.slope * once + values.bend * twice
        result = np.empty((batches + 1, width))
        result[0] = np.append(values.states[1:], np.inf)
        result[1:] = as_strided(flat, (batches, width), ((width - 1) * 8, 8))  # (a, s) is left[a - 1, s - a]
        result += (costs.once - values.cost * self.sojourn)[:, None]
        result += costs.price * self.sojourn[:, None] * np.arange(width)
        result[np.arange(batches + 1)[:, None] > np.arange(width)] = np.inf
        return result

    def visits(self, actions: Actions) -> Floats:
        """Return how often per ms each of the states is met at a decision under `actions`."""
        first = np.zeros(len(actions))
        first[0] = 1.0
        found = np.linalg.solve(self._system(actions).T, first)
        return np.asarray(np.maximum(found, 0.0), dtype=np.float64)

    def rate_of(self, costs: Costs, actions: Actions, visits: Floats) -> tuple[float, float]:
        """Return the cost per ms under `actions`, which meet the states so often, and what of it is paid above the longest."""
        bend, slope, _ = self._continuation(costs)
        own = costs.once[actions] + costs.price * np.arange(self.longest + 1) * self.sojourn[actions]
        once, twice = self._above(actions)
        above = float(visits @ (bend * twice + slope * once))
        return float(visits @ own) + above, above

    @property
    def _squares(self) -> float:
        """The mean of x² over the last states, x = 1 - size ... 0."""
        return (self.size - 1) * (2 * self.size - 1) / 6.0

    def _continuation(self, costs: Costs) -> tuple[float, float, float]:
        """Return the bend, the slope but for g, and by how much a unit of g makes it less."""
        time = float(self.sojourn[self.size])
        mean = self.rate_per_ms * time
        down = self.size - mean
        square = mean + (float(self.profile.cv[self.size - 1]) * mean) ** 2 + down**2
        bend = costs.price * time / (2.0 * down)
        once = float(costs.once[self.size]) + costs.price * time * self.longest
        return bend, (once + bend * square) / down, time / down

    def _above(self, actions: Actions) -> tuple[Floats, Floats]:
        """Return E x and E x² by state, less what the constant takes off."""
        none, once, twice = (self._chosen(part, actions) for part in self.over)
        return once + none * (self.size - 1) / 2.0, twice - none * self._squares

    def _chosen(self, part: Floats, actions: Actions) -> Floats:
        chosen = np.where(actions > 0, part[actions - 1, np.arange(len(actions)) - actions], 0.0)
        return np.asarray(chosen, dtype=np.float64)

    def _system(self, actions: Actions) -> Floats:
        """Return the matrix of the equations for g (in the place of state 0, whose value is 0) and the other values."""
        system = np.eye(self.longest + 1)
        none = self._chosen(self.over[0], actions) / self.size
        for state, action in enumerate(actions.tolist()):
            if action:
                left = state - action
                system[state, left:] -= self.early[action - 1, : self.longest + 1 - left]
            else:
                system[state, state + 1] -= 1.0
        system[:, -self.size :] -= none[:, None]
        less = float(self.sojourn[self.size]) / (self.size - self.rate_per_ms * float(self.sojourn[self.size]))
        system[:, 0] = self.sojourn[actions] + less * self._above(actions)[0]
        return system
