"""Texts in a server with several fronts: `TextsInFronts` reads, tokenizes and answers the requests with small responses in each front; `CountedTexts` is what
the fronts tell the dispatcher, which counts for all.

An encoder in a front divides the queue's window with those of the other fronts. The dispatcher answers all else: large responses, pages, jobs, ZeroMQ.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weir.fronts.messages import LONGEST_TOKENS
from weir.fronts.remote import RemoteHandle
from weir.images import ImageLimits
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import FastTexts
from weir.text_server.metrics import TextClients, TextCounts
from weir.text_server.protocols import text_apis
from weir.text_server.text_model import ServedTextModel, TextModelSpec

if TYPE_CHECKING:
    from weir.frontends.http.fast.plan import RouteHandler
    from weir.protocols import HttpSettings
    from weir.serving.handle import Models
    from weir.text_server.calibration import Budget

_REPORT_AFTER = 0.02  # seconds in which counts are gathered
_TOKEN_BYTES = 4
_UNKNOWN: Any = None  # the model of an encoder that serves none yet


# What a front tells the dispatcher.


Counter = Literal["answered", "refused", "transferred", "passed_on", "warn_of_ids"]


class CountedTexts(msgspec.Struct, array_like=True):
    """Counts since the last report.

    Attributes:
        sums: what was counted by a method of TextCounts or TextClients: its name, the texts that it was called with, and the sums of the numbers behind these.
        received: client, frontend, the number of texts of each request, and when it came.
    """

    sums: list[tuple[Counter, list[str], list[int]]]
    received: list[tuple[str, str, list[int], list[float]]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CountedTexts).decode


def add_counted(data: bytes, counts: TextCounts, clients: TextClients) -> None:
    """Count what a front has counted. Raises msgspec.MsgspecError or ValueError for what is no `CountedTexts`."""
    counted = _decode(data)
    for client, frontend, sizes, at in counted.received:
        if not sizes or len(sizes) != len(at):
            raise ValueError("requests without sizes or instants")
        clients.received_before(client, sizes, at, frontend=frontend)
    for counter, names, numbers in counted.sums:
        getattr(clients if counter in ("passed_on", "warn_of_ids") else counts, counter)(*names, *numbers)


class Counting:
    """Gathers the counts of a front, and sends them with `send` soon after the first of them."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._scheduled = False
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[tuple[Counter, tuple[str, ...]], list[int]] = {}
        self._received: defaultdict[tuple[str, str], tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))

    def add(self, counter: Counter, names: tuple[str, ...], *numbers: int) -> None:
        """Add `numbers` to those that the method `counter` is called with behind `names`."""
        sums = self._sums.setdefault((counter, names), [0] * len(numbers))
        for index, number in enumerate(numbers):
            sums[index] += number
        self._changed()

    def received(self, client: str, frontend: str, texts: int, at: float) -> None:
        """Note a request that came at the instant `at`."""
        sizes, instants = self._received[client, frontend]
        sizes.append(texts)
        instants.append(at)
        self._changed()

    def _changed(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_REPORT_AFTER, self.report)

    def report(self) -> None:
        """Send what was counted since the last report."""
        if not self._scheduled:
            return
        self._scheduled = False
        sums = [(counter, list(names), numbers) for (counter, names), numbers in self._sums.items()]
        counted = CountedTexts(sums, [(*who, *columns) for who, columns in self._received.items()])
        self._reset()
        self._send(_encode(counted))


class FrontCounts(TextCounts):
    """The counts of calls in a front."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def answered(self, model: str, frontend: str, texts: int, truncated: int, calls: int = 1) -> None:
        """See TextCounts."""
        self._counting.add("answered", (model, frontend), texts, truncated, calls)

    def refused(self, model: str, frontend: str, status: int | str, calls: int = 1) -> None:
        """See TextCounts."""
        self._counting.add("refused", (model, frontend, str(status)), calls)

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """See TextCounts."""
        self._counting.add("transferred", (model, frontend), received_bytes, sent_bytes)


class FrontClients(TextClients):
    """The counts of clients in a front."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def received(self, client: str, texts: int, *, frontend: str) -> None:
        """See TextClients."""
        self._counting.received(client, frontend, texts, self._clock())

    def passed_on(self, client: str, texts: int, requests: int = 1) -> None:
        """See TextClients."""
        self._counting.add("passed_on", (client,), texts, requests)

    def warn_of_ids(self, client: str, model: str, count: int) -> None:
        """See TextClients."""
        if count:
            self._counting.add("warn_of_ids", (client, model), count)


# A front.


@dataclass
class TextsInFronts:
    """The FrontProduct of texts, with the settings of the models and the budgets that were measured for them."""

    specs: Sequence[TextModelSpec]
    budgets: "dict[str, Budget]"
    max_texts: int
    images: ImageLimits = ImageLimits()

    def load(self) -> None:
        """See FrontProduct."""
        self._models = [ServedTextModel(spec) for spec in self.specs]

    def routes(
        self, models: "Models", http: "HttpSettings", fronts: int, send: Callable[[bytes], None]
    ) -> "Sequence[RouteHandler]":
        """See FrontProduct."""
        self._remote = models
        self._counting = counting = Counting(send)
        self._encoders = {model.name: model.encoder(_UNKNOWN, self.budgets, fronts) for model in self._models}
        self._hot: set[str] = set()
        counts, clients = FrontCounts(counting), FrontClients(counting)
        self._context = EmbeddingContext(self._encoders, http, self.max_texts, counts, clients, images=self.images)
        models.changed.append(self._attach)
        return [FastTexts(api.texts, self._hot) for api in text_apis(self._context)]

    def report(self) -> None:
        """See FrontProduct."""
        self._counting.report()

    async def drain(self) -> None:
        """See FrontProduct."""
        await asyncio.gather(*[encoder.drained() for encoder in self._encoders.values()])

    def _attach(self) -> None:
        """Attach the encoders to the models that there are now. The dispatcher answers requests for the others."""
        self._context.aliases = self._remote.aliases
        self._hot.clear()
        for model in self._models:
            handle, encoder = self._remote.services.get(model.name), self._encoders[model.name]
            if isinstance(handle, RemoteHandle) and handle.takes_texts:
                handle.virtual_time = partial(getattr, encoder, "virtual_time")
                encoder.serve(handle)
                is_short = _TOKEN_BYTES * encoder.max_length <= LONGEST_TOKENS
                self._hot.update([model.name] if model.has_small_responses and is_short else ())
