"""The pod that serves: its container, probes, volumes and end, which are the same wherever a pod runs.

The times fit each other and the server. Until a server is ready, only the startup probe asks, for as long as a model may take to load. The
readiness probe takes a pod that is overloaded or drains out of the Service; the liveness probe has a pod restarted whose model can start no
worker any more (`--liveness models`). A pod that ends takes requests for PRE_STOP seconds more, then drains, and is killed only
after the server would have ended by itself.
"""

from typing import Any

from weir._version import __version__
from weir.manifests.command import CONFIG_FILE, CONFIG_FOLDER, PRE_STOP
from weir.manifests.settings import Manifest

USER = 1000  # of the Dockerfile: Kubernetes cannot tell from a name that a user is not root
LIVE, READY = "/health/live", "/health/ready"
_STARTUP_PERIOD = 2  # seconds
_FOLDERS = {"cache": "/home/weir/.cache", "tmp": "/tmp"}  # where a server writes; all else is read-only


def container(manifest: Manifest, name: str, args: list[str]) -> dict[str, Any]:
    """Return the container `name`, which runs `weir serve` with `args`."""
    command = manifest.command
    ports = [{"name": "http", "containerPort": command.port}]
    if command.grpc_port is not None:
        ports.append({"name": "grpc", "containerPort": command.grpc_port})
    return {
        "name": name,
        "image": manifest.objects.image or f"{'weir-ray' if manifest.uses_ray else 'weir'}:{__version__}",
        "command": ["weir", "serve"],
        "args": args,
        **environment(manifest),
        "ports": ports,
        "resources": resources(manifest, "4Gi" if manifest.uses_ray else "1Gi"),
        **probes(manifest),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": each, "mountPath": path} for each, path in _mounted(manifest).items()],
    }


def pod(manifest: Manifest) -> dict[str, Any]:
    """Return what belongs to the pod around the container."""
    return {
        "enableServiceLinks": False,  # the variables of a Service called weir-... would look like settings
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": manifest.command.grace_period,
        "volumes": volumes(manifest),
    }


def volumes(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the volumes that the container mounts."""
    folders: list[dict[str, Any]] = [{"name": name, "emptyDir": {}} for name in _FOLDERS]
    config = {"name": "config", "configMap": {"name": config_name(manifest)}}
    return folders if manifest.command.config is None else [*folders, config]


def config_map(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the ConfigMap with the file of settings; nothing if there is no such file."""
    if manifest.command.config is None:
        return []
    metadata = manifest.metadata(config_name(manifest))
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CONFIG_FILE: manifest.command.config}}
    ]


def config_name(manifest: Manifest) -> str:
    """Return the name of that ConfigMap."""
    return f"{manifest.name}-config"


def resources(manifest: Manifest, memory: str) -> dict[str, Any]:
    """Return what a pod asks for, with `memory` unless another is stated. There is no limit of CPUs: it would stop the server in the middle of a batch."""
    objects = manifest.objects
    memory = objects.memory or memory
    gpus = {"nvidia.com/gpu": str(objects.gpus)} if objects.gpus else {}
    return {
        "requests": {"cpu": manifest.cpu, "memory": memory, **gpus},
        "limits": {"memory": memory, **gpus},
    }


def probes(manifest: Manifest) -> dict[str, Any]:
    """Return the three probes."""
    command = manifest.command
    tries = -(-command.start_limit // _STARTUP_PERIOD)
    return {
        "startupProbe": {**_asking(manifest, READY), "periodSeconds": _STARTUP_PERIOD, "failureThreshold": tries},
        "readinessProbe": {**_asking(manifest, READY), "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**_asking(manifest, LIVE), "periodSeconds": 10, "failureThreshold": 3},
    }


def _asking(manifest: Manifest, path: str) -> dict[str, Any]:
    command = manifest.command
    return {"httpGet": {"path": path, "port": command.port, "scheme": command.scheme}, "timeoutSeconds": 5}


def environment(manifest: Manifest) -> dict[str, Any]:
    """Return `env` and `envFrom`, each if there is any."""
    variables: list[dict[str, Any]] = [
        {"name": name, "value": text} for name, text in manifest.command.variables.items()
    ]
    if manifest.objects.api_key_secret is not None:
        source = {"name": manifest.objects.api_key_secret, "key": "api-key"}
        variables.append({"name": "WEIR_API_KEY", "valueFrom": {"secretKeyRef": source}})
    secrets = [{"secretRef": {"name": name}} for name in manifest.objects.secret]
    return {**({"env": variables} if variables else {}), **({"envFrom": secrets} if secrets else {})}


def _mounted(manifest: Manifest) -> dict[str, str]:
    return {**_FOLDERS, "config": CONFIG_FOLDER} if manifest.command.config is not None else _FOLDERS
