"""The model in threads of this process: for what releases the GIL while it computes."""

import asyncio
from collections.abc import Sequence
from typing import Any

from weir.errors import ModelError
from weir.messages import Batch
from weir.model import Model, overrides
from weir.workers.executor import Block, Listener
from weir.workers.local import LocalState, SharedLoad, no_arena, refuse_settings
from weir.workers.settings import WorkerSettings
from weir.workers.workerthread import WorkerThread

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
