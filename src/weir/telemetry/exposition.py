"""Shows the counts of recorder.py in Prometheus' text format, under Weir's names and under Triton's."""

import logging
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from weir.errors import Cancelled, CapacityError, DeadlineExceeded, ModelError, ValidationFailed, WeirError
from weir.messages import Reason, label_of, parts_of
from weir.metrics import COUNTER, GAUGE, Change, Definition, Values
from weir.telemetry.output import LOST
from weir.telemetry.recorder import SECONDS, Histogram, Metrics, Recorder, frontend_of

logger = logging.getLogger("weir")


NAMESPACE = "weir"  # the first word of the names of metrics by default

CodeOf = Callable[[str, type[WeirError] | None], str]
State = Mapping[str, Any]  # of a model: that of ModelControl, with its `version` and its `wanted_workers`
ReadStates = Callable[[], Mapping[str, State]]

# By attribute of a Recorder: name and help.
_HISTOGRAMS = {
    "rows": ("weir_batch_size", "Rows in each batch."),
    "queue": ("weir_queue_time_seconds", "From arrival to dispatch, of each request except bulk work."),
    "preprocess": ("weir_preprocess_time_seconds", "Decoding, validation and preprocess of each batch."),
    "predict": ("weir_predict_time_seconds", "predict of each batch."),
    "postprocess": ("weir_postprocess_time_seconds", "postprocess and encoding of each batch."),
    "first_part": ("weir_first_part_time_seconds", "From arrival to the first response, of each stream."),
    "total": (
        "weir_total_time_seconds",
        "From arrival to the end, of each request that was accepted, except bulk work.",
    ),
    "bulk_total": ("weir_bulk_total_time_seconds", "From arrival to the end, of each request of bulk work."),
}
# By name: help, and where the number is in the state of a model. Milliseconds are shown in seconds.
_GAUGES = {
    "weir_waiting_rows": ("Rows in the queue.", "waiting"),
    "weir_bulk_waiting_rows": ("Rows of bulk work among them.", "waiting_bulk"),
    "weir_waiting_requests": ("Requests in the queue.", "waiting_requests"),
    "weir_running_batches": ("Batches that workers hold.", "in_flight_batches"),
    "weir_arena_bytes": ("Shared memory for large payloads and results.", "gauges.arena_bytes"),
    "weir_arena_free_bytes": ("Shared memory that is free.", "gauges.arena_free_bytes"),
    "weir_workers_wanted": ("Target number of workers.", "wanted_workers"),
    "weir_policy_rate": ("Arrival rate that the policy estimates, in rows per second.", "policy.rate"),
    "weir_policy_limit": (
        "Control limit at this rate: waiting rows at which the policy dispatches.",
        "policy.limit",
    ),
    "weir_policy_predicted_response_time_seconds": (
        "Mean response time predicted at this rate.",
        "policy.predicted_response_time_ms",
    ),
    "weir_policy_measured_response_time_seconds": (
        "Mean response time over the last half to whole minute.",
        "policy.measured_response_time_ms",
    ),
    "weir_policy_predicted_power_watts": ("Mean power predicted at this rate.", "policy.predicted_power_w"),
    "weir_policy_measured_power_watts": ("Power of the batches served, by the profile.", "policy.measured_power_w"),
    "weir_policy_drift": (
        "Rows per second that a worker could serve when it was measured, divided by those that it can serve now.",
        "policy.drift",
    ),
}
_COUNTERS = {
    "weir_worker_restarts": ("Workers that were replaced.", "gauges.restarts"),
    "weir_policy_failed_resolves": ("Failed attempts to solve tables.", "policy.failed_resolves"),
}


class Exposition(Collector):
    """Renders the metrics of one server.

    It has a registry of its own, so that two servers may live in one process.

    Args:
        metrics: the counts.
        code_of: returns the label `code` of a request's end, from the label `frontend` and the type of the error (None: an
            answer).
        read_states: returns the present state of each model.
        namespace: the first word of all names.
    """

    def __init__(
        self, metrics: Metrics, code_of: CodeOf, read_states: ReadStates = dict, namespace: str = NAMESPACE
    ) -> None:
        self._metrics = metrics
        self._code_of = code_of
        self._read_states = read_states
        self.registry = _Named(namespace)
        self._shared: SharedCounts | None = None
        self._hidden: set[tuple[str, Definition]] = set()
        self._versions: dict[str, str] = {}  # of the models that there are or were, by label
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type: OpenMetrics if `accept` asks for it, else Prometheus text.

        After `share` they are those of all processes that share a folder.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry if self._shared is None else self._shared.together()), content_type

    def share(self, folder: str) -> "SharedCounts":
        """Show the counts of all processes that share `folder` from now on. The caller writes and closes the returned
        object.
        """
        self._shared = SharedCounts(self.registry, Path(folder))
        return self._shared

    def durations(self) -> Mapping[tuple[str, str, str], Histogram]:
        """Return the times in seconds from arrival to end of all requests except bulk work, by model, source and code: the route of HTTP, where it
        is known, or else the frontend. Those that were refused before they were queued are in the first interval.
        """
        found: defaultdict[tuple[str, str, str], Histogram] = defaultdict(lambda: Histogram(SECONDS))
        for model, record in self._metrics.models.items():
            for (source, kind), histogram in record.totals.items():
                found[model, source, self._code_of(frontend_of(source), kind)].add(histogram)
        for (model, frontend, kind), count in self._metrics.refused_requests.items():
            found[model, frontend, self._code_of(frontend, kind)].counts[0] += count
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        states = self._read_states()
        self._versions.update({label: state["version"] for label, state in states.items()})
        for family in (*self._requests(), *self._transfers(), *self._batches(), *_present(states)):
            family.samples = [self._with_version(sample) for sample in family.samples]
            yield family
        lost = [((destination,), count) for destination, count in LOST.items()]
        yield _counter(
            "weir_log_lines_lost", "Lines of logs and recordings that could not be written.", "destination", lost
        )
        yield from self._own()

    def _with_version(self, sample: Sample) -> Sample:
        """Return `sample` with a label `version` in addition to `model` if the model has one."""
        label = sample.labels["model"]
        version = self._versions.get(label)
        name, version = parts_of(label) if version is None else (label.removesuffix(f"/{version}"), version)
        return sample._replace(labels={**sample.labels, "model": name, "version": version}) if version else sample

    def _own(self) -> Iterator[Metric]:
        """Yield the models' own metrics. Two models may have one of the same name if it is of the same kind and labels."""
        found: dict[str, tuple[Definition, list[Sample]]] = {}
        for model, reported in self._metrics.reported.items():
            for definition, series in reported.by_name.values():
                first, samples = found.setdefault(definition.name, (definition, []))
                if definition[::3] == first[::3] and not f"{definition.name}_".startswith(self.registry.prefix):
                    samples += _own_samples(model, definition, series)
                elif (model, definition) not in self._hidden:
                    self._hidden.add((model, definition))
                    logger.warning(
                        "metric %r of model %r is not shown: another metric has this name", definition.name, model
                    )
        for name, (definition, samples) in found.items():
            if samples:
                family = Metric(name, definition.help, definition.kind)
                family.samples = list(map(self._with_version, samples))
                yield family

    def _requests(self) -> Iterator[Metric]:
        ended = list(self._metrics.ended.items())
        by_code: Counter[tuple[str, str, str]] = Counter()
        for (model, frontend, kind), count in ended:
            by_code[model, frontend, self._code_of(frontend, kind)] += count
        yield _counter("weir_requests", "Finished requests.", "model frontend code", by_code.items())
        refused = [
            ((model, frontend, kind.__name__ if kind else ""), count)
            for (model, frontend, kind), count in list(self._metrics.refused_requests.items())
        ]
        yield _counter(
            "weir_requests_rejected", "Requests refused before they were queued.", "model frontend error", refused
        )
        for name, text, wanted in (
            ("weir_requests_expired", "Requests whose deadline passed.", DeadlineExceeded),
            ("weir_requests_cancelled", "Requests cancelled by their callers.", Cancelled),
            ("weir_validation_errors", "Requests that failed the model's Input validation.", ValidationFailed),
        ):
            of_kind = [(end[:2], count) for end, count in ended if end[2] is not None and issubclass(end[2], wanted)]
            yield _counter(name, text, "model frontend", of_kind)

    def _transfers(self) -> Iterator[Metric]:
        counts = list(self._metrics.bytes.items())
        for index, (name, text) in enumerate(
            (("weir_received_bytes", "Bytes of request bodies."), ("weir_sent_bytes", "Bytes of response bodies."))
        ):
            yield _counter(name, text, "model frontend", [(labels, count[index]) for labels, count in counts])

    def _batches(self) -> Iterator[Metric]:
        records = list(self._metrics.models.items())
        cut = [((model, reason.name.lower()), record.batches[reason]) for model, record in records for reason in Reason]
        yield _counter("weir_batches", "Batches, by the reason for their dispatch.", "model reason", cut)
        bulk = [((model,), record.bulk_rows) for model, record in records]
        yield _counter("weir_bulk_rows", "Rows of bulk work that were dispatched.", "model", bulk)
        parts = [((model,), record.parts) for model, record in records]
        yield _counter("weir_stream_parts", "Responses of streaming models.", "model", parts)
        for attribute, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=["model"])
            for model, record in records:
                histogram: Histogram = getattr(record, attribute)
                exemplars = self._metrics.exemplars.get(model, {}) if attribute == "total" else {}
                counts = enumerate(histogram.cumulative())
                buckets = [(*each, exemplars[index]) if index in exemplars else each for index, each in counts]
                family.add_metric((model,), buckets, histogram.sum)
            yield family


def _present(states: Mapping[str, State]) -> Iterator[Metric]:
    """Yield what can be read of the models at any moment."""
    for make, families in ((_gauge, _GAUGES), (_counter, _COUNTERS)):
        for name, (text, path) in families.items():
            yield make(name, text, "model", _numbers(states, path.split(".")))
    alone = [
        ((model,), sum(worker["bulk"] and worker["state"] == "ready" for worker in state["workers"]))
        for model, state in states.items()
    ]
    yield _gauge("weir_bulk_workers", "Workers for bulk work alone.", "model", alone)
    workers = [(model, worker) for model, state in states.items() for worker in state["workers"]]
    by_state = Counter((model, worker["state"]) for model, worker in workers if not worker["bulk"])
    yield _gauge("weir_workers", "Workers, by state.", "model state", by_state.items())
    places = [
        ((model, str(at["index"]), at["node"], at["address"], ",".join(at["gpus"]), at["actor"]), 1)
        for model, at in workers
        if at["node"]
    ]
    where = "1, with the location of a worker in a cluster as labels."
    yield _gauge("weir_worker_place", where, "model worker node address gpus actor", places)
    kinds = [((model, kind["kind"]), kind["rows"]) for model, state in states.items() for kind in state["kinds"]]
    yield _counter("weir_kind_rows", "Rows that workers of each kind have served.", "model kind", kinds)
    devices = [(model, state["device"]) for model, state in states.items() if state["device"]]
    busy = [((device["group"], model), device["busy_seconds"]) for model, device in devices]
    text = "Time for which the model's batches had a device that models share."
    yield _counter("weir_device_busy_seconds", text, "device model", busy)
    resolves = [
        ((model, reason), count)
        for model, state in states.items()
        for reason, count in state["policy"].get("resolves", {}).items()
    ]
    yield _counter("weir_policy_resolves", "Tables that were solved and swapped in.", "model reason", resolves)


def _numbers(states: Mapping[str, State], path: Sequence[str]) -> "Samples":
    """Yield the number at `path` in the state of each model that has one."""
    for model, state in states.items():
        found: Any = state
        for key in path:
            found = found.get(key)
        if found is not None:
            yield (model,), 0.001 * found if path[-1].endswith("_ms") else found


def _own_samples(model: str, definition: Definition, series: Mapping[tuple[Values, str], Change]) -> Iterator[Sample]:
    """Yield the samples of a model's own metric, as Prometheus names them."""
    name = definition.name
    for (values, worker), change in list(series.items()):
        labels = {"model": model, **dict(zip(definition.labels, values, strict=True))}
        if definition.kind == GAUGE:
            yield Sample(name, {**labels, "worker": worker}, change.number)
        elif definition.kind == COUNTER:
            yield Sample(f"{name}_total", labels, change.number)
        else:
            ends = (*map(str, definition.bounds), "+Inf")
            for end, count in zip(ends, accumulate(change.counts), strict=True):
                yield Sample(f"{name}_bucket", {**labels, "le": end}, float(count))
            yield Sample(f"{name}_count", labels, float(sum(change.counts)))
            yield Sample(f"{name}_sum", labels, change.number)


class _Named(CollectorRegistry):
    """A registry that replaces the first word, `weir`, of the names of Weir's metrics."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace
        self.prefix = f"{namespace}_"

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        for family in super().collect():
            if self._namespace != NAMESPACE and family.name.startswith(f"{NAMESPACE}_"):
                family.name = self._renamed(family.name)
                family.samples = [sample._replace(name=self._renamed(sample.name)) for sample in family.samples]
            yield family

    def _renamed(self, name: str) -> str:
        return self._namespace + name.removeprefix(NAMESPACE)


class SharedCounts:
    """The counts of this process in a folder for several processes (the workers of gunicorn).

    They are files of prometheus_client's multi-process mode, in a folder of their own inside the one for the metrics
    of programs. Counters and histograms are added up, also those of processes that have ended. Levels are shown for
    each living process, with the label `pid`. It must be made in the process that counts.
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
        """Write the present counts into the folder."""
        for family in self._registry.collect():
            values = self._values.get(family.type, self._values["counter"])
            below = 0.0  # buckets are cumulative when they are shown, but not in the file
            for sample in family.samples:
                value = sample.value
                if family.type == "histogram" and "le" in sample.labels:
                    value, below = value - below, 0.0 if sample.labels["le"] == "+Inf" else value
                elif family.type == "histogram" and sample.name.endswith("_count"):
                    continue  # it follows from the buckets
                names, texts = list(sample.labels), list(sample.labels.values())
                values.write_value(mmap_key(family.name, sample.name, names, texts, family.documentation), value, 0.0)

    def together(self) -> CollectorRegistry:
        """Return a registry with the counts of all processes."""
        self.write()
        for path in self._folder.glob("gauge_liveall_*.db"):
            if not Path("/proc", path.stem.rpartition("_")[2]).exists():
                path.unlink(missing_ok=True)
        registry = CollectorRegistry()
        for folder in (self._programs, self._folder):
            MultiProcessCollector(registry, str(folder))
        return registry

    def close(self) -> None:
        """Write for the last time, and remove the levels."""
        self.write()
        for values in self._values.values():
            values.close()
        self._levels.unlink(missing_ok=True)


Samples = Iterable[tuple[tuple[str, ...], float]]  # values of the labels, and the number


def _counter(name: str, text: str, labels: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels.split()), samples)


def _gauge(name: str, text: str, labels: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels.split()), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for values, number in samples:
        family.add_metric(values, number)
    return family


# The counts of each model under Triton's names, for dashboards and autoscalers that look for those.
#
# Triton's counters do not end in `_total`, as Prometheus' own library requires, so they are shown without a type.


_MICROSECONDS = 1e6
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class ModelCounts(NamedTuple):
    """One model in one version ("": it has none), its statistics, and how many of its requests wait."""

    model: str
    version: str
    statistics: Recorder
    pending: int

    @property
    def label(self) -> str:
        """The label by which observers know the model."""
        return label_of(self.model, self.version)


Read = Callable[[ModelCounts], float]

FAILURE = "nv_inference_request_failure"
_FAMILIES: tuple[tuple[str, str, Read], ...] = (
    ("nv_inference_request_success", "Requests that were answered.", lambda each: each.statistics.success.count),
    ("nv_inference_count", "Rows that were computed.", lambda each: each.statistics.inference_count),
    ("nv_inference_exec_count", "Batches that were computed.", lambda each: each.statistics.execution_count),
    ("nv_inference_pending_request_count", "Requests that wait.", lambda each: each.pending),
    (
        "nv_inference_request_duration_us",
        "From arrival to response, of all requests together, in microseconds.",
        lambda each: _MICROSECONDS * each.statistics.success.seconds,
    ),
    (
        "nv_inference_queue_duration_us",
        "From arrival to dispatch.",
        lambda each: _MICROSECONDS * each.statistics.waited.seconds,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Decoding and preprocess, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.seconds[0],
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "predict, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.seconds[1],
    ),
    (
        "nv_inference_compute_output_duration_us",
        "postprocess and encoding, counted for each request of a batch.",
        lambda each: _MICROSECONDS * each.statistics.requests.seconds[2],
    ),
)


class TritonNames(Collector):
    """Shows the counts that `read` returns under Triton's names. The reasons of failures come from `metrics`."""

    def __init__(self, metrics: Metrics, read: Callable[[], Iterable[ModelCounts]]) -> None:
        self._metrics = metrics
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
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
    """Return Triton's word for the reason of a failure: refused or too late, cancelled, the model's fault, or other."""
    if issubclass(kind, (CapacityError, DeadlineExceeded)):
        return "REJECTED"
    if issubclass(kind, Cancelled):
        return "CANCELED"
    return "BACKEND" if issubclass(kind, ModelError) else "OTHER"
