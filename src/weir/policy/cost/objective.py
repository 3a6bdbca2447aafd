"""This says what a policy shall achieve: a least weighted cost of latency and energy, or a promise about latency."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from weir.config import parse_duration
from weir.errors import SettingsError
from weir.policy.cost.profile import Floats, Profile

LEAST_RATE = 1e-9  # rows per second; with it and _MOST, no cost overflows
_MOST = 1e12  # of a weight, and rows per second
ROUNDING = 1e-9  # seconds; a batch that starts exactly when it must is in time
FORM = re.compile(r"p(\d+(?:\.\d+)?)=(\S+)")
SLO_SHARE = 0.05  # the part of its deadline that bulk work may add ...
LEAST_DELAY = 0.002  # ... and the seconds that it may add in any case
SENDING_SHARE, SENDING = 0.01, 0.001  # the part of the deadline, and the seconds at most, in which a response is sent
IN_TIME = re.compile(r"in-time=([^,\s]+)(?:,refusal=(\d+(?:\.\d+)?))?")


class LatencySLO(NamedTuple):
    """A promise about response times: P[response time > deadline] ≤ late_share.

    With a `refusal_price` above 0 the objective is another one: as many responses in time as possible. Of all requests
    that arrive, a late response counts 1 and a refusal counts `refusal_price`; the sum shall be least. Among policies
    with the least sum the one with the least energy is best.

    Attributes:
        deadline: seconds from arrival to response.
        late_share: the share of responses that may be late, between 0 and 1.
        margin: seconds; a wait on purpose ends this much earlier than it must, because service times and the event
            loop vary.
        slack: seconds; a row that is admitted behind others shall have its response this much before the deadline, or the
            margin before it if that is longer (see online/admission.py).
        refusal_price: what a refusal counts compared with a late response; 0: the objective is the promise.
    """

    deadline: float
    late_share: float = 0.01
    margin: float = 0.0
    slack: float = 0.0
    refusal_price: float = 0.0

    @property
    def counts_refusals(self) -> bool:
        """Whether the objective is the most responses in time, where refusals count too."""
        return self.refusal_price > 0.0

    @property
    def bulk_delay(self) -> float:
        """The seconds that bulk work may add to an interactive request."""
        return max(LEAST_DELAY, SLO_SHARE * self.deadline)

    def as_served(self) -> "LatencySLO":
        """Return this objective with at least the margin that a running server needs to send a response.

        The margin is a hundredth of the deadline, at most a millisecond. A simulation needs none.
        """
        return self._replace(margin=max(self.margin, min(SENDING_SHARE * self.deadline, SENDING)))

    def checked(self) -> "LatencySLO":
        """Return this objective. Raises SettingsError naming the first value that breaks its rule."""
        deadline, price = self.deadline, self.refusal_price
        below = f"must be 0 or more, and less than the deadline {deadline:g}"
        for name, good, rule in (
            ("deadline", isfinite(deadline) and deadline > 0.0, "must be a number of seconds, greater than 0"),
            ("late_share", 0.0 < self.late_share < 1.0, "must be between 0 and 1"),
            ("margin", 0.0 <= self.margin < deadline, below),
            ("slack", 0.0 <= self.slack < deadline, below),
            ("refusal_price", isfinite(price) and price >= 0.0, "must be a number, 0 or more"),
        ):
            if not good:
                raise SettingsError(f"{name}={getattr(self, name)!r}: {rule}")
        return self

    @classmethod
    def parse(cls, text: str) -> "LatencySLO":
        """Return the objective that `text` states.

        `p99=20ms`: 99 % of the responses within 20 ms. `in-time=20ms`: as many responses within 20 ms as possible, a
        refusal as bad as a late response. `in-time=20ms,refusal=0.5`: a refusal half as bad.

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
        """The text form, which `parse` reads; without margin and slack."""
        duration = f"{round(1000.0 * self.deadline, 9):g}ms"
        if self.counts_refusals:
            price = "" if self.refusal_price == 1.0 else f",refusal={self.refusal_price:g}"
            return f"in-time={duration}{price}"
        return f"p{round(100.0 * (1.0 - self.late_share), 10):g}={duration}"

    def to_dict(self) -> dict[str, Any]:
        """Return the text form as `text`, and the fields in their units, as a JSON-able dict."""
        return {"text": str(self)} | self._asdict()

    def checked_for(self, profile: Profile) -> "LatencySLO":
        """Return this objective. Raises SettingsError naming it if even a row that is served alone would be late."""
        alone = (profile.service_time_ms[0] + profile.latency_offset_ms) / 1000.0 + self.checked().margin
        if alone >= self.deadline:
            raise SettingsError(
                f"latency_objective={self}: a row alone takes {1000.0 * alone:.4g} ms; the deadline must be later"
            )
        return self

    def latest_starts(self, profile: Profile) -> Floats:
        """Return how long after the arrival of its oldest row a batch may start, for that row to have its response in time.

        Shape (max_batch_size + 1,), seconds: entry n is D - τ(n), for a batch of n rows. Entry 0 equals entry 1.
        """
        times = np.concatenate((profile.service_time_ms[:1], profile.service_time_ms)) + profile.latency_offset_ms
        return np.asarray(self.deadline - times / 1000.0, dtype=np.float64)

    def trimmed_by(self, profile: Profile) -> Floats:
        """Return the age of its oldest row from which on a batch is trimmed (see `trimmed`).

        Shape (max_batch_size + 1,), seconds, by rows: the latest starts. Where refusals count and service times vary,
        all entries are infinite, so no batch is trimmed: smaller batches serve fewer rows per second, which costs more
        than one late row.
        """
        latest = self.latest_starts(profile)
        return np.full(len(latest), np.inf) if self.counts_refusals and profile.cv.any() else latest

    def allowance(self, profile: Profile) -> Floats:
        """Return how long the oldest of n waiting rows may wait: until `latest_starts`, less the margin.

        Shape (max_batch_size + 1,), seconds, by rows waiting.
        """
        return np.asarray(self.latest_starts(profile) - self.margin, dtype=np.float64)


def trimmed(rows: int, age: float, latest_starts: Sequence[float], planned: int | None = None) -> int:
    """Return how many of `rows` rows to dispatch so that the oldest has its response in time.

    That is the largest batch that leaves it in time, if it has at least half of the rows, or `planned`; otherwise all
    rows, because smaller batches would then make more rows late, not fewer.

    Args:
        rows: the batch that is planned.
        age: seconds for which its oldest row has waited.
        latest_starts: by rows, seconds; see LatencySLO.latest_starts.
        planned: a batch of that many rows is large enough even if that is less than half (see online/admission.py).
    """
    fewest = min((rows + 1) // 2, planned or rows)
    for size in range(rows, fewest - 1, -1):
        if age <= latest_starts[size] + ROUNDING:
            return size
    return rows


def unavoidable_power_w(profile: Profile, rate: float) -> float:
    """Return the power in watts that no policy can do without at `rate` rows per second, below capacity.

    It is that of batches of the size with the least energy per row, or of a mix of two sizes where batches of that one
    do not keep up with the rate. What a policy draws or costs beyond it is its *excess*, by which policies are
    compared.
    """
    # A linear programme: f(b) batches of b rows start per ms, with sum b·f = λ and sum τ·f <= 1; sum ζ·f shall be
    # least. Its dual: the largest λ·u(v) - v over v >= 0, where u(v) = min (ζ + v·τ)/b is the energy of a row if busy
    # time has the price v. Every v gives a lower bound, and bisection finds the best one.
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
    """The weights of latency and energy: the cost is latency_weight·W + energy_weight·P.

    W is the mean response time in ms and P the mean power in watts (equation 3 of the paper; the weights are its w1
    and w2).

    Attributes:
        latency_weight: weight of a millisecond of mean response time.
        energy_weight: weight of a watt of mean power.
        reference_rate: rows per second. With it, one row that waits for a millisecond costs the same at every arrival
            rate, namely what it costs at this one. Without it that cost is the paper's, w1/λ, which falls as the rate
            λ grows.

    Raises SettingsError for a weight that is negative or so large that costs overflow, and if both are 0.
    """

    latency_weight: float = 1.0
    energy_weight: float = 1.0
    reference_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_weight", "energy_weight"):
            weight = getattr(self, name)
            if not 0.0 <= weight <= _MOST:
                raise SettingsError(f"{name}={weight!r}: must be a number, 0 or more, at most {_MOST:g}")
        if not (self.latency_weight or self.energy_weight):
            raise SettingsError("latency_weight=0, energy_weight=0: one of them must be greater than 0")
        rate = self.reference_rate
        if rate is not None and not LEAST_RATE <= rate <= _MOST:
            rule = f"must be a number of rows per second, greater than 0, from {LEAST_RATE:g} to {_MOST:g}"
            raise SettingsError(f"reference_rate={rate!r}: {rule}")

    def latency_weight_at(self, rate: float) -> float:
        """Return the weight of latency, w1 of the paper, at `rate` rows per second."""
        return self.latency_weight if self.reference_rate is None else self.latency_weight * rate / self.reference_rate
