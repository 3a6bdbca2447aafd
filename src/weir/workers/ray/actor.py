"""A worker inside a Ray actor. It runs what a worker process runs: `process/program.py`, in a thread of its own.

Its batches come by a connection to its server (connection.py), whose channel is that of a worker process. Where there is none, because the actor is
detached, Ray is to encrypt all that is sent, or the network lets no other connection through, they come by calls: a frame is an argument, and the answer a
result. Large buffers then travel beside the frame (PEP 574), so Ray puts them into its object store. Ray calls the methods in several threads.

This module does not import Ray at its top: Ray imports it on each node.
"""

import contextlib
import ctypes
import os
import queue
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Container, Sequence
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
    StartFailed,
    Stop,
    WorkerPlaced,
    encode_control,
    encode_events,
)
from weir.workers.arena import own_values
from weir.workers.process.program import (
    AnyRunner,
    BatchChannel,
    build_runner,
    load_runner,
    open_channel,
    run_batches,
    start_failed,
)
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


class TakenOver(Exception):
    """Another server has this actor now."""


class ActorChannel:
    """Connects the calls of the actor with the loop that runs batches (see program.BatchChannel).

    The final events of a batch are the result of the call that brought it, unless the model is streaming: its events must keep their order, and all
    go through `listen`, as do the notes that `predict` is called again.
    """

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[Batch | Stop] = queue.SimpleQueue()
        self._cancelled: dict[int, set[int]] = {}
        self._answers: dict[
            int, queue.SimpleQueue[Parcel]
        ] = {}  # where the call that brought a batch waits for its end
        self._heard: deque[Parcel] = deque()
        self._turn = threading.Condition()
        self._next = 0  # the number of the batch whose turn it is to enter
        self._owner = 0  # how many servers have taken this actor over
        self._said = threading.Condition()
        self._ended = False
        self.streaming = False
        self.lends = False

    # Called by the loop, in the model's thread.

    def receive(self) -> Batch | Stop:
        """Return the next frame to act on, when it has come."""
        return self._frames.get()

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
            del self._cancelled[events.batch_id]
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
            self._turn.wait_for(lambda: self._next == number or number >> OWNER_BITS != self._owner)
            self.check(number)
            self._next += 1
            self._turn.notify_all()
            self._cancelled[batch.batch_id] = set()
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

    def listen(self, number: int, seconds: float | None) -> list[Parcel] | None:
        """Wait until there is something to say besides answers, for so many seconds at most; return all of it, or None if the worker has stopped.
        `number` tells the owner."""
        with self._said:
            self._said.wait_for(
                lambda: bool(self._heard) or self._ended or number >> OWNER_BITS != self._owner, seconds
            )
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

    def hand_over(self) -> int:
        """Let another server send batches, once there are none; return the number of its first one. The calls of the earlier server fail."""
        self.settle()
        with self._turn, self._said:
            self._owner += 1
            self._next = self._owner << OWNER_BITS
            self._heard.clear()
            self._turn.notify_all()
            self._said.notify_all()
            return self._next

    def check(self, number: int) -> None:
        """Raise TakenOver if another server than that of the batch `number` has the actor."""
        if number >> OWNER_BITS != self._owner:
            raise TakenOver("another server has taken this actor over")

    def _say(self, parcel: Parcel) -> None:
        with self._said:
            self._heard.append(parcel)
            self._said.notify_all()


def _only(parser: FrameParser, frame: bytes | memoryview) -> Frame:
    (parsed,) = parser.feed(frame)
    return parsed


class WorkerActor:
    """One worker of a model. Ray makes it an actor that runs several calls at once: one `listen`, and a `run` for each batch that comes by a call.

    `token`: see ConnectionOffer. A detached actor outlives its server. `version` is equal for servers whose worker would be the same: the same model,
    parameters and settings.
    """

    def __init__(self, version: str = "", token: bytes = b"") -> None:
        self._channel = ActorChannel()
        self._token = token
        self._offer: ConnectionOffer | None = None
        self._ended = threading.Event()
        self._version = version
        self._model_thread: threading.Thread | None = None
        self._loaded = threading.Event()
        self._start_answer = b""
        self._adopting = threading.Lock()
        self._renewals = threading.Condition()
        self._renewed = 0  # how often its server has asked whether there is something to say
        self._owned = False

    def adopt(self, version: str) -> tuple[str, int]:
        """Take a detached actor over. Return "" and the number of the first batch, or why it cannot be had: "serves" another server, or has another
        "version". Waits until the batches of the earlier server are finished."""
        with self._adopting:
            if self.is_owned():
                return "serves", 0
            if version != self._version:
                return "version", 0
            self._owned = True
            return "", self._channel.hand_over()

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
        self._channel.check(number)
        self._channel.settle()
        with self._renewals:
            self._owned = False
            self._renewals.notify_all()

    def placement(self) -> bytes:
        """Return the frame that says where this worker is."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return bytes(
            encode_control(WorkerPlaced(os.getpid(), context.get_node_id(), address, gpus, context.get_actor_id()))
        )

    def offer(self, *, same_node: bool) -> Address:
        """Listen for the server, which is on the `same_node` or not; return where."""
        import ray

        self._offer = ConnectionOffer(self._token, "" if same_node else ray.util.get_node_ip_address())
        return self._offer.address

    def start(self, frame: bytes, arenas: tuple[int, int] | None = None) -> bytes:
        """Load and warm up the model that `frame` has; return the frame Ready, or StartFailed with whatever the model raised.

        `arenas` has the lengths of the arenas of requests and results, 0 where there is none, whose descriptors came with the connection of the server;
        None: there is no connection.
        """
        start = _only(FrameParser(), frame)
        assert isinstance(start, Start)
        if self._model_thread is None:  # else it has been taken over
            main = threading.Thread(target=self._main, args=(start, arenas), name="weir-model", daemon=True)
            self._model_thread = main
            main.start()
        self._loaded.wait()
        return self._start_answer

    def run(self, numbered: bytes, refs: Sequence[Ref] = (), *buffers: Any) -> Parcel | bytes:
        """Run a batch; return the frame with its final events, or the frame and the buffers that go with it.

        `numbered` is the batch's number and its frame in one, because Ray takes a twentieth of a millisecond for each argument.
        """
        (number,) = NUMBER.unpack_from(numbered)
        parcel = self._channel.run(number, memoryview(numbered)[NUMBER.size :], refs, buffers)
        return parcel[0] if len(parcel) == 1 else parcel

    def listen(self, number: int = 0) -> list[Parcel] | None:
        """Return what the worker says besides answers, when there is something, None if it has stopped; of a detached actor after RENEWAL seconds at the
        latest."""
        with self._renewals:
            self._renewed += 1
            self._renewals.notify_all()
        return self._channel.listen(number, RENEWAL if number else None)

    def cancel(self, numbered: bytes) -> None:
        """Note that no caller waits for some entries any more."""
        (number,) = NUMBER.unpack_from(numbered)
        self._channel.cancel(number, memoryview(numbered)[NUMBER.size :])

    def stop(self) -> None:
        """Finish the batches, unload the model, and return."""
        self._channel.stop()
        self._ended.wait()

    def _answer_start(self, frame: Ready | StartFailed) -> None:
        self._start_answer = bytes(encode_control(frame))
        self._loaded.set()

    def _main(self, start: Start, arenas: tuple[int, int] | None) -> None:
        """Be the model's thread, from its loading to its end. SystemExit of the model ends the process, as it ends a worker process."""
        try:
            _keep_memory()
            sys.path += [folder for folder in start.options["path"] if folder not in sys.path]
            channel, runner = self._load(start) if arenas is None else self._load_connected(start, arenas)
        except BaseException as error:
            self._answer_start(start_failed(start, error))
            return
        self._answer_start(Ready(runner.measured()))
        try:
            run_batches(channel, runner, start.options["pipeline_depth"])
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._ended.set()
        self._channel.end()

    def _load(self, start: Start) -> tuple[BatchChannel, AnyRunner]:
        """Load the model; return where batches come from, and what runs them. Raises what the model raises."""
        if self._offer is not None:
            self._offer.close()
        runner = build_runner(start, None, None)
        assert isinstance(runner, Runner)  # on a cluster a worker has one model
        self._channel.streaming, self._channel.lends = runner.streaming, runner.borrows
        return self._channel, runner

    def _load_connected(self, start: Start, arenas: tuple[int, int]) -> tuple[BatchChannel, AnyRunner]:
        assert self._offer is not None
        connection, descriptors = self._offer.take()
        given = iter(descriptors)
        request_fd, result_fd = (next(given) if size else -1 for size in arenas)
        channel, places, fetch = open_channel(connection.detach(), request_fd, arenas[0], result_fd, arenas[1])
        return channel, load_runner(start, channel, places, fetch)


def _keep_memory() -> None:
    """Have the C library keep freed memory for the next batch. Other C libraries than glibc ignore it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 128 << 20)
