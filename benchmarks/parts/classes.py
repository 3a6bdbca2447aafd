"""Interactive texts beside a job of 20,000: what the job adds to them, and what it gets of the idle time. Here in virtual time, with the real batcher; with
real servers in classes_live.py.

The interactive texts arrive as the requests of a real chat service did, and have as many tokens as those had. They bring one worker to half of what it can
serve. The job keeps JOB_WAITING texts waiting until it is done.

On a CPU the job runs in a worker of its own, which has the processor only while the other worker computes nothing: an interactive text stops it at once,
and it goes on afterwards. That costs nothing here, and the processor's caches are not in it: what they cost is to be seen live. On a GPU there is one
worker for both, and a bulk batch runs to its end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result import Part, Result, Run
from benchmarks.parts.classes_live import STEPS, Texts, measure_live
from weir.batching import BatchingSettings
from weir.messages import Dispatch
from weir.policy.decision import Greedy
from weir.simulation.engine import Engine, LogPart, SimulatedModel, SimulatedRequest, SimulatedWorkers

Floats = NDArray[np.float64]

TRACES = Path(__file__).parents[1] / "policies" / "traces"
LOAD = 0.5
TEXTS = 20_000
FIXED, PER_TOKEN = 0.001, 20e-6  # seconds of a batch: about those of a small model on one core
ROWS, JOB_WAITING = 64, 256
BULK_DELAY = 0.01  # seconds
INFINITY_ROWS, INFINITY_BATCHES = 32, 4  # infinity sorts up to four batches of 32 by length
CHUNK = (128, 256)  # tokens of the texts of a job, from and to
WEIR, WEIR_ON_GPU, FIFO, INFINITY = "Weir", "Weir on a GPU", "FIFO", "infinity's rule"
MOST_ABOVE, MOST_SECONDS, LEAST_USED = 0.05, 0.002, 0.8


class Traffic(NamedTuple):
    """Interactive texts: when they arrive, in seconds, and their tokens; shape (texts,)."""

    times: Floats
    tokens: Floats


class Seen(NamedTuple):
    """What came of a run: the response times of the interactive texts in their order, and when each text of the job was done, in seconds."""

    responses: Floats
    done: Floats


def traffic() -> Traffic:
    """Return the trace at LOAD."""
    times = np.loadtxt(TRACES / "azure-conv.csv", skiprows=1)
    tokens = np.loadtxt(TRACES / "azure-conv-tokens.csv", skiprows=1)
    work = float((FIXED + PER_TOKEN * tokens).sum())
    return Traffic(times * work / LOAD / times[-1], tokens)


def seconds_of(tokens: float) -> float:
    """Return how long a batch of so many tokens takes without padding, which is in favour of those who do not batch by length."""
    return FIXED + PER_TOKEN * tokens


class Line:
    """Says how long a batch of the engine takes: by its cost, padding included."""

    def of(self, cut: Dispatch) -> float:
        """Return the seconds."""
        return FIXED + PER_TOKEN * cut.cost


class TextRequest(SimulatedRequest):
    """A text of so many `tokens`; one of the job if its number is negative."""

    __slots__ = ()

    def __init__(self, number: int, arrival: float, tokens: float) -> None:
        super().__init__(number, arrival, priority=-1 if number < 0 else 0)
        self.form = self.form.replaced(cost=tokens)


class IdleTimeWorkers(SimulatedWorkers):
    """Workers with `bulk_workers` further ones for bulk work alone. These run on the processors that the others, one on each, leave, in equal shares: a
    processor that has something else to do stops them at once.
    """

    def __init__(self, ready: int = 1, bulk_workers: int = 1) -> None:
        super().__init__(ready)
        self._bulk_workers = bulk_workers
        self._processors = ready  # those that no other worker uses now
        self._left: dict[int, float] = {}  # by batch id: seconds on a processor of its own until its end
        self._begun: dict[int, tuple[Dispatch, float]] = {}
        self._at = 0.0
        self._plans = 0  # ends of bulk batches that were planned; only the last plan holds

    def serve(self, model: SimulatedModel) -> None:
        """See SimulatedWorkers."""
        super().serve(model)
        for worker in range(self.ready, self.ready + self._bulk_workers):
            model.batcher.worker_ready(worker, 1, 0.0, bulk=True)

    @property
    def _speed(self) -> float:
        """How fast each batch gets on, compared with one that has a processor of its own."""
        return min(1.0, self._processors / max(1, len(self._left)))

    def _get_on(self, now: float) -> None:
        """Let the batches get on until `now`, at which the number of free processors or of batches changes."""
        done = self._speed * (now - self._at)
        self._left = {number: left - done for number, left in self._left.items()}
        self._at = now

    def _plan(self, model: SimulatedModel) -> None:
        """Plan the next end of a bulk batch. One that was planned before is forgotten when its instant comes."""
        self._plans += 1
        if self._left and self._speed:
            number, left = min(self._left.items(), key=lambda item: item[1])
            at = self._at + max(0.0, left) / self._speed
            model.engine.schedule(at, partial(self._bulk_end, model, number, self._plans), first=True)

    def begin(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._get_on(model.engine.now)
        if cut.gives_way:
            self._left[cut.batch_id] = model.times.of(cut)
            self._begun[cut.batch_id] = cut, model.engine.now
        else:
            self._processors -= 1
            super().begin(model, cut)
        self._plan(model)

    def end(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._get_on(model.engine.now)
        self._processors += 1
        self._plan(model)
        super().end(model, cut)

    def _bulk_end(self, model: SimulatedModel, number: int, plan: int) -> None:
        if plan != self._plans:
            return
        now = model.engine.now
        self._get_on(now)
        del self._left[number]
        cut, start = self._begun.pop(number)
        model.log.started(cut, start, now)
        self._plan(model)
        model.take_back(cut)


def by_weir(texts: Traffic, job: Sequence[float], *, bulk_workers: int = 1) -> Seen:
    """Run both through the batcher, with so many workers for the job alone."""
    parts: list[LogPart] = []
    settings = BatchingSettings(
        max_batch_size=ROWS,
        max_queue_delay=inf,
        max_queue_size=1 << 30,
        padded=True,
        max_padding=FIXED / PER_TOKEN / 2,
        bulk_delay=BULK_DELAY,
    )
    bulk = (TextRequest(-1 - number, 0.0, tokens) for number, tokens in enumerate(job))
    workers = IdleTimeWorkers(bulk_workers=bulk_workers)
    model = SimulatedModel(Engine(), settings, Greedy(), Line(), parts.append, workers, bulk=bulk)
    pairs = zip(texts.times.tolist(), texts.tokens.tolist(), strict=True)
    model.accept(TextRequest(index, at, tokens) for index, (at, tokens) in enumerate(pairs))
    model.engine.finish()
    index, end = (np.concatenate([getattr(part, name) for part in parts]) for name in ("request", "end"))
    responses = np.empty(len(texts.times))
    interactive = index >= 0
    responses[index[interactive]] = end[interactive] - texts.times[index[interactive]]
    return Seen(responses, np.sort(end[~interactive]))


Waiting = deque[tuple[int, float]]  # number of the text, negative for the job, and its tokens
Rule = Callable[[Waiting], list[list[tuple[int, float]]]]


def first_come(waiting: Waiting) -> list[list[tuple[int, float]]]:
    """Return one batch, in the order of arrival."""
    return [[waiting.popleft() for _ in range(min(ROWS, len(waiting)))]]


def like_infinity(waiting: Waiting) -> list[list[tuple[int, float]]]:
    """Return the next batches as infinity_emb's queue makes them: the oldest texts of up to four batches, sorted by length."""
    batches = min(INFINITY_BATCHES, max(1, len(waiting) // INFINITY_ROWS))
    oldest = [waiting.popleft() for _ in range(min(batches * INFINITY_ROWS, len(waiting)))]
    if batches > 1:
        oldest.sort(key=lambda text: text[1])
    return [oldest[start : start + INFINITY_ROWS] for start in range(0, len(oldest), INFINITY_ROWS)]


def by_rule(texts: Traffic, job: Sequence[float], rule: Rule) -> Seen:
    """Run both through one queue, whose batches `rule` cuts."""
    waiting: Waiting = deque()
    arriving = deque(zip(range(len(texts.times)), texts.times.tolist(), texts.tokens.tolist(), strict=True))
    left, of_job, now = deque(enumerate(job)), 0, 0.0
    responses, done = np.empty(len(texts.times)), []
    while arriving or waiting or left:
        while arriving and arriving[0][1] <= now:
            number, _, tokens = arriving.popleft()
            waiting.append((number, tokens))
        while left and of_job < JOB_WAITING:
            number, tokens = left.popleft()
            waiting.append((-1 - number, tokens))
            of_job += 1
        if not waiting:
            now = arriving[0][1]
            continue
        for batch in rule(waiting):
            now += seconds_of(sum(tokens for _, tokens in batch))
            for number, _ in batch:
                if number < 0:
                    done.append(now)
                    of_job -= 1
                else:
                    responses[number] = now - texts.times[number]
    return Seen(responses, np.array(done))


def measure(run: Run) -> Result:
    """Run each kind of job beside the trace, in each way."""
    texts = traffic()
    alone = by_weir(texts, ()).responses
    random = Random(1)
    jobs = {
        "as long as the requests": random.choices(texts.tokens.tolist(), k=TEXTS),
        f"{CHUNK[0]} to {CHUNK[1]} tokens": [float(random.randint(*CHUNK)) for _ in range(TEXTS)],
    }
    result = Result(
        ["texts of the job", "way", "interactive p50", "p99", "p99 above alone", "idle time used", "job done in"]
    )
    for name, job in jobs.items():
        ways = {
            WEIR: by_weir(texts, job),
            WEIR_ON_GPU: by_weir(texts, job, bulk_workers=0),
            FIFO: by_rule(texts, job, first_come),
            INFINITY: by_rule(texts, job, like_infinity),
        }
        for way, seen in ways.items():
            until = min(float(seen.done[-1]), float(texts.times[-1]))
            beside = texts.times <= until
            (p50, p99), least = (
                np.quantile(seen.responses[beside], (0.5, 0.99)),
                float(np.quantile(alone[beside], 0.99)),
            )
            idle = until - float((FIXED + PER_TOKEN * texts.tokens[beside]).sum())
            used = float((seen.done <= until).sum()) * PER_TOKEN * float(np.mean(job)) / idle
            result.rows.append([
                name, way, f"{1000 * p50:.0f} ms", f"{1000 * p99:.0f} ms", f"{100 * (p99 / least - 1):+.1f} %", f"{100 * used:.0f} %", f"{seen.done[-1]:.0f} s"
            ])  # fmt: skip
            result.values |= {f"{way} {name} p99": p99, f"{way} {name} used": used}
            run.step(
                f"{way}, {name}: p99 {1000 * p99:.0f} ms beside {1000 * least:.0f} ms, {100 * used:.0f} % of the idle time"
            )
            if way in (WEIR, WEIR_ON_GPU):
                result.goal(
                    f"{way}, {name}: p99 at most 5 % or 2 ms above alone",
                    f"{100 * (p99 / least - 1):+.1f} %",
                    near(p99, least),
                )
                result.goal(f"{way}, {name}: at least 80 % of the idle time", f"{100 * used:.0f} %", used >= LEAST_USED)
    result.notes.append(
        f"Simulated: Azure's chat trace at {LOAD:.0%} load; an interactive text stops bulk work at once, or on a GPU after its batch of {1000 * BULK_DELAY:g} ms. "
        "Live: two workers, with a model that sleeps or with MiniLM."
    )
    live = Texts(texts.times.tolist(), texts.tokens.tolist(), jobs)
    measure_live(run, result, live, near, LEAST_USED)
    return result


def near(p99: float, alone: float) -> bool:
    """Return whether a p99 is as near to that alone as it is to be; both in seconds."""
    return p99 <= max(alone * (1 + MOST_ABOVE), alone + MOST_SECONDS)


PART = Part(
    "classes",
    "Interactive and bulk work",
    "Interactive texts while a bulk job of 20,000 texts runs.",
    lambda rounds: 8 + STEPS,
    measure,
)
