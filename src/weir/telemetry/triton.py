"""The counts of each model under the names that Triton gives them, for the dashboards and autoscalers that look for those.

Triton's counters do not end in `_total`, as Prometheus' own library has it, so they are shown without a type.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weir.errors import Cancelled, CapacityError, DeadlineExceeded, ModelError, WeirError
from weir.telemetry.metrics import Metrics
from weir.telemetry.statistics import Statistics

_MICROSECONDS = 1e6
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class Counted(NamedTuple):
    """One model in one version ("": it has none), and how many of its requests wait."""

    model: str
    version: str
    statistics: Statistics
    pending: int

    @property
    def label(self) -> str:
        """What observers hear it called."""
        return f"{self.model}/{self.version}" if self.version else self.model


Read = Callable[[Counted], float]

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
        lambda each: _MICROSECONDS * each.statistics.queue.seconds,
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

    def __init__(self, metrics: Metrics, read: Callable[[], Iterable[Counted]]) -> None:
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

    def _failures(self, counted: list[Counted]) -> Metric:
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
