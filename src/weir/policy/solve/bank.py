"""The best table at one rate (`solve`), and a bank: a table for each of some rates, with predictions of what each
does.

A bank is the file that a server loads and decides by.

A bank predicts the 99th percentile of the response time, or another one, from sampled rows. Each arrives in a queue
drawn from the stationary law, so no run has to settle first, and is followed until its own batch is dispatched. A queue
beyond the length from which all are served alike moves up in one step. Two methods make some ten thousand rows as good
as a million. First, rows that find long queues are drawn more often, with weights that make up for it. Second, the last
random time of a row, that of its own batch or of the arrivals that this batch waits for, is not drawn but enters by its
law (conditional Monte Carlo). The seed is fixed, so the same table gives the same percentile. There, times are in
milliseconds, and N is the number of sampled rows.
"""

import io
import json
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weir.errors import SettingsError
from weir.numerics import gamma_tail, log_gamma
from weir.policy.cost import Floats, LatencySLO, Prices, Profile, unavoidable_power_w
from weir.policy.solve.smdp import (
    LONGEST,
    Actions,
    Continued,
    Costs,
    Performance,
    check_rate,
    evaluate,
    is_stable,
    longest_of,
    solve_long,
    weights_of,
)
from weir.policy.solve.smdp import SteadyQueue as SteadyQueue
from weir.policy.solve.tables import Table, checked_table, decay, extended, limit_of, stacked, steady_table

FORMAT = 1  # of the file
_FLOATS = ("rates", "response_time_ms", "p99_ms", "power_w")
_ARRAYS = (*_FLOATS, "max_waiting", "tables")
# What numpy and zipfile raise for data that is damaged, or no bank at all.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bank:
    """Tables by arrival rate. Entry i of each array belongs to `rates[i]`; R is the number of rates. Arrays are
    read-only.

    Attributes:
        profile: the costs of a batch on one worker.
        prices: the weights that the tables were solved for.
        workers: the number of workers that serve the queue.
        objective: the latency SLO, if the tables keep one.
        rates: arrival rates at all workers together in rows per second, ascending; shape (R,).
        tables: uint16, shape (R, states), rows; see tables.py.
        max_waiting: the number of waiting rows at which arrivals are refused; 0 for no bound; shape (R,).
        response_time_ms: predicted mean response time in ms; shape (R,).
        p99_ms: predicted 99th percentile of the response time in ms; infinite where the objective is not surely kept, or
            more than 1 % of the rows are refused; shape (R,).
        power_w: predicted mean power of all workers together in watts; shape (R,).

    Raises SettingsError naming the array, the entry and the rule.
    """

    profile: Profile
    prices: Prices
    workers: int
    objective: LatencySLO | None
    rates: Floats
    tables: NDArray[np.uint16]
    max_waiting: NDArray[np.int64]
    response_time_ms: Floats
    p99_ms: Floats
    power_w: Floats

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SettingsError(f"workers={self.workers}: must be 1 or more")
        count = np.size(self.rates)
        for name in _FLOATS:
            self._keep(name, np.array(getattr(self, name), dtype=np.float64, ndmin=1), (count,))
        self._keep("max_waiting", np.array(self.max_waiting, dtype=np.int64, ndmin=1), (count,))
        self._check_numbers()
        self._keep_tables()

    def __reduce__(self) -> Any:
        """Travel to another process such that the arrays are read-only there too."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    def limits(self) -> NDArray[np.int64]:
        """Return the control limit of each table, the smallest number of waiting rows that it dispatches; shape (R,)."""
        return np.asarray(np.argmax(self.tables > 0, axis=1), dtype=np.int64)

    def index_of(self, rate: float) -> int:
        """Return the index of the table for `rate` (rows per second): that of the rate nearest by ratio."""
        return int(np.searchsorted(np.sqrt(self.rates[:-1] * self.rates[1:]), rate))

    @property
    def capacity(self) -> float:
        """The most rows per second that all workers together can serve."""
        return self.workers * self.profile.max_rate

    def to_bytes(self) -> bytes:
        """Return the content of a bank file (npz)."""
        about = {
            "weir_bank": FORMAT,
            "profile": self.profile.to_toml(),
            "prices": [self.prices.latency_weight, self.prices.energy_weight, self.prices.reference_rate],
            "workers": self.workers,
            "objective": self.objective,
        }
        buffer = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(buffer, about=np.array(json.dumps(about)), **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "bank") -> "Bank":
        """Return the bank in `data`, the content of a bank file.

        `source` names the file in errors. Raises SettingsError naming `source` and what is wrong.
        """
        if not data.startswith(b"PK"):  # numpy would take it for a pickle, and advise to trust it
            raise SettingsError(f"{source}: must be a policy file made by `weir solve`; it is not an .npz file")
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                return cls._of(about, {name: arrays[name] for name in _ARRAYS})
        except SettingsError as error:
            raise SettingsError(f"{source}: {error.message}") from None
        except _UNREADABLE as error:
            raise SettingsError(f"{source}: must be a policy file made by `weir solve`: {error}") from error

    @classmethod
    def _of(cls, about: dict[str, Any], arrays: dict[str, Any]) -> "Bank":
        if about.get("weir_bank") != FORMAT:
            raise SettingsError(f"weir_bank={about.get('weir_bank')!r}: must be {FORMAT}")
        objective = about["objective"]
        return cls(
            profile=Profile.from_toml(about["profile"]),
            prices=Prices(*about["prices"]),
            workers=about["workers"],
            objective=None if objective is None else LatencySLO(*objective).checked(),
            **arrays,
        )

    def _keep(self, name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
        if values.shape != shape or not values.size:
            raise SettingsError(f"{name}: must have one entry for each rate, shape {shape}; has {values.shape}")
        values.setflags(write=False)
        object.__setattr__(self, name, values)

    def _check_numbers(self) -> None:
        ascending = np.diff(self.rates, prepend=0.0) > 0.0
        if not (ascending.all() and np.isfinite(self.rates[-1])):
            raise SettingsError(f"rates={self.rates.tolist()}: must be finite, greater than 0 and ascending")
        if (self.max_waiting < 0).any():
            i = int(np.argmin(self.max_waiting))
            raise SettingsError(f"max_waiting: {self.max_waiting[i]} for rate {self.rates[i]:g}: must be 0 or more")

    def _keep_tables(self) -> None:
        values = np.asarray(self.tables)
        if values.ndim != 2:
            raise SettingsError(f"tables: must have shape [rates, states]; has {values.shape}")
        rows = [checked_table(row, self.profile.max_batch_size, "tables") for row in values]
        self._keep("tables", np.array(rows, dtype=np.uint16), (len(self.rates), values.shape[1]))


def solve_bank(profile: Profile, prices: Prices | None = None, *, rates: ArrayLike | None = None) -> Bank:
    """Return the bank of the best tables for one worker.

    Args:
        profile: the costs of a batch.
        prices: the weights of latency and energy.
        rates: rows per second, ascending; shape (R,). By default 25 rates from 0.1 % to 99 % of the profile's
            capacity, lower ones until rows no longer wait for others, and further ones between them until no rate in
            that range costs more than 0.25 % above the least.

    Raises SettingsError for a rate that cannot be served.
    """

    prices = prices or Prices()
    if rates is None:
        found = solve_everywhere(profile, prices)
    else:
        found = solve_rates(profile, prices, np.array(rates, dtype=np.float64, ndmin=1))
    tables, predicted = [each.table for each in found], [each.predicted() for each in found]
    return bank_of(profile, prices, 1, [each.rate for each in found], tables, predicted)


def bank_of(
    profile: Profile,
    prices: Prices,
    workers: int,
    rates: ArrayLike,
    tables: Sequence[Table],
    predicted: Sequence[tuple[float, float, float]],
) -> Bank:
    """Return the bank of one table for each rate, without an objective.

    Args:
        profile: what a batch costs on one worker.
        prices: what the tables were solved for.
        workers: how many workers serve the queue.
        rates: rows per second in all, ascending; shape (rates,).
        tables: one for each rate, of any lengths.
        predicted: for each rate the mean response time (ms), its 99th percentile (ms) and the mean power (W).
    """
    response_time_ms, p99_ms, power_w = np.array(predicted).T
    return Bank(
        profile, prices, workers, None, np.array(rates), stacked(tables), max_waiting=np.zeros(len(tables), dtype=np.int64),
        response_time_ms=response_time_ms, p99_ms=p99_ms, power_w=power_w,
    )  # fmt: skip


def default_rates(capacity: float) -> Floats:
    """Return the rates of a bank, in rows per second, for a capacity in rows per second; shape (25,).

    Twelve are in equal ratios from 0.1 % to 20 % of the capacity, where the limit depends on the ratio, twelve in equal
    steps from there to 97 %, and the last one is 99 %.
    """
    low = np.geomspace(0.001, 0.2, 12)
    high = np.linspace(0.2, 0.97, 13)[1:]
    return np.asarray(capacity * np.concatenate((low, high, [0.99])), dtype=np.float64)


# The rates of a bank are solved one after another, each from the best actions of the one before. A rate between two of
# them is served by the table of the nearer one, by ratio. With hysteresis that table may still be in use a little
# further: there the costs are compared.


EXCESS = 0.002  # relative to the least cost: a neighbour's table may cost this much more before a rate is added between
CLOSEST = 1.01  # ratio of rates between which none is added
LOWER, LOWEST = 4.0, 1e-6  # the ratio of further rates below, and the least of them, relative to capacity
HYSTERESIS = 0.05  # relative to a boundary: how far the rate may be beyond it, at most, before the table changes


def hysteresis(low: float, high: float) -> float:
    """Return how far beyond the boundary of two rates, relative to it, the rate may be before the table changes."""
    return min(HYSTERESIS, (sqrt(high / low) - 1.0) / 2.0)


class SolvedRate(NamedTuple):
    """The best table at one rate, and what it does.

    Attributes:
        rate: rows per second.
        table: the best table, shape (states,), rows.
        actions: the best actions that the table was made from, shape (states,), rows. The table has the full-batch
            rule in states that do not occur, so `actions` are the better start for the next rate.
        served: the queue that the table serves at this rate.
    """

    rate: float
    table: Table
    actions: Table
    served: SteadyQueue

    def predicted(self) -> tuple[float, float, float]:
        """Return mean and 99th percentile of the response time in ms, and the mean power in watts."""
        seen, offset = self.served.rates, self.served.profile.latency_offset_ms
        return seen.response_time_ms + offset, QuantileSampler(self.served).quantile_ms(0.99) + offset, seen.power_w


def solve_rates(profile: Profile, prices: Prices, rates: Floats) -> list[SolvedRate]:
    """Return the best table for each of `rates` (rows per second; shape (R,)). Each search starts from the actions of
    the rate before.

    Raises SettingsError for a rate that cannot be served.
    """
    found: list[SolvedRate] = []
    for rate in rates.tolist():
        found.append(_solve(profile, prices, rate, found[-1].actions if found else None))
    return found


def solve_everywhere(profile: Profile, prices: Prices) -> list[SolvedRate]:
    """Return the best tables for the default rates, lower ones, and those between: see `solve_bank`."""
    found = solve_rates(profile, prices, default_rates(profile.max_rate))
    return solve_between(profile, prices, solve_below(profile, prices, found))


def solve_below(profile: Profile, prices: Prices, found: list[SolvedRate]) -> list[SolvedRate]:
    """Return `found` with lower rates, down to one at which rows no longer wait for others, or the table stays the same."""
    first = found[0]
    if limit_of(first.table) == 1 or first.rate < LOWER * LOWEST * profile.max_rate:
        return found
    below = _solve(profile, prices, first.rate / LOWER, first.actions)
    if _same(below.table, first.table):
        return found
    return solve_below(profile, prices, [below, *found])


def solve_between(profile: Profile, prices: Prices, found: list[SolvedRate]) -> list[SolvedRate]:
    """Return `found` with further rates, halfway by ratio, between neighbours whose tables cost more than EXCESS above
    the least where they may be in use.
    """
    result = found[:1]
    for each in found[1:]:
        result += [*_between(profile, prices, result[-1], each), each]
    return result


def _between(profile: Profile, prices: Prices, low: SolvedRate, high: SolvedRate) -> list[SolvedRate]:
    if high.rate <= CLOSEST * low.rate or _same(low.table, high.table):
        return []
    middle = _solve(profile, prices, sqrt(low.rate * high.rate), low.actions)
    margin = 1.0 + hysteresis(low.rate, high.rate)
    tables = [each.table for each in (low, middle, high)]
    if all(
        _excess(profile, prices, rate, tables)[used].max() <= EXCESS
        for rate, used in ((middle.rate * margin, [0]), (middle.rate / margin, [2]), (middle.rate, [0, 2]))
    ):
        return []
    return [*_between(profile, prices, low, middle), middle, *_between(profile, prices, middle, high)]


def _same(one: Table, other: Table) -> bool:
    return np.array_equal(steady_table(one), steady_table(other))


def _excess(profile: Profile, prices: Prices, rate: float, tables: Sequence[Table]) -> Floats:
    """Return by what share each of `tables` costs more at `rate` than the best of them; shape (tables,)."""
    weights = weights_of(profile, rate / 1000.0, prices)
    costs = np.array(
        [
            SteadyQueue(profile, rate / 1000.0, each).rates.cost(*weights) if is_stable(profile, rate, each) else inf
            for each in tables
        ]
    )
    return np.asarray(costs / costs.min() - 1.0)


def _solve(profile: Profile, prices: Prices, rate: float, start: Table | None) -> SolvedRate:
    check_rate(profile, rate)
    found = solve_long(profile, rate, prices, longest_of(profile), start)
    return SolvedRate(rate, found.table, found.improved.actions.astype(np.uint16), found.served)


# Solve for the best table at one rate.


NOTHING = 1e-12  # a cost below this counts as this, so that TOLERANCE has something to relate to
TOLERANCE = 1e-3  # relative to the least cost: a table may cost this much more without a warning


@dataclass(frozen=True, eq=False)
class Solution:
    """A solved table, and how it was solved.

    Attributes:
        profile, rate, prices: the arguments of `solve`; the rate in rows per second.
        table: the best table, shape (states,), rows.
        actions: the best actions in the states 0 ... s_max, and in all longer queues; shape (s_max + 2,), rows.
        values: relative values of these states, 0 in state 0; shape (s_max + 2,).
        cost: g, the cost per ms under the table (equation 14 of the paper): the cost that `evaluate` returns.
        error_bound: how far `cost` may exceed the least cost of all policies that serve, from queues above s_max,
            batches of one of the sizes that were tried.
        s_max: the longest queue, in rows, whose best action was looked for. Longer ones are accounted for exactly too.
        iterations: the steps of policy iteration.
        seconds: how long it took; None if no clock was given.
    """

    profile: Profile
    rate: float
    prices: Prices
    table: Table
    actions: Actions
    values: Floats
    cost: float
    error_bound: float
    s_max: int
    iterations: int
    seconds: float | None

    @property
    def limit(self) -> int:
        """The control limit in rows: the smallest number of waiting rows that the table dispatches."""
        return limit_of(self.table)

    @cached_property
    def performance(self) -> Performance:
        """The performance of the table."""
        return evaluate(self.profile, self.rate, self.table, self.prices)


def solve(
    profile: Profile,
    rate: float,
    prices: Prices | None = None,
    *,
    start: Table | None = None,
    clock: Callable[[], float] | None = None,
) -> Solution:
    """Return the table with the least cost at `rate` rows per second, for Poisson arrivals and one worker.

    Args:
        profile: the costs of a batch.
        rate: rows per second.
        prices: the weights of latency and energy.
        start: a table from which policy iteration starts, such as that of a similar rate; shape (states,), rows.
        clock: returns seconds; used for `Solution.seconds`.

    Issues a RuntimeWarning with the amount if rounding ended policy iteration so early that the cost may exceed the
    least by more than a thousandth.

    Raises SettingsError naming the value: a rate that no policy can serve, an impossible table.
    """
    prices = prices or Prices()
    began = clock() if clock else 0.0
    check_rate(profile, rate)
    first = None if start is None else checked_table(start, profile.max_batch_size, "start")
    found = solve_long(profile, rate, prices, max(LONGEST, longest_of(profile)), first)
    model, values = found.model, found.improved.values
    cost, bound = found.cost, found.error_bound
    # It was solved with a small weight of latency (see weights_of): use the stated weights.
    if not prices.latency_weight:
        cost = prices.energy_weight * found.served.rates.power_w
        bound = max(0.0, cost - prices.energy_weight * unavoidable_power_w(profile, rate))
    cost += prices.latency_weight_at(rate) * profile.latency_offset_ms
    if bound > TOLERANCE * max(cost, NOTHING):
        warnings.warn(
            f"rate={rate:g}: the table costs {cost:g}, which may be {bound:g} above the least",
            RuntimeWarning,
            stacklevel=2,
        )
    return Solution(
        profile, rate, prices, found.table, np.append(found.improved.actions, model.size),
        np.append(values.states, values.above[0]), cost, bound, model.longest, found.improved.steps,
        clock() - began if clock else None,
    )  # fmt: skip


ROWS, MOST_ROWS = 32_768, 131_072
_OFF = 0.005  # relative standard error of the percentile above which more rows are drawn
_STEP, _FINE = 0.02, 3e-4  # first step and final precision of the search for the percentile, relative to it
# States whose law is computed: this many, or this many more than the table has entries.
_MOST_STATES, _MORE_STATES = 800, 100
_CLEARLY = 0.3  # from this coefficient of variation on, the time of a batch may enter by its law
_FAR = 1e-7  # the share of the decisions that may lie beyond these states


class _Ends(NamedTuple):
    """Response times in ms, shape (N,) each: `base`, plus a Gamma distributed time with `shape` and `scale` (ms) where
    `shape` is not 0.
    """

    base: Floats
    shape: Floats
    scale: Floats


@dataclass(frozen=True, eq=False)
class TableShape:
    """Says what a table does with a row in the queue, by the length of the queue in rows."""

    table: Table

    @cached_property
    def last(self) -> int:
        """The batch, in rows, that is served from a long queue."""
        return int(self.table[-1])

    @cached_property
    def steady(self) -> int:
        """The length, in rows, from which on that batch is served from every queue."""
        return len(steady_table(self.table)) - 1

    @cached_property
    def served_at(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the next length at which the table dispatches; shape (steady + 1,), rows."""
        lengths = np.arange(self.steady + 1)
        serving = np.where(extended(self.table, self.steady + 1) > 0, lengths, self.steady)
        return np.minimum.accumulate(serving[::-1])[::-1]

    @cached_property
    def batch(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the batch that is dispatched next; shape (steady + 1,), rows."""
        return extended(self.table, self.steady + 1)[self.served_at].astype(np.int64)


class QuantileSampler:
    """Samples rows that arrive in the queue `served`."""

    def __init__(self, served: SteadyQueue) -> None:
        self._profile, self._rate = served.profile, served.rate_per_ms
        self._rules = TableShape(served.table)
        self._served = served
        self._draw = np.random.default_rng(1)

    def quantile_ms(self, share: float) -> float:
        """Return the time in ms within which the given share of the rows is answered, without the profile's latency
        offset.
        """
        rows, near, off = ROWS, 0.0, 1.0
        while off > _OFF:
            # A row's rank is the share of rows that meet shorter queues: 1 - x³, so that long queues are drawn more often.
            x = (np.arange(rows) + self._draw.random(rows)) / rows
            ends, weights = self._follow(1.0 - x**3), x**2
            near = near or float(np.average(ends.base + ends.shape * ends.scale, weights=weights))
            near, off = _later_than(ends, weights, 1.0 - share, near)
            if rows == MOST_ROWS:
                break
            rows = MOST_ROWS
        return near

    @cached_property
    def _model(self) -> Continued:
        """The model of the queue, extended beyond the length up to which the table's entries differ."""
        short = self._served.model
        fall = log(decay(self._profile, self._rate, short.size))
        more = min(max(_MOST_STATES - short.longest, _MORE_STATES), int(-log(_FAR) / fall) + 1)
        return Continued(self._profile, self._rate, short.size, short.longest + more)

    @cached_property
    def _actions(self) -> Actions:
        """The batch in each state, in rows; the last entry is for all states above the longest. Shape (S + 1,)."""
        return extended(self._served.table, self._model.longest + 2).astype(np.int64)

    @cached_property
    def _met(self) -> Floats:
        """The share of the rows that arrive after a decision in each state; the last entry is for those above the
        longest. Shape (S + 1,).
        """
        model, actions = self._model, self._actions[:-1]
        visits = model.visits(actions)
        chain = model.chain(actions)
        once, rows = Costs(np.ones(len(model.sojourn)), 0.0), Costs(np.zeros(len(model.sojourn)), 1.0)
        _, beyond = model.rate_of(once, chain, actions, visits)
        time = float(model.sojourn[model.size])
        _, waiting = model.rate_of(rows, chain, actions, visits)
        # What is less is left by rounding, and no row sees it.
        reached = beyond > np.finfo(np.float64).eps * visits.sum()
        self._mean_above = max(0.0, waiting / time / beyond - model.longest - 1.0) if reached else 0.0
        spent = np.append(visits, beyond) * model.sojourn[self._actions]
        return np.asarray(spent / spent.sum(), dtype=np.float64)

    def states(self, rank: Floats) -> NDArray[np.int64]:
        """Return the states, in rows waiting, that rows of this rank find; both of shape (N,)."""
        law = np.cumsum(self._met)
        state = np.searchsorted(law[:-1], rank)
        # Above the longest state the law is taken as geometric: it is so in the limit.
        left = np.minimum((1.0 - rank) / max(1.0 - law[-2], 1e-300), 1.0)
        over = np.floor(-np.log(np.maximum(left, 1e-300)) / np.log1p(1.0 / max(self._mean_above, 1e-9)))
        return np.asarray(state + np.where(state > self._model.longest, over, 0.0), dtype=np.int64)

    def _follow(self, rank: Floats) -> _Ends:
        """Return the response times of rows of this rank, shape (N,): the share of rows that find shorter queues."""
        rate, rules, draw = self._rate, self._rules, self._draw
        position, behind, age = self._arrive(self.states(rank))
        ends = _Ends(*(np.zeros(len(rank)) for _ in range(3)))
        index = np.arange(len(rank))
        while len(index):
            # Batches of long queues, all ahead of the row.
            far = np.maximum(-(-(position - rules.steady) // rules.last), 0)
            if far.any():
                time = self._services(np.full(len(far), rules.last), far)
                position, age, behind = position - far * rules.last, age + time, behind + draw.poisson(rate * time)
            length = np.minimum(position + behind, rules.steady)
            missing = rules.served_at[length] - length
            size = rules.batch[length]
            last = position <= size
            self._end(ends, index[last], age[last], size[last], missing[last])
            index, position, behind, age, size, missing = (
                part[~last] for part in (index, position, behind, age, size, missing)
            )
            time = self._services(size, np.ones_like(size))
            age = age + draw.standard_gamma(missing) / rate + time
            position, behind = position - size, behind + missing + draw.poisson(rate * time)
        return ends

    def _end(self, ends: _Ends, index: NDArray[np.int64], age: Floats, size: Actions, missing: Actions) -> None:
        """Set the response times of the rows at `index`, whose own batch is the next one.

        Of the two times that are left, that of the batch and that of the arrivals it waits for, the one that varies
        more enters by its law, and the other is drawn. All arguments have the same shape: `age` in ms since arrival,
        `size` of the batch in rows, and the `missing` arrivals in rows.
        """
        mean, cv, rate = self._profile.service_time_ms[size - 1], self._profile.cv[size - 1], self._rate
        varies = (mean * cv >= np.sqrt(missing) / rate) & ((cv >= _CLEARLY) | (missing == 0))
        kept = varies & (cv >= _CLEARLY)
        waits = self._draw.standard_gamma(np.where(varies, missing, 0.0)) / rate
        ends.base[index] = age + waits + np.where(kept, 0.0, self._services(size, np.ones_like(size)))
        ends.shape[index] = np.where(kept, 1.0 / np.where(kept, cv, 1.0) ** 2, np.where(varies, 0.0, missing))
        ends.scale[index] = np.where(kept, mean * cv**2, 1.0 / rate)

    def _arrive(self, state: NDArray[np.int64]) -> tuple[Actions, Actions, Floats]:
        """Return each row's place in the queue (from 1), the rows behind it, and its age in ms, at the first decision
        after its arrival. All have the shape (N,) of `state`.
        """
        size = self._actions[np.minimum(state, len(self._actions) - 1)]
        met = self._services(size, np.ones_like(size), longer=True)
        part = self._draw.random(len(state))
        before, after = (self._draw.poisson(self._rate * met * share) for share in (part, 1.0 - part))
        return state - size + before + 1, after, met * (1.0 - part)

    def _services(self, size: Actions, count: Actions, *, longer: bool = False) -> Floats:
        """Return the time in ms that `count` batches of `size` rows take, 0 for size 0; arguments of the same shape.

        With `longer` the times are distributed as for the batch that a row finds under way, of which long ones are
        more frequent.
        """
        mean, cv = self._profile.service_time_ms[size - 1], self._profile.cv[size - 1]
        if not cv.any():
            return np.where(size > 0, mean * count, 0.0)
        varied = np.where(cv > 0.0, cv**2, 1.0)
        drawn = self._draw.standard_gamma(np.where(cv > 0.0, count / varied + longer, 0.0)) * varied
        return np.where(size > 0, mean * np.where(cv > 0.0, drawn, count), 0.0)


def _later_than(ends: _Ends, weights: Floats, share: float, near: float) -> tuple[float, float]:
    """Return the time in ms after which the given share of the weights ends, and its relative standard error.

    `weights` has shape (N,). `near` (ms) is a first guess.
    """
    wanted, tail = share * float(weights.sum()), _Tail(ends)

    def later(time: float) -> float:
        return float(weights @ tail(time)) / wanted

    low, high, by = near, near, 1.0 + _STEP
    at_low = at_high = later(near)
    while at_low <= 1.0:
        low, high, at_high, by = low / by, low, at_low, by * by
        at_low = later(low)
    while at_high > 1.0:
        low, high, at_low, by = high, high * by, at_high, by * by
        at_high = later(high)
    slope, moved = (at_low - at_high) / log(high / low), 0
    while high - low > _FINE * high:
        # As if it fell exponentially; a little to the other side of that, if it was the same end that moved last.
        part = log(at_low) / log(at_low / max(at_high, 1e-12))
        middle = low + part * (high - low) + moved * _FINE / 2.0 * high
        middle = min(max(middle, low + (high - low) / 10.0), high - (high - low) / 10.0)
        seen = later(middle)
        if seen > 1.0:
            low, at_low, moved = middle, seen, 1
        else:
            high, at_high, moved = middle, seen, -1
    # The rows are in the order of their rank: neighbours differ by what the rank does not decide.
    off = float(np.sqrt(np.sum(np.diff(weights * (tail(high) - share)) ** 2) / 2.0)) / wanted
    return high, off / max(slope, 1e-12)


class _Tail:
    """The probability that each row ends later than a time."""

    def __init__(self, ends: _Ends) -> None:
        varies = ends.shape > 0.0
        self._base, self._shape = ends.base, np.where(varies, ends.shape, 1.0)
        self._scale = np.where(varies, ends.scale, 1.0)
        self._far = np.where(varies, ends.shape + 6.0 * np.sqrt(ends.shape) + 12.0, 0.0)  # as good as never later
        self._logarithm = log_gamma(self._shape)

    def __call__(self, time: float) -> Floats:
        """Return the probability for each row that it ends later than `time` (ms); shape (N,)."""
        later = (self._base > time).astype(np.float64)
        left = (time - self._base) / self._scale
        some = np.flatnonzero((left >= 0.0) & (left < self._far))
        later[some] = gamma_tail(self._shape[some], left[some], self._logarithm[some])
        return later
