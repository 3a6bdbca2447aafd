"""Both ends of the connection between the server and a worker process.

`Channel` is the server's end: frames in and out of a socket, without ever blocking the event loop. It is a plain non-blocking socket that the
loop watches, not a transport: what is written leaves at once on every loop (uvloop holds the writes of a transport back until its next turn),
and the end of a worker can be handled without waiting for callbacks. `ChildChannel` is the worker's end: blocking, for one thread that reads and
one that writes.

A worker process imports this module too, so it must not import asyncio.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from weir.messages import Batch, Events
from weir.wire.frames import (
    Cancel,
    Frame,
    FrameError,
    FrameParser,
    Free,
    Restarted,
    Start,
    Stop,
    Turn,
    encode_control,
    encode_events,
)
from weir.workers.arena import ResultPlaces, own_values

if TYPE_CHECKING:
    import asyncio

RECEIVE_BYTES = 256 << 10
LEFT = (ConnectionError, TimeoutError)  # the server left without reading the last response, or its machine did
F = TypeVar("F")
Parsed = TypeVar("Parsed", covariant=True)


class Parser(Protocol[Parsed]):
    """Parses bytes into frames."""

    def feed(self, data: memoryview) -> Sequence[Parsed]:
        """Return the frames that `data` completes. Raises FrameError for bytes that are not a frame."""


class Channel(Generic[F]):
    """Sends frames in order and passes each frame that arrives to `on_frame`.

    `on_end` is called once, with a reason, when nothing more can arrive: the other side closed its end, or sent bytes that are not a frame. Both
    are called from the loop, or from `receive_rest`.
    """

    def __init__(
        self, end: socket.socket, parser: Parser[F], on_frame: Callable[[F], None], on_end: Callable[[str], None]
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._parser = parser
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: deque[memoryview] = deque()
        self._closed = False
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Start to receive on `loop`."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._receive)

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame` after the frames before it. It is dropped without an error if the other side is gone: its end is noticed by other means."""
        if self._closed:
            return
        if self._unsent:
            self._unsent.append(memoryview(frame))
            return
        sent = self._try(frame)
        if sent < len(frame) and self._loop is not None:
            self._unsent.append(memoryview(frame)[sent:])
            self._loop.add_writer(self._socket.fileno(), self._send_more)

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the kernel has not taken, because the other side does not read."""
        return sum(map(len, self._unsent))

    def receive_rest(self) -> None:
        """Read all that has arrived, without waiting for the loop to notice."""
        while not (self._closed or self._ended) and self._receive():
            pass

    def close(self) -> None:
        """Close the socket, drop what is unsent, and free the buffer: who holds this channel may do so for long. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsent.clear()
        self._buffer = memoryview(b"")
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _try(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send_more(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            sent = self._try(data)
            if sent < len(data):
                self._unsent[0] = data[sent:]
                return
            self._unsent.popleft()
        if self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _receive(self) -> bool:
        """Read once and pass the frames on. Return False when there is nothing to read, now or ever."""
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except OSError as error:
            return self._end(f"its channel failed: {error}")
        if size == 0:
            return self._end("it closed its channel")
        try:
            frames = self._parser.feed(self._buffer[:size])
        except FrameError as error:
            return self._end(f"it sent {error}")
        for frame in frames:
            if self._closed:
                return False
            self._on_frame(frame)
        return True

    def _end(self, reason: str) -> bool:
        self._ended = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._on_end(reason)
        return False


# The mean wait for a frame is an exponential average: the weight of the last wait in it, and how many times `spin` a wait counts as at most.
_WEIGHT = 0.25
_LONGEST = 2.0


class ServerSocket(socket.socket):
    """A child's end of the connection to its server. It stays open until the process ends, which the server takes its closing for."""

    def __del__(self) -> None:
        self.detach()


class NoSocket:
    """Replaces the worker's socket in a process that the model's code has forked: the batches are the worker's alone. Using it ends the process."""

    def sendall(self, *_: object) -> NoReturn:
        """Print what is wrong, and end the process."""
        sys.stderr.write("weir: a process that the model forked came back to the worker's code; end it with os._exit\n")
        sys.stderr.flush()
        os._exit(1)

    recv_into = sendall


class ChildChannel:
    """Receives the frames that the worker has to act on, in order.

    Free frames are carried out and Cancel frames noted as soon as they are read. `receive` returns only Start, Turn, Batch and Stop (Stop also when
    the server has closed its end).

    `spin` is for how many seconds to poll before sleeping, yielding the CPU between two polls: to wake a sleeping worker costs the server time,
    which a single caller notices. Where frames have lately come later than that, polling would find nothing, and the worker sleeps at once.
    """

    def __init__(self, end: socket.socket, parser: FrameParser, places: ResultPlaces | None) -> None:
        self._socket: Any = end
        self._parser = parser
        self._places = places
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._frames: deque[Start | Turn | Batch | Stop] = deque()
        self._cancelled: dict[int, set[int]] = {}  # the cancelled entries of each batch that is here, by its id
        self.spin = 0.0
        self._mean_wait = 0.0  # seconds

    def leave(self) -> None:
        """Close the socket in a process that the model's code has forked; see NoSocket."""
        self._socket.close()
        self._socket = NoSocket()

    def receive(self) -> Start | Turn | Batch | Stop:
        """Return the next frame to act on, when it has come."""
        while not self._frames:
            size = self._await()
            if size == 0:
                return Stop()
            self._note(self._parser.feed(self._buffer[:size]))
        return self._frames.popleft()

    def look(self) -> None:
        """Read what has arrived, without waiting; above all cancellations."""
        size = self._receive_now()
        if size:
            self._note(self._parser.feed(self._buffer[:size]))

    def cancelled(self, batch_id: int) -> Container[int]:
        """Return the cancelled entries of a batch that is here. `look` and `receive` add to the same object."""
        return self._cancelled[batch_id]

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame`; wait until the server has room for it."""
        self._socket.sendall(frame)

    def report(self, events: Events) -> None:
        """Send `events`. After the final ones of a batch, the batch is forgotten, and the memory that the model got for it is released."""
        if events.final:
            del self._cancelled[events.batch_id]
        self._socket.sendall(encode_events(events, self._places))
        if events.final and self._places is not None:
            self._places.close()

    def restarted(self, batch_id: int) -> None:
        """Tell the server that `predict` is called again for a part of this batch."""
        self.send(encode_control(Restarted(batch_id)))

    def take_turn(self, wanted: bool) -> None:
        """Wait until the worker may compute alone on its device; or, if that is not `wanted`, report that it has. Raises SystemExit if
        the server leaves."""
        self.send(encode_control(Turn(wanted)))
        if wanted and not isinstance(self.receive(), Turn):
            raise SystemExit(0)

    def _note(self, frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Batch):
                self._cancelled[frame.batch_id] = set()
                own_values(frame)
                self._frames.append(frame)
            elif isinstance(frame, Cancel):
                # A cancellation that comes after the response changes nothing.
                self._cancelled.get(frame.batch_id, set()).update(frame.indices)
            elif isinstance(frame, Free) and self._places is not None:
                for ref in frame.refs:
                    self._places.take_back(ref)
            elif isinstance(frame, (Start, Turn, Stop)):
                self._frames.append(frame)

    def _await(self) -> int:
        """Wait for bytes: poll first where they may come in time, then sleep. Return how many bytes have come; 0 at the end."""
        if not self.spin or self._cancelled:  # while a batch is here, another thread needs this CPU
            return self._wait()
        began = time.perf_counter()
        size = (self._poll(began) if self._mean_wait <= self.spin else 0) or self._wait()
        waited = min(time.perf_counter() - began, _LONGEST * self.spin)
        self._mean_wait += _WEIGHT * (waited - self._mean_wait)
        return size

    def _wait(self) -> int:
        try:
            return self._socket.recv_into(self._buffer) or self.server_left()
        except LEFT:
            return self.server_left()

    def _receive_now(self) -> int:
        try:
            return self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT) or self.server_left()
        except BlockingIOError:
            return 0
        except LEFT:
            return self.server_left()

    def server_left(self) -> int:
        """Act on the end of the connection; return 0. A worker that can outlive its server overrides this."""
        return 0

    def _poll(self, now: float) -> int:
        until = now + self.spin
        while now < until:
            size = self._receive_now()
            if size:
                return size
            os.sched_yield()
            now = time.perf_counter()
        return 0
