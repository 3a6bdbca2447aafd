"""One end of the link between a front and the dispatcher. What is sent in one turn of the event loop leaves in one frame."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from weir.fronts.messages import FULL_FRAME, frame_of, joined
from weir.wire.frames import FrameReader
from weir.workers.process.channel import Channel

R = TypeVar("R")


class CombinedReader(Generic[R]):
    """Reads frames as `reader` does, but those that came together as one: where the other end was faster, they cost little more."""

    def __init__(self, reader: FrameReader[list[R]]) -> None:
        self._read = reader.feed

    def feed(self, data: memoryview) -> list[list[R]]:
        """See FrameReader."""
        frames = self._read(data)
        return frames if len(frames) < 2 else [joined(frames)]


class Link(Generic[R]):
    """Sends messages. Those that `reader` reads at a time go to `received`; `ended` is called once, with a reason, when no more can come."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        reader: FrameReader[list[R]],
        received: Callable[[list[R]], None],
        ended: Callable[[str], None],
    ) -> None:
        self._channel = Channel(end, CombinedReader(reader), received, ended)
        self._loop = loop
        self._messages: list[Any] = []
        self._size = 0
        self._scheduled = False
        self.last: Any = None  # the message that was put last; None once it has left

    def open(self) -> None:
        """Begin to receive."""
        self._channel.open(self._loop)

    def put(self, message: Any, size_bytes: int = 0) -> None:
        """Send `message`, which has about `size_bytes` bytes, at the end of this turn of the loop."""
        self._messages.append(message)
        self.last = message
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_turn)
        self.grew(size_bytes)

    def grew(self, size_bytes: int) -> None:
        """Note that the message that was put last has so many bytes more."""
        self._size += size_bytes
        if self._size > FULL_FRAME:
            self.flush()

    def send(self, message: Any) -> None:
        """Send `message` now, with what waits for the end of the turn."""
        self._messages.append(message)
        self.flush()

    def _flush_turn(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send now what waits for the end of the turn."""
        messages = self._messages
        if messages:
            self._messages = []
            self.last = None
            self._size = 0
            self._channel.send(frame_of(messages))

    @property
    def unsent_bytes(self) -> int:
        """How many bytes the other end has not read, and the kernel not taken."""
        return self._channel.unsent_bytes

    def receive_rest(self) -> None:
        """Receive what has arrived, without waiting for the loop to notice."""
        self._channel.receive_rest()

    def close(self) -> None:
        """Send and receive no more. Idempotent."""
        self._messages.clear()
        self.last = None
        self._channel.close()
