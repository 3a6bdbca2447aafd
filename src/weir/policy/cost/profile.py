"""The cost of a model's batches: service time and energy by batch size, as measured or stated.

Times are in milliseconds and energies in millijoules, as in the paper, so energy / time is in watts. Rates are in rows
per second. Energy is what a batch takes beyond what the machine draws while idle.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError, reason_of

Floats = NDArray[np.float64]

# Where the energies come from. "time": none are known; 1 mJ stands for 1 ms, so that power in watts is the busy share.
ENERGY_SOURCES = ("nvml", "rapl", "stated", "time")
FORMAT = 1  # of the file
_TABLES = {
    "service_time_ms": (1e-6, 1e9),
    "energy_mj": (0.0, 1e12),
    "cv": (0.0, 1e3),
}  # with their least and largest values
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
