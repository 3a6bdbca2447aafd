"""The settings of metrics, logs and recordings."""

from dataclasses import dataclass

from weir.fields import check, one_of, setting


@dataclass(frozen=True)
class TelemetrySettings:
    """What the server tells about itself."""

    metrics: bool = setting(True, "count what happens and show it at /metrics")
    triton_metrics: bool = setting(False, "show them under the names that Triton has for them (nv_inference_*) too")
    log_format: str = setting(
        "text", "how log lines look: text for people, json for machines", rule=one_of("text", "json")
    )
    log_level: str = setting(
        "info", "least severe log lines shown", rule=one_of("debug", "info", "warning", "error", "critical")
    )
    log_file: str | None = setting(None, "file that gets every log line too, as JSON", metavar="PATH")
    record: str | None = setting(
        None, "file that gets the arrivals of requests, to be simulated or replayed; one of each model if there are several",
        metavar="PATH",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
