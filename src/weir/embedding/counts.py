"""What the doors of texts have done, for /metrics: a call may be many requests to the line, or one of many texts."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.embedding.clients import ACTIVE_FOR, MOST, Clients


class Counts(Collector):
    """Counts calls by model, door and status, the texts of those that were answered, and what the ZeroMQ door throws away.

    Of `clients` it shows how many are active. `transferred` is told (model, door, bytes received, bytes sent) of each call that was answered.
    """

    def __init__(
        self, clients: Clients | None = None, transferred: Callable[[str, str, int, int], None] | None = None
    ) -> None:
        self._clients = clients
        self._transferred = transferred
        self._dropped: defaultdict[str, int] = defaultdict(int)
        self._calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._texts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._truncated: defaultdict[tuple[str, str], int] = defaultdict(int)

    def answered(self, model: str, door: str, texts: int, truncated: int) -> None:
        """Count a call with its vectors."""
        self._calls[model, door, "200"] += 1
        self._texts[model, door] += texts
        self._truncated[model, door] += truncated

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Tell the sizes of a call that was answered, to whoever wants to hear."""
        if self._transferred is not None:
            self._transferred(model, door, received_bytes, sent_bytes)

    def refused(self, model: str, door: str, status: int) -> None:
        """Count a call that got an error. `model` is "" where the caller named one that there is not."""
        self._calls[model, door, str(status)] += 1

    def dropped(self, kind: str, times: int = 1) -> None:
        """Count connections, messages, requests or answers that were thrown away."""
        self._dropped[kind] += times

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        calls = CounterMetricFamily(
            "weir_text_calls", "Calls for the vectors of texts.", labels=["model", "door", "code"]
        )
        for labels, count in list(self._calls.items()):
            calls.add_metric(labels, count)
        yield calls
        for name, text, counted in (
            ("weir_texts", "Texts whose vectors were answered.", self._texts),
            ("weir_texts_truncated", "Those of them that were cut.", self._truncated),
        ):
            family = CounterMetricFamily(name, text, labels=["model", "door"])
            for place, count in list(counted.items()):
                family.add_metric(place, count)
            yield family
        dropped = CounterMetricFamily(
            "weir_zeromq_dropped", "What the ZeroMQ door has thrown away, with a line in the log.", labels=["kind"]
        )
        for kind, count in list(self._dropped.items()):
            dropped.add_metric([kind], count)
        yield dropped
        if self._clients is not None:
            text = (
                f"Clients of texts that have asked for something within {ACTIVE_FOR:g} s, of the {MOST} heard of last."
            )
            yield GaugeMetricFamily("weir_text_clients", text, value=self._clients.active)
