"""A queue of one worker that is served as a policy decides, one event after another: apart from Weir's batcher and its engine.

Of Weir only the policy itself takes part. Arrivals, service times, the queue, refusals and what is late are this file's own.
"""

from math import inf, nan

import numpy as np

from weir.policy.cost import Floats, Profile
from weir.policy.decision import Observation, PolicyBase

NO_BOUND = 1 << 40  # rows


def asked(policy: PolicyBase, profile: Profile, arrivals: Floats, seed: int = 1) -> Floats:
    """Return how long each of the rows that arrive at `arrivals` (seconds) takes, in seconds; NaN for those that are refused."""
    cv, luck = profile.cv, np.random.default_rng([seed, 99])
    taken, coming = np.full(len(arrivals), nan), [*arrivals.tolist(), inf]
    waiting: list[int] = []
    head, arrived, next_row, free, timer, bound, last = 0, 0, 0, -inf, inf, NO_BOUND, -inf
    while next_row < len(arrivals) or len(waiting) > head:
        running = free > -inf
        now = min(coming[next_row], free if running else inf, inf if running else timer)
        if now == inf:  # nothing more comes: the rows that still wait are never answered
            break
        if running and free <= now:
            free = -inf
        elif coming[next_row] <= now:
            if len(waiting) - head >= bound:
                more = policy.full(now)
                bound = NO_BOUND if more is None else max(more, 0 if running else 1)
            arrived += 1
            if len(waiting) - head < bound:
                waiting.append(next_row)
                last = now
            next_row += 1
        if free > -inf or len(waiting) == head:
            continue
        oldest = float(arrivals[waiting[head]])
        seen = Observation(
            now, len(waiting) - head, oldest, inf, arrived, last, 1, 1, profile.max_batch_size, inf, draining=False
        )
        rows, _, until, _, _ = policy.decide(seen)
        bound = NO_BOUND if policy.max_waiting is None else max(policy.max_waiting, 0 if rows else 1)
        timer = inf if rows or until is None else until
        if rows:
            members, head = waiting[head : head + rows], head + min(rows, len(waiting) - head)
            size = len(members)
            mean, spread = float(profile.service_time_ms[size - 1]) / 1000.0, float(cv[size - 1])
            free = now + (mean * float(luck.gamma(1.0 / spread**2, spread**2)) if spread else mean)
            taken[members] = free - arrivals[members] + profile.latency_offset_ms / 1000.0
    return taken
