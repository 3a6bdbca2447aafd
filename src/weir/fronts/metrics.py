"""What a server with fronts shows of them: their metrics, and their rows on the dashboard."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.frontends.dashboard import use_of
from weir.fronts.supervision import FrontView


def rows_of(views: Sequence[FrontView], connections: Callable[[int], int]) -> list[dict[str, Any]]:
    """Return the rows of the dashboard for fronts; `connections` returns how many a front has, by its number."""
    return [
        {
            "number": view.number,
            "pid": view.pid,
            "connections": connections(view.number),
            "requests": view.requests,
            "starts": view.starts,
        }
        for view in views
    ]


class FrontMetrics(Collector):
    """Shows each of the fronts that `views` returns; `connections` returns how many a front has, by its number."""

    def __init__(self, views: Callable[[], Sequence[FrontView]], connections: Callable[[int], int]) -> None:
        self._views = views
        self._connections = connections

    def describe(self) -> Iterator[Metric]:
        """Return no metrics: `collect` names them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        connections = GaugeMetricFamily("weir_front_connections", "Connections that a front has.", labels=["front"])
        requests = GaugeMetricFamily("weir_front_requests", "Its requests that wait or run.", labels=["front"])
        memory = GaugeMetricFamily("weir_front_memory_bytes", "Its resident memory.", labels=["front"])
        cpu = CounterMetricFamily("weir_front_cpu_seconds", "CPU time of its present process.", labels=["front"])
        starts = CounterMetricFamily("weir_front_starts", "Starts of its processes.", labels=["front"])
        for view in self._views():
            labels, use = [str(view.number)], use_of(view.pid)
            connections.add_metric(labels, self._connections(view.number))
            requests.add_metric(labels, view.requests)
            starts.add_metric(labels, view.starts)
            if use is not None:
                memory.add_metric(labels, use.memory_bytes)
                cpu.add_metric(labels, use.cpu)
        yield from (starts, cpu, connections, requests, memory)
