"""A worker inside a Ray actor. It runs what a worker process runs: `process/program.py`, in a thread of its own.

Its batches come by a connection to its server (connection.py), whose channel is that of a worker process. Where there is none, because Ray is to encrypt
what goes between nodes, or the network lets no other connection through, they come by calls: a frame is an argument, and the answer a result. Large buffers
then travel beside the frame (PEP 574), so Ray puts them into its object store. Ray calls the methods in several threads.

A detached actor has one server after the other, and a `Tenure` for each. The model stays.

This module does not import Ray at its top: Ray imports it on each node.
"""

import contextlib
import ctypes
import os
import queue
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from weir.messages import Batch, Events
from weir.wire.cells import Ref
from weir.wire.frames import (
    Cancel,
    Frame,
    FrameParser,
    Ready,
    Restarted,
    Start,
    Stop,
    WorkerPlaced,
    encode_control,
    encode_events,
)
from weir.workers.arena import PayloadFetch, ResultPlaces, own_values
from weir.workers.process.channel import LEFT, ChildChannel
from weir.workers.process.program import build_runner, open_channel, run_batches, start_failed
from weir.workers.ray.connection import Address, ConnectionOffer
from weir.workers.run.runner import Runner

# A frame and its large buffers, which the frame refers to by their number and length.
Parcel = tuple[Any, ...]

NUMBER = struct.Struct(
    ">Q"
)  # of a batch, in order; it begins anew, with the owner's number above these bits, when another server takes over
OWNER_BITS = 40

RENEWAL = 2.0  # seconds after which the server of a detached actor has to ask again; who is that late has left

# glibc's mallopt: keep the memory that a batch frees for the next one (see process/launch.py, MALLOC).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class SentBuffers:
    """Takes large buffers out of the frame that is being encoded. The buffers are not copied."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    def place(self, payload: Any) -> Ref | None:
        """Take `payload`; return its number and length."""
        raw = np.frombuffer(memoryview(payload).cast("B"), np.uint8)
        self.buffers.append(raw)
        return len(self.buffers) - 1, raw.nbytes

    def take_back(self, ref: Ref) -> None:
        """Drop a buffer that no frame refers to; the numbers of the others stay."""
        self.buffers[ref[0]] = b""


class ReceivedBuffers:
    """Fetches the large buffers that came with a frame, by the references in the frame. They are read-only, and valid as long as they are used."""

    def __init__(self, refs: Sequence[Ref], buffers: Sequence[Any]) -> None:
        self._buffers = dict(zip(map(tuple, refs), buffers, strict=True))
        self.lends = False

    def cell(self, ref: Ref) -> memoryview:
        """Return the bytes at `ref`."""
        return memoryview(self._buffers[tuple(ref)]).cast("B")

    def buffer(self, ref: Ref) -> bytearray | memoryview:
        """Return a copy of the bytes at `ref`; or, if it `lends`, the bytes."""
        view = self.cell(ref)
        return view if self.lends else bytearray(view)


class NotOwned(Exception):
    """The server that calls does not have this actor, or no longer."""


class ActorChannel:
    """Connects the calls of the actor's server, its `owner`-th one, with the loop that runs batches (see program.BatchChannel).

    The final events of a batch are the result of the call that brought it, unless the model is streaming: its events must keep their order, and all
    go through `listen`, as do the notes that `predict` is called again.

    Attributes:
        kept: whether the model is to stay loaded when the loop has ended.
    """

    def __init__(self, owner: int = 0) -> None:
        self._owner = owner
        self._frames: queue.SimpleQueue[Batch | Stop] = queue.SimpleQueue()
        self._cancelled: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._answers: dict[
            int, queue.SimpleQueue[Parcel]
        ] = {}  # where the call that brought a batch waits for its end
        self._heard: deque[Parcel] = deque()
        self._turn = threading.Condition()
        self._next = owner << OWNER_BITS  # the number of the batch whose turn it is to enter
        self._said = threading.Condition()
        self._ended = False
        self._left = ""  # why the owner has left
        self.kept = False
        self.streaming = False
        self.lends = False

    # Called by the loop, in the model's thread.

    def receive(self) -> Batch | Stop:
        """Return the next frame to act on, when it has come."""
        frame = self._frames.get()
        self.kept = isinstance(frame, Stop) and frame.keep
        return frame

    def look(self) -> None:
        """Do nothing: cancellations are noted as they come."""

    def cancelled(self, batch_id: int) -> Container[int]:
        """Return the cancelled entries of a batch that is here."""
        return self._cancelled[batch_id]

    def report(self, events: Events) -> None:
        """Send `events` to the server."""
        sent = SentBuffers()
        parcel = bytes(encode_events(events, sent)), *sent.buffers
        if not events.final:
            self._say(parcel)
            return
        answer = self._answers.pop(events.batch_id)
        if self.streaming:
            self._say(parcel)
            parcel = ()
        answer.put(parcel)
        with self._turn:
            del self._cancelled[events.batch_id], self._sizes[events.batch_id]
            self._turn.notify_all()

    def restarted(self, batch_id: int) -> None:
        """Tell the server that `predict` is called again for a part of this batch."""
        self._say((bytes(encode_control(Restarted(batch_id))),))

    # Called by Ray, in its threads.

    def run(self, number: int, frame: memoryview, refs: Sequence[Ref], buffers: Sequence[Any]) -> Parcel:
        """Have a batch run, the one with this number in order; return its final events when they are there."""
        fetch = ReceivedBuffers(refs, buffers)
        fetch.lends = self.lends
        batch = _only(FrameParser(fetch), frame)
        assert isinstance(batch, Batch)
        own_values(batch)
        answer: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        with self._turn:
            self._turn.wait_for(lambda: self._next == number or not self._is_owner(number))
            self.check(number)
            self._next += 1
            self._turn.notify_all()
            self._cancelled[batch.batch_id], self._sizes[batch.batch_id] = set(), len(batch.payloads)
            self._answers[batch.batch_id] = answer
            self._frames.put(batch)
        del batch, buffers
        return answer.get()

    def cancel(self, number: int, frame: memoryview) -> None:
        """Note that no caller waits for these entries any more. `number` tells the owner, as of a batch."""
        self.check(number)
        cancel = _only(FrameParser(), frame)
        assert isinstance(cancel, Cancel)
        self._cancelled.get(cancel.batch_id, set()).update(cancel.indices)

    def stop(self) -> None:
        """Have the loop end after the batches that it has."""
        self._frames.put(Stop())

    def leave(self, reason: str) -> None:
        """Have the loop end, because the owner leaves; nobody waits for its batches any more, and its calls fail. The model stays."""
        with self._turn, self._said:
            self._left = self._left or reason
            _cancel_all(self._cancelled, self._sizes)
            self._turn.notify_all()
            self._said.notify_all()
        self._frames.put(Stop(keep=True))

    def listen(self, number: int, seconds: float | None) -> list[Parcel] | None:
        """Wait until there is something to say besides answers, for so many seconds at most; return all of it, or None if the worker has stopped.
        `number` tells the owner."""
        with self._said:
            self._said.wait_for(lambda: bool(self._heard) or self._ended or not self._is_owner(number), seconds)
            self.check(number)
            heard = list(self._heard)
            self._heard.clear()
            return None if self._ended and not heard else heard

    def end(self) -> None:
        """Have `listen` return: the model is unloaded."""
        with self._said:
            self._ended = True
            self._said.notify_all()

    def settle(self) -> None:
        """Wait for the end of all batches."""
        with self._turn:
            self._turn.wait_for(lambda: not self._cancelled)

    def check(self, number: int) -> None:
        """Raise NotOwned unless the server of the batch `number` has the actor."""
        if not self._is_owner(number):
            raise NotOwned(self._left or "another server has taken this actor over")

    def _is_owner(self, number: int) -> bool:
        return number >> OWNER_BITS == self._owner and not self._left

    def _say(self, parcel: Parcel) -> None:
        with self._said:
            self._heard.append(parcel)
            self._said.notify_all()


def _only(parser: FrameParser, frame: bytes | memoryview) -> Frame:
    (parsed,) = parser.feed(frame)
    return parsed


def _cancel_all(cancelled: dict[int, set[int]], sizes: dict[int, int]) -> None:
    for batch_id, size in list(sizes.items()):
        cancelled.get(batch_id, set()).update(range(size))


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

    def receive(self) -> Start | Batch | Stop:
        """Return the next frame to act on, when it has come; Stop when the server has left."""
        frame = super().receive()
        self.kept = isinstance(frame, Stop) and (frame.keep or self._left)
        return frame

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame`, unless the server has left; wait until it has room for it."""
        try:
            super().send(frame)
        except LEFT:
            self._end()

    def report(self, events: Events) -> None:
        """Send `events`, unless the server has left."""
        if events.final:
            self._sizes.pop(events.batch_id, None)
        super().report(events)

    def leave(self) -> None:
        """End the connection, from another thread, although the server has not left."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _note(self, frames: list[Frame]) -> None:
        self._sizes.update((frame.batch_id, len(frame.payloads)) for frame in frames if isinstance(frame, Batch))
        super()._note(frames)

    def _end(self) -> int:
        self._left = True
        _cancel_all(self._cancelled, self._sizes)
        return 0


class Tenure:
    """The time for which a server has the worker: its calls, and its `connection` if there is one, with the places of results and the payloads."""

    def __init__(
        self, calls: ActorChannel, connection: ServerConnection | None = None, places: ResultPlaces | None = None,
        fetch: PayloadFetch | None = None,
    ) -> None:  # fmt: skip
        self.calls = calls
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
        self.calls.streaming, self.calls.lends = runner.streaming, runner.borrows
        channel: ActorChannel | ServerConnection = self._connection or self.calls
        if self._connection is not None:
            self._connection.spin = options["spin"]
        self.begun.set()
        run_batches(channel, runner, options["pipeline_depth"])
        self._close()
        return channel.kept

    def leave(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.leave()

    def _close(self) -> None:
        """Close the connection, and give the memory that is shared with the server back."""
        if self._connection is not None:
            self._connection.close()
        for shared in (self._places, self._fetch):
            if shared is not None:
                shared.give_back()


class WorkerActor:
    """One worker of a model. Ray makes it an actor that runs several calls at once: one `listen`, and a `run` for each batch that comes by a call.

    A detached actor outlives its server: the next one adopts it. `version` is equal for servers whose worker would be the same: the same model,
    parameters and settings. `token`: see ConnectionOffer; of a detached actor each server brings its own.
    """

    def __init__(self, version: str = "", token: bytes = b"") -> None:
        self._version = version
        self._token = token
        self._offer: ConnectionOffer | None = None
        self._calls = ActorChannel()
        self._owners = 0  # how many servers have adopted it
        self._tenure: Tenure | None = None  # the last one
        self._tenures: queue.SimpleQueue[Tenure | None] = queue.SimpleQueue()  # for the model's thread; None: unload
        self._serving: Tenure  # whose batches that thread runs
        self._model_thread: threading.Thread | None = None
        self._start_answer = b""
        self._ended = threading.Event()  # the model is unloaded, or was never loaded
        self._adopting = threading.Lock()
        self._renewals = threading.Condition()
        self._renewed = 0  # how often its server has asked whether there is something to say
        self._owned = False

    def adopt(self, version: str, token: bytes) -> tuple[str, int]:
        """Take a detached actor over. Return "" and the number of the first batch, or why it cannot be had: "serves" another server, or has another
        "version". The connection of the earlier server ends, as do its calls."""
        with self._adopting:
            if self.is_owned():
                return "serves", 0
            if version != self._version or self._ended.is_set():
                return "version", 0
            if self._tenure is not None:
                self._tenure.leave()
            with self._renewals:
                self._calls.leave("another server has taken this actor over")
                self._owners += 1
                self._calls = ActorChannel(self._owners)
                self._token, self._owned = token, True
            return "", self._owners << OWNER_BITS

    def is_owned(self) -> bool:
        """Tell whether it has a server that lives: one that has not left asks again within RENEWAL seconds."""
        with self._renewals:
            before = self._renewed
            return (
                self._owned
                and self._renewals.wait_for(lambda: self._renewed != before or not self._owned, RENEWAL + 1.0)
                and self._owned
            )

    def settle(self, number: int) -> None:
        """Finish the batches; the server leaves. `number` tells which one."""
        calls = self._calls
        calls.check(number)
        calls.settle()
        self._release(calls)

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

        self._calls.check(number)
        self._close_offer()
        self._offer = ConnectionOffer(self._token, "" if same_node else ray.util.get_node_ip_address())
        return self._offer.address

    def start(self, number: int, frame: bytes, arenas: tuple[int, int] | None = None) -> bytes:
        """Load and warm up the model that `frame` has, unless an earlier server has had that done; return the frame Ready, or StartFailed with whatever
        the model raised. `number` tells which server.

        `arenas` has the lengths of the arenas of requests and results, 0 where there is none, whose descriptors came with the connection of the server;
        None: there is no connection.
        """
        start = _only(FrameParser(), frame)
        assert isinstance(start, Start)
        self._calls.check(number)
        tenure = self._tenure = self._begin(arenas)
        self._tenures.put(tenure)
        if self._model_thread is None:
            main = threading.Thread(target=self._main, args=(start,), name="weir-model", daemon=True)
            self._model_thread = main
            main.start()
        if not self._ended.is_set():
            tenure.begun.wait()
        return self._start_answer

    def run(self, numbered: bytes, refs: Sequence[Ref] = (), *buffers: Any) -> Parcel | bytes:
        """Run a batch; return the frame with its final events, or the frame and the buffers that go with it.

        `numbered` is the batch's number and its frame in one, because Ray takes a twentieth of a millisecond for each argument.
        """
        (number,) = NUMBER.unpack_from(numbered)
        parcel = self._calls.run(number, memoryview(numbered)[NUMBER.size :], refs, buffers)
        return parcel[0] if len(parcel) == 1 else parcel

    def listen(self, number: int = 0) -> list[Parcel] | None:
        """Return what the worker says besides answers, when there is something, None if it has stopped; of a detached actor after RENEWAL seconds at the
        latest."""
        with self._renewals:
            self._renewed += 1
            self._renewals.notify_all()
        return self._calls.listen(number, RENEWAL if number else None)

    def cancel(self, numbered: bytes) -> None:
        """Note that no caller waits for some entries any more."""
        (number,) = NUMBER.unpack_from(numbered)
        self._calls.cancel(number, memoryview(numbered)[NUMBER.size :])

    def stop(self) -> None:
        """Finish the batches, unload the model, and return. One that has a connection is stopped by it, unless its server has left."""
        self._tenures.put(None)
        self._calls.stop()
        if self._tenure is not None:
            self._tenure.leave()
        if self._model_thread is not None:
            self._ended.wait()

    def _begin(self, arenas: tuple[int, int] | None) -> Tenure:
        if arenas is None or self._offer is None:
            self._close_offer()
            return Tenure(self._calls)
        offer, self._offer = self._offer, None
        connection, descriptors = offer.take()
        given = iter(descriptors)
        request_fd, result_fd = (next(given) if size else -1 for size in arenas)
        opened = open_channel(ServerConnection, connection.detach(), request_fd, arenas[0], result_fd, arenas[1])
        return Tenure(self._calls, *opened)

    def _close_offer(self) -> None:
        """Close the connection that is offered, and that of an earlier server which has left before it started the worker."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.close()

    def _release(self, calls: ActorChannel) -> None:
        """Have no server, unless another one than that of these `calls` has the actor by now."""
        with self._renewals:
            if calls is self._calls:
                self._owned = False
                self._renewals.notify_all()
        calls.leave("its server has left it")

    def _main(self, start: Start) -> None:
        """Be the model's thread, from its loading to its end. SystemExit of the model ends the process, as it ends a worker process."""
        tenure = self._tenures.get()
        assert tenure is not None
        try:
            runner = self._load(start, tenure)
        except BaseException as error:
            self._start_answer = bytes(encode_control(start_failed(start, error)))
            self._finish([tenure])
            return
        self._start_answer = bytes(encode_control(Ready(runner.measured())))
        try:
            self._serve(tenure, runner, start.options)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._finish()
        self._calls.end()

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
            self._release(tenure.calls)
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
