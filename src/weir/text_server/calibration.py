"""Measure how large the batches of a text model should be on this machine, once, and keep the result.

On CPUs the best batch is often one text, on GPUs thousands of tokens. At the first start with a model on a machine, a worker like those that will serve
is measured for a few seconds. Batches of different sizes take turns, so that a disturbance of a second does not make one size alone look slow. The least
time of a size counts, and it is trusted once a second one is close to it.

Where one thread computes, its processor time is measured. By the clock, other work would lengthen most the times of large batches, which never end before
the kernel gives their CPU to another process: small batches would seem best, again and again. Where several threads or a GPU compute, only the clock tells
how long a batch takes; then the measurement is trusted only if the processes hardly waited for CPUs.
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
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.profiling.machine import cpu_name
from weir.profiling.sampling import CROWDED, Contention
from weir.serving.service import Service
from weir.telemetry.recorder import SilentObserver
from weir.text_models.texts import EncodedImage, Tokens
from weir.workers.cpus import cpu_count
from weir.workers.process.entry import cpu_times
from weir.workers.settings import ONE_WORKER

SHORT_TEXT = 8  # tokens; max_batch_size is that many times less than max_batch_cost
MAX_ROWS = 256  # the largest max_batch_size
GOOD_ENOUGH = 0.97  # of the best throughput is a tie; of those the smallest batch is chosen, as callers then wait least
MIN_BATCH_PRICE = 1 / 16  # of max_batch_cost; a batch is taken to cost at least that beyond its tokens
PADDING_SHARE = 0.5  # of the price of a batch may be padding; texts are then cheapest (`python -m benchmarks padding`)
# The server's work for each batch: to form it, to send it and to distribute its responses. The server runs on the same CPUs as the workers.
SERVER_SECONDS = 3e-4
FIT_RANGE = 4  # the price of a batch is fitted to batches of at most this many times the budget


class Timed(NamedTuple):
    """A measurement: a batch of `rows` texts, padded to `length` tokens with `padding` tokens of padding in all, took `seconds`."""

    rows: int
    length: int
    seconds: float
    padding: int = 0


@dataclass(frozen=True)
class Budget:
    """The limits of a batch.

    Attributes:
        max_batch_cost: the most tokens, padding included.
        max_batch_size: the most texts.
        max_padding: the most tokens of padding: half of what a batch costs beyond its tokens, in tokens.
        tokens_per_second: the throughput of one worker with such batches; 0 if unknown.
        padding_cost: the time that a token of padding takes, as a share of that of another token.
    """

    max_batch_cost: float
    max_batch_size: int
    max_padding: float
    tokens_per_second: float
    padding_cost: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Return the settings of a service with this budget."""
        values = asdict(self)
        del values["tokens_per_second"]
        return {"padded": True, **values}


def choose(measured: Sequence[Timed]) -> Budget:
    """Return the smallest budget whose throughput is at least GOOD_ENOUGH of the best, for a load with equally many tokens of each length."""
    unpadded = [timed for timed in measured if not timed.padding]
    budgets = sorted({timed.rows * timed.length for timed in unpadded})
    speeds = {budget: _speed(unpadded, budget, SERVER_SECONDS) for budget in budgets}
    best = max(speeds.values())
    budget = next(budget for budget in budgets if speeds[budget] >= GOOD_ENOUGH * best)
    price, padding_cost = _prices(measured, budget)
    return Budget(
        max_batch_cost=float(budget),
        max_batch_size=min(MAX_ROWS, max(1, budget // SHORT_TEXT)),
        max_padding=round(PADDING_SHARE * min(max(price, MIN_BATCH_PRICE * budget), budget / 2), 1),
        tokens_per_second=round(_speed(unpadded, budget), 1),
        padding_cost=padding_cost,
    )


def cautious_budget(tokens: int) -> Budget:
    """Return a budget of `tokens` for a machine that could not be measured: padding takes as long as other tokens."""
    return Budget(
        max_batch_cost=float(tokens),
        max_batch_size=min(MAX_ROWS, max(1, tokens // SHORT_TEXT)),
        max_padding=PADDING_SHARE * MIN_BATCH_PRICE * tokens,
        tokens_per_second=0.0,
    )


def _speed(measured: Iterable[Timed], budget: int, overhead: float = 0.0) -> float:
    """Return the tokens per second with batches of at most `budget` tokens, for equally many tokens of each length.

    Each batch takes `overhead` seconds in addition to what was measured. A text that is longer than the budget is a batch of its own.
    """
    by_length: dict[int, list[Timed]] = {}
    for timed in measured:
        by_length.setdefault(timed.length, []).append(timed)
    seconds = 0.0
    for length, timings in by_length.items():
        fitting = [timed for timed in timings if timed.rows == 1 or timed.rows * length <= budget]
        chosen = max(fitting, key=lambda timed: timed.rows)
        seconds += (chosen.seconds + overhead) / (chosen.rows * length)
    return len(by_length) / seconds


def _prices(measured: Iterable[Timed], budget: int) -> tuple[float, float]:
    """Return the price of a batch beyond its tokens, in tokens, and the time of a token of padding as a share of that of another token.

    The model seconds = a + b · tokens + c · padding is fitted by least squares of relative errors; the results are a / b and c / b. Without
    measurements of padding its share is 1.
    """
    near = [timed for timed in measured if timed.padding or timed.rows * timed.length <= FIT_RANGE * budget]
    seconds = np.array([timed.seconds for timed in near])
    padding = np.array([timed.padding for timed in near], float)
    tokens = np.array([timed.rows * timed.length for timed in near], float) - padding
    columns = np.stack([1 / seconds, tokens / seconds, padding / seconds], axis=1)
    fixed, each, padding_each = np.linalg.lstsq(columns, np.ones(len(near)), rcond=None)[0]
    if each <= 0:
        return 0.0, 1.0
    share = min(max(padding_each / each, 0.0), 1.0) if padding.any() else 1.0
    return max(0.0, float(fixed / each)), round(float(share), 3)


MAX_TOKENS = 32_768  # of a batch
LONGEST_SECONDS = 0.15  # no larger batch of the same length is measured after one that took longer
CLEARLY_WORSE = 0.85  # of the best throughput; after two sizes in a row below that, no larger one is measured
MIN_TIMES, MAX_TIMES = 4, 6  # how many times a size is measured
SLOW_TIMES = 2  # how many times a size above LONGEST_SECONDS is measured, and every size once MAX_SECONDS have passed
MAX_SECONDS = 10.0  # of all measurements
CLOSE = 0.1  # the two least times of a size are close if they differ by at most this share, or by SERVER_SECONDS
MAX_DOUBTFUL = 0.25  # the share of sizes without two close times above which the measurement is not reliable


class Size(NamedTuple):
    """The size of a batch: `rows` texts of `length` tokens, except that `shorter` of them have a quarter of that length."""

    rows: int
    length: int
    shorter: int = 0

    @property
    def lengths(self) -> list[int]:
        """The length of each text, in tokens."""
        return [self.length] * (self.rows - self.shorter) + [max(1, self.length // 4)] * self.shorter

    @property
    def padding(self) -> int:
        """The padding of the batch, in tokens."""
        return self.rows * self.length - sum(self.lengths)


class MeasuringRounds:
    """Decides which sizes of batches to measure, and collects the times.

    For each of `lengths`, in tokens, the sizes are 1, 2, 4 ... texts, until larger batches have a clearly lower throughput. With `mixed` there is one
    more size for each length, in which most texts are shorter, to measure padding.
    """

    def __init__(self, lengths: Sequence[int], *, mixed: bool) -> None:
        self._lengths = lengths
        self._mixed = mixed
        self._times: defaultdict[Size, list[float]] = defaultdict(list)
        self.spent = 0.0  # seconds that passed during the batches

    def note(self, size: Size, seconds: float, passed: float | None = None) -> None:
        """Add a measurement: a batch of this size took so many seconds, and so many passed, if these are not the same."""
        self._times[size] = sorted([*self._times[size], max(seconds, 1e-9)])
        self.spent += seconds if passed is None else passed

    def due(self) -> list[Size]:
        """Return the sizes to measure next, each once; empty if the measurement is complete."""
        return [size for length in self._lengths for size in self._sizes_of(length) if self._is_due(size)]

    @property
    def doubtful(self) -> float:
        """The share of the sizes without two close times; beyond MAX_DOUBTFUL the measurement cannot be trusted."""
        sizes = self._sizes()
        return sum(not self._is_close(size) for size in sizes) / len(sizes)

    @property
    def share(self) -> float:
        """The estimated share of the measurement that is done, from 0 to 1."""
        times = [len(self._times[size]) for length in self._lengths for size in self._sizes_of(length)]
        return sum(min(count, MIN_TIMES) for count in times) / (
            MIN_TIMES * len(self._lengths) * (MAX_ROWS.bit_length() + 1)
        )

    def timed(self) -> list[Timed]:
        """Return each size with its least time."""
        return [Timed(size.rows, size.length, self._times[size][0], size.padding) for size in self._sizes()]

    def _sizes(self) -> list[Size]:
        return [size for length in self._lengths for size in self._sizes_of(length) if self._times[size]]

    def _is_due(self, size: Size) -> bool:
        times = self._times[size]
        if len(times) < SLOW_TIMES:
            return True
        if self.spent >= MAX_SECONDS:
            return False
        if len(times) < MIN_TIMES and times[0] < LONGEST_SECONDS:
            return True
        return len(times) < MAX_TIMES and not self._is_close(size)

    def _is_close(self, size: Size) -> bool:
        least, second = self._times[size][:2]
        return second - least <= max(CLOSE * least, SERVER_SECONDS)

    def _sizes_of(self, length: int) -> list[Size]:
        """Return the sizes of this length that are worth measuring, by the times so far. The last one may not have been measured."""
        found: list[Size] = []
        best, worse, rows = 0.0, 0, 1
        while worse < 2 and rows <= MAX_ROWS and rows * length <= max(MAX_TOKENS, length):
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


VERSION = 5  # of the method. Raise it with each change of the method, so that kept results are measured again
LENGTHS = (16, 64, 256)  # tokens of texts: a sentence, a paragraph, a page

MAX_KEPT = 1000  # results; the least recently used ones are removed

logger = logging.getLogger("weir")

Progress = Callable[[float, str], None]  # called with the share that is done, from 0 to 1, and what is being measured


def no_progress(share: float, what: str) -> None:
    """Show no progress."""


class _BatchTimer(SilentObserver):
    """Remembers how many seconds passed during the last batch, from its dispatch to its response."""

    seconds = 0.0

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        self.seconds = dispatch.seconds


class TextsToMeasure(NamedTuple):
    """The texts of which batches are measured: of up to `max_length` tokens, or all of as many if `fixed`; token ids are below `vocabulary`. With `image`, the
    bytes of an image file, they are images of `max_length` tokens instead."""

    max_length: int
    fixed: bool = False
    vocabulary: int = 100
    image: bytes = b""

    def items(self, size: "Size", seed: int) -> list[Tokens | EncodedImage]:
        """Return the items of a batch of this size. Those of texts depend on `seed`."""
        if self.image:
            return [EncodedImage(self.image, size.length)] * size.rows
        random = np.random.default_rng(seed)
        ids = [random.integers(0, self.vocabulary, length, np.int32).astype("<i4") for length in size.lengths]
        return [Tokens(each.tobytes()) for each in ids]


class Measurement(NamedTuple):
    """The measurements to be made, and how.

    Attributes:
        model: the class of the model.
        params: its parameters. They must make it run each batch at once.
        texts: the texts of its batches.
        identity: what is measured, as JSON: the hash of the model's content, the recipe, the runtime and so on. Together with the hardware it is the
            key of the result.
        safe_tokens: the budget, in tokens, after a disturbed measurement.
        settings: settings of the workers that will serve, see Service. The worker that measures has them too, except those
            for several workers and `ray_detached`.
        in_one_thread: whether the main thread of a worker computes all of a batch.
        progress: called with the progress.
    """

    model: type[Model]
    params: Mapping[str, Any]
    texts: TextsToMeasure
    identity: Mapping[str, Any]
    safe_tokens: int
    settings: Mapping[str, Any] = MappingProxyType({})
    in_one_thread: bool = False
    progress: Progress = no_progress


async def budget_for(wanted: Measurement, folder: Path) -> Budget:
    """Return the best limits of a batch on this machine: the result kept in `folder`, or else measured now and kept.

    If other work on the machine disturbed the measurement, a cautious budget of `safe_tokens` is returned, and kept with how uncertain the measurement
    is: the next start would take as long, on a machine as busy. If `folder` cannot be written, the next start measures again.

    Raises the error with which the worker fails to start.
    """
    texts, identity = wanted.texts, dict(wanted.identity)
    kept = folder / f"{_key(identity)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        result = json.loads(kept.read_text())
        budget = Budget(**result["budget"])
        with suppress(OSError):  # the file may belong to another user
            os.utime(kept)
        if uncertainty := result.get("uncertainty"):
            logger.info(_UNCERTAIN, budget.max_batch_cost, *uncertainty, kept)
        return budget
    lengths = [] if texts.fixed else [length for length in LENGTHS if length <= texts.max_length]
    sizes = lengths or [texts.max_length]
    wanted.progress(0.0, "starting a worker, which builds the graph")
    rounds = MeasuringRounds(sizes, mixed=not texts.fixed)
    waited = await _measure(wanted, rounds, sizes[-1])
    measured, doubtful = rounds.timed(), rounds.doubtful
    uncertain = waited > CROWDED or doubtful > MAX_DOUBTFUL
    budget = cautious_budget(wanted.safe_tokens) if uncertain else choose(measured)
    result = {"budget": asdict(budget), "identity": identity, "measured": measured}
    if uncertain:
        result["uncertainty"] = percent = [round(100 * doubtful, 1), round(100 * waited, 1)]
        logger.warning(_UNCERTAIN, wanted.safe_tokens, *percent, kept)
    _keep(kept, result)
    return budget


_UNCERTAIN = (
    "other work disturbed the measurement of batches, so they have %.0f tokens: the times of %s %% of the sizes differ, and "
    "processes waited for CPUs for %s %% of the time; to measure again, delete %s"
)


def _key(identity: dict[str, Any]) -> str:
    """Return a hash of what is measured, the method, the hardware and onnxruntime's version."""
    decides = [VERSION, identity, platform.machine(), cpu_name(), cpu_count(), _version()]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _version() -> str:
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return ""


def _keep(file: Path, result: dict[str, Any]) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(result))
        os.replace(temporary, file)
        for old in sorted(file.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-MAX_KEPT]:
            old.unlink(missing_ok=True)


async def _measure(wanted: Measurement, rounds: MeasuringRounds, longest: int) -> float:
    """Measure all sizes that `rounds` asks for, on batches of random token ids. Return the share of the time that was lost to other work, as far as it counts."""
    timer, texts, progress = _BatchTimer(), wanted.texts, wanted.progress
    chosen: dict[str, Any] = {
        "max_batch_size": MAX_ROWS,
        "max_queue_size": 2 * MAX_ROWS,
        "timeout": 600.0,
        "policy": "greedy",
        **ONE_WORKER,
        "pipeline_depth": 1,
        "padded": False,
        "device_group": None,
        "ray_detached": None,
    }
    async with Service(
        wanted.model, params=dict(wanted.params), observers=[timer], **{**wanted.settings, **chosen}
    ) as service:
        progress(0.0, "warming up")
        await service.infer_many(texts.items(Size(1, longest), 0))
        pid = service.control.state(brief=True)["workers"][0]["pid"]
        counted = wanted.in_one_thread and pid is not None and cpu_times(pid)[0] > 0
        contention = Contention([] if pid is None else [os.getpid(), pid])
        waited = contention.look()
        seed = 0
        while due := rounds.due():
            for size in due:
                progress(rounds.share, _description(size))
                seed += 1
                before = cpu_times(pid)[0] if counted else 0.0
                await service.infer_many(texts.items(size, seed))
                rounds.note(size, cpu_times(pid)[0] - before if counted else timer.seconds, timer.seconds)
        lost = 0.0 if counted else contention.since(waited) / rounds.spent
    progress(1.0, "done")
    return lost


def _description(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens" + (f", {size.shorter} of them shorter" if size.shorter else "")
