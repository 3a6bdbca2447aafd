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
waits. A decision takes one look-up per model. docs/explanation/sharing-a-device.md compares it with the exact optimum
for two models.

Rates are in rows per second, times in milliseconds, as in smdp.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.smdp import Found, longest_of, solve_long
from weir.policy.solve.tables import Table, extended, greedy_table

BUSIEST = 0.97  # a device with more load is solved for this load: then every table is stable


class DeviceLoad(NamedTuple):
    """What a model asks of the device.

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
    """What one model does on the shared device.

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
        """Return the urgency of so many rows, at least 1."""
        last = len(self.urgency) - 1
        if waiting <= last:
            return float(self.urgency[waiting])
        return float(self.urgency[last]) + self.slope * (waiting - last)


def device_load(loads: Sequence[DeviceLoad]) -> float:
    """Return ρ, the share of time for which the device is busy if all models run their best batches."""
    return sum(each.rate / each.profile.max_rate for each in loads)


def solve_device(loads: Sequence[DeviceLoad]) -> list[DeviceTable]:
    """Return the table of each model, in the order of `loads`, for the least cost of all.

    The cost is the mean over all requests of their response time in ms, weighted by model, plus the mean power in watts,
    weighted likewise. A model without arrivals never waits and counts as urgent as its first row is. If the models
    ask for more than the device has, they are solved at BUSIEST with rates in the same proportions.
    """
    busy = device_load(loads)
    shrunk = min(1.0, BUSIEST / busy) if busy else 1.0
    rates = [each.rate * shrunk for each in loads]
    total, free = sum(rates), 1.0 - busy * shrunk
    return [
        _table(load, rate, rate / load.profile.max_rate + free * rate / total, total) if rate else _unused(load)
        for load, rate in zip(loads, rates, strict=True)
    ]


def _table(load: DeviceLoad, rate: float, share: float, total: float) -> DeviceTable:
    """Return the table of a model that has `share` of the device; rates in rows per second."""
    profile = load.profile
    # The latency weight is that of a mean over the model's own requests, `rate` of `total`.
    prices = Prices(latency_weight=load.weight * rate / total, energy_weight=load.energy_weight)
    found = solve_long(profile.scaled(time=1.0 / share), rate, prices, longest_of(profile))
    length = found.model.longest + 1
    table = extended(found.table, length)
    grows = total * rate / 1e6  # Λ·λ, per ms²
    growth = load.weight * np.arange(length) + grows * _steps(found) - total / 1000.0 * found.improved.values.cost
    times = np.concatenate(([np.inf], profile.service_time_ms))[table]
    slope = (load.weight + 2.0 * grows * found.improved.values.bend) / float(times[-1])
    return DeviceTable(table, np.where(table > 0, growth / times, -np.inf), slope)


def _steps(found: Found) -> Floats:
    """Return h(q + 1) - h(q) for q = 0 ... longest."""
    values = found.improved.values
    steps: Floats = np.diff(np.append(values.states, values.above[0]))
    return steps


def _unused(load: DeviceLoad) -> DeviceTable:
    """Return the table of a model whose requests hardly ever come: a row grows its cost by its weight, and Λ·g is 0."""
    table = greedy_table(load.profile.max_batch_size)
    times = np.concatenate(([np.inf], load.profile.service_time_ms))[table]
    return DeviceTable(table, load.weight * np.arange(len(table)) / times, load.weight / float(times[-1]))
