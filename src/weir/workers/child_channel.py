"""The worker's end of the connection to the server: blocking, for one reading and one writing thread."""

import os
import socket
import time
from collections import deque
from collections.abc import Container

from weir.messages import OBJECT, Batch, Events, Timing
from weir.wire.frames import Cancel, Frame, FrameParser, Free, Start, Stop, encode_batch, encode_events
from weir.workers.arena import ResultPlaces, own_values

# Keeps the code between server and worker in the CPU's caches while there is nothing to do.
#
# Code that has not run for ten milliseconds takes ten times as long: its instructions and objects have to come from memory
# again. Whoever polls rather than sleeps has the time to run it now and then for nothing.


EVERY = 0.0003  # seconds: caches lose a third of their gain within one millisecond


class Frames:
    """Writes and reads the two frames that each batch is, without a socket between."""

    def __init__(self) -> None:
        self._parser = FrameParser()

    def rehearse(self) -> None:
        """Send a batch there and its answers back."""
        self.answer(Batch(0, [0], OBJECT, OBJECT))

    def answer(self, batch: Batch) -> Events:
        """Return what a worker would say that gives each entry back as it is."""
        (sent,) = self._parser.feed(encode_batch(batch))
        assert isinstance(sent, Batch)
        (events,) = self._parser.feed(encode_events(Events(sent.batch_id, sent.payloads, timing=Timing(0.0, 0.0, 0.0))))
        assert isinstance(events, Events)
        return events


RECEIVE_BYTES = 256 << 10

# How much of the mean wait the last one is, and how many times `spin` it counts as at most.
_WEIGHT = 0.25
_LONGEST = 2.0


class ChildChannel:
    """Receives what the worker has to act on, in order, and takes notes of the rest.

    Free is carried out and Cancel noted as soon as they are read; `receive` returns only Start, Batch and Stop (Stop
    also when the server closed its end).

    `spin`: seconds to poll before sleeping, yielding the CPU between two looks. To wake a sleeping worker costs the server
    time, and a lone caller notices it. Where frames have of late come later than that, polling would be in vain: it sleeps at once.
    """

    def __init__(self, end: socket.socket, parser: FrameParser, places: ResultPlaces | None) -> None:
        self._socket = end
        self._parser = parser
        self._places = places
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._frames: deque[Start | Batch | Stop] = deque()
        self._cancelled: dict[int, set[int]] = {}  # of the batches that are here
        self.spin = 0.0
        self._mean_wait = 0.0  # seconds, of late
        self._frames_of_none = Frames()

    def receive(self) -> Start | Batch | Stop:
        """Wait for the next frame to act on."""
        while not self._frames:
            size = self._await()
            if size == 0:
                return Stop()
            self._note(self._parser.feed(self._buffer[:size]))
        return self._frames.popleft()

    def look(self) -> None:
        """Read what has arrived, without waiting: cancellations, above all."""
        size = self._receive_now()
        if size:
            self._note(self._parser.feed(self._buffer[:size]))

    def cancelled(self, batch_id: int) -> Container[int]:
        """Return the entries of the batch that nobody waits for. Grows while `look` or `receive` hear of more."""
        return self._cancelled[batch_id]

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame`, waiting for as long as the server takes to read it."""
        self._socket.sendall(frame)

    def answered(self, batch_id: int) -> None:
        """Forget the batch."""
        del self._cancelled[batch_id]

    def _note(self, frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Batch):
                self._cancelled[frame.batch_id] = set()
                own_values(frame)
                self._frames.append(frame)
            elif isinstance(frame, Cancel):
                # One that comes after the answer has nothing to say any more.
                self._cancelled.get(frame.batch_id, set()).update(frame.indices)
            elif isinstance(frame, Free) and self._places is not None:
                for ref in frame.refs:
                    self._places.take_back(ref)
            elif isinstance(frame, (Start, Stop)):
                self._frames.append(frame)

    def _await(self) -> int:
        """Wait for bytes: poll where that promises to meet them, then sleep."""
        if not self.spin or self._cancelled:  # with a batch here, another thread needs this CPU
            return self._wait()
        began = time.perf_counter()
        size = (self._poll(began) if self._mean_wait <= self.spin else 0) or self._wait()
        waited = min(time.perf_counter() - began, _LONGEST * self.spin)
        self._mean_wait += _WEIGHT * (waited - self._mean_wait)
        return size

    def _wait(self) -> int:
        try:
            return self._socket.recv_into(self._buffer)
        except ConnectionResetError:  # the server left without reading the last answer
            return 0

    def _receive_now(self) -> int:
        try:
            return self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return 0

    def _poll(self, now: float) -> int:
        until, rehearsal = now + self.spin, now + EVERY
        while now < until:
            size = self._receive_now()
            if size:
                return size
            os.sched_yield()
            now = time.perf_counter()
            if now >= rehearsal:
                self._frames_of_none.rehearse()
                rehearsal = time.perf_counter() + EVERY
        return 0
