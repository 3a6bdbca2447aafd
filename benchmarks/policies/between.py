"""By how much the tables that a policy may use at a rate cost more than the best there is, by evaluations apart from Weir's."""

from math import inf

import numpy as np

from benchmarks.policies.event_loop import controls, interval, planned, served
from benchmarks.policies.random_models import Drawn
from weir.policy.cost import Floats, Profile
from weir.policy.online.rate import RateBands
from weir.policy.solve.bank import Bank, solve
from weir.policy.solve.tables import Table

MOST_WORK = 5e7  # (length of the queue)² · (largest batch), beyond which the plan takes too long
NEVER = 22.0  # times the length in which the probability of a longer queue falls by e: longer ones hardly occur
SURPRISING = 0.0025  # of the least cost
PARTS, ROWS = 20, 50_000  # of the event loop


def longest(profile: Profile, load: float) -> int:
    """Return how long queues may be, in rows, without a loss."""
    size = profile.best_batch_size
    spread = load * size * float(profile.cv.max()) ** 2
    return int(3 * profile.max_batch_size + NEVER * (1.0 + load * (1.0 + spread) / (2.0 * (1.0 - load)))) + 40


def in_use(bank: Bank, rate: float) -> list[Table]:
    """Return the tables that a policy may decide by at `rate` rows per second, also by its hysteresis."""
    bands = RateBands(bank)
    used = [bands[number] for number in range(len(bands)) if bands[number].falls <= rate <= bands[number].rises]
    assert used
    return [np.array([0 if each is None else each.rows for each in band.decisions], dtype=np.uint16) for band in used]


def excess_of(model: Drawn, bank: Bank, load: float) -> tuple[float, float]:
    """Return the largest excess, relative to the least cost, and half of its 99.9 % interval.

    The least cost is that of policy iteration in C where queues are short enough, and the interval is 0; an excess beyond
    SURPRISING counts if it is found for queues twice as long, too. Otherwise it is that of the table that Weir's solver finds
    for this very rate, and both are served by the event loop in C.
    """
    rate, top = load * model.profile.max_rate, longest(model.profile, load)
    before = inf
    while top**2 * model.profile.max_batch_size <= MOST_WORK:
        least, _ = planned(model.profile, rate, model.prices, top)
        costs = [planned(model.profile, rate, model.prices, top, table)[0] for table in in_use(bank, rate)]
        excess = max(costs) / least - 1.0
        if excess <= SURPRISING or abs(excess - before) <= SURPRISING:
            return excess, 0.0
        before, top = excess, 2 * top  # tables may let queues grow further than `longest` knows
    best = _seen(model, rate, solve(model.profile, rate, model.prices).table)
    found = [interval(_seen(model, rate, table) / best.mean() - best / best.mean()) for table in in_use(bank, rate)]
    worst = max(found, key=lambda each: each.mean)
    return worst.mean, (worst.high - worst.low) / 2.0


def _seen(model: Drawn, rate: float, table: Table) -> Floats:
    """Return the cost of each stretch."""
    given = controls(model.profile, rate, table)
    loop = served(
        model.profile, rate, table, ROWS, parts=PARTS, warm=ROWS, share=0.0, seed=model.number + 5, sharpened=given
    )
    weights = np.array([model.prices.latency_weight_at(rate), model.prices.energy_weight])
    return np.asarray(loop.sharp @ weights, dtype=np.float64)
