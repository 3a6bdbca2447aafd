"""One connection to a server under test: one request at a time, on a connection that stays."""

import asyncio
import socket
from typing import Protocol, cast

from weir.bench.targets.answers import AnswerReader, Garbage, HttpAnswer

CLOSED, RESET, GARBAGE = "connection closed", "connection reset", "garbage"
NOBODY = -1


class ConnectionListener(Protocol):
    """Hears what becomes of a connection."""

    def answered(self, connection: "Connection", index: int, answer: HttpAnswer) -> None:
        """The request `index` has its answer; the connection is free again, if `answer.keeps`."""

    def broken(self, connection: "Connection", index: int, why: str) -> None:
        """The connection is gone, and with it the request `index` (NOBODY: none was under way)."""


class Connection(asyncio.Protocol):
    """`direct`: bytes go to the socket itself. A transport of uvloop sends them only when the loop's turn ends, so that
    the instant of sending would not be known."""

    def __init__(self, owner: ConnectionListener, sock: socket.socket, *, direct: bool, bodies: bool = False) -> None:
        self._owner = owner
        self._sock = sock
        self._direct = direct
        self._reader = AnswerReader(bodies)
        self._transport: asyncio.Transport | None = None
        self.index = NOBODY
        self.since = 0.0  # when the request under way was sent
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, index: int, data: bytes) -> None:
        """Send a request whose bytes are `data`."""
        self.index = index
        sent = 0
        if self._direct:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end(RESET)
                return
        if sent < len(data) and self._transport is not None:
            self._transport.write(data[sent:])

    @property
    def unsent(self) -> bool:
        """Whether some of the last request is still to be sent, though it was answered: nothing may follow it then."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def data_received(self, data: bytes) -> None:
        """Read some of an answer."""
        if self.gone:
            return
        try:
            answers = self._reader.feed(data)
        except Garbage:
            self._end(GARBAGE)
            return
        if not answers:
            return
        if self.index == NOBODY or len(answers) > 1:  # nobody asked: a server that is about to close
            self._end(GARBAGE)
            return
        (answer,), index = answers, self.index
        self.index = NOBODY
        self._owner.answered(self, index, answer)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end has closed it, or the network did."""
        self._end(CLOSED if error is None else RESET)

    def close(self) -> None:
        """Drop it, and say nothing."""
        self.gone = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if not self.gone:
            self.close()
            index, self.index = self.index, NOBODY
            self._owner.broken(self, index, why)
