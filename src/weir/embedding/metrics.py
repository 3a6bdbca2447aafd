"""What a server of texts counts: who asks for how much, calls by endpoint and status, and padding. /metrics and the status answers show it."""

import logging
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.embedding.texts import Tokens
from weir.messages import Dispatch, Timing
from weir.telemetry.recorder import SilentObserver

_log = logging.getLogger("weir")

MOST = 500  # clients, sizes and intervals that are remembered
ACTIVE_FOR = 180.0  # seconds after its last request that a client counts as active


@dataclass
class TextClient:
    """What is known of one client."""

    door: str
    requests: int = 0
    texts: int = 0
    last: float = 0.0
    warned: bool = False  # of its token ids


class TextClients:
    """Counts requests, in all and by client. `clock` returns seconds; the `most` clients heard of last are remembered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._clients: OrderedDict[str, TextClient] = OrderedDict()
        self._sizes: deque[int] = deque(maxlen=most)
        self._intervals: deque[float] = deque(maxlen=most)
        self._last: float | None = None
        self.data_requests = 0
        self.system_requests = 0
        self.texts = 0

    def asked(self, client: str, texts: int, *, door: str) -> None:
        """Count a request of `client` for the vectors of so many texts, at the endpoint `door`."""
        now = self._clock()
        known = self._seen(client, door, now)
        known.requests += 1
        known.texts += texts
        self.data_requests += 1
        self.texts += texts
        self._sizes.append(texts)
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now

    def asked_about(self, client: str, *, door: str) -> None:
        """Count a request of `client` for the server's configuration, its status, or its end."""
        self._seen(client, door, self._clock())
        self.system_requests += 1

    def warn_of_ids(self, client: str, count: int, model: str) -> None:
        """Log that `client` sent `count` texts as token ids of another tokenizer, if any; once for each client that is remembered."""
        known = self._clients.get(client) if count else None
        if known is not None and not known.warned:
            known.warned = True
            _log.warning(
                "client %r sent %d texts as token ids that the tokenizer of %r would not make of them: those of another model give wrong vectors "
                "(LangChain: check_embedding_ctx_length=False)", client, count, model,
            )  # fmt: skip

    def _seen(self, client: str, door: str, now: float) -> TextClient:
        known = self._clients.setdefault(client, TextClient(door))
        self._clients.move_to_end(client)
        known.last = now
        if len(self._clients) > self._most:
            self._clients.popitem(last=False)
        return known

    @property
    def active(self) -> int:
        """How many of the clients that are remembered have asked for something within ACTIVE_FOR seconds."""
        since = self._clock() - ACTIVE_FOR
        return sum(client.last > since for client in self._clients.values())

    def statistics(self) -> dict[str, Any]:
        """Return what bert-as-service calls the statistic of a server."""
        return {
            "num_data_request": self.data_requests,
            "num_total_seq": self.texts,
            "num_sys_request": self.system_requests,
            "num_total_request": self.data_requests + self.system_requests,
            "num_total_client": len(self._clients),
            "num_active_client": self.active,
            **_spread("request_per_client", [client.requests for client in self._clients.values()]),
            **_spread("size_per_request", self._sizes),
            **_spread("last_two_interval", self._intervals),
            **_spread("request_per_second", [1.0 / interval for interval in self._intervals if interval > 0]),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each client that is remembered, the one heard of last first; `last` is seconds ago."""
        now = self._clock()
        return [
            {
                "identity": name,
                "door": client.door,
                "num_request": client.requests,
                "num_total_seq": client.texts,
                "last": now - client.last,
                "active": now - client.last < ACTIVE_FOR,
            }
            for name, client in reversed(self._clients.items())
        ]


def _spread(name: str, values: Collection[float]) -> dict[str, float]:
    """Return average, least and most of `values`, and how often the last two occur; nothing if there are none."""
    if not values:
        return {}
    least, most = min(values), max(values)
    return {
        f"avg_{name}": sum(values) / len(values),
        f"min_{name}": least,
        f"max_{name}": most,
        f"num_min_{name}": sum(value == least for value in values),
        f"num_max_{name}": sum(value == most for value in values),
    }


class TextCounts(Collector):
    """Counts calls by model, frontend and status, the texts of those that were answered, and what is thrown away at the ZeroMQ port.

    Of `clients` it shows how many are active. `transferred` is told (model, door, bytes received, bytes sent) of each call that was answered.
    """

    def __init__(
        self, clients: TextClients | None = None, transferred: Callable[[str, str, int, int], None] | None = None
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
        """Tell the observers the sizes of a call that was answered."""
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
            "weir_zeromq_dropped", "What the ZeroMQ frontend has thrown away, with a line in the log.", labels=["kind"]
        )
        for kind, count in list(self._dropped.items()):
            dropped.add_metric([kind], count)
        yield dropped
        if self._clients is not None:
            text = f"TextClients of texts that have asked for something within {ACTIVE_FOR:g} s, of the {MOST} heard of last."
            yield GaugeMetricFamily("weir_text_clients", text, value=self._clients.active)


Runs = Callable[[Sequence[int]], Iterable[Sequence[int]]]


class RunShapes(NamedTuple):
    """How the workers of a model make rectangles of a batch: `runs` says, of the lengths of its texts, which run together (None: all do);
    each is filled up to the longest of a run, and to `fixed_length`. Padding takes `padding_cost` of a token's time."""

    runs: Runs | None = None
    fixed_length: int = 0
    padding_cost: float = 1.0


class PaddingMetrics(SilentObserver, Collector):
    """An Observer that counts the tokens that were computed, and the padding beside them, as tokens that would have taken as long, when a batch is
    back from its worker.

    `models` says how each model of texts computes, by label; others are not counted.
    """

    def __init__(self) -> None:
        self.models: dict[str, RunShapes] = {}
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.padding: defaultdict[str, float] = defaultdict(float)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch."""
        computing = self.models.get(model)
        if computing is None:
            return
        lengths = [length_of(request) for request in dispatch.requests]
        runs = [range(len(lengths))] if computing.runs is None else computing.runs(lengths)
        area = sum(len(run) * max(computing.fixed_length, *(lengths[place] for place in run)) for run in runs)
        self.tokens[model] += sum(lengths)
        self.padding[model] += computing.padding_cost * (area - sum(lengths))

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        for name, text, counted in (
            ("weir_tokens", "Tokens of texts that workers have computed.", self.tokens),
            (
                "weir_padding_tokens",
                "Padding that workers have computed beside them, as tokens that take as long.",
                self.padding,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["model"])
            for model, count in list(counted.items()):
                family.add_metric([model], count)
            yield family


def length_of(request: Any) -> int:
    """Return how many tokens the text of `request` has; of one that only the worker reads, what it was thought to have."""
    payload = request.payload
    return len(payload.ids) // 4 if isinstance(payload, Tokens) else max(1, round(request.cost))
