"""What /metrics shows: the counts of an observer, with the codes of the doors and the levels of the running models."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.errors import WeirError
from weir.protocols.account import Account
from weir.protocols.status import codes_of_type
from weir.telemetry.exposition import NAMESPACE, Exposition, Levels, ModelCounts, TritonNames
from weir.telemetry.recorder import Metrics

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.serving.service import Service


# Those that answer with HTTP's codes: our own, and those that products have.
HTTP_DOORS = frozenset(("http", "openai", "encode"))


def make_exposition(
    metrics: Metrics, registry: "Registry", *, triton_names: bool = False, namespace: str = NAMESPACE
) -> Exposition:
    """Return what renders `metrics`, which must be among the observers of the services of `registry`; with `triton_names`
    also what Triton's dashboards look for. `namespace` is the first word of the names of all others."""
    exposition = Exposition(metrics, code_of, lambda: {each.label: levels_of(each) for each in registry.all}, namespace)
    if triton_names:
        exposition.registry.register(TritonNames(metrics, lambda: map(counted, registry.all)))
    return exposition


class Held(Collector):
    """Shows what all clients of a server hold together."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        account = self._account
        for name, text, value in (
            ("weir_held_bytes", "Bytes that requests and answers of all clients hold.", account.held_bytes),
            ("weir_max_held_bytes", "Bytes that they may hold (max_waiting_bytes).", account.max_bytes),
            ("weir_connections", "Connections of every kind that are open.", account.connections),
            ("weir_max_connections", "Connections that may be open.", account.max_connections),
        ):
            yield GaugeMetricFamily(name, text, value)
        text = "Times that bytes were refused, for want of room."
        yield CounterMetricFamily("weir_held_refusals", text, account.refused)


def counted(service: "Service") -> ModelCounts:
    """Return what there is to be shown of `service` under Triton's names."""
    return ModelCounts(service.name, service.version, service.statistics, service.state()["waiting_requests"])


def code_of(door: str, kind: type[WeirError] | None) -> str:
    """Return the code of a request's end, as its door says it; in process there are no codes but errors."""
    if door in HTTP_DOORS:
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
