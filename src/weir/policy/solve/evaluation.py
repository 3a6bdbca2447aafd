"""What a table does, exactly: by the stationary law of the queue under it, without simulation."""

from dataclasses import dataclass
from math import inf

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.smdp import Actions, Served, arrivals
from weir.policy.solve.stationary import band, stationary
from weir.policy.solve.tables import Table, checked_table, extended, limit_of


@dataclass(frozen=True)
class Performance:
    """What a table does at a rate.

    Attributes:
        stable: False if rows arrive faster than the table serves them: then the response time and the cost are infinite,
            and the rest is what a queue that never empties does.
        response_time_ms: mean, with the profile's latency offset.
        power_w: mean power beyond what the machine draws while idle.
        cost: latency_weight·response time + energy_weight·power (equation 3), the weight being that at the rate.
        busy_share: the share of time in which the worker is busy.
        batch_size: mean rows of a batch.
        throughput: rows served per second.
        refused_share: the share of rows that are refused because `max_waiting` wait.
    """

    stable: bool
    response_time_ms: float
    power_w: float
    cost: float
    busy_share: float
    batch_size: float
    throughput: float
    refused_share: float


@dataclass(frozen=True, eq=False)
class QueueLaw:
    """The stationary law of the decisions under a table: `law` and `actions` by state, `rows` waiting in each, and the
    `arrivals` during a batch by its size. The last state stands for all above."""

    law: Floats
    actions: Actions
    rows: Actions
    arrivals: Floats
    rate_per_ms: float


def evaluate(
    profile: Profile, rate: float, table: Table, prices: Prices | None = None, *, max_waiting: int | None = None
) -> Performance:
    """Return what `table` does at `rate` rows per second, Poisson, one worker; see equation 14.

    With `max_waiting`, a row that arrives while that many wait is refused. Without, a table that serves more slowly than
    rows arrive is not an error: its Performance is not stable.

    Raises SettingsError naming the entry of a table that cannot be, or the rate.
    """
    prices = prices or Prices()
    table = _checked(profile, rate, table, max_waiting)
    if max_waiting is None and not is_stable(profile, rate, table):
        return _overloaded(profile, int(table[-1]), prices)
    if max_waiting is None:
        return _unbounded(profile, rate, table, prices)
    line = queue_law(profile, rate / 1000.0, table, np.arange(max_waiting + 1))
    return _bounded(profile, line, prices, max_waiting)


def is_stable(profile: Profile, rate: float, table: Table) -> bool:
    """Say whether the batches that `table` dispatches from a long queue serve more than `rate` rows per second."""
    size = int(table[-1])
    return rate * float(profile.service_time_ms[size - 1]) < 1000.0 * size


def _checked(profile: Profile, rate: float, table: Table, max_waiting: int | None) -> Table:
    if not (np.isfinite(rate) and rate > 0.0):
        raise SettingsError(f"rate={rate!r}: must be a number of rows per second, greater than 0")
    table = checked_table(table, profile.max_batch_size)
    if max_waiting is not None and max_waiting < limit_of(table):
        raise SettingsError(f"max_waiting={max_waiting}: the table waits for {limit_of(table)} rows, which never come")
    return table


def queue_law(profile: Profile, rate_per_ms: float, table: Table, rows: Actions) -> QueueLaw:
    """Return the stationary law of the states with so many `rows` waiting, under `table`; the last stands for all above."""
    actions: Actions = extended(table, len(rows)).astype(np.int64)
    counts = arrivals(profile, rate_per_ms)
    law = stationary(*band(counts, actions, rows))
    return QueueLaw(law, actions, rows, counts, rate_per_ms)


def _bounded(profile: Profile, line: QueueLaw, prices: Prices, max_waiting: int) -> Performance:
    """Return what a table does, from the law of the queue under it, which is never longer than `max_waiting`."""
    rate, serves = line.rate_per_ms, line.actions > 0
    times = np.where(serves, profile.service_time_ms[line.actions - 1], 1.0 / rate)
    energies = np.where(serves, profile.energy_mj[line.actions - 1], 0.0)
    areas, refused = _areas(profile, line, times, max_waiting)
    total = float(line.law @ times)
    refused_share = float(line.law @ refused) / (rate * total)
    response_time = float(line.law @ areas) / (rate * total * (1.0 - refused_share)) + profile.latency_offset_ms
    power = float(line.law @ energies) / total
    latency_weight = prices.latency_weight_at(1000.0 * rate)
    batches = float(line.law @ serves)
    return Performance(
        stable=True,
        response_time_ms=response_time,
        power_w=power,
        cost=latency_weight * response_time + prices.energy_weight * power,
        busy_share=float(line.law @ np.where(serves, times, 0.0)) / total,
        batch_size=float(line.law @ line.actions) / batches,
        throughput=1000.0 * float(line.law @ line.actions) / total,
        refused_share=refused_share,
    )


def _areas(profile: Profile, line: QueueLaw, times: Floats, max_waiting: int) -> tuple[Floats, Floats]:
    """Return the expected rows·ms in the system and the expected rows refused until the next decision, by state."""
    rate, serves = line.rate_per_ms, line.actions > 0
    areas = line.rows * times
    # The k-th arrival of a batch waits, if it is let in, (N - k)^+ / rate on average until the batch ends.
    above = np.cumsum(line.arrivals[:, ::-1], axis=1)[:, ::-1]  # P[N >= k]
    excess = np.zeros((above.shape[0], above.shape[1] + 1))
    excess[:, :-1] = np.cumsum(above[:, ::-1], axis=1)[:, ::-1] - above  # E (N - k)^+ = the sum of P[N >= j] over j > k
    waits = np.cumsum(excess, axis=1) - excess[:, :1]  # over k = 1 ... m
    room = np.minimum(max_waiting - (line.rows - line.actions), excess.shape[1] - 1)
    batch = line.actions - 1
    areas = areas + np.where(serves, waits[batch, room] / rate, 0.0)
    return areas, np.where(serves, excess[batch, room], 0.0)


def _unbounded(profile: Profile, rate: float, table: Table, prices: Prices) -> Performance:
    seen = Served(profile, rate / 1000.0, table).rates
    response_time = seen.response_time_ms + profile.latency_offset_ms
    cost = prices.latency_weight_at(rate) * response_time + prices.energy_weight * seen.power_w
    return Performance(
        True, response_time, seen.power_w, cost, seen.busy_share, seen.rows / seen.batches, 1000.0 * seen.rows, 0.0
    )


def _overloaded(profile: Profile, size: int, prices: Prices) -> Performance:
    time, energy = float(profile.service_time_ms[size - 1]), float(profile.energy_mj[size - 1])
    cost = prices.energy_weight * energy / time if prices.latency_weight == 0.0 else inf
    return Performance(False, inf, energy / time, cost, 1.0, float(size), 1000.0 * size / time, 0.0)
