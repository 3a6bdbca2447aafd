"""The best table at one rate (`solve`), and a bank: one table for each of some rates, with what each is predicted to do.

A bank is what a server loads and runs.
"""

import io
import json
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices, unavoidable_power_w
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.evaluation import Performance, evaluate
from weir.policy.solve.quantile import QuantileSampler
from weir.policy.solve.smdp import LONGEST, Actions, check_rate, longest_of, solve_long
from weir.policy.solve.tables import Table, checked_table, limit_of, stacked

FORMAT = 1  # of the file
_FLOATS = ("rates", "shares", "response_time_ms", "p99_ms", "power_w")
_TABLES = ("tables", "second_tables")
# What numpy and zipfile raise for bytes that are something else, or damaged.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bank:
    """Entry i of each array belongs to `rates[i]`.

    Attributes:
        profile: what a batch costs on one worker.
        prices: what the tables were solved for.
        workers: how many workers serve the queue.
        objective: the promise about latency, if there is one.
        rates: rows per second in all, ascending; shape [R].
        tables: uint16 [R, S], see tables.py.
        second_tables: uint16 [R, S]; equal to `tables` where one table is enough.
        shares: the share of batches that the second table decides, 0 to 1.
        max_waiting: rows beyond which arrivals are refused; 0 for no bound.
        response_time_ms, p99_ms, power_w: predicted mean and 99th percentile of the response time, and mean power of
            all workers together.

    Raises SettingsError naming the array, the entry and the rule.
    """

    profile: Profile
    prices: Prices
    workers: int
    objective: LatencySLO | None
    rates: Floats
    tables: NDArray[np.uint16]
    second_tables: NDArray[np.uint16]
    shares: Floats
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
        for name in _TABLES:
            self._keep_tables(name)

    def limits(self) -> NDArray[np.int64]:
        """Return the control limit of each table: the smallest number of waiting rows that it serves."""
        return np.asarray(np.argmax(self.tables > 0, axis=1), dtype=np.int64)

    def index_of(self, rate: float) -> int:
        """Return the index of the table for `rate`: that of the rate nearest by ratio."""
        return int(np.searchsorted(np.sqrt(self.rates[:-1] * self.rates[1:]), rate))

    @property
    def capacity(self) -> float:
        """The rows per second that all workers together can serve."""
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
        arrays = {name: getattr(self, name) for name in (*_FLOATS, "max_waiting", *_TABLES)}
        np.savez(buffer, about=np.array(json.dumps(about)), **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "bank", *, profile: Profile | None = None) -> "Bank":
        """Return the bank that `to_bytes` wrote; whoever has its profile already saves the time to read it.

        Raises SettingsError naming `source` and what is wrong.
        """
        if not data.startswith(b"PK"):  # else numpy takes it for a pickle, and advises to trust it
            raise SettingsError(f"{source}: must be a bank made by `weir solve`: is no npz file")
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                return cls._of(about, profile, {name: arrays[name] for name in (*_FLOATS, "max_waiting", *_TABLES)})
        except SettingsError as error:
            raise SettingsError(f"{source}: {error.message}") from None
        except _UNREADABLE as error:
            raise SettingsError(f"{source}: must be a bank made by `weir solve`: {error}") from error

    @classmethod
    def _of(cls, about: dict[str, Any], profile: Profile | None, arrays: dict[str, Any]) -> "Bank":
        if about.get("weir_bank") != FORMAT:
            raise SettingsError(f"weir_bank={about.get('weir_bank')!r}: must be {FORMAT}")
        objective = about["objective"]
        return cls(
            profile=profile or Profile.from_toml(about["profile"]),
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
        for name, smallest, largest in (("shares", 0.0, 1.0), ("max_waiting", 0, np.inf)):
            values = getattr(self, name)
            good = (values >= smallest) & (values <= largest)
            if not good.all():
                i = int(np.argmin(good))
                raise SettingsError(
                    f"{name}: {values[i]} for rate {self.rates[i]:g}: must be {smallest:g} to {largest:g}"
                )

    def _keep_tables(self, name: str) -> None:
        values = np.asarray(getattr(self, name))
        if values.ndim != 2:
            raise SettingsError(f"{name}: must have shape [rates, states]; has {values.shape}")
        rows = [checked_table(row, self.profile.max_batch_size, name) for row in values]
        self._keep(name, np.array(rows, dtype=np.uint16), (len(self.rates), values.shape[1]))


def solve_bank(profile: Profile, prices: Prices | None = None, *, rates: ArrayLike | None = None) -> Bank:
    """Return the best tables of one worker for each of `rates` (rows per second, ascending), with what they are predicted
    to do. By default 24 from 0.1 % to 97 % of the profile's capacity, and as many between them as it takes to have
    neighbours with different limits no more than 20 % apart.

    Raises SettingsError for a rate that cannot be served.
    """

    prices = prices or Prices()
    if rates is None:
        found = solve_between(profile, prices, solve_rates(profile, prices, default_rates(profile.max_rate)))
    else:
        found = solve_rates(profile, prices, np.array(rates, dtype=np.float64, ndmin=1))
    tables = stacked([each.table for each in found])
    count = len(found)
    return Bank(
        profile=profile,
        prices=prices,
        workers=1,
        objective=None,
        rates=np.array([each.rate for each in found]),
        tables=tables,
        second_tables=tables,
        shares=np.zeros(count),
        max_waiting=np.zeros(count, dtype=np.int64),
        response_time_ms=np.array([each.response_time_ms for each in found]),
        p99_ms=np.array([each.p99_ms for each in found]),
        power_w=np.array([each.power_w for each in found]),
    )


def default_rates(capacity: float) -> Floats:
    """Return the rates of a bank for a capacity in rows per second: a dozen in equal ratios from 0.1 % to 20 % of it,
    where a table's limit moves with the ratio, then a dozen in equal steps to 97 %."""
    low = np.geomspace(0.001, 0.2, 12)
    high = np.linspace(0.2, 0.97, 13)[1:]
    return np.asarray(capacity * np.concatenate((low, high)), dtype=np.float64)


# Solve one rate after another, each from the best actions of the one before.


# How far apart neighbouring rates with different limits may be. A server knows its rate to 10 % at best. Where rates are
# 60 % apart, the nearest table costs up to 5 % too much between them; so it is 0.3 % (the paper's profile).
RATIO = 1.2


class SolvedRate(NamedTuple):
    """The best table at one rate, and what it is predicted to do. `actions` are those it was made from, for queues of any length:
    the table has the full-batch rule in their place where queues are not met, which is no good start for another rate."""

    rate: float
    table: Table
    actions: Table
    response_time_ms: float
    p99_ms: float
    power_w: float


def solve_rates(profile: Profile, prices: Prices, rates: Floats) -> list[SolvedRate]:
    """Return the best table for each of `rates` (rows per second). Raises SettingsError for one that cannot be served."""
    found: list[SolvedRate] = []
    for rate in rates.tolist():
        found.append(_solve(profile, prices, rate, found[-1].actions if found else None))
    return found


def solve_between(profile: Profile, prices: Prices, found: list[SolvedRate]) -> list[SolvedRate]:
    """Return `found` with rates added, halfway by ratio, wherever the limit changes from one rate to the next and they are
    further apart than RATIO."""
    result = found[:1]
    for each in found[1:]:
        result += [*_between(profile, prices, result[-1], each), each]
    return result


def _between(profile: Profile, prices: Prices, low: SolvedRate, high: SolvedRate) -> list[SolvedRate]:
    if limit_of(low.table) == limit_of(high.table) or high.rate <= RATIO * low.rate:
        return []
    middle = _solve(profile, prices, sqrt(low.rate * high.rate), low.actions)
    return [*_between(profile, prices, low, middle), middle, *_between(profile, prices, middle, high)]


def _solve(profile: Profile, prices: Prices, rate: float, start: Table | None) -> SolvedRate:
    check_rate(profile, rate)
    found = solve_long(profile, rate, prices, longest_of(profile), start)
    seen, offset = found.served.rates, profile.latency_offset_ms
    p99 = QuantileSampler(found.served).quantile_ms(0.99)
    actions = found.improved.actions.astype(np.uint16)
    return SolvedRate(rate, found.table, actions, seen.response_time_ms + offset, p99 + offset, seen.power_w)


# Solve for the best table at one rate.


NOTHING = 1e-12  # a cost that is none
TOLERANCE = 1e-3  # how much more than the least, relative to it, a table may cost without a warning


@dataclass(frozen=True, eq=False)
class Solution:
    """A solved table, and how it was solved.

    Attributes:
        profile, rate, prices: what was asked; the rate in rows per second.
        table: the best table.
        actions: the best actions by state, 0 ... s_max, and that in all longer queues.
        values: relative values of these states, 0 in state 0.
        cost: g, the cost per ms under the table (equation 14): what `evaluate` says.
        error_bound: how far `cost` may be above the least of all policies that serve one of the sizes that were tried from
            queues above s_max.
        s_max: the longest queue, in rows, whose best action was looked for; what happens above is exact too.
        iterations, seconds: how many steps of policy iteration it took, and how long; None if no clock was given.
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
        """The control limit: the smallest number of waiting rows that is served."""
        return limit_of(self.table)

    @cached_property
    def performance(self) -> Performance:
        """What the table does."""
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
        profile: what a batch costs.
        rate: rows per second.
        prices: what latency and energy are worth.
        start: a table from which policy iteration starts, e.g. that of a rate nearby.
        clock: gives the seconds that `Solution.seconds` is the difference of.

    Warns with a RuntimeWarning that says by how much, if the cost may be more than a thousandth above the least: where rounding
    ends policy iteration.
    Raises SettingsError naming the value: a rate that no policy can serve, a table that cannot be.
    """
    prices = prices or Prices()
    began = clock() if clock else 0.0
    check_rate(profile, rate)
    first = None if start is None else checked_table(start, profile.max_batch_size, "start")
    found = solve_long(profile, rate, prices, max(LONGEST, longest_of(profile)), first)
    model, values = found.model, found.improved.values
    cost, bound = found.cost, found.error_bound
    if not prices.latency_weight:  # it was solved with time at a price, whose optimum is near the one asked for
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
