"""The settings of workers, each stated once with its rule and its help text, and the addresses where external workers attach."""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, NamedTuple

from weir.batching.workers import ORDERS, SOLVED
from weir.config import AT_LEAST_ZERO, POSITIVE, SIZE, Rule, check, one_of, setting
from weir.errors import SettingsError
from weir.plugins import Plugins
from weir.policy.scaling import MOST_WORKERS, RANGE_RULE, WorkerRange

# The variable in which worker processes find the address of their server, if there is one.
SERVER_ADDRESS = "WEIR_SERVER_ADDRESS"


# What makes the executor of each kind (see executor.MakeExecutor).
EXECUTORS = Plugins(
    "executor",
    "weir.executors",
    {
        "process": "weir.workers.process.pool:ProcessPool",
        "thread": "weir.workers.local:ThreadExecutor",
        "inline": "weir.workers.local:InlineExecutor",
        "ray": "weir.workers.ray.pool:RayExecutor",
        "external": "weir.workers.remote:ExternalExecutor",
    },
)


class WorkerAddress(NamedTuple):
    """The address where external workers attach: the `path` of a Unix socket, or, if that is "", a TCP `host` and `port`."""

    path: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def is_address(text: str) -> bool:
    """Return whether `text` is an address; this is the rule of a setting."""
    try:
        parse_address(text, "")
    except SettingsError:
        return False
    return True


def parse_address(text: str, name: str) -> WorkerAddress:
    """Parse unix:PATH or tcp:HOST:PORT. Raises SettingsError that names the setting `name`, the value and the rule."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return WorkerAddress(rest, "", 0)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return WorkerAddress("", host, int(port))
    raise SettingsError(f"{name}={text!r}: {RULE}")


def _is_ray_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return text == "auto" or bool(
        host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16
    )


def _is_plain_name(text: str) -> bool:
    return text.isascii() and text.replace("-", "").replace("_", "").isalnum()


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


RULE = "must be unix:PATH or tcp:HOST:PORT"

MOST_KINDS = 2  # of workers, for which the policy is solved
ONE_WORKER: Mapping[str, Any] = {"workers": 1, "worker_kinds": []}  # the settings of a model that is tried or measured


def as_workers(value: Any) -> int | str | None:
    """Return a number of workers as an int, and a range as its text; None if `value` is neither."""
    if not isinstance(value, str | Integral) or value is True:
        return None
    try:
        stated = WorkerRange.parse(str(value))
    except SettingsError:
        return None
    return str(stated) if ".." in str(value) else stated.most


def is_workers(value: Any) -> bool:
    """Return whether `value` is a number or a range of workers; this is the rule of a setting."""
    return as_workers(value) is not None


# What only Ray reads.
OF_RAY = ("ray_address", "num_cpus", "num_gpus", "resources", "placement", "ray_runtime_env", "ray_detached")


def check_ray(given: Mapping[str, Any], executor: str) -> None:
    """Raise SettingsError if `given`, settings that somebody has stated, has one that only Ray reads, and `executor` is another.

    What a model's class states is not checked: it says what the model needs wherever it runs on Ray.
    """
    for name in OF_RAY:
        if executor != "ray" and name in given and given[name] not in (None, {}, getattr(WorkerSettings, name, None)):
            raise SettingsError(
                f"{name}={given[name]!r}, executor={executor!r}: only Ray reads {name}; state executor ray for the same models"
            )


def _up_to_most(least: int) -> Rule:
    return (lambda value: least <= value <= MOST_WORKERS, f"must be {least} or more, and at most {MOST_WORKERS}")


@dataclass(frozen=True)
class WorkerSettings:
    """The settings by which batches are run. Durations are in seconds."""

    workers: int | str = setting(
        1,
        "workers per model; a range, such as 1..16 or 0..4, autoscales",
        rule=(is_workers, RANGE_RULE),
        metavar="N or N..M",
    )
    bulk_workers: int | None = setting(
        None,
        "idle-priority processes for bulk work (default for text models on CPUs: as many as workers)",
        rule=_up_to_most(0),
    )
    target_load: float | None = setting(
        None,
        "with a range of workers: maximum share of their capacity to use",
        rule=(lambda value: 0 < value <= 1, "must be greater than 0 and at most 1"),
    )
    scale_to_zero_after: float = setting(
        60.0, "with a range from 0: seconds without requests after which all workers stop", rule=POSITIVE
    )
    executor: str = setting(
        "process",
        "where predict runs: process, thread, inline, ray, or external workers (see worker_socket)",
        rule=(
            EXECUTORS.__contains__,
            "must be process, thread, inline, ray, external or the name of an entry point weir.executors",
        ),
    )
    worker_socket: str | None = setting(
        None, "where external workers attach: unix:PATH or tcp:HOST:PORT", rule=(is_address, RULE), metavar="ADDRESS"
    )
    ray_address: str | None = setting(
        None,
        "Ray cluster: HOST:PORT, or auto (default: RAY_ADDRESS, or a new local cluster)",
        rule=(_is_ray_address, "must be HOST:PORT or auto"),
        metavar="ADDRESS",
    )
    num_cpus: float = setting(1.0, "CPUs that Ray reserves for each worker", rule=AT_LEAST_ZERO)
    num_gpus: float = setting(
        0.0, "GPUs that Ray reserves for each worker; 0.25 is a quarter of one", rule=AT_LEAST_ZERO
    )
    resources: dict[str, float] = setting(
        {},
        "other resources that Ray reserves for each worker (memory in bytes)",
        metavar="JSON",
        rule=(lambda value: all(amount > 0 for amount in value.values()), "must have amounts greater than 0"),
    )
    placement: str = setting(
        "spread",
        "how Ray places workers: spread over nodes, pack onto few, or strict-spread (one per node)",
        rule=one_of("spread", "pack", "strict-spread"),
    )
    ray_runtime_env: str | None = setting(
        None,
        "Ray runtime environment: working_dir, py_modules, pip",
        metavar="JSON",
        rule=(_is_json_object, "must be a JSON object"),
    )
    ray_detached: str | None = setting(
        None,
        "keep the workers and their models on Ray when the server stops; the next server with this name takes them over",
        metavar="NAME",
        rule=(_is_plain_name, "must be letters, digits, - and _"),
    )
    device_group: str | None = setting(
        None,
        "models with the same group take turns on a device: the device runs `workers` of their batches at once",
        metavar="NAME",
        rule=(_is_plain_name, "must be letters, digits, - and _"),
    )
    device_order: str = setting(
        SOLVED,
        "whose turn it is in a device_group: solved (least cost, for the policy auto), oldest, longest or fair",
        rule=one_of(*ORDERS),
    )
    pipeline_depth: int = setting(
        1, "batches that a worker holds at once; with 2 it decodes one while another runs", rule=one_of(1, 2)
    )
    worker_concurrency: int = setting(
        1,
        "batches that one worker process runs at once, in threads, for models that wait for other services",
        rule=_up_to_most(1),
    )
    predict_timeout: float | None = setting(
        None,
        "seconds that a batch may take, or a stream between two yields, before its worker is killed",
        rule=POSITIVE,
    )
    env: list[dict[str, str]] = setting(
        [], "environment variables of the workers: one set for all, or one set each", metavar="NAME=VALUE"
    )
    cpu_affinity: list[list[int]] = setting(
        [],
        "CPUs that workers are pinned to: one list for all, or one list each",
        metavar="NUMBERS",
        rule=(lambda value: all(number >= 0 for numbers in value for number in numbers), "must be numbers from 0 on"),
    )
    worker_kinds: list[str] = setting(
        [],
        "the kind of each worker, if their devices are of two kinds, such as a large and a small GPU: one name each",
        metavar="NAME",
        rule=(lambda value: all(map(_is_plain_name, value)), "must be names of letters, digits, - and _"),
    )
    threads: int | None = setting(
        None, "numeric-library threads in each worker process (default: CPUs / workers)", rule=_up_to_most(1)
    )
    retry_in_halves: bool = setting(True, "rerun a failed batch in halves, so that only bad items fail")
    start_timeout: float = setting(300.0, "seconds within which a worker must load and warm up", rule=POSITIVE)
    arena_bytes: int = setting(
        256 << 20,
        "shared memory in bytes for large payloads, and as much again for results; 0 disables it",
        rule=AT_LEAST_ZERO,
    )
    needs_memory: int | str | None = setting(
        None,
        "memory that the model takes with all its workers, such as 2GB (default: as measured); for --model-memory",
        rule=SIZE,
        metavar="SIZE",
    )
    needs_gpu_memory: int | str | None = setting(
        None, "the same for GPU memory, for --model-gpu-memory", rule=SIZE, metavar="SIZE"
    )
    spin: float = setting(
        0.0005,
        "seconds that an idle worker polls before it sleeps",
        rule=(lambda value: 0 <= value <= 1, "must be from 0 to 1"),
    )

    def __post_init__(self) -> None:
        _wrap(self, "env", isinstance(self.env, Mapping))
        affinity: Any = self.cpu_affinity
        _wrap(self, "cpu_affinity", isinstance(affinity, list) and all(isinstance(each, int) for each in affinity))
        check(self)
        if self.workers is None:
            raise SettingsError(f"workers={self.workers!r}: {RANGE_RULE}")
        object.__setattr__(self, "workers", as_workers(self.workers))
        if self.scale is not None and self.executor in ("inline", "external"):
            raise SettingsError(
                f"workers={self.workers}, executor={self.executor!r}: a range needs workers that the server starts (process, thread)"
            )
        if self.scale is not None and self.device_group is not None:
            raise SettingsError(
                f"workers={self.workers}, device_group={self.device_group!r}: models that take turns have a fixed number of workers"
            )
        if self.worker_kinds:
            self._check_kinds()
        if self.bulk_workers and self.executor != "process":
            raise SettingsError(
                f"bulk_workers={self.bulk_workers}, executor={self.executor!r}: only processes have a priority of their own"
            )
        if self.worker_concurrency > 1 and (self.executor != "process" or self.pipeline_depth > 1):
            raise SettingsError(
                f"worker_concurrency={self.worker_concurrency}, executor={self.executor!r}, pipeline_depth={self.pipeline_depth}: only worker "
                "processes run several batches at once, and then they prepare none ahead; with threads, more workers do the same"
            )
        if (self.worker_socket is None) == (self.executor == "external"):
            raise SettingsError(
                f"worker_socket={self.worker_socket!r}, executor={self.executor!r}: external workers need a worker_socket to "
                "attach to, others have none"
            )

    def _check_kinds(self) -> None:
        """Raise SettingsError unless there are workers of two kinds, which stay."""
        named = f"worker_kinds={list(self.worker_kinds)}"
        if len(set(self.worker_kinds)) != MOST_KINDS:
            raise SettingsError(f"{named}: must name two kinds, one name for each worker")
        if self.executor in ("inline", "external", "ray"):
            raise SettingsError(
                f"{named}, executor={self.executor!r}: needs workers that this server starts (process, thread)"
            )
        if self.scale is not None:
            raise SettingsError(f"{named}, workers={self.workers}: workers of two kinds are of a fixed number")
        if self.device_group is not None:
            raise SettingsError(
                f"{named}, device_group={self.device_group!r}: models that take turns have workers of one kind"
            )
        present = {self.kind_of(worker) for worker in range(self.first_workers)}
        if absent := [name for name in self.worker_kinds if name not in present]:
            raise SettingsError(
                f"{named}, workers={self.workers}: no worker is of the kind {absent[0]!r}; have more workers"
            )

    def kind_of(self, worker: int) -> str:
        """Return the kind of the worker with this index; "" if all are alike."""
        return for_worker(self.worker_kinds, worker) or ""

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The names of the kinds, in the order of their numbers."""
        return tuple(dict.fromkeys(self.worker_kinds))

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """The number of each worker's kind, going round; empty if all are alike."""
        return tuple(map(self.kind_names.index, self.worker_kinds))

    @property
    def places(self) -> int:
        """The most batches that a worker holds."""
        return max(self.pipeline_depth, self.worker_concurrency)

    @property
    def scale(self) -> WorkerRange | None:
        """The fewest and the most workers, if their number follows the load; None if it is fixed."""
        return WorkerRange.parse(self.workers) if isinstance(self.workers, str) else None

    @property
    def first_workers(self) -> int:
        """The number of workers to start with. A range from 0 starts with one, which shows whether the model loads."""
        return max(self.scale.least, 1) if self.scale else int(self.workers)

    @property
    def most_workers(self) -> int:
        """The number of workers that there may be at most."""
        return self.scale.most if self.scale else int(self.workers)


def _wrap(settings: WorkerSettings, name: str, is_for_all: bool) -> None:
    """Put the one value that `name` has for all workers into a list."""
    value = getattr(settings, name)
    if is_for_all:
        object.__setattr__(settings, name, [value] if value else [])


@dataclass(frozen=True)
class Ray:
    """Runs the workers of a service on Ray: `weir.Service(Model, executor=weir.Ray(workers=8))`.

    The fields are settings of the same names (see the settings of workers); None means the setting's default. `address` is `ray_address`,
    `runtime_env` is `ray_runtime_env`, and `detached` is `ray_detached`.
    """

    workers: int | str | None = None
    address: str | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: dict[str, float] | None = None
    placement: str | None = None
    runtime_env: dict[str, Any] | None = None
    detached: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that it stands for."""
        renamed = {"address": "ray_address", "runtime_env": "ray_runtime_env", "detached": "ray_detached"}
        given = {renamed.get(name, name): value for name, value in asdict(self).items() if value is not None}
        if "ray_runtime_env" in given:
            given["ray_runtime_env"] = json.dumps(given["ray_runtime_env"])
        return {"executor": "ray", **given}


def for_worker(values: list[Any], index: int) -> Any:
    """Return the entry for worker `index`: the only one, or its own, going round when there are fewer; None if empty."""
    return values[index % len(values)] if values else None
