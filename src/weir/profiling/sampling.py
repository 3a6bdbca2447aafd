"""Runs batches on one worker of an executor, and estimates their service times.

Batches of the chosen sizes run in random order until their mean times are known well enough, or the time is up.
Durations are in seconds.
"""

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count as counter
from itertools import cycle, islice, pairwise
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.errors import ModelError, WeirError
from weir.messages import Batch, Events
from weir.metrics import GAUGE, MetricReport
from weir.profiling import Items, ProfilingSettings
from weir.workers.executor import Executor, Reserve, discard
from weir.workers.timer import resolve

FIRST_ID = 1 << 48  # a service counts its batches from 1, so late events of these are never taken for its own


class Finished(NamedTuple):
    """The instants, in seconds of the clock, at which a batch was handed to its worker and at which its last events
    came.
    """

    dispatched: float
    completed: float


class _Flight(NamedTuple):
    worker: int
    dispatched: float
    done: asyncio.Future[Finished]


class Measuring:
    """Runs batches on the workers of `executor`, and notes their times. It is told what the executor reports, or is its Listener.

        measuring = Measuring(executor)
        await executor.start(measuring)
        profile = await measure(measuring, items, max_batch_size)

    `now` returns seconds, and `sleep` waits for some. With `reserve`, a worker computes for no other model meanwhile, and the time for which
    batches of other models had it does not count.
    """

    def __init__(
        self,
        executor: Executor,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        reserve: Reserve | None = None,
    ) -> None:
        self.executor = executor
        self.sleep = sleep
        self._now = now
        self._reserve = reserve
        self._waited = 0.0  # for other models
        self._limits: list[asyncio.Timeout] = []
        self.places: dict[int, int] = {}  # by worker that is ready
        self._lost: dict[int, str] = {}  # why, by worker that was lost
        self._flights: dict[int, _Flight] = {}
        self._ids = counter(FIRST_ID)

    def clock(self) -> float:
        """Return the seconds that have passed without those for which other models had the worker."""
        return self._now() - self._waited

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after `seconds` of the loop, without those for which other models had the worker."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.append(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)

    @asynccontextmanager
    async def alone(self, worker: int) -> AsyncIterator[None]:
        """Have `worker` compute for no other model meanwhile, where it may."""
        if self._reserve is None:
            yield
            return
        began, loop = self._now(), asyncio.get_running_loop()
        left = [(each, (each.when() or loop.time()) - loop.time()) for each in self._limits]
        for limit, _ in left:
            limit.reschedule(None)
        async with self._reserve(worker):
            self._waited += self._now() - began
            for limit, seconds in left:
                limit.reschedule(loop.time() + seconds)
            yield

    def run(self, worker: int, payloads: list[Any], content_type: str, accept: str) -> "asyncio.Future[Finished]":
        """Hand a batch to `worker`, which must have a free place. The future returned has its times.

        It fails with the first entry's error, or with ModelError when the worker is lost.
        """
        batch = Batch(next(self._ids), payloads, content_type, accept)
        done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        if worker not in self.places:
            done.set_exception(ModelError(f"worker {worker} cannot be measured: {self._why(worker)}"))
            return done
        self._flights[batch.batch_id] = _Flight(worker, self.clock(), done)
        try:
            self.executor.run(worker, batch)
        except BaseException:
            del self._flights[batch.batch_id]
            raise
        return done

    # Events of the executor (Listener).

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """Note a worker and the number of its places."""
        self.places[worker] = places

    def worker_lost(self, worker: int, reason: str) -> None:
        """Fail the batches that the worker was running."""
        self.places.pop(worker, None)
        self._lost[worker] = reason
        for batch_id in [batch_id for batch_id, flight in self._flights.items() if flight.worker == worker]:
            lost = ModelError(f"worker {worker} was lost while it was measured: {reason}")
            resolve(self._flights.pop(batch_id).done, lost)

    def worker_leaves(self, worker: int) -> None:
        """Do nothing: the batch that is measured there is finished."""

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Do nothing: the model's metrics are not measured."""

    def unavailable(self, reason: str) -> None:
        """Do nothing: each worker was lost."""

    def received(self, worker: int, events: Events) -> None:
        """Note the end of a batch."""
        now = self.clock()
        error = _taken(events.outputs)
        flight = self._flights.get(events.batch_id)
        if flight is None:
            return
        if error is not None:
            resolve(flight.done, error)
        if events.final:
            del self._flights[events.batch_id]
            resolve(flight.done, Finished(flight.dispatched, now))

    # What a listener asks whose executor is measured.

    def has(self, batch_id: int) -> bool:
        """Return whether a batch with this id is, or was, one of these."""
        return batch_id >= FIRST_ID

    def counted(self, worker: int, reports: Sequence[MetricReport]) -> Sequence[MetricReport]:
        """Return those of a worker's metrics that count: only gauges while examples are measured there."""
        if any(flight.worker == worker for flight in self._flights.values()):
            return [report for report in reports if report.definition.kind == GAUGE]
        return reports

    def _why(self, worker: int) -> str:
        return self._lost.get(worker, "it has not started")


def _taken(outputs: list[Any]) -> WeirError | None:
    """Release outputs in shared memory. Return the first error among the outputs."""
    for output in outputs:
        discard(output)
    return next((output for output in outputs if isinstance(output, WeirError)), None)


# How long the processes that run a batch waited for a CPU that other processes used.
#
# Linux counts for each thread how long it waited and how often it ran (/proc/PID/task/TID/schedstat: nanoseconds
# running, nanoseconds waiting, number of runs). A sleeping thread waits a little each time it wakes up, on an idle
# machine too. A server has that delay with each of its batches, so it belongs to the service time. Only waiting beyond
# WAKING for each run is caused by other processes. It stays in the durations, but tells how far they can be trusted.


WAKING = 200_000  # nanoseconds: the longest that waking up takes on an idle machine

Times = dict[int, dict[str, tuple[int, int]]]  # by process and thread: nanoseconds waited, and the number of runs


class Contention:
    """Measures how long processes wait for CPUs."""

    def __init__(self, pids: Iterable[int], proc: Path = Path("/proc")) -> None:
        self._folders = {pid: proc / str(pid) / "task" for pid in set(pids)}

    def look(self) -> Times:
        """Return how long each thread has waited so far; without those whose numbers cannot be read."""
        return {pid: _of_threads(folder) for pid, folder in self._folders.items()}

    def since(self, before: Times) -> float:
        """Return the seconds for which the processes have waited since `before`, without waking up.

        Of each process the thread that waited longest counts, because the others wait for it. Processes wait one after
        another.
        """
        return sum(_most(before.get(pid, {}), threads) for pid, threads in self.look().items()) / 1e9


def _of_threads(folder: Path) -> dict[str, tuple[int, int]]:
    times = {}
    try:
        for thread in folder.iterdir():
            _, waited, ran = (thread / "schedstat").read_text().split()
            times[thread.name] = int(waited), int(ran)
    except (OSError, ValueError):  # the thread has ended, or this kernel does not count
        pass
    return times


def _most(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> int:
    waits = [0]
    for thread, (waited, ran) in after.items():
        earlier, times = before.get(thread, (0, 0))
        waits.append(waited - earlier - WAKING * (ran - times))
    return max(waits)


# The mean of a sample of durations, its uncertainty, and what the machine added to it.
#
# The mean predicts response times, so the mean is estimated and not the median. But on a shared machine another
# process sometimes takes the CPU for a while, and one such pause outweighs hundreds of batches. So a duration is
# attributed to the machine, and left out, if it is both *far* (more than FAR robust standard deviations above the
# median) and *rare* (at most the share RARE of the sample is as far; in a small sample, one). What is more frequent
# belongs to the model, and stays in the mean and in the coefficient of variation. If other processes are known to
# compete for the CPUs, the share of far durations may be CROWDED_RARE. The profile always notes how much was left out.


FAR = 8.0  # robust standard deviations
LEAST_SPREAD = 0.05  # share of the median that the robust standard deviation is at least
RARE = 0.05  # share of a sample
CROWDED_RARE = 0.3  # share of a sample
SMALL = 5  # durations, from which on one may be left out
PRIOR = 5.0  # durations, as many as the variation of the other sizes counts for
NORMAL = 1.4826  # standard deviation of a normal law, divided by its median absolute deviation
Z95 = 1.96  # standard errors in half of a 95 % interval


class ServiceTimeEstimate(NamedTuple):
    """The service time of one batch size, in seconds.

    Attributes:
        mean, deviation: mean and standard deviation.
        counted: the number of durations.
        half_width: half of the 95 % interval of the mean.
        left_out: the number of durations left out.
        left_out_seconds: by how much they exceeded the median, added up.
    """

    mean: float
    deviation: float
    counted: int
    half_width: float
    left_out: int
    left_out_seconds: float

    @property
    def cv(self) -> float:
        """Coefficient of variation."""
        return self.deviation / self.mean

    @property
    def error(self) -> float:
        """Standard error of the mean, in seconds."""
        return self.deviation / sqrt(self.counted)

    @property
    def relative(self) -> float:
        """`half_width` as a share of the mean."""
        return self.half_width / self.mean


def estimate(durations: Sequence[float], rare: float = RARE) -> ServiceTimeEstimate:
    """Return the estimate from at least one duration; `half_width` is infinite for fewer than three.

    `rare` is the largest share of the durations that may be left out.
    """
    values = np.asarray(durations, dtype=np.float64)
    median = float(np.median(values))
    spread = max(NORMAL * float(np.median(np.abs(values - median))), LEAST_SPREAD * median)
    far = values > median + FAR * spread
    left_out = int(far.sum())
    if left_out > max(rare * len(values), len(values) >= SMALL):
        left_out, far = 0, np.zeros(len(values), dtype=np.bool_)
    kept = values[~far]
    mean = float(kept.mean())
    deviation = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
    half_width = Z95 * deviation / sqrt(len(kept)) if len(kept) > 2 else float("inf")
    return ServiceTimeEstimate(mean, deviation, len(kept), half_width, left_out, float(np.sum(values[far] - median)))


def steadied(estimates: Mapping[int, ServiceTimeEstimate]) -> dict[int, ServiceTimeEstimate]:
    """Return `estimates`, by size, with deviations that also use those of the other sizes.

    The fewer durations a size has, the more the others count: three that happen to agree do not make a size exact.
    """
    usual = float(np.median([each.cv for each in estimates.values()]))
    return {
        size: each._replace(deviation=each.mean * sqrt(_weighted(each.cv**2, each.counted, usual**2)))
        for size, each in estimates.items()
    }


def _weighted(own: float, counted: int, usual: float) -> float:
    return (own * counted + usual * PRIOR) / (counted + PRIOR)


WARM_UP_BATCHES, WARM_UP_MOST = 20, 100  # the least and the largest number
WARM_UP_SHARE = 0.2  # of the whole time, at most
STABLE = 0.1  # relative difference of three batches of a size from the three before, below which its times are steady
LEAST = 50  # batches of a size before its mean may be sure enough
FEWEST = 3  # batches of each size, however long they take
# Seconds per second lost to other processes, from which on pauses are more likely theirs than the model's.
CROWDED = 0.05
BURST = 4  # durations measured at a time, with several batches in flight

Progressed = Callable[[float], None]  # called with the share that is done, 0 to 1


class ServiceTimeSampler:
    """Measures the `worker` of the executor that has this index.

    With one place at the worker, a duration is the time from dispatch to the last events. With more, all places are
    kept busy, and a duration is the time from the end of one batch to the end of the next. So it is the time that a
    service's policy has to reckon with: the way to the worker, its waking up, the model, and the way back to the event
    loop. `contention` measures other processes; it decides how readily pauses are left out.

    `durations` are in seconds by size; `alone` are those from dispatch to end with nothing else in flight.
    """

    def __init__(
        self,
        measuring: Measuring,
        items: Items,
        settings: ProfilingSettings,
        contention: Contention | None = None,
        worker: int = 0,
    ) -> None:
        self.durations: dict[int, list[float]] = defaultdict(list)
        self.alone: dict[int, list[float]] = defaultdict(list)
        self.places = measuring.places.get(worker, 1)
        self._worker = worker
        self.batches = 0
        self._contention = contention
        self._measuring = measuring
        self._items = items
        self._settings = settings
        self._random = random.Random(settings.seed)
        self.clock = measuring.clock
        self.sleep = measuring.sleep
        self._started = self.clock()
        self._first_look = {} if contention is None else contention.look()

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return self.clock() - self._started

    @property
    def crowding(self) -> float:
        """Seconds for which the processes waited for busy CPUs, per second since this object was made."""
        return 0.0 if self._contention is None else self._contention.since(self._first_look) / self.elapsed

    @property
    def _rare(self) -> float:
        return CROWDED_RARE if self.crowding >= CROWDED else RARE

    async def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches that do not count until their times are steady: the smallest, a middle and the largest size in
        turn.

        There are at least 20, or as many as take a fifth of the time if that is fewer.
        """
        limit = self._started + WARM_UP_SHARE * self._settings.seconds
        sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        seen: dict[int, list[float]] = {size: [] for size in sizes}
        for number, size in enumerate(islice(cycle(sizes), WARM_UP_MOST), 1):
            (finished,) = await self._burst(size, 1)
            seen[size].append(finished.completed - finished.dispatched)
            if finished.completed >= limit and number >= 2 * len(sizes):
                break
            if number >= WARM_UP_BATCHES and all(map(_is_steady, seen.values())):
                break

    async def settle(self, sizes: Sequence[int], until: float = 1.0, progress: Progressed = lambda share: None) -> None:
        """Measure all `sizes` in each round, in random order, until each mean is as sure as the settings ask.

        It ends earlier when the share `until` of the whole time is up; but every size is measured at least three
        times.
        """
        deadline = self._started + until * self._settings.seconds
        # By size: the number of batches at which to check again.
        unsure = {size: LEAST for size in sizes if not self._is_sure(size)}
        while unsure:
            for size in self._random.sample(sorted(unsure), len(unsure)):
                if self.clock() < deadline or len(self.durations[size]) < FEWEST:
                    await self._visit(size)
                else:
                    del unsure[size]
            self._look(unsure)
            progress(1.0 - len(unsure) / len(sizes))

    def estimates(self) -> dict[int, ServiceTimeEstimate]:
        """Return the estimates by size."""
        rare = self._rare
        return steadied({size: estimate(durations, rare) for size, durations in sorted(self.durations.items())})

    def offset(self) -> float:
        """Return by how many seconds a batch that is alone takes longer, from dispatch to end, than on a busy worker.

        It is the mean over all sizes; 0 with one place.
        """
        if not self.alone:
            return 0.0
        beyond = [estimate(self.alone[size]).mean - estimate(self.durations[size]).mean for size in self.alone]
        return max(0.0, float(np.mean(beyond)))

    async def back_to_back(self, size: int, seconds: float) -> tuple[int, float]:
        """Run batches of `size` rows without a pause for at least `seconds`. Return their number and the seconds
        taken.
        """
        started = now = self.clock()
        count = 0
        while now - started < seconds:
            ends = await self._burst(size, BURST * self.places)
            count, now = count + len(ends), ends[-1].completed
        return count, now - started

    def _look(self, unsure: dict[int, int]) -> None:
        for size, count in list(unsure.items()):
            known = len(self.durations[size])
            if known >= count:
                if self._is_sure(size):
                    del unsure[size]
                else:
                    unsure[size] = known + max(1, known // 5)

    def _is_sure(self, size: int) -> bool:
        durations = self.durations[size]
        return len(durations) >= LEAST and estimate(durations, self._rare).relative <= self._settings.confidence

    async def _visit(self, size: int) -> None:
        """Add a duration to those of `size`; with several places a few."""
        (end,) = await self._burst(size, 1)
        alone = end.completed - end.dispatched
        if self.places == 1:
            self.durations[size].append(alone)
            return
        self.alone[size].append(alone)
        ends = await self._burst(size, BURST + self.places)
        # The first batch came to an idle worker, so its end only starts the clock; behind the last ones a place was
        # free.
        busy = ends[: BURST + 1]
        self.durations[size] += [later.completed - earlier.completed for earlier, later in pairwise(busy)]

    async def _burst(self, size: int, count: int) -> list[Finished]:
        """Run `count` batches with all places busy. Return their times."""
        async with self._measuring.alone(self._worker):
            return await self._run(size, count)

    async def _run(self, size: int, count: int) -> list[Finished]:
        flights: deque[asyncio.Future[Finished]] = deque()
        ends: list[Finished] = []
        try:
            for _ in range(count):
                if len(flights) == self.places:
                    ends.append(await flights.popleft())
                flights.append(self._begin(size))
            while flights:
                ends.append(await flights.popleft())
        finally:
            for flight in flights:
                flight.cancel()
        return ends

    def _begin(self, size: int) -> asyncio.Future[Finished]:
        payloads = self._items.batch(size)
        self.batches += 1
        return self._measuring.run(self._worker, payloads, self._items.content_type, self._items.accept)


def _is_steady(durations: list[float]) -> bool:
    before, last = durations[-6:-3], durations[-3:]
    return len(before) == 3 and abs(sum(last) - sum(before)) <= STABLE * sum(before)
