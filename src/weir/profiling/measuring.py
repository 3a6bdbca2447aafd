"""Runs batches on an executor and notes when each began and ended, then leaves the workers to those who serve."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

from weir.errors import ModelError, WeirError
from weir.messages import Batch, Events
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
        self._ids = count(FIRST_ID)
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
