"""Shows what recorder.py has counted, in Prometheus' text format, under Weir's names and under Triton's."""

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from weir.errors import Cancelled, CapacityError, DeadlineExceeded, ModelError, ValidationFailed, WeirError
from weir.messages import Reason
from weir.telemetry.recorder import Histogram, Metrics, Outcome, Recorder


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


NAMESPACE = "weir"  # the first word of the names of metrics, unless another one is wanted

CodeOf = Callable[[str, type[WeirError] | None], str]
ReadLevels = Callable[[], Mapping[str, Levels]]

_HISTOGRAMS: tuple[tuple[str, str, Callable[[Recorder], Histogram]], ...] = (
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
    each model. It has a registry of its own: nothing is global, so two servers may live in one process. `namespace` is the
    first word of the names, whatever is registered.
    """

    def __init__(
        self, metrics: Metrics, code_of: CodeOf, read_levels: ReadLevels = dict, namespace: str = NAMESPACE
    ) -> None:
        self._metrics = metrics
        self._code_of = code_of
        self._read_levels = read_levels
        self.registry = _Named(namespace)
        self._shared: SharedCounts | None = None
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type: OpenMetrics if `accept` asks for it, else Prometheus text. After `share`
        they are those of all processes that share them."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry if self._shared is None else self._shared.together()), content_type

    def share(self, folder: str) -> "SharedCounts":
        """Show what all processes that share `folder` have counted, from now on. The caller writes and closes what is returned."""
        self._shared = SharedCounts(self.registry, Path(folder))
        return self._shared

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


class _Named(CollectorRegistry):
    """Has all of Weir's metrics begin with another word than `weir`."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        for family in super().collect():
            if self._namespace != NAMESPACE and family.name.startswith(f"{NAMESPACE}_"):
                family.name = self._renamed(family.name)
                family.samples = [sample._replace(name=self._renamed(sample.name)) for sample in family.samples]
            yield family

    def _renamed(self, name: str) -> str:
        return self._namespace + name.removeprefix(NAMESPACE)


class SharedCounts:
    """The counts of this process in a folder where several (the workers of gunicorn) put theirs: in files of
    prometheus_client's multi-process mode, in a folder of their own inside of the one for the metrics of programs.

    Counters and histograms are added up, also those of processes that have ended. Levels are shown for each process that lives,
    with the label `pid`. To be made in the process that counts.
    """

    def __init__(self, registry: CollectorRegistry, folder: Path) -> None:
        self._registry = registry
        self._programs = folder
        self._folder = folder / NAMESPACE
        self._folder.mkdir(parents=True, exist_ok=True)
        life = f"{os.getpid()}-{secrets.token_hex(4)}"  # a later process may have the same number
        self._levels = self._folder / f"gauge_liveall_{os.getpid()}.db"
        self._levels.unlink(missing_ok=True)
        files = {kind: self._folder / f"{kind}_{life}.db" for kind in ("counter", "histogram")} | {
            "gauge": self._levels
        }
        self._values = {kind: MmapedDict(str(path)) for kind, path in files.items()}

    def write(self) -> None:
        """Put into the folder what has been counted so far."""
        for family in self._registry.collect():
            values = self._values.get(family.type, self._values["counter"])
            below = 0.0  # a bucket is cumulative when it is shown, and counts for itself in the file
            for sample in family.samples:
                value = sample.value
                if family.type == "histogram" and "le" in sample.labels:
                    value, below = value - below, 0.0 if sample.labels["le"] == "+Inf" else value
                elif family.type == "histogram" and sample.name.endswith("_count"):
                    continue  # of all buckets
                names, texts = list(sample.labels), list(sample.labels.values())
                values.write_value(mmap_key(family.name, sample.name, names, texts, family.documentation), value, 0.0)

    def together(self) -> CollectorRegistry:
        """Return what all processes have counted."""
        self.write()
        for path in self._folder.glob("gauge_liveall_*.db"):
            if not Path("/proc", path.stem.rpartition("_")[2]).exists():
                path.unlink(missing_ok=True)
        registry = CollectorRegistry()
        for folder in (self._programs, self._folder):
            MultiProcessCollector(registry, str(folder))
        return registry

    def close(self) -> None:
        """Write for the last time; levels are shown no longer."""
        self.write()
        for values in self._values.values():
            values.close()
        self._levels.unlink(missing_ok=True)


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


# The counts of each model under the names that Triton gives them, for the dashboards and autoscalers that look for those.
#
# Triton's counters do not end in `_total`, as Prometheus' own library has it, so they are shown without a type.


_MICROSECONDS = 1e6
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class ModelCounts(NamedTuple):
    """One model in one version ("": it has none), and how many of its requests wait."""

    model: str
    version: str
    statistics: Recorder
    pending: int

    @property
    def label(self) -> str:
        """What observers hear it called."""
        return f"{self.model}/{self.version}" if self.version else self.model


Read = Callable[[ModelCounts], float]

FAILURE = "nv_inference_request_failure"
_FAMILIES: tuple[tuple[str, str, Read], ...] = (
    ("nv_inference_request_success", "Requests that were answered.", lambda each: each.statistics.success.count),
    ("nv_inference_count", "Rows that were computed.", lambda each: each.statistics.inference_count),
    ("nv_inference_exec_count", "Batches that were computed.", lambda each: each.statistics.execution_count),
    ("nv_inference_pending_request_count", "Requests that wait.", lambda each: each.pending),
    (
        "nv_inference_request_duration_us", "From arrival to answer, of all requests together, in microseconds.",
        lambda each: _MICROSECONDS * each.statistics.success.seconds,
    ),
    (
        "nv_inference_queue_duration_us", "From arrival to dispatch.",
        lambda each: _MICROSECONDS * each.statistics.waited.seconds,
    ),
    (
        "nv_inference_compute_input_duration_us", "Decoding and preprocess, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.input.seconds,
    ),
    (
        "nv_inference_compute_infer_duration_us", "predict, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.infer.seconds,
    ),
    (
        "nv_inference_compute_output_duration_us", "postprocess and encoding, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.output.seconds,
    ),
)  # fmt: skip


class TritonNames(Collector):
    """Shows what `read` returns; failures by reason are those that `metrics` has counted."""

    def __init__(self, metrics: Metrics, read: Callable[[], Iterable[ModelCounts]]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance (the registry would otherwise collect once at registration)."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        counted = list(self._read())
        for name, text, value_of in _FAMILIES:
            family = Metric(name, text, "unknown")
            for each in counted:
                family.add_sample(name, {"model": each.model, "version": each.version}, float(value_of(each)))
            yield family
        yield self._failures(counted)

    def _failures(self, counted: list[ModelCounts]) -> Metric:
        failed: defaultdict[tuple[str, str], int] = defaultdict(int)
        for (label, _, kind), count in list(self._metrics.ended.items()):
            if kind is not None:
                failed[label, reason_of(kind)] += count
        family = Metric(FAILURE, "Requests that failed, by why.", "unknown")
        for each in counted:
            for reason in REASONS:
                labels = {"model": each.model, "version": each.version, "reason": reason}
                family.add_sample(FAILURE, labels, float(failed[each.label, reason]))
        return family


def reason_of(kind: type[WeirError]) -> str:
    """Return Triton's word for why a request failed: refused or too late, its caller left, the model, or else."""
    if issubclass(kind, (CapacityError, DeadlineExceeded)):
        return "REJECTED"
    if issubclass(kind, Cancelled):
        return "CANCELED"
    return "BACKEND" if issubclass(kind, ModelError) else "OTHER"
