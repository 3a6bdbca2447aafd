"""One order for several models that share a device: whose batch is next, and how many rows it has.

The device runs one batch at a time and never interrupts it. Requests of model k arrive at rate λ_k (Poisson), a batch
of b rows takes τ_k(b). The exact solution has one dimension per model, so here each model is solved alone, as if a
share of the device were its own, and its relative values say how fast its cost grows while it waits:

    ρ_k = λ_k · min over b of τ_k(b)/b,  ρ = Σ ρ_k,  Λ = Σ λ_k
    f_k = ρ_k + (1 - ρ) · λ_k/Λ                             the share: what the model needs, and a part of what is left
    h_k, g_k, b_k(q)                                        values, cost and table of model k with times τ_k/f_k
    R_k(q) = w_k·q + Λ·λ_k·(h_k(q + 1) - h_k(q)) - Λ·g_k    growth of the cost while model k waits with q rows

Serving model i first costs model j about τ_i·R_j, so i goes first if R_i/τ_i > R_j/τ_j: of the models whose table
dispatches, the one with the largest R_k(q)/τ_k(b_k(q)), its *urgency*, is served. The device idles only if every table
waits. A decision takes one look-up per model.

No share is the best one for all models: `variants` has the order above; with tables of the share ρ_k + 1 - ρ instead,
which wait less; with what is left divided equally; and the longest queue first, which never waits. The same arrivals
are played with each (`play`), the cheapest is taken, and its urgencies are corrected (`solve_device`).

Rates are in rows per second, times in milliseconds, as in smdp.py.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from heapq import heapreplace
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from weir.policy.cost import Floats, Prices, Profile
from weir.policy.solve.smdp import Found, longest_of, solve_long
from weir.policy.solve.tables import Table, extended, greedy_table

BUSIEST = 0.97  # a device with more load is solved for this load: then every table is stable


class DeviceLoad(NamedTuple):
    """Says what a model asks of the device.

    Attributes:
        profile: times and energies of its batches while they have the device to themselves.
        rate: its arrivals in rows per second; 0 if there are none.
        weight: what a millisecond of its requests counts, compared with those of other models.
        energy_weight: what a watt of its batches counts.
    """

    profile: Profile
    rate: float
    weight: float = 1.0
    energy_weight: float = 0.0


class DeviceTable(NamedTuple):
    """Says what one model does on the shared device.

    Attributes:
        table: the batch, in rows, by rows waiting; 0 is to wait.
        urgency: by rows waiting, how much sooner the model must be served than another; shape of `table`. It is
            comparable only with tables that were solved together.
        slope: how much the urgency grows with each row beyond the end of the table.
    """

    table: Table
    urgency: Floats
    slope: float

    def urgency_of(self, waiting: int) -> float:
        """Return the urgency of that many rows, at least 1."""
        last = len(self.urgency) - 1
        if waiting <= last:
            return float(self.urgency[waiting])
        return float(self.urgency[last]) + self.slope * (waiting - last)

    def tilted(self, factor: float) -> "DeviceTable":
        """Return this table with urgencies that are that many times as high."""
        return self._replace(urgency=factor * self.urgency, slope=factor * self.slope)


def device_load(loads: Sequence[DeviceLoad]) -> float:
    """Return ρ, the share of time for which the device is busy if all models run their best batches."""
    return sum(each.rate / each.profile.max_rate for each in loads)


def variants(loads: Sequence[DeviceLoad], batches: int = 1) -> list[list[DeviceTable]]:
    """Return orders of the models, of which one is nearly the best: for each, the table of each model in the order of `loads`.

    A device that runs several `batches` at once is taken for one that is that many times as fast.

    The cost is the mean over all requests of their response time in ms, weighted by model, plus the mean power in watts,
    weighted likewise. A model without arrivals never waits. If the models ask for more than the device has, they are
    solved at BUSIEST with rates in the same proportions.
    """
    busy = device_load(loads) / batches
    shrunk = min(1.0, BUSIEST / busy) / batches if busy else 1.0
    loads = [each._replace(rate=each.rate * shrunk) for each in loads]
    used, total, free = (
        [each for each in loads if each.rate],
        sum(each.rate for each in loads),
        1.0 - min(busy, BUSIEST),
    )
    made: dict[int, list[DeviceTable]] = {}  # by index: the tables of one model in each variant
    for index, load in enumerate(loads):
        longest = _longest_first(load)
        if not load.rate:
            made[index] = [*[_unused(load)] * 3, longest]
            continue
        need = load.rate / load.profile.max_rate
        own, eager, equal = (
            _solved(load, need + part, total) for part in (free * load.rate / total, free, free / len(used))
        )
        made[index] = [own.table(own), own.table(eager), equal.table(equal), longest]
    return [list(each) for each in zip(*made.values(), strict=True)]


class _Solved(NamedTuple):
    """A model with a share of the device: its batches, and how fast the cost grows while it waits, by rows waiting."""

    profile: Profile
    sizes: Table
    growth: Floats
    bend: float  # what the growth grows by with each row beyond the end

    def table(self, sizes: "_Solved") -> DeviceTable:
        """Return the order by this growth with the batches of `sizes`."""
        table = extended(sizes.sizes, len(self.growth))
        times = np.concatenate(([np.inf], self.profile.service_time_ms))[table]
        urgency = np.where(table > 0, self.growth / times, -np.inf)
        return DeviceTable(table, urgency, self.bend / float(times[-1]))


def _solved(load: DeviceLoad, share: float, total: float) -> _Solved:
    """Solve a model that has `share` of the device. `total` is the rate of all models."""
    profile, rate = load.profile, load.rate
    # The latency weight is that of a mean over the model's own requests, `rate` of `total`.
    prices = Prices(latency_weight=load.weight * rate / total, energy_weight=load.energy_weight)
    found = solve_long(profile.scaled(time=1.0 / share), rate, prices, longest_of(profile))
    length = found.model.longest + 1
    grows = total * rate / 1e6  # Λ·λ, per ms²
    growth = load.weight * np.arange(length) + grows * _steps(found) - total / 1000.0 * found.improved.values.cost
    return _Solved(profile, found.table, growth, load.weight + 2.0 * grows * found.improved.values.bend)


def _steps(found: Found) -> Floats:
    """Return h(q + 1) - h(q) for q = 0 ... longest."""
    values = found.improved.values
    steps: Floats = np.diff(np.append(values.states, values.above[0]))
    return steps


def _longest_first(load: DeviceLoad) -> DeviceTable:
    """Return the table that never waits, as urgent as rows wait, times what they count."""
    table = greedy_table(load.profile.max_batch_size)
    return DeviceTable(table, load.weight * np.arange(len(table), dtype=np.float64), load.weight)


def _unused(load: DeviceLoad) -> DeviceTable:
    """Return the table of a model whose requests hardly ever come: q rows grow the cost by q times their weight."""
    profile, table = load.profile, greedy_table(load.profile.max_batch_size)
    grows = _Solved(profile, table, load.weight * np.arange(len(table), dtype=np.float64), load.weight)
    return grows.table(grows)


def play(
    loads: Sequence[DeviceLoad], tables: Sequence[DeviceTable], arrivals: Sequence[Sequence[float]], batches: int = 1
) -> float:
    """Return the mean cost of the requests that arrive at `arrivals`, for each model ascending instants in ms, on a device that runs that many
    `batches` at once.

    Batches take their mean time. The cost is that of `variants`.
    """
    times = [[0.0, *each.profile.service_time_ms.tolist()] for each in loads]
    energies = [[0.0, *(each.energy_weight * each.profile.energy_mj).tolist()] for each in loads]
    sums = [[0.0, *accumulate(each)] for each in arrivals]
    sizes, urgencies = [each.table.tolist() for each in tables], [each.urgency.tolist() for each in tables]
    served, models, ends = [0] * len(loads), range(len(loads)), [0.0] * batches
    now = waited = energy = 0.0
    while True:
        chosen, most, rows = -1, -inf, 0
        for k in models:
            waiting = bisect(arrivals[k], now) - served[k]
            last = len(sizes[k]) - 1
            size = sizes[k][waiting if waiting < last else last]
            if size:
                urgency = urgencies[k][waiting] if waiting <= last else tables[k].urgency_of(waiting)
                if urgency > most:
                    chosen, most, rows = k, urgency, size
        if chosen < 0:
            coming = [each[index] for each in arrivals if (index := bisect(each, now)) < len(each)]
            if not coming:
                break
            now = min(coming)
            continue
        end = now + times[chosen][rows]
        heapreplace(ends, end)
        energy += energies[chosen][rows]
        first = served[chosen]
        served[chosen] = first + rows
        waited += loads[chosen].weight * (rows * end - sums[chosen][first + rows] + sums[chosen][first])
        now = max(now, ends[0])
    # What waits at the end for rows that never come would hardly count.
    return waited / max(1, sum(served)) + energy / max(*ends, 1e-9)


PLAYED = 30_000  # requests
TILT, TILTS, WORTH = 2.0**0.5, 4, 0.002  # see `_tilted`
Tables = list[DeviceTable]


def solve_device(loads: Sequence[DeviceLoad], batches: int = 1, *, requests: int = PLAYED, seed: int = 1) -> Tables:
    """Return the tables of models that share a device, in the order of `loads`: of the variants the one that costs least on that many
    requests with Poisson arrivals, with urgencies that are corrected on the same requests. The device runs `batches` batches at once.
    """
    tried = variants(loads, batches)
    total = sum(each.rate for each in loads)
    if len(loads) < 2 or not total:
        return tried[0]
    arrivals = []
    for number, each in enumerate(loads):
        gaps = np.random.default_rng([seed, number]).exponential(1.0, max(1, round(requests * each.rate / total)))
        arrivals.append((np.cumsum(gaps) * 1000.0 / each.rate).tolist() if each.rate else [])

    def cost(tables: Tables) -> float:
        return play(loads, tables, arrivals, batches)

    return _tilted(loads, min(((cost(tables), tables) for tables in tried), key=itemgetter(0)), cost)


def _tilted(loads: Sequence[DeviceLoad], found: tuple[float, Tables], cost_of: Callable[[Tables], float]) -> Tables:
    """Return the tables of `found` (their cost, and they), with the urgencies of each model multiplied by what makes them cost least.

    The urgency of a model says nothing of what its batch costs another that comes meanwhile, so where batches differ much in length, one model's
    is worth more or less than it says. Up to TILTS factors TILT are tried in either direction, as long as each saves the part WORTH.
    """
    cost, tables = found
    ranked = sorted((index for index, each in enumerate(loads) if each.rate), key=lambda index: loads[index].rate)
    for index in ranked[:-1]:  # only ratios count
        for factor in (TILT, 1.0 / TILT):
            before = cost
            for _ in range(TILTS):
                tilted = [*tables]
                tilted[index] = tables[index].tilted(factor)
                trial = cost_of(tilted)
                if trial > cost * (1.0 - WORTH):
                    break
                cost, tables = trial, tilted
            if cost < before:
                break
    return tables
