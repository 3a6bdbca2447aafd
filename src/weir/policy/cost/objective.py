"""What a policy is to achieve: the weights of latency and energy, or a promise about latency."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.profile import Floats, Profile
from weir.policy.loading import parse_duration

ROUNDING = 1e-9  # seconds; a batch that starts exactly when it must is in time
FORM = re.compile(r"p(\d+(?:\.\d+)?)=(\S+)")
IN_TIME = re.compile(r"in-time=([^,\s]+)(?:,refusal=(\d+(?:\.\d+)?))?")


class LatencySLO(NamedTuple):
    """P[response time > deadline] ≤ late_share. `deadline`, `margin` and `slack` are in seconds, for what cannot be
    planned (the jitter of service times, of the event loop): waits end by the margin earlier than they must, and who is let in
    behind others is to be answered by the slack, or the margin if that is more, before the deadline (see overload.py).

    With a `refusal_price` the objective is the most answers in time instead: of all requests that arrive, an answer that is
    late counts 1, a refusal that price, and their sum is to be the least; what energy that leaves free to save is saved."""

    deadline: float
    late_share: float = 0.01
    margin: float = 0.0
    slack: float = 0.0
    refusal_price: float = 0.0

    @property
    def counts_refusals(self) -> bool:
        """Whether refusals count: the objective is the most answers in time."""
        return self.refusal_price > 0.0

    def checked(self) -> "LatencySLO":
        """Return this objective. Raises SettingsError naming the value that cannot be."""
        if not (isfinite(self.deadline) and self.deadline > 0.0):
            raise SettingsError(f"deadline={self.deadline!r}: must be a number of seconds, greater than 0")
        if not 0.0 < self.late_share < 1.0:
            raise SettingsError(f"late_share={self.late_share!r}: must be between 0 and 1")
        if not 0.0 <= self.margin < self.deadline:
            raise SettingsError(
                f"margin={self.margin!r}: must be 0 or more, and less than the deadline {self.deadline:g}"
            )
        if not 0.0 <= self.slack < self.deadline:
            raise SettingsError(
                f"slack={self.slack!r}: must be 0 or more, and less than the deadline {self.deadline:g}"
            )
        if not (isfinite(self.refusal_price) and self.refusal_price >= 0.0):
            raise SettingsError(f"refusal_price={self.refusal_price!r}: must be a number, 0 or more")
        return self

    @classmethod
    def parse(cls, text: str) -> "LatencySLO":
        """Return the objective that `text` states, as in `p99=20ms`: 99 % of the responses within 20 ms; or in
        `in-time=20ms`: as many of all requests as possible within 20 ms, a refusal as bad as a late answer; or in
        `in-time=20ms,refusal=0.5`: half as bad.

        Raises SettingsError naming the text and the rule.
        """
        stripped = text.strip()
        found, most = FORM.fullmatch(stripped), IN_TIME.fullmatch(stripped)
        try:
            percent = float(found[1]) if found else 99.0
            deadline = parse_duration(found[2] if found else most[1] if most else "")
            price = float(most[2] or 1.0) if most else 0.0
        except ValueError:
            deadline = percent = price = 0.0
        good = 0.0 < percent < 100.0 and isfinite(deadline) and deadline > 0.0 and (price > 0.0 or not most)
        if not good:
            raise SettingsError(
                f"latency_objective={text!r}: must be a percentile and a duration greater than 0, as in p99=20ms, or the most "
                "answers in time, as in in-time=20ms or in-time=20ms,refusal=0.5 (the price of a refusal, greater than 0)"
            )
        # Rounded, so that p99 is 0.01 and not 0.010000000000000009.
        return cls(deadline, round(1.0 - percent / 100.0, 12), refusal_price=price)

    def __str__(self) -> str:
        """The text form; margin and slack are not part of it."""
        duration = f"{round(1000.0 * self.deadline, 9):g}ms"
        if self.counts_refusals:
            price = "" if self.refusal_price == 1.0 else f",refusal={self.refusal_price:g}"
            return f"in-time={duration}{price}"
        return f"p{round(100.0 * (1.0 - self.late_share), 10):g}={duration}"

    def checked_for(self, profile: Profile) -> "LatencySLO":
        """Return this objective. Raises SettingsError, naming it, if not even a row alone is answered in time."""
        alone = (profile.service_time_ms[0] + profile.latency_offset_ms) / 1000.0 + self.checked().margin
        if alone >= self.deadline:
            raise SettingsError(
                f"latency_objective={self}: a row alone takes {1000.0 * alone:.4g} ms; the deadline must be later"
            )
        return self

    def latest_starts(self, profile: Profile) -> Floats:
        """Return D - τ(n) for n = 0 ... max_batch_size, in seconds after the arrival of a batch's oldest row: when a
        batch of n rows must start for that row to be answered in time. For n = 0 it is that of one row."""
        times = np.concatenate((profile.service_time_ms[:1], profile.service_time_ms)) + profile.latency_offset_ms
        return np.asarray(self.deadline - times / 1000.0, dtype=np.float64)

    def trimmed_by(self, profile: Profile) -> Floats:
        """Return by when a batch of n rows must start not to be trimmed: the latest starts. Where refusals count and service
        times vary, no batch is: smaller batches serve fewer rows per second, which then costs more than one late row."""
        latest = self.latest_starts(profile)
        return np.full(len(latest), np.inf) if self.counts_refusals and profile.cv.any() else latest

    def allowance(self, profile: Profile) -> Floats:
        """Return how long the oldest of n waiting rows may wait: until `latest_starts`, less the margin."""
        return np.asarray(self.latest_starts(profile) - self.margin, dtype=np.float64)


def trimmed(rows: int, age: float, latest_starts: Sequence[float]) -> int:
    """Return how many of `rows` to dispatch when the oldest has waited `age` seconds: as many as leave it in time, if
    that is at least half of them; else all, because smaller batches would then make more rows late, not fewer."""
    for size in range(rows, (rows - 1) // 2, -1):
        if age <= latest_starts[size] + ROUNDING:
            return size
    return rows


def unavoidable_power_w(profile: Profile, rate: float) -> float:
    """Return the power that no policy can do without at `rate` rows per second, below capacity: that of batches of the size
    with the least energy per row, or of a mix of two sizes where that one does not keep up with the rate.

    What a policy draws or costs beyond it is its *excess*, the honest denominator of comparisons.
    """
    # Of f(b) batches of b rows per ms, with sum b·f = λ and sum τ·f <= 1, the least sum ζ·f. Its dual: the largest
    # λ·u(v) - v, with u(v) = min (ζ + v·τ)/b the energy of a row if busy time has the price v; any v is a lower bound.
    per_ms, times = rate / 1000.0, profile.service_time_ms
    slopes = per_ms * times / profile.sizes - 1.0

    def priced(price: float) -> tuple[float, float]:
        energies = (profile.energy_mj + price * times) / profile.sizes
        best = int(np.argmin(energies))
        return float(slopes[best]), per_ms * float(energies[best]) - price

    slope, least = priced(0.0)
    if slope <= 0.0:
        return least
    low, high = 0.0, 1e3 * float(profile.energy_mj.max() / times.min())
    for _ in range(80):
        price = (low + high) / 2.0
        slope, power = priced(price)
        least = max(least, power)
        low, high = (price, high) if slope > 0.0 else (low, price)
    return least


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
