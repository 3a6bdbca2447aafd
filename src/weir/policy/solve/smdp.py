"""The queue as a semi-Markov decision process: the best table for it, and what any table does, exactly.

The model is the paper's (section III). A state is the number of rows that wait at an instant of decision. Action 0
waits for the next arrival; action a > 0 starts a batch of a rows. Arrivals are Poisson. Service times with a
coefficient of variation v are Gamma distributed, so the number of arrivals during a batch is negative binomial, and
the mean square of its time is (1 + v²)τ². For v = 0 both are as in the paper: Poisson, and τ².

The paper cuts the queue off at some length. Here it has no end: the best actions are looked for in the states 0 ...
`longest`, and from longer queues batches of one size are served, whose values follow from a closed form. So the result
is exact for queues of any length, in bounded time and memory. b* is the right size for very long queues. But where
many sizes are nearly as fast, or a slower one takes less energy, another size is better for all queues that occur; so
some other sizes are tried too. The result is a table, and every figure about it is computed for that very table, after
the states that do not occur have been replaced.

Times are in milliseconds and rates in rows per millisecond, except for arguments called `rate`, in rows per second.
Powers are in watts, costs per millisecond. Shapes: S = longest + 1 is the number of states (by rows waiting, from 0),
A = max_batch_size + 1 the number of actions (0 is to wait), B = max_batch_size the number of batch sizes (index b -
1).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, log
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost import LEAST_RATE, Floats, Prices, Profile
from weir.policy.solve.tables import (
    Table,
    checked_table,
    decay,
    descent,
    extended,
    stationary,
    steady_table,
    with_full_batches,
)

Actions = NDArray[np.int64]

_NEVER = 1e-32  # transitions with a smaller probability are left out
# A transition with a smaller probability does not connect two states: beside 1 it is lost in rounding.
_NEGLIGIBLE = 1e-12
_FORGOTTEN = 27.6  # -log(1e-12): a value that depends this little on where a long queue began is taken as constant
VISITED = 1e-8  # a state with a smaller share of the decisions counts as one that does not occur
_TAIL = 1e-9  # about the share of the decisions in queues longer than those that are looked at first
_GAIN = 1e-9  # relative to the cost: a smaller gain ends the lengthening of the queue that is looked at
_LITTLE = 5e-4  # the same beyond `longest`
_LONG, _MORE = 400, 144  # for banks, `longest` is the larger of the first number and max_batch_size plus the second
LONGEST = 640  # `longest` where a single table is solved
_MOST_ENTRIES = 2048  # of a table
_BETTER = 1e-11  # relative to the span of the values: a smaller advantage of an action is rounding
_NEAR = 1e-8  # relative to capacity: at a rate nearer to it, no state of the queue occurs often enough to be found
_SPARE = 1e-3  # relative to capacity: arrivals must be at least this far below what a size above `longest` serves
_RARER = 1e-3  # factor by which VISITED shrinks where rare states turn out to be costly, ...
_RAREST = 1e-14  # ... and its least value
_SAME = 1e-8  # relative to the cost: a table may cost this much more than the actions that it was made from
_WORSE = 1e-3  # relative to the cost: a table may cost this much more in order to be stable at every rate


def check_rate(profile: Profile, rate: float) -> None:
    """Raise SettingsError unless `rate` (rows per second) is greater than 0, and below the profile's capacity by more than rounding."""
    _check_positive(rate)
    if rate >= (1.0 - _NEAR) * profile.max_rate:
        raise SettingsError(
            f"rate={rate:g}: must be less than the capacity of {profile.max_rate:g} rows per second "
            f"(batches of {profile.best_batch_size})"
        )


def _check_positive(rate: float) -> None:
    if not LEAST_RATE <= rate < inf:
        raise SettingsError(
            f"rate={rate!r}: must be a number of rows per second, greater than 0, at least {LEAST_RATE:g}"
        )


def arrivals_up_to(profile: Profile, rate_per_ms: float, most: int) -> Floats:
    """Return P[b - 1, k], the probability that k rows arrive during a batch of b rows (equation 4 of the paper).

    Shape (B, most + 1), for k = 0 ... `most`; larger numbers of arrivals are left out. `rate_per_ms` is in rows per
    ms.
    """
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


def weights_of(profile: Profile, rate_per_ms: float, prices: Prices) -> tuple[float, float]:
    """Return the weights of latency (per ms) and of energy (per watt) to solve with.

    They are those of `prices` at the rate, except that latency is never free. With latency_weight 0 every policy that
    wastes no energy is as good as any other, even one that never dispatches. A latency cost of a hundred thousandth of
    the energy cost then selects the fastest of them.
    """
    latency = prices.latency_weight_at(1000.0 * rate_per_ms)
    if latency > 0.0:
        return latency, prices.energy_weight
    best = profile.energy_mj / profile.sizes
    power = prices.energy_weight * rate_per_ms * float(best.min())
    return (1e-5 * power / float(profile.service_time_ms.max()) or 1.0), prices.energy_weight


# The model of a queue of any length, solved exactly. Above `longest` all batches have one size.
#
# If batches of b rows are served from every long queue, the values there solve h(s) = c(s) - g·τ + E h(s - b + K),
# where K rows arrive during a batch and the cost c(s) is linear in s. One solution is a quadratic p(s), known up to a
# constant. The difference h - p is a martingale along the length of the queue, which falls by at most b rows at a
# time. So above `longest` it equals its mean over the b longest states below, by the law of which of them the queue
# reaches first on its way down (`descent` in tables.py). Therefore the states 0 ... `longest` determine the cost
# of a policy, however long its queues grow and however much the service time varies: nothing is cut off.
# docs/explanation/beyond-the-paper.md has the details.


class Costs(NamedTuple):
    """The costs of decisions.

    `once` has shape (A,): what each action costs at once. `price` is the cost per ms of each row that waits until the
    next decision.
    """

    once: Floats
    price: float


class Values(NamedTuple):
    """The long-run cost of a policy and the relative values of its states.

    Attributes:
        cost: g, the mean cost per ms.
        states: relative values of the states 0 ... longest, 0 for state 0; shape (S,).
        above: relative values of the states longest + 1 ... longest + ahead; shape (ahead,).
        constant, slope, bend: further above, x rows above `longest`, the value is constant + slope·x + bend·x².
    """

    cost: float
    states: Floats
    above: Floats
    constant: float
    slope: float
    bend: float


@dataclass(frozen=True, eq=False)
class Continued:
    """A queue of any length, whose policy is free in the states 0 ... `longest`.

    Attributes:
        profile: the costs of a batch.
        rate_per_ms: arrival rate in rows per ms.
        size: the batch, in rows, that is served from queues longer than `longest`. Such batches must serve more rows
            than arrive.
        longest: the longest queue with a decision of its own, in rows; at least `size` - 1.
    """

    profile: Profile
    rate_per_ms: float
    size: int
    longest: int

    @cached_property
    def sojourn(self) -> Floats:
        """Mean time in ms until the next decision, by action; shape (A,)."""
        return np.concatenate(([1.0 / self.rate_per_ms], self.profile.service_time_ms))

    @cached_property
    def _descent(self) -> tuple[Floats, float]:
        return descent(self.profile, self.rate_per_ms, self.size)

    @cached_property
    def ahead(self) -> int:
        """Number of states above `longest` whose values are computed one by one. Further above, they are the quadratic
        and a constant.
        """
        mean = self.rate_per_ms * self.profile.service_time_ms
        excess = 1.0 + mean * self.profile.cv**2
        _, kept = self._descent
        forgets = -log(max(kept, 1e-12))
        # The number of arrivals during a batch has a tail of at most exp(-x/spread), x rows beyond `start`.
        spread = 2.0 * excess
        start = mean + 3.0 * np.sqrt(mean * excess)
        needed = (_FORGOTTEN + start / spread) / (forgets + 1.0 / spread)
        return self.size + int(np.max(np.minimum(needed, start + _FORGOTTEN * spread)))

    @cached_property
    def early(self) -> Floats:
        """P[b - 1, k], the probability that k rows arrive during a batch of b rows; shape (B, longest + ahead + 1)."""
        return arrivals_up_to(self.profile, self.rate_per_ms, self.longest + self.ahead)

    @cached_property
    def over(self) -> tuple[Floats, Floats, Floats]:
        """Describes what happens when a batch of b rows, which leaves r rows behind, ends with more than `ahead` rows above
        `longest`.

        Three arrays of shape (B, S), indexed [b - 1, r]: the probability of that event, and the mean of x and of x² on
        it, x being the number of rows above `longest`.
        """
        last = self.longest + self.ahead
        counts = np.arange(last + 1.0)
        mean = self.rate_per_ms * self.profile.service_time_ms
        moments = (np.ones_like(mean), mean, mean + (1.0 + self.profile.cv**2) * mean**2)
        rest, part = [], self.early
        for moment in moments:
            met = np.cumsum(part, axis=1)[:, self.ahead :][:, ::-1]
            # The difference is exact to 1e-15, which is more than the values need. Column r: more than last - r
            # arrivals.
            rest.append(np.maximum(moment[:, None] - met, 0.0))
            part = part * counts
        room = self.longest - np.arange(self.longest + 1.0)
        first = rest[1] - room * rest[0]
        second = rest[2] - 2.0 * room * rest[1] + room**2 * rest[0]
        return rest[0], np.maximum(first, 0.0), np.maximum(second, 0.0)

    @cached_property
    def first_met(self) -> tuple[Floats, Floats]:
        """The law of the state in which a queue comes down from above `longest`.

        The last `size` states are longest - size + 1 ... longest, in this order. The first array, shape (ahead, size),
        has the law for a queue that starts x = 1 ... ahead rows above `longest`; the second, shape (size,), that for
        one from far above.
        """
        law, _ = self._descent
        flipped = law[::-1]
        block = np.empty((self.size, self.size))
        row = flipped
        for x in range(self.size):
            block[x] = row
            row = row[-1] * flipped + np.concatenate(([0.0], row[:-1]))
        blocks = [block]
        for _ in range(-(-self.ahead // self.size) - 1):
            blocks.append(blocks[-1] @ block)
        far = np.cumsum(flipped)  # the law of the remaining part of a descent that is under way
        return np.concatenate(blocks)[: self.ahead], far / far.sum()

    def beyond(self, size: int) -> "Continued":
        """Return the same queue with batches of `size` rows from queues longer than `longest`."""
        return replace(self, size=size)

    def start(self) -> Actions:
        """Return the policy that never waits and takes at most `size` rows; shape (S,), rows."""
        return np.minimum(np.arange(self.longest + 1), self.size)

    def returning(self, actions: Actions) -> Actions:
        """Return `actions`, replaced by those of `start` in each state from which no state is reached that an empty
        queue leads to.

        Nothing is lost: to keep a queue long costs no less than to do the same with fewer rows waiting. Shapes (S,),
        rows.
        """
        moves = self.chain(actions).law > _NEGLIGIBLE
        empty = np.arange(self.longest + 1) == 0
        return np.where(_reached(moves.T, _reached(moves, empty)), actions, self.start())

    def chain(self, actions: Actions) -> "QueueChain":
        """Return the chain of the states under `actions`, shape (S,), rows; they dispatch in the longest state."""
        key = actions.tobytes()
        if key not in self._chains:
            self._chains.clear()  # only the latest one is needed again
            self._chains[key] = self._chain(actions)
        return self._chains[key]

    @cached_property
    def _chains(self) -> dict[bytes, "QueueChain"]:
        return {}

    def _chain(self, actions: Actions) -> "QueueChain":
        width, kept = self.longest + 1, self.longest + self.ahead + 1
        serves = actions > 0
        batch, left = np.maximum(actions, 1) - 1, np.arange(width) - actions
        padded = np.concatenate((np.zeros((len(self.early), width)), self.early), axis=1)
        step = padded.strides[0]
        windows = as_strided(padded, (len(padded), width + 1, kept), (step, 8, 8))
        moved = windows[batch, width - left]  # row s: the probability of each length at the next decision
        waits = np.flatnonzero(~serves)
        moved[waits] = 0.0
        moved[waits, waits + 1] = 1.0
        none, once, twice = (np.where(serves, part[batch, left], 0.0) for part in self.over)
        near, far = self.first_met
        above, x = moved[:, width:], np.arange(1.0, self.ahead + 1.0)
        reach = (above.max(axis=1) > _NEVER) | (none > 0.5)  # states from which the queue may exceed `longest`
        folded = np.zeros((width, self.size))
        folded[reach] = above[reach] @ near + none[reach, None] * far
        law = moved[:, :width].copy()
        law[:, -self.size :] += folded
        last = np.arange(1.0 - self.size, 1.0)
        return QueueChain(law, above @ x + once - folded @ last, above @ x**2 + twice - folded @ last**2)

    def values(self, costs: Costs, actions: Actions) -> Values:
        """Return the values of the states under `actions`, shape (S,), rows; they dispatch in the longest state."""
        chain = self.chain(actions)
        bend, slope, less = self._continuation(costs)
        own = costs.once[actions] + costs.price * np.arange(self.longest + 1) * self.sojourn[actions]
        found = np.linalg.solve(self._system(chain, actions), own + bend * chain.twice + slope * chain.once)
        gain, states = float(found[0]), np.concatenate(([0.0], found[1:]))
        slope -= gain * less
        near, far = self.first_met
        last, x = np.arange(1 - self.size, 1), np.arange(1, self.ahead + 1)
        bounded = states[-self.size :] - slope * last - bend * last**2
        above = near @ bounded + slope * x + bend * x**2
        return Values(gain, states, above, float(far @ bounded), slope, bend)

    def choices(self, costs: Costs, values: Values) -> Floats:
        """Return the right side of the optimality equation: cost until the next decision, less g·time, plus the value
        then.

        Shape (A, S), by action and state. It is infinite for actions that are not allowed, and for waiting in the
        longest state.
        """
        width, batches, kept = self.longest + 1, len(self.early), self.longest + self.ahead + 1
        padded = np.concatenate((values.states, values.above, np.zeros(width)))
        none, once, twice = self.over
        flat = np.zeros(1 + batches * width + 1)
        left = flat[1:-1].reshape(batches, width)
        # Arrivals that lead further than `ahead` meet the zeros here; their moments are added below.
        np.matmul(self.early, as_strided(padded, (kept, width), (8, 8)).copy(), out=left)
        left += values.constant * none + values.slope * once + values.bend * twice
        result = np.empty((batches + 1, width))
        result[0] = np.append(values.states[1:], np.inf)
        result[1:] = as_strided(flat, (batches, width), ((width - 1) * 8, 8))  # (a, s) is left[a - 1, s - a]
        result += (costs.once - values.cost * self.sojourn)[:, None]
        result += costs.price * self.sojourn[:, None] * np.arange(width)
        result[np.arange(batches + 1)[:, None] > np.arange(width)] = np.inf
        return result

    def visits(self, actions: Actions) -> Floats:
        """Return how often per ms a decision is made in each state under `actions`; both of shape (S,)."""
        first = np.zeros(len(actions))
        first[0] = 1.0
        found = np.linalg.solve(self._system(self.chain(actions), actions).T, first)
        return np.asarray(np.maximum(found, 0.0), dtype=np.float64)

    def decisions(self, actions: Actions, visits: Floats) -> float:
        """Return the number of decisions per ms, those above `longest` included. Arguments as in `rate_of`."""
        return self.rate_of(Costs(np.ones(len(self.sojourn)), 0.0), self.chain(actions), actions, visits)[0]

    def beyond_share(self, actions: Actions) -> float:
        """Return the share of the decisions that are made above `longest`, under `actions` (shape (S,), rows)."""
        visits = self.visits(actions)
        return max(0.0, 1.0 - float(visits.sum()) / self.decisions(actions, visits))

    def time_of(self, chain: "QueueChain", actions: Actions, visits: Floats) -> float:
        """Return the time in ms that passes while the states are visited `visits` times (shape (S,)), the time above
        `longest` included.
        """
        _, _, less = self._continuation(Costs(np.zeros(len(self.sojourn)), 0.0))
        return float(visits @ (self.sojourn[actions] + less * chain.once))

    def rate_of(self, costs: Costs, chain: "QueueChain", actions: Actions, visits: Floats) -> tuple[float, float]:
        """Return the cost per ms under `actions`, and the part of it that arises above `longest`.

        `actions` and `visits` have shape (S,): rows, and decisions per ms in each state.
        """
        bend, slope, _ = self._continuation(costs)
        own = costs.once[actions] + costs.price * np.arange(self.longest + 1) * self.sojourn[actions]
        above = float(visits @ (bend * chain.twice + slope * chain.once))
        return float(visits @ own) + above, above

    def _continuation(self, costs: Costs) -> tuple[float, float, float]:
        """Return `bend`, and `slope` as a + b·g: a, and -b. (See Values; g is the cost per ms.)"""
        time = float(self.sojourn[self.size])
        mean = self.rate_per_ms * time
        down = self.size - mean
        square = mean + (float(self.profile.cv[self.size - 1]) * mean) ** 2 + down**2
        bend = costs.price * time / (2.0 * down)
        once = float(costs.once[self.size]) + costs.price * time * self.longest
        return bend, (once + bend * square) / down, time / down

    def _system(self, chain: "QueueChain", actions: Actions) -> Floats:
        """Return the matrix of the linear equations for g and the values of states 1 ... longest; shape (S, S).

        g takes the place of the value of state 0, which is 0.
        """
        system: Floats = np.eye(self.longest + 1) - chain.law
        _, _, less = self._continuation(Costs(np.zeros(len(self.sojourn)), 0.0))
        system[:, 0] = self.sojourn[actions] + less * chain.once
        return system


def _reached(moves: NDArray[np.bool_], start: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which states are reached from those in `start`, shape (S,). `moves`, shape (S, S), says which state leads
    to which.
    """
    reached = new = start
    while new.any():
        new = moves[new].any(axis=0) & ~reached
        reached = reached | new
    return reached


class QueueChain(NamedTuple):
    """The chain of decisions in the states 0 ... longest, and what happens above them.

    Attributes:
        law: probability of the next such state, by state; shape (S, S).
        once, twice: for each state, the mean sum of x and of x² over the decisions until then, x being the rows above
            `longest`, less the x and x² of the state that is reached (x <= 0); shape (S,).
    """

    law: Floats
    once: Floats
    twice: Floats

    def band(self, below: int) -> tuple[Floats, int]:
        """Return `law` as a band, for `stationary`, and its number of columns left of the diagonal.

        `below` is the most rows by which a decision can shorten the queue.
        """
        size = len(self.law)
        rows, columns = np.nonzero(self.law > _NEVER)
        above = max(0, int((columns - rows).max()))
        matrix = np.zeros((size, below + 1 + above + 1))
        matrix[rows, below + 1 + columns - rows] = self.law[rows, columns]
        return matrix, below + 1


class Improved(NamedTuple):
    """The result of policy iteration.

    Attributes:
        actions: the best actions, shape (S,), rows.
        values: their values.
        error_bound: how far their cost per ms may exceed the least possible with the same batches above `longest`.
        steps: how many policies were evaluated.
    """

    actions: Actions
    values: Values
    error_bound: float
    steps: int


class Rates(NamedTuple):
    """Says what a policy does, queues above `longest` included.

    Attributes:
        response_time_ms: mean response time in ms, without the profile's latency offset.
        power_w: mean power in watts.
        busy_share: share of the time in which the worker is busy.
        rows: rows served per ms.
        batches: batches per ms.
    """

    response_time_ms: float
    power_w: float
    busy_share: float
    rows: float
    batches: float

    def cost(self, latency_weight: float, energy_weight: float) -> float:
        """Return the cost per ms with these weights, per ms of response time and per watt."""
        return latency_weight * self.response_time_ms + energy_weight * self.power_w


@dataclass(frozen=True, eq=False)
class SteadyQueue:
    """A queue that a stable `table` serves, at `rate_per_ms` rows per ms: exact, however long it grows."""

    profile: Profile
    rate_per_ms: float
    table: Table

    @cached_property
    def model(self) -> Continued:
        """The queue, looked at as far as the table's entries differ."""
        short = steady_table(self.table)
        size = int(short[-1])
        return Continued(self.profile, self.rate_per_ms, size, max(len(short) - 1, size))

    @cached_property
    def actions(self) -> Actions:
        """The batch, in rows, in each of the model's states; shape (S,)."""
        return extended(self.table, self.model.longest + 1).astype(np.int64)

    @cached_property
    def chain(self) -> QueueChain:
        """The chain of the model's states."""
        return self.model.chain(self.actions)

    @cached_property
    def visits(self) -> Floats:
        """The number of decisions per ms in each of the model's states; shape (S,)."""
        law = stationary(*self.chain.band(self.profile.max_batch_size))
        return law / self.model.time_of(self.chain, self.actions, law)

    @cached_property
    def rates(self) -> Rates:
        """The performance of the table."""
        return rates_of(self.model, self.chain, self.actions, self.visits)


@dataclass(frozen=True, eq=False)
class Found:
    """The best table that was found.

    Attributes:
        served: the queue under this table.
        cost: its cost per ms.
        error_bound: how far `cost` may exceed the least cost of all policies that serve, from queues above `longest`,
            batches of one of the sizes that were tried.
        model: the queue in which the table was found.
        improved: the policy that the table was made from.
    """

    served: SteadyQueue
    cost: float
    error_bound: float
    model: Continued
    improved: Improved

    @property
    def table(self) -> Table:
        """The table."""
        return self.served.table


def longest_of(profile: Profile) -> int:
    """Return the longest queue, in rows, that is looked at for a table of a bank: a compromise with the time it takes."""
    return max(_LONG, profile.max_batch_size + _MORE)


def solve_long(profile: Profile, rate: float, prices: Prices, longest: int, start: Table | None = None) -> Found:
    """Return the best table at `rate` rows per second.

    Args:
        profile: the costs of a batch.
        rate: rows per second, below capacity.
        prices: the weights of latency and energy.
        longest: look for the best actions in queues of up to that many rows, or fewer where longer ones hardly occur.
        start: a table from which policy iteration starts; None: the policy that never waits.
    """
    weights = weights_of(profile, rate / 1000.0, prices)
    costs = _objective(profile, rate / 1000.0, *weights)
    longest = max(longest, profile.max_batch_size)
    model = Continued(profile, rate / 1000.0, profile.best_batch_size, min(longest, enough_states(profile, rate)))
    improved = improve(model, costs, _begun(model, start))
    steps = improved.steps
    while model.longest < longest or _unsettled(model, improved):
        enough = _GAIN if model.longest < longest else _LITTLE
        longer = replace(model, longest=min(2 * model.longest, longest if model.longest < longest else _MOST_ENTRIES))
        added = _begun(longer, start)[model.longest + 1 :]
        before, model, improved = improved, longer, improve(longer, costs, np.append(improved.actions, added))
        steps += improved.steps
        gained = before.values.cost - improved.values.cost
        if gained <= enough * improved.values.cost and (
            enough == _LITTLE or model.beyond_share(improved.actions) <= VISITED
        ):
            break
    found, tried = [(model, improved)], {model.size}
    while model.beyond_share(improved.actions) > VISITED:
        sizes = [int(improved.actions[-1]), profile.max_batch_size]
        left = [size for size in sizes if size not in tried and _keeps_up(model, size)]
        if not left:
            break
        tried.add(left[0])
        other = model.beyond(left[0])
        found.append((other, improve(other, costs, improved.actions)))
        steps += found[-1][1].steps
        model, improved = min(found, key=lambda each: each[1].values.cost)
    least = min(each.values.cost - each.error_bound for _, each in found)
    served = _delivered(model, improved, weights)
    cost = served.rates.cost(*weights)
    return Found(served, cost, max(0.0, cost - least), model, improved._replace(steps=steps))


def _unsettled(model: Continued, improved: Improved) -> bool:
    """Return whether longer queues, which occur, may be worth other batches than those served beyond `longest`."""
    settled = model.longest >= _MOST_ENTRIES or improved.actions[-1] == model.size
    return not settled and model.beyond_share(improved.actions) > VISITED


def _begun(model: Continued, start: Table | None) -> Actions:
    """Return the actions with which policy iteration starts, shape (S,): those of `start`, or never to wait."""
    if start is None:
        return model.start()
    actions = extended(start, model.longest + 1).astype(np.int64)
    actions[-1] = actions[-1] or model.size
    return actions


def enough_states(profile: Profile, rate: float) -> int:
    """Return a length that queues hardly ever exceed at `rate` rows per second if batches of b* are served."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    return profile.max_batch_size + int(np.sqrt(profile.max_batch_size)) + ceil(-log(_TAIL) / fall)


def _keeps_up(model: Continued, size: int) -> bool:
    return model.rate_per_ms * float(model.sojourn[size]) <= (1.0 - _SPARE) * size


def _delivered(model: Continued, improved: Improved, weights: tuple[float, float]) -> SteadyQueue:
    """Return the table that serves as `improved` does, with the full-batch rule from the first state on that does not
    occur.

    With the rule it is stable at every rate. Where queues are so long that the rule would raise the cost, it is left
    out.
    """
    visits = model.visits(improved.actions)
    share = visits / model.decisions(improved.actions, visits)
    as_found = np.append(improved.actions, model.size).astype(np.uint16)
    rare, worse = VISITED / _RARER, inf
    while worse > _SAME * improved.values.cost and rare > _RAREST:  # a rare state may be a costly one
        rare *= _RARER
        end = _end(model, share, rare)
        served = SteadyQueue(model.profile, model.rate_per_ms, with_full_batches(as_found, end, model.profile))
        worse = served.rates.cost(*weights) - improved.values.cost
    costly = worse > _WORSE * improved.values.cost
    return SteadyQueue(model.profile, model.rate_per_ms, as_found) if costly else served


def _end(model: Continued, share: Floats, rare: float) -> int:
    """Return the length from which on fewer than `rare` of the decisions are made in each state.

    `share`, shape (S,), is the share of the decisions in each state up to `longest`.
    """
    end = int(np.flatnonzero(share >= rare)[-1]) + 1
    if end <= model.longest or model.size == model.profile.best_batch_size:
        return end
    beyond = max(1.0 - float(share.sum()), rare)
    fall = log(decay(model.profile, model.rate_per_ms, model.size))
    return min(_MOST_ENTRIES, end + ceil(log(beyond / rare) / fall))


def improve(model: Continued, costs: Costs, actions: Actions) -> Improved:
    """Return the result of policy iteration from `actions`, shape (S,), rows.

    A step may yield a policy under which long queues wait and are then served so slowly that none becomes short again.
    Such a policy has two costs per ms, and no values; the iteration goes on from one in which those queues do not
    wait.
    """
    met: set[bytes] = set()
    states = np.arange(model.longest + 1)
    while True:
        try:
            values = model.values(costs, actions)
        except np.linalg.LinAlgError:
            met.add(actions.tobytes())
            actions = model.returning(actions)
            values = model.values(costs, actions)
        choices = model.choices(costs, values)
        best = np.argmin(choices, axis=0)
        margin = _BETTER * max(float(np.ptp(values.states)), np.finfo(float).tiny)
        better = np.where(choices[best, states] < choices[actions, states] - margin, best, actions)
        met.add(actions.tobytes())
        if better.tobytes() in met:
            gaps = (values.states - choices[best, states]) / model.sojourn[best]
            return Improved(actions, values, max(0.0, float(gaps.max())), len(met))
        actions = better


def rates_of(model: Continued, chain: QueueChain, actions: Actions, visits: Floats) -> Rates:
    """Return what the policy `actions` does. `visits`, decisions per ms in each state, has the same shape (S,)."""
    profile, sizes = model.profile, np.arange(len(model.sojourn), dtype=np.float64)
    response = _objective(profile, model.rate_per_ms, 1.0, 0.0)
    per_batch = (profile.energy_mj, profile.service_time_ms, sizes[1:], np.ones(len(sizes) - 1))
    all_costs = [response, *(Costs(np.concatenate(([0.0], once)), 0.0) for once in per_batch)]
    return Rates(*(model.rate_of(costs, chain, actions, visits)[0] for costs in all_costs))


def _objective(profile: Profile, rate_per_ms: float, latency_weight: float, energy_weight: float) -> Costs:
    """Return the costs whose mean per ms is latency_weight·(mean response time in ms) + energy_weight·(power in W)."""
    squares = (1.0 + profile.cv**2) * profile.service_time_ms**2
    once = energy_weight * profile.energy_mj + latency_weight * squares / 2.0
    return Costs(np.concatenate(([0.0], once)), latency_weight / rate_per_ms)


# What a table does, as a user of the solver reads it.


@dataclass(frozen=True)
class Performance:
    """Says what a table does at a rate.

    Attributes:
        stable: False if rows arrive faster than the table serves them. Then response time and cost are infinite, and
            the other figures are those of a queue that never empties.
        response_time_ms: mean response time in ms, with the profile's latency offset.
        power_w: mean power in watts beyond what the machine draws while idle.
        cost: latency_weight·response time + energy_weight·power (equation 3 of the paper), with the weights at the
            rate.
        busy_share: share of the time in which the worker is busy.
        batch_size: mean rows of a batch.
        throughput: rows served per second.
    """

    stable: bool
    response_time_ms: float
    power_w: float
    cost: float
    busy_share: float
    batch_size: float
    throughput: float


def is_stable(profile: Profile, rate: float, table: Table) -> bool:
    """Return whether the batches that `table` dispatches from a long queue serve more than `rate` rows per second."""
    size = int(table[-1])
    return rate * float(profile.service_time_ms[size - 1]) < 1000.0 * size


def evaluate(profile: Profile, rate: float, table: Table, prices: Prices | None = None) -> Performance:
    """Return what `table`, shape (states,), does at `rate` rows per second: Poisson arrivals, one worker.

    The cost is the paper's equation 14, for a queue of any length. A table that serves fewer rows than arrive is not
    an error: its Performance is not stable.

    Raises SettingsError naming the rate, or the entry of the table, that breaks a rule.
    """
    _check_positive(rate)
    prices, table = prices or Prices(), checked_table(table, profile.max_batch_size)
    if not is_stable(profile, rate, table):
        return _overloaded(profile, int(table[-1]), prices)
    seen = SteadyQueue(profile, rate / 1000.0, table).rates
    response_time = seen.response_time_ms + profile.latency_offset_ms
    cost = prices.latency_weight_at(rate) * response_time + prices.energy_weight * seen.power_w
    return Performance(
        True, response_time, seen.power_w, cost, seen.busy_share, seen.rows / seen.batches, 1000.0 * seen.rows
    )


def _overloaded(profile: Profile, size: int, prices: Prices) -> Performance:
    time, energy = float(profile.service_time_ms[size - 1]), float(profile.energy_mj[size - 1])
    cost = prices.energy_weight * energy / time if prices.latency_weight == 0.0 else inf
    return Performance(False, inf, energy / time, cost, 1.0, float(size), 1000.0 * size / time)
