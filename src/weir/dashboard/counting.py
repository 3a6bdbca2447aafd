"""What has been counted since the start, by model: the numbers that /metrics shows, and how they change."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.registry import Collector

from weir.errors import WeirError
from weir.messages import Reason
from weir.telemetry.histogram import Histogram
from weir.telemetry.metrics import Metrics, ModelRecord

# By label of the model: numbers in dicts and lists. "" is what was asked of models that are not there.
Counts = dict[str, dict[str, Any]]
CodeOf = Callable[[str, type[WeirError] | None], str]

# What products count of their models, by the name in /metrics.
_OF_PRODUCTS = {"weir_tokens_total": "tokens", "weir_padding_tokens_total": "padding"}
_HISTOGRAMS = ("queue", "preprocess", "predict", "postprocess", "first_part", "total")


def count(metrics: Metrics, code_of: CodeOf, collectors: Sequence[Collector] = ()) -> Counts:
    """Return the counts of `metrics`, and of `collectors` the tokens and padding tokens.

    `ends` are requests by door and code, where an error follows its code by name; `rows` and the times are the histograms,
    as [count in each bucket, sum].
    """
    counts: Counts = {label: _counts_of(record) for label, record in list(metrics.models.items())}
    for (label, door, kind), ended in list(metrics.ended.items()):
        code = code_of(door, kind)
        name = code if kind is None or code == kind.__name__ else f"{code} {kind.__name__}"
        doors = counts.setdefault(label, {}).setdefault("ends", {})
        doors.setdefault(door, {})[name] = ended
    for (label, door), transferred in list(metrics.bytes.items()):
        counts.setdefault(label, {}).setdefault("bytes", {})[door] = list(transferred)
    for label, name, value in _of_products(collectors):
        counts.setdefault(label, {})[name] = value
    return counts


def change(now: Any, before: Any) -> Any:
    """Return by how much the numbers in `now` are higher than those in `before`, without what is as it was; None if all is.

    Lists keep their length, so that a bucket stays in its place.
    """
    if now == before:
        return None
    if isinstance(now, dict):
        changes = {key: change(value, before and before.get(key)) for key, value in now.items()}
        return {key: value for key, value in changes.items() if value is not None} or None
    if isinstance(now, list):
        return [value - earlier for value, earlier in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0) or None


def _counts_of(record: ModelRecord) -> dict[str, Any]:
    times: dict[str, Any] = {name: _buckets(getattr(record, name)) for name in _HISTOGRAMS}
    batches = {reason.name.lower(): record.batches[reason] for reason in Reason}
    return {"batches": batches, "rows": _buckets(record.rows), "parts": record.parts, **times}


def _buckets(histogram: Histogram) -> list[float]:
    return [*histogram.counts, histogram.sum]


def _of_products(collectors: Iterable[Collector]) -> Iterator[tuple[str, str, float]]:
    for collector in collectors:
        for family in collector.collect():
            for sample in family.samples:
                if sample.name in _OF_PRODUCTS:
                    version = sample.labels.get("version")
                    model = sample.labels.get("model", "")
                    yield (f"{model}/{version}" if version else model), _OF_PRODUCTS[sample.name], sample.value
