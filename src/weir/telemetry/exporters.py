"""Finds the exporters of OpenTelemetry's SDK that a server is to use, and logs when they begin to fail and when they work again."""

import logging
import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL

from weir.errors import SettingsError

logger = logging.getLogger("weir")


def _hide_headers(record: logging.LogRecord) -> bool:
    record.args = ("it is not shown, as it may be a secret",)
    return True


# A header that its reader does not understand would be logged as it is.
logging.getLogger("opentelemetry.util.re").addFilter(_hide_headers)

# By what OTEL_EXPORTER_OTLP_PROTOCOL states: the name of the exporter, in entry points and packages.
_OTLP = {"grpc": "otlp_proto_grpc", "http/json": "otlp_json_http", "http/protobuf": "otlp_proto_http"}
_QUEUE = "opentelemetry.sdk._shared_internal"  # logs each minute that spans are dropped


def make_exporter(signal: str, name: str, setting: str, **arguments: Any) -> Any:
    """Return the exporter called `name` of the "traces" or "metrics", made with `arguments`. `otlp` is that of the protocol of OTLP that the
    environment states.

    What its library logs while it fails becomes one warning, and one line when it works again. Raises SettingsError for an unknown protocol,
    and if the exporter is not installed, which `setting` asks for.
    """
    wanted, what = name, f"of {signal}"
    if name == "otlp":
        protocol = otlp_protocol(signal)
        wanted, what = _OTLP[protocol], f"of {signal} by {OTEL_EXPORTER_OTLP_PROTOCOL}={protocol}"
    for point in entry_points(group=f"opentelemetry_{signal}_exporter", name=wanted):
        exporter = point.load()(**arguments)
        outage = _Outage(signal, exporter.export)
        for module in {_QUEUE, *(each.__module__ for each in type(exporter).__mro__)}:
            logging.getLogger(module).addFilter(outage)
        exporter.export = outage.export
        return exporter
    raise SettingsError(
        f"{setting}: no installed package has the exporter {wanted!r} {what} "
        f"(opentelemetry-exporter-{wanted.replace('_', '-')}, for one, may have it)"
    )


def otlp_protocol(signal: str) -> str:
    """Return the protocol that carries the messages of OTLP. Raises SettingsError if the environment states one that does not exist."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", OTEL_EXPORTER_OTLP_PROTOCOL):
        if stated := os.environ.get(variable):
            if stated not in _OTLP:
                raise SettingsError(f"{variable}={stated!r}: must be one of {', '.join(_OTLP)}")
            return stated
    return "http/protobuf"


class _Outage(logging.Filter):
    """Calls `export`, and keeps back what is logged by its thread meanwhile, and by all threads while it fails."""

    def __init__(self, signal: str, export: Callable[..., Any]) -> None:
        super().__init__()
        self._signal = signal
        self._export = export
        self._thread: int | None = None  # that exports
        self._reasons: list[str] = []  # why it fails, as its library has it
        self._failures = 0  # since it has worked

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is to be logged."""
        exports = threading.get_ident() == self._thread
        if exports:
            self._reasons.append(record.getMessage())
        return not exports and not self._failures

    def export(self, *batch: Any, **more: Any) -> Any:
        """Return what `export` returns, or None if it raises; it is called by one thread at a time."""
        self._thread, self._reasons = threading.get_ident(), []
        try:
            result = self._export(*batch, **more)
        except Exception as error:  # of any library
            result = None
            self._reasons.append(str(error))
        finally:
            self._thread = None
        if result is None or result.name != "SUCCESS":
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "%s cannot be sent", self._signal, extra={"reason": next(iter(self._reasons), "unknown")}
                )
        elif self._failures:
            logger.info("%s are sent again", self._signal, extra={"failures": self._failures})
            self._failures = 0
        return result
