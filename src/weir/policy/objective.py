"""A latency objective: at most a share of the responses later than a deadline, P[response > D] <= ε.

A batch that waits any longer than `allowance` makes its oldest row late; a policy that obeys an objective serves then,
whatever its table says. See docs/explanation/beyond-the-paper.md.
"""

import re
from math import isfinite
from typing import NamedTuple

import numpy as np

from weir.errors import SettingsError
from weir.policy.grammar import parse_duration
from weir.policy.profile import Floats, Profile

FORM = re.compile(r"p(\d+(?:\.\d+)?)=(\S+)")
JITTER = 2.326  # standard deviations of the service time that a margin covers: 99 % of a normal law


class Objective(NamedTuple):
    """At most `late_share` of the responses later than `deadline` seconds. `margin` seconds are kept free at the end of a
    guarded wait, for what the mean service time does not say (see `with_margin`)."""

    deadline: float
    late_share: float = 0.01
    margin: float = 0.0

    def checked(self) -> "Objective":
        """Return this objective. Raises SettingsError naming the value that cannot be."""
        if not (isfinite(self.deadline) and self.deadline > 0.0):
            raise SettingsError(f"deadline={self.deadline!r}: must be a number of seconds, greater than 0")
        if not 0.0 < self.late_share < 1.0:
            raise SettingsError(f"late_share={self.late_share!r}: must be between 0 and 1")
        if not 0.0 <= self.margin < self.deadline:
            raise SettingsError(
                f"margin={self.margin!r}: must be 0 or more, and less than the deadline {self.deadline:g}"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Return the objective that `text` states, as in `p99=20ms`: 99 % of the responses within 20 ms.

        Raises SettingsError naming the text and the rule.
        """
        found = FORM.fullmatch(text.strip())
        try:
            percent, deadline = float(found[1]) if found else 0.0, parse_duration(found[2]) if found else 0.0
        except ValueError:
            found = None
        if not found or not 0.0 < percent < 100.0 or not (isfinite(deadline) and deadline > 0.0):
            raise SettingsError(
                f"latency_objective={text!r}: must be a percentile and a duration greater than 0, as in p99=20ms"
            )
        # Rounded, so that p99 is 0.01 and not 0.010000000000000009.
        return cls(deadline, round(1.0 - percent / 100.0, 12))

    def __str__(self) -> str:
        """The text form; the margin is not part of it."""
        return f"p{round(100.0 * (1.0 - self.late_share), 10):g}={round(1000.0 * self.deadline, 9):g}ms"

    def with_margin(self, profile: Profile) -> "Objective":
        """Return this objective with a margin for what the mean service time leaves out: the profile's latency offset,
        and 2.3 standard deviations of the longest batch.

        Raises SettingsError, naming the objective, if not even a row alone would be answered in time.
        """
        spread = float(np.max(profile.cv * profile.service_time_ms))
        made = self._replace(margin=(profile.latency_offset_ms + JITTER * spread) / 1000.0)
        alone = profile.service_time_ms[0] / 1000.0 + made.margin
        if alone >= self.deadline:
            raise SettingsError(
                f"latency_objective={self}: a row alone takes {1000.0 * alone:.4g} ms, margin included; "
                f"the deadline must be later"
            )
        return made

    def allowance(self, profile: Profile) -> Floats:
        """Return D - τ(min(n, largest)) - margin for n = 0 ... max_batch_size: seconds for which the oldest of n waiting
        rows may wait. Negative where it is late already; for n = 0 it is that of one row."""
        times = np.concatenate((profile.service_time_ms[:1], profile.service_time_ms)) / 1000.0
        return np.asarray(self.deadline - times - self.margin, dtype=np.float64)


def unavoidable_power_w(profile: Profile, rate: float) -> float:
    """Return the power that no policy can do without at `rate` rows per second: that of batches of b* alone, λ·ζ(b*)/b*.

    What a policy draws or costs beyond it is its *excess*, the honest denominator of comparisons.
    """
    best = profile.best_batch_size
    return rate / 1000.0 * float(profile.energy_mj[best - 1]) / best
