"""A RayService: Ray Serve, run by KubeRay, with Weir in each of its replicas.

A replica is a whole server: every path of HTTP, a queue of its own, worker processes. Ray Serve divides the requests among the replicas and
replaces those that are not live; it must not queue, so a replica may be given as many requests as its own queue holds. KubeRay
applies `serveConfigV2`, which names `application` below and has the settings as its arguments: all of them, whether they came from a
flag, a variable or a file.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from weir.batching.settings import BatchingSettings
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError
from weir.manifests import MARGIN, Manifest, ServeCommand
from weir.manifests.kubernetes import documents, environment, placement, resources
from weir.serving import END_LIMIT
from weir.settings import declared_settings

APPLICATION = "weir.manifests.rayservice:application"
DEPLOYMENT = "Weir"
PORT = 8000  # of Ray Serve's proxies, which KubeRay's Service leads to
MODELS = "/srv/models"  # where the image has the models' code
_HEAD = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
# Headings of settings that an application inside Ray Serve cannot have.
_OF_RAY = ("gRPC", "Frontends", "Repository", "Process")
_OF_TELEMETRY = ("metrics", "metrics_namespace", "access_log")  # those of that heading that it can


def rayservice(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the RayService. Raises SettingsError for a setting that Ray Serve has in its own way."""
    _refuse(manifest.command)
    fewest, most = manifest.objects.range
    workers = {
        "groupName": "replicas",
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": most,
        "rayStartParams": {"num-cpus": str(math.ceil(_cpus(manifest)))},  # Ray would count those of the node
        "template": _template(manifest, "ray-worker", resources(manifest, True), manifest.command.grace_period),
    }
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},  # no replica runs there
        "template": _template(manifest, "ray-head", _HEAD, None),
    }
    cluster = {
        "rayVersion": manifest.ray.ray_version,
        **({"enableInTreeAutoscaling": True} if manifest.objects.scales else {}),
        "headGroupSpec": head,
        "workerGroupSpecs": [workers],
    }
    spec = {"serveConfigV2": documents([serve_config(manifest)]), "rayClusterConfig": cluster}
    return [{"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": manifest.metadata(), "spec": spec}]


def serve_config(manifest: Manifest) -> dict[str, Any]:
    """Return the configuration of Ray Serve."""
    named = {"name": manifest.name, "route_prefix": "/", "import_path": APPLICATION}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [{**named, "args": _arguments(manifest.command), "deployments": [_deployment(manifest)]}],
    }


def _deployment(manifest: Manifest) -> dict[str, Any]:
    objects, command = manifest.objects, manifest.command
    fewest, most = objects.range
    asked = manifest.ray.target_ongoing_requests or 2 * manifest.at_once
    scaled = {"autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": asked}}
    queued = max(int(each.get("max_queue_size", BatchingSettings.max_queue_size)) for each in command.of_models)
    return {
        "name": DEPLOYMENT,
        **(scaled if objects.scales else {"num_replicas": fewest}),
        "max_ongoing_requests": queued + manifest.at_once,
        "max_replicas_per_node": 1,  # a pod has the memory of one
        "ray_actor_options": {"num_cpus": _cpus(manifest), "num_gpus": objects.gpus},
        "graceful_shutdown_timeout_s": math.ceil(command.drain_timeout + END_LIMIT + MARGIN),
        "health_check_period_s": 10,
        "health_check_timeout_s": 30,
    }


def _cpus(manifest: Manifest) -> float:
    text = manifest.cpu
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _arguments(command: ServeCommand) -> dict[str, Any]:
    """Return what `application` is called with: the models, and the settings of the server that differ from the defaults."""
    settings = command.settings
    models = [
        {
            "target": model.target,
            "name": model.name,
            "params": model.params,
            "routes": model.routes,
            "settings": {"drain_timeout": command.drain_timeout, **model.settings},
        }
        for model in settings.models
    ]
    server = {
        field.name: value
        for part in (settings.http, settings.access, settings.control, settings.kserve, settings.telemetry)
        for field in fields(part)
        if (value := getattr(part, field.name)) != getattr(type(part)(), field.name) and field.name in command.stated
    }
    return {"models": models, "server": {"liveness": "models", **server}}


def _refuse(command: ServeCommand) -> None:
    """Raise SettingsError for a setting of a server of its own."""
    from weir.app import OF_THE_HOST

    catalog = declared_settings()
    for name in command.stated:
        if name not in catalog:
            continue
        declared = catalog[name]
        unknown = declared.part == "Telemetry" and name not in _OF_TELEMETRY
        if declared.part in _OF_RAY or name in OF_THE_HOST or unknown:
            raise SettingsError(
                f"{declared.flag}: applies to a standalone server only; Ray Serve manages ports, logs and processes"
            )
    if not command.settings.models:
        raise SettingsError(
            "nothing to serve: give a TARGET (module:Class or path/file.py:Class), or a model in --config"
        )


def _template(manifest: Manifest, name: str, needs: Mapping[str, Any], grace_period: int | None) -> dict[str, Any]:
    """Return the pods of the head or of the replicas."""
    given = environment(manifest._replace(command=manifest.command._replace(variables={})))  # they are arguments here
    container = {
        "name": name,
        "image": manifest.objects.image,
        **{**given, "env": [{"name": "PYTHONPATH", "value": MODELS}, *given.get("env", ())]},
        "resources": needs,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    ended = {} if grace_period is None else {"terminationGracePeriodSeconds": grace_period}
    pod = {"containers": [container], "enableServiceLinks": False, **ended, **placement(manifest)}
    if name != "ray-head":  # where Ray's autoscaler runs, which asks Kubernetes for pods
        pod["automountServiceAccountToken"] = False
    # KubeRay has a name of its own for the pods.
    labels = {key: value for key, value in manifest.labels.items() if key != "app.kubernetes.io/name"}
    return {"metadata": {"labels": labels}, "spec": pod}


def application(args: Mapping[str, Any]) -> Any:
    """Return the application of Ray Serve for the `args` of the configuration. Ray Serve calls this; it needs `ray[serve]`, 2.45 or later.

    Each replica serves `args["models"]` with the settings `args["server"]` as weir.asgi does. A replica is healthy while its server is
    live, so one whose model can start no worker any more is replaced. The API key is that of the variable WEIR_API_KEY, if there is one.
    """
    from ray import serve

    from weir.app import asgi

    models = [ModelToServe(**each) for each in args["models"]]
    server = {**args["server"], **({"api_key": os.environ["WEIR_API_KEY"]} if os.environ.get("WEIR_API_KEY") else {})}
    routes = {model.name: model.routes for model in models if model.routes}
    built: list[Any] = []

    def build() -> Any:
        built.append(asgi(*models, routes=routes, **server))
        return built[0]

    class Replica:
        """A server inside a replica of Ray Serve."""

        async def check_health(self) -> None:
            """Raise RuntimeError if the server is not live: Ray Serve then replaces this replica."""
            status, body = await _get(built[0], "/health/live")
            if status != 200:
                raise RuntimeError(body.decode())

    return serve.deployment(name=DEPLOYMENT)(serve.ingress(build)(Replica)).bind()


async def _get(app: Any, path: str) -> tuple[int, bytes]:
    """Return the status and the body with which the ASGI application `app` answers GET `path`."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [], "client": None, "server": None, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
