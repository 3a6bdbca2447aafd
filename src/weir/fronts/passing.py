"""Passes open connections from a front to the dispatcher: the descriptor, and the bytes that were read and have no response yet.

Each message of the socket, which keeps their limits (SOCK_SEQPACKET), has a part of the bytes; the first one of a connection also has its descriptor.
A connection with TLS is relayed instead (relaying.py): its descriptor is that of the relay, and its first message says where it comes from.
"""

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

import msgspec

_log = logging.getLogger("weir.http")

_PART = 32 << 10  # bytes of a message, besides its mark
_FIRST, _LAST, _ORIGIN = 1, 2, 4  # bits of the mark, the first byte of a message
_AROUND = 1 << 20  # bytes that a connection may have besides a body: more than a head, and what is read ahead
_ROOM = socket.CMSG_SPACE(array.array("i", [0]).itemsize)


Address = tuple[str, int] | str | None


class Origin(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a relayed connection comes from: the address of its client, and that of the server as the client knows it."""

    client: Address
    server: Address


Passed = Callable[[socket.socket, bytes, Origin | None], None]
_read_origin = msgspec.msgpack.Decoder(Origin).decode


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket for connections."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ConnectionSender:
    """The front's end."""

    def __init__(self, end: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = loop
        self._unsent: deque[tuple[int, bytes]] = deque()  # a descriptor, or -1, and a message

    @property
    def busy(self) -> bool:
        """Whether a connection is still to be sent."""
        return bool(self._unsent)

    def send(self, descriptor: int, data: bytes, origin: Origin | None = None) -> None:
        """Send a connection, whose `descriptor` is closed here as soon as it has been sent. `origin` says where a relayed one comes from."""
        waits = bool(self._unsent)
        parts = [data[start : start + _PART] for start in range(0, len(data), _PART)] or [b""]
        first = _FIRST
        if origin is not None:
            self._unsent.append((descriptor, bytes([_FIRST | _ORIGIN]) + msgspec.msgpack.encode(origin)))
            first, descriptor = 0, -1
        for index, part in enumerate(parts):
            mark = (0 if index else first) | (_LAST if index == len(parts) - 1 else 0)
            self._unsent.append((-1 if index else descriptor, bytes([mark]) + part))
        if not waits and not self._send_all():
            self._loop.add_writer(self._socket.fileno(), self._send_more)

    def send_from(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send the connection of `transport`, which is closed here: that does not close the connection."""
        try:
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
        except OSError as error:
            _log.warning("a connection cannot be handed over: %s", error)
        else:
            self.send(descriptor, data)
        transport.abort()

    def _send_more(self) -> None:
        if self._send_all():
            self._loop.remove_writer(self._socket.fileno())

    def _send_all(self) -> bool:
        while self._unsent:
            descriptor, message = self._unsent[0]
            try:
                socket.send_fds(self._socket, [message], [descriptor] if descriptor >= 0 else [])
            except BlockingIOError:
                return False
            except OSError:  # the dispatcher has ended, and this process is about to
                pass
            self._unsent.popleft()
            if descriptor >= 0:
                os.close(descriptor)
        return True


class ConnectionReceiver:
    """The dispatcher's end. Each connection that has come is given to `passed`, with its bytes, of which a body may have `longest`, and its
    origin if it is relayed."""

    def __init__(self, end: socket.socket, loop: asyncio.AbstractEventLoop, passed: Passed, longest: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = loop
        self._passed = passed
        self._most = longest + _AROUND
        self._connection: socket.socket | None = None
        self._origin: Origin | None = None
        self._data = bytearray()
        loop.add_reader(end.fileno(), self._receive)

    def close(self) -> None:
        """Receive no more. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        self._drop()

    def receive_rest(self) -> None:
        """Receive what has arrived: the front has ended, but the connections that it has passed live."""
        while self._socket.fileno() >= 0 and self._receive():
            pass

    def _receive(self) -> bool:
        """Receive one message. Return False when there is none."""
        try:
            message, descriptors, flags, _ = socket.recv_fds(self._socket, _PART + 1, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            message, descriptors, flags = b"", [], 0
        if not message:  # the front has ended, which is noticed at its link
            if self._socket.fileno() >= 0:
                self._loop.remove_reader(self._socket.fileno())
            return False
        self._take(message, descriptors, truncated=bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)))
        return True

    def _take(self, message: bytes, descriptors: list[int], *, truncated: bool) -> None:
        mark = message[0]
        if mark & _FIRST:
            self._drop()
            if len(descriptors) == 1 and not truncated:
                self._connection = _connection(descriptors.pop())
            else:
                _log.warning("a connection could not be taken over from its front: too many files are open (ulimit -n)")
        for descriptor in descriptors:
            os.close(descriptor)
        if mark & _ORIGIN:
            self._begin_relayed(message[1:])
            return
        self._data += message[1:]
        if len(self._data) > self._most:
            self._drop()
        if mark & _LAST:
            connection, origin, data = self._connection, self._origin, bytes(self._data)
            self._connection = self._origin = None
            self._data.clear()
            if connection is not None:
                self._passed(connection, data, origin)

    def _begin_relayed(self, message: bytes) -> None:
        try:
            self._origin = _read_origin(message)
        except msgspec.MsgspecError:
            _log.warning("a connection was not taken over from its front: it does not say where it comes from")
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._origin = None
        self._data.clear()
        if connection is not None:
            connection.close()


def _connection(descriptor: int) -> socket.socket | None:
    """Return the socket with this descriptor, or None if it is none."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        return None
    connection.setblocking(False)
    return connection
