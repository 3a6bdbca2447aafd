"""What a table does, by the law of the line over so many states that hardly anything is left out: written apart from Weir,
from the model's definition alone."""

from typing import NamedTuple

import numpy as np
from tests.late import scipy

from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.tables import Table


class Performance(NamedTuple):
    """As that of Weir, and the law's last entries, which say whether there were states enough."""

    response_time_ms: float
    power_w: float
    busy_share: float
    batch_size: float
    left_out: float


def performance(profile: Profile, rate: float, table: Table, states: int = 1200) -> Performance:
    """Return what `table` does at `rate` rows per second."""
    rate_per_ms, times = rate / 1000.0, profile.service_time_ms
    chain = np.zeros((states, states))
    laws: dict[int, Floats] = {}
    actions = np.array([int(table[min(n, len(table) - 1)]) for n in range(states)])
    for n, batch in enumerate(actions.tolist()):
        if not batch:
            chain[n, n + 1] = 1.0
            continue
        if batch not in laws:
            laws[batch] = _arrivals(rate_per_ms * float(times[batch - 1]), float(profile.cv[batch - 1]), states)
        kept = states - (n - batch)
        chain[n, n - batch :] = laws[batch][:kept]
        chain[n, -1] += 1.0 - chain[n].sum()
    system = chain.T - np.eye(states)
    system[0] = 1.0  # in the place of one equation, which follows from the others
    law = np.linalg.solve(system, np.eye(states)[0])
    serves, rows_waiting = actions > 0, np.arange(states)
    taken = np.where(serves, times[actions - 1], 1.0 / rate_per_ms)
    squares = np.where(serves, (1.0 + profile.cv[actions - 1] ** 2) * times[actions - 1] ** 2, 0.0)
    total = float(law @ taken)
    rows = float(law @ (rows_waiting * taken + rate_per_ms * squares / 2.0)) / total
    return Performance(
        rows / rate_per_ms + profile.latency_offset_ms,
        float(law @ np.where(serves, profile.energy_mj[actions - 1], 0.0)) / total,
        float(law @ np.where(serves, taken, 0.0)) / total,
        float(law @ actions) / float(law @ serves),
        float(np.abs(law[-20:]).sum()),
    )


def _arrivals(mean: float, cv: float, most: int) -> Floats:
    counts = np.arange(most)
    if not cv:
        return np.asarray(scipy.stats.poisson.pmf(counts, mean), dtype=np.float64)
    shape = 1.0 / cv**2
    return np.asarray(scipy.stats.nbinom.pmf(counts, shape, shape / (shape + mean)), dtype=np.float64)
