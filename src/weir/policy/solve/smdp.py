"""The semi-Markov decision process of a queue of any length, the best table for it, and what any table does, exactly.

States are numbers of waiting rows at the instants of decision. Action 0 waits for the next arrival, action a > 0 starts a batch
of a rows. Service times with a coefficient of variation v are Gamma distributed: the arrivals during a batch are then negative
binomial, and the expected square of its time is (1 + v²)τ². At v = 0 both are the paper's: Poisson, and τ².

The best actions are looked for in the states up to some `longest`. Beyond it one size is served, whose values are continued:
the solver is exact on queues of any length, in bounded time and memory. b* is right for queues without end, but where many sizes
are nearly as quick, or a slower one takes less energy, others are better for all queues that are met. So other sizes are tried
beyond it too. What is returned is a table, and all that is said of it is said of that table: with what replaces the states that
are not met, and to its last entry.

Times are in milliseconds and rates in rows per millisecond, but for the `rate` of the functions, in rows per second.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, log
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.stationary import decay, descent, stationary
from weir.policy.solve.tables import Table, extended, steady_table, with_full_batches

Actions = NDArray[np.int64]

# Numbers of arrivals less likely than this, for every batch size, are counted as the largest one that is kept. It is
# far below what any share of the cost is asked for (1e-14).
_LEAST_LIKELY = 1e-32
_NEVER = 1e-32  # a step of the queue less likely than this is left out
_NEGLIGIBLE = 1e-12  # a step less likely than this does not connect two queues: beside 1, the equations hardly see it
_FORGOTTEN = 27.6  # -log of what is left of where a longer queue began where that is not followed any more: 1e-12
VISITED = 1e-8  # a state that fewer of the decisions meet is not visited
_TAIL = 1e-9  # about the share of the decisions in longer queues than are looked at first
_GAIN = 1e-9  # of the cost: what makes it worth while to look at longer queues still
_LONG, _MORE = 400, 144  # states to look at: so many, and so many more than the largest batch
LONGEST = 640  # where it is one table that is asked for
_MOST_ENTRIES = 2048  # of a table
_BETTER = 1e-11  # of the values' span: what is less is rounding
_SPARE = 1e-3  # how far below capacity, relative to it, a size beyond the longest queue must be
_RARER, _RAREST = 1e-3, 1e-14  # by how much it has to be rarer where such states matter, and at least
_SAME = 1e-8  # how much more a table may cost, relative to its cost, than the actions that it was made from
_WORSE = 1e-3  # how much more a table may cost, relative to its cost, for being stable at every rate


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


# The model of a queue of any length, solved exactly on its short part: beyond it all batches are of one size.
#
# Under batches of b rows from every long queue, the value of a state solves h(s) = c(s) - g·τ + E h(s - b + K) with a cost
# that is linear in s. One solution is a quadratic p in s, known up to a constant. What h has beyond p is a martingale of the
# queue's length, which falls by at most b rows at a time; so it is the mean of what it is in the b longest of the short queues,
# by the law of which of them is met first on the way down (`descent` of stationary.py). So the states 0 ... `longest` are enough
# for the cost of a policy, however long its queues grow and however much the service time varies: nothing is cut off.


class Costs(NamedTuple):
    """What a decision costs: `once` for each action (0: to wait), and `price` per row waiting and ms until the next."""

    once: Floats
    price: float


class Values(NamedTuple):
    """The cost per ms g, the relative values of the states 0 ... longest, and those of the states above, as far as they are
    followed."""

    cost: float
    states: Floats
    above: Floats
    constant: float
    slope: float
    bend: float


@dataclass(frozen=True, eq=False)
class Continued:
    """Queues at `rate_per_ms`, looked at up to `longest` rows; from longer ones batches of `size` rows are served, which must
    serve more rows than arrive. `longest` is at least `size` - 1."""

    profile: Profile
    rate_per_ms: float
    size: int
    longest: int

    @cached_property
    def sojourn(self) -> Floats:
        """Mean time until the next decision for each action; shape [max_batch_size + 1]."""
        return np.concatenate(([1.0 / self.rate_per_ms], self.profile.service_time_ms))

    @cached_property
    def _descent(self) -> tuple[Floats, float]:
        return descent(self.profile, self.rate_per_ms, self.size)

    @cached_property
    def ahead(self) -> int:
        """How many rows above the longest the values are followed: beyond, they are the quadratic and a constant."""
        mean = self.rate_per_ms * self.profile.service_time_ms
        excess = 1.0 + mean * self.profile.cv**2
        _, kept = self._descent
        forgets = -log(max(kept, 1e-12))
        # From the longest queue on the number of arrivals has a tail of at most exp(-x/spread), beyond the mean and some.
        spread = 2.0 * excess
        start = mean + 3.0 * np.sqrt(mean * excess)
        needed = (_FORGOTTEN + start / spread) / (forgets + 1.0 / spread)
        return self.size + int(np.max(np.minimum(needed, start + _FORGOTTEN * spread)))

    @cached_property
    def early(self) -> Floats:
        """P[a - 1, k], the probability that k = 0 ... longest + ahead rows arrive during a batch of a."""
        return arrivals_up_to(self.profile, self.rate_per_ms, self.longest + self.ahead)

    @cached_property
    def over(self) -> tuple[Floats, Floats, Floats]:
        """The probability that a batch of a rows, with r left behind, ends with x > `ahead` rows above the longest, and E x
        and E x² of these; each of shape [a - 1, r], r = 0 ... longest."""
        last = self.longest + self.ahead
        counts = np.arange(last + 1.0)
        mean = self.rate_per_ms * self.profile.service_time_ms
        moments = (np.ones_like(mean), mean, mean + (1.0 + self.profile.cv**2) * mean**2)
        rest, part = [], self.early
        for moment in moments:
            met = np.cumsum(part, axis=1)[:, self.ahead :][:, ::-1]
            # What is left of 1 is right to 1e-15, far below what the values need. By r: more than last - r.
            rest.append(np.maximum(moment[:, None] - met, 0.0))
            part = part * counts
        room = self.longest - np.arange(self.longest + 1.0)
        first = rest[1] - room * rest[0]
        second = rest[2] - 2.0 * room * rest[1] + room**2 * rest[0]
        return rest[0], np.maximum(first, 0.0), np.maximum(second, 0.0)

    @cached_property
    def first_met(self) -> tuple[Floats, Floats]:
        """The law of which of the last states is met first, coming from x = 1 ... ahead above the longest, and from far
        above; shapes [x - 1, size] and [size], the last entry for the longest."""
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
        far = np.cumsum(flipped)  # the law of what is left of a descent that is under way
        return np.concatenate(blocks)[: self.ahead], far / far.sum()

    def beyond(self, size: int) -> "Continued":
        """Return the same queues with batches of another size from those that are longer."""
        return replace(self, size=size)

    def start(self) -> Actions:
        """Return the policy that never waits: at most `size` rows."""
        return np.minimum(np.arange(self.longest + 1), self.size)

    def returning(self, actions: Actions) -> Actions:
        """Return `actions`, but those of `start` in each queue that never becomes one of those that an empty queue leads to. Nothing is
        lost by that: to keep a queue long costs no less than to do the same with fewer rows waiting."""
        moves = self.chain(actions).law > _NEGLIGIBLE
        empty = np.arange(self.longest + 1) == 0
        return np.where(_reached(moves.T, _reached(moves, empty)), actions, self.start())

    def chain(self, actions: Actions) -> "QueueChain":
        """Return the chain of the queues of at most `longest` rows under `actions`, which serve in the longest."""
        key = actions.tobytes()
        if key not in self._chains:
            self._chains.clear()  # it is the last one that is asked for again
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
        moved = windows[batch, width - left]  # row s: from what is left on, the probability of each next length
        waits = np.flatnonzero(~serves)
        moved[waits] = 0.0
        moved[waits, waits + 1] = 1.0
        none, once, twice = (np.where(serves, part[batch, left], 0.0) for part in self.over)
        near, far = self.first_met
        above, x = moved[:, width:], np.arange(1.0, self.ahead + 1.0)
        reach = (above.max(axis=1) > _NEVER) | (none > 0.5)  # so many may come that they lead beyond
        folded = np.zeros((width, self.size))
        folded[reach] = above[reach] @ near + none[reach, None] * far
        law = moved[:, :width].copy()
        law[:, -self.size :] += folded
        last = np.arange(1.0 - self.size, 1.0)
        return QueueChain(law, above @ x + once - folded @ last, above @ x**2 + twice - folded @ last**2)

    def values(self, costs: Costs, actions: Actions) -> Values:
        """Return the values of the states under `actions`, which serve in the longest."""
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
        """Return, by action and state, the cost until the next decision and the value then, less g·time; infinite where the
        action is not allowed, and for waiting in the longest."""
        width, batches, kept = self.longest + 1, len(self.early), self.longest + self.ahead + 1
        padded = np.concatenate((values.states, values.above, np.zeros(width)))
        none, once, twice = self.over
        flat = np.zeros(1 + batches * width + 1)
        left = flat[1:-1].reshape(batches, width)
        # Arrivals that lead beyond what is followed meet the zeros, and are added by their moments.
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
        """Return how often per ms each of the states is met at a decision under `actions`."""
        first = np.zeros(len(actions))
        first[0] = 1.0
        found = np.linalg.solve(self._system(self.chain(actions), actions).T, first)
        return np.asarray(np.maximum(found, 0.0), dtype=np.float64)

    def decisions(self, actions: Actions, visits: Floats) -> float:
        """Return how many decisions there are per ms, those above the longest included."""
        return self.rate_of(Costs(np.ones(len(self.sojourn)), 0.0), self.chain(actions), actions, visits)[0]

    def beyond_share(self, actions: Actions) -> float:
        """Return the share of the decisions in queues above the longest."""
        visits = self.visits(actions)
        return max(0.0, 1.0 - float(visits.sum()) / self.decisions(actions, visits))

    def time_of(self, chain: "QueueChain", actions: Actions, visits: Floats) -> float:
        """Return the time that passes while the states are met so often, that above the longest included."""
        _, _, less = self._continuation(Costs(np.zeros(len(self.sojourn)), 0.0))
        return float(visits @ (self.sojourn[actions] + less * chain.once))

    def rate_of(self, costs: Costs, chain: "QueueChain", actions: Actions, visits: Floats) -> tuple[float, float]:
        """Return the cost per ms under `actions`, which meet the states so often, and what of it is paid above the longest."""
        bend, slope, _ = self._continuation(costs)
        own = costs.once[actions] + costs.price * np.arange(self.longest + 1) * self.sojourn[actions]
        above = float(visits @ (bend * chain.twice + slope * chain.once))
        return float(visits @ own) + above, above

    def _continuation(self, costs: Costs) -> tuple[float, float, float]:
        """Return the bend, the slope but for g, and by how much a unit of g makes it less."""
        time = float(self.sojourn[self.size])
        mean = self.rate_per_ms * time
        down = self.size - mean
        square = mean + (float(self.profile.cv[self.size - 1]) * mean) ** 2 + down**2
        bend = costs.price * time / (2.0 * down)
        once = float(costs.once[self.size]) + costs.price * time * self.longest
        return bend, (once + bend * square) / down, time / down

    def _system(self, chain: "QueueChain", actions: Actions) -> Floats:
        """Return the matrix of the equations for g (in the place of state 0, whose value is 0) and the other values."""
        system: Floats = np.eye(self.longest + 1) - chain.law
        _, _, less = self._continuation(Costs(np.zeros(len(self.sojourn)), 0.0))
        system[:, 0] = self.sojourn[actions] + less * chain.once
        return system


def _reached(moves: NDArray[np.bool_], start: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which states are met from those in `start`, where `moves` says which of them lead to which."""
    reached = new = start
    while new.any():
        new = moves[new].any(axis=0) & ~reached
        reached = reached | new
    return reached


class QueueChain(NamedTuple):
    """The decisions in queues of at most the longest: the `law` of the next such by state, and what happens above until then:
    the mean of x and of x² of the rows x above the longest, less those of the state that is met then (x <= 0)."""

    law: Floats
    once: Floats
    twice: Floats

    def band(self, below: int) -> tuple[Floats, int]:
        """Return `law` as a band, for `stationary`; no decision leads further down than by `below`."""
        size = len(self.law)
        rows, columns = np.nonzero(self.law > _NEVER)
        above = max(0, int((columns - rows).max()))
        matrix = np.zeros((size, below + 1 + above + 1))
        matrix[rows, below + 1 + columns - rows] = self.law[rows, columns]
        return matrix, below + 1


class Improved(NamedTuple):
    """The best actions by state, their values, a bound on how far their cost may be above the optimum with such batches
    beyond, and after how many steps."""

    actions: Actions
    values: Values
    error_bound: float
    steps: int


class Rates(NamedTuple):
    """What a policy does per ms, long queues included: the mean response time but for the profile's offset, the mean power, the
    busy share, the rows served and the batches."""

    response_time_ms: float
    power_w: float
    busy_share: float
    rows: float
    batches: float

    def cost(self, latency_weight: float, energy_weight: float) -> float:
        """Return the cost per ms with these weights."""
        return latency_weight * self.response_time_ms + energy_weight * self.power_w


@dataclass(frozen=True, eq=False)
class Served:
    """A queue that is served by a stable `table`: exactly, however long it grows."""

    profile: Profile
    rate_per_ms: float
    table: Table

    @cached_property
    def model(self) -> Continued:
        """The model of the queue, as long as the table's entries differ."""
        short = steady_table(self.table)
        size = int(short[-1])
        return Continued(self.profile, self.rate_per_ms, size, max(len(short) - 1, size))

    @cached_property
    def actions(self) -> Actions:
        """What is done in each of the model's states."""
        return extended(self.table, self.model.longest + 1).astype(np.int64)

    @cached_property
    def chain(self) -> QueueChain:
        """The chain of the model's states."""
        return self.model.chain(self.actions)

    @cached_property
    def visits(self) -> Floats:
        """How often per ms each of the model's states is met at a decision."""
        law = stationary(*self.chain.band(self.profile.max_batch_size))
        return law / self.model.time_of(self.chain, self.actions, law)

    @cached_property
    def rates(self) -> Rates:
        """What the table does."""
        return rates_of(self.model, self.chain, self.actions, self.visits)


@dataclass(frozen=True, eq=False)
class Found:
    """The best table that was found, what it does, its cost per ms, how far that may be above the least of all policies that
    serve one size of those tried from queues above the longest, and the best policy that the table was made from."""

    served: Served
    cost: float
    error_bound: float
    model: Continued
    improved: Improved

    @property
    def table(self) -> Table:
        """The table."""
        return self.served.table


def longest_of(profile: Profile) -> int:
    """Return how long queues are looked at in a bank: as long as time allows."""
    return max(_LONG, profile.max_batch_size + _MORE)


def solve_long(profile: Profile, rate: float, prices: Prices, longest: int, start: Table | None = None) -> Found:
    """Return the best table at `rate` rows per second, looked for in queues of up to `longest` rows (at least the largest
    batch), or fewer where longer ones are not met, from the table `start`."""
    weights = weights_of(profile, rate / 1000.0, prices)
    costs = _objective(profile, rate / 1000.0, *weights)
    longest = max(longest, profile.max_batch_size)
    model = Continued(profile, rate / 1000.0, profile.best_batch_size, min(longest, enough_states(profile, rate)))
    improved = improve(model, costs, _begun(model, start))
    steps = improved.steps
    while model.longest < longest:
        longer = replace(model, longest=min(2 * model.longest, longest))
        added = _begun(longer, start)[model.longest + 1 :]
        before, model, improved = improved, longer, improve(longer, costs, np.append(improved.actions, added))
        steps += improved.steps
        gained = before.values.cost - improved.values.cost
        if gained <= _GAIN * improved.values.cost and model.beyond_share(improved.actions) <= VISITED:
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
        model, improved = min(found, key=_cost_of)
    least = min(each.values.cost - each.error_bound for _, each in found)
    served = _delivered(model, improved, weights)
    cost = served.rates.cost(*weights)
    return Found(served, cost, max(0.0, cost - least), model, improved._replace(steps=steps))


def _begun(model: Continued, start: Table | None) -> Actions:
    """Return the actions that are improved first: those of `start`, or that nothing waits."""
    if start is None:
        return model.start()
    actions = extended(start, model.longest + 1).astype(np.int64)
    actions[-1] = actions[-1] or model.size
    return actions


def enough_states(profile: Profile, rate: float) -> int:
    """Return how long queues hardly ever grow under batches of b* at `rate` rows per second."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    return profile.max_batch_size + int(np.sqrt(profile.max_batch_size)) + ceil(-log(_TAIL) / fall)


def _cost_of(found: tuple[Continued, Improved]) -> float:
    return found[1].values.cost


def _keeps_up(model: Continued, size: int) -> bool:
    return model.rate_per_ms * float(model.sojourn[size]) <= (1.0 - _SPARE) * size


def _delivered(model: Continued, improved: Improved, weights: tuple[float, float]) -> Served:
    """Return the table that serves as `improved` does, with the full-batch rule from the first state that is not visited on,
    so that it is stable at every rate; where queues are so long that this would cost more, without the rule."""
    visits = model.visits(improved.actions)
    share = visits / model.decisions(improved.actions, visits)
    as_found = np.append(improved.actions, model.size).astype(np.uint16)
    rare, worse = VISITED / _RARER, inf
    while worse > _SAME * improved.values.cost and rare > _RAREST:  # a rare state may be a dear one
        rare *= _RARER
        end = _end(model, share, rare)
        served = Served(model.profile, model.rate_per_ms, with_full_batches(as_found, end, model.profile))
        worse = served.rates.cost(*weights) - improved.values.cost
    dear = worse > _WORSE * improved.values.cost
    return Served(model.profile, model.rate_per_ms, as_found) if dear else served


def _end(model: Continued, share: Floats, rare: float) -> int:
    """Return the length from which on fewer than `rare` of the decisions meet each queue, of which the short ones have this
    `share`."""
    end = int(np.flatnonzero(share >= rare)[-1]) + 1
    if end <= model.longest or model.size == model.profile.best_batch_size:
        return end
    beyond = max(1.0 - float(share.sum()), rare)
    fall = log(decay(model.profile, model.rate_per_ms, model.size))
    return min(_MOST_ENTRIES, end + ceil(log(beyond / rare) / fall))


def improve(model: Continued, costs: Costs, actions: Actions) -> Improved:
    """Improve `actions` wherever another is better, until none is.

    A step may have long queues wait for longer ones and then serve so few rows that none of them ever becomes short again. Such a policy
    has two costs per ms, and no values; it goes on from one in which those queues do not wait."""
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
    """Return what the policy `actions` does, from how often it meets each state."""
    profile, sizes = model.profile, np.arange(len(model.sojourn), dtype=np.float64)
    response = _objective(profile, model.rate_per_ms, 1.0, 0.0)
    per_batch = (profile.energy_mj, profile.service_time_ms, sizes[1:], np.ones(len(sizes) - 1))
    all_costs = [response, *(Costs(np.concatenate(([0.0], once)), 0.0) for once in per_batch)]
    return Rates(*(model.rate_of(costs, chain, actions, visits)[0] for costs in all_costs))


def _objective(profile: Profile, rate_per_ms: float, latency_weight: float, energy_weight: float) -> Costs:
    squares = (1.0 + profile.cv**2) * profile.service_time_ms**2
    once = energy_weight * profile.energy_mj + latency_weight * squares / 2.0
    return Costs(np.concatenate(([0.0], once)), latency_weight / rate_per_ms)
