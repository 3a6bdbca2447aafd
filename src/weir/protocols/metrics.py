"""What /metrics shows: the counts of an observer, with the codes of the doors and the levels of the running models."""

from collections import Counter
from typing import TYPE_CHECKING

from weir.errors import WeirError
from weir.protocols.status import codes_of_type
from weir.telemetry.exposition import Exposition, Levels
from weir.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from weir.manager.registry import Registry
    from weir.manager.service import Service


def make_exposition(metrics: Metrics, registry: "Registry") -> Exposition:
    """Return what renders `metrics`, which must be among the observers of the services of `registry`."""
    return Exposition(metrics, code_of, lambda: {service.label: levels_of(service) for service in registry.all})


def code_of(door: str, kind: type[WeirError] | None) -> str:
    """Return the code of a request's end, as its door says it; in process there are no codes but errors."""
    if door == "http":
        return "200" if kind is None else str(codes_of_type(kind).http)
    if door == "grpc":
        return "OK" if kind is None else codes_of_type(kind).grpc
    return "ok" if kind is None else kind.__name__


def levels_of(service: "Service") -> Levels:
    """Return what can be read of `service` now."""
    state = service.state()
    gauges = state["gauges"]
    return Levels(
        waiting_rows=state["waiting"],
        waiting_requests=state["waiting_requests"],
        running_batches=state["in_flight_batches"],
        workers=Counter(worker["state"] for worker in state["workers"]),
        restarts=gauges.get("restarts", 0),
        arena_bytes=gauges.get("arena_bytes", 0),
        arena_free_bytes=gauges.get("arena_free_bytes", 0),
        policy=state["policy"],
    )
