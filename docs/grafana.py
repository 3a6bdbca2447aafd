"""Makes the dashboard for Grafana: deploy/grafana/weir.json, of the metrics that every server has.

Each panel is a title, a unit, and queries by what their lines are called. FILTER stands for the job and the model that are chosen.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

FILTER = 'job=~"$job",model=~"$model"'
SERVER = 'job=~"$job"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """One chart."""

    title: str
    unit: str
    queries: dict[str, str]
    help: str = ""
    kind: str = "timeseries"
    stacked: bool = False


def _rate(metric: str, chosen: str = FILTER) -> str:
    return f"rate({metric}{{{chosen}}}[$__rate_interval])"


def _quantiles(metric: str) -> dict[str, str]:
    buckets = f"sum by (model, le) ({_rate(metric + '_bucket')})"
    return {
        f"p{100 * share:g} {{{{model}}}}": f"histogram_quantile({share}, {buckets})"
        for share in (0.5, 0.99)
    }


def _mean(metric: str) -> str:
    return (
        f"sum by (model) ({_rate(metric + '_sum')}) / sum by (model) ({_rate(metric + '_count')})"
    )


def _level(metric: str, by: str = "model") -> str:
    return f"sum by ({by}) ({metric}{{{FILTER}}})"


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests", "reqps", {"{{model}} {{code}}": f"sum by (model, code) ({_rate('weir_requests_total')})"}, "By the status of their end.", stacked=True),
        Panel("Response time", "s", _quantiles("weir_total_time_seconds"), "From arrival to the end, of each request that was accepted."),
        Panel("Queue time", "s", _quantiles("weir_queue_time_seconds"), "From arrival to dispatch."),
        Panel("Not answered", "reqps", {
            "refused {{model}} {{error}}": f"sum by (model, error) ({_rate('weir_requests_rejected_total')})",
            "expired {{model}}": f"sum by (model) ({_rate('weir_requests_expired_total')})",
            "left {{model}}": f"sum by (model) ({_rate('weir_requests_cancelled_total')})",
            "invalid {{model}}": f"sum by (model) ({_rate('weir_validation_errors_total')})",
        }, "Refused before the queue, expired in it, left by the caller, or not what the model takes."),
        Panel("Bodies", "Bps", {
            "received {{model}}": f"sum by (model) ({_rate('weir_received_bytes_total')})",
            "sent {{model}}": f"sum by (model) ({_rate('weir_sent_bytes_total')})",
        }),
        Panel("Streams", "s", {
            **{f"first response, {name}": query for name, query in _quantiles("weir_first_part_time_seconds").items()},
        }, "From arrival to the first response, of models that stream."),
    ],
    "Batching": [
        Panel("Queue depth", "short", {
            "rows {{model}}": _level("weir_waiting_rows"), "requests {{model}}": _level("weir_waiting_requests"),
        }, "What waits; an autoscaler looks at the rows."),
        Panel("Batch size", "short", {"mean {{model}}": _mean("weir_batch_size")}, "Rows in each batch."),
        Panel("Why batches were cut", "ops", {"{{reason}}": f"sum by (reason) ({_rate('weir_batches_total')})"}, stacked=True),
        Panel("Batch sizes", "short", {"{{le}}": f"sum by (le) (increase(weir_batch_size_bucket{{{FILTER}}}[$__rate_interval]))"}, kind="heatmap"),
        Panel("Time of a batch", "s", {
            "preprocess {{model}}": _mean("weir_preprocess_time_seconds"), "predict {{model}}": _mean("weir_predict_time_seconds"),
            "postprocess {{model}}": _mean("weir_postprocess_time_seconds"),
        }, "Mean of each step, decoding and encoding included.", stacked=True),
        Panel("Parts of streams", "ops", {"{{model}}": f"sum by (model) ({_rate('weir_stream_parts_total')})"}),
        Panel("Bulk work", "short", {
            "waiting rows {{model}}": _level("weir_bulk_waiting_rows"), "rows per second {{model}}": f"sum by (model) ({_rate('weir_bulk_rows_total')})",
            "workers of its own {{model}}": _level("weir_bulk_workers"),
        }, "It is computed where there is room beside other requests."),
        Panel("Response time of bulk work", "s", _quantiles("weir_bulk_total_time_seconds")),
    ],
    "Workers": [
        Panel("Workers", "short", {"{{model}} {{state}}": _level("weir_workers", "model, state")}, "By state.", stacked=True),
        Panel("Workers wanted", "short", {"{{model}}": _level("weir_workers_wanted")}, "Of a range, by the arrival rate."),
        Panel("Workers by node", "short", {"{{model}} {{node}}": f"sum by (model, node) (weir_worker_place{{{FILTER}}})"}, "Of workers in a cluster.", stacked=True),
        Panel("Busy", "percentunit", {
            "{{model}}": f'{_level("weir_running_batches")} / sum by (model) (weir_workers{{{FILTER},state="ready"}})',
        }, "Batches under way, as a share of the workers that are ready. With pipeline_depth 2 each holds two."),
        Panel("Devices", "percentunit", {"{{device}} {{model}}": f"sum by (device, model) ({_rate('weir_device_busy_seconds_total')})"}, "The part of the time for which a model of a device group has the device.", stacked=True),
        Panel("Rows by kind", "short", {"{{model}} {{kind}}": f"sum by (model, kind) ({_rate('weir_kind_rows_total')})"}, "Rows per second of the workers of each kind, of models with two kinds.", stacked=True),
        Panel("Restarts", "short", {"{{model}}": f"sum by (model) (increase(weir_worker_restarts_total{{{FILTER}}}[$__rate_interval]))"}, "Should stand still."),
        Panel("Shared memory", "bytes", {
            "used {{model}}": f"{_level('weir_arena_bytes')} - {_level('weir_arena_free_bytes')}", "of {{model}}": _level("weir_arena_bytes"),
        }, "For large payloads and results."),
    ],
    "Solved policies": [
        Panel("Control limit", "short", {"{{model}}": f"max by (model) (weir_policy_limit{{{FILTER}}})"}, "Rows from which on a batch is cut, at the estimated rate."),
        Panel("Arrival rate", "ops", {"{{model}}": _level("weir_policy_rate")}, "Rows per second, as the policies estimate it."),
        Panel("Response time, predicted and measured", "s", {
            "predicted {{model}}": f"avg by (model) (weir_policy_predicted_response_time_seconds{{{FILTER}}})",
            "measured {{model}}": f"avg by (model) (weir_policy_measured_response_time_seconds{{{FILTER}}})",
        }, "Means."),
        Panel("Power, predicted and measured", "watt", {
            "predicted {{model}}": _level("weir_policy_predicted_power_watts"), "measured {{model}}": _level("weir_policy_measured_power_watts"),
        }),
        Panel("Drift", "short", {"{{model}}": f"max by (model) (weir_policy_drift{{{FILTER}}})"}, "Service times now, as a multiple of those that the policy was solved for."),
        Panel("Tables solved", "short", {
            "{{model}} {{reason}}": f"sum by (model, reason) (increase(weir_policy_resolves_total{{{FILTER}}}[$__rate_interval]))",
            "failed {{model}}": f"sum by (model) (increase(weir_policy_failed_resolves_total{{{FILTER}}}[$__rate_interval]))",
        }),
    ],
    "Servers": [
        Panel("Up", "short", {"{{job}}": f"sum by (job) (up{{{SERVER}}})"}, "Servers that answer Prometheus."),
        Panel("Held by requests and responses", "percentunit", {
            "bytes {{instance}}": f"weir_held_bytes{{{SERVER}}} / weir_max_held_bytes{{{SERVER}}}",
            "connections {{instance}}": f"weir_connections{{{SERVER}}} / weir_max_connections{{{SERVER}}}",
        }, "As a share of what they may."),
        Panel("Refused for want of memory", "ops", {"{{instance}}": _rate("weir_held_refusals_total", SERVER)}),
        Panel("Processor of the server itself", "percentunit", {"{{instance}}": _rate("process_cpu_seconds_total", SERVER)}, "Of one core; without its workers. At 1 the server is the bottleneck."),
        Panel("Memory of the server itself", "bytes", {"{{instance}}": f"process_resident_memory_bytes{{{SERVER}}}"}),
        Panel("Open files", "short", {"{{instance}}": f"process_open_fds{{{SERVER}}}"}),
        Panel("Log lines lost", "short", {
            "{{instance}} {{destination}}": f"sum by (instance, destination) (increase(weir_log_lines_lost_total{{{SERVER}}}[$__rate_interval]))",
        }, "Lines that could not be written. Should stand still."),
    ],
}  # fmt: skip


def dashboard() -> str:
    """Return the dashboard as JSON."""
    document = {
        "title": "Weir",
        "uid": "weir",
        "tags": ["weir"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }
    return json.dumps(document, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [
        source,
        _variable("job", "label_values(weir_workers, job)"),
        _variable("model", 'label_values(weir_workers{job=~"$job"}, model)'),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name}, "definition": query, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    number = y = 0
    for title, panels in ROWS.items():
        number, place = number + 1, {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        for index, panel in enumerate(panels):
            number, row, column = number + 1, index // COLUMNS, index % COLUMNS
            place = {"x": WIDTH * column, "y": y + HEIGHT * row, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": place, **_chart(panel)}
        y += HEIGHT * -(-len(panels) // COLUMNS)


def _chart(panel: Panel) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend,
            "format": "heatmap" if heatmap else "time_series",
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]  # fmt: skip
    custom = {
        "fillOpacity": 20 if panel.stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {} if heatmap else custom},
            "overrides": [],
        },
        "options": {"calculate": False}
        if heatmap
        else {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": targets,
    }
