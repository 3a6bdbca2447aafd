"""The objects of Kubernetes, of KServe and of the Prometheus operator, and how they are written as YAML.

The pod that serves is the same wherever it runs, and its times fit each other and the server. Until a server is ready, only the startup probe
asks, for as long as a model may take to load. The readiness probe takes a pod that is overloaded or drains out of the Service; the liveness
probe has a pod restarted whose model can start no worker any more (`--liveness models`). A pod that ends takes requests for PRE_STOP seconds
more, then drains, and is killed only after the server would have ended by itself.

The queries of Prometheus, when to add pods and when to alert, name metrics as the server names them.

KServe runs a pod with the container of the runtime, its arguments followed by those of the service. It must run them as plain Deployments:
Knative allows neither a `preStop` nor a grace period, and a pod without them is killed in the middle of its drain.

A text stands plain in YAML only if no reader, of YAML 1.1 or 1.2, could take it for anything else.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import inf
from typing import Any

import yaml

from weir.errors import SettingsError
from weir.manifests import CONFIG_FILE, CONFIG_FOLDER, PRE_STOP, Manifest, parse_toleration

USER = 1000  # of the Dockerfile: Kubernetes cannot tell from a name that a user is not root
LIVE, READY = "/health/live", "/health/ready"
_STARTUP_PERIOD = 2  # seconds
_FOLDERS = {"cache": "/home/weir/.cache", "tmp": "/tmp"}  # where a server writes; all else is read-only

# Values of the label `code`.
SERVER_FAILED = "5..|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|DeadlineExceeded|Model(Error|Crashed|NotReady)|WorkerLost"
_SUSTAINED = "5m"


def container(manifest: Manifest, name: str, args: list[str]) -> dict[str, Any]:
    """Return the container `name`, which runs `weir serve` with `args`."""
    command = manifest.command
    ports = [{"name": "http", "containerPort": command.port}]
    if command.grpc_port is not None:
        ports.append({"name": "grpc", "containerPort": command.grpc_port})
    return {
        "name": name,
        "image": manifest.objects.image,
        "command": ["weir", "serve"],
        "args": args,
        **environment(manifest),
        "ports": ports,
        "resources": _resources(manifest),
        **probes(manifest),
        # The `sleep` of the image: that of Kubernetes itself needs 1.30.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP)]}}},
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
        **placement(manifest),
    }


def placement(manifest: Manifest) -> dict[str, Any]:
    """Return which nodes may run the pods, as far as it is stated."""
    selector = dict(each.split("=", 1) for each in manifest.objects.node_selector)
    tolerations = [parse_toleration(each) for each in manifest.objects.toleration]
    return {**({"nodeSelector": selector} if selector else {}), **({"tolerations": tolerations} if tolerations else {})}


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


def _resources(manifest: Manifest) -> dict[str, Any]:
    """Return what a pod asks for. There is no limit of CPUs: it would stop the server in the middle of a batch."""
    objects, memory = manifest.objects, manifest.memory
    gpus = {"nvidia.com/gpu": str(objects.gpus)} if objects.gpus else {}
    return {"requests": {"cpu": manifest.cpu, "memory": memory, **gpus}, "limits": {"memory": memory, **gpus}}


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


# A burst adds pods at once; pods go only after five quiet minutes, as each that comes back loads its model again.
_BEHAVIOR = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 300}}


def kubernetes(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the objects, in the order in which they are applied."""
    return [
        *config_map(manifest),
        _service(manifest),
        _deployment(manifest),
        _disruption_budget(manifest),
        *_scaled_object(manifest),
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
    annotations = {**_scraped(manifest), **_config_hash(manifest)}
    about = {"labels": manifest.labels, **({"annotations": annotations} if annotations else {})}
    template = {"metadata": about, "spec": inside}
    spec = {
        # An autoscaler's choice would be undone whenever the manifest is applied again.
        **({} if objects.scales else {"replicas": objects.range[0]}),
        "selector": {"matchLabels": manifest.selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": max(600, command.start_limit + 60),
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": manifest.metadata(), "spec": spec}


def _config_hash(manifest: Manifest) -> dict[str, str]:
    """Return the annotation by which pods are replaced when the file of settings changes: Kubernetes does not do it for a ConfigMap."""
    config = manifest.command.config
    return {} if config is None else {"weir/config-hash": sha256(config.encode()).hexdigest()}


def _scraped(manifest: Manifest) -> dict[str, str]:
    """Return the annotations by which a Prometheus without the operator finds the metrics."""
    command = manifest.command
    if not command.settings.telemetry.metrics or manifest.monitoring.monitor:
        return {}
    annotations = {"scrape": "true", "scheme": command.scheme.lower(), "port": str(command.port), "path": "/metrics"}
    return {f"prometheus.io/{key}": value for key, value in annotations.items()}


def _disruption_budget(manifest: Manifest) -> dict[str, Any]:
    # A share that must stay would, with one replica, keep its node from ever being drained.
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": manifest.selector}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": manifest.metadata(), "spec": spec}


def _scaled_object(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the autoscaler of KEDA, which asks Prometheus itself; nothing if the number of pods is fixed."""
    if not manifest.objects.scales:
        return []
    fewest, most = manifest.objects.range
    queries, scaling = queries_of(manifest), manifest.scaling
    triggers: list[dict[str, Any]] = [
        # Without a response of Prometheus the number of pods stays: an empty response must not count as an empty queue.
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
    return [{"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": manifest.metadata(), "spec": spec}]


def _trigger(manifest: Manifest, query: str, threshold: float, kind: str, **more: str) -> dict[str, Any]:
    asked = {"serverAddress": manifest.scaling.prometheus, "query": query, "threshold": f"{threshold:g}", **more}
    return {"type": "prometheus", "metricType": kind, "metadata": asked}


FORMAT = "weir"  # what the runtime can serve, as both objects call it
_OF_SERVICE = "serving.kserve.io/inferenceservice"  # the label that KServe gives the pods of an InferenceService
_OF_THE_POD = ("env", "envFrom", "resources")  # what differs between the services of a runtime


def kserve(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the objects, in the order in which they are applied."""
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
        **({"annotations": _config_hash(manifest)} if manifest.command.config is not None else {}),
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


# A word that begins with a letter, / or --, with single separators inside. Numbers, times and indicators do not look like that.
_PLAIN = re.compile(r"(?:--)?[A-Za-z/][A-Za-z0-9_/]*(?:[-.=:/@]+[A-Za-z0-9_/]+)*")
_RESERVED = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
_BLOCK = re.compile(r"[\t -~\n]*[!-~]\n")  # printable lines, of which the last is not blank


class _Dumper(yaml.SafeDumper):
    """Writes texts so that no reader takes them for anything else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: what is there twice is written twice."""
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text: plain where that is safe, a block where it has lines, else quoted."""
        if _PLAIN.fullmatch(text) and not _RESERVED.fullmatch(text):
            style = None
        elif _BLOCK.fullmatch(text) and not text[0].isspace():
            style = "|"
        else:
            style = "'" if '"' in text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.text)


def documents(objects: Sequence[Any]) -> str:
    """Return `objects` as YAML documents, one after another."""
    written: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=inf)
    return written


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


def rule_groups(queries: Queries, name: str, target_latency: float | None = None) -> list[dict[str, Any]]:
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
    rules = rule_groups(queries_of(manifest), manifest.name, manifest.scaling.target_latency)
    operator = "monitoring.coreos.com/v1"
    return [
        {"apiVersion": operator, "kind": "PodMonitor", "metadata": manifest.metadata(), "spec": watched},
        {"apiVersion": operator, "kind": "PrometheusRule", "metadata": manifest.metadata(), "spec": {"groups": rules}},
    ]
