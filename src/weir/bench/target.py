"""The contract of a target of load, the ledger of a round, the batches that a server counts, and the bodies that are sent: `--data`."""

import time
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from weir.errors import SettingsError

TIMES = ("queue", "predict")


# What a server has counted (floats, which a Counter takes too) since its start: "rows" in all batches, batches by "reason", the sum in "seconds" of each
# of TIMES, and how many "values" the sum has. The counts of a run are those at its end minus those at its start.
Counts = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Batches:
    """Tells how the requests of a run were batched, including those of the warm-up.

    Attributes:
        count: the number of batches.
        mean_rows: rows per batch.
        reasons: batches by the reason why they were cut.
        queue_time_ms: mean time of a request until its dispatch.
        predict_time_ms: mean time of a batch in `predict`.
    """

    count: int
    mean_rows: float
    reasons: dict[str, int]
    queue_time_ms: float
    predict_time_ms: float


def batches_of(counts: Counts) -> Batches:
    """Return the Batches that `counts` describe."""
    reasons = {label: round(number) for (what, label), number in counts.items() if what == "reason" and number}
    count = sum(reasons.values())
    means = {name: counts["seconds", name] / (counts["values", name] or 1) for name in TIMES}
    return Batches(
        count=count,
        mean_rows=counts["rows", ""] / count if count else 0.0,
        reasons=reasons,
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
    for sample in samples:
        name, value = sample.name.removeprefix(namespace), sample.value
        if name == "batches_total":
            counts["reason", sample.labels["reason"]] = value
        elif name in _SUMS:
            counts[_SUMS[name]] = value
    return counts


OK, TIMEOUT, UNSENT = "ok", "timeout", "unsent"


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
