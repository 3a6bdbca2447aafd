"""Passes open connections from a front to the dispatcher: the descriptor, and the bytes that were read and have no response yet.

Each connection is one message of the socket, which keeps their limits (SOCK_SEQPACKET). Many bytes are in a file in memory, whose descriptor follows that of
the connection.

The descriptor of a connection with TLS is not enough: its keys are the front's. So the front keeps it and relays its plain bytes over a Unix socket, of which the
dispatcher gets the other end in place of the connection. The message of such a one says where it comes from.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from weir.protocols.account import Claim, SharedAccount
from weir.workers.timer import in_background, resolve

_log = logging.getLogger("weir.http")

_MOST_INLINE = 32 << 10  # bytes that are in the message itself
_LONGEST_MESSAGE = 2 * _MOST_INLINE
_AROUND = 1 << 20  # bytes that a connection may have besides a body: more than a head, and what is read ahead


Address = tuple[str, int] | str | None


class Origin(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The origin of a relayed connection: the address of its client, and that of the server as the client knows it."""

    client: Address
    server: Address


class Passage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The bytes read from a connection, None if they are in a file, and the origin of the connection, if it is relayed."""

    data: bytes | None
    origin: Origin | None


Passed = Callable[[socket.socket | None, bytes, Origin | None], None]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Passage).decode


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket for connections."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ConnectionSender:
    """The front's end. `account` counts the connections that it has sent, until the dispatcher notes that it has taken them."""

    def __init__(self, end: socket.socket, loop: asyncio.AbstractEventLoop, account: SharedAccount) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = loop
        self._account = account
        self._unsent: deque[tuple[list[int], bytes]] = deque()  # descriptors, and a message

    def relay(self, data: bytes, origin: Origin) -> socket.socket:
        """Send one end of a new socket in place of a connection from `origin`; return the other end. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.send(theirs.detach(), data, origin)
        return ours

    def send(self, descriptor: int, data: bytes, origin: Origin | None = None) -> None:
        """Send a connection, whose `descriptor` is closed here as soon as it has been sent. `origin` says where a relayed one comes from."""
        is_long, waits = len(data) > _MOST_INLINE, bool(self._unsent)
        try:
            descriptors = [descriptor, *([_file_with(data)] if is_long else [])]
        except OSError as error:
            _log.warning("a connection cannot be handed over: %s", error)
            os.close(descriptor)
            return
        self._account.pass_on()
        self._unsent.append((descriptors, _encode(Passage(None if is_long else data, origin))))
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
            descriptors, message = self._unsent[0]
            try:
                socket.send_fds(self._socket, [message], descriptors)
            except BlockingIOError:
                return False
            except OSError:
                # The dispatcher has ended, and this process is about to; or too many descriptors are on their way.
                self._account.pass_on(-1)
            self._unsent.popleft()
            for each in descriptors:
                os.close(each)
        return True


class ConnectionReceiver:
    """The dispatcher's end. Each connection that has come is given to `passed`, with its bytes, of which a body may have `longest`, and its
    origin if it is relayed. `passed` is called with None for one that was lost on its way, which its front has counted, too."""

    def __init__(self, end: socket.socket, loop: asyncio.AbstractEventLoop, passed: Passed, longest: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = loop
        self._passed = passed
        self._most = longest + _AROUND
        loop.add_reader(end.fileno(), self._receive)

    def close(self) -> None:
        """Receive no more. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def receive_rest(self) -> None:
        """Receive what has arrived: the front has ended, but the connections that it has passed live."""
        while self._socket.fileno() >= 0 and self._receive():
            pass

    def _receive(self) -> bool:
        """Receive one message. Return False when there is none."""
        try:
            message, descriptors, *_ = socket.recv_fds(self._socket, _LONGEST_MESSAGE, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            message, descriptors = b"", []
        if not message:  # the front has ended, which is noticed at its link
            if self._socket.fileno() >= 0:
                self._loop.remove_reader(self._socket.fileno())
            return False
        self._passed(*self._taken(message, descriptors))
        return True

    def _taken(self, message: bytes, descriptors: list[int]) -> tuple[socket.socket | None, bytes, Origin | None]:
        """Return the connection of a message, with what was read from it and its origin. All its other descriptors are closed."""
        try:
            passage = _decode(message)
            if len(descriptors) != (2 if passage.data is None else 1):  # the system could not open all that were sent
                raise OSError("too many files are open (ulimit -n)")
            data = _content(descriptors.pop(), self._most) if passage.data is None else passage.data
            connection = socket.socket(fileno=descriptors[0])
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("a connection could not be taken over from its front: %s", error)
            for each in descriptors:
                os.close(each)
            return None, b"", None
        connection.setblocking(False)
        return connection, data, passage.origin


def _file_with(data: bytes) -> int:
    """Return the descriptor of a file in memory that has this content. Raises OSError."""
    with open(os.memfd_create("weir-passed"), "wb") as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def _content(descriptor: int, most: int) -> bytes:
    """Return what is in a file of at most `most` bytes, which is closed. Raises OSError if it is none, or has more."""
    with open(descriptor, "rb") as file:
        if file.seek(0, os.SEEK_END) > most:
            raise OSError(f"more than {most} bytes were read from it")
        file.seek(0)
        return file.read()


class RelayedTransport:
    """The dispatcher's end of a relay, `inner`, which looks like a connection with TLS from `origin`."""

    def __init__(self, inner: asyncio.Transport, origin: Origin) -> None:
        self._inner = inner
        self._info = {"peername": origin.client, "sockname": origin.server, "sslcontext": True}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio.BaseTransport."""
        return self._info.get(name, default)

    def can_write_eof(self) -> bool:
        """Return False: TLS closes both directions."""
        return False


class Relays:
    """The connections that a front relays. What the other side has not read is charged to `account`. The dispatcher counts them, but for those whose end
    it has closed, and whose clients still read."""

    def __init__(self, sender: ConnectionSender, account: SharedAccount) -> None:
        self._sender = sender
        self._account = account
        self._running: set[asyncio.Task[None]] = set()
        self._finishing: set[_End] = account.connection_set()
        account.counters.append(self._finishing.__len__)

    def begin(self, transport: asyncio.Transport, replay: bytes) -> None:
        """Relay a connection from now on. `replay` is what has been read from it and has no response yet."""
        try:
            ours = self._sender.relay(replay, _origin_of(transport))
        except OSError as error:
            _log.warning("a connection cannot be handed over: %s", error)
            transport.abort()
            return
        client = _End(self._account.claim())
        client.connection_made(transport)
        transport.pause_reading()
        transport.set_protocol(client)
        transport.set_write_buffer_limits()
        in_background(self._relay(client, ours), "the relay of a connection", self._running)

    async def _relay(self, client: "_End", ours: socket.socket) -> None:
        make = partial(_End, self._account.claim(), client)
        try:
            _, dispatcher = await asyncio.get_running_loop().create_unix_connection(make, sock=ours)
        except OSError:
            client.transport.abort()
            raise
        client.other = dispatcher
        if client.gone.done():
            dispatcher.transport.close()
        else:
            client.transport.resume_reading()
        await dispatcher.gone
        if not client.gone.done():
            self._finishing.add(client)
            await client.gone
            self._finishing.discard(client)

    async def ended(self) -> None:
        """Return when no connection is left."""
        while self._running:
            await asyncio.wait(self._running)


class _End(asyncio.Protocol):
    """One of the two ends of a relay. What arrives here is written to the `other`."""

    transport: asyncio.Transport

    def __init__(self, claim: Claim, other: "_End | None" = None) -> None:
        self.other = other  # None until it is connected; no bytes arrive here before that
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._claim = claim  # what was written here and not read

    def connection_made(self, transport: Any) -> None:
        """asyncio: it is connected."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have arrived."""
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        """asyncio: what is written here is not read."""
        self._claim.add(self.transport.get_write_buffer_size())
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """asyncio: most of it has been read."""
        self._claim.close()
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed. What has been written to the other end is still sent."""
        self._claim.close()
        resolve(self.gone, None)
        if self.other is not None:
            self.other.transport.close()


def _origin_of(transport: asyncio.Transport) -> Origin:
    return Origin(*[_address(transport.get_extra_info(each)) for each in ("peername", "sockname")])


def _address(name: Any) -> Address:
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])  # IPv6 has more
    return name if isinstance(name, str) and name else None
