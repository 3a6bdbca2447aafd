"""Workers that attach from outside, in any language, as an Executor."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from weir.errors import ModelError, ModelNotReady, SettingsError
from weir.messages import Batch, Events
from weir.model import Model, is_tensor_model
from weir.wire.lockstep import MAX_BODY_BYTES
from weir.workers.address import parse_address
from weir.workers.executor import Block, FixedWorkers, Listener
from weir.workers.listening import WorkerSocket
from weir.workers.local import no_arena, refuse_settings
from weir.workers.remote_worker import RemoteWorker
from weir.workers.settings import WorkerSettings

MAX_WORKERS = 256

logger = logging.getLogger("weir")


class ExternalExecutor(FixedWorkers):
    """Listens at `worker_socket`; whoever attaches and speaks the lock-step protocol (wire/lockstep.py) is a worker until
    it leaves. See the Executor protocol.

    A worker gets the lowest index that is free. Nothing that comes from one is unpickled, and an answer longer than
    `max_body_bytes` ends its connection. With no worker left requests wait, as they do while a process is started again.
    """

    def __init__(
        self, model: type[Model], settings: WorkerSettings, *, name: str, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        if is_tensor_model(model) or model.streaming:
            what = "a tensor model" if is_tensor_model(model) else "a streaming model"
            raise SettingsError(f"executor='external': {model.__name__} is {what}; external workers take items")
        refuse_settings(settings, ("env", "cpu_affinity", "threads"))
        if settings.pipeline_depth != 1:
            raise SettingsError(f"pipeline_depth={settings.pipeline_depth}: external workers take one batch at a time")
        self._settings = settings
        self._name = name
        self._max_body_bytes = max_body_bytes
        self._salt = secrets.randbits(32)
        self._workers: list[RemoteWorker] = []  # by index, the last that had it
        self._greeting: set[RemoteWorker] = set()
        self._enough: asyncio.Future[None] | None = None
        self._announcing = False
        self._stopped = False
        self._listener: Listener
        self._socket = WorkerSocket(parse_address(settings.worker_socket or "", "worker_socket"), self._connected)

    @property
    def address(self) -> str:
        """Where it listens: of port 0, the real one once it does."""
        return str(self._socket.address)

    async def start(self, listener: Listener) -> None:
        """Listen; return when `workers` workers have attached. Raises ModelError if they have not within `start_timeout`
        seconds, SettingsError if the address cannot be had; nothing is left open then."""
        self._listener = listener
        self._stopped = False
        self._workers = []
        self._enough = asyncio.get_running_loop().create_future()
        try:
            self._socket.open()
            logger.info("model %r waits for workers at %s", self._name, self.address)
            async with asyncio.timeout(self._settings.start_timeout):
                await self._enough
        except TimeoutError:
            there = len(self._ready())
            await self.stop()
            raise ModelError(
                f"{self._name}: {there} of workers={self._settings.workers} external workers attached to {self.address} within "
                f"start_timeout={self._settings.start_timeout}"
            ) from None
        except BaseException:
            self._enough.cancel()
            await self.stop()
            raise
        self._announcing = True
        for worker in self._ready():
            listener.worker_ready(worker.index, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Send `batch` to `worker`."""
        self._workers[worker].run(batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Do nothing: the protocol has no word for it."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def stop(self) -> None:
        """Listen no more and close all connections: that is how workers hear of it."""
        self._stopped = True
        self._announcing = False
        self._socket.close()
        for worker in [*self._greeting, *self._ready()]:
            worker.leave("the server stopped")
            worker.state = "stopped"
        if self._enough is not None and not self._enough.done():
            self._enough.set_exception(ModelNotReady(f"{self._name}: stopped before it was ready"))

    def states(self) -> Sequence[RemoteWorker]:
        """Return the worker that has or last had each index."""
        return self._workers

    def gauges(self) -> dict[str, Any]:
        """Return numbers for metrics; a worker that took the index of one that had left counts as its restart."""
        return no_arena(sum(worker.restarts for worker in self._workers))

    # What attached workers say.

    def joined(self, worker: RemoteWorker) -> None:
        """Give it an index, and announce it."""
        self._greeting.discard(worker)
        free = next((old.index for old in self._workers if old.state == "lost"), len(self._workers))
        worker.index = free
        if free < len(self._workers):
            worker.restarts = self._workers[free].restarts + 1
            self._workers[free] = worker
        else:
            self._workers.append(worker)
        logger.info("worker %d of %r attached", free, self._name)
        if self._announcing:
            self._listener.worker_ready(free, 1)
        elif self._enough is not None and not self._enough.done() and len(self._ready()) >= self._settings.workers:
            self._enough.set_result(None)

    def answered(self, worker: RemoteWorker, events: Events) -> None:
        """Pass the answers on."""
        self._listener.received(worker.index, events)

    def left(self, worker: RemoteWorker) -> None:
        """Tell the listener, unless it never knew of it."""
        self._greeting.discard(worker)
        if self._stopped:
            return
        if worker.index < 0:
            logger.info("a connection to the worker_socket of %r ended: %s", self._name, worker.reason)
            return
        logger.info("worker %d of %r left: %s", worker.index, self._name, worker.reason)
        if self._announcing:
            self._listener.worker_lost(worker.index, worker.reason)

    def _connected(self, end: socket.socket) -> None:
        if len(self._greeting) + len(self._ready()) >= MAX_WORKERS:
            logger.warning("model %r has %d external workers, the most that it takes", self._name, MAX_WORKERS)
            end.close()
            return
        self._greeting.add(RemoteWorker(end, self, self._salt, self._settings.predict_timeout, self._max_body_bytes))

    def _ready(self) -> list[RemoteWorker]:
        return [worker for worker in self._workers if worker.state == "ready"]
