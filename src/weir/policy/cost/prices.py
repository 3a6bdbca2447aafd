"""What latency and energy are worth against each other."""

from dataclasses import dataclass
from math import isfinite

from weir.errors import SettingsError


@dataclass(frozen=True)
class Prices:
    """The objective is latency_weight·W + energy_weight·P, W the mean response time in ms and P the mean power in watts
    (equation 3 of the paper, w1 and w2).

    `reference_rate`, in rows per second, makes the prices constant across rates: one row·millisecond then costs
    what it costs at that rate, however many arrive. Without it that price is the paper's, w1/λ, which falls as the
    rate grows.

    Raises SettingsError for a negative or infinite weight, and if both are 0.
    """

    latency_weight: float = 1.0
    energy_weight: float = 1.0
    reference_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_weight", "energy_weight"):
            weight = getattr(self, name)
            if not (isfinite(weight) and weight >= 0.0):
                raise SettingsError(f"{name}={weight!r}: must be a number, 0 or more")
        if not (self.latency_weight or self.energy_weight):
            raise SettingsError("latency_weight=0, energy_weight=0: one of them must be greater than 0")
        rate = self.reference_rate
        if rate is not None and not (isfinite(rate) and rate > 0.0):
            raise SettingsError(f"reference_rate={rate!r}: must be a number of rows per second, greater than 0")

    def latency_weight_at(self, rate: float) -> float:
        """Return w1 of the paper's model at that rate (rows per second)."""
        return self.latency_weight if self.reference_rate is None else self.latency_weight * rate / self.reference_rate
