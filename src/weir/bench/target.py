"""The contract of a target of load, the ledger of a round, and the batches that a server counts; what is sent to a target: `--data`, or the
model's own example, to the endpoint that its URL names; and a model in this process as a target: what serving costs without a network.
"""

import time
from array import array
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from weir.catalog.loading import make_service, new_service
from weir.catalog.sources import ModelToServe, default_name, platform_of_target
from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.model import Example, Model, is_tensor_model
from weir.serving.calls import Call
from weir.serving.service import Service
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Metrics
from weir.wire.tensors import to_arrays

TIMES = ("queue", "predict", "total")


# What a server has counted (floats, which a Counter takes too) since its start: "rows" in all batches, batches by "reason" and by "size" (the upper bound in rows, not cumulated), the sum in
# "seconds" of each of TIMES, and how many "values" the sum has. The counts of a run are those at its end minus those at its start.
Counts = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Batches:
    """Tells how the requests of a run were batched, including those of the warm-up.

    Attributes:
        count: the number of batches.
        mean_rows: rows per batch.
        reasons: batches by the reason why they were cut.
        sizes: batches by size: each key is the upper bound of a range of sizes, which begins above the next smaller key.
        queue_time_ms: mean time of a request until its dispatch.
        predict_time_ms: mean time of a batch in `predict`.
        total_time_ms: mean time of a request in the server.
    """

    count: int
    mean_rows: float
    reasons: dict[str, int]
    sizes: dict[str, int]
    queue_time_ms: float
    predict_time_ms: float
    total_time_ms: float


def batches_of(counts: Counts) -> Batches:
    """Return the Batches that `counts` describe."""
    reasons, sizes = (
        {label: n for (what, label), n in counts.items() if what == kind and n} for kind in ("reason", "size")
    )
    count = sum(reasons.values())
    means = {name: counts["seconds", name] / (counts["values", name] or 1) for name in TIMES}
    return Batches(
        count=round(count),
        mean_rows=counts["rows", ""] / count if count else 0.0,
        reasons={reason: round(number) for reason, number in reasons.items()},
        sizes={size: round(sizes[size]) for size in sorted(sizes, key=float)},
        **{f"{name}_time_ms": mean * 1000.0 for name, mean in means.items()},
    )


# By name of a sample, without the namespace: what it counts.
_SUMS = {"batch_size_sum": ("rows", "")} | {
    f"{name}_time_seconds_{end}": (what, name)
    for name in TIMES
    for end, what in (("sum", "seconds"), ("count", "values"))
}


def read_counts(text: str, model: str) -> Counts:
    """Return the counts of one model from the text of `/metrics`. Raises SettingsError if the text cannot be parsed."""
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise SettingsError(f"/metrics cannot be read: {error}") from error
    samples = [sample for family in families for sample in family.samples if sample.labels.get("model") == model]
    sums = [sample.name for sample in samples if sample.name.endswith("_batch_size_sum")]
    namespace = sums[0].removesuffix("batch_size_sum") if sums else "weir_"
    counts: Counts = Counter()
    value: Any  # a float, which a Counter takes too
    below: Any = 0.0
    for sample in samples:
        name, value = sample.name.removeprefix(namespace), sample.value
        if name == "batches_total":
            counts["reason", sample.labels["reason"]] = value
        elif name == "batch_size_bucket":  # the buckets of a histogram are cumulated
            counts["size", f"{float(sample.labels['le']):g}"], below = value - below, value
        elif name in _SUMS:
            counts[_SUMS[name]] = value
    return counts


OK, TIMEOUT, UNSENT = "ok", "timeout", "unsent"
_RECENT = 512  # response times that the live figures are computed from


class Ledger:
    """The record of one round. A request is its index; all instants are in seconds of one clock.

    Attributes:
        intended: when each request was to be sent.
        sent: when it was sent; NaN before.
        ended: when it ended; NaN before.
        outcomes: how it ended; "" before.
        begun: how many requests were given to the target.
        over: how many have ended.
        failed: how many of these have failed.
        recent: the last response times, in seconds.
        on_end: is called at the end of each request.
    """

    def __init__(self, intended: Iterable[float] = (), on_end: Callable[[], None] | None = None) -> None:
        self.intended = array("d", intended)
        count = len(self.intended)
        self.sent = array("d", [nan]) * count
        self.ended = array("d", [nan]) * count
        self.outcomes = [""] * count
        self.begun = 0
        self.over = 0
        self.failed = 0
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.on_end = on_end

    def add(self, intended: float) -> int:
        """Add a request that is to be sent at `intended`, and return its index."""
        self.intended.append(intended)
        self.sent.append(nan)
        self.ended.append(nan)
        self.outcomes.append("")
        return len(self.intended) - 1

    def end(self, index: int, now: float, outcome: str) -> None:
        """Record the end of a request at `now`. `outcome` is OK, or a few words about what went wrong. Call this once per
        request."""
        self.ended[index] = now
        self.over += 1
        self.outcomes[index] = outcome
        if outcome != OK:
            self.failed += 1
        self.recent.append(now - self.intended[index])
        if self.on_end is not None:
            self.on_end()

    @property
    def open(self) -> int:
        """The number of requests that have begun and not ended."""
        return self.begun - self.over


class Target:
    """Base class of what load can be put on. All methods are called in one event loop.

    `send` notes in the ledger when the request was sent, and later how it ended. Every request ends, at the latest after its timeout, if
    `give_up` is called from time to time.

    Attributes:
        name: its name in tables.
        ledger: the record of the present round.
        connections: the largest number of connections that were open at a time, once it is closed; None if it has no connections.
        held: how many requests had to wait for a connection because no more were allowed, once it is closed.
    """

    connections: int | None = None
    held = 0

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.ledger = Ledger()
        self._clock = clock

    async def open(self) -> None:
        """Connect, and check that a request has a response. Raises SettingsError."""

    def send(self, index: int) -> None:
        """Send the request `index` of the round."""
        raise NotImplementedError  # each kind of target sends in its own way

    def give_up(self) -> None:
        """End requests that have timed out. Called some twenty times a second. By default, every request ends by itself."""

    async def counts(self) -> Counts | None:
        """Return what has been counted so far; None if that is unknown."""
        return None

    async def close(self) -> None:
        """Close all connections. Idempotent."""


_LINES = (".jsonl", ".ndjson")


def read_payloads(data: str | Sequence[Any]) -> list[bytes]:
    """Return the bodies to send in turn.

    `data` is either the body itself; or `@PATH` for the content of a file, each line of which is a body if its name ends with
    .jsonl or .ndjson; or a sequence of values, each of which is sent as JSON. Raises SettingsError for a file that cannot be read
    or has no lines, and for values that JSON cannot represent.
    """
    if not isinstance(data, str):
        try:
            bodies = [msgspec.json.encode(value) for value in data]
        except TypeError as error:
            raise SettingsError(f"data: {error}") from error
        return _some(bodies, "data")
    if not data.startswith("@"):
        return [data.encode()]
    path = Path(data[1:])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"data={data!r}: cannot be read: {error.strerror}") from error
    if path.suffix in _LINES:
        return _some([line for line in content.removeprefix(BOM_UTF8).splitlines() if line.strip()], f"data={data!r}")
    return [content]


def _some(bodies: list[bytes], source: str) -> list[bytes]:
    if not bodies:
        raise SettingsError(f"{source}: must have at least one value")
    return bodies


def decode_items(bodies: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON bodies, for a model in this process. Raises SettingsError."""
    try:
        return [msgspec.json.decode(body) for body in bodies]
    except msgspec.DecodeError as error:
        raise SettingsError(f"data: must be JSON for a model in this process: {error}") from error


class InProcessTarget(Target):
    """Calls `Service.infer` of a service in this process, in the event loop that sends. There is no backpressure, so a full queue
    refuses requests as a server's does.

    Arguments:
        model: a class, a text such as module:Class, or a description that settings.py has read.
        data: as for HttpTarget.
        name: the name in tables; by default that of the service.
        settings: settings of Service.
        params: arguments for the model's constructor.
        timeout: seconds per request.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        model: str | ModelToServe | type[Model] | type[Service],
        data: str | Sequence[Any] | None = None,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = Metrics()
        own = {"timeout": timeout, **(settings or {}), "backpressure": False}
        self._service = _service(model, dict(params or {}), own, self._metrics)
        super().__init__(name or self._service.name, clock)
        items = _examples(self._service) if data is None else decode_items(read_payloads(data))
        self._items = [_input_of(self._service.facts.model, item) for item in items]

    async def open(self) -> None:
        """Start the workers, and check that they respond. Raises SettingsError."""
        await self._service.start()
        try:
            await self._service.infer(self._items[0])
        except WeirError as error:
            raise SettingsError(f"{self.name}: {type(error).__name__}: {error.message}") from error

    def send(self, index: int) -> None:
        """See Target."""
        items = self._items
        self.ledger.sent[index] = self._clock()
        self._service.infer(items[index % len(items)]).add_done_callback(partial(self._ended, index))

    def _ended(self, index: int, call: Call) -> None:
        error = call.exception()
        self.ledger.end(index, self._clock(), OK if error is None else type(error).__name__)

    async def counts(self) -> Counts | None:
        """Return what the service has reported to its observer."""
        page, _ = Exposition(self._metrics, lambda frontend, error: "").render()
        return read_counts(page.decode(), self._service.name)

    async def close(self) -> None:
        """Stop the workers."""
        await self._service.stop(0.0)


def _service(
    model: str | ModelToServe | type[Model] | type[Service],
    params: dict[str, Any],
    settings: dict[str, Any],
    metrics: Metrics,
) -> Service:
    if isinstance(model, str):
        model = ModelToServe(model, default_name(model), {}, [], {}, platform=platform_of_target(model))
    if isinstance(model, ModelToServe):
        model = model._replace(params={**model.params, **params}, settings={**model.settings, **settings})
        return make_service(model, [metrics])
    return new_service(model, params=params, observers=[metrics], **settings)


def _input_of(model: type[Model], item: Any) -> Any:
    """Return `item` as `Service.infer` takes it: arrays for a tensor model. Raises SettingsError if it does not fit."""
    if not is_tensor_model(model):
        return item
    try:
        return to_arrays(item, model.inputs)
    except InvalidRequest as error:
        raise SettingsError(f"data: {error.message}") from error


def _examples(service: Service) -> list[Any]:
    items = [each.item if isinstance(each, Example) else each for each in service.facts.model.examples]
    if not items:
        raise SettingsError(f"{service.name}: has no examples to send; give something with --data")
    return items
