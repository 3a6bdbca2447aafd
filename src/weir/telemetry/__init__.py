"""Reports what a server does: one recorder of events, the metrics that are views of it, logs and traces. It decides
nothing. Here are the settings of metrics, logs, traces and recordings, and the start of what OpenTelemetry needs.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weir.config import Checked, Rule, one_of, setting
from weir.errors import SettingsError, add_extra

if TYPE_CHECKING:
    from weir.telemetry.recorder import Metrics
    from weir.telemetry.tracing import Tracing


_NAMESPACE: Rule = (
    lambda value: re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", value) is not None,
    "must be letters, digits and _, and begin with no digit",
)
_PULLED = ("", "none", "prometheus")  # names of exporters for which nothing is sent: Prometheus reads /metrics
_SHARE: Rule = (lambda value: 0 <= value <= 1, "must be from 0 to 1")


@dataclass(frozen=True)
class TelemetrySettings(Checked):
    """The settings of metrics, logs and traces."""

    metrics: bool = setting(True, "collect metrics and serve them at /metrics")
    metrics_namespace: str = setting("weir", "prefix of the metric names at /metrics", rule=_NAMESPACE)
    triton_metrics: bool = setting(False, "also export metrics under Triton's names (nv_inference_*)")
    log_format: str = setting(
        "text", "format of log lines: text for people, json for machines", rule=one_of("text", "json")
    )
    log_level: str = setting(
        "info", "minimum severity of log lines", rule=one_of("debug", "info", "warning", "error", "critical")
    )
    access_log: bool = setting(False, "log each HTTP request, and each request to a model")
    log_file: str | None = setting(None, "file to write all log lines to, as JSON", metavar="PATH")
    record: str | None = setting(
        None, "file to record request arrivals in, one per model, for weir simulate and weir bench", metavar="PATH"
    )

    trace_endpoint: str | None = setting(
        None,
        "OTLP endpoint that receives spans, such as http://localhost:4318",
        metavar="URL",
        rule=(lambda value: value.startswith(("http://", "https://")), "must begin with http:// or https://"),
    )
    trace_ratio: float | None = setting(
        None,
        "share of requests to trace when the caller does not decide (default: from OTEL_TRACES_SAMPLER, or all)",
        rule=_SHARE,
    )


def open_tracing(settings: TelemetrySettings, service_name: str, metrics: "Metrics | None" = None) -> "list[Tracing]":
    """Return the observer that makes spans, in a list, if the settings name a receiver and the environment does not disable it; else an empty
    list. `metrics` get its exemplars.

    Raises SettingsError if a library for it is not installed.
    """
    if settings.trace_endpoint is None:
        return []
    with needing_opentelemetry(f"trace_endpoint={settings.trace_endpoint!r}"):
        try:
            from weir.telemetry.tracing import make_tracing  # its library is optional, and takes a while to load
        except ValueError as error:  # that library looks for propagators when it is imported
            raise SettingsError(
                f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')!r}: {error} (opentelemetry-propagator-b3, for one, has b3)"
            ) from error

        exemplars = None if metrics is None else metrics.exemplars
        tracing = make_tracing(settings.trace_endpoint, settings.trace_ratio, service_name, exemplars)
        if tracing.enabled:
            return [tracing]
        with tracing:  # ends its thread
            return []


def open_metric_exporters() -> list[Any]:
    """Return the exporters of metrics that OTEL_METRICS_EXPORTER names, separated by commas. Raises SettingsError if one is not installed, or a
    variable of its own is wrong."""
    stated = os.environ.get("OTEL_METRICS_EXPORTER", "")
    names = [name for each in stated.split(",") if (name := each.strip()) not in _PULLED]
    if not names:
        return []
    setting = f"OTEL_METRICS_EXPORTER={stated!r}"
    with needing_opentelemetry(setting):
        from weir.telemetry.exporters import make_exporter

        return [make_exporter("metrics", name, setting) for name in names]


@contextmanager
def needing_opentelemetry(setting: str) -> Iterator[None]:
    """Raise SettingsError if OpenTelemetry's library, which `setting` needs, is not installed, or refuses a variable of its own."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise SettingsError(
            f"{setting}: needs opentelemetry-sdk and its OTLP exporter, which are not installed ({error}); {add_extra('otel')}"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{setting}: OpenTelemetry refuses one of its variables: {error}") from error
