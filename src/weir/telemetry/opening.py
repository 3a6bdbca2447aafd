"""Switches tracing on, if it is wanted and can be had."""

from typing import TYPE_CHECKING

from weir.errors import SettingsError
from weir.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from weir.telemetry.tracing import Tracing


def open_tracing(settings: TelemetrySettings, service_name: str) -> "list[Tracing]":
    """Return what makes spans, if the settings say where they go. Raises SettingsError if its library is not installed."""
    if settings.trace_endpoint is None:
        return []
    try:
        from weir.telemetry.tracing import make_tracing  # its library is optional, and takes a while to load

        return [make_tracing(settings.trace_endpoint, settings.trace_ratio, service_name)]
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise SettingsError(
            f"trace_endpoint={settings.trace_endpoint!r}: needs opentelemetry-sdk and its OTLP exporter, which are not "
            f'installed ({error}): pip install "weir-serving[tracing]"'
        ) from error
