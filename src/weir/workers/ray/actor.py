"""A worker inside a Ray actor. It runs what a worker process runs: `process/program.py` over another channel.

Frames come as arguments of calls, and answers go back as results. Large buffers travel beside the frame (PEP 574), so Ray puts them into its object
store, and on one node nobody copies them again. Ray calls the methods in several threads; the model runs in one of its own.

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
    Stop,
    WorkerPlaced,
    encode_control,
    encode_events,
)
from weir.workers.arena import own_values
from weir.workers.process.program import BatchLoop, build_runner, start_failed

# A frame and its large buffers, which the frame refers to by their number and length.
Parcel = tuple[Any, ...]

NUMBER = struct.Struct(">Q")  # of a batch, in order

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
        self._said = threading.Condition()
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
        del self._cancelled[events.batch_id]
        answer = self._answers.pop(events.batch_id)
        if self.streaming:
            self._say(parcel)
            parcel = ()
        answer.put(parcel)

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
            self._turn.wait_for(lambda: self._next == number)
            self._next += 1
            self._turn.notify_all()
            self._cancelled[batch.batch_id] = set()
            self._answers[batch.batch_id] = answer
            self._frames.put(batch)
        del batch, buffers
        return answer.get()

    def cancel(self, frame: bytes) -> None:
        """Note that no caller waits for these entries any more."""
        cancel = _only(FrameParser(), frame)
        assert isinstance(cancel, Cancel)
        self._cancelled.get(cancel.batch_id, set()).update(cancel.indices)

    def stop(self) -> None:
        """Have the loop end after the batches that it has."""
        self._frames.put(Stop())

    def listen(self) -> list[Parcel]:
        """Wait until there is something to say besides answers; return all of it."""
        with self._said:
            self._said.wait_for(lambda: bool(self._heard))
            heard = list(self._heard)
            self._heard.clear()
        return heard

    def _say(self, parcel: Parcel) -> None:
        with self._said:
            self._heard.append(parcel)
            self._said.notify_all()


def _only(parser: FrameParser, frame: bytes | memoryview) -> Frame:
    (parsed,) = parser.feed(frame)
    return parsed


class WorkerActor:
    """One worker of a model. Ray makes it an actor that runs several calls at once: one `listen`, and a `run` for each batch that the worker holds."""

    def __init__(self) -> None:
        self._channel = ActorChannel()
        self._ended = threading.Event()

    def placement(self) -> bytes:
        """Return the frame that says where this worker is."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return bytes(
            encode_control(WorkerPlaced(os.getpid(), context.get_node_id(), address, gpus, context.get_actor_id()))
        )

    def start(self, frame: bytes) -> bytes:
        """Load and warm up the model that `frame` has; return the frame Ready, or StartFailed with whatever the model raised."""
        start = _only(FrameParser(), frame)
        assert isinstance(start, Start)
        loaded: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._main, args=(start, loaded), name="weir-model", daemon=True).start()
        return loaded.get()

    def run(self, numbered: bytes, refs: Sequence[Ref] = (), *buffers: Any) -> Parcel | bytes:
        """Run a batch; return the frame with its final events, or the frame and the buffers that go with it.

        `numbered` is the batch's number and its frame in one, because Ray takes a twentieth of a millisecond for each argument.
        """
        (number,) = NUMBER.unpack_from(numbered)
        parcel = self._channel.run(number, memoryview(numbered)[NUMBER.size :], refs, buffers)
        return parcel[0] if len(parcel) == 1 else parcel

    def listen(self) -> list[Parcel]:
        """Return what the worker says besides answers, when there is something."""
        return self._channel.listen()

    def cancel(self, frame: bytes) -> None:
        """Note that no caller waits for some entries any more."""
        self._channel.cancel(frame)

    def stop(self) -> None:
        """Finish the batches, unload the model, and return."""
        self._channel.stop()
        self._ended.wait()

    def _main(self, start: Start, loaded: "queue.SimpleQueue[bytes]") -> None:
        """Be the model's thread, from its loading to its end. SystemExit of the model ends the process, as it ends a worker process."""
        try:
            _keep_memory()
            sys.path += [folder for folder in start.options["path"] if folder not in sys.path]
            runner = build_runner(start, None, None)
        except BaseException as error:
            loaded.put(bytes(encode_control(start_failed(start, error))))
            return
        self._channel.streaming = runner.streaming
        self._channel.lends = runner.borrows
        loaded.put(bytes(encode_control(Ready(runner.measured()))))
        batches = BatchLoop(self._channel, runner)
        try:
            if start.options["pipeline_depth"] > 1:
                batches.run_ahead()
            else:
                batches.run()
            runner.stop()
        except BaseException as error:
            traceback.print_exc()
            runner.end(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._ended.set()


def _keep_memory() -> None:
    """Have the C library keep freed memory for the next batch. Other C libraries than glibc ignore it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 128 << 20)
