"""Manifests for Kubernetes and KServe, filled from the settings of a server.

Here is what a manifest is made from: the settings of `weir manifest` in addition to those of `weir serve`, and the command of the container that serves.
The settings of the server are read as `weir serve` reads them, so a wrong one is refused with the same words. Each flag is handed on as it was
given, a variable as a variable, and the file of --config as a ConfigMap. What a container needs besides is added unless it was stated.
"""

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weir._version import __version__
from weir.batching.settings import BatchingSettings
from weir.catalog.sources import split_target
from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, Rule, parse_size, setting
from weir.errors import SettingsError
from weir.protocols.access import is_loopback
from weir.serving import END_LIMIT, ServiceSettings
from weir.settings import (
    Declared,
    Settings,
    config_variable,
    declared_by,
    declared_settings,
    read_settings,
    value_of,
    variables_of,
)
from weir.workers.settings import WorkerSettings, check_ray

PRE_STOP = 5  # seconds in which a pod that ends still takes requests: balancers learn of its end at about the same time as it does itself
MARGIN = 3  # seconds beyond the server's own last limit
CONFIG_FOLDER = "/etc/weir"
CONFIG_FILE = "weir.toml"
# What a container adds to what is stated: all interfaces, a log for machines, and a liveness that restarts a pod whose model cannot come back.
_ADDED = {"host": "0.0.0.0", "log_format": "json", "liveness": "models"}


class ServeCommand(NamedTuple):
    """Says what a container runs: `weir serve` with `given` and `added`.

    Attributes:
        settings: all settings that follow from the words, the variables and the file.
        added: the flags that a container needs and nobody has stated.
        given: the targets and flags as they were given.
        variables: the environment variables, by name.
        config: the content of the file of settings, or None.
        stated: the names of the settings that a flag, a variable or the file states.
    """

    settings: Settings
    added: Sequence[str]
    given: Sequence[str]
    variables: Mapping[str, str]
    config: str | None
    stated: Set[str]

    @property
    def port(self) -> int:
        """The port of HTTP."""
        return self.settings.http.port

    @property
    def grpc_port(self) -> int | None:
        """The port of gRPC, or None."""
        return self.settings.grpc.grpc_port

    @property
    def scheme(self) -> str:
        """HTTP or HTTPS."""
        return "HTTPS" if self.settings.http.tls_certfile else "HTTP"

    @property
    def drain_timeout(self) -> float:
        """The longest time, in seconds, that accepted requests get to finish."""
        return self._longest("drain_timeout", ServiceSettings.drain_timeout)

    @property
    def grace_period(self) -> int:
        """The seconds after which a pod that ends is killed: later than its server ends by itself, whatever hangs."""
        return math.ceil(PRE_STOP + self.drain_timeout + END_LIMIT + MARGIN)

    @property
    def start_limit(self) -> int:
        """The seconds after which a server that is not ready has failed to start, although it has not ended."""
        return math.ceil(self._longest("start_timeout", WorkerSettings.start_timeout)) + 30

    def _longest(self, name: str, default: float) -> float:
        return max(float(settings.get(name, default)) for settings in self.of_models)

    @property
    def of_models(self) -> list[Mapping[str, Any]]:
        """The settings of each model, as far as they are stated; those of any model where all come from a repository."""
        return [model.settings for model in self.settings.models] or [self.settings.complete({})]


def read_command(
    targets: Sequence[str],
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    config: str | None,
    port: int = 8000,
    ignored: Collection[str] = (),
) -> ServeCommand:
    """Return the command for these settings; `port` is that of HTTP if none is stated, and the other arguments are those of
    settings.read_settings.

    Raises SettingsError for a wrong setting, and for one that no container can have.
    """
    settings = read_settings(targets, flags, environment, config, ignored=ignored)
    catalog = declared_settings()
    path = config or config_variable(environment)
    text = None if path is None else Path(path).read_text("utf-8-sig")
    variables = {
        name: value for name, value in variables_of(environment, catalog, ignored).items() if name not in flags
    }
    stated = {*flags, *variables, *({} if text is None else tomllib.loads(text))}
    _refuse(settings, catalog, stated)
    added = {name: value for name, value in {"port": str(port), **_ADDED}.items() if name not in stated}
    given = [*targets, *([] if text is None else [f"--config={CONFIG_FOLDER}/{CONFIG_FILE}"]), *_words(flags, catalog)]
    words = [f"{catalog[name].flag}={value}" for name, value in added.items()]
    by_variable = {catalog[name].variable: value for name, value in variables.items()}
    if "port" in added:
        settings = settings._replace(http=replace(settings.http, port=port))
    command = ServeCommand(settings, words, given, by_variable, text, stated)
    if any("drain_timeout" in each for each in command.of_models):
        return command
    # The grace period of the pod follows from it, so what a model's class may say must not count.
    return command._replace(added=[*words, f"{catalog['drain_timeout'].flag}={ServiceSettings.drain_timeout:g}"])


def _words(flags: Mapping[str, Sequence[str]], catalog: Mapping[str, Declared]) -> Iterator[str]:
    """Yield the flags with their values, as they are written on a command line."""
    for name, texts in flags.items():
        declared = catalog[name]
        for text in texts:
            if declared.is_switch:
                yield declared.flag if text == "true" else f"--no-{declared.flag[2:]}"
            else:
                yield f"{declared.flag}={text}"


def _refuse(settings: Settings, catalog: Mapping[str, Declared], stated: Collection[str]) -> None:
    """Raise SettingsError for what a container cannot have."""
    for name in stated:
        if name in catalog and catalog[name].secret:
            raise SettingsError(
                f"{catalog[name].flag}: whoever reads a manifest would read it; put it into a Secret with the entry "
                "api-key (--api-key-secret)"
            )
    http = settings.http
    if http.uds is not None:
        raise SettingsError(f"--uds={http.uds!r}: a Service reaches pods by a port; leave it out")
    if "host" in stated and is_loopback(http.host):
        raise SettingsError(f"--host={http.host!r}: probes and callers come from outside the pod; leave it out")
    for flag, port in (("--port", http.port), ("--grpc-port", settings.grpc.grpc_port)):
        if port == 0:
            raise SettingsError(f"{flag}=0: a Service has to name the port; must be 1 to 65535")
    if settings.process.fronts == "auto":
        raise SettingsError("--fronts=auto: a pod sees all CPUs of its node, not those it requests; state a number")
    for model in settings.models:
        if model.platform == "python" and ":" in model.target:  # without one, it may be a folder of the image
            split_target(model.target)
        check_ray(model.settings, str(model.settings.get("executor", WorkerSettings.executor)))
    if settings.grpc.grpc_port == http.port:
        raise SettingsError(f"--grpc-port={http.port}: is the port of HTTP; they must differ")


_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,48}[a-z0-9])?")
_REPLICAS = re.compile(r"([0-9]{1,5})(?:\.\.([0-9]{1,5}))?")
# A key, which may have a domain before a slash, and a value.
_LABEL = re.compile(
    r"(?:[a-z0-9.-]+/)?[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?=(?:[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)?", re.ASCII
)


def _matching(form: str | re.Pattern[str], rule: str) -> Rule:
    """Return the rule that a text has this form."""
    return (lambda text: re.fullmatch(form, text) is not None, rule)


NAMED = _matching(
    _NAME,
    "must be lower-case letters, digits and -, begin with a letter, not end with -, and have at most 50 characters",
)
CPUS = _matching(r"[1-9][0-9]*m|(?=.*[1-9])[0-9]+(?:\.[0-9]{1,3})?", "must be CPUs, such as 2, 0.5 or 500m")
BYTES = _matching(r"[1-9][0-9]*(?:\.[0-9]+)?(?:k|[MGT]|[KMGT]i)?", "must be bytes, such as 512Mi or 2Gi")
REPLICAS: Rule = (
    lambda text: parse_replicas(text) is not None,
    "must be a number from 1 on, or a range of such, such as 2..10: nothing queues requests while no pod runs",
)
LABELS: Rule = (
    lambda labels: all(_LABEL.fullmatch(each) for each in labels),
    "must be KEY=VALUE, a label of Kubernetes",
)

_TAINT = re.compile(r"(?P<key>[\w./-]+)(?:=(?P<value>[\w.-]*))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
TAINTS: Rule = (
    lambda taints: all(_TAINT.fullmatch(each) for each in taints),
    "must be KEY[=VALUE][:EFFECT], where EFFECT is NoSchedule, PreferNoSchedule or NoExecute",
)


def parse_toleration(text: str) -> dict[str, str]:
    """Return the toleration of the taint `text`, which matches TAINTS."""
    found = _TAINT.fullmatch(text)
    parts = {key: value for key, value in (found.groupdict() if found else {}).items() if value is not None}
    return {"operator": "Equal" if "value" in parts else "Exists", **parts}


def parse_replicas(text: str) -> tuple[int, int] | None:
    """Return the fewest and the most replicas that `text` states, as 2 or 2..10; None if it states none that there may be."""
    found = _REPLICAS.fullmatch(text)
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    return (low, high) if 1 <= low <= high else None


@dataclass(frozen=True)
class ObjectSettings(Checked):
    """The Kubernetes objects, and what each pod gets."""

    image: str | None = setting(
        None,
        "container image with Weir, the models and their dependencies, which the cluster's nodes can pull (needed)",
        metavar="IMAGE",
        rule=_matching(r"\S+", "must be the name of an image"),
    )
    object_name: str | None = setting(
        None, "name of the objects (default: the first model's name)", rule=NAMED, metavar="NAME"
    )
    namespace: str | None = setting(
        None, "namespace of the objects (default: kubectl's current one)", rule=NAMED, metavar="NAMESPACE"
    )
    label: list[str] = setting([], "label to put on all objects", rule=LABELS, metavar="KEY=VALUE")
    replicas: str = setting("1", "number of pods; with MIN..MAX KEDA chooses it", rule=REPLICAS, metavar="N")
    cpu: str | None = setting(
        None,
        "CPUs that each pod requests (default: 1 for each worker, and 1 for each of several fronts)",
        rule=CPUS,
        metavar="CPUS",
    )
    memory: str | None = setting(
        None,
        "memory request and limit of each pod (default: 512Mi, with Ray 3584Mi, and --needs-memory of each model, or else 512Mi for each worker)",
        rule=BYTES,
        metavar="BYTES",
    )
    gpus: int = setting(0, "NVIDIA GPUs per pod", rule=AT_LEAST_ZERO)
    node_selector: list[str] = setting([], "label that the pods' nodes must have", rule=LABELS, metavar="KEY=VALUE")
    toleration: list[str] = setting(
        [], "taint of nodes that the pods tolerate", rule=TAINTS, metavar="KEY[=VALUE][:EFFECT]"
    )
    secret: list[str] = setting(
        [], "Secret whose entries become environment variables of the containers, such as HF_TOKEN", metavar="NAME"
    )
    api_key_secret: str | None = setting(
        None, "Secret whose entry api-key every caller must send; Prometheus sends it too", metavar="NAME"
    )

    @property
    def range(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        return parse_replicas(self.replicas) or (1, 1)

    @property
    def scales(self) -> bool:
        """Whether KEDA chooses the number of replicas."""
        return self.range[0] < self.range[1]


@dataclass(frozen=True)
class AutoscalingSettings(Checked):
    """The rules by which pods are added and removed, where --replicas is a range."""

    target_waiting_rows: int | None = setting(
        None, "target queue length of each pod, in rows (default: max_batch_size times workers)", rule=AT_LEAST_ONE
    )
    target_latency: float | None = setting(
        None, "target p99 response time in seconds; an alert fires above it", rule=POSITIVE
    )
    prometheus: str = setting(
        "http://prometheus-operated.monitoring:9090",
        "Prometheus address that KEDA queries",
        metavar="URL",
        rule=_matching(r"https?://\S+", "must be a URL of http or https"),
    )


@dataclass(frozen=True)
class MonitoringSettings(Checked):
    """The settings of the objects for the Prometheus Operator."""

    monitor: bool | None = setting(
        None,
        "also print a PodMonitor and a PrometheusRule for the Prometheus Operator, which collects the metrics for KEDA",
    )


@dataclass(frozen=True)
class InferenceServiceSettings(Checked):
    """Says what only KServe has."""

    storage_uri: str | None = setting(
        None,
        "where KServe downloads the model repository from, such as s3://bucket/models; it is served from /mnt/models",
        metavar="URI",
        rule=_matching(r"[a-z][a-z0-9+-]*://\S+", "must be a URI, such as s3://bucket/models"),
    )


# The settings of each kind of manifest, by heading.
OF_KUBERNETES: Mapping[str, type[Any]] = {
    "Kubernetes": ObjectSettings,
    "Autoscaling": AutoscalingSettings,
    "Monitoring": MonitoringSettings,
}
OF_KSERVE: Mapping[str, type[Any]] = {**OF_KUBERNETES, "KServe": InferenceServiceSettings}


def manifest_settings(parts: Mapping[str, type[Any]] = OF_KSERVE) -> dict[str, Declared]:
    """Return the settings of `weir manifest` in addition to those of `weir serve`, by name."""
    return {each.name: each for part, kind in parts.items() for each in declared_by(kind, part, of_model=False)}


class Manifest(NamedTuple):
    """All that the objects are made of.

    Attributes:
        command: what the containers run.
        objects, scaling, monitoring, serving: the settings of the objects themselves.
    """

    command: ServeCommand
    objects: ObjectSettings
    scaling: AutoscalingSettings
    monitoring: MonitoringSettings
    serving: InferenceServiceSettings

    @property
    def name(self) -> str:
        """The name of the objects. Raises SettingsError if the model's name is none for objects."""
        if self.objects.object_name is not None:
            return self.objects.object_name
        names = [model.name for model in self.command.settings.models] or ["weir"]
        name = re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")
        if not _NAME.fullmatch(name):
            raise SettingsError(f"{names[0]}: is not a valid Kubernetes name; set --object-name")
        return name

    @property
    def cpu(self) -> str:
        """The CPUs that each pod requests: what computes and what reads requests at the same time."""
        fronts = int(self.command.settings.process.fronts)  # processes that read requests
        return self.objects.cpu or str(sum(map(_workers_here, self.command.of_models)) + (fronts if fronts > 1 else 0))

    @property
    def memory(self) -> str:
        """The memory that each pod requests. Ray needs some of its own."""
        room = self.command.settings.repository.model_memory
        models = parse_size(room) if room else sum(map(_memory, self.command.of_models))
        mebibytes = -(-(models or 0) // _MIB) + (3584 if self.uses_ray else 512)
        return self.objects.memory or (f"{mebibytes}Mi" if mebibytes % 1024 else f"{mebibytes // 1024}Gi")

    @property
    def uses_ray(self) -> bool:
        """Whether a model runs on Ray."""
        return any(settings.get("executor") == "ray" for settings in self.command.of_models)

    @property
    def target_waiting_rows(self) -> int:
        """The rows that may wait in each pod: as many as its workers take at once, unless stated otherwise."""
        return self.scaling.target_waiting_rows or max(map(_at_once, self.command.of_models))

    def metadata(self, name: str | None = None, **more: Any) -> dict[str, Any]:
        """Return the metadata of an object; it is called `name`, or as all are."""
        own = {} if self.objects.namespace is None else {"namespace": self.objects.namespace}
        return {"name": name or self.name, **own, "labels": self.labels, **more}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects."""
        added = [each.partition("=") for each in self.objects.label]
        return {**self.selector, "app.kubernetes.io/version": __version__, **{key: value for key, _, value in added}}

    @property
    def selector(self) -> dict[str, str]:
        """The labels by which the pods are found."""
        return {"app.kubernetes.io/name": "weir", "app.kubernetes.io/instance": self.name}


_MIB = 1 << 20


def _at_once(settings: Mapping[str, Any]) -> int:
    return int(settings.get("max_batch_size", BatchingSettings.max_batch_size)) * _workers(settings)


def _workers(settings: Mapping[str, Any]) -> int:
    return int(str(settings.get("workers", WorkerSettings.workers)).rpartition("..")[2])  # of a range the most


def _workers_here(settings: Mapping[str, Any]) -> int:
    return 1 if settings.get("executor") == "ray" else _workers(settings)


def _memory(settings: Mapping[str, Any]) -> int:
    """Return the bytes of a model with all its workers."""
    return parse_size(settings.get("needs_memory") or 0) or 512 * _MIB * _workers_here(settings)


def read_manifest(command: ServeCommand, flags: Mapping[str, Sequence[str]]) -> Manifest:
    """Return what the objects for `command` are made of.

    Args:
        command: what the containers run.
        flags: the texts given for each of manifest_settings, by name.

    Raises SettingsError naming the flag, the value and the rule.
    """
    catalog = manifest_settings()
    values = {name: value_of(catalog[name], texts) for name, texts in flags.items()}
    parts = [
        kind(**{name: value for name, value in values.items() if catalog[name].part == part})
        for part, kind in OF_KSERVE.items()
    ]
    manifest = Manifest(command, *parts)
    _check_together(manifest, values)
    return manifest


def _check_together(manifest: Manifest, values: Mapping[str, Any]) -> None:
    """Raise SettingsError for settings that have no effect, or cannot have it, together with the others."""
    objects, scaling, monitored = manifest.objects, manifest.scaling, manifest.monitoring.monitor
    catalog = manifest_settings()
    if objects.image is None:
        raise SettingsError(
            "--image: not stated; name an image with Weir, the models and their imports that the cluster can pull"
        )
    if not objects.scales:
        for name in ("target_waiting_rows", "prometheus"):
            if name in values:
                raise SettingsError(
                    f"{catalog[name].flag}={values[name]}: nothing scales without a range, such as --replicas 2..10"
                )
    if scaling.target_latency is not None and not monitored and not objects.scales:
        raise SettingsError(
            f"--target-latency={scaling.target_latency:g}: nothing enforces it; needs --replicas MIN..MAX, or --monitor"
        )
    if not manifest.command.settings.telemetry.metrics and (objects.scales or monitored):
        why = "--monitor" if monitored else f"--replicas={objects.replicas}"
        raise SettingsError(f"{why}: needs the metrics that --no-metrics switches off")
