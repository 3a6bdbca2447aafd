"""The objects of plain Kubernetes: Deployment, Service, PodDisruptionBudget, an autoscaler, and what the Prometheus Operator reads."""

from typing import Any

from weir.manifests.monitoring import monitoring, queries_of
from weir.manifests.pod import config_map, container, pod
from weir.manifests.settings import Manifest

# A burst adds pods at once; pods go only after five quiet minutes, as each that comes back loads its model again.
_BEHAVIOR = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 300}}


def kubernetes(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the objects, in the order in which they are applied."""
    return [
        *config_map(manifest),
        _service(manifest),
        _deployment(manifest),
        _disruption_budget(manifest),
        *_autoscaler(manifest),
        *monitoring(manifest, "app.kubernetes.io/instance", manifest.selector),
    ]


def _service(manifest: Manifest) -> dict[str, Any]:
    command = manifest.command
    ports: list[dict[str, Any]] = [
        {"name": "http", "port": command.port, "targetPort": "http", "appProtocol": command.scheme.lower()}
    ]
    if command.grpc_port is not None:
        protocol = "kubernetes.io/h2c" if command.scheme == "HTTP" else "https"
        ports.append({"name": "grpc", "port": command.grpc_port, "targetPort": "grpc", "appProtocol": protocol})
    spec = {"selector": manifest.selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": manifest.metadata(), "spec": spec}


def _deployment(manifest: Manifest) -> dict[str, Any]:
    command, objects = manifest.command, manifest.objects
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": manifest.selector},
    }
    inside = {
        "containers": [container(manifest, "weir", [*command.given, *command.added])],
        "topologySpreadConstraints": [spread],
        **pod(manifest),
    }
    template = {"metadata": {"labels": manifest.labels, **_scraped(manifest)}, "spec": inside}
    spec = {
        # An autoscaler's choice would be undone whenever the manifest is applied again.
        **({} if objects.scales else {"replicas": objects.range[0]}),
        "selector": {"matchLabels": manifest.selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": max(600, command.start_limit + 60),
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": manifest.metadata(), "spec": spec}


def _scraped(manifest: Manifest) -> dict[str, Any]:
    """Return the annotations by which a Prometheus without the operator finds the metrics."""
    command = manifest.command
    if not command.settings.telemetry.metrics or manifest.monitoring.monitor:
        return {}
    annotations = {"scrape": "true", "scheme": command.scheme.lower(), "port": str(command.port), "path": "/metrics"}
    return {"annotations": {f"prometheus.io/{key}": value for key, value in annotations.items()}}


def _disruption_budget(manifest: Manifest) -> dict[str, Any]:
    # A share that must stay would, with one replica, keep its node from ever being drained.
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": manifest.selector}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": manifest.metadata(), "spec": spec}


def _autoscaler(manifest: Manifest) -> list[dict[str, Any]]:
    if not manifest.objects.scales:
        return []
    return [_scaled_object(manifest) if manifest.scaling.autoscaler == "keda" else _horizontal(manifest)]


def _horizontal(manifest: Manifest) -> dict[str, Any]:
    """Return the autoscaler of Kubernetes itself, which gets the metric from an adapter for Prometheus."""
    fewest, most = manifest.objects.range
    name = f"{manifest.command.settings.telemetry.metrics_namespace}_waiting_rows"
    target = {"type": "AverageValue", "averageValue": str(manifest.target_waiting_rows)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": manifest.name},
        "minReplicas": fewest,
        "maxReplicas": most,
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}],
        "behavior": _BEHAVIOR,
    }
    metadata = manifest.metadata()
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": spec}


def _scaled_object(manifest: Manifest) -> dict[str, Any]:
    """Return the autoscaler of KEDA, which asks Prometheus itself."""
    fewest, most = manifest.objects.range
    queries, scaling = queries_of(manifest), manifest.scaling
    triggers: list[dict[str, Any]] = [
        # Without an answer of Prometheus the number of pods stays: an empty answer must not count as an empty queue.
        _trigger(manifest, queries.waiting_rows, manifest.target_waiting_rows, "AverageValue", ignoreNullValues="false")
    ]
    if scaling.target_latency is not None:  # there is none while nobody asks
        triggers.append(_trigger(manifest, queries.latency(), scaling.target_latency, "Value"))
    spec = {
        "scaleTargetRef": {"name": manifest.name},
        "minReplicaCount": fewest,
        "maxReplicaCount": most,
        "pollingInterval": 15,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}},
        "triggers": triggers,
    }
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": manifest.metadata(), "spec": spec}


def _trigger(manifest: Manifest, query: str, threshold: float, kind: str, **more: str) -> dict[str, Any]:
    asked = {"serverAddress": manifest.scaling.prometheus, "query": query, "threshold": f"{threshold:g}", **more}
    return {"type": "prometheus", "metricType": kind, "metadata": asked}
