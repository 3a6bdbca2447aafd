"""What Prometheus is asked: when to add pods, when to alert. Each query names metrics as the server names them."""

from collections.abc import Mapping
from typing import Any

from weir.errors import SettingsError
from weir.manifests.settings import Manifest

# Values of the label `code`.
SERVER_FAILED = "5..|INTERNAL|UNAVAILABLE|ModelError|ModelCrashed|ModelNotReady|WorkerLost"
_SUSTAINED = "5m"


class Queries:
    """Queries of the metrics of one server, or of all that Prometheus calls `job`.

    Args:
        job: the label `job` that Prometheus gives the metrics.
        namespace: that of Kubernetes; None: any.
        prefix: the first word of the metrics' names.
    """

    def __init__(self, job: str, namespace: str | None = None, prefix: str = "weir") -> None:
        own = {} if namespace is None else {"namespace": namespace}
        self._labels, self._prefix = {**own, "job": job}, prefix

    def metric(self, name: str, over: str = "", **matchers: str) -> str:
        """Return the selector of a metric; `matchers` are labels and patterns, and `over` is a duration."""
        return f"{self._prefix}_{name}{{{self._matchers(matchers)}}}" + (f"[{over}]" if over else "")

    def rate(self, name: str, by: str = "job", **matchers: str) -> str:
        """Return the query of how often a counter counts, per second."""
        return f"sum by ({by}) (rate({self.metric(name, _SUSTAINED, **matchers)}))"

    def latency(self, by: str = "", over: str = "2m") -> str:
        """Return the query of the 99th percentile of the response time, in seconds."""
        grouped = f"le, {by}" if by else "le"
        return f"histogram_quantile(0.99, sum by ({grouped}) (rate({self.metric('total_time_seconds_bucket', over)})))"

    @property
    def waiting_rows(self) -> str:
        """The query of the rows that wait in all pods together, but those of bulk work, which is meant to wait."""
        return f"sum({self.metric('waiting_rows')}) - sum({self.metric('bulk_waiting_rows')})"

    @property
    def pods(self) -> str:
        """The query of how many pods there are."""
        return f"count({self.metric('connections')})"

    @property
    def up(self) -> str:
        """The query of which servers answer Prometheus."""
        return f"up{{{self._matchers({})}}}"

    def _matchers(self, patterns: Mapping[str, str]) -> str:
        exact = [f'{label}="{value}"' for label, value in self._labels.items()]
        return ",".join([*exact, *(f'{label}=~"{pattern}"' for label, pattern in patterns.items())])


def groups(queries: Queries, name: str, target_latency: float | None = None) -> list[dict[str, Any]]:
    """Return the groups of rules: those that record what is often asked, and the alerts."""
    return [
        {"name": f"{name}.records", "rules": _records(queries)},
        {"name": f"{name}.alerts", "rules": _alerts(queries, target_latency)},
    ]


def _records(queries: Queries) -> list[dict[str, Any]]:
    model = "job, model"
    mean = f"{queries.rate('batch_size_sum', model)} / {queries.rate('batch_size_count', model)}"
    return [
        {"record": "weir:requests:rate5m", "expr": queries.rate("requests_total", "job, model, code")},
        {"record": "weir:total_time_seconds:p99_5m", "expr": queries.latency(model, _SUSTAINED)},
        {"record": "weir:batch_size:mean5m", "expr": mean},
    ]


def _alerts(queries: Queries, target_latency: float | None) -> list[dict[str, Any]]:
    model, every = "job, model", "job, instance, model"
    asked = queries.rate("requests_total", model)
    failed = queries.rate("requests_total", model, code=SERVER_FAILED)
    refused = queries.rate("requests_rejected_total", model, error="Overloaded")
    late = queries.rate("requests_expired_total", model)
    ready = f"sum by ({every}) ({queries.metric('workers', state='ready')}) > 0"
    restarts = queries.metric("worker_restarts_total", "15m")
    held = f"{queries.metric('held_bytes')} / {queries.metric('max_held_bytes')}"
    alerts = [
        _alert("WeirDown", f"{queries.up} == 0", "1m", "critical", "Prometheus cannot reach {{ $labels.instance }}"),
        _alert(
            "WeirModelNotReady", f"sum by ({every}) ({queries.metric('workers')}) unless ({ready})", "1m", "critical",
            "no worker of {{ $labels.model }} is ready on {{ $labels.instance }}",
        ),
        _alert(
            "WeirRequestsFail", f"{failed} / {asked} > 0.01", "5m", "critical",
            "{{ $value | humanizePercentage }} of the requests for {{ $labels.model }} fail by the server's fault",
        ),
        _alert(
            "WeirOverloaded", f"{refused} / {asked} > 0.01", "5m", "warning",
            "{{ $value | humanizePercentage }} of the requests for {{ $labels.model }} are refused: its queue is full",
        ),
        _alert(
            "WeirRequestsExpire", f"{late} / {asked} > 0.01", "5m", "warning",
            "{{ $value | humanizePercentage }} of the requests for {{ $labels.model }} miss their deadline",
        ),
        _alert(
            "WeirWorkersRestart", f"increase({restarts}) > 3", "0m", "warning",
            "workers of {{ $labels.model }} on {{ $labels.instance }} die again and again",
        ),
        _alert(
            "WeirServiceTimesDrift", f"{queries.metric('policy_drift')} > 1.5", "15m", "warning",
            "batches of {{ $labels.model }} take {{ $value | humanize }} times as long as its policy was solved for",
        ),
        _alert(
            "WeirMemoryFull", f"{held} > 0.9", "5m", "warning",
            "requests and responses hold {{ $value | humanizePercentage }} of what they may on {{ $labels.instance }}",
        ),
    ]  # fmt: skip
    if target_latency is not None:
        text = f"p99 of {{{{ $labels.model }}}} is {{{{ $value | humanizeDuration }}}}, above {target_latency:g} s"
        alerts.append(_alert("WeirTooSlow", f"{queries.latency(model)} > {target_latency:g}", "5m", "warning", text))
    return alerts


def _alert(name: str, expression: str, sustained: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": sustained,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


def queries_of(manifest: Manifest) -> Queries:
    """Return the queries of the pods of `manifest`, as Prometheus knows them by the PodMonitor: `job` is the name of the objects. Raises SettingsError
    if nothing is stated about the PodMonitor."""
    if manifest.monitoring.monitor is None:
        raise SettingsError(
            f"--replicas={manifest.objects.replicas}: KEDA asks Prometheus for metrics of the job {manifest.name!r}, which a "
            "PodMonitor collects: add --monitor, or --no-monitor where something else collects them under this name"
        )
    prefix = manifest.command.settings.telemetry.metrics_namespace
    return Queries(manifest.name, manifest.objects.namespace, prefix)


def monitoring(manifest: Manifest, job_label: str, selector: dict[str, str]) -> list[dict[str, Any]]:
    """Return the PodMonitor of the pods with the labels `selector`, whose label `job_label` is their job, and the PrometheusRule; nothing if
    they are not wanted."""
    if not manifest.monitoring.monitor:
        return []
    endpoint: dict[str, Any] = {
        "port": "http",
        "path": "/metrics",
        "interval": "15s",
        "scheme": manifest.command.scheme.lower(),
    }
    if manifest.objects.api_key_secret is not None:
        credentials = {"name": manifest.objects.api_key_secret, "key": "api-key"}
        endpoint["authorization"] = {"credentials": credentials}
    if endpoint["scheme"] == "https":
        endpoint["tlsConfig"] = {"insecureSkipVerify": True}  # pods are asked by address, which no certificate names
    watched = {"jobLabel": job_label, "selector": {"matchLabels": selector}, "podMetricsEndpoints": [endpoint]}
    rules = groups(queries_of(manifest), manifest.name, manifest.scaling.target_latency)
    operator = "monitoring.coreos.com/v1"
    return [
        {"apiVersion": operator, "kind": "PodMonitor", "metadata": manifest.metadata(), "spec": watched},
        {"apiVersion": operator, "kind": "PrometheusRule", "metadata": manifest.metadata(), "spec": {"groups": rules}},
    ]
