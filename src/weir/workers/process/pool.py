"""Worker processes as an Executor: one SupervisedWorker for each, an arena for their requests, and the template that they are forked from."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from weir.errors import ModelError, ModelNotReady, SettingsError, WeirError, reason_of
from weir.messages import Batch
from weir.model import Model, is_tensor_model, overrides
from weir.wire.frames import Start
from weir.workers.arena import Arena, SharedBlock, create_memory
from weir.workers.cpus import unpinned
from weir.workers.executor import READY, Capabilities, Listener, Turns, for_all_work, free_index
from weir.workers.process.launch import Launch, Template, Templates
from weir.workers.process.supervision import Child, ChildListener, SupervisedWorker, WorkerChild
from weir.workers.settings import WorkerSettings
from weir.workers.source import pack_source
from weir.workers.timer import end_tasks, resolve

logger = logging.getLogger("weir")

STOP_GRACE = 5.0  # seconds


class Spawner(Protocol):
    """Starts the processes of a pool elsewhere than on this machine."""

    async def open(self) -> None:
        """Be ready to start processes. Raises SettingsError if that cannot be."""

    def spawn(self, launch: Launch, owner: ChildListener, loop: asyncio.AbstractEventLoop) -> WorkerChild:
        """See Spawn."""

    async def close(self) -> None:
        """Start no more. All processes have ended. Idempotent."""


class ProcessPool:
    """Runs each worker of a model in a process of its own. See the Executor protocol.

    `model` is the class, or where to find it (module:Class, path/file.py:Class). The kernel kills the processes when the thread that called `start`
    ends. `stop_grace` is for how many seconds a worker may finish its batches and unload. With a `spawner`, the processes are elsewhere, and nothing
    is shared by them.
    """

    def __init__(
        self,
        model: type[Model] | str,
        params: dict[str, Any],
        settings: WorkerSettings,
        *,
        name: str,
        max_batch_size: int,
        stop_grace: float = STOP_GRACE,
        spawner: Spawner | None = None,
    ) -> None:
        self._spawner = spawner
        self._model = model
        self._params = params
        self._settings = settings
        self._name = name
        self._max_batch_size = max_batch_size
        self._stop_grace = stop_grace
        self._arena: Arena | None = None
        self._template: Template | None = None
        self._templates: Templates | None = None
        self._common: Template | None = None  # one of those, which is not ours
        self._turns: Turns | None = None
        self._workers: dict[int, SupervisedWorker] = {}  # by index
        self._listener: Listener
        self._source = b""
        self._preparing = asyncio.Lock()  # only one call loads the template
        self._awaited: dict[SupervisedWorker, asyncio.Future[None]] = {}  # workers that have never been ready
        self._bulk_starts: asyncio.Future[Any] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See Capabilities."""
        if self._spawner is not None:
            return Capabilities()
        return Capabilities(
            warm_up_in=self.warm_up_in, start_bulk_workers=self.start_bulk_workers, fork_from=self.fork_from
        )

    def fork_from(self, templates: Templates) -> None:
        """See Capabilities."""
        self._templates = templates

    def warm_up_in(self, turns: Turns) -> None:
        """See Capabilities."""
        self._turns = turns

    async def start(self, listener: Listener) -> None:
        """Start all workers at once; return when every one has loaded and warmed up.

        Raises ModelError with the worker's traceback when one does not, SettingsError when a worker cannot import the model; nothing is left
        running then.
        """
        self._listener = listener
        try:
            self._source = self._pack()
            self._arena = self._make_arena()
            await self._prepare()
            self._workers = {index: self._make_worker(index) for index in range(self._settings.first_workers)}
            await asyncio.gather(*[self._begin(worker) for worker in self._workers.values()])
            for worker in self._workers.values():
                _check_lives(worker)
        except BaseException:
            await self._end()
            raise
        for worker in self._workers.values():
            worker.announce()

    async def add_worker(self) -> None:
        """Start one more process; return when it has loaded and warmed up. Raises what `start` raises; the others go on."""
        async with self._preparing:
            if self._template is None:
                await self._load_template()
        await self._add()

    async def _add(self, *, bulk: bool = False) -> None:
        index = free_index(self._workers)
        worker = self._workers[index] = self._make_worker(index, bulk=bulk)
        try:
            await self._begin(worker)
            _check_lives(worker)
        except BaseException:
            self._awaited.pop(worker, None)
            await _ended([worker])
            self._workers.pop(worker.index, None)
            raise
        worker.announce()

    def start_bulk_workers(self) -> None:
        """Begin to start the processes of idle priority for bulk work, unless that was begun before. One that does not start is left out, and a
        warning says why."""
        if self._bulk_starts is None:
            count = self._settings.bulk_workers or 0
            self._bulk_starts = asyncio.gather(*[self._add_for_bulk() for _ in range(count)])

    async def _add_for_bulk(self) -> None:
        async with self._preparing:
            if self._template is None and self._settings.bulk_workers != 1:  # one process gains nothing from a template
                await self._load_template()
        try:
            await self._add(bulk=True)
        except WeirError as error:
            logger.warning("%s: no worker for bulk work was started: %s", self._name, error.message)

    async def remove_worker(self, worker: int | None = None) -> None:
        """Have the process unload and end; kill it after the grace."""
        leaving = self._workers[for_all_work(self.states())[-1].index if worker is None else worker]
        leaving.unload(self._stop_grace)
        try:
            await asyncio.wait([leaving.stopped])
        finally:
            await _ended([leaving])
            self._workers.pop(leaving.index, None)

    def _begin(self, worker: SupervisedWorker) -> asyncio.Future[None]:
        ready = self._awaited[worker] = asyncio.get_running_loop().create_future()
        worker.start()
        return ready

    def run(self, worker: int, batch: Batch) -> None:
        """Send `batch` to `worker`. Payloads over 32 KB go through the arena while it has room."""
        chosen = self._workers[worker]
        if len(self._workers) > 1 and not chosen.bulk:
            batch.share = self._share(worker, batch.others)
        chosen.run(batch)

    def _share(self, chosen: int, others: int) -> int:
        """Return how many workers there are for each that has a batch, is `chosen` for one, or will have one of `others`. Bulk work gives way, so its
        workers do not count."""
        ready, busy = 0, others
        for index, worker in self._workers.items():
            if not worker.bulk and worker.state == "ready":
                ready += 1
                busy += index == chosen or worker.in_flight > 0
        return max(1, ready // max(1, busy))

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Tell `worker` that no caller waits for these entries any more."""
        self._workers[worker].cancel(batch_id, list(indices))

    def reserve(self, size_bytes: int) -> SharedBlock | None:
        """Return a place in the arena for a payload to be received into; None if none that large is free."""
        return None if self._arena is None else self._arena.reserve(size_bytes)

    async def stop(self) -> None:
        """Have every worker finish its batches and unload; kill those that take longer than the grace.

        No process is left when this returns or is cancelled, except one that is still running after it was killed: a warning names it.
        """
        try:
            await end_tasks(self._bulk_starts)
            workers = list(self._workers.values())
            for worker in workers:
                worker.stop(self._stop_grace)
            if workers:
                await asyncio.wait([worker.stopped for worker in workers])
        finally:
            awaited = list(self._awaited.values())
            await self._end()
            for ready in awaited:
                resolve(ready, ModelNotReady(f"{self._name}: stopped before it was ready"))

    def states(self) -> Sequence[SupervisedWorker]:
        """Return the workers, which are their own states."""
        return [self._workers[index] for index in sorted(self._workers)]

    def pids(self) -> list[int]:
        """Return the process ids of the workers, and that of the template."""
        pids = [worker.pid for worker in self.states()]
        return [pid for pid in (*pids, None if self._template is None else self._template.pid) if pid is not None]

    def gauges(self) -> dict[str, Any]:
        """Return numbers for metrics."""
        return {
            "arena_bytes": 0 if self._arena is None else self._arena.size_bytes,
            "arena_free_bytes": 0 if self._arena is None else self._arena.free_bytes,
            "results_held_bytes": sum(worker.held_bytes for worker in self._workers.values()),
            "restarts": sum(worker.restarts for worker in self._workers.values()),
        }

    def worker_started(self, worker: SupervisedWorker) -> None:
        """Note that `worker` is ready for the first time."""
        ready = self._awaited.pop(worker, None)
        if ready is not None:
            resolve(ready, None)

    def worker_failed(self, worker: SupervisedWorker, error: WeirError) -> None:
        """Note that `worker` did not become ready, at the start or again and again."""
        ready = self._awaited.pop(worker, None)
        if ready is None:
            if all(other.keeps_failing for other in self._workers.values() if not other.bulk):
                self._listener.unavailable(f"no worker of {self._name!r} is left: {worker.reason}")
        else:
            resolve(ready, error)

    def unreachable(self, reason: str) -> None:
        """Note that no worker can be started now."""
        if all(worker.state != READY for worker in self._workers.values()):
            self._listener.unavailable(f"no worker of {self._name!r} is left: {reason}")

    def _pack(self) -> bytes:
        try:
            return pack_source(self._model, self._params)
        except WeirError:
            raise
        except Exception as error:  # whatever a user's __reduce__ raises
            raise SettingsError(
                f"{self._name}: model and params={self._params!r} must be picklable to reach a worker process "
                f"({type(error).__name__}: {error})"
            ) from error

    async def _prepare(self) -> None:
        """Do what has to be done before the first workers are started."""
        if self._spawner is not None:
            await self._spawner.open()
            return
        if self._settings.most_workers > 1:
            await self._load_template()
        if self._templates is not None:
            self._common = await self._templates.find(self._launch(0))

    async def _load_template(self) -> None:
        """Start the template, which loads what the workers share, if the model has `load_shared`. If that fails, each worker loads it by itself, and
        reports the error."""
        if self._spawner is not None:
            return
        environments = {tuple(sorted(each.items())) for each in self._settings.env}
        if not (isinstance(self._model, type) and overrides(self._model, "load_shared")) or len(environments) > 1:
            return
        launch = self._launch(0)
        start = Start(self._source, launch.options())
        self._template = Template()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._settings.start_timeout):
                if await self._template.start(start, launch.environment(os.environ), unpinned()):
                    return
        template, self._template = self._template, None
        template.close()
        await all_done([template.closed])

    def _launch(self, index: int, **more: Any) -> Launch:
        return Launch(self._name, index, self._source, self._settings, self._max_batch_size, **more)

    def _make_arena(self) -> Arena | None:
        size_bytes = self._settings.arena_bytes
        if not size_bytes:
            return None
        try:
            return Arena(create_memory(f"weir-requests-{self._name}", size_bytes), size_bytes)
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"arena_bytes={size_bytes}: the system cannot allocate that much ({reason_of(error)})"
            ) from error

    def _make_worker(self, index: int, *, bulk: bool = False) -> SupervisedWorker:
        launch = self._launch(
            index,
            request_fd=-1 if self._arena is None else self._arena.fd,
            request_bytes=self._settings.arena_bytes,
            result_bytes=self._settings.arena_bytes,
            lends=isinstance(self._model, type) and is_tensor_model(self._model),
            template=self._template or self._common,
            bulk=bulk,
            turns=None if bulk else self._turns,
        )
        spawn = Child if self._spawner is None else self._spawner.spawn
        return SupervisedWorker(launch, self._arena, self, self._listener, asyncio.get_running_loop(), spawn)

    async def _end(self) -> None:
        self._awaited.clear()
        try:
            await _ended(self.states())  # before the template, which reaps them
        finally:
            if self._template is not None:
                self._template.close()
                await all_done([self._template.closed])
            if self._arena is not None:
                self._arena.close()
            if self._spawner is not None:
                await self._spawner.close()


def _check_lives(worker: SupervisedWorker) -> None:
    """Raise ModelError if the worker, which was ready, has ended before it was announced: while others loaded, or in this very turn."""
    if worker.state == "failed":
        raise ModelError(worker.reason)


async def _ended(workers: Sequence[SupervisedWorker]) -> None:
    for worker in workers:
        worker.end()
    await all_done([worker.stopped for worker in workers])


async def all_done(futures: Sequence[asyncio.Future[None]]) -> None:
    """Wait until all futures are done, also when this is cancelled; raise CancelledError then."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
