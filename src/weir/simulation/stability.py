"""Whether a policy keeps up with its arrivals."""

from math import inf
from sys import maxsize

from weir.batching.settings import BatchingSettings
from weir.policy.cost.profile import Profile
from weir.policy.decision import Observation, Policy

MANY = 1_000_000  # rows that wait when a policy is asked what it does with more than enough


def capacity_of(
    policy: Policy, profile: Profile, settings: BatchingSettings, workers: int = 1, *, now: float = 0.0,
    arrivals: int = 0,
) -> float | None:  # fmt: skip
    """Return the rows per second that all workers serve once the line is long; None where the policy does not say.

    A long line is served in the batches that `policy` cuts from it: at this rate or above, it only grows. One that learns
    is asked when it has: at the end of a run, which was at `now` and after `arrivals` rows.
    """
    seen = Observation(
        now, MANY, now, inf, arrivals, now, 1, workers, settings.max_batch_size, settings.max_queue_delay, False
    )
    try:
        rows = min(policy.decide(seen).rows, settings.max_batch_size)
    except Exception:  # what it raises comes up again when it is really asked
        return None
    return workers * rows / float(profile.service_time_ms[rows - 1]) * 1000.0 if rows > 0 else None


def is_bounded(policy: Policy, settings: BatchingSettings) -> bool:
    """Tell whether the line cannot grow without end, because more are refused."""
    return settings.max_queue_size < maxsize or getattr(policy, "max_waiting", None) is not None
