"""The objects of KServe: a ServingRuntime, which is Weir, and an InferenceService, which is a server with its models.

KServe runs a pod with the container of the runtime, its arguments followed by those of the service. It must run them as plain Deployments: Knative
allows neither a `preStop` nor a grace period, and a pod without them is killed in the middle of its drain.
"""

from typing import Any

from weir.errors import SettingsError
from weir.manifests.monitoring import monitoring, queries_of
from weir.manifests.pod import config_map, container, pod, volumes
from weir.manifests.settings import Manifest

FORMAT = "weir"  # what the runtime can serve, as both objects call it
_OF_SERVICE = "serving.kserve.io/inferenceservice"  # the label that KServe gives the pods of an InferenceService
_OF_THE_POD = ("env", "envFrom", "resources")  # what differs between the services of a runtime


def kserve(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the objects, in the order in which they are applied. Raises SettingsError for what KServe cannot do."""
    if manifest.objects.scales and manifest.scaling.autoscaler == "hpa":
        raise SettingsError(
            "--autoscaler=hpa: KServe's own knows processors and memory only, not the queue; must be keda"
        )
    return [
        *config_map(manifest),
        _serving_runtime(manifest),
        _inference_service(manifest),
        *monitoring(manifest, _OF_SERVICE, {_OF_SERVICE: manifest.name}),
    ]


def _serving_runtime(manifest: Manifest) -> dict[str, Any]:
    whole = container(manifest, "kserve-container", [*manifest.command.added])
    spec = {
        "supportedModelFormats": [{"name": FORMAT, "version": "1"}],
        "protocolVersions": ["v2"] if manifest.command.grpc_port is None else ["v2", "grpc-v2"],
        "multiModel": False,
        "containers": [{key: value for key, value in whole.items() if key not in _OF_THE_POD}],
        "volumes": volumes(manifest),
    }
    metadata = manifest.metadata(_runtime_name(manifest))
    return {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "ServingRuntime", "metadata": metadata, "spec": spec}


def _inference_service(manifest: Manifest) -> dict[str, Any]:
    objects = manifest.objects
    fewest, most = objects.range
    annotations = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    if objects.scales:
        annotations["serving.kserve.io/autoscalerClass"] = "keda"
    predictor = {
        "minReplicas": fewest,
        "maxReplicas": most,
        **({"autoScaling": {"metrics": _metrics(manifest)}} if objects.scales else {}),
        "model": _model(manifest),
        **{key: value for key, value in pod(manifest).items() if key != "volumes"},  # the runtime has them
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": manifest.metadata(annotations=annotations),
        "spec": {"predictor": predictor},
    }


def _model(manifest: Manifest) -> dict[str, Any]:
    """Return what the service adds to the container of its runtime."""
    command = manifest.command
    whole = container(manifest, "", [*command.given])
    protocol = {"modelFormat": {"name": FORMAT}, "protocolVersion": "v2", "runtime": _runtime_name(manifest)}
    uri = manifest.serving.storage_uri
    stored = {} if uri is None else {"storageUri": uri}
    return {**protocol, **stored, "args": whole["args"], **{key: whole[key] for key in _OF_THE_POD if key in whole}}


def _metrics(manifest: Manifest) -> list[dict[str, Any]]:
    queries, scaling = queries_of(manifest), manifest.scaling
    asked: list[tuple[str, float]] = [(queries.waiting_rows, manifest.target_waiting_rows)]
    if scaling.target_latency is not None:
        # KServe has KEDA divide each metric by the number of pods.
        asked.append((f"{queries.latency()} * {queries.pods}", scaling.target_latency))
    return [
        {
            "type": "External",
            "external": {
                "metric": {"backend": "prometheus", "serverAddress": scaling.prometheus, "query": query},
                "target": {"type": "Value", "value": f"{target:g}"},
            },
        }
        for query, target in asked
    ]


def _runtime_name(manifest: Manifest) -> str:
    return f"{manifest.name}-runtime"
