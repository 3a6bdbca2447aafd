"""A connection that was refused over a body that it goes on sending.

Closing it over unread bytes would make the kernel reset it, and the client would never read why. So what still comes is
thrown away, for a moment. It is a protocol of its own because uvloop keeps the bound methods of the one before.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.protocols.fastlane.shared import HttpShared

LINGER = 2.0  # seconds


class LingeringClose(asyncio.BufferedProtocol):
    """Throws away what comes until the peer closes, or the sweep has seen it for LINGER seconds."""

    busy = False

    def __init__(self, lane: "HttpShared", transport: asyncio.Transport) -> None:
        self._lane = lane
        self._transport = transport
        self._since = lane.tick

    def start(self) -> None:
        """Take the connection over. Everything to be sent has been written."""
        self._lane.connections.add(self)
        self._transport.set_protocol(self)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Offer the buffer that all share."""
        return self._lane.view

    def buffer_updated(self, nbytes: int) -> None:
        """Forget it."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._lane.connections.discard(self)
        self._lane.ended.set()

    def sweep(self, now: float) -> None:
        """Close it when it has had its time."""
        if now - self._since > LINGER:
            self._transport.abort()

    def drain(self) -> None:
        """Nothing is expected of it."""

    def stop(self) -> None:
        """Close it."""
        self._transport.close()

    def abort(self) -> None:
        """Close it at once."""
        self._transport.abort()
