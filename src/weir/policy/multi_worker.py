"""Several workers on one line: where the search for their common control limit starts.

No exact solution is known for several bulk servers whose service time depends on the batch size; docs/explanation/
beyond-the-paper.md derives this start, simulation/banks.py refines it.
"""

from math import sqrt

import numpy as np

from weir.policy.prices import Prices
from weir.policy.profile import Profile
from weir.policy.tables import Table, full_batch_table


def start_limit(profile: Profile, rate: float, prices: Prices) -> int:
    """Return the control limit at which latency and energy balance when a worker is always free:
    sqrt(w2·λ·ζ0 / (w1·(1/(2λ) + α))), λ the rate of the whole line, power that of all workers together.

    It lies between 1 and b*. Stepped profiles enter by their straight lines.
    """
    fit = profile.fit()
    latency_weight, per_ms = prices.latency_weight_at(rate), rate / 1000.0
    slope = latency_weight * (0.5 / per_ms + max(fit.alpha_ms, 0.0))
    most = profile.best_batch_size
    if slope <= 0.0:
        return most
    wished = sqrt(prices.energy_weight * per_ms * max(fit.zeta0_mj, 0.0) / slope)
    return int(np.clip(round(wished), 1, most))


def multi_worker_table(profile: Profile, limit: int) -> Table:
    """Return the table that waits for `limit` rows (at most b*) and then takes full batches: stable below capacity."""
    table = full_batch_table(profile)
    table[:limit] = 0
    return table
