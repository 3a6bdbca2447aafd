"""The counts of a server of text models: requests by client, calls by endpoint and status, and padding. /metrics and the status responses show them."""

import logging
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.messages import Dispatch, Timing
from weir.telemetry.recorder import SilentObserver
from weir.text_models.texts import EncodedImage, Tokens

_log = logging.getLogger("weir")

MAX_REMEMBERED = 500  # clients, sizes of requests, and intervals between requests
ACTIVE_FOR = 180.0  # seconds after its last request during which a client counts as active


@dataclass
class TextClient:
    """The counts of one client. `warned`: the warning about its token ids has been logged."""

    frontend: str
    requests: int = 0
    texts: int = 0
    last: float = 0.0
    warned: bool = False


class TextClients:
    """Counts requests, in all and by client. The `max_remembered` clients with the latest requests are remembered. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_remembered: int = MAX_REMEMBERED) -> None:
        self._clock = clock
        self._most = max_remembered
        self._clients: OrderedDict[str, TextClient] = OrderedDict()
        self._sizes: deque[int] = deque(maxlen=max_remembered)
        self._intervals: deque[float] = deque(maxlen=max_remembered)
        self._last: float | None = None
        self.data_requests = 0
        self.system_requests = 0
        self.texts = 0

    def received(self, client: str, texts: int, *, frontend: str) -> None:
        """Count a request of `client` for the vectors of `texts` texts, at the endpoint `frontend`."""
        self.received_before(client, (texts,), (self._clock(),), frontend=frontend)

    def received_before(self, client: str, sizes: Sequence[int], at: Sequence[float], *, frontend: str) -> None:
        """Count requests of `client` that another process has received, each of so many texts, at the instants `at`."""
        known = self._client_of(client, frontend, at[-1])
        known.requests += len(sizes)
        known.texts += sum(sizes)
        self.data_requests += len(sizes)
        self.texts += sum(sizes)
        self._sizes.extend(sizes)
        for instant in at:
            if self._last is not None:
                self._intervals.append(abs(instant - self._last))
            self._last = instant

    def passed_on(self, client: str, texts: int, requests: int = 1) -> None:
        """Count requests of `client` with so many texts together no more: another process of the server receives them again."""
        self.data_requests -= requests
        self.texts -= texts
        if (known := self._clients.get(client)) is not None:
            known.requests -= requests
            known.texts -= texts

    def received_command(self, client: str, *, frontend: str) -> None:
        """Count a request of `client` for the server's configuration or status, or to end the server."""
        self._client_of(client, frontend, self._clock())
        self.system_requests += 1

    def warn_of_ids(self, client: str, model: str, count: int) -> None:
        """Warn in the log, once for each remembered client, that `client` sent `count` texts as token ids of another tokenizer; 0 for none."""
        known = self._clients.get(client) if count else None
        if known is not None and not known.warned:
            known.warned = True
            what = "client %r sent %d texts as token ids that the tokenizer of %r would not produce"
            rule = "token ids of another model give wrong vectors (LangChain: check_embedding_ctx_length=False)"
            _log.warning(f"{what}: {rule}", client, count, model)

    def _client_of(self, client: str, frontend: str, now: float) -> TextClient:
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = TextClient(frontend)
        self._clients.move_to_end(client)
        known.last = now
        if len(self._clients) > self._most:
            self._clients.popitem(last=False)
        return known

    @property
    def active(self) -> int:
        """How many of the remembered clients have sent a request within the last ACTIVE_FOR seconds."""
        since = self._clock() - ACTIVE_FOR
        return sum(client.last > since for client in self._clients.values())

    def statistics(self) -> dict[str, Any]:
        """Return the fields that bert-as-service calls the statistic of a server."""
        return {
            "num_data_request": self.data_requests,
            "num_total_seq": self.texts,
            "num_sys_request": self.system_requests,
            "num_total_request": self.data_requests + self.system_requests,
            "num_total_client": len(self._clients),
            "num_active_client": self.active,
            **_summary("request_per_client", [client.requests for client in self._clients.values()]),
            **_summary("size_per_request", self._sizes),
            **_summary("last_two_interval", self._intervals),
            **_summary("request_per_second", [1.0 / interval for interval in self._intervals if interval > 0]),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each remembered client, the latest request first; `last` is how many seconds ago that was."""
        now = self._clock()
        return [
            {
                "identity": name,
                "frontend": client.frontend,
                "num_request": client.requests,
                "num_total_seq": client.texts,
                "last": now - client.last,
                "active": now - client.last < ACTIVE_FOR,
            }
            for name, client in reversed(self._clients.items())
        ]


def _summary(name: str, values: Collection[float]) -> dict[str, float]:
    """Return mean, minimum and maximum of `values`, and how often minimum and maximum occur; empty without values."""
    if not values:
        return {}
    least, max_remembered = min(values), max(values)
    return {
        f"avg_{name}": sum(values) / len(values),
        f"min_{name}": least,
        f"max_{name}": max_remembered,
        f"num_min_{name}": sum(value == least for value in values),
        f"num_max_{name}": sum(value == max_remembered for value in values),
    }


class TextCounts(Collector):
    """Prometheus metrics: calls by model, endpoint and status, the texts of answered calls, and what the ZeroMQ frontend drops.

    It also shows how many of `clients` are active. `transferred` is called with (model, endpoint, bytes received, bytes sent) for each answered call.
    """

    def __init__(
        self, clients: TextClients | None = None, transferred: Callable[[str, str, int, int], None] | None = None
    ) -> None:
        self._clients = clients
        self._transferred = transferred
        self._dropped: defaultdict[str, int] = defaultdict(int)
        self._calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._answered: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])  # calls, texts, cut
        self.images: defaultdict[tuple[str, str], int] = defaultdict(int)  # that were computed, by model and frontend

    def answered(self, model: str, frontend: str, texts: int, truncated: int, calls: int = 1) -> None:
        """Count calls that were answered with `texts` vectors, of which `truncated` are of texts that were cut."""
        counts = self._answered[model, frontend]
        counts[0] += calls
        counts[1] += texts
        counts[2] += truncated

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Report the sizes of an answered call."""
        if self._transferred is not None:
            self._transferred(model, frontend, received_bytes, sent_bytes)

    def refused(self, model: str, frontend: str, status: int | str, calls: int = 1) -> None:
        """Count calls that were answered with an error of this status. `model` is "" if the named model does not exist."""
        self._calls[model, frontend, str(status)] += calls

    def dropped(self, kind: str, times: int = 1) -> None:
        """Count connections, messages, requests or responses that the ZeroMQ frontend dropped."""
        self._dropped[kind] += times

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        answered = list(self._answered.items())
        of_model, calls = ["model", "frontend"], [*self._calls.items()]
        good = [((*names, "200"), counts[0]) for names, counts in answered]
        yield _counters("weir_text_calls", "Embedding calls.", [*of_model, "code"], [*good, *calls])
        further = (("weir_texts", "Texts embedded."), ("weir_texts_truncated", "Texts truncated."))
        for number, (name, text) in enumerate(further, 1):
            yield _counters(name, text, of_model, [(names, counts[number]) for names, counts in answered])
        text = "Images embedded, also counted in weir_texts."
        yield _counters("weir_images", text, of_model, list(self.images.items()))
        text = "Messages dropped by the ZeroMQ frontend; the log gives the reasons."
        dropped = [((kind,), count) for kind, count in list(self._dropped.items())]
        yield _counters("weir_zeromq_dropped", text, ["kind"], dropped)
        if self._clients is not None:
            text = f"Clients that have sent a request for texts within {ACTIVE_FOR:g} s, of the {MAX_REMEMBERED} with the latest requests."
            yield GaugeMetricFamily("weir_text_clients", text, value=self._clients.active)


def _counters(
    name: str, text: str, labels: Sequence[str], counts: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """Return the family `name` with a counter for each of `counts`, which are the values of the labels and the count."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


Runs = Callable[[Sequence[int]], Iterable[Sequence[int]]]


class RunShapes(NamedTuple):
    """How the workers of a model divide a batch into runs of the network.

    Attributes:
        runs: returns the indices of the texts of each run, given the lengths of a batch's texts in tokens; None if a batch is one run.
        fixed_length: the number of tokens to which every text is padded; 0 if only to the longest of its run.
        padding_cost: the time that a token of padding takes, as a share of that of another token.
        model: the name under which they are counted; "" for the label.
    """

    runs: Runs | None = None
    fixed_length: int = 0
    padding_cost: float = 1.0
    model: str = ""


class PaddingMetrics(SilentObserver, Collector):
    """An Observer that counts computed tokens and padding, the latter as tokens that take as long. It counts a batch when its worker has answered.

    `models` holds the run shapes of each text model, by the label of the model. Other models are not counted.
    """

    def __init__(self) -> None:
        self.models: dict[str, RunShapes] = {}
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.padding: defaultdict[str, float] = defaultdict(float)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch."""
        shapes = self.models.get(model)
        if shapes is None:
            return
        lengths = [length_of(request) for request in dispatch.requests]
        runs = [range(len(lengths))] if shapes.runs is None else shapes.runs(lengths)
        area = sum(len(run) * max(shapes.fixed_length, *(lengths[index] for index in run)) for run in runs)
        self.tokens[shapes.model or model] += sum(lengths)
        self.padding[shapes.model or model] += shapes.padding_cost * (area - sum(lengths))

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        for name, text, counted in (
            ("weir_tokens", "Tokens that workers computed.", self.tokens),
            ("weir_padding_tokens", "Padding that workers computed, as tokens of the same cost.", self.padding),
        ):
            yield _counters(name, text, ["model"], [((model,), count) for model, count in list(counted.items())])


def length_of(request: Any) -> int:
    """Return how many tokens the text or the image of `request` has; an estimate if only the worker tokenizes it."""
    payload = request.payload
    if isinstance(payload, EncodedImage):
        return payload.tokens
    return len(payload.ids) // 4 if isinstance(payload, Tokens) else max(1, round(request.form.cost))
