"""The cost of a model's batches: service time and energy by batch size, as measured or stated.

Times are in milliseconds and energies in millijoules, as in the paper, so energy / time is in watts. Rates are in rows
per second. Energy is what a batch takes beyond what the machine draws while idle.

This also says what a policy is solved for: the prices of latency and energy, or a latency objective.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.config import parse_duration
from weir.errors import SettingsError, reason_of

Floats = NDArray[np.float64]

# Where the energies come from. "time": none are known; 1 mJ stands for 1 ms, so that power in watts is the busy share.
ENERGY_SOURCES = ("nvml", "rapl", "stated", "time")
FORMAT = 1  # of the file
# With their least and largest values.
_TABLES = {"service_time_ms": (1e-6, 1e9), "energy_mj": (0.0, 1e12), "cv": (0.0, 1e3)}
_KEYS = {
    "weir_profile", "max_batch_size", "best_batch_size", "max_rate", "latency_offset_ms", "pipeline_depth", "energy_source",
    "about", "linear_fit", "table",
}  # fmt: skip


class LinearFit(NamedTuple):
    """Straight lines through a profile by least squares: τ(b) = alpha·b + tau0 in ms and ζ(b) = beta·b + zeta0 in mJ.

    `time_r2` and `energy_r2` are the share of the variance that each line explains (1: all of it).
    """

    alpha_ms: float
    tau0_ms: float
    beta_mj: float
    zeta0_mj: float
    time_r2: float
    energy_r2: float


@dataclass(frozen=True, eq=False)
class Profile:
    """Service time and energy of batches of 1 ... max_batch_size rows on one worker.

    Each array has shape (max_batch_size,); the entry at index b - 1 belongs to batches of b rows. The arrays are
    read-only.

    Attributes:
        service_time_ms: mean time in ms for which a batch occupies its worker: τ(b). With two batches in flight it is
            the time between the ends of two that follow each other.
        energy_mj: energy of a batch in mJ: ζ(b).
        cv: coefficient of variation of the service time, its standard deviation divided by its mean.
        latency_offset_ms: ms that a caller waits beyond the service time; 0 with one batch in flight.
        pipeline_depth: batches in flight at a worker while it was measured.
        energy_source: one of ENERGY_SOURCES.
        about: how and where the profile was measured, as texts and numbers by name.

    Raises SettingsError naming the array, the batch size and the value that breaks its rule.
    """

    service_time_ms: Floats
    energy_mj: Floats
    cv: Floats
    latency_offset_ms: float = 0.0
    pipeline_depth: int = 1
    energy_source: str = "stated"
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = np.size(self.service_time_ms)
        for name in _TABLES:
            values = np.array(getattr(self, name), dtype=np.float64, ndmin=1)
            _check_table(name, values, size)
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        if not (np.isfinite(self.latency_offset_ms) and self.latency_offset_ms >= 0.0):
            raise SettingsError(f"latency_offset_ms={self.latency_offset_ms!r}: must be a number, 0 or more")
        if self.energy_source not in ENERGY_SOURCES:
            raise SettingsError(f"energy_source={self.energy_source!r}: must be one of {', '.join(ENERGY_SOURCES)}")

    @classmethod
    def linear(
        cls,
        *,
        alpha_ms: float,
        tau0_ms: float,
        beta_mj: float = 0.0,
        zeta0_mj: float = 0.0,
        max_batch_size: int,
        cv: float = 0.0,
        about: Mapping[str, Any] | None = None,
    ) -> "Profile":
        """Return a profile with τ(b) = alpha·b + tau0 in ms and ζ(b) = beta·b + zeta0 in mJ (the paper's equations 1
        and 2).

        Without energies, ζ equals τ. `cv` holds for all sizes.
        """
        if max_batch_size < 1:
            raise SettingsError(f"max_batch_size={max_batch_size}: must be 1 or more")
        sizes = np.arange(1, max_batch_size + 1)
        times: Floats = np.asarray(alpha_ms * sizes + tau0_ms, dtype=np.float64)
        stated = bool(beta_mj or zeta0_mj)
        energies: Floats = np.asarray(beta_mj * sizes + zeta0_mj, dtype=np.float64) if stated else times
        source = "stated" if stated else "time"
        return cls(times, energies, np.full(max_batch_size, cv), energy_source=source, about=about or {})

    def __reduce__(self) -> Any:
        """Travel to another process such that the arrays are read-only there too."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @property
    def max_batch_size(self) -> int:
        """The largest batch that the profile has a value for, in rows."""
        return len(self.service_time_ms)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The batch sizes 1 ... max_batch_size; shape (max_batch_size,), rows."""
        return np.arange(1, self.max_batch_size + 1)

    @property
    def best_batch_size(self) -> int:
        """b* = argmax b/τ(b): the batch size, in rows, that serves the most rows per second; often not the largest."""
        return int(np.argmax(self.sizes / self.service_time_ms)) + 1

    @property
    def max_rate(self) -> float:
        """The most rows per second that one worker can serve: b*/τ(b*)."""
        return 1000.0 * float(np.max(self.sizes / self.service_time_ms))

    def scaled(self, *, time: float | Floats = 1.0, energy: float | Floats = 1.0) -> "Profile":
        """Return this profile with all times multiplied by `time`, and all energies by `energy`. Both are one factor, or
        one for each size. The offset is multiplied as the times are on average.
        """
        return replace(
            self,
            service_time_ms=self.service_time_ms * time,
            energy_mj=self.energy_mj * energy,
            latency_offset_ms=self.latency_offset_ms * float(np.mean(time)),
        )

    def up_to(self, max_batch_size: int) -> "Profile":
        """Return the profile of batches of at most `max_batch_size` rows. Raises SettingsError if this one has fewer."""
        if not 1 <= max_batch_size <= self.max_batch_size:
            raise SettingsError(f"max_batch_size={max_batch_size}: the profile has sizes 1 to {self.max_batch_size}")
        return replace(self, **{name: getattr(self, name)[:max_batch_size] for name in _TABLES})

    def fit(self) -> LinearFit:
        """Return the straight lines through both tables."""
        alpha, tau0, time_r2 = _line(self.sizes, self.service_time_ms)
        beta, zeta0, energy_r2 = _line(self.sizes, self.energy_mj)
        return LinearFit(alpha, tau0, beta, zeta0, time_r2, energy_r2)

    def to_toml(self) -> str:
        """Return the text of a profile file."""
        import tomli_w  # only needed to write files

        document: dict[str, Any] = {
            "weir_profile": FORMAT,
            "max_batch_size": self.max_batch_size,
            "best_batch_size": self.best_batch_size,
            "max_rate": self.max_rate,
            "latency_offset_ms": self.latency_offset_ms,
            "pipeline_depth": self.pipeline_depth,
            "energy_source": self.energy_source,
            "about": dict(self.about),
            "linear_fit": self.fit()._asdict(),
            "table": {name: getattr(self, name).tolist() for name in _TABLES},
        }
        return tomli_w.dumps(document)

    @classmethod
    def from_toml(cls, text: str, source: str = "profile") -> "Profile":
        """Return the profile in `text`, the content of a profile file.

        Only the tables, and the keys that say how to read them, are used; what can be computed from them is ignored.
        `source` names the file in errors. Raises SettingsError naming `source`, the key and what is wrong, also for an
        unknown key.
        """
        try:
            document = tomllib.loads(text)
            if document.get("weir_profile") != FORMAT:
                raise SettingsError(f"weir_profile={document.get('weir_profile')!r}: must be {FORMAT}")
            table = document["table"]
            _check_keys(document, _KEYS)
            _check_keys(table, set(_TABLES))
            times = table["service_time_ms"]
            return cls(
                times,
                table.get("energy_mj", times),
                table.get("cv", [0.0] * len(times)),
                document.get("latency_offset_ms", 0.0),
                document.get("pipeline_depth", 1),
                document.get("energy_source", "time"),
                document.get("about", {}),
            )
        except SettingsError as error:
            raise SettingsError(f"{source}: {error.message}") from None
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"{source}: must be a profile made by `weir profile`: {reason_of(error)}") from error


def read_profile(path: str | Path, source: str | None = None) -> Profile:
    """Return the profile in the file `path`, which errors call `source`. Raises SettingsError if it cannot be read."""
    source = source or str(path)
    try:
        return Profile.from_toml(Path(path).read_text(encoding="utf-8-sig"), source)
    except OSError as error:
        raise SettingsError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source}: must be a profile made by `weir profile`: {reason_of(error)}") from error


def _check_keys(given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        raise SettingsError(f"{unknown[0]}: unknown key in a profile; available: {', '.join(sorted(known))}")


def _check_table(name: str, values: Floats, size: int) -> None:
    if values.ndim != 1 or len(values) != size or not size:
        raise SettingsError(
            f"{name}: must have one value for each batch size, {size} of them; has shape {values.shape}"
        )
    least, most = _TABLES[name]
    good = (values >= least) & (values <= most)
    if not good.all():
        worst = int(np.argmin(good))
        rule = f"must be from {least:g} to {most:g}"
        raise SettingsError(f"{name}: the value for batch size {worst + 1} is {values[worst]}; {rule}")


def _line(sizes: NDArray[np.int64], values: Floats) -> tuple[float, float, float]:
    if len(values) == 1:
        return 0.0, float(values[0]), 1.0
    slope, start = np.polyfit(sizes, values, 1)
    left = values - (slope * sizes + start)
    variance = float(np.sum((values - values.mean()) ** 2))
    return float(slope), float(start), 1.0 - float(left @ left) / variance if variance > 0.0 else 1.0


# τ(b) = 0.3051·b + 1.052 ms and ζ(b) = 19.90·b + 19.60 mJ: GoogLeNet on a Tesla P4, the paper's example (section V).
GOOGLENET_P4 = Profile.linear(
    alpha_ms=0.3051,
    tau0_ms=1.052,
    beta_mj=19.90,
    zeta0_mj=19.60,
    max_batch_size=32,
    about={"model": "GoogLeNet", "device": "NVIDIA Tesla P4", "source": "arXiv 2301.12865, section V"},
)


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
