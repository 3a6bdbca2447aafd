"""A worker inside a Ray actor. It runs what a worker process runs: `process/program.py`, in a thread of its own.

Its batches come by a connection to its server (connection.py), whose channel is that of a worker process. Ray calls the methods in several threads.

A detached actor has one server after the other, and a `Tenure` for each. The model stays.

This module does not import Ray at its top: Ray imports it on each node.
"""

import contextlib
import ctypes
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from weir.messages import Batch, Events
from weir.wire.frames import FrameParser, Ready, Start, Stop, Turn, WorkerPlaced, encode_control
from weir.workers.arena import PayloadFetch, ResultPlaces
from weir.workers.process.channel import LEFT, ChildChannel
from weir.workers.process.program import build_runner, open_channel, run_batches, start_failed
from weir.workers.ray.connection import Address, ConnectionOffer
from weir.workers.run.runner import Runner

RENEWAL = 2.0  # seconds after which the server of a detached actor has to ask again; who is that late has left

# glibc's mallopt: keep the memory that a batch frees for the next one (see process/launch.py, MALLOC).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class NotOwned(Exception):
    """The server that calls does not have this actor, or no longer."""


class Ownership:
    """The time for which the `number`-th server has the actor; 0: the one that has made it. It says so by calls of `listen`, one after the other."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._calls = 0  # of `listen`
        self._ended = False  # the model is unloaded
        self._left = ""  # why the server has left

    def listen(self, number: int, seconds: float | None) -> bool:
        """Return whether the worker goes on: False as soon as it has stopped, True after `seconds`. `number` tells which server calls."""
        with self._changed:
            self.check(number)
            self._calls += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._left, seconds)
            self.check(number)
            return not self._ended

    def goes_on(self, seconds: float) -> bool:
        """Return whether a server that has adopted the actor calls `listen` within `seconds`, and does not leave."""
        with self._changed:
            before = self._calls
            self._changed.wait_for(lambda: self._left or self._calls != before, seconds if self._number else 0.0)
            return self._calls != before and not self._left

    def leave(self, reason: str) -> None:
        """Have the calls of the server fail, because it leaves. The model stays."""
        with self._changed:
            self._left = self._left or reason
            self._changed.notify_all()

    def end(self) -> None:
        """Have `listen` return: the model is unloaded."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def check(self, number: int) -> None:
        """Raise NotOwned unless the server of this number has the actor."""
        if number != self._number or self._left:
            raise NotOwned(self._left or "another server has taken this actor over")


class ServerConnection(ChildChannel):
    """The channel to a server that may leave before the worker: nobody waits for its batches then, and nothing is sent any more.

    Attributes:
        kept: whether the model is to stay loaded when the loop has ended: the server said so, or has left without a word.
    """

    def __init__(self, end: socket.socket, parser: FrameParser, places: ResultPlaces | None) -> None:
        super().__init__(end, parser, places)
        self._sizes: dict[int, int] = {}
        self._left = False
        self.kept = False

    def receive(self) -> Start | Turn | Batch | Stop:
        """Return the next frame to act on, when it has come; Stop when the server has left."""
        frame = super().receive()
        if isinstance(frame, Batch):
            self._sizes[frame.batch_id] = len(frame.payloads)
            if self._left:
                self.server_left()
        self.kept = isinstance(frame, Stop) and (frame.keep or self._left)
        return frame

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame`, unless the server has left; wait until it has room for it."""
        try:
            super().send(frame)
        except LEFT:
            self.server_left()

    def report(self, events: Events) -> None:
        """Send `events`, unless the server has left."""
        if events.final:
            self._sizes.pop(events.batch_id, None)
        try:
            super().report(events)
        except LEFT:
            self.server_left()

    def server_left(self) -> int:
        """Note that nobody waits for the batches that are here any more; return 0."""
        self._left = True
        for batch_id, size in list(self._sizes.items()):
            self._cancelled.get(batch_id, set()).update(range(size))
        return 0

    def end(self) -> None:
        """End the connection, from another thread, although the server has not left."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Tenure:
    """The time for which a server has the worker: its `connection`, with the places of results and the payloads."""

    def __init__(
        self, owner: Ownership, connection: ServerConnection, places: ResultPlaces | None, fetch: PayloadFetch | None
    ) -> None:
        self.owner = owner
        self.begun = threading.Event()  # the model takes its batches, or never will
        self._connection = connection
        self._places = places
        self._fetch = fetch

    def open_place(self, size_bytes: int) -> memoryview | None:
        """Return memory that the server shares, for a result; None if there is none."""
        return None if self._places is None else self._places.open(size_bytes)

    def run(self, runner: Runner, options: dict[str, Any]) -> bool:
        """Run the server's batches until it leaves or stops the worker; return whether the model is to stay loaded."""
        if self._places is not None:
            self._places.close()  # nobody reads what the warm-up computed
        if self._fetch is not None:
            self._fetch.lends = runner.borrows
        self._connection.spin = options["spin"]
        self.begun.set()
        run_batches(self._connection, runner, options["pipeline_depth"])
        self._close()
        return self._connection.kept

    def leave(self) -> None:
        """End the connection."""
        self._connection.end()

    def _close(self) -> None:
        """Close the connection, and give the memory that is shared with the server back."""
        self._connection.close()
        for shared in (self._places, self._fetch):
            if shared is not None:
                shared.give_back()


class WorkerActor:
    """One worker of a model. Ray makes it an actor that runs several calls at once: a `listen` is always among them.

    A detached actor outlives its server: the next one adopts it. `version` is equal for servers whose worker would be the same: the same model,
    parameters and settings. `token`: see ConnectionOffer; of a detached actor each server brings its own.
    """

    def __init__(self, version: str = "", token: bytes = b"") -> None:
        self._version = version
        self._token = token
        self._offer: ConnectionOffer | None = None
        self._owner = Ownership()
        self._owners = 0  # how many servers have adopted it
        self._tenure: Tenure | None = None  # the last one
        self._tenures: queue.SimpleQueue[Tenure | None] = queue.SimpleQueue()  # for the model's thread; None: unload
        self._serving: Tenure  # whose batches that thread runs
        self._model_thread: threading.Thread | None = None
        self._start_reply = b""
        self._ended = threading.Event()  # the model is unloaded, or was never loaded
        self._adopting = threading.Lock()

    def adopt(self, version: str, token: bytes) -> tuple[str, int]:
        """Take a detached actor over. Return "" and the number of the server, or why it cannot be had: "serves" another server, or has another
        "version". The connection of the earlier server ends, as do its calls."""
        with self._adopting:
            if self.is_owned():
                return "serves", 0
            if version != self._version or self._ended.is_set():
                return "version", 0
            if self._tenure is not None:
                self._tenure.leave()
            self._owner.leave("another server has taken this actor over")
            self._owners += 1
            self._owner, self._token = Ownership(self._owners), token
            return "", self._owners

    def is_owned(self) -> bool:
        """Return whether it has a server that lives: one that has not left asks again within RENEWAL seconds."""
        owner = self._owner
        return owner.goes_on(RENEWAL + 1.0) or (owner is not self._owner and self.is_owned())

    def placement(self) -> bytes:
        """Return the frame that says where this worker is."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return bytes(
            encode_control(WorkerPlaced(os.getpid(), context.get_node_id(), address, gpus, context.get_actor_id()))
        )

    def offer(self, number: int, *, same_node: bool) -> Address:
        """Listen for the server, which is on the `same_node` or not; return where. `number` tells which server."""
        import ray

        self._owner.check(number)
        self._close_offer()
        self._offer = ConnectionOffer(self._token, "" if same_node else ray.util.get_node_ip_address())
        return self._offer.address

    def start(self, number: int, frame: bytes, arenas: tuple[int, int]) -> bytes:
        """Load and warm up the model that `frame` has, unless an earlier server has had that done; return the frame Ready, or StartFailed with whatever
        the model raised. `number` tells which server.

        `arenas` has the lengths of the arenas of requests and results, 0 where there is none, whose descriptors came with the connection of the server.
        """
        (start,) = FrameParser().feed(frame)
        assert isinstance(start, Start)
        self._owner.check(number)
        tenure = self._tenure = self._begin(arenas)
        self._tenures.put(tenure)
        if self._model_thread is None:
            main = threading.Thread(target=self._main, args=(start,), name="weir-model", daemon=True)
            self._model_thread = main
            main.start()
        if not self._ended.is_set():
            tenure.begun.wait()
        return self._start_reply

    def listen(self, number: int = 0) -> bool:
        """Return False when the worker has stopped; True from a detached actor after RENEWAL seconds, when the server has to ask again."""
        return self._owner.listen(number, RENEWAL if number else None)

    def stop(self) -> None:
        """End the connection if there is one, unload the model, and return."""
        self._tenures.put(None)
        if self._tenure is not None:
            self._tenure.leave()
        if self._model_thread is not None:
            self._ended.wait()

    def _begin(self, arenas: tuple[int, int]) -> Tenure:
        offer, self._offer = self._offer, None
        assert offer is not None  # the server has connected before it starts the worker
        connection, descriptors = offer.take()
        given = iter(descriptors)
        request_fd, result_fd = (next(given) if size else -1 for size in arenas)
        opened = open_channel(ServerConnection, connection.detach(), request_fd, arenas[0], result_fd, arenas[1])
        return Tenure(self._owner, *opened)

    def _close_offer(self) -> None:
        """Close the connection that is offered, and that of an earlier server which has left before it started the worker."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.close()

    def _main(self, start: Start) -> None:
        """Be the model's thread, from its loading to its end. SystemExit of the model ends the process, as it ends a worker process."""
        tenure = self._tenures.get()
        assert tenure is not None
        try:
            runner = self._load(start, tenure)
        except BaseException as error:
            self._start_reply = bytes(encode_control(start_failed(start, error)))
            self._finish([tenure])
            return
        self._start_reply = bytes(encode_control(Ready(runner.measured())))
        try:
            self._serve(tenure, runner, start.options)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._finish()
        self._owner.end()

    def _load(self, start: Start, tenure: Tenure) -> Runner:
        """Load the model. Raises what the model raises."""
        self._serving = tenure
        _keep_memory()
        sys.path += [folder for folder in start.options["path"] if folder not in sys.path]
        runner = build_runner(start, self._open_place, None)
        assert isinstance(runner, Runner)  # on a cluster a worker has one model
        return runner

    def _serve(self, tenure: Tenure | None, runner: Runner, options: dict[str, Any]) -> None:
        """Run the batches of one server after the other, and unload the model."""
        while tenure is not None:
            self._serving = tenure
            kept = tenure.run(runner, options)
            if not (kept and self._version):  # only a detached actor outlives its server
                break
            tenure.owner.leave("its server has left it")
            tenure = self._tenures.get()
        runner.stop()

    def _open_place(self, size_bytes: int) -> memoryview | None:
        return self._serving.open_place(size_bytes)

    def _finish(self, tenures: Iterable[Tenure | None] = ()) -> None:
        """Have all calls of `start` return."""
        self._ended.set()
        waiting = [*tenures]
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._tenures.get_nowait())
        for tenure in waiting:
            if tenure is not None:
                tenure.begun.set()


def _keep_memory() -> None:
    """Have the C library keep freed memory for the next batch. Other C libraries than glibc ignore it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 128 << 20)
