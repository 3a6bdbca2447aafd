"""The batches of a run, as the server counted them: what it says after, less what it said before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from weir.errors import SettingsError

TIMES = ("queue", "predict", "total")


@dataclass(frozen=True)
class Counts:
    """What a server has counted since its start: rows, batches by reason and by size (not cumulated), and of each time its
    sum in seconds and how many were summed."""

    rows: float = 0.0
    reasons: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[float, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1.0)

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1.0)

    def _with(self, other: "Counts", sign: float) -> "Counts":
        def joined(mine: Mapping[Any, float], others: Mapping[Any, float]) -> dict[Any, float]:
            return {key: mine.get(key, 0.0) + sign * others.get(key, 0.0) for key in {**mine, **others}}

        return Counts(
            self.rows + sign * other.rows, joined(self.reasons, other.reasons), joined(self.sizes, other.sizes),
            joined(self.seconds, other.seconds), joined(self.times, other.times),
        )  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """How the requests of a run were batched (warm-up included).

    `sizes` counts the batches of up to so many rows, and of more than the size before it; `reasons` says why they were
    cut. `queue_time_ms`, `predict_time_ms` and `total_time_ms` are means: of a request until dispatch, of a batch in
    `predict`, of a request in the server.
    """

    count: int
    mean_rows: float
    reasons: dict[str, int]
    sizes: dict[str, int]
    queue_time_ms: float
    predict_time_ms: float
    total_time_ms: float


def batches_of(counts: Counts) -> Batches:
    """Return `counts`, to be read."""
    count = sum(counts.reasons.values())
    return Batches(
        count=round(count),
        mean_rows=counts.rows / count if count else 0.0,
        reasons={reason: round(number) for reason, number in counts.reasons.items() if number},
        sizes={f"{size:g}": round(number) for size, number in sorted(counts.sizes.items()) if number},
        **{f"{name}_time_ms": _mean_ms(counts.seconds.get(name, 0.0), counts.times.get(name, 0.0)) for name in TIMES},
    )


def _mean_ms(seconds: float, number: float) -> float:
    return seconds / number * 1000.0 if number else 0.0


def read_counts(text: str, model: str) -> Counts:
    """Return what `/metrics` says of one model. Raises SettingsError if it does not."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("model") == model:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise SettingsError(f"/metrics cannot be read: {error}") from error
    sums = [name for name in samples if name.endswith("_batch_size_sum")]
    namespace = sums[0].removesuffix("_batch_size_sum") if sums else "weir"
    return Counts(
        rows=_sole(samples, f"{namespace}_batch_size_sum"),
        reasons={labels["reason"]: value for labels, value in samples.get(f"{namespace}_batches_total", [])},
        sizes=_sizes(samples.get(f"{namespace}_batch_size_bucket", [])),
        seconds={name: _sole(samples, f"{namespace}_{name}_time_seconds_sum") for name in TIMES},
        times={name: _sole(samples, f"{namespace}_{name}_time_seconds_count") for name in TIMES},
    )


def _sole(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in samples.get(name, []))


def _sizes(buckets: list[tuple[dict[str, str], float]]) -> dict[float, float]:
    """Undo the cumulation of a histogram."""
    sizes, before = {}, 0.0
    for bound, value in sorted((float(labels["le"]), value) for labels, value in buckets):
        sizes[bound] = value - before
        before = value
    return sizes
