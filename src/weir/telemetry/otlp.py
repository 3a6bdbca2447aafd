"""Sends the metrics of exposition.py, as they are there, to the receivers of OpenTelemetry that the environment names.

Nothing is counted twice: the SDK calls at intervals, and each family of Prometheus becomes a metric of the same name, whose unit follows
from that name. The conversion is the one of OpenTelemetry's specification, "Prometheus and OpenMetrics Compatibility".
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import Exemplar, MeterProvider
from opentelemetry.sdk.metrics import export as sdk
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from weir.telemetry import needing_opentelemetry
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Histogram, frontend_of
from weir.telemetry.tracing import SCOPE, make_resource

logger = logging.getLogger("weir")

FLUSH_TIME = 3.0  # seconds that the last metrics may take at the end of a server

_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By", "watts": "W"}  # by the last word of a name
_UNKNOWN: Any = None  # which the SDK leaves out
_EMBEDDINGS = {"gen_ai.operation.name": "embeddings", "gen_ai.provider.name": "weir"}


def _http_outcome(code: str) -> dict[str, int | str]:
    return {"http.response.status_code": int(code), **({"error.type": code} if code >= "500" else {})}


def _genai_outcome(code: str) -> dict[str, int | str]:
    return {"error.type": code} if code >= "400" else {}


def _route(source: str) -> dict[str, str]:
    return {"http.route": source} if source.startswith("/") else {}


# By frontend: the metric of OpenTelemetry's conventions for HTTP or generative AI, its labels, the name of the label for the model, and the labels
# for a status. To the first a 4xx is no error of the server; the second calls every response an error that has no result.
_CONVENTIONS: dict[str, tuple[str, dict[str, str], str, Callable[[str], dict[str, int | str]]]] = {
    "http": ("http.server.request.duration", {"http.request.method": "POST"}, "weir.model", _http_outcome),
    "openai": ("gen_ai.server.request.duration", _EMBEDDINGS, "gen_ai.request.model", _genai_outcome),
}


@asynccontextmanager
async def pushing(
    exposition: Exposition, exporters: Sequence[sdk.MetricExporter], service_name: str, scheme: str
) -> AsyncIterator[None]:
    """While the block runs, send the metrics of `exposition` at intervals of OTEL_METRIC_EXPORT_INTERVAL, and once more at its end.

    The SDK has a thread for each of `exporters`; the metrics are read on the event loop. `scheme` is that of the server's URLs. Raises
    SettingsError for a wrong interval.
    """
    joined = [_Joining(each, exposition, scheme, asyncio.get_running_loop()) for each in exporters]
    with needing_opentelemetry("OTEL_METRIC_EXPORT_INTERVAL"):
        readers = list(map(sdk.PeriodicExportingMetricReader, joined))
    provider = MeterProvider(readers, make_resource(service_name), shutdown_on_exit=False)
    began = time.monotonic()
    # The SDK calls an exporter only if it has an instrument itself.
    provider.get_meter(SCOPE.name, SCOPE.version).create_observable_gauge(
        "process.uptime", [lambda _: [Observation(time.monotonic() - began)]], "s", "Time since the server's start."
    )
    try:
        yield
    finally:
        try:
            await asyncio.to_thread(provider.shutdown, 1000.0 * FLUSH_TIME)
        except Exception as error:  # the SDK has no narrower one
            logger.warning("the last metrics were not sent to all receivers: %s", error)


class _Joining(sdk.MetricExporter):
    """Passes on to `exporter` what the SDK has collected, and with it what `exposition` shows."""

    def __init__(
        self, exporter: sdk.MetricExporter, exposition: Exposition, scheme: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._exporter = exporter
        self._exposition = exposition
        self._scheme = scheme
        self._loop = loop
        self._since = time.time_ns()
        self._gauges: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}  # the last of each name, by labels
        self._result = sdk.MetricExportResult.SUCCESS  # of the last export
        self._ended = False

    def export(self, metrics_data: sdk.MetricsData, timeout_millis: float = 10_000, **_: Any) -> sdk.MetricExportResult:
        """Send all of it; this is called in a thread of the SDK."""
        if self._ended:  # the export before this one took until after the end, and nobody reads any more
            return sdk.MetricExportResult.FAILURE
        self._result = sdk.MetricExportResult.FAILURE
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        (resource,) = metrics_data.resource_metrics
        try:
            shown = reading.result(1e-3 * timeout_millis)
        except TimeoutError:
            reading.cancel()
            logger.warning("metrics cannot be read: the event loop is blocked")
            return self._result
        # Of scopes of one name, OTLP's encoder keeps the last; others have metrics of the SDK itself.
        scopes = [
            replace(each, metrics=[*each.metrics, *shown]) if each.scope.name == SCOPE.name else each
            for each in resource.scope_metrics
        ]
        self._result = self._exporter.export(sdk.MetricsData([replace(resource, scope_metrics=scopes)]), timeout_millis)
        return self._result

    async def _read(self) -> list[sdk.Metric]:
        now, families = time.time_ns(), list(self._exposition.registry.collect())
        for family in families:
            if family.type == "gauge":
                family.samples += self._gone(family)
        shown = [_metric(family, (self._since, now)) for family in families if family.samples]
        return [*shown, *self._conventional(now)]

    def _gone(self, family: Family) -> list[Sample]:
        """Return zeros for the series that a gauge had at the last interval and has no more: receivers show the last value for minutes."""
        before, now = self._gauges.get(family.name, {}), {tuple(each.labels.items()): each for each in family.samples}
        self._gauges[family.name] = now
        return [each._replace(value=0.0) for labels, each in before.items() if labels not in now]

    def _conventional(self, now: int) -> Iterator[sdk.Metric]:
        """Yield the response times under the names of OpenTelemetry's conventions."""
        durations = self._exposition.durations().items()
        for frontend, (name, labels, of_model, outcome) in _CONVENTIONS.items():
            scheme = {"url.scheme": self._scheme} if frontend == "http" else {}
            points = [
                _point(
                    {**labels, **scheme, of_model: model, **outcome(code), **_route(source)}, (self._since, now), times
                )
                for (model, source, code), times in durations
                if frontend_of(source) == frontend
            ]
            if points:
                yield sdk.Metric(name, "Duration of requests.", "s", sdk.Histogram(points, _CUMULATIVE))

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Wait until everything was sent."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 1000.0 * FLUSH_TIME, **_: Any) -> None:
        """End the exporter, and warn if the last export has failed or still waits for its receiver."""
        if self._result is not sdk.MetricExportResult.SUCCESS:
            logger.warning("the last metrics are lost: no OTLP receiver took them within %g s", FLUSH_TIME)
        self._ended = True
        self._exporter.shutdown(timeout_millis)


def _metric(family: Family, interval: tuple[int, int]) -> sdk.Metric:
    """Return `family` as the SDK has it, with counts from the start to the end of `interval` (nanoseconds since 1970)."""
    data: sdk.Histogram | sdk.Sum | sdk.Gauge
    if family.type == "histogram":
        series = groupby(family.samples, _without_bound)
        data = sdk.Histogram([_histogram(labels, list(each), interval) for labels, each in series], _CUMULATIVE)
    else:
        points = [sdk.NumberDataPoint(each.labels, *interval, float(each.value)) for each in family.samples]
        data = sdk.Sum(points, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else sdk.Gauge(points)
    return sdk.Metric(family.name, family.documentation, _UNITS.get(family.name.rpartition("_")[2], ""), data)


def _without_bound(sample: Sample) -> dict[str, str]:
    return {name: text for name, text in sample.labels.items() if name != "le"}


def _histogram(
    labels: Mapping[str, str], series: Sequence[Sample], interval: tuple[int, int]
) -> sdk.HistogramDataPoint:
    buckets = [each for each in series if each.name.endswith("_bucket")]
    times = Histogram([float(each.labels["le"]) for each in buckets[:-1]])
    times.counts = [int(after - before) for before, after in pairwise([0.0, *[each.value for each in buckets]])]
    times.sum = next(each.value for each in series if each.name.endswith("_sum"))
    return _point(labels, interval, times, list(_exemplars(buckets)))


def _point(
    labels: Mapping[str, str | int], interval: tuple[int, int], times: Histogram, exemplars: Sequence[Exemplar] = ()
) -> sdk.HistogramDataPoint:
    return sdk.HistogramDataPoint(
        labels, *interval, times.count, times.sum, times.counts, times.bounds, _UNKNOWN, _UNKNOWN, exemplars
    )


def _exemplars(buckets: Iterable[Sample]) -> Iterator[Exemplar]:
    for each in buckets:
        if (found := each.exemplar) is not None and found.timestamp is not None:
            trace, span = (int(found.labels[name], 16) for name in ("trace_id", "span_id"))
            yield Exemplar({}, found.value, int(1e9 * float(found.timestamp)), span, trace)
