"""Worker processes that several models share. Each process has all the models, and runs batches of one of them at a time.

    pool = SharedPool()
    first = Service(First, executor=pool.member)
    second = Service(Second, executor=pool.member)

Any models may share workers that fit one environment: their settings of workers agree, and at most one folder of user code is among
their modules (see `environment_of`). A model that does not fit has workers of its own. The pool promises:

- A worker runs one batch at a time (as many as its places, all of one model), so models never compute side by side in a process.
- A free worker goes to the model that has had the least time among those with waiting requests (see batching/workers.py), or in the order
  of the device group that all models are in (see turns.py): `Service(First, executor=pool.member, device=group)`. A model with nothing to do leaves all workers to the others.
- What a process needs besides the models, such as a library or the memory for large payloads, is there once.
- A worker that dies is replaced for all models. Only the request that ended it fails.
- A model is loaded and unloaded while the others serve: other processes start, and each takes a worker over that has no batch.
- A worker that is added or removed is so for all models.

Large tensors are copied, which a model with workers of its own reads and writes where they lie; and no worker is for bulk work alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from weir.batching.workers import Reservation, SharedWorkers, WorkerUser
from weir.errors import ModelNotReady, SettingsError, WeirError
from weir.messages import Batch, Events
from weir.metrics import MetricReport
from weir.model import Model
from weir.workers.arena import SharedBlock
from weir.workers.executor import Capabilities, Executor, ExecutorBase, Listener, WorkerState, discard, reserved
from weir.workers.process.pool import ProcessPool
from weir.workers.run.runner import Hosted, HostedModels, hosted_id, split_id
from weir.workers.settings import WorkerSettings
from weir.workers.source import folder_that_has, pack_source
from weir.workers.timer import end_tasks, in_background

SHRINK_AFTER = 10.0  # seconds: a model that is loaded again has left by then, and a server that ends has ended
LEAVE_WITHIN = 30.0  # seconds for which a worker that is removed may finish a batch of another model than the one that it is removed for
LONGEST_NAME = 60  # characters; names of shared memory have a limit

logger = logging.getLogger("weir")


def environment_of(settings: WorkerSettings) -> WorkerSettings | None:
    """Return what must agree in the settings of models that share workers; None if these workers cannot be shared."""
    if settings.executor != "process" or settings.scale is not None:
        return None
    return replace(settings, retry_in_halves=True)


class PoolMember(ExecutorBase):
    """The Executor of one model of a SharedPool. `user` is what the other models share the workers with."""

    def __init__(self, pool: "SharedPool", hosted: Hosted, folder: str | None) -> None:
        self.hosted = hosted
        self.folder = folder  # of the user's code
        self.listener: Listener
        self.left = False
        self.pool = pool
        self.user: WorkerUser

    @property
    def capabilities(self) -> Capabilities:
        """See Capabilities."""
        return Capabilities(sharing=self)

    def join(self, user: WorkerUser, order: SharedWorkers[Any] | None) -> None:
        """See SharesWorkers. Raises SettingsError if the models before are in another device group, or in none."""
        self.user = user
        self.pool.settle(order)

    def reserved(self, worker: int) -> AbstractAsyncContextManager[None]:
        """See SharesWorkers."""
        return self.pool.reserved(self, worker)

    async def start(self, listener: Listener) -> None:
        """Start the workers with all models of the pool, unless they run; return when they have this model. Raises what ProcessPool.start raises."""
        self.listener, self.left = listener, False
        await self.pool.enter(self)

    def run(self, worker: int, batch: Batch) -> None:
        """Send `batch` to `worker`, which is away for the other models from now on."""
        self.pool.run(self, worker, batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Tell `worker` that no caller waits for these entries any more."""
        self.pool.cancel(self, worker, batch_id, indices)

    def reserve(self, size_bytes: int) -> SharedBlock | None:
        """Return a place in the arena that all models use, or None."""
        return None if self.pool.processes is None else self.pool.processes.reserve(size_bytes)

    async def stop(self) -> None:
        """Leave the pool. The processes end with the last model."""
        if not self.left:
            self.left = True
            await self.pool.leave(self)

    async def add_worker(self) -> None:
        """Start one more worker with all models."""
        await self.pool.add_worker(self)

    async def remove_worker(self, worker: int | None = None) -> None:
        """End `worker` once it has no batch of another model, after LEAVE_WITHIN seconds in any case: such a batch runs again on another worker then."""
        await self.pool.remove_worker(self, worker)

    def states(self) -> Sequence[WorkerState]:
        """Return the workers, which are those of all models."""
        return [] if self.left or self.pool.processes is None else self.pool.processes.states()

    def gauges(self) -> dict[str, Any]:
        """Return the numbers of all models together."""
        return super().gauges() if self.pool.processes is None else self.pool.processes.gauges()


class _NoModel:
    """Has a worker while processes that start warm up there, so that no model has it. See WorkerUser."""

    claim = 0
    turn = None

    def worker_away(self, worker: int) -> None:
        """Do nothing."""

    def worker_back(self, worker: int) -> None:
        """Do nothing."""


class _Processes:
    """The processes with a certain set of models, and their Listener. `ready` has the places of each worker that is ready."""

    def __init__(self, shared: "SharedPool", members: Sequence[PoolMember], settings: WorkerSettings) -> None:
        self.index = {member: index for index, member in enumerate(members)}
        self.members = list(members)
        self.ready: dict[int, int] = {}
        labels = [member.hosted.label for member in members]
        name = "+".join(labels)
        if len(name) > LONGEST_NAME:
            name = f"{labels[0][:LONGEST_NAME]}+{len(labels) - 1}"
        self.pool = ProcessPool(
            HostedModels,
            {"hosted": [member.hosted for member in members]},
            replace(settings, start_timeout=settings.start_timeout * len(members)),
            name=name,
            max_batch_size=1,
        )
        self._shared = shared

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """Have it take over from the worker of this index in the former processes."""
        self.ready[worker] = places
        self._shared.worker_ready(self, worker)

    def worker_lost(self, worker: int, reason: str) -> None:
        """Pass it on to all models."""
        self.ready.pop(worker, None)
        self._shared.worker_lost(self, worker, reason)

    def worker_leaves(self, worker: int) -> None:
        """Do nothing: processes of this machine do not leave."""

    def received(self, worker: int, events: Events) -> None:
        """Pass the events on to the model of the batch."""
        events.batch_id, index = split_id(events.batch_id)
        self._shared.received(self.members[index], worker, events)

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Pass it on to the model whose batch the worker has."""
        self._shared.measured(worker, reports)

    def unavailable(self, reason: str) -> None:
        """Pass it on to all models."""
        self._shared.unavailable(self, reason)


class SharedPool:
    """The worker processes that models share. `member` makes the Executor of one of them, with the arguments of ProcessPool.

    Processes that have a model which left are replaced after `shrink_after` seconds, so that its memory is free. `added` says how many workers were added
    to those of the settings, until the last model leaves.
    """

    def __init__(self, *, shrink_after: float = SHRINK_AFTER, leave_within: float = LEAVE_WITHIN) -> None:
        self.added = 0
        self.resizing = asyncio.Lock()
        self._shrink_after = shrink_after
        self._leave_within = leave_within
        self._leaving: int | None = None  # the worker that is being removed
        self._timer: asyncio.TimerHandle | None = None
        self._shrinking: asyncio.Future[None] | None = None
        self._settings: WorkerSettings | None = None
        self._made: WeakKeyDictionary[PoolMember, None] = WeakKeyDictionary()  # those that have not left, in order
        self._entered: list[PoolMember] = []
        self._workers: SharedWorkers[WorkerUser] = SharedWorkers()
        self._orders: list[SharedWorkers[WorkerUser] | None] = []  # that of the first model
        self._no_model = _NoModel()
        self._listeners: dict[WorkerUser, Listener] = {}  # of the models that have the workers
        self._at: dict[int, _Processes] = {}  # which processes each ready worker belongs to
        self._current: _Processes | None = None
        self._starting: _Processes | None = None
        self._start_task: asyncio.Future[None] | None = None
        self._changing = asyncio.Lock()
        self._moved = asyncio.Event()  # a worker no longer belongs to former processes, or one that leaves has no batch

    @property
    def processes(self) -> ProcessPool | None:
        """The processes, while there are any."""
        return None if self._current is None else self._current.pool

    def member(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
    ) -> Executor:
        """Return the executor of a model. One that does not fit the environment of those before it has workers of its own."""
        found = folder_that_has(model)
        folder = None if found is None else found.path
        folders = {folder, *(each.folder for each in (*self._made, *self._entered))} - {None}
        if self._settings is None:
            self._settings = environment_of(settings)
        if self._settings is None or environment_of(settings) != self._settings or len(folders) > 1:
            return ProcessPool(model, params, settings, name=name, max_batch_size=max_batch_size)
        hosted = Hosted(pack_source(model, params), name, max_batch_size, settings.retry_in_halves)
        made = PoolMember(self, hosted, folder)
        self._made[made] = None
        return made

    # What members do.

    def settle(self, order: SharedWorkers[WorkerUser] | None) -> None:
        """Give the workers away by `order`; None for an own one. Raises SettingsError if it is not that of the models before."""
        if not self._orders:
            self._orders.append(order)
            self._workers = self._workers if order is None else order
        elif order is not self._orders[0]:
            raise SettingsError("device: models that share workers must all have the same device group, or all none")

    @asynccontextmanager
    async def reserved(self, member: PoolMember, worker: int) -> AsyncIterator[None]:
        """See PoolMember."""
        try:
            async with reserved(self._workers, member.user, worker):
                yield
        finally:
            self._came_back(worker)

    def _came_back(self, worker: int) -> None:
        """Let the newest processes take over a worker that was reserved."""
        at = self._at.get(worker)
        if at is not None and at is not self._current and not self._workers.holders(worker):
            self._take_over(worker)
        self._moved.set()

    def _take_turn(self, worker: int, granted: Callable[[], None]) -> Callable[[], None]:
        """See Turns."""
        reservation = Reservation[WorkerUser](self._no_model, worker, granted)
        self._workers.reserve(reservation, self._now())

        def end() -> None:
            self._workers.release(reservation, self._now())
            self._came_back(worker)

        return end

    async def enter(self, member: PoolMember) -> None:
        """Return when the workers have the model. At the first time they are started, with all models that were made by then."""
        self._made.setdefault(member)
        self._entered.append(member)
        async with self._changing:
            current = self._current
            if not member.left and current is None:
                await self._start(list(self._made))
            elif not member.left and current is not None and member not in current.index:
                await self._start([*(each for each in current.members if not each.left), member])
        if member.left:
            raise ModelNotReady(f"{member.hosted.label}: stopped before it was ready")
        self._announce(member)

    async def leave(self, member: PoolMember) -> None:
        """Give the model no more batches. The processes end if no other model has entered."""
        self._made.pop(member, None)
        if member in self._entered:
            self._entered.remove(member)
        if self._listeners.pop(member.user, None) is not None:
            self._workers.remove(member.user, self._now())
        if self._timer is not None:
            self._timer.cancel()
        if self._entered:
            self._timer = asyncio.get_running_loop().call_later(self._shrink_after, self._shrink)
        else:
            current, self._current = self._current, None
            self.added = 0
            self._at.clear()
            self._moved.set()
            await end_tasks(self._start_task)
            if self._shrinking is not None:
                await asyncio.wait([self._shrinking])
            if current is not None:
                await current.pool.stop()

    async def add_worker(self, member: PoolMember) -> None:
        """Start one more process; return when it is ready and all models have been told. Raises what ProcessPool.add_worker raises."""
        async with self._changing:
            await self._running(member).pool.add_worker()
            self.added += 1

    async def remove_worker(self, member: PoolMember, worker: int | None) -> None:
        """End `worker` (None: that of the highest index). `member` has given up its batches there; the other models finish theirs."""
        async with self._changing:
            processes = self._running(member)
            leaving = self._leaving = (
                max(state.index for state in processes.pool.states()) if worker is None else worker
            )
            others = [each for each in self._workers.users if each is not member.user]
            for each in others:
                self._listeners[each].worker_leaves(leaving)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._leave_within):
                        while set(self._workers.holders(leaving)) - {member.user}:
                            self._moved.clear()
                            await self._moved.wait()
            finally:
                self._at.pop(leaving, None)
                processes.ready.pop(leaving, None)
                self._workers.lost(leaving, self._now())
                for each in others:
                    if each in self._listeners:
                        self._listeners[each].worker_lost(leaving, "")
                await processes.pool.remove_worker(leaving)
                self.added -= self._current is processes
                self._leaving = None

    def _running(self, member: PoolMember) -> _Processes:
        if self._current is None:
            raise ModelNotReady(f"{member.hosted.label}: has no workers")
        return self._current

    def _shrink(self) -> None:
        self._shrinking = in_background(self._without_those_that_left(), "the end of a model in shared workers")

    async def _without_those_that_left(self) -> None:
        async with self._changing:
            current = self._current
            staying = [] if current is None else [each for each in current.members if not each.left]
            if current is None or not staying or len(staying) == len(current.members):
                return
            try:
                await self._start(staying)
            except WeirError as error:
                logger.warning("the workers keep the memory of a model that was unloaded: %s", error.message)

    def run(self, member: PoolMember, worker: int, batch: Batch) -> None:
        """See PoolMember."""
        at = self._at[worker]
        at.pool.run(worker, replace(batch, batch_id=hosted_id(batch.batch_id, at.index[member])))
        self._workers.began(member.user, worker, self._now())

    def cancel(self, member: PoolMember, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """See PoolMember."""
        at = self._at.get(worker)
        if at is not None:
            at.pool.cancel(worker, hosted_id(batch_id, at.index[member]), indices)

    async def _start(self, members: Sequence[PoolMember]) -> None:
        """Start processes with these models, and stop the former ones when no worker has a batch there."""
        assert self._settings is not None
        former = self._current
        count = self._settings.first_workers + self.added
        self._starting = _Processes(self, members, replace(self._settings, workers=count))
        if self._orders[0] is not None:  # models of a device group
            self._starting.pool.warm_up_in(self._take_turn)
        self._start_task = asyncio.ensure_future(self._starting.pool.start(self._starting))  # which calls worker_ready
        try:
            await self._start_task
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ModelNotReady(f"{members[0].hosted.label}: stopped before it was ready") from None
        finally:
            self._starting = self._start_task = None
        if former is not None:
            while former in self._at.values():
                self._moved.clear()
                await self._moved.wait()
            await former.pool.stop()

    def _announce(self, member: PoolMember) -> None:
        for worker, at in self._at.items():
            member.user.worker_away(worker)
            member.listener.worker_ready(worker, at.ready[worker])
        self._listeners[member.user] = member.listener
        self._workers.add(member.user)
        for worker in self._at:
            if not self._workers.holders(worker):
                member.user.worker_back(worker)

    # What the processes report.

    def worker_ready(self, processes: _Processes, worker: int) -> None:
        """Let a worker of the newest processes take over, at once or when the former one has no batch left."""
        if self._starting is processes:
            self._current = processes
        if self._current is not processes or worker == self._leaving:
            return
        if not self._workers.holders(worker):
            self._take_over(worker)
            return
        for user in self._workers.users:
            user.worker_away(worker)

    def _take_over(self, worker: int) -> None:
        assert self._current is not None
        is_new = worker not in self._at
        self._at[worker] = self._current
        if is_new:
            for user in self._workers.users:
                user.worker_away(worker)
                self._listeners[user].worker_ready(worker, self._current.ready[worker])
        self._workers.offer(worker, self._now())
        self._moved.set()

    def worker_lost(self, processes: _Processes, worker: int, reason: str) -> None:
        """Tell all models, unless the worker had nothing to do with them any more."""
        if self._at.get(worker) is not processes:
            return
        del self._at[worker]
        self._workers.lost(worker, self._now())
        for listener in list(self._listeners.values()):
            listener.worker_lost(worker, reason)
        if self._current is not None and worker in self._current.ready:
            self._take_over(worker)
        self._moved.set()

    def received(self, member: PoolMember, worker: int, events: Events) -> None:
        """Pass the events on; if the batch has ended, offer the worker. What comes too late from a worker that is removed concerns nobody."""
        if member.left or worker not in self._at:
            for output in events.outputs:
                discard(output)
            return
        if not events.final:
            member.listener.received(worker, events)
            return
        is_former = self._at.get(worker) is not self._current
        self._workers.ends(member.user, worker, self._now())
        if is_former:
            member.user.worker_away(worker)
        member.listener.received(worker, events)
        if is_former and not self._workers.holders(worker):
            self._take_over(worker)
        else:
            self._workers.ended(worker, self._now())
            if worker == self._leaving:
                self._moved.set()

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Tell the model whose batch it is."""
        for user in self._workers.holders(worker):
            if user in self._listeners:
                self._listeners[user].measured(worker, reports)

    def unavailable(self, processes: _Processes, reason: str) -> None:
        """Tell all models."""
        if processes is self._current:
            for listener in list(self._listeners.values()):
                listener.unavailable(reason)

    @staticmethod
    def _now() -> float:
        return monotonic()


class WorkersNeed(NamedTuple):
    """Tells `share_workers` what a model needs.

    `environment` is what must agree in models that share workers: that of `environment_of`, and whatever else their code needs alike.
    None if the model shares with none. `cpus` is how many CPUs its workers take if it has its own in any case; None if it has what is left.
    """

    environment: Hashable | None
    cpus: int | None = None


class WorkersShare(NamedTuple):
    """The workers of a model: their share of the CPUs, None as it states; the pool that it shares with others, None for workers of its
    own; and how many models those in a pool are."""

    cpus: int | None = None
    pool: SharedPool | None = None
    models: int = 1


def share_workers(needs: Sequence[WorkersNeed], cpus: int) -> list[WorkersShare]:
    """Divide `cpus` among the models of a server, and let those share workers that can.

    Models with workers of their own take their CPUs first. What they leave is divided equally among the sets of models that share workers
    and the models that share with none; each has at least one.
    """
    sets: dict[Hashable, list[int]] = {}
    for index, need in enumerate(needs):
        if need.cpus is None:
            sets.setdefault((index,) if need.environment is None else ("", need.environment), []).append(index)
    left = cpus - sum(need.cpus or 0 for need in needs)
    shares = [WorkersShare()] * len(needs)
    for order, places in enumerate(sets.values()):
        each, more = divmod(max(left, len(sets)), len(sets))
        pool = SharedPool() if len(places) > 1 else None
        for index in places:
            shares[index] = WorkersShare(each + (order < more), pool, len(places))
    return shares
