"""What is measured: something that takes requests."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from weir.errors import SettingsError

# The batches of a run: what the server counted at its end, less what it had counted at its start.


TIMES = ("queue", "predict", "total")


@dataclass(frozen=True)
class Counts:
    """What a server has counted since its start: rows, batches by reason and by size (not cumulated), and of each time its
    sum in seconds and how many were summed."""

    rows: float = 0.0
    reasons: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[float, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1.0)

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1.0)

    def _with(self, other: "Counts", sign: float) -> "Counts":
        def joined(mine: Mapping[Any, float], others: Mapping[Any, float]) -> dict[Any, float]:
            return {key: mine.get(key, 0.0) + sign * others.get(key, 0.0) for key in {**mine, **others}}

        return Counts(
            self.rows + sign * other.rows, joined(self.reasons, other.reasons), joined(self.sizes, other.sizes),
            joined(self.seconds, other.seconds), joined(self.times, other.times),
        )  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """How the requests of a run were batched (warm-up included).

    `sizes` counts the batches of up to so many rows, and of more than the size before it; `reasons` says why they were
    cut. `queue_time_ms`, `predict_time_ms` and `total_time_ms` are means: of a request until dispatch, of a batch in
    `predict`, of a request in the server.
    """

    count: int
    mean_rows: float
    reasons: dict[str, int]
    sizes: dict[str, int]
    queue_time_ms: float
    predict_time_ms: float
    total_time_ms: float


def batches_of(counts: Counts) -> Batches:
    """Return `counts`, to be read."""
    count = sum(counts.reasons.values())
    return Batches(
        count=round(count),
        mean_rows=counts.rows / count if count else 0.0,
        reasons={reason: round(number) for reason, number in counts.reasons.items() if number},
        sizes={f"{size:g}": round(number) for size, number in sorted(counts.sizes.items()) if number},
        **{f"{name}_time_ms": _mean_ms(counts.seconds.get(name, 0.0), counts.times.get(name, 0.0)) for name in TIMES},
    )


def _mean_ms(seconds: float, number: float) -> float:
    return seconds / number * 1000.0 if number else 0.0


def read_counts(text: str, model: str) -> Counts:
    """Return what `/metrics` says of one model. Raises SettingsError if it does not."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("model") == model:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise SettingsError(f"/metrics cannot be read: {error}") from error
    sums = [name for name in samples if name.endswith("_batch_size_sum")]
    namespace = sums[0].removesuffix("_batch_size_sum") if sums else "weir"
    return Counts(
        rows=_sole(samples, f"{namespace}_batch_size_sum"),
        reasons={labels["reason"]: value for labels, value in samples.get(f"{namespace}_batches_total", [])},
        sizes=_sizes(samples.get(f"{namespace}_batch_size_bucket", [])),
        seconds={name: _sole(samples, f"{namespace}_{name}_time_seconds_sum") for name in TIMES},
        times={name: _sole(samples, f"{namespace}_{name}_time_seconds_count") for name in TIMES},
    )


def _sole(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in samples.get(name, []))


def _sizes(buckets: list[tuple[dict[str, str], float]]) -> dict[float, float]:
    """Undo the cumulation of a histogram."""
    sizes, before = {}, 0.0
    for bound, value in sorted((float(labels["le"]), value) for labels, value in buckets):
        sizes[bound] = value - before
        before = value
    return sizes


# The record of one round: for each request, when it was due, when it was sent, when it ended and how.


OK, TIMEOUT, UNSENT = "ok", "timeout", "unsent"
_RECENT = 512  # response times that the live figures are taken from


class Ledger:
    """A request is its index. All instants are seconds of one clock.

    `outcomes` has for each request the index of its outcome in `kinds`; 0 while it has none. `hear(index)` is called at
    each end.
    """

    def __init__(self, intended: Iterable[float] = (), hear: Callable[[int], None] | None = None) -> None:
        self.intended = array("d", intended)
        count = len(self.intended)
        self.sent = array("d", [nan]) * count
        self.ended = array("d", [nan]) * count
        self.outcomes = array("H", [0]) * count
        self.kinds = ["", OK]
        self.begun = 0  # requests that were handed to the target
        self.over = 0  # requests that have had their end
        self.failed = 0  # of these, the ones that were not answered well
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.hear = hear
        self._codes = {OK: 1}

    def add(self, intended: float) -> int:
        """Enter one more request, and return its index."""
        self.intended.append(intended)
        self.sent.append(nan)
        self.ended.append(nan)
        self.outcomes.append(0)
        return len(self.intended) - 1

    def end(self, index: int, now: float, outcome: str) -> None:
        """Note the end of a request: OK, or what went wrong in a few words. Each has one."""
        self.ended[index] = now
        self.over += 1
        code = self._codes.get(outcome)
        if code is None:
            code = self._codes[outcome] = len(self.kinds)
            self.kinds.append(outcome)
        self.outcomes[index] = code
        if code != 1:
            self.failed += 1
        self.recent.append(now - self.intended[index])
        if self.hear is not None:
            self.hear(index)

    @property
    def open(self) -> int:
        """How many requests were begun and have no end yet."""
        return self.begun - self.over


class Target(Protocol):
    """All methods are called from one event loop. `send` notes in the ledger of the round when the request left and, once
    it is so, how it ended; every request has an end, at the latest when `give_up` has been called for long enough."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    @property
    def connections(self) -> int | None:
        """How many connections were open at most; None where there are none."""

    @property
    def held(self) -> int:
        """How many requests had to wait for a connection, because no more were allowed."""

    async def open(self) -> None:
        """Get ready, and make sure that requests are answered. Raises SettingsError, in one line."""

    async def start_round(self, ledger: Ledger) -> None:
        """Get ready for a round, whose books are `ledger`."""

    def send(self, index: int) -> None:
        """Send the request `index` of the round."""

    def give_up(self) -> None:
        """End what has been under way for too long. Called some twenty times a second."""

    async def counts(self) -> Counts | None:
        """Return what has been counted so far; None if it cannot be known."""

    async def close(self) -> None:
        """Leave nothing open. Idempotent."""


class LedgerTarget:
    """What targets have in common: they report to the ledger of the round. By default no request waits for a connection, none is given up
    here, and nobody counts batches."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self._ledger = Ledger()

    @property
    def held(self) -> int:
        """How many requests had to wait because no more connections were allowed."""
        return 0

    async def start_round(self, ledger: Ledger) -> None:
        """Report to `ledger` from now on."""
        self._ledger = ledger

    def give_up(self) -> None:
        """Do nothing: each request has an end by itself."""

    async def counts(self) -> Counts | None:
        """Return None: it cannot be known."""
        return None
