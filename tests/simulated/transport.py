"""A connection without a socket: bytes between a simulated client and the server's protocol."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulated.loop import SimulatedLoop

if TYPE_CHECKING:
    from tests.simulated.processes import SimulatedProcess

READ_BYTES = 256 << 10  # asyncio's transports read at most so many at a time


class Ordered(dict[Any, None]):
    """A set that is iterated in the order in which its items came: that of a set depends on their addresses."""

    def add(self, item: Any) -> None:
        """See set."""
        self[item] = None

    def discard(self, item: Any) -> None:
        """See set."""
        self.pop(item, None)


class Peer(Protocol):
    """The client's end. Its methods must not call the server at once."""

    def received(self, data: bytes) -> None:
        """Bytes have come."""

    def closed(self) -> None:
        """The server sends no more."""


class SimulatedTransport(asyncio.Transport):
    """The server's end. `connect` makes its protocol, in `process` if there is one. `window`: how many bytes the client takes before it reads again (None: it
    always reads)."""

    def __init__(
        self, loop: SimulatedLoop, peer: Peer, connect: Callable[[], Any], *, window: int | None = None,
        process: "SimulatedProcess | None" = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._loop, self._peer, self.process, self.window = loop, peer, process, window
        self._protocol: Any = None
        self.was_cut = False  # by the end of its process
        self.at_end: Callable[[], None] = lambda: None
        self.taken: Callable[[int], None] = lambda size: None  # called with the bytes that the protocol has read
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.delivered = 0  # bytes that the server has read
        self._half_closed = False  # the client sends no more
        self._eof_told = self._delivering = self._flushing = self._closing = self._lost = self._paused = False
        self._reading = True
        self._high, self._low = 65536, 16384
        self._loop.do(self.process, self._connect, connect)

    def _connect(self, connect: Callable[[], Any]) -> None:
        self._protocol = connect()
        self._protocol.connection_made(self)

    # The client's end.

    def cut_off(self) -> None:
        """The server's process has ended."""
        if not self._lost:
            self._lost = self._closing = self.was_cut = True
            self._outgoing.clear()
            self._loop.call_soon(self._peer.closed, context=self._loop.outside.copy())

    def send(self, data: bytes) -> bool:
        """Send `data` to the server; return whether the connection was still open."""
        if self._closing or self._lost or self._half_closed:
            return False
        self._incoming += data
        self._loop.do(self.process, self._deliver)
        return True

    def half_close(self) -> None:
        """Send no more."""
        self._half_closed = True
        self._loop.do(self.process, self._deliver)

    def reset(self) -> None:
        """End the connection at once."""
        if not self._lost:
            self._outgoing.clear()
            self._incoming.clear()
            self._lose(ConnectionResetError("reset by the simulated client"))

    def read(self, size: int) -> None:
        """Take `size` bytes more."""
        if self.window is not None:
            self.window += size
            self._loop.do(self.process, self._flush)

    def _deliver(self) -> None:
        if self._delivering:
            return
        if self._flushing:  # nothing comes while the server writes
            self._loop.call_soon(self._deliver)
            return
        self._delivering = True
        try:
            while self._incoming and self._reading and not self._closing and not self._lost:
                protocol = self._protocol
                size = min(READ_BYTES, len(self._incoming))
                if isinstance(protocol, asyncio.BufferedProtocol):
                    room = memoryview(protocol.get_buffer(-1))
                    size = min(len(room), len(self._incoming))
                    room[:size] = self._incoming[:size]
                    arrived = partial(protocol.buffer_updated, size)
                else:
                    arrived = partial(protocol.data_received, bytes(self._incoming[:size]))
                del self._incoming[:size]
                self.delivered += size
                self.taken(size)
                arrived()
        finally:
            self._delivering = False
        busy = self._incoming or self._eof_told or self._closing or self._lost
        if self._half_closed and self._reading and not busy:
            self._eof_told = True
            if not self._protocol.eof_received():
                self.close()

    def _flush(self) -> None:
        size = len(self._outgoing) if self.window is None else min(self.window, len(self._outgoing))
        if size:
            data = bytes(self._outgoing[:size])
            del self._outgoing[:size]
            if self.window is not None:
                self.window -= size
            flushing, self._flushing = self._flushing, True
            self._loop.at_client(self.process, self._peer.received, data)
            self._flushing = flushing
        if self._paused and len(self._outgoing) <= self._low and not self._lost:
            self._paused = False
            self._protocol.resume_writing()
        if self._closing and not self._outgoing:
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._loop.call_soon(self._end, error, context=None if self.process is None else self._loop.outside.copy())

    def _end(self, error: Exception | None) -> None:
        self._loop.do(self.process, lambda: self._protocol.connection_lost(error))
        self.at_end()
        self._loop.at_client(self.process, self._peer.closed)

    # asyncio.Transport: the server's end.

    def write(self, data: Any) -> None:
        if self._lost:
            return
        self._outgoing += data
        self._flush()
        if len(self._outgoing) > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._outgoing:
                self._lose(None)

    def abort(self) -> None:
        self._outgoing.clear()
        self._lose(ConnectionAbortedError("aborted"))

    def _force_close(self, error: Exception | None) -> None:
        self._outgoing.clear()
        self._lose(error)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return self._reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high, self._low = (65536, 16384) if high is None else (high, high // 4 if low is None else low)

    def get_write_buffer_size(self) -> int:
        return len(self._outgoing)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._peer.closed, context=None if self.process is None else self._loop.outside.copy())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 1) if name in ("peername", "sockname") else default
