"""The contract between a service and what runs its batches.

Executors own workers; a worker runs one batch at a time and has `places` (its pipeline depth): the batches it may
hold at once. All methods and all listener calls happen on the event loop's thread.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from weir.errors import Conflict
from weir.messages import Batch, Events


class Listener(Protocol):
    """Hears from an executor."""

    def worker_ready(self, worker: int, places: int) -> None:
        """`worker` has loaded and warmed up and takes batches."""

    def worker_lost(self, worker: int, reason: str) -> None:
        """`worker` is gone, or does not end although it was killed: what it was running will never be answered. A
        replacement is announced by `worker_ready` with the same index, or, when it could not load, by `worker_lost` again."""

    def received(self, worker: int, events: Events) -> None:
        """Events of a batch: of a streaming model any number. Nothing more comes for a batch after its `final` one."""

    def unavailable(self, reason: str) -> None:
        """No worker is left, and those that were started instead have failed again and again: nobody should wait. They are
        still tried; `worker_ready` says when one is there again."""


READY, SUSPENDED = "ready", "suspended"  # the states that more than one place asks for


class WorkerState(Protocol):
    """One line about one worker, for people and `GET /models/{m}`."""

    @property
    def index(self) -> int:
        """Which worker of its model it is, from 0."""

    @property
    def state(self) -> str:
        """starting, ready, suspended (its process does not run), lost, stopped or failed."""

    @property
    def pid(self) -> int | None:
        """The process, if it has one of its own."""

    @property
    def in_flight(self) -> int:
        """How many batches it has."""

    @property
    def restarts(self) -> int:
        """How often it has been replaced."""

    @property
    def reason(self) -> str:
        """Why it is suspended, lost or failed, else ""."""


def suspension(states: Sequence[WorkerState]) -> str:
    """Return why no batch would be run now although there are workers: those that are not lost are suspended. "" where one is ready, or
    none is suspended."""
    if any(each.state == READY for each in states):
        return ""
    return next((f"worker {each.index}: {each.reason}" for each in states if each.state == SUSPENDED), "")


class Block(Protocol):
    """A place in shared memory that holds one large payload or result; freed when its last owner releases it."""

    @property
    def view(self) -> memoryview:
        """The bytes. Writable while the payload is being received."""

    def retain(self) -> None:
        """Take a further share in it."""

    def release(self) -> None:
        """Give one share back."""


class Executor(Protocol):
    """Owns workers and runs batches."""

    async def start(self, listener: Listener) -> None:
        """Start every worker; return when all are ready. Raises ModelError with the child's traceback when a
        constructor, `load` or the warm-up fails; nothing is left running then."""

    def run(self, worker: int, batch: Batch) -> None:
        """Hand `batch` to `worker`, which must have a free place. Blocks among the payloads are retained until the
        batch's final Events or until its worker is lost."""

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Say that nobody waits for these entries any more. They may still be answered."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place for a payload to be received into, or None: executors without shared memory, or none free."""

    async def stop(self) -> None:
        """End all workers (unload is called in each) and free everything. Idempotent; never raises for a dead worker."""

    async def add_worker(self) -> None:
        """Start one worker more, while it runs; return when it is ready and the listener has heard of it. It has the highest
        index. Raises as `start` does, the others go on then; Conflict if there can be no more."""

    async def remove_worker(self) -> None:
        """End the worker of the highest index, which has no batch and gets none. Never raises for a dead worker."""

    def states(self) -> Sequence[WorkerState]:
        """The state of each worker, by index."""

    def gauges(self) -> dict[str, Any]:
        """Numbers for metrics: at least `arena_bytes`, `arena_free_bytes` (0 without an arena), `restarts`."""


class FixedWorkers:
    """For executors whose workers are those that they have."""

    async def add_worker(self) -> None:
        """Raise Conflict."""
        raise Conflict(f"{type(self).__name__} has a fixed number of workers: none can be added")

    async def remove_worker(self) -> None:
        """Raise Conflict."""
        raise Conflict(f"{type(self).__name__} has a fixed number of workers: none can be removed")
