"""Custom metrics of a model: what `self.metrics` is in a worker, and how the server adds up what its workers report.

A worker reports what was added to a counter or histogram since its last report, and the present value of a gauge that has changed. The
server adds up, so a worker that ends takes back nothing but its gauges; what it had not reported yet is lost.
"""

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from weir.errors import SettingsError

MAX_METRICS = 100  # of one model
MAX_SERIES = 1000  # of all metrics of one model: the values of labels may come from callers
MAX_BUCKETS = 100  # of a histogram
MAX_VALUE_LENGTH = 100  # characters of a label's value that are kept

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# 1 ms to 10 s: most histograms are of times in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,99}")
_TAKEN = ("weir_", "nv_", "process_", "python_")
_ENDINGS = ("_total", "_created", "_bucket", "_sum", "_count")  # which Prometheus gives to the samples of a metric
_LABELS = ("model", "version", "worker", "pid", "le", "quantile")

Values = tuple[str, ...]  # of labels


class Definition(NamedTuple):
    """Describes a metric: `kind` (counter, gauge, histogram), its name and help, the names of its labels, and the upper bounds of a
    histogram's buckets."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]


class Change(NamedTuple):
    """The change of a series: `number` is what was added to a counter or to a histogram's sum, or the value of a gauge; `counts` are the
    values added to each of a histogram's buckets."""

    values: Values
    number: float
    counts: list[int]


class MetricReport(NamedTuple):
    """The changes of one metric in a worker since its last report."""

    definition: Definition
    changes: list[Change]


class OwnMetric:
    """One metric of a worker, and what has changed of it since the last report."""

    def __init__(self, owner: "ModelMetrics", definition: Definition) -> None:
        self.definition = definition
        self._owner = owner
        self._known: set[Values] = set()
        self._changes: dict[Values, Change] = {}

    def take(self) -> list[Change]:
        """Return the changes since the last call. The caller holds the lock."""
        changes, self._changes = list(self._changes.values()), {}
        return changes

    def _change(self, number: float, labels: dict[str, object], bucket: int | None = None) -> None:
        """Add `number` to the series of these labels, or set it there if this is a gauge."""
        if len(labels) != len(self.definition.labels):
            raise self._wrong(labels)
        try:
            texts = [str(labels[name])[:MAX_VALUE_LENGTH] for name in self.definition.labels]
        except KeyError:
            raise self._wrong(labels) from None
        values = tuple(text.encode(errors="replace").decode() for text in texts)  # half a surrogate pair is no UTF-8
        with self._owner.lock:
            if values not in self._known:
                if not self._owner.room_for_series():
                    return
                self._known.add(values)
            kind, before = self.definition.kind, self._changes.get(values)
            counts = [] if before is None else before.counts
            if bucket is not None:
                counts = counts or [0] * (len(self.definition.bounds) + 1)
                counts[bucket] += 1
            total = number if before is None or kind == GAUGE else before.number + number
            self._changes[values] = Change(values, total, counts)

    def _wrong(self, labels: dict[str, object]) -> ValueError:
        wanted = ", ".join(self.definition.labels) or "none"
        return ValueError(f"metric {self.definition.name!r}: labels {', '.join(labels) or 'none'}: must be {wanted}")


class CounterMetric(OwnMetric):
    """A number that only grows."""

    def inc(self, amount: float = 1.0, **labels: object) -> None:
        """Add `amount`, which must not be negative, to the series of these labels. Raises ValueError."""
        if not 0.0 <= amount < math.inf:
            raise ValueError(f"metric {self.definition.name!r}: inc({amount!r}): must be a number from 0 on")
        if not self._owner.muted:
            self._change(float(amount), labels)


class GaugeMetric(OwnMetric):
    """A number that each worker sets."""

    def set(self, value: float, **labels: object) -> None:
        """Set the series of these labels. Raises ValueError for other labels."""
        self._change(float(value), labels)


class HistogramMetric(OwnMetric):
    """Counts values by the bucket in which they fall, and adds them up."""

    def observe(self, value: float, **labels: object) -> None:
        """Count one value in the series of these labels. Raises ValueError."""
        if not math.isfinite(value):
            raise ValueError(f"metric {self.definition.name!r}: observe({value!r}): must be a number")
        if not self._owner.muted:
            self._change(float(value), labels, bisect_left(self.definition.bounds, value))


M = TypeVar("M", bound=OwnMetric)


class ModelMetrics:
    """The metrics of one model in one worker. Its methods may be called in any thread.

    There may be 1,000 series in all; what would begin another one is dropped, and the log says so once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.muted = False  # whether counters and histograms count nothing, as during the warm-up
        self._metrics: dict[str, OwnMetric] = {}
        self._series = 0

    def counter(self, name: str, help: str = "", *, labels: Sequence[str] = ()) -> "CounterMetric":
        """Return the counter of this name, which `/metrics` shows with `_total` at its end. See `histogram`."""
        return self._declared(CounterMetric, Definition(COUNTER, name.removesuffix("_total"), help, tuple(labels), ()))

    def gauge(self, name: str, help: str = "", *, labels: Sequence[str] = ()) -> "GaugeMetric":
        """Return the gauge of this name; each worker's value is shown, with the label `worker`. See `histogram`."""
        return self._declared(GaugeMetric, Definition(GAUGE, name, help, tuple(labels), ()))

    def histogram(
        self, name: str, help: str = "", *, labels: Sequence[str] = (), buckets: Sequence[float] = BUCKETS
    ) -> "HistogramMetric":
        """Return the histogram of this name, whose `buckets` have these upper bounds, ascending.

        `/metrics` shows it with the label `model` in addition to its own `labels`. Another call for the same metric returns the same one. Raises
        SettingsError for a name or label that Prometheus or Weir does not allow, and for another metric of the same name.
        """
        definition = Definition(HISTOGRAM, name, help, tuple(labels), tuple(map(float, buckets)))
        return self._declared(HistogramMetric, definition)

    def take(self) -> list[MetricReport] | None:
        """Return what has changed since the last call; None for nothing."""
        with self.lock:
            reports = [
                MetricReport(each.definition, taken) for each in self._metrics.values() if (taken := each.take())
            ]
        return reports or None

    def room_for_series(self) -> bool:
        """Return whether there may be one more series, and count it. The caller holds the lock."""
        self._series += 1
        if self._series == MAX_SERIES + 1:
            import logging  # not above: a worker process imports this module before it may load more

            logging.getLogger("weir").warning("a model has %d series of metrics; no more are begun", MAX_SERIES)
        return self._series <= MAX_SERIES

    def _declared(self, kind: type[M], definition: Definition) -> M:
        _check(definition)
        with self.lock:
            found = self._metrics.get(definition.name)
            if found is None:
                if len(self._metrics) >= MAX_METRICS:
                    raise SettingsError(
                        f"metric {definition.name!r}: the model already has {MAX_METRICS} metrics, the maximum"
                    )
                found = self._metrics[definition.name] = kind(self, definition)
        if not isinstance(found, kind) or found.definition._replace(help="") != definition._replace(help=""):
            raise SettingsError(f"metric {definition.name!r}: is declared as {found.definition} already")
        return found


def _check(definition: Definition) -> None:
    """Raise SettingsError for a definition that Prometheus or Weir does not allow."""
    name, what = definition.name, f"metric {definition.name!r:.120}"
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{what}: must be of letters, digits and _, begin with a letter and have at most 100")
    if name.startswith(_TAKEN) or name.endswith(_ENDINGS):
        taken = ", ".join(f"{each}*" for each in _TAKEN) + ", " + ", ".join(f"*{each}" for each in _ENDINGS)
        raise SettingsError(f"{what}: {taken} are names of other metrics")
    for label in definition.labels:
        if not _NAME.fullmatch(label) or label in _LABELS or definition.labels.count(label) > 1:
            raise SettingsError(
                f"{what}: label {label!r:.120}: must be of letters, digits and _, once, and none of {', '.join(_LABELS)}"
            )
    bounds = definition.bounds
    if definition.kind == HISTOGRAM and not (
        0 < len(bounds) <= MAX_BUCKETS
        and all(map(math.isfinite, bounds))
        and all(low < high for low, high in pairwise(bounds))
    ):
        raise SettingsError(f"{what}: buckets={list(bounds)!r:.120}: must be 1 to {MAX_BUCKETS} ascending numbers")


class ReportedMetric(NamedTuple):
    """One metric of a model: its series by the values of its labels, and by worker if it is a gauge (else "")."""

    definition: Definition
    series: dict[tuple[Values, str], Change]


class ReportedMetrics:
    """Adds up what the workers of one model have reported.

    Attributes:
        by_name: the metrics of the model.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, ReportedMetric] = {}
        self._series = 0

    def add(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Add what `worker` has reported."""
        for definition, changes in reports:
            series = self._series_of(definition)
            for change in changes:
                self._add(definition, series, (change.values, str(worker) if definition.kind == GAUGE else ""), change)

    def merge(self, other: "ReportedMetrics") -> None:
        """Add what another one has."""
        for definition, series in other.by_name.values():
            own = self._series_of(definition)
            for key, change in series.items():
                self._add(definition, own, key, change)

    def forget(self, worker: int | None = None) -> None:
        """Drop the gauges of a worker that has ended, or of all workers."""
        for definition, series in self.by_name.values():
            if definition.kind == GAUGE:
                for key in [key for key in series if worker is None or key[1] == str(worker)]:
                    del series[key]
                    self._series -= 1

    def _series_of(self, definition: Definition) -> dict[tuple[Values, str], Change]:
        known = self.by_name.get(definition.name)
        if known is None or known.definition._replace(help="") != definition._replace(help=""):  # of a changed model
            self._series -= 0 if known is None else len(known.series)
            known = self.by_name[definition.name] = ReportedMetric(definition, {})
        return known.series

    def _add(
        self, definition: Definition, series: dict[tuple[Values, str], Change], key: tuple[Values, str], change: Change
    ) -> None:
        before = series.get(key)
        if before is None:
            if self._series >= MAX_SERIES:
                return
            self._series += 1
            series[key] = change
        elif definition.kind == GAUGE:
            series[key] = change
        else:
            counts = [one + more for one, more in zip(before.counts, change.counts, strict=True)]
            series[key] = Change(change.values, before.number + change.number, counts)
