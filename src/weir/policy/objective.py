"""What is promised about latency: at most a share of the requests is answered later than a deadline."""

from math import isfinite
from typing import NamedTuple

from weir.errors import SettingsError


class Objective(NamedTuple):
    """P[response time > deadline] ≤ late_share. `deadline` and `margin` are in seconds; the margin is what is kept free
    before the deadline for what cannot be planned (the jitter of service times, of the event loop)."""

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
