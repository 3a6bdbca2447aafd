"""The model on the event loop itself, for models that take microseconds, for notebooks and for tests; and what this executor shares with the threads."""

import asyncio
import copy
import logging
import os
import threading
from collections.abc import Generator, Sequence
from typing import Any

from weir.errors import SettingsError, WeirError
from weir.messages import Batch, EventKind, Events, Timing
from weir.model import Model
from weir.workers.executor import Block, FixedWorkers, Listener
from weir.workers.faults import copies, model_error
from weir.workers.run.runner import Runner
from weir.workers.settings import WorkerSettings

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
    """Stop `runner`. What its model raises is logged: it ends all the same."""
    try:
        runner.stop()
    except (Exception, SystemExit):
        logger.exception("worker %d of %r: unload raised", index, name)


def no_arena(restarts: int = 0) -> dict[str, Any]:
    """Return the gauges of an executor without shared memory."""
    return {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": restarts}


def make_runner(
    model: type[Model], params: dict[str, Any], settings: WorkerSettings, index: int, max_batch_size: int,
    fatal: tuple[type[BaseException], ...], label: str, shared: Model | None = None,
) -> Runner:  # fmt: skip
    """Return a runner that has not been started. `shared`: see Runner."""
    return Runner(
        model, params, worker_index=index, max_batch_size=max_batch_size, retry_in_halves=settings.retry_in_halves,
        fatal=fatal, label=label, shared=shared,
    )  # fmt: skip


class SharedLoad:
    """What the worker threads of a model share: made and loaded once, by the first of them."""

    def __init__(self, model: type[Model], params: dict[str, Any], max_batch_size: int) -> None:
        self._class = model
        self._params = params
        self._max_batch_size = max_batch_size
        self._lock = threading.Lock()
        self._loaded: Model | None = None

    def copy(self) -> Model:
        """Return a model of one's own that has what is shared. Raises whatever the constructor and `load_shared` raise, to each who asks."""
        with self._lock:
            if self._loaded is None:
                model = self._class(**self._params)
                model.max_batch_size = self._max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
                model.load_shared()
                self._loaded = model
        return copy.copy(self._loaded)


def not_loaded(error: BaseException, name: str, index: int) -> WeirError:
    """Return what a failed start is told as."""
    return error if isinstance(error, WeirError) else model_error(f"worker {index} of {name!r} did not load: it", error)


def all_failed(batch: Batch, error: BaseException) -> Events:
    """Return the events of a batch that could not be run to its end because of `error`."""
    count = len(batch.payloads)
    outputs: list[Any] = [*copies(model_error("the worker", error), count)] if count else []
    return Events(batch.batch_id, outputs, kinds=[EventKind.ERROR] * count, timing=Timing(0.0, 0.0, 0.0))


class InlineExecutor(FixedWorkers):
    """Runs batches between the loop's other callbacks, which wait meanwhile. See the Executor protocol.

    There is one worker, however many the settings ask for: they would take turns. `predict_timeout` and `start_timeout`
    cannot be kept, as nothing else runs that could; the deadlines of requests are seen after the batch.
    An exception of any kind, SystemExit too, is the entries' error, but for KeyboardInterrupt, which is also passed on.
    """

    def __init__(
        self, model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
    ) -> None:
        self._settings = settings
        self._name = name
        self._runner = make_runner(model, params, settings, 0, max_batch_size, fatal=(KeyboardInterrupt,), label=name)
        self._state = LocalState(0)
        self._cancelled: dict[int, set[int]] = {}
        self._stream: Generator[Events, None, None] | None = None  # of the batch that runs, if the model is streaming
        self._listener: Listener
        self._loop: asyncio.AbstractEventLoop

    async def start(self, listener: Listener) -> None:
        """Load and warm up, on the loop. Raises ModelError when the model does, SettingsError for what needs a process."""
        refuse_settings(self._settings, ("env", "cpu_affinity", "threads"))
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._state.state = "starting"
        try:
            self._runner.start()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._state.state = "failed"
            self._state.reason = str(error)
            raise not_loaded(error, self._name, 0) from error
        self._state.state = "ready"
        listener.worker_ready(0, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Run `batch` in one of the loop's next turns."""
        self._state.in_flight += 1
        self._cancelled[batch.batch_id] = set()
        self._loop.call_soon(self._run, batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Leave these entries out, if their batch has not begun; a streaming model is told of them."""
        self._cancelled.get(batch_id, set()).update(indices)

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def stop(self) -> None:
        """Unload the model. A batch that has not begun is dropped, a stream that has not ended is closed."""
        if self._state.state != "ready":
            return
        self._state.state = "stopped"
        if self._stream is not None:
            self._stream.close()
        unload(self._runner, self._name, 0)

    def states(self) -> Sequence[LocalState]:
        """Return the state of the one worker."""
        return [self._state]

    def gauges(self) -> dict[str, Any]:
        """Return zeros: there is no arena and nothing to restart."""
        return no_arena()

    def _run(self, batch: Batch) -> None:
        if self._state.state != "ready":
            return
        cancelled = self._cancelled[batch.batch_id]
        try:
            prepared = self._runner.prepare(batch)
            if self._runner.streaming:
                self._stream = self._runner.stream(prepared, cancelled)
                self._loop.call_soon(self._step, batch, self._stream)
                return
            events = self._runner.compute(prepared, cancelled)
        except BaseException as error:
            self._received(all_failed(batch, error))
            raise
        self._received(events)

    def _step(self, batch: Batch, stream: Generator[Events, None, None]) -> None:
        """Let `predict` run to its next yield; the loop's other callbacks come before the one after."""
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
            self._listener.received(0, events)

    def _received(self, events: Events) -> None:
        self._state.in_flight -= 1
        del self._cancelled[events.batch_id]
        self._listener.received(0, events)
