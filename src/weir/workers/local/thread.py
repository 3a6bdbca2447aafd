"""The model in threads of this process: for what releases the GIL while it computes."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weir.errors import ModelError
from weir.messages import Batch, Events
from weir.model import Model, overrides
from weir.workers.executor import Block, Listener
from weir.workers.launch import unpinned
from weir.workers.local.inline import (
    LocalState,
    SharedLoad,
    all_failed,
    make_runner,
    no_arena,
    not_loaded,
    refuse_settings,
    unload,
)
from weir.workers.run.runner import PreparedBatch, Runner
from weir.workers.settings import WorkerSettings, for_worker
from weir.workers.timelimit import TimeLimit

# One worker thread, seen from the loop and from inside.


class WorkerThread:
    """Runs batches one after the other in a thread that it starts.

    The loop and the thread share a queue of batches and the sets of cancelled entries; everything else belongs to the
    loop, which the thread calls with what it has.
    """

    def __init__(
        self, index: int, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str,
        max_batch_size: int, listener: Listener, hang_grace: float, hung: Callable[[], None],
        shared: SharedLoad | None = None,
    ) -> None:  # fmt: skip
        self.hangs = False  # it has not returned from `predict` for much too long
        self._hang_grace = hang_grace
        self._hung = hung
        self._hanging: asyncio.TimerHandle | None = None
        self.state = LocalState(index)
        self._name = name
        self._places = settings.pipeline_depth
        self._cpus: list[int] = for_worker(settings.cpu_affinity, index) or unpinned()
        self._make_runner = partial(make_runner, model, params, settings, index, max_batch_size, fatal=(), label=name)
        self._shared = shared
        self._runner: Runner
        self._listener = listener
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._cancelled: dict[int, set[int]] = {}  # of the batches in flight, in order
        self._loop = asyncio.get_running_loop()
        self._limit = TimeLimit(self._loop, settings.predict_timeout, self._overran)
        self._limit_seconds = settings.predict_timeout
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"weir-{name}-{index}", daemon=True)
        self._given_up: set[int] = set()  # batches whose outcome nobody waits for, as the worker counts as lost

    # On the loop.

    def start(self) -> asyncio.Future[None]:
        """Start the thread; the future tells when the model is loaded and warm, or why not."""
        self._thread.start()
        return self._loaded

    def announce(self) -> None:
        """Take batches from now on."""
        self._stop_waiting()
        self.state.state, self.state.reason = "ready", ""
        self._listener.worker_ready(self.state.index, self._places)

    def run(self, batch: Batch) -> None:
        """Run `batch` after those that are here."""
        if not self._cancelled:
            self._limit.begin()
        self._cancelled[batch.batch_id] = set()
        self.state.in_flight = len(self._cancelled)
        self._batches.put(batch)

    def cancel(self, batch_id: int, indices: Sequence[int]) -> None:
        """Leave these entries of a batch out, if it is not too late."""
        self._cancelled.get(batch_id, set()).update(indices)

    def stop(self) -> asyncio.Future[None]:
        """Finish what is here, unload and end; the future tells when."""
        if self.state.state != "stopped":
            self.state.state = "stopped"
            self._stop_waiting()
            self._limit.close()
            self._batches.put(None)
        return self._ended

    def join(self) -> None:
        """Wait for a thread that has told its end: it is about to return."""
        if self._ended.done():
            self._thread.join()

    def _overran(self) -> None:
        self._given_up = set(self._cancelled)
        self._cancelled = {}
        self.state.in_flight = 0
        self.state.state = "lost"
        self.state.reason = (
            f"predict takes longer than predict_timeout={self._limit_seconds} seconds; as a thread cannot be ended, the "
            "worker is back when it returns"
        )
        self._listener.worker_lost(self.state.index, self.state.reason)
        self._hanging = self._loop.call_later(self._hang_grace, self._hang)

    def _hang(self) -> None:
        self.hangs = True
        self._hung()

    def _stop_waiting(self) -> None:
        self.hangs = False
        if self._hanging is not None:
            self._hanging.cancel()
            self._hanging = None

    def _finished(self, events: Events) -> None:
        if events.batch_id in self._given_up:
            self._given_up.discard(events.batch_id)
            if not self._given_up and self.state.state == "lost":
                self.state.restarts += 1
                self.announce()
            return
        self._limit.end()
        self._cancelled.pop(events.batch_id)
        self.state.in_flight = len(self._cancelled)
        if self._cancelled and self.state.state == "ready":
            self._limit.begin()
        self._listener.received(self.state.index, events)

    def _streamed(self, events: Events) -> None:
        if events.batch_id in self._cancelled:
            self._restarted(events.batch_id)
            self._listener.received(self.state.index, events)

    def _restarted(self, batch_id: int) -> None:
        if batch_id == next(iter(self._cancelled), None) and self.state.state == "ready":
            self._limit.begin()

    # In the thread.

    def _main(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            self._runner = self._make_runner(shared=None if self._shared is None else self._shared.copy())
            self._runner.start()
        except BaseException as error:
            self._tell(_settle, self._loaded, not_loaded(error, self._name, self.state.index))
        else:
            self._tell(_settle, self._loaded, None)
            while (batch := self._batches.get()) is not None:
                self._run(batch)
                del batch  # large payloads do not stay while the worker is idle
            unload(self._runner, self._name, self.state.index)
        self._tell(_settle, self._ended, None)

    def _run(self, batch: Batch) -> None:
        batch_id = batch.batch_id
        if batch_id in self._given_up:
            self._tell(self._finished, Events(batch_id, []))
            return
        cancelled = self._cancelled.get(batch_id, set())
        try:
            prepared = self._runner.prepare(batch)
            compute = self._stream if self._runner.streaming else self._runner.compute
            events = compute(prepared, cancelled, lambda: self._tell(self._restarted, batch_id))
        except BaseException as error:
            events = all_failed(batch, error)
        self._tell(self._finished, events)

    def _stream(self, prepared: PreparedBatch, cancelled: set[int], restarted: Callable[[], None]) -> Events:
        """Tell what `predict` gives as it comes; return the final Events."""
        with contextlib.closing(self._runner.stream(prepared, cancelled, restarted)) as stream:
            for events in stream:
                if events.final:
                    return events
                self._tell(self._streamed, events)
                if prepared.batch_id in self._given_up:
                    break
        return Events(prepared.batch_id, [])

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


STOP_GRACE = 5.0
HANG_GRACE = 30.0


class ThreadExecutor:
    """Runs each worker in a thread of its own, with an instance of the model of its own. See the Executor protocol. What the model's
    `load_shared` loads is there once: each instance is a shallow copy of the one that has loaded it.

    A thread cannot be ended from outside. A batch that overruns `predict_timeout` costs its worker all the same: it is
    reported lost, what it had is run again elsewhere, and the worker is back, with the same instance of the model, as soon
    as the thread returns from `predict`; what it brings then is dropped. One that never returns is lost for good. An
    exception of any kind, SystemExit too, is the entries' error. With `pipeline_depth` 2 the next batch is at hand when
    the thread has finished one. Where all have not returned `hang_grace` seconds after that, they hang: the model is not ready, and
    does not count as alive, until one returns. `stop_grace`: seconds to wait for a thread that is still computing, before it is
    left to itself; it does not keep the process alive.
    """

    def __init__(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int,
        stop_grace: float = STOP_GRACE, hang_grace: float = HANG_GRACE,
    ) -> None:  # fmt: skip
        self._model = model
        self._params = params
        self._settings = settings
        self._name = name
        self._max_batch_size = max_batch_size
        self._stop_grace = stop_grace
        self._hang_grace = hang_grace
        self._shared = SharedLoad(model, params, max_batch_size) if overrides(model, "load_shared") else None
        self._workers: list[WorkerThread] = []
        self._listener: Listener

    async def start(self, listener: Listener) -> None:
        """Load and warm up all instances at once, each in its thread. Raises ModelError when one does or takes longer than
        `start_timeout`, SettingsError for what needs a process; nothing is left running then, but for a thread that
        is still inside the model's code."""
        refuse_settings(self._settings, ("env", "threads"))
        self._listener = listener
        self._workers = [self._make_worker(index) for index in range(self._settings.workers)]
        await self._load(self._workers)

    async def add_worker(self) -> None:
        """Load and warm up one instance more. Raises as `start` does; the others go on."""
        worker = self._make_worker(len(self._workers))
        self._workers.append(worker)
        try:
            await self._load([worker])
        except BaseException:
            self._workers.remove(worker)
            raise

    async def remove_worker(self) -> None:
        """Have the last thread finish what it has, unload and end."""
        await _end([self._workers.pop()], self._stop_grace)

    def _make_worker(self, index: int) -> WorkerThread:
        return WorkerThread(
            index, self._model, self._params, self._settings, name=self._name, max_batch_size=self._max_batch_size,
            listener=self._listener, hang_grace=self._hang_grace, hung=self._hung, shared=self._shared,
        )  # fmt: skip

    def _hung(self) -> None:
        if all(worker.hangs for worker in self._workers):
            self._listener.unavailable(f"each worker of {self._name!r} hangs: {self._workers[0].state.reason}")

    async def _load(self, workers: Sequence[WorkerThread]) -> None:
        loads = [worker.start() for worker in workers]
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                await asyncio.gather(*loads)
        except BaseException as error:
            for load in loads:
                load.cancel()
            await _end(workers, self._stop_grace if isinstance(error, ModelError) else 0.0)
            if isinstance(error, TimeoutError):
                limit = self._settings.start_timeout
                raise ModelError(f"{self._name!r} did not load within start_timeout={limit} seconds") from None
            raise
        for worker in workers:
            worker.announce()

    def run(self, worker: int, batch: Batch) -> None:
        """Hand `batch` to the worker's thread."""
        self._workers[worker].run(batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Leave these entries out, if `predict` has not begun with them."""
        self._workers[worker].cancel(batch_id, indices)

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def stop(self) -> None:
        """Have every thread finish what it has, unload and end."""
        await _end(self._workers, self._stop_grace)

    def states(self) -> Sequence[LocalState]:
        """Return the state of each worker, by index."""
        return [worker.state for worker in self._workers]

    def gauges(self) -> dict[str, Any]:
        """Return how often a worker was lost and came back; there is no arena."""
        return no_arena(sum(worker.state.restarts for worker in self._workers))


async def _end(workers: Sequence[WorkerThread], grace: float) -> None:
    ends = [worker.stop() for worker in workers]
    if ends:
        await asyncio.wait(ends, timeout=grace)
    for worker in workers:
        worker.join()
