"""Runs batches on one worker of an executor, and estimates their service times."""

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count as counter
from itertools import cycle, islice, pairwise
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.errors import ModelError, WeirError
from weir.messages import Batch, Events
from weir.profiling.items import Items, ProfilingSettings
from weir.workers.executor import Executor, Listener

FIRST_ID = 1 << 48  # a service counts its batches from 1: what is late from here is never taken for one of its own


class Finished(NamedTuple):
    """When a batch was handed to its worker and when its last events came, in seconds of the clock."""

    dispatched: float
    completed: float


class _Flight(NamedTuple):
    worker: int
    dispatched: float
    done: asyncio.Future[Finished]


class Measuring:
    """The Listener of `executor` while it is measured; afterwards it passes everything on to another Listener.

        measuring = Measuring(executor)
        await executor.start(measuring)
        profile = await measure(measuring, items, max_batch_size)
        measuring.step_aside(listener)                                  # it hears of the workers as if they had just started

    `clock` returns seconds, `sleep` lets some pass.
    """

    def __init__(
        self, executor: Executor, clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.executor = executor
        self.clock = clock
        self.sleep = sleep
        self.places: dict[int, int] = {}  # of each worker that is ready
        self._lost: dict[int, tuple[int, str]] = {}  # places and reason of those that are not
        self._unavailable: str | None = None
        self._flights: dict[int, _Flight] = {}
        self._ids = counter(FIRST_ID)
        self._heir: Listener | None = None

    def run(self, worker: int, payloads: list[Any], content_type: str, accept: str) -> "asyncio.Future[Finished]":
        """Hand a batch to `worker`, which must have a free place; the future is of its times.

        It fails with the first entry's error, or with ModelError when the worker is lost.
        """
        batch = Batch(next(self._ids), payloads, content_type, accept)
        done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        if worker not in self.places:
            done.set_exception(ModelError(f"worker {worker} is not there to be measured: {self._why(worker)}"))
            return done
        self._flights[batch.batch_id] = _Flight(worker, self.clock(), done)
        try:
            self.executor.run(worker, batch)
        except BaseException:
            del self._flights[batch.batch_id]
            raise
        return done

    def step_aside(self, listener: Listener) -> None:
        """Let `listener` hear everything from now on, first of all of the workers that are there."""
        self._heir = listener
        for worker, (places, reason) in self._lost.items():
            listener.worker_ready(worker, places)
            listener.worker_lost(worker, reason)
        for worker, places in self.places.items():
            listener.worker_ready(worker, places)
        if self._unavailable is not None:
            listener.unavailable(self._unavailable)

    # What the executor says (Listener).

    def worker_ready(self, worker: int, places: int) -> None:
        """Note a worker and its places."""
        self._lost.pop(worker, None)
        self._unavailable = None
        self.places[worker] = places
        if self._heir is not None:
            self._heir.worker_ready(worker, places)

    def worker_lost(self, worker: int, reason: str) -> None:
        """Fail what the worker was running."""
        places = self.places.pop(worker, None)
        if places is not None:
            self._lost[worker] = places, reason
        for batch_id in [batch_id for batch_id, flight in self._flights.items() if flight.worker == worker]:
            done = self._flights.pop(batch_id).done
            if not done.done():
                done.set_exception(ModelError(f"worker {worker} was lost while it was measured: {reason}"))
        if self._heir is not None:
            self._heir.worker_lost(worker, reason)

    def received(self, worker: int, events: Events) -> None:
        """Note the end of a batch."""
        if self._heir is not None and events.batch_id < FIRST_ID:
            self._heir.received(worker, events)
            return
        now = self.clock()
        error = _taken(events.outputs)
        flight = self._flights.get(events.batch_id)
        if flight is None:
            return
        if error is not None and not flight.done.done():
            flight.done.set_exception(error)
        if events.final:
            del self._flights[events.batch_id]
            if not flight.done.done():
                flight.done.set_result(Finished(flight.dispatched, now))

    def unavailable(self, reason: str) -> None:
        """Note that nobody is left."""
        self._unavailable = reason
        if self._heir is not None:
            self._heir.unavailable(reason)

    def _why(self, worker: int) -> str:
        return self._lost[worker][1] if worker in self._lost else "it has not been announced"


def _taken(outputs: list[Any]) -> WeirError | None:
    """Release what lies in shared memory; return the first error."""
    error = None
    for output in outputs:
        if isinstance(output, WeirError):
            error = error or output
        elif hasattr(output, "release") and hasattr(output, "view"):
            output.release()
    return error


# How long the processes that run a batch waited for a CPU that something else was using.
#
# Linux counts for each thread how long it waited, and how often it ran (/proc/PID/task/TID/schedstat: nanoseconds running,
# nanoseconds waiting, times). Whoever sleeps waits a little each time it wakes, on an idle machine too; a server pays for that with
# each of its batches, and so it belongs to the service time. Only what is beyond WAKING each time is the doing of other
# processes. It stays in the durations: the server would see it too. It says how far the durations can be trusted.


WAKING = 200_000  # nanoseconds, the most that waking up takes on an idle machine

Times = dict[int, dict[str, tuple[int, int]]]  # of each process, by thread: nanoseconds waited, and how often it ran


class Contention:
    """Watches processes."""

    def __init__(self, pids: Iterable[int], proc: Path = Path("/proc")) -> None:
        self._folders = {pid: proc / str(pid) / "task" for pid in set(pids)}

    def look(self) -> Times:
        """Return how long each thread has waited so far; nothing of those that do not say."""
        return {pid: _of_threads(folder) for pid, folder in self._folders.items()}

    def since(self, before: Times) -> float:
        """Return the seconds that the processes have waited since `before`, beyond waking up.

        Of each process the thread that waited most counts, as the others wait for it; processes wait one after another.
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


# What a sample of durations says: its mean, how sure that is, and what the machine did to it.
#
# The mean is what predicts response times, so the mean is estimated, and not the median. But on a shared machine now and
# then something else takes the CPU for a while, and one such pause outweighs hundreds of batches. Hence a duration counts as
# the machine's doing, and is left out, if it is both *far* (more than FAR robust standard deviations above the median) and
# *rare* (not more than RARE of the sample are so far; of a small sample, one). What is more frequent belongs to the model: it
# stays, in the mean and in the coefficient of variation. Where other processes are known to compete for the CPUs, what is far
# may be as frequent as CROWDED_RARE. How much was left out is always reported.


FAR = 8.0
LEAST_SPREAD = 0.05  # of the median: what is within FAR times it is never far
RARE = 0.05
CROWDED_RARE = 0.3
SMALL = 5  # durations in a sample of which one may be left out
PRIOR = 5.0  # durations that what is known of the other sizes is worth
NORMAL = 1.4826  # standard deviations in a median absolute deviation
Z95 = 1.96


class ServiceTimeEstimate(NamedTuple):
    """Of one batch size: durations in seconds. `half_width` is half the 95 % interval of the mean; `left_out` the number
    of durations that were, `left_out_seconds` by how much they exceeded the median, in all."""

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
        """Standard error of the mean."""
        return self.deviation / sqrt(self.counted)

    @property
    def relative(self) -> float:
        """`half_width` as a share of the mean."""
        return self.half_width / self.mean


def estimate(durations: Sequence[float], rare: float = RARE) -> ServiceTimeEstimate:
    """Return the estimate of at least one duration; of fewer than three `half_width` is infinite.

    `rare` is the largest share of them that may be left out.
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
    """Return `estimates`, by size, with the deviation of each moved towards what the others say of it, the more the fewer
    durations it has: three that happen to agree are not known exactly."""
    usual = float(np.median([each.cv for each in estimates.values()]))
    return {
        size: each._replace(deviation=each.mean * sqrt(_weighted(each.cv**2, each.counted, usual**2)))
        for size, each in estimates.items()
    }


def _weighted(own: float, counted: int, usual: float) -> float:
    return (own * counted + usual * PRIOR) / (counted + PRIOR)


WARM_UP_BATCHES = 20  # at least
WARM_UP_MOST = 100
WARM_UP_SHARE = 0.2  # of the time, at most
STABLE = 0.1  # the last three batches of a size differ by less from the three before them
LEAST = 50  # batches of each size before its mean can be called known
FEWEST = 3  # batches of each size, whatever the time
CROWDED = 0.05  # seconds lost to other processes in each second: pauses are more likely theirs than the model's
BURST = 4  # cycles at a time, with several batches in flight

Said = Callable[[float], None]


class ServiceTimeSampler:
    """Measures one worker. With one place at the worker a duration is that from dispatch to the last events; with more
    all places are kept taken, and it is the time from one batch's end to the next one's. So it is what a service's policy pays: the way
    to the worker, its waking up, the model, the way back to the event loop. Nothing is taken off; what `contention` says
    of other processes decides how readily pauses are left out.

    `durations` are in seconds by size; `alone` those from dispatch to the end with nothing else in flight.
    """

    def __init__(
        self, measuring: Measuring, items: Items, settings: ProfilingSettings, worker: int = 0,
        contention: Contention | None = None,
    ) -> None:  # fmt: skip
        self.durations: dict[int, list[float]] = defaultdict(list)
        self.alone: dict[int, list[float]] = defaultdict(list)
        self.places = measuring.places.get(worker, 1)
        self.batches = 0
        self._contention = contention
        self._measuring = measuring
        self._items = items
        self._settings = settings
        self._worker = worker
        self._random = random.Random(settings.seed)
        self.clock = measuring.clock
        self.sleep = measuring.sleep
        self._started = self.clock()
        self._first_look = {} if contention is None else contention.look()

    @property
    def elapsed(self) -> float:
        """Seconds since this was made."""
        return self.clock() - self._started

    @property
    def crowding(self) -> float:
        """Seconds that the processes waited for a CPU that others had, for each second since this was made."""
        return 0.0 if self._contention is None else self._contention.since(self._first_look) / self.elapsed

    @property
    def _rare(self) -> float:
        return CROWDED_RARE if self.crowding >= CROWDED else RARE

    async def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches, small, middling and large in turn, until their times are steady: at least 20, or for a fifth of the
        time if that is less. None of them counts."""
        limit = self._started + WARM_UP_SHARE * self._settings.seconds
        sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        seen: dict[int, list[float]] = {size: [] for size in sizes}
        for number, size in enumerate(islice(cycle(sizes), WARM_UP_MOST), 1):
            finished = await self._begin(size)
            seen[size].append(finished.completed - finished.dispatched)
            if finished.completed >= limit and number >= 2 * len(sizes):
                break
            if number >= WARM_UP_BATCHES and all(map(_is_steady, seen.values())):
                break

    async def settle(self, sizes: Sequence[int], until: float = 1.0, said: Said = lambda share: None) -> None:
        """Measure `sizes`, all in each round and in random order, until each mean is as sure as the settings ask, or the share
        `until` of the time is up; every size three times at least."""
        deadline = self._started + until * self._settings.seconds
        unsure = {size: LEAST for size in sizes if not self._is_sure(size)}  # and the count at which to look again
        while unsure:
            for size in self._random.sample(sorted(unsure), len(unsure)):
                if self.clock() < deadline or len(self.durations[size]) < FEWEST:
                    await self._visit(size)
                else:
                    del unsure[size]
            self._look(unsure)
            said(1.0 - len(unsure) / len(sizes))

    def estimates(self) -> dict[int, ServiceTimeEstimate]:
        """Return what is known of each size."""
        rare = self._rare
        return steadied({size: estimate(durations, rare) for size, durations in sorted(self.durations.items())})

    def offset(self) -> float:
        """Return by how much a batch that is alone takes longer, dispatch to end, than its share of a busy worker's time:
        the mean over sizes, in seconds; 0 with one place."""
        if not self.alone:
            return 0.0
        beyond = [estimate(self.alone[size]).mean - estimate(self.durations[size]).mean for size in self.alone]
        return max(0.0, float(np.mean(beyond)))

    async def back_to_back(self, size: int, seconds: float) -> tuple[int, float]:
        """Run batches of `size` one after the other, all places taken, for at least `seconds`; return how many and for how
        long."""
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
        # The first came to an empty worker and only starts the clock; behind the last ones a place stayed free.
        busy = ends[: BURST + 1]
        self.durations[size] += [later.completed - earlier.completed for earlier, later in pairwise(busy)]

    async def _burst(self, size: int, count: int) -> list[Finished]:
        """Run `count` batches with all places taken; return their times."""
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
