"""event_loop.c from Python: what a table does, simulated by a program that shares nothing with Weir.

What is seen is made sharper by control variates. For any function u of the line's length, the mean change of u by a decision
is 0 over many decisions; that change is computed here, from the definition of the model. If u are the values that Weir's
solver says the states have, then what is left of the noise is little. If they are wrong, the interval is wide, and still right.
Of each batch also its time's difference from the mean, and that of the number of arrivals in it, are taken off: their means are
known to be 0.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from weir.numerics import student_quantile
from weir.policy.cost import Floats, Prices, Profile
from weir.policy.solve.smdp import Costs, SteadyQueue
from weir.policy.solve.tables import Table, checked_table, stacked

LEVEL = 0.999  # of intervals
SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


class Interval(NamedTuple):
    """A mean over the stretches and its interval, by Student's t."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Seen:
    """What was seen in each of some stretches of one long run: the mean response time, the mean power, a quantile of the
    response time, and the shares [stretch, limit] of the rows that took longer than some limits. With controls, `sharp` has
    the sharper means of the response time and of power: [stretch, which]."""

    means: Floats
    powers: Floats
    quantiles: Floats
    shares: Floats
    sharp: Floats

    @property
    def later(self) -> list[Interval]:
        """The share of the rows that took longer, by limit."""
        return [interval(each) for each in self.shares.T]


@dataclass(frozen=True, eq=False)
class Controls:
    """The mean change of two functions of the line's length by a decision, for lines of up to `top` rows [which, length], and
    for longer ones: what it is at `top`, and its slope."""

    drifts: Floats
    first: Floats
    slope: Floats

    @property
    def top(self) -> int:
        """The longest line whose changes are known one by one."""
        return int(self.drifts.shape[1]) - 1


MOST_ABOVE = 1500  # values above the solver's longest line


def controls(profile: Profile, rate: float, table: Table) -> Controls:
    """Return the controls that the solver's values of response time and power are: as functions they are Weir's, but their
    mean changes are computed apart."""
    served_line = SteadyQueue(profile, rate / 1000.0, table)
    model, actions = served_line.model, served_line.actions
    squares = (1.0 + profile.cv**2) * profile.service_time_ms**2 / 2.0
    wanted = (Costs(np.append(0.0, squares), 1000.0 / rate), Costs(np.append(0.0, profile.energy_mj), 0.0))
    made = [model.values(costs, actions) for costs in wanted]
    longest = len(made[0].states) - 1
    lengths = np.arange(longest + min(MOST_ABOVE, len(made[0].above)) + 1)
    # Each is a quadratic in x, the rows above the longest, and a rest that is not 0 in the lengths above only.
    above = lengths - longest
    bends, slopes = (np.array([getattr(each, name) for each in made]) for name in ("bend", "slope"))
    whole = np.array([np.append(each.states, each.above)[: len(lengths)] for each in made])
    rests = whole - slopes[:, None] * above - bends[:, None] * above**2 - np.array([[each.constant] for each in made])
    return changes(profile, rate, table, longest, rests, slopes, bends)


def changes(
    profile: Profile, rate: float, table: Table, zero: int, rests: Floats, slopes: Floats, bends: Floats
) -> Controls:
    """Return the controls of functions [which] that are `rests` of the line's length, 0 where it is longer, plus slope·x +
    bend·x², x the rows above `zero`."""
    rate_per_ms, kept, last = rate / 1000.0, rests.shape[1], int(table[-1])
    top = max(kept, len(table)) + last
    padded = np.concatenate((rests, np.zeros((len(rests), 2 * top))), axis=1)
    actions = np.array([int(table[min(n, len(table) - 1)]) for n in range(top + 2)])
    drifts = np.empty((len(rests), top + 2))
    for batch in np.unique(actions).tolist():
        lengths = np.flatnonzero(actions == batch)
        law, mean, square = _arrivals(profile, rate_per_ms, batch, kept + 1)
        by, twice = mean - batch, square - 2.0 * mean * batch + batch**2
        left = sliding_window_view(padded, len(law), axis=1)[:, lengths - batch] @ law
        x = lengths - zero
        change = slopes[:, None] * by + bends[:, None] * (2.0 * x * by + twice)
        drifts[:, lengths] = left - padded[:, lengths] + change
    return Controls(np.ascontiguousarray(drifts[:, :-1]), drifts[:, -2].copy(), drifts[:, -1] - drifts[:, -2])


def _arrivals(profile: Profile, rate_per_ms: float, batch: int, most: int) -> tuple[Floats, float, float]:
    """Return the law of the arrivals until the next decision, up to `most`, their mean and their mean square."""
    if not batch:
        return np.array([0.0, 1.0]), 1.0, 1.0
    counts = np.arange(most + 1)
    mean, cv = rate_per_ms * float(profile.service_time_ms[batch - 1]), float(profile.cv[batch - 1])
    shape = 1.0 / cv**2 if cv else np.inf
    from scipy.stats import nbinom, poisson  # takes seconds to import, and tests import this module

    law = nbinom.pmf(counts, shape, shape / (shape + mean)) if cv else poisson.pmf(counts, mean)
    return np.asarray(law, dtype=np.float64), mean, mean + (1.0 + cv**2) * mean**2


@cache
def compiled(source: Path) -> ctypes.CDLL:
    """Return the functions of a file in C."""
    folder = Path(mkdtemp(prefix="weir-compiled-"))
    made = folder / source.with_suffix(".so").name
    assert COMPILER
    subprocess.run(
        [COMPILER, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(made), str(source), "-lm"], check=True
    )
    library = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return library


def served(
    profile: Profile, rate: float, table: Table, rows: int, *, parts: int = 20, warm: int = 0, share: float = 0.99,
    late: Sequence[float] = (), seed: int = 1, sharpened: Controls | None = None,
) -> Seen:  # fmt: skip
    """Serve `parts` stretches of `rows` rows that arrive at `rate` per second (Poisson) by `table`, after `warm` others.
    The shares are those of the rows that took longer than each of `late`, in ms; a `share` of 0 is for no quantile."""
    results = [np.zeros(parts) for _ in range(3)] + [np.empty(parts * len(late)), np.empty(3 * parts)]
    given = sharpened or Controls(np.empty((2, 0)), np.empty(2), np.empty(2))
    entries = np.ascontiguousarray(checked_table(table, profile.max_batch_size), dtype=np.intc)
    limits = np.array(late, dtype=np.float64) - profile.latency_offset_ms
    failed = compiled(SOURCE).serve(
        ctypes.c_int(profile.max_batch_size), pointer(profile.service_time_ms), pointer(profile.energy_mj),
        pointer(profile.cv), ctypes.c_int(len(entries)), entries.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
        ctypes.c_double(rate / 1000.0), ctypes.c_long(warm), ctypes.c_long(rows), ctypes.c_int(parts),
        ctypes.c_double(share), ctypes.c_int(len(late)), pointer(limits), ctypes.c_uint64(seed),
        ctypes.c_int(given.top), pointer(given.drifts), pointer(given.first), pointer(given.slope),
        *map(pointer, results),
    )  # fmt: skip
    if failed:
        raise MemoryError("event_loop.c")
    means, powers, quantiles, shares, sums = results
    offset, (response, energy, time) = profile.latency_offset_ms, sums.reshape(parts, 3).T
    sharp = np.stack((response / time + offset, energy / time), axis=1) if sharpened else np.empty((parts, 0))
    return Seen(means + offset, powers, quantiles + offset, shares.reshape(parts, len(late)), sharp)


def served_by_several(
    profile: Profile, rate: float, tables: Sequence[Table], rows: int, *, parts: int = 20, warm: int = 0,
    share: float = 0.99, late: Sequence[float] = (), seed: int = 1, bends: Sequence[float] = (),
) -> Seen:  # fmt: skip
    """Serve rows as `served` does, with as many workers as there are `tables`: one for each number of idle workers.

    With `bends`, `sharp` has the mean response time by the number of rows in the system (Little), and the mean changes of the
    work and of the squares of what is above each of `bends`, in ms of work: [stretch, which]. See `sharper`.
    """
    workers, largest = len(tables), profile.max_batch_size
    entries = np.ascontiguousarray(stacked([checked_table(each, largest) for each in tables]), dtype=np.intc)
    results = [np.zeros(parts) for _ in range(3)] + [np.empty(parts * len(late)), np.zeros(parts * (len(bends) + 2))]
    limits = np.array(late, dtype=np.float64) - profile.latency_offset_ms
    failed = compiled(SOURCE).serve_several(
        ctypes.c_int(workers), ctypes.c_int(largest), pointer(profile.service_time_ms), pointer(profile.energy_mj),
        pointer(profile.cv), ctypes.c_int(entries.shape[1]), entries.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
        ctypes.c_double(rate / 1000.0), ctypes.c_long(warm), ctypes.c_long(rows), ctypes.c_int(parts),
        ctypes.c_double(share), ctypes.c_int(len(late)), pointer(limits), ctypes.c_uint64(seed), ctypes.c_int(len(bends)),
        pointer(np.array(bends, dtype=np.float64)), ctypes.c_double(1000.0 / profile.max_rate), *map(pointer, results),
    )  # fmt: skip
    if failed:
        raise MemoryError("event_loop.c")
    means, powers, quantiles, shares, sharp = results
    offset, changes = profile.latency_offset_ms, sharp.reshape(parts, len(bends) + 2)
    changes[:, 0] = changes[:, 0] * 1000.0 / rate + offset
    return Seen(
        means + offset, powers, quantiles + offset, shares.reshape(parts, len(late)), changes if bends else np.empty((parts, 0))
    )  # fmt: skip


def planned(profile: Profile, rate: float, prices: Prices, top: int, table: Table | None = None) -> tuple[float, Table]:
    """Return the least cost per ms at `rate` rows per second of all policies for one worker, and the best table; or the
    cost of `table`, and that table. Queues are cut off at `top` rows.
    """
    lengths, largest, per_ms = np.arange(top + 1), profile.max_batch_size, rate / 1000.0
    start = (
        np.minimum(lengths, profile.best_batch_size) if table is None else table[np.minimum(lengths, len(table) - 1)]
    )
    actions = np.ascontiguousarray(start, dtype=np.intc)
    law = np.ascontiguousarray([_arrivals(profile, per_ms, size, top)[0] for size in range(1, largest + 1)])
    plan = compiled(SOURCE).plan
    plan.restype = ctypes.c_double
    cost = plan(
        ctypes.c_int(largest), pointer(profile.service_time_ms), pointer(profile.energy_mj), pointer(profile.cv),
        pointer(law), ctypes.c_double(per_ms), ctypes.c_int(top),
        ctypes.c_double(prices.latency_weight_at(rate) / per_ms), ctypes.c_double(prices.energy_weight),
        ctypes.c_int(100 if table is None else 0), actions.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
    )  # fmt: skip
    if cost < 0.0:
        raise MemoryError("event_loop.c")
    return cost + prices.latency_weight_at(rate) * profile.latency_offset_ms, actions.astype(np.uint16)


def pointer(values: Floats) -> object:
    """Return `values` as a function in C takes them."""
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_double))


def interval(parts: Floats, confidence: float = LEVEL) -> Interval:
    """Return the mean of `parts` and its interval, by Student's t."""
    mean, of = float(np.mean(parts)), len(parts)
    half = student_quantile(of - 1, 0.5 + confidence / 2.0) * float(np.std(parts, ddof=1)) / of**0.5
    return Interval(mean, mean - half, mean + half)


def sharper(parts: Floats, changes: Floats, confidence: float = LEVEL) -> Interval:
    """Return the mean of `parts` and its interval, without what goes with `changes` [stretch, which], whose means are 0: the
    constant of their regression, by Student's t."""
    spread = changes.std(axis=0)
    used = np.column_stack((np.ones(len(parts)), changes[:, spread > 0.0] / spread[spread > 0.0]))
    inverse = np.linalg.pinv(used)
    slopes, left = inverse @ parts, len(parts) - int(np.linalg.matrix_rank(used))
    beyond = parts - used @ slopes
    error = float((beyond @ beyond / left * (inverse[0] @ inverse[0])) ** 0.5)
    half = student_quantile(left, 0.5 + confidence / 2.0) * error
    return Interval(float(slopes[0]), float(slopes[0]) - half, float(slopes[0]) + half)
