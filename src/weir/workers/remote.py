"""Workers outside of the server, in any language: both sides of the lock-step protocol (see wire/frames.py).

`ExternalExecutor` listens on a socket, and has one `RemoteWorker` per connection. `Attachment` runs a model of ours as such a worker: it attaches
to a server elsewhere, and attaches again when the connection is lost.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from weir.errors import (
    InvalidRequest,
    ModelError,
    ModelNotReady,
    SettingsError,
    TooLarge,
    Unsupported,
    UnsupportedMediaType,
    ValidationFailed,
    WeirError,
    kind_of,
    reason_of,
)
from weir.messages import JSON, LENT, MSGPACK, OBJECT, OCTETS, Batch, Events, Timing
from weir.model import Model, is_tensor_model
from weir.wire.frames import (
    ASK,
    MAX_BODY_BYTES,
    FrameError,
    LockstepParser,
    LockstepReply,
    decode_jobs,
    decode_reply,
    encode_jobs,
    encode_reply,
    make_ids,
)
from weir.wire.values import DECODE, ENCODE, UNREADABLE, UNWRITABLE
from weir.workers.executor import ExecutorBase, Listener
from weir.workers.local import refuse_settings
from weir.workers.process.channel import RECEIVE_BYTES, Channel
from weir.workers.run.runner import Runner
from weir.workers.settings import WorkerAddress, WorkerSettings, parse_address
from weir.workers.timer import TimeLimit, end_tasks, in_background, resolve

logger = logging.getLogger("weir")

MAX_WORKERS = 256
GREETING = 10.0  # seconds within which a connection must request work
BACKLOG = 128
TRY_AGAIN = 1.0  # seconds until connections are accepted again, when the system had no descriptor left
# With these a host that is gone is noticed after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds before an Attachment tries again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)

# The errors that a worker may name in a document {"error": {"type": ..., "message": ..., "details": ...}}.
_ITEM_ERRORS = {
    kind.__name__: kind
    for kind in (InvalidRequest, ModelError, TooLarge, Unsupported, UnsupportedMediaType, ValidationFailed)
}


class LockstepBatch:
    """One batch while an external worker has it: its entries as bytes, and its responses as each caller wants them."""

    def __init__(self, batch: Batch, salt: int) -> None:
        self.batch_id = batch.batch_id
        count = len(batch.payloads)
        self._types = _each(batch.content_types, count)
        self._accepts = _each(batch.accepts, count)
        self._unsent: dict[int, WeirError] = {}
        bodies = [self._body(index, payload) for index, payload in enumerate(batch.payloads)]
        self._sent = [index for index in range(count) if index not in self._unsent]
        every = make_ids(salt, batch.batch_id, count)
        self.ids = [every[index] for index in self._sent]
        self.frame = encode_jobs(self.ids, [bodies[index] for index in self._sent])

    def events(self, reply: LockstepReply, seconds: float) -> Events:
        """Return the final events of the batch, which the worker had for `seconds`."""
        outputs: list[Any] = [None] * len(self._types)
        for position, index in enumerate(self._sent):
            outputs[index] = self._output(index, reply.bodies[position], position in reply.failed)
        for index, error in self._unsent.items():
            outputs[index] = error
        return Events(self.batch_id, outputs, timing=Timing(0.0, seconds, 0.0))

    def _body(self, index: int, payload: Any) -> bytes:
        if isinstance(payload, (bytes, bytearray, memoryview)):
            if self._types[index] == OBJECT:
                self._types[index] = OCTETS
            return bytes(payload)
        view = getattr(payload, "view", None)  # a Block
        if view is not None:
            return bytes(view)
        self._types[index] = JSON
        try:
            return ENCODE[JSON](payload)
        except UNWRITABLE as error:
            self._unsent[index] = InvalidRequest(f"{kind_of(payload)} cannot be sent to a worker as JSON: {error}")
            return b""

    def _output(self, index: int, body: bytes | None, failed: bool) -> Any:
        if body is None:
            return ModelError("the worker's response lacks this item")
        if failed:
            return _refusal(body, self._types[index])
        sent, wanted = self._types[index], self._accepts[index]
        if wanted in (sent, OCTETS) or sent not in DECODE:
            return body
        if wanted not in (OBJECT, LENT, *ENCODE):
            return UnsupportedMediaType(f"accept {wanted!r}: the worker's answer is {sent}")
        try:
            value = DECODE[sent](body)
            return value if wanted in (OBJECT, LENT) else ENCODE[wanted](value)
        except (*UNREADABLE, *UNWRITABLE) as error:
            return ModelError(f"the worker's answer must be {sent} that can be read as {wanted} ({error})")


def _refusal(body: bytes, content_type: str) -> WeirError:
    """Return the error that a worker's body for a failed item describes."""
    document: Any = body.decode("utf-8", "replace")
    for form in (content_type, JSON) if content_type in DECODE else (JSON, MSGPACK):
        with contextlib.suppress(*UNREADABLE, *UNWRITABLE):
            document = DECODE[form](body)
            break
    error = document.get("error") if isinstance(document, dict) and len(document) == 1 else None
    if isinstance(error, dict):
        kind, message = _ITEM_ERRORS.get(str(error.get("type"))), error.get("message")
        if kind is not None and isinstance(message, str):
            return kind(message, details=error.get("details"))
    return ValidationFailed("the worker refused this item", details=document)


def _each(column: str | list[str], count: int) -> list[str]:
    return [column] * count if isinstance(column, str) else list(column)


class RemoteWorker:
    """The server's side of one connection of a worker. Its public attributes are those of WorkerState."""

    def __init__(self, end: socket.socket, host: "ExternalExecutor") -> None:
        loop = asyncio.get_running_loop()
        self.index = -1
        self.state = "starting"
        self.pid = _pid(end)
        self.restarts = 0
        self.reason = ""
        self._host = host
        self._batch: LockstepBatch | None = None
        self._began = 0.0
        self._limit = TimeLimit(loop, host.settings.predict_timeout, self._too_long)
        self._greeting = loop.call_later(GREETING, self.leave, f"it did not request work within {GREETING:g} s")
        self._loop = loop
        self._channel: Channel[bytes] = Channel(end, LockstepParser(host.max_body_bytes), self._received, self.leave)
        self._channel.open(loop)

    @property
    def in_flight(self) -> int:
        """The number of batches that it has: at most one."""
        return int(self._batch is not None)

    def run(self, batch: Batch) -> None:
        """Send `batch`."""
        if self.state != "ready" or self._batch is not None:
            raise RuntimeError(
                f"external worker {self.index} was given a batch while {self.state}. This is a bug in Weir"
            )
        self._batch = work = LockstepBatch(batch, self._host.salt)
        self._began = time.perf_counter()
        if work.ids:
            self._limit.begin()
            self._channel.send(work.frame)
        else:  # no entry can be sent
            self._loop.call_soon(self._finish, LockstepReply([], frozenset()))

    def leave(self, reason: str) -> None:
        """Close the connection, and tell the executor, once."""
        if self.state == "lost":
            return
        self.state, self.reason = "lost", reason
        self._greeting.cancel()
        self._limit.close()
        self._channel.close()
        self._batch = None
        self._host.left(self)

    def _received(self, body: bytes) -> None:
        if self.state == "starting":
            if body:
                self.leave(f"its first frame must be empty, has {len(body)} bytes")
            else:
                self.state = "ready"
                self._greeting.cancel()
                self._host.joined(self)
        elif self._batch is None:
            self.leave(f"it sent a frame of {len(body)} bytes while it had no batch")
        else:
            try:
                reply = decode_reply(body, self._batch.ids)
            except FrameError as error:
                self.leave(f"it sent {error}")
            else:
                self._finish(reply)

    def _finish(self, reply: LockstepReply) -> None:
        if self._batch is not None:
            work, self._batch = self._batch, None
            self._limit.end()
            self._host.answered(self, work.events(reply, time.perf_counter() - self._began))

    def _too_long(self) -> None:
        work = self._batch
        self._channel.receive_rest()  # what has arrived was in time
        if self._batch is work and work is not None:
            seconds = self._host.settings.predict_timeout
            self.leave(f"it was cut off because a batch ran longer than predict_timeout={seconds}")


def _pid(end: socket.socket) -> int | None:
    """Return the process at the other end, where the system knows: of a Unix socket on Linux."""
    if end.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid or None


class WorkerSocket:
    """Listens at an address, and hands each connection to `on_connection`, non-blocking."""

    def __init__(self, address: WorkerAddress, on_connection: Callable[[socket.socket], None]) -> None:
        self.address = address
        self._on_connection = on_connection
        self._inode: tuple[int, int] | None = None
        self._socket: socket.socket
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Listen. Raises SettingsError if the address cannot be used. Only the owner can connect to a Unix socket."""
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
        self._accepting = in_background(self._accept(), "the socket of external workers")

    async def close(self) -> None:
        """Stop listening, and remove the path. Idempotent."""
        accepting, self._accepting = self._accepting, None
        if accepting is None:
            return
        await end_tasks(accepting)
        self._socket.close()
        if self.address.path and self._inode == _inode(self.address.path):
            os.unlink(self.address.path)

    async def _accept(self) -> None:
        while True:
            try:
                end, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except ConnectionAbortedError:
                continue
            except OSError:  # the system has no descriptor left
                await asyncio.sleep(TRY_AGAIN)
                continue
            if end.family != socket.AF_UNIX:
                _tune(end)
            self._on_connection(end)


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
        os.chmod(path, 0o600)  # before it listens, so that nobody else can connect
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


class ExternalExecutor(ExecutorBase):
    """Listens at `worker_socket`. A program that attaches and speaks the lock-step protocol is a worker until it leaves. See the Executor protocol.

    A worker gets the lowest free index. Nothing that it sends is unpickled, and a response longer than `max_body_bytes` ends its connection. When no
    worker is left, requests wait, as they do while a process is started again.
    """

    def __init__(
        self,
        model: type[Model],
        params: Mapping[str, Any],
        settings: WorkerSettings,
        *,
        name: str,
        max_batch_size: int,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        if is_tensor_model(model) or model.streaming:
            what = "a tensor model" if is_tensor_model(model) else "a streaming model"
            raise SettingsError(f"executor='external': {model.__name__} is {what}; external workers take items")
        refuse_settings(settings, ("env", "cpu_affinity", "threads"))
        if settings.pipeline_depth != 1:
            raise SettingsError(f"pipeline_depth={settings.pipeline_depth}: external workers take one batch at a time")
        self.settings = settings
        self.max_body_bytes = max_body_bytes
        self.salt = secrets.randbits(32)
        self._name = name
        self._workers: list[RemoteWorker] = []  # by index, the last that had it
        self._greeting: set[RemoteWorker] = set()
        self._enough: asyncio.Future[None] | None = None
        self._announcing = False
        self._stopped = False
        self._listener: Listener
        self._socket = WorkerSocket(parse_address(settings.worker_socket or "", "worker_socket"), self._connected)

    @property
    def address(self) -> str:
        """The address where it listens. The port 0 is replaced by the real one when it listens."""
        return str(self._socket.address)

    async def start(self, listener: Listener) -> None:
        """Listen; return when `workers` workers have attached.

        Raises ModelError if they have not within `start_timeout` seconds, SettingsError if the address cannot be used. Nothing is left open then.
        """
        self._listener = listener
        self._stopped = False
        self._workers = []
        self._enough = asyncio.get_running_loop().create_future()
        try:
            self._socket.open()
            logger.info("model %r waits for workers at %s", self._name, self.address)
            async with asyncio.timeout(self.settings.start_timeout):
                await self._enough
        except TimeoutError:
            there = len(self._ready())
            await self.stop()
            raise ModelError(
                f"{self._name}: {there} of workers={self.settings.first_workers} external workers attached to {self.address} within "
                f"start_timeout={self.settings.start_timeout}"
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

    async def stop(self) -> None:
        """Stop listening and close all connections, which tells the workers."""
        self._stopped = True
        self._announcing = False
        await self._socket.close()
        for worker in [*self._greeting, *self._ready()]:
            worker.leave("the server stopped")
            worker.state = "stopped"
        if self._enough is not None:
            resolve(self._enough, ModelNotReady(f"{self._name}: stopped before it was ready"))

    def states(self) -> Sequence[RemoteWorker]:
        """Return the worker that has, or last had, each index. One that took the index of another counts as its restart."""
        return self._workers

    # Called by the workers.

    def joined(self, worker: RemoteWorker) -> None:
        """Give an index to a worker that requests work for the first time, and tell the listener."""
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
        elif self._enough is not None and len(self._ready()) >= self.settings.first_workers:
            resolve(self._enough, None)

    def answered(self, worker: RemoteWorker, events: Events) -> None:
        """Pass the events of a worker's batch on."""
        self._listener.received(worker.index, events)

    def left(self, worker: RemoteWorker) -> None:
        """Tell the listener that a worker is gone, unless it never joined (its index is -1)."""
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
            logger.warning("model %r has %d external workers, which is the maximum", self._name, MAX_WORKERS)
            end.close()
            return
        self._greeting.add(RemoteWorker(end, self))

    def _ready(self) -> list[RemoteWorker]:
        return [worker for worker in self._workers if worker.state == "ready"]


class _Leave(BaseException):
    """Raised by a signal that comes while there is no batch."""


class Attachment:
    """Runs a started Runner for the server at `address`, until a signal. Bodies and responses are of `content_type`.

    `tell` gets a line of text when it has attached, and when the connection is lost. It tries again after 0.1 s, then after twice as long each
    time, at most 5 s; after a batch the wait is 0.1 s again.
    """

    def __init__(self, runner: Runner, address: WorkerAddress, content_type: str, tell: Callable[[str], None]) -> None:
        self._runner = runner
        self._address = address
        self._content_type = content_type
        self._tell = tell
        self._wait = FIRST_WAIT
        self._batches = 0
        self._leaving = False
        self._busy = False

    def run(self) -> None:
        """Serve until one of SIGNALS comes; a batch that has come is run first. To be called in the main thread of a program."""
        with _handled(self._signalled), contextlib.suppress(_Leave):
            while not self._leaving:
                try:
                    self._serve_once()
                except (OSError, FrameError) as error:
                    self._tell(f"{self._address}: {reason_of(error)}; trying again in {self._wait:g} s")
                self._pause()

    def _pause(self) -> None:
        self._busy = False
        if not self._leaving:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _serve_once(self) -> None:
        with self._connected() as end:
            end.sendall(ASK)
            self._tell(f"{self._address}: attached")
            parser = LockstepParser()
            while not self._leaving:
                end.sendall(self._respond(self._next(end, parser)))
                self._busy = False

    def _next(self, end: socket.socket, parser: LockstepParser) -> bytes:
        while True:
            data = end.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._busy = True  # a batch that has begun to come is run
            for body in parser.feed(data):
                return body  # in lock-step there is one

    def _respond(self, body: bytes) -> bytes:
        jobs = decode_jobs(body)
        self._wait = FIRST_WAIT
        self._batches += 1
        batch = Batch(self._batches, list(jobs.values()), self._content_type, self._content_type)
        outputs = self._runner.compute(self._runner.prepare(batch)).outputs
        failed = [key for key, output in zip(jobs, outputs, strict=True) if isinstance(output, WeirError)]
        return encode_reply({key: _body(output) for key, output in zip(jobs, outputs, strict=True)}, failed)

    def _connected(self) -> socket.socket:
        if not self._address.path:
            return socket.create_connection((self._address.host, self._address.port))
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._address.path)
        except BaseException:
            end.close()
            raise
        return end

    def _signalled(self) -> None:
        self._leaving = True
        if not self._busy:
            raise _Leave


def _body(output: bytes | WeirError) -> bytes:
    """Return the body of a response; of an error it is a document, from which a server of Weir makes the error again."""
    if not isinstance(output, WeirError):
        return output
    error = {"type": _nearest(output), "message": output.message, "details": output.details}
    try:
        return ENCODE[JSON]({"error": error})
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ENCODE[JSON]({"error": {**error, "details": None}})


def _nearest(error: WeirError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == UnsupportedMediaType.__module__)


@contextlib.contextmanager
def _handled(act: Callable[[], None]) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        act()

    kept = (number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)  # nohup ignores one
    before = {number: signal.signal(number, handler) for number in kept}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
