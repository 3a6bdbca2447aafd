"""How large the batches of a model of texts should be on this machine: measured once, and kept.

On CPUs the best is often one text at a time, on GPUs thousands of tokens. A worker like those that will serve is measured for a few seconds at the
first start with this model on this machine. Sizes take turns, so that what goes on beside them for a second makes none of them alone look slow. What
else a machine does only adds to a time: so the least one counts, and it is believed once another one is close to it.
"""

import hashlib
import json
import logging
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.embedding.texts import Tokens
from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.profiling.machine import cpu_name
from weir.serving.service import Service
from weir.telemetry.recorder import SilentObserver
from weir.workers.process.launch import available_cpus

SHORTEST = 8  # tokens of a short text: so many times may a batch have fewer texts than tokens
MAX_ROWS = 256
GOOD_ENOUGH = 0.97  # of the best throughput: the smallest batch that reaches it makes callers wait least
LITTLE = 1 / 16  # of a batch is its price whatever was measured: a batch costs the server something too
PADDING = 0.5  # of the price of a batch may be padding: with it texts cost least (`python -m benchmarks padding`)
# What a batch costs the server besides: to cut it, to send it, to hand out its answers. It has the CPU of its workers.
SERVER_SECONDS = 3e-4
NEAR = 4  # times the budget: the sizes from which the price of a batch is learned


class Timed(NamedTuple):
    """So many texts, filled up to this length, took so many seconds in one batch; so many of their tokens were padding."""

    rows: int
    length: int
    seconds: float
    padding: int = 0


@dataclass(frozen=True)
class Budget:
    """What a batch may be. `max_batch_cost` is in tokens, padding included; `max_padding` is half of what a batch costs beyond its tokens, as tokens;
    `padding_cost` is the share of a token's time that padding takes; `tokens_per_second` is what one worker then reaches, 0 if that is not known."""

    max_batch_cost: float
    max_batch_size: int
    max_padding: float
    tokens_per_second: float
    padding_cost: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Return the settings of a service that has it."""
        values = asdict(self)
        del values["tokens_per_second"]
        return {"padded": True, **values}


def choose(measured: Sequence[Timed]) -> Budget:
    """Return the smallest budget with which short texts and long ones, as many tokens of each, are computed about as fast as with any."""
    even = [timed for timed in measured if not timed.padding]
    budgets = sorted({timed.rows * timed.length for timed in even})
    speeds = {budget: _speed(even, budget, SERVER_SECONDS) for budget in budgets}
    best = max(speeds.values())
    budget = next(budget for budget in budgets if speeds[budget] >= GOOD_ENOUGH * best)
    price, padding_cost = _prices(measured, budget)
    return Budget(
        max_batch_cost=float(budget),
        max_batch_size=min(MAX_ROWS, max(1, budget // SHORTEST)),
        max_padding=round(PADDING * min(max(price, LITTLE * budget), budget / 2), 1),
        tokens_per_second=round(_speed(even, budget), 1),
        padding_cost=padding_cost,
    )


def safe(tokens: int) -> Budget:
    """Return a cautious budget of so many tokens: padding counts in full."""
    return Budget(
        max_batch_cost=float(tokens),
        max_batch_size=min(MAX_ROWS, max(1, tokens // SHORTEST)),
        max_padding=PADDING * LITTLE * tokens,
        tokens_per_second=0.0,
    )


def _speed(measured: Iterable[Timed], budget: int, besides: float = 0.0) -> float:
    """Return the tokens per second within `budget`, over all lengths, where each batch takes so many seconds `besides`: a text that is
    longer goes alone."""
    by_length: dict[int, list[Timed]] = {}
    for timed in measured:
        by_length.setdefault(timed.length, []).append(timed)
    seconds = 0.0
    for length, timings in by_length.items():
        fitting = [timed for timed in timings if timed.rows == 1 or timed.rows * length <= budget]
        chosen = max(fitting, key=lambda timed: timed.rows)
        seconds += (chosen.seconds + besides) / (chosen.rows * length)
    return len(by_length) / seconds


def _prices(measured: Iterable[Timed], budget: int) -> tuple[float, float]:
    """Return what a batch costs whatever is in it, in tokens, and the share of a token's time that padding takes, 1 where none was measured: seconds
    are fitted as a + b * tokens + c * padding, each point by its relative error."""
    near = [timed for timed in measured if timed.padding or timed.rows * timed.length <= NEAR * budget]
    seconds = np.array([timed.seconds for timed in near])
    padding = np.array([timed.padding for timed in near], float)
    tokens = np.array([timed.rows * timed.length for timed in near], float) - padding
    columns = np.stack([1 / seconds, tokens / seconds, padding / seconds], axis=1)
    fixed, each, beside = np.linalg.lstsq(columns, np.ones(len(near)), rcond=None)[0]
    if each <= 0:
        return 0.0, 1.0
    share = min(max(beside / each, 0.0), 1.0) if padding.any() else 1.0
    return max(0.0, float(fixed / each)), round(float(share), 3)


MOST_TOKENS = 32_768  # in a batch
LONGEST_SECONDS = 0.15  # a size that takes longer is the last of its length
CLEARLY_WORSE = 0.85  # of the best throughput: after two sizes below that, larger ones are not tried
LEAST_TIMES, MOST_TIMES = 4, 6  # a size is measured
TWICE = 2  # what takes long is measured, and everything after so many seconds in all
MOST_SECONDS = 10.0
CLOSE = 0.1  # the two least times of a size, as a share of the least, or by what a batch costs the server: less does not matter
DOUBTED = 0.25  # of the sizes may have no two times that are close


class Size(NamedTuple):
    """So many texts, of which `shorter` have a quarter of the length."""

    rows: int
    length: int
    shorter: int = 0

    @property
    def lengths(self) -> list[int]:
        """The length of each text."""
        return [self.length] * (self.rows - self.shorter) + [max(1, self.length // 4)] * self.shorter

    @property
    def padding(self) -> int:
        """The padding in a rectangle of them, in tokens."""
        return self.rows * self.length - sum(self.lengths)


class MeasuringRounds:
    """Batches of 1, 2, 4 ... texts of each length, as far as they get faster; with `mixed` also one for each length of which most texts are shorter."""

    def __init__(self, lengths: Sequence[int], *, mixed: bool) -> None:
        self._lengths = lengths
        self._mixed = mixed
        self._times: defaultdict[Size, list[float]] = defaultdict(list)
        self._spent = 0.0

    def note(self, size: Size, seconds: float) -> None:
        """A batch of this size has taken so long."""
        self._times[size] = sorted([*self._times[size], max(seconds, 1e-9)])
        self._spent += seconds

    def due(self) -> list[Size]:
        """Return the sizes of the next round; none if all is known that will be."""
        return [size for length in self._lengths for size in self._wanted(length) if self._is_due(size)]

    @property
    def agree(self) -> bool:
        """Whether what was measured can be believed."""
        sizes = self._sizes()
        return sum(not self._is_close(size) for size in sizes) <= DOUBTED * len(sizes)

    @property
    def share(self) -> float:
        """How much of it is done, as far as one can tell."""
        times = [len(self._times[size]) for length in self._lengths for size in self._wanted(length)]
        return sum(min(count, LEAST_TIMES) for count in times) / (
            LEAST_TIMES * len(self._lengths) * (MAX_ROWS.bit_length() + 1)
        )

    def timed(self) -> list[Timed]:
        """Return the least time of each size."""
        return [Timed(size.rows, size.length, self._times[size][0], size.padding) for size in self._sizes()]

    def _sizes(self) -> list[Size]:
        return [size for length in self._lengths for size in self._wanted(length) if self._times[size]]

    def _is_due(self, size: Size) -> bool:
        times = self._times[size]
        if len(times) < TWICE:
            return True
        if self._spent >= MOST_SECONDS:
            return False
        if len(times) < LEAST_TIMES and times[0] < LONGEST_SECONDS:
            return True
        return len(times) < MOST_TIMES and not self._is_close(size)

    def _is_close(self, size: Size) -> bool:
        least, second = self._times[size][:2]
        return second - least <= max(CLOSE * least, SERVER_SECONDS)

    def _wanted(self, length: int) -> list[Size]:
        """Return the sizes of this length that are worth knowing, by what is known; the last may be new."""
        found: list[Size] = []
        best, worse, rows = 0.0, 0, 1
        while worse < 2 and rows <= MAX_ROWS and rows * length <= max(MOST_TOKENS, length):
            size = Size(rows, length)
            found.append(size)
            if not self._times[size]:
                return found
            least = self._times[size][0]
            if least >= LONGEST_SECONDS:
                break
            worse = worse + 1 if rows * length / least < CLEARLY_WORSE * best else 0
            best = max(best, rows * length / least)
            rows *= 2
        if self._mixed:
            most = max(2, found[-1].rows)
            found.append(Size(most, length, most - max(1, most // 8)))
        return found


VERSION = 4  # of the way of measuring: what was found otherwise is measured anew
LENGTHS = (16, 64, 256)  # of texts: a sentence, a paragraph, a page

MOST_KEPT = 1000  # measurements; those that were used least recently go

logger = logging.getLogger("weir")

Progress = Callable[[float, str], None]


def nothing(share: float, what: str) -> None:
    """Show no progress."""


class _BatchTimer(SilentObserver):
    """Remembers how long the last batch took, to its worker and back."""

    seconds = 0.0

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        self.seconds = dispatch.seconds


async def budget_for(
    model: type[Model], params: Mapping[str, Any], *, identity: Mapping[str, Any], max_length: int, folder: Path,
    safe_tokens: int, fixed: bool = False, vocabulary: int = 100, progress: Progress = nothing, **settings: Any,
) -> Budget:  # fmt: skip
    """Return the best batches of `model` on this machine: what `folder` has kept, else measured now.

    `params` are the model's, but for those that cut batches into runs: it has to run each batch as one. `identity`, a JSON-able dict, says what is
    measured: the hash of the model's content, what is computed of it, on what. Ids of tokens are below `vocabulary`, texts at
    most `max_length` long, or with `fixed` all so long. What was measured while the machine did other things is neither used nor kept: batches
    of `safe_tokens` are the answer then. `settings` are those of workers. `progress` is told a share and what is measured. Raises what the start of the
    model's worker raises. A folder that cannot be written to is no failure: it is measured again the next time.
    """
    kept = folder / f"{_key(identity)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        budget = Budget(**json.loads(kept.read_text())["budget"])
        with suppress(OSError):  # of another user
            os.utime(kept)
        return budget
    lengths = [] if fixed else [length for length in LENGTHS if length <= max_length]
    sizes = lengths or [max_length]
    progress(0.0, "starting a worker")  # which makes the graph, if there is none yet
    rounds = await _measure(
        model, params, MeasuringRounds(sizes, mixed=not fixed), sizes[-1], vocabulary, progress, settings
    )
    if not rounds.agree:
        logger.warning(
            "the machine did other things while batches were measured: of %s tokens until they are measured at the next start",
            safe_tokens,
        )
        return safe(safe_tokens)
    measured = rounds.timed()
    budget = choose(measured)
    _keep(kept, {"budget": asdict(budget), "identity": dict(identity), "measured": measured})
    return budget


def _key(identity: Mapping[str, Any]) -> str:
    """Name what was measured, and where."""
    decides = [VERSION, dict(identity), platform.machine(), cpu_name(), len(available_cpus()), _version()]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _version() -> str:
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return ""


def _keep(file: Path, found: dict[str, Any]) -> None:
    made = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(found))
        os.replace(made, file)
        for old in sorted(file.parent.iterdir(), key=_used)[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


async def _measure(
    model: type[Model], params: Mapping[str, Any], rounds: MeasuringRounds, longest: int, vocabulary: int, progress: Progress,
    settings: dict[str, Any],
) -> MeasuringRounds:  # fmt: skip
    """Fill `rounds`, and return them."""
    heard = _BatchTimer()
    chosen: dict[str, Any] = {
        "max_batch_size": MAX_ROWS, "max_queue_size": 2 * MAX_ROWS, "timeout": 600.0, "policy": "greedy",
        "workers": 1, "pipeline_depth": 1, "padded": False,
    }  # fmt: skip
    async with Service(model, params=dict(params), observers=[heard], **(settings | chosen)) as service:
        progress(0.0, "warming up")
        await _run(service, Size(1, longest), vocabulary)
        seed = 0
        while due := rounds.due():
            for size in due:
                progress(rounds.share, _told(size))
                seed += 1
                await _run(service, size, vocabulary, seed)
                rounds.note(size, heard.seconds)
    progress(1.0, "done")
    return rounds


async def _run(service: Service, size: Size, vocabulary: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    texts = [random.integers(0, vocabulary, length, np.int32).astype("<i4") for length in size.lengths]
    await service.infer_many([Tokens(text.tobytes()) for text in texts])


def _told(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens" + (f", {size.shorter} of them shorter" if size.shorter else "")
