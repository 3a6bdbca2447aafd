"""The exact law of a queue over finitely many states: the chain as a band, and what a table does where the queue is bounded.

Weir's solver follows queues of any length (weir.policy.solve.smdp). Here the last state stands for all that are longer, as
in the paper's truncated model, or is the longest that is let in.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost import Floats, Prices, Profile
from weir.policy.solve.smdp import Actions, Performance, arrivals_up_to
from weir.policy.solve.tables import Table, checked_table, extended, limit_of, stationary

# Numbers of arrivals less likely than this, for every batch size, are counted as the largest one that is kept. It is
# far below what any share of the cost is asked for (1e-14).
_LEAST_LIKELY = 1e-32


def arrivals(profile: Profile, rate_per_ms: float, most: int | None = None) -> Floats:
    """Return P[a - 1, k], the probability that k rows arrive during a batch of a rows (equation 4); shape (sizes, counts).

    The last column counts all that are at least that many, and is summed from the far end, never as 1 - the rest.
    There are as many columns as matter, at most `most`.
    """
    mean = rate_per_ms * profile.service_time_ms
    excess = mean * profile.cv**2  # variance / mean - 1
    # 12 standard deviations, and 75 decays of the geometric tail: beyond, the probability is below 1e-32.
    reach = int(np.max(mean + 12.0 * np.sqrt(mean * (1.0 + excess)) + 75.0 * (1.0 + excess))) + 1
    table = arrivals_up_to(profile, rate_per_ms, reach)
    likely = int(np.flatnonzero(table.max(axis=0) >= _LEAST_LIKELY)[-1]) + 1
    kept = likely if most is None else min(likely, most)
    table[:, kept - 1] = table[:, kept - 1 :][:, ::-1].sum(axis=1)
    return table[:, :kept].copy()


def band(arrivals: Floats, actions: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Floats, int]:
    """Return the chain's matrix as a band, for `stationary`, and how many of its columns are left of the diagonal.

    `arrivals` is what the function of that name returns; `actions` and `rows` are by state, shape (states,); the last state
    stands for all above. Column `below` + d of row i is the probability of going from i to i + d.
    """
    size, kept = len(actions), arrivals.shape[1]
    below = int(arrivals.shape[0]) + 1
    matrix = np.zeros((size, below + kept + 1))
    for state, (action, waiting) in enumerate(zip(actions.tolist(), rows.tolist(), strict=True)):
        if not action:
            matrix[state, below + min(1, size - 1 - state)] = 1.0
            continue
        start = below + waiting - action - state
        room = below + size - 1 - state  # the column of the last state
        if start + kept - 1 <= room:
            matrix[state, start : start + kept] = arrivals[action - 1]
        else:
            matrix[state, start:room] = arrivals[action - 1, : room - start]
            matrix[state, room] = arrivals[action - 1, room - start :][::-1].sum()
    return matrix, below


@dataclass(frozen=True, eq=False)
class QueueLaw:
    """The stationary law of the decisions under a table: `law` and `actions` by state, `rows` waiting in each, and the
    `arrivals` during a batch by its size. The last state stands for all above."""

    law: Floats
    actions: Actions
    rows: Actions
    arrivals: Floats
    rate_per_ms: float


def queue_law(profile: Profile, rate_per_ms: float, table: Table, rows: Actions) -> QueueLaw:
    """Return the stationary law of the states with so many `rows` waiting, under `table`; the last stands for all above."""
    actions: Actions = extended(table, len(rows)).astype(np.int64)
    counts = arrivals(profile, rate_per_ms)
    law = stationary(*band(counts, actions, rows))
    return QueueLaw(law, actions, rows, counts, rate_per_ms)


class BoundedPerformance(NamedTuple):
    """What a table does with the rows that are let in, and the share of all rows that is refused."""

    performance: Performance
    refused_share: float


def evaluate_bounded(
    profile: Profile, rate: float, table: Table, max_waiting: int, prices: Prices | None = None
) -> BoundedPerformance:
    """Return what `table` does at `rate` rows per second where a row that finds `max_waiting` rows waiting is refused.

    Raises SettingsError for a table that cannot be, and for one that waits for more rows than `max_waiting`.
    """
    prices, table = prices or Prices(), checked_table(table, profile.max_batch_size)
    if max_waiting < limit_of(table):
        raise SettingsError(f"max_waiting={max_waiting}: the table waits for {limit_of(table)} rows, which never come")
    queue = queue_law(profile, rate / 1000.0, table, np.arange(max_waiting + 1))
    serves = queue.actions > 0
    times = np.where(serves, profile.service_time_ms[queue.actions - 1], 1000.0 / rate)
    energies = np.where(serves, profile.energy_mj[queue.actions - 1], 0.0)
    areas, refused = _areas(queue, times, max_waiting)
    total, rows = float(queue.law @ times), float(queue.law @ queue.actions)
    refused_share = 1000.0 * float(queue.law @ refused) / (rate * total)
    served = rate / 1000.0 * total * (1.0 - refused_share)
    response_time = float(queue.law @ areas) / served + profile.latency_offset_ms
    power = float(queue.law @ energies) / total
    performance = Performance(
        stable=True,
        response_time_ms=response_time,
        power_w=power,
        cost=prices.latency_weight_at(rate) * response_time + prices.energy_weight * power,
        busy_share=float(queue.law @ np.where(serves, times, 0.0)) / total,
        batch_size=rows / float(queue.law @ serves),
        throughput=1000.0 * rows / total,
    )
    return BoundedPerformance(performance, refused_share)


def _areas(queue: QueueLaw, times: Floats, max_waiting: int) -> tuple[Floats, Floats]:
    """Return the expected rows·ms in the system and the expected rows refused until the next decision, by state."""
    serves = queue.actions > 0
    # The k-th arrival of a batch waits, if it is let in, (N - k)^+ / rate on average until the batch ends.
    above = np.cumsum(queue.arrivals[:, ::-1], axis=1)[:, ::-1]  # P[N >= k]
    excess = np.zeros((above.shape[0], above.shape[1] + 1))
    excess[:, :-1] = np.cumsum(above[:, ::-1], axis=1)[:, ::-1] - above  # E (N - k)^+ = the sum of P[N >= j] over j > k
    waits = np.cumsum(excess, axis=1) - excess[:, :1]  # over k = 1 ... m
    room = np.minimum(max_waiting - (queue.rows - queue.actions), excess.shape[1] - 1)
    batch = queue.actions - 1
    areas = queue.rows * times + np.where(serves, waits[batch, room] / queue.rate_per_ms, 0.0)
    return areas, np.where(serves, excess[batch, room], 0.0)
