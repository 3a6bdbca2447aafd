"""Shows what metrics.py has counted, in Prometheus' text format."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from weir.errors import Cancelled, DeadlineExceeded, ValidationFailed, WeirError
from weir.messages import Reason
from weir.telemetry.histogram import Histogram
from weir.telemetry.metrics import Metrics, ModelRecord, Outcome


class Levels(NamedTuple):
    """What can be read of a running model at any moment. `workers` counts them by state, `policy` is what its policy says of
    itself in brief."""

    waiting_rows: int
    waiting_requests: int
    running_batches: int
    workers: Mapping[str, int]
    restarts: int
    arena_bytes: int
    arena_free_bytes: int
    policy: Mapping[str, Any] = MappingProxyType({})  # by the keys of _POLICY; what is None is not shown


CodeOf = Callable[[str, type[WeirError] | None], str]
ReadLevels = Callable[[], Mapping[str, Levels]]

_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelRecord], Histogram]], ...] = (
    ("weir_batch_size", "Rows in each batch.", lambda record: record.rows),
    ("weir_queue_time_seconds", "From arrival to dispatch, of each request.", lambda record: record.queue),
    ("weir_preprocess_time_seconds", "Decoding, validation and preprocess of each batch.", lambda r: r.preprocess),
    ("weir_predict_time_seconds", "predict of each batch.", lambda record: record.predict),
    ("weir_postprocess_time_seconds", "postprocess and encoding of each batch.", lambda record: record.postprocess),
    (
        "weir_first_part_time_seconds",
        "From arrival to the first answer, of each stream.",
        lambda record: record.first_part,
    ),
    ("weir_total_time_seconds", "From arrival to the end, of each request that was accepted.", lambda r: r.total),
)
_LEVELS: tuple[tuple[str, str, Callable[[Levels], int]], ...] = (
    ("weir_waiting_rows", "Rows in the line.", lambda levels: levels.waiting_rows),
    ("weir_waiting_requests", "Requests in the line.", lambda levels: levels.waiting_requests),
    ("weir_running_batches", "Batches that workers hold.", lambda levels: levels.running_batches),
    ("weir_arena_bytes", "Shared memory for large payloads and results.", lambda levels: levels.arena_bytes),
    ("weir_arena_free_bytes", "Shared memory that is free.", lambda levels: levels.arena_free_bytes),
)
# Name, help, key and factor.
_POLICY: tuple[tuple[str, str, str, float], ...] = (
    ("weir_policy_rate", "Arrival rate as the policy estimates it, rows per second.", "rate", 1.0),
    ("weir_policy_limit", "Rows from which on the policy cuts a batch at this rate.", "limit", 1.0),
    (
        "weir_policy_predicted_response_time_seconds", "Mean response time predicted at this rate.",
        "predicted_response_time_ms", 0.001,
    ),
    (
        "weir_policy_measured_response_time_seconds", "Mean response time over the last half to whole minute.",
        "measured_response_time_ms", 0.001,
    ),
    ("weir_policy_predicted_power_watts", "Mean power predicted at this rate.", "predicted_power_w", 1.0),
    ("weir_policy_measured_power_watts", "Power of the batches served, by the profile.", "measured_power_w", 1.0),
    ("weir_policy_drift", "Service times now, as a multiple of those that were measured.", "drift", 1.0),
)  # fmt: skip


class Exposition(Collector):
    """Renders metrics.

    `code_of(door, error type or None)` gives the `code` label of a request's end; `read_levels()` the present levels of
    each model. It has a registry of its own: nothing is global, so two servers may live in one process.
    """

    def __init__(self, metrics: Metrics, code_of: CodeOf, read_levels: ReadLevels = dict) -> None:
        self._metrics = metrics
        self._code_of = code_of
        self._read_levels = read_levels
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type: OpenMetrics if `accept` asks for it, else Prometheus text."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance (the registry would otherwise collect once at registration)."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        for family in (*self._requests(), *self._transfers(), *self._batches(), *self._present()):
            family.samples = [_with_version(sample) for sample in family.samples]
            yield family

    def _requests(self) -> Iterator[Metric]:
        ended = self._metrics.ended
        requests = CounterMetricFamily(
            "weir_requests", "Requests that had their end.", labels=["model", "door", "code"]
        )
        by_code: dict[tuple[str, str, str], int] = {}
        for (model, door, kind), count in list(ended.items()):
            labels = (model, door, self._code_of(door, kind))
            by_code[labels] = by_code.get(labels, 0) + count
        for labels, count in by_code.items():
            requests.add_metric(labels, count)
        yield requests
        rejected = CounterMetricFamily(
            "weir_requests_rejected", "Requests refused before the line.", labels=["model", "door", "error"]
        )
        for (model, door, kind), count in list(self._metrics.refused_requests.items()):
            rejected.add_metric((model, door, kind.__name__ if kind else ""), count)
        yield rejected
        yield _of_kind(ended, DeadlineExceeded, "weir_requests_expired", "Requests whose deadline passed.")
        yield _of_kind(ended, Cancelled, "weir_requests_cancelled", "Requests whose caller left.")
        yield _of_kind(ended, ValidationFailed, "weir_validation_errors", "Requests that the model's Input refused.")

    def _transfers(self) -> Iterator[Metric]:
        received = CounterMetricFamily("weir_received_bytes", "Bytes of request bodies.", labels=["model", "door"])
        sent = CounterMetricFamily("weir_sent_bytes", "Bytes of response bodies.", labels=["model", "door"])
        for labels, (received_bytes, sent_bytes) in list(self._metrics.bytes.items()):
            received.add_metric(labels, received_bytes)
            sent.add_metric(labels, sent_bytes)
        yield received
        yield sent

    def _batches(self) -> Iterator[Metric]:
        records = list(self._metrics.models.items())
        batches = CounterMetricFamily("weir_batches", "Batches, by why they were cut.", labels=["model", "reason"])
        for model, record in records:
            for reason in Reason:
                batches.add_metric((model, reason.name.lower()), record.batches[reason])
        yield batches
        parts = CounterMetricFamily("weir_stream_parts", "Answers that streaming models gave.", labels=["model"])
        for model, record in records:
            parts.add_metric((model,), record.parts)
        yield parts
        for name, text, histogram_of in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=["model"])
            for model, record in records:
                histogram = histogram_of(record)
                family.add_metric((model,), histogram.cumulative(), histogram.sum)
            yield family

    def _present(self) -> Iterator[Metric]:
        present = self._read_levels()
        for name, text, level_of in _LEVELS:
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, levels in present.items():
                gauge.add_metric((model,), level_of(levels))
            yield gauge
        workers = GaugeMetricFamily("weir_workers", "Workers, by state.", labels=["model", "state"])
        restarts = CounterMetricFamily("weir_worker_restarts", "Workers that were replaced.", labels=["model"])
        for model, levels in present.items():
            restarts.add_metric((model,), levels.restarts)
            for state, count in levels.workers.items():
                workers.add_metric((model, state), count)
        yield workers
        yield restarts
        yield from _policies({model: levels.policy for model, levels in present.items()})


def _with_version(sample: Sample) -> Sample:
    """Return `sample` with the label `version` beside `model`, if the model that it is of has one (name/version)."""
    name, slash, version = sample.labels["model"].partition("/")
    return sample._replace(labels={**sample.labels, "model": name, "version": version}) if slash else sample


def _policies(policies: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text, key, factor in _POLICY:
        gauge = GaugeMetricFamily(name, text, labels=["model"])
        for model, policy in policies.items():
            if policy.get(key) is not None:
                gauge.add_metric((model,), factor * policy[key])
        yield gauge
    resolves = CounterMetricFamily(
        "weir_policy_resolves", "Tables that were solved and swapped in.", labels=["model", "reason"]
    )
    failed = CounterMetricFamily("weir_policy_failed_resolves", "Tries to solve tables that failed.", labels=["model"])
    for model, policy in policies.items():
        for reason, count in policy.get("resolves", {}).items():
            resolves.add_metric((model, reason), count)
        failed.add_metric((model,), policy.get("failed_resolves", 0))
    yield resolves
    yield failed


def _of_kind(ended: Mapping[Outcome, int], kind: type[WeirError], name: str, text: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model", "door"])
    for (model, door, error), count in list(ended.items()):
        if error is not None and issubclass(error, kind):
            family.add_metric((model, door), count)
    return family
