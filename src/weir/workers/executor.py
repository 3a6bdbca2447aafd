"""The contract between a service and what runs its batches, and what executors have in common.

An executor owns workers. A worker runs one batch at a time and has *places* (its pipeline depth): the batches that it may hold at once. All
methods and all calls of the listener happen on the event loop's thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from weir.batching.workers import Reservation, SharedWorkers, U, WorkerUser
from weir.errors import Conflict
from weir.messages import Batch, Block, Events
from weir.metrics import MetricReport
from weir.model import Model
from weir.workers.settings import EXECUTORS, WorkerSettings

if TYPE_CHECKING:
    from weir.workers.process.launch import Templates


class Listener(Protocol):
    """Hears the reports of an executor."""

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """`worker` has loaded and warmed up, and takes batches; with `bulk`, only of bulk work. It is of that kind for good."""

    def worker_lost(self, worker: int, reason: str) -> None:
        """`worker` has ended, or is still running after it was killed: what it was running will never have a response.

        A replacement is announced by `worker_ready` with the same index, or by `worker_lost` again if it could not load.
        """

    def worker_leaves(self, worker: int) -> None:
        """`worker` should get no more batches, because it will soon be lost, with its node. It finishes those that it has."""

    def received(self, worker: int, events: Events) -> None:
        """Events of a batch have come; of a streaming model any number. Nothing more comes for a batch after its `final` ones."""

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """The model's own metrics in this worker have become so."""

    def unavailable(self, reason: str) -> None:
        """No worker is left, and the replacements have failed again and again: no request should wait for one.

        They are still tried; `worker_ready` says when there is one again.
        """


READY = "ready"  # the state that several modules compare with


class WorkerState(Protocol):
    """The state of one worker, for people and `GET /models/{m}`. `bulk`, if it has that attribute, says that it runs bulk work only."""

    @property
    def index(self) -> int:
        """The worker's index in its model, from 0."""

    @property
    def state(self) -> str:
        """starting, ready, lost, stopped or failed."""

    @property
    def pid(self) -> int | None:
        """The process id, if it has a process of its own."""

    @property
    def in_flight(self) -> int:
        """The number of batches that it has."""

    @property
    def restarts(self) -> int:
        """The number of times that it has been replaced."""

    @property
    def reason(self) -> str:
        """The reason why it is lost or failed; else ""."""


def shortage(states: Sequence[WorkerState]) -> str:
    """Return how many of how many workers are ready, and why the others are not; "" if all are."""
    states = for_all_work(states)
    missing = [each for each in states if each.state != READY]
    if not missing:
        return ""
    reasons = "; ".join(f"worker {each.index}: {each.reason or each.state}" for each in missing)
    return f"{len(states) - len(missing)} of {len(states)} workers are ready: {reasons}"


def for_all_work(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the states of the workers without those for bulk work only."""
    return [each for each in states if not getattr(each, "bulk", False)]


def discard(value: Any) -> None:
    """Release `value` if it is a Block; do nothing otherwise."""
    if is_block(value):
        value.release()


def is_block(value: Any) -> bool:
    """Return whether `value` is a Block: it has `view`, `retain` and `release`."""
    kind: Any = type(value)
    return is_block_type(kind)


@lru_cache(maxsize=256)
def is_block_type(kind: Hashable) -> bool:
    """Return whether values of this type are Blocks."""
    return all(hasattr(kind, name) for name in ("view", "retain", "release"))


class Executor(Protocol):
    """Owns workers and runs batches."""

    async def start(self, listener: Listener) -> None:
        """Start every worker; return when all are ready. Raises ModelError with the worker's traceback when a constructor, `load` or the
        warm-up fails; nothing is left running then."""

    def run(self, worker: int, batch: Batch) -> None:
        """Give `batch` to `worker`, which must have a free place. Blocks among the payloads are retained until the final events of the batch, or
        until its worker is lost."""

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Note that no caller waits for these entries any more. They may still get responses."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place for a payload to be received into; None if the executor has no shared memory, or no room."""

    async def stop(self) -> None:
        """End all workers (each calls `unload`) and free everything. Idempotent; never raises for a dead worker."""

    async def add_worker(self) -> None:
        """Start one more worker while the others run; return when it is ready and the listener has been notified. It gets the lowest index that no
        worker has. Calls may overlap: workers start side by side.

        Raises what `start` raises, and the others go on; Conflict if there can be no more.
        """

    async def remove_worker(self, worker: int | None = None) -> None:
        """End `worker` (None: that of the highest index), which has no batch and gets none. Never raises for a dead worker."""

    def states(self) -> Sequence[WorkerState]:
        """Return the state of each worker, by index."""

    def gauges(self) -> dict[str, Any]:
        """Return numbers for metrics: at least `arena_bytes`, `arena_free_bytes` (0 without an arena) and `restarts`."""


class MakeExecutor(Protocol):
    """Makes executors of one kind. An entry point of the group `weir.executors` is one; its name is a value of the setting `executor`."""

    def __call__(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
    ) -> Executor:
        """Return an executor that has not been started, for the model `name`."""


def make_executor(
    model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
) -> Executor:
    """Return an executor of the kind `settings.executor` that has not been started."""
    make: MakeExecutor = EXECUTORS.load(settings.executor)
    return make(model, params, settings, name=name, max_batch_size=max_batch_size)


class WorkerPool(Protocol):
    """The owner of the workers that several models share.

    Attributes:
        added: how many workers there are beyond those of the settings, whichever model they were added for; less than 0 after as many were removed.
        resizing: is held while a worker is added or removed for any of the models.
    """

    added: int
    resizing: asyncio.Lock


class SharesWorkers(Protocol):
    """The part of one model in workers that run batches of other models too."""

    @property
    def pool(self) -> WorkerPool:
        """The owner of the workers."""

    def join(self, user: WorkerUser, order: SharedWorkers[Any] | None) -> None:
        """Have `user`, which drives the batches of this model, told when a worker is away. Called before the start.

        The workers are given away by `order`, to which nothing else belongs, or by an order of their own. Raises SettingsError if it is not that
        of the models before.
        """

    def reserved(self, worker: int) -> AbstractAsyncContextManager[None]:
        """Return what waits until no other model uses `worker`, and keeps it so until its end."""


Turns = Callable[[int, Callable[[], None]], Callable[[], None]]
"""Calls the second argument when no other model computes where this worker does, now or later; so it stays until what this returns is called."""


Reserve = Callable[[int], AbstractAsyncContextManager[None]]
"""Returns what waits until no other model computes where this worker does, and keeps it so until its end."""


@dataclass(frozen=True)
class Capabilities:
    """The functions of an executor beyond its protocol; None for those that it does not have.

    Attributes:
        sharing: is what its workers have to do with other models.
        warm_up_in: has each batch of the warm-up of a worker wait for a turn. Called before the start.
        start_bulk_workers: begins to start workers for bulk work only, unless that was begun before. The listener is notified of each that is ready.
        fork_from: forks the workers from templates where that is possible, which the caller closes after the stop. Called before the start.
        unmet: returns why a model by which it runs its batches does not accept requests; "" if all do.
    """

    sharing: SharesWorkers | None = None
    warm_up_in: Callable[[Turns], None] | None = None
    start_bulk_workers: Callable[[], None] | None = None
    fork_from: Callable[["Templates"], None] | None = None
    unmet: Callable[[], str] | None = None


def capabilities_of(executor: object) -> Capabilities:
    """Return the attribute `capabilities` of an executor; none for one that does not have it."""
    stated: Capabilities = getattr(executor, "capabilities", Capabilities())
    return stated


WAITS = "it waits for its turn on the device"


class HeldTurn:
    """The turn of one worker that warms up; without `turns` it is granted at once."""

    def __init__(self, turns: Turns | None, worker: int) -> None:
        self._turns = turns
        self._worker = worker
        self._end: Callable[[], None] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether it may take a while until it is granted."""
        return self._turns is not None

    def ask(self, granted: Callable[[], None]) -> None:
        """Call `granted` now or later, unless `end` is called before."""
        if self._turns is None:
            granted()
        else:
            self._end = self._turns(self._worker, granted)

    def end(self) -> None:
        """Give it back, or no longer wait for it. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()


@asynccontextmanager
async def reserved(
    workers: SharedWorkers[U], user: U, worker: int, clock: Callable[[], float] = monotonic
) -> AsyncIterator[None]:
    """Reserve one of `workers` for `user`; see SharesWorkers."""
    granted = asyncio.Event()
    reservation = Reservation(user, worker, granted.set)
    workers.reserve(reservation, clock())
    try:
        await granted.wait()
        yield
    finally:
        workers.release(reservation, clock())


def free_index(taken: Collection[int]) -> int:
    """Return the lowest index that is not in `taken`."""
    return next(index for index in range(len(taken) + 1) if index not in taken)


class ExecutorBase:
    """The defaults of an executor: it has no shared memory and a fixed number of workers, and it cannot cancel."""

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Do nothing: the entries get responses all the same."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def add_worker(self) -> None:
        """Raise Conflict."""
        raise Conflict(f"{type(self).__name__} has a fixed number of workers: none can be added")

    async def remove_worker(self, worker: int | None = None) -> None:
        """Raise Conflict."""
        raise Conflict(f"{type(self).__name__} has a fixed number of workers: none can be removed")

    def states(self) -> Sequence[WorkerState]:
        """Return the state of each worker, by index."""
        raise NotImplementedError  # implemented by every executor

    def gauges(self) -> dict[str, Any]:
        """Return how often workers were replaced; the sizes of the arena are 0."""
        return {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": sum(each.restarts for each in self.states())}
