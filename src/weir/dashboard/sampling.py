"""One look at a server: what was counted since the look before, how things stand now, and what was counted in all."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from weir.dashboard.counting import Counts, change, count
from weir.dashboard.machine import Use, use_of
from weir.protocols.metrics import code_of
from weir.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from weir.manager.registry import Registry
    from weir.manager.service import Service

_SETTINGS = ("max_batch_size", "max_queue_size", "padded")
_MOST_CLIENTS = 20  # that are shown

TellClients = Callable[[], Sequence[Mapping[str, Any]]]  # a row for each, by column, the first of which names it


def nobody() -> Sequence[Mapping[str, Any]]:
    """Tell of no clients."""
    return []


class Sampler:
    """Looks at the services of `registry` and at what `metrics` and `collectors` have counted; reads only.

    Without `metrics` there are levels and no counts. `clients` tells of those whom a product
    tells apart. `clock` returns seconds, `time_of_day` seconds since 1970.
    """

    def __init__(
        self, registry: "Registry", metrics: Metrics | None, collectors: Sequence[Collector] = (),
        clients: TellClients = nobody, *, clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._metrics = metrics
        self._collectors = collectors
        self._clients = clients
        self._clock = clock
        self._time_of_day = time_of_day
        self._before: Counts = {}
        self._total: dict[str, float] = {}
        self._at: float | None = None

    def sample(self, late: float = 0.0) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return what changed since the sample before, None the first time; and what there is now.

        Of both, `models` are by label. The first leaves out what is zero and models that stood still. `late` is how much later
        than it should the event loop got here, in seconds.
        """
        now = self._clock()
        counts = count(self._metrics, code_of, self._collectors) if self._metrics is not None else {}
        services = {service.label: service for service in self._registry.all}
        states = {label: service.state(brief=True) for label, service in services.items()}
        levels = {label: _levels(state) for label, state in states.items()}
        uses = _uses(states)
        at, total = self._time_of_day(), _total(uses)
        changes = None
        if self._at is not None:
            changed: dict[str, dict[str, Any]] = change(counts, self._before) or {}
            for label, level in levels.items():
                if there := {name: value for name, value in level.items() if value}:
                    changed[label] = changed.get(label, {}) | there
            machine = {
                **total,
                "cpu": _used(total, self._total, "cpu"),
                "workers_cpu": _used(total, self._total, "workers_cpu"),
            }
            changes = {"at": at, "seconds": now - self._at, "late": late, "machine": machine, "models": changed}
        self._before, self._total, self._at = counts, total, now
        models = {label: _model(services[label], state, levels[label], uses) for label, state in states.items()}
        for label, counted in counts.items():
            models.setdefault(label, {})["counts"] = counted
        present = {"at": at, "models": models, "machine": total, "clients": list(self._clients()[:_MOST_CLIENTS])}
        return changes, present


def _levels(state: Mapping[str, Any]) -> dict[str, Any]:
    workers = state["workers"]
    return {
        "waiting": state["waiting"],
        "waiting_requests": state["waiting_requests"],
        "oldest": state["oldest_age"] or 0.0,
        "running": state["in_flight"],
        "busy": sum(1 for worker in workers if worker["in_flight"]),
        "restarts": state["gauges"].get("restarts", 0),
    }


def _model(
    service: "Service", state: Mapping[str, Any], levels: dict[str, Any], uses: Mapping[int, Use]
) -> dict[str, Any]:
    workers = [worker | _use(uses.get(worker["pid"])) for worker in state["workers"]]
    gauges = state["gauges"]
    return {
        "ready": state["ready"],
        "reason": state["reason"],
        "levels": levels,
        "workers": workers,
        "arena": [gauges.get("arena_bytes", 0), gauges.get("arena_free_bytes", 0)],
        "settings": {name: getattr(service.batching, name) for name in _SETTINGS},
        "texts": service.model.plain_texts,
    }


def _use(use: Use | None) -> dict[str, Any]:
    return {} if use is None else use._asdict()


def _uses(states: Mapping[str, Any]) -> dict[int, Use]:
    """Return the use of this process and of all workers, by process."""
    pids = {worker["pid"] for state in states.values() for worker in state["workers"]} - {None}
    uses = {pid: use_of(pid) for pid in (os.getpid(), *pids)}
    return {pid: use for pid, use in uses.items() if use is not None}


def _used(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    """Return the processor time since the sample before; that of a worker which ended is gone, and must not count below zero."""
    return max(0.0, now[name] - before[name])


def _total(uses: Mapping[int, Use]) -> dict[str, float]:
    """Return memory and processor time of this process, and of its workers together."""
    own = uses.get(os.getpid())
    others = [use for pid, use in uses.items() if pid != os.getpid()]
    return {
        "memory_bytes": own.memory_bytes if own else 0,
        "cpu": own.cpu if own else 0.0,
        "workers_memory_bytes": sum(use.memory_bytes for use in others),
        "workers_cpu": sum(use.cpu for use in others),
    }
