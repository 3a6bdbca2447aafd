"""Workers that attach from outside, in any language, as an Executor: the listening socket, and one RemoteWorker per connection."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weir.errors import ModelError, ModelNotReady, SettingsError
from weir.messages import Batch, Events
from weir.model import Model, is_tensor_model
from weir.wire.frames import FrameError
from weir.wire.lockstep import MAX_BODY_BYTES, LockstepParser, LockstepReply, decode_reply
from weir.workers.channel import Channel
from weir.workers.executor import Block, FixedWorkers, Listener
from weir.workers.local.inline import no_arena, refuse_settings
from weir.workers.remote.lockstep import LockstepBatch
from weir.workers.settings import WorkerAddress, WorkerSettings, parse_address
from weir.workers.timelimit import TimeLimit

GREETING = 10.0  # seconds that a connection may take to ask for work


class RemoteWorkerListener(Protocol):
    """Hears from attached workers."""

    def joined(self, worker: "RemoteWorker") -> None:
        """It asks for work, for the first time."""

    def answered(self, worker: "RemoteWorker", events: Events) -> None:
        """Its batch is back, and it asks for the next one."""

    def left(self, worker: "RemoteWorker") -> None:
        """It is gone; `reason` says why, `index` is -1 if it never joined."""


class RemoteWorker:
    """The server's side of one connection. Its public attributes are those of WorkerState."""

    def __init__(
        self,
        end: socket.socket,
        host: RemoteWorkerListener,
        salt: int,
        predict_timeout: float | None,
        max_body_bytes: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = -1
        self.state = "starting"
        self.pid = _pid(end)
        self.restarts = 0
        self.reason = ""
        self._host = host
        self._salt = salt
        self._work: LockstepBatch | None = None
        self._began = 0.0
        self._limit = TimeLimit(loop, predict_timeout, self._too_long)
        self._predict_timeout = predict_timeout
        self._greeting = loop.call_later(GREETING, self.leave, f"it did not ask for work within {GREETING:g} s")
        self._loop = loop
        self._channel: Channel[bytes] = Channel(end, LockstepParser(max_body_bytes), self._received, self.leave)
        self._channel.open(loop)

    @property
    def in_flight(self) -> int:
        """How many batches it has: one at most."""
        return int(self._work is not None)

    def run(self, batch: Batch) -> None:
        """Send `batch`."""
        if self.state != "ready" or self._work is not None:
            raise RuntimeError(
                f"external worker {self.index} was given a batch while {self.state}. This is a bug in Weir"
            )
        self._work = work = LockstepBatch(batch, self._salt)
        self._began = time.perf_counter()
        if work.ids:
            self._limit.begin()
            self._channel.send(work.frame)
        else:  # nothing of it can be sent
            self._loop.call_soon(self._finish, LockstepReply([], frozenset()))

    def leave(self, reason: str) -> None:
        """Close the connection; the host hears of it once."""
        if self.state == "lost":
            return
        self.state, self.reason = "lost", reason
        self._greeting.cancel()
        self._limit.close()
        self._channel.close()
        self._work = None
        self._host.left(self)

    def _received(self, body: bytes) -> None:
        if self.state == "starting":
            if body:
                self.leave(f"its first frame must be empty, has {len(body)} bytes")
            else:
                self.state = "ready"
                self._greeting.cancel()
                self._host.joined(self)
        elif self._work is None:
            self.leave(f"it sent a frame of {len(body)} bytes while it had no batch")
        else:
            try:
                reply = decode_reply(body, self._work.ids)
            except FrameError as error:
                self.leave(f"it sent {error}")
            else:
                self._finish(reply)

    def _finish(self, reply: LockstepReply) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            self._limit.end()
            self._host.answered(self, work.events(reply, time.perf_counter() - self._began))

    def _too_long(self) -> None:
        work = self._work
        self._channel.receive_rest()  # what has arrived was in time
        if self._work is work and work is not None:
            self.leave(f"it was cut off because a batch ran longer than predict_timeout={self._predict_timeout}")


def _pid(end: socket.socket) -> int | None:
    """Return the process at the other end, where the system knows: of a Unix socket on Linux."""
    if end.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid or None


# The socket that external workers attach to.


BACKLOG = 128
TRY_AGAIN = 1.0  # seconds until connections are accepted again, when the system had no descriptor left
# A host that is gone is noticed after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class WorkerSocket:
    """Listens at an address, and hands each connection to `on_connection`, non-blocking."""

    def __init__(self, address: WorkerAddress, on_connection: Callable[[socket.socket], None]) -> None:
        self.address = address
        self._on_connection = on_connection
        self._socket: socket.socket | None = None
        self._inode: tuple[int, int] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Listen. Raises SettingsError if the address cannot be had. A Unix socket is for its owner only."""
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = _bound_path(self.address.path) if self.address.path else _bound_port(self.address)
        except OSError as error:
            why = f"worker_socket={self.address}: cannot be had: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                why += " (a model with external workers that runs already is unloaded before it is loaded again)"
            raise SettingsError(why) from error
        if self.address.path:
            self._inode = _inode(self.address.path)
        else:
            self.address = self.address._replace(port=self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Listen no more, and take the path away. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self.address.path and self._inode == _inode(self.address.path):
            os.unlink(self.address.path)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._socket.fileno())
            self._timer = self._loop.call_later(TRY_AGAIN, self._accept_again)
            return
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            _tune(end)
        self._on_connection(end)

    def _accept_again(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)


def _tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bound_port(address: WorkerAddress) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(found[0], socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(found[4])
    except BaseException:
        made.close()
        raise
    return made


def _bound_path(path: str) -> socket.socket:
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        os.chmod(path, 0o600)  # before anybody can connect: it does not listen yet
    except BaseException:
        made.close()
        raise
    return made


def _remove_stale(path: str) -> None:
    """Remove a socket that a dead server has left there."""
    if not (os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _inode(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


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
