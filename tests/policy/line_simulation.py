"""A line under a table, simulated as plainly as can be: what the exact computations are held against."""

import numpy as np

from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.tables import Table


def simulated(profile: Profile, rate: float, table: Table, rows: int, seed: int = 1) -> Floats:
    """Return the response times, in ms, of `rows` rows that arrive at `rate` per second (Poisson), in their order; the
    first tenth is left out."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1000.0 / rate, 2 * rows + 1000))
    instants, entries = arrivals.tolist(), table.tolist()
    ends = np.zeros(rows + profile.max_batch_size)
    served = arrived = 0
    free = 0.0
    while served < rows:
        now = free
        while instants[arrived] <= now:
            arrived += 1
        while not (size := entries[min(arrived - served, len(entries) - 1)]):
            now = instants[arrived]
            arrived += 1
        mean, cv = profile.service_time_ms[size - 1], profile.cv[size - 1]
        free = now + (mean if cv == 0.0 else rng.gamma(1.0 / cv**2, mean * cv**2))
        ends[served : served + size] = free
        served += size
    times: Floats = (ends[:rows] - arrivals[:rows])[rows // 10 :] + profile.latency_offset_ms
    return times


def interval(times: Floats, share: float, batches: int = 20) -> tuple[float, float]:
    """Return an interval for the quantile, by the quantiles of so many batches; wide enough (4 standard errors) for many to
    hold at once."""
    each = [float(np.quantile(part, share)) for part in np.array_split(times, batches)]
    middle, half = float(np.mean(each)), 4.0 * float(np.std(each, ddof=1)) / batches**0.5
    return middle - half, middle + half
