"""Executors in the server's own process: on the event loop, and in threads.

`InlineExecutor` runs the model on the event loop itself, for models that take microseconds, for notebooks and for tests. `ThreadExecutor` runs it
in threads, for models that release the GIL while they compute.
"""

import asyncio
import contextlib
import copy
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from weir.errors import ModelError, ModelNotReady, SettingsError, WeirError
from weir.messages import Batch, Events, Timing
from weir.metrics import MetricReport
from weir.model import Model, overrides
from weir.workers.cpus import unpinned
from weir.workers.executor import WAITS, Capabilities, ExecutorBase, HeldTurn, Listener, Turns, free_index
from weir.workers.run.runner import RunnableModel, Runner, load_shared
from weir.workers.run.steps import copies, load_error, model_error
from weir.workers.settings import WorkerSettings, for_worker
from weir.workers.timer import TimeLimit, resolve

logger = logging.getLogger("weir")


class LocalState:
    """The state of a worker in this process (see WorkerState)."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = "starting"
        self.pid: int | None = os.getpid()
        self.in_flight = 0
        self.restarts = 0
        self.reason = ""


def refuse_settings(settings: WorkerSettings, names: tuple[str, ...]) -> None:
    """Raise SettingsError if one of `names` is set, which only worker processes can honour."""
    for name in names:
        value = getattr(settings, name)
        if value:
            raise SettingsError(f"{name}={value!r}: needs worker processes, not executor={settings.executor!r}")


def unload(runner: Runner, name: str, index: int) -> None:
    """Stop `runner`. What its model raises is logged."""
    try:
        runner.stop()
    except (Exception, SystemExit):
        logger.exception("worker %d of %r: unload raised", index, name)


class SharedLoad:
    """The model whose `load_shared` has run for all worker threads: made and loaded once, by the first of them."""

    def __init__(self, model: RunnableModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._loaded: Model | None = None

    def copy(self) -> Model:
        """Return a copy for one worker. Raises whatever the constructor and `load_shared` raise, in each worker."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load_shared(self._model.kind, self._model.params, self._model.max_batch_size)
        return copy.copy(self._loaded)


def not_loaded(error: BaseException, name: str, index: int) -> WeirError:
    """Return the error of a worker whose start raised `error`."""
    return load_error(f"worker {index} of {name!r} did not load: it", error)


def all_failed(batch: Batch, error: BaseException) -> Events:
    """Return the final events of a batch that did not run to its end because of `error`."""
    outputs: list[Any] = [*copies(model_error("the worker", error), len(batch.payloads))]
    return Events(batch.batch_id, outputs, timing=Timing(0.0, 0.0, 0.0))


class InlineExecutor(ExecutorBase):
    """Runs batches between the loop's other callbacks, which wait meanwhile. See the Executor protocol.

    There is one worker, whatever the setting `workers` is, because several would only take turns. `predict_timeout` and `start_timeout` cannot be
    kept: nothing else runs meanwhile. The deadlines of requests are checked after the batch. An exception of any kind, SystemExit too, is the
    error of the entries; KeyboardInterrupt is also passed on.
    """

    def __init__(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
    ) -> None:
        self._settings = settings
        self._name = name
        runs = RunnableModel(model, params, max_batch_size, settings.retry_in_halves, name)
        self._runner = Runner(runs, 0, fatal=(KeyboardInterrupt,))
        self._state = LocalState(0)
        self._cancelled: dict[int, set[int]] = {}
        self._stream: Generator[Events, None, None] | None = None  # of the batch that runs, if the model is streaming
        self._listener: Listener
        self._loop: asyncio.AbstractEventLoop
        self._turn = HeldTurn(None, 0)
        self._granted = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See Capabilities."""
        return Capabilities(warm_up_in=self.warm_up_in)

    def warm_up_in(self, turns: Turns) -> None:
        """See Capabilities."""
        self._turn = HeldTurn(turns, 0)

    async def start(self, listener: Listener) -> None:
        """Load and warm up, on the loop. Raises ModelError when the model raises, SettingsError for a setting that needs a process."""
        refuse_settings(self._settings, ("env", "cpu_affinity", "threads"))
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._state.state = "starting"
        try:
            for wanted in self._runner.starting():
                await self._take_turn(wanted=wanted)
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:
            self._state.state = "failed"
            self._state.reason = str(error)
            raise not_loaded(error, self._name, 0) from error
        finally:
            self._turn.end()
        self._state.state = "ready"
        listener.worker_ready(0, 1)
        if measured := self._runner.measured():
            listener.measured(0, measured)

    async def _take_turn(self, *, wanted: bool) -> None:
        self._turn.end()
        if wanted:
            self._granted.clear()
            self._state.reason = WAITS
            self._turn.ask(self._granted.set)
            await self._granted.wait()
            self._state.reason = ""
            if self._state.state == "stopped":
                raise ModelNotReady(f"{self._name}: stopped before it was ready")

    def run(self, worker: int, batch: Batch) -> None:
        """Run `batch` when the loop has run its other callbacks."""
        self._state.in_flight += 1
        self._cancelled[batch.batch_id] = set()
        self._loop.call_soon(self._run, batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Leave these entries out, if their batch has not begun; the generator of a streaming model gets their indices."""
        self._cancelled.get(batch_id, set()).update(indices)

    async def stop(self) -> None:
        """Unload the model. A batch that has not begun is dropped, a stream that has not ended is closed."""
        before = self._state.state
        if before in ("starting", "ready"):
            self._state.state = "stopped"
            self._granted.set()
        if before != "ready":
            return
        if self._stream is not None:
            self._stream.close()
        unload(self._runner, self._name, 0)

    def states(self) -> Sequence[LocalState]:
        """Return the state of the one worker."""
        return [self._state]

    def _run(self, batch: Batch) -> None:
        if self._state.state != "ready":
            return
        cancelled = self._cancelled[batch.batch_id]
        try:
            prepared = self._runner.prepare(batch)
            events = None if self._runner.streaming else self._runner.compute(prepared, cancelled)
        except BaseException as error:
            self._received(all_failed(batch, error))
            raise
        if events is not None:
            self._received(events)
        else:
            self._stream = self._runner.stream(prepared, cancelled)
            self._step(batch, self._stream)

    def _step(self, batch: Batch, stream: Generator[Events, None, None]) -> None:
        """Run `predict` until it yields; the loop's other callbacks run before it goes on."""
        if self._state.state != "ready":
            return
        try:
            events = next(stream)
        except BaseException as error:
            self._received(all_failed(batch, error))
            raise
        if events.final:
            self._received(events)
        else:
            self._loop.call_soon(self._step, batch, stream)
            self._report(events)

    def _received(self, events: Events) -> None:
        self._state.in_flight -= 1
        del self._cancelled[events.batch_id]
        self._report(events)

    def _report(self, events: Events) -> None:
        if events.measured:
            self._listener.measured(0, events.measured)
        self._listener.received(0, events)


class WorkerThread:
    """Runs batches one after the other in a thread that it starts.

    The event loop and the thread share a queue of batches and the sets of cancelled entries. Everything else belongs to the loop, on which the
    thread schedules callbacks.
    """

    def __init__(self, index: int, host: "ThreadExecutor", listener: Listener) -> None:
        settings, turns = host.settings, host.turns
        self.hangs = False  # `predict` has not returned for `hang_grace` seconds after its limit
        self._host = host
        self._hanging: asyncio.TimerHandle | None = None
        self.state = LocalState(index)
        self._name = name = host.model.label
        self._places = settings.pipeline_depth
        self._cpus: list[int] = for_worker(settings.cpu_affinity, index) or unpinned()
        self._runner: Runner
        self._listener = listener
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._cancelled: dict[int, set[int]] = {}  # of the batches in flight, in order
        self._loop = asyncio.get_running_loop()
        self._limit = TimeLimit(self._loop, settings.predict_timeout, self._overran)
        self._limit_seconds = settings.predict_timeout
        self._turn = HeldTurn(turns, index)
        self._granted = threading.Event()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._start_limit = TimeLimit(self._loop, settings.start_timeout, lambda: resolve(self._loaded, TimeoutError()))
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"weir-{name}-{index}", daemon=True)
        self._given_up: set[int] = set()  # batches without a caller, because the worker counts as lost

    # Called on the event loop.

    def start(self) -> asyncio.Future[None]:
        """Start the thread. The future is done when the model has loaded and warmed up, or has the error: TimeoutError after `start_timeout`."""
        self._start_limit.begin()
        self._loaded.add_done_callback(lambda _: self._start_limit.close())
        self._thread.start()
        return self._loaded

    def announce(self) -> None:
        """Tell the listener that the worker takes batches."""
        self._stop_waiting()
        self.state.state, self.state.reason = "ready", ""
        self._listener.worker_ready(self.state.index, self._places)

    def run(self, batch: Batch) -> None:
        """Run `batch` after the batches that the worker has."""
        if not self._cancelled:
            self._limit.begin()
        self._cancelled[batch.batch_id] = set()
        self.state.in_flight = len(self._cancelled)
        self._batches.put(batch)

    def cancel(self, batch_id: int, indices: Sequence[int]) -> None:
        """Leave these entries of a batch out, if `predict` has not begun with them."""
        self._cancelled.get(batch_id, set()).update(indices)

    def stop(self) -> asyncio.Future[None]:
        """Finish the batches that the worker has, unload and end. The future is done then."""
        if self.state.state != "stopped":
            self.state.state = "stopped"
            self._stop_waiting()
            self._limit.close()
            self._turn.end()
            self._granted.set()
            self._batches.put(None)
        return self._ended

    def join(self) -> None:
        """Wait for a thread that has reported its end, and is about to return."""
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
        self._hanging = self._loop.call_later(self._host.hang_grace, self._hang)

    def _hang(self) -> None:
        self.hangs = True
        self._host.hung()

    def _stop_waiting(self) -> None:
        self.hangs = False
        if self._hanging is not None:
            self._hanging.cancel()
            self._hanging = None

    def _ask(self, wanted: bool) -> None:
        self._turn.end()
        if not wanted:
            return
        if self.state.state == "starting":
            self._start_limit.pause()
            self.state.reason = WAITS
            self._turn.ask(self._begin_turn)
        else:
            self._granted.set()

    def _begin_turn(self) -> None:
        self._start_limit.go_on()
        self.state.reason = ""
        self._granted.set()

    def _measured(self, reports: list[MetricReport] | None) -> None:
        if reports:
            self._listener.measured(self.state.index, reports)

    def _finished(self, events: Events) -> None:
        self._measured(events.measured)
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
        self._measured(events.measured)
        if events.batch_id in self._cancelled:
            self._restarted(events.batch_id)
            self._listener.received(self.state.index, events)

    def _restarted(self, batch_id: int) -> None:
        if batch_id == next(iter(self._cancelled), None) and self.state.state == "ready":
            self._limit.begin()

    # Called in the thread.

    def _main(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            shared = None if self._host.shared is None else self._host.shared.copy()
            self._runner = Runner(self._host.model, self.state.index, fatal=(), shared=shared)
            for wanted in self._runner.starting():
                if self._turn.is_needed:
                    self._take_turn(wanted=wanted)
        except BaseException as error:
            self._report(self._turn.end)
            self._report(resolve, self._loaded, not_loaded(error, self._name, self.state.index))
        else:
            self._report(self._measured, self._runner.measured())
            self._report(resolve, self._loaded, None)
            while (batch := self._batches.get()) is not None:
                self._run(batch)
                del batch  # large payloads do not stay while the worker is idle
            unload(self._runner, self._name, self.state.index)
        self._report(resolve, self._ended, None)

    def _take_turn(self, *, wanted: bool) -> None:
        self._granted.clear()
        self._report(self._ask, wanted)
        if wanted:
            self._granted.wait()
        if self.state.state == "stopped":
            raise ModelNotReady(f"{self._name}: stopped before it was ready")

    def _run(self, batch: Batch) -> None:
        try:
            final = self._final_events(batch)
        except BaseException as error:
            final = all_failed(batch, error)
        self._report(self._finished, final)

    def _final_events(self, batch: Batch) -> Events:
        """Run `batch`; report the events that come before the final ones, and return those. They are empty if the worker counts as lost."""
        batch_id = batch.batch_id
        if batch_id not in self._given_up:
            cancelled = self._cancelled.get(batch_id, set())
            stream = self._runner.run(
                self._runner.prepare(batch), cancelled, lambda: self._report(self._restarted, batch_id)
            )
            with contextlib.closing(stream):
                for events in stream:
                    if events.final:
                        return events
                    self._report(self._streamed, events)
                    if batch_id in self._given_up:
                        break
        return Events(batch_id, [])

    def _report(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


STOP_GRACE = 5.0
HANG_GRACE = 30.0


class ThreadExecutor(ExecutorBase):
    """Runs each worker in a thread of its own, with its own instance of the model. See the Executor protocol.

    What the model's `load_shared` loads exists once: each instance is a shallow copy of the one that has loaded it. An exception of any kind,
    SystemExit too, is the error of the entries. With `pipeline_depth` 2 the thread has its next batch when it has finished one.

    A thread cannot be ended from outside. When a batch runs longer than `predict_timeout`, its worker is reported lost, and its batches run again
    elsewhere. The worker is back, with the same instance of the model, when the thread returns from `predict`; what it returns then is dropped.
    A thread that never returns is lost for good. When no thread has returned `hang_grace` seconds later, all hang: the model is neither ready nor
    alive until one returns. `stop_grace` is for how many seconds to wait for a thread that still computes before it is abandoned; it does not
    keep the process alive.
    """

    def __init__(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int,
        stop_grace: float = STOP_GRACE, hang_grace: float = HANG_GRACE,
    ) -> None:  # fmt: skip
        self.model = RunnableModel(model, params, max_batch_size, settings.retry_in_halves, name)
        self.settings = settings
        self.hang_grace = hang_grace
        self.shared = SharedLoad(self.model) if overrides(model, "load_shared") else None
        self.turns: Turns | None = None
        self._name = name
        self._stop_grace = stop_grace
        self._workers: dict[int, WorkerThread] = {}  # by index
        self._listener: Listener

    @property
    def capabilities(self) -> Capabilities:
        """See Capabilities."""
        return Capabilities(warm_up_in=self.warm_up_in)

    def warm_up_in(self, turns: Turns) -> None:
        """See Capabilities."""
        self.turns = turns

    async def start(self, listener: Listener) -> None:
        """Load and warm up all instances at once, each in its thread.

        Raises ModelError when one raises or takes longer than `start_timeout`, SettingsError for a setting that needs a process. Nothing is left
        running then, except a thread that is still inside the model's code.
        """
        refuse_settings(self.settings, ("env", "threads"))
        self._listener = listener
        workers = range(self.settings.first_workers)
        self._workers = {index: WorkerThread(index, self, listener) for index in workers}
        await self._load(list(self._workers.values()))

    async def add_worker(self) -> None:
        """Load and warm up one more instance. Raises what `start` raises; the others go on."""
        index = free_index(self._workers)
        worker = self._workers[index] = WorkerThread(index, self, self._listener)
        try:
            await self._load([worker])
        except BaseException:
            self._workers.pop(index, None)
            raise

    async def remove_worker(self, worker: int | None = None) -> None:
        """Have the thread finish its batches, unload and end."""
        index = max(self._workers) if worker is None else worker
        try:
            await _end([self._workers[index]], self._stop_grace)
        finally:
            del self._workers[index]

    def hung(self) -> None:
        """Note that a worker hangs: the model is unavailable while all do."""
        workers = list(self._workers.values())
        if all(worker.hangs for worker in workers):
            self._listener.unavailable(f"each worker of {self._name!r} hangs: {workers[0].state.reason}")

    async def _load(self, workers: Sequence[WorkerThread]) -> None:
        loads = [worker.start() for worker in workers]
        try:
            await asyncio.gather(*loads)
        except BaseException as error:
            for load in loads:
                load.cancel()
            await _end(workers, self._stop_grace if isinstance(error, ModelError) else 0.0)
            if isinstance(error, TimeoutError):
                limit = self.settings.start_timeout
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

    async def stop(self) -> None:
        """Have every thread finish its batches, unload and end."""
        await _end(list(self._workers.values()), self._stop_grace)

    def states(self) -> Sequence[LocalState]:
        """Return the state of each worker, by index."""
        return [self._workers[index].state for index in sorted(self._workers)]


async def _end(workers: Sequence[WorkerThread], grace: float) -> None:
    ends = [worker.stop() for worker in workers]
    if ends:
        await asyncio.wait(ends, timeout=grace)
    for worker in workers:
        worker.join()
