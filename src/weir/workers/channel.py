"""The server's end of the connection to a worker: frames in and out of a socket, without ever blocking the loop.

A plain non-blocking socket watched by the loop, not a transport: what is written leaves at once on every loop (uvloop
holds transport writes back until its next turn), and the end of a worker can be handled without waiting for callbacks.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from weir.wire.frames import FrameError

RECEIVE_BYTES = 256 << 10
F = TypeVar("F")
Parsed = TypeVar("Parsed", covariant=True)


class Parser(Protocol[Parsed]):
    """Makes frames of bytes."""

    def feed(self, data: memoryview) -> Sequence[Parsed]:
        """Return the frames that `data` completes; FrameError if that is none."""


class Channel(Generic[F]):
    """Sends frames in order and hands each one that arrives to `on_frame`.

    `on_end` is called once, with a reason, when nothing more can arrive: the other side closed its end, or sent what
    is no frame. Both are called from the loop, or from `receive_rest`.
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

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to listen on `loop`."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._receive)

    def send(self, frame: bytes | bytearray) -> None:
        """Send `frame` after those before it. Lost in silence if the other side is gone: its process is watched."""
        if self._closed:
            return
        if self._unsent:
            self._unsent.append(memoryview(frame))
            return
        sent = self._try(frame)
        if sent < len(frame) and self._loop is not None:
            self._unsent.append(memoryview(frame)[sent:])
            self._loop.add_writer(self._socket.fileno(), self._send_more)

    def receive_rest(self) -> None:
        """Hand on all that is in the socket by now, without the loop's help."""
        while not (self._closed or self._ended) and self._receive():
            pass

    def close(self) -> None:
        """Stop listening and drop what is unsent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsent.clear()
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
        """Read once and hand on the frames. False when there is nothing to read, for now or for ever."""
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
