"""TLS in the simulated server: asyncio's own protocol for it on the server's side, with the context of the server, and OpenSSL without a socket on the client's.
And the sockets over which fronts relay its plain bytes."""

import os
import random
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.frontends.http.sockets import FILES
from tests.simulated.processes import CAPACITY
from tests.simulated.transport import SimulatedTransport

from weir.fronts.passing import _End

if TYPE_CHECKING:
    from tests.simulated.loop import SimulatedLoop
    from tests.simulated.processes import SimulatedProcess

_CONTEXT = ssl.create_default_context(cafile=FILES["tls_certfile"])
_CONTEXT.check_hostname = False
_WAYS = (*("whole",) * 8, "pieces", "pieces", "silent", "garbage", "leave", "plain")
_RECORD = 16_406, 16_384  # bytes of a long record, and of what it holds
_LOOK = 0.001  # seconds after which a client looks whether the server has refused it; then it looks less often


class _Taken:
    """The transport of a connection that has been accepted, and from which nothing has been read."""

    def __init__(self, taken: socket.socket) -> None:
        self.get_extra_info = {"socket": taken}.get
        self.abort = taken.close


def encrypt(
    loop: "SimulatedLoop", taken: socket.socket, protocol: Any, context: Any, waiter: Any, options: dict[str, Any]
) -> Any:
    """Let the server speak TLS on a connection; return the transport of its `protocol`. See asyncio's loops."""
    keys = ("ssl_handshake_timeout", "ssl_shutdown_timeout")
    ours = sslproto.SSLProtocol(loop, protocol, context, waiter, True, None, **{key: options[key] for key in keys})
    client: TlsConnection = loop.sockets_of_clients.pop(os.fstat(taken.fileno()).st_ino)
    client.server_end = ours._app_transport
    client.take(ours, taken)
    return client.server_end


class TlsConnection:
    """The client's end of a connection with TLS, which looks to `peer`, a Line, as one without. Its handshake comes whole, in pieces, or not at all.
    `process` is the front that has it."""

    def __init__(
        self, loop: "SimulatedLoop", peer: Any, accepted: Callable[[], Any], window: int | None, draw: random.Random, *, odd: bool,
        process: "SimulatedProcess | None",
    ) -> None:  # fmt: skip
        self._loop, self._peer, self._window, self._draw, self.process = loop, peer, window, draw, process
        self._way = draw.choice(_WAYS if odd else _WAYS[:10])
        if self._way not in _WAYS[:10]:
            peer.excused = True  # it has no answers
        self._raw: SimulatedTransport | None = None
        self._waiting = bytearray()  # what was sent before the server has taken the connection
        self._unsent = bytearray()  # what was sent before the handshake has ended
        self._records: list[tuple[int, int]] = []  # bytes on the wire, and bytes of requests in them
        self._sent = self._meant = 0
        self._gone, self.was_cut, self._shaken, self._resets = False, False, False, False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _CONTEXT.wrap_bio(self._in, self._out)
        self._ours, theirs = socket.socketpair()  # which says whether the server has closed all its descriptors
        self._theirs = theirs  # nothing else than the server closes it
        loop.sockets_of_clients[os.fstat(theirs.fileno()).st_ino] = self
        self._taken = theirs
        self.server_end: Any = None
        loop.do(process, self._accept, accepted(), theirs)
        loop.call_later(_LOOK, self._look)
        if self._way == "garbage":
            self._wire(draw.randbytes(200))
        elif self._way != "plain":
            self._shake()

    # The server's side.

    def _accept(self, protocol: Any, theirs: socket.socket) -> None:
        begin = protocol._begin

        def taken(connection: socket.socket) -> None:
            self._taken = connection
            begin(connection)

        protocol._begin = taken
        protocol.connection_made(_Taken(theirs))

    def take(self, protocol: Any, taken: socket.socket) -> None:
        """The server speaks TLS on this connection from now on."""
        self._raw = SimulatedTransport(self._loop, self, lambda: protocol, window=self._window, process=self.process)
        self._raw.at_end = taken.close
        waiting, self._waiting = bytes(self._waiting), bytearray()
        if waiting:
            self._wire(waiting)
        if self._resets:
            self._raw.reset()

    def get_protocol(self) -> Any:
        """See SimulatedTransport. None before TLS and while a front relays it: who counts it then changes."""
        protocol = None if self.server_end is None else self.server_end.get_protocol()
        return None if isinstance(protocol, _End) else protocol

    def cut_off(self) -> None:
        """See SimulatedTransport. The descriptors of the process end with it."""
        self.was_cut = True
        self._theirs.close()
        self._taken.close()
        if self._raw is None:
            self._loop.call_soon(self.closed, context=self._loop.outside.copy())
        else:
            self._raw.cut_off()

    def _look(self) -> None:
        self._ours.setblocking(False)
        try:
            refused = self._raw is None and not self._ours.recv(1)
        except BlockingIOError:
            refused = False
        if refused:
            self.closed()
        elif self._raw is None and not self._gone:
            self._loop.call_later(100 * _LOOK, self._look)

    # The client's side.

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
            self._shaken = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.closed()
            return
        self._flush()
        if self._shaken and self._unsent:
            unsent, self._unsent = bytes(self._unsent), bytearray()
            self._write(unsent)

    def _write(self, data: bytes) -> None:
        self._tls.write(data)
        self._meant += len(data)
        self._flush()

    def _flush(self) -> None:
        data = self._out.read()
        if not data:
            return
        self._sent += len(data)
        self._records.append((self._sent, self._meant))
        if self._way in ("silent", "leave") and not self._shaken:
            data = data[: self._draw.randrange(len(data))]
            if self._way == "leave":
                self._loop.call_later(self._draw.choice((0.0, 0.1)), self.reset)
        if self._way == "pieces":
            cut = self._draw.randrange(len(data))
            self._wire(data[:cut])
            self._wire(data[cut:])
        else:
            self._wire(data)

    def _wire(self, data: bytes) -> None:
        if self._raw is None:
            self._waiting += data
        else:
            self._raw.send(data)

    @property
    def delivered(self) -> int:
        """How many bytes of requests the server has been able to read."""
        read = 0 if self._raw is None else self._raw.delivered
        sent, meant = max((each for each in self._records if each[0] <= read), default=(0, 0))
        return min(self._meant, meant + (read - sent) // _RECORD[0] * _RECORD[1])

    def send(self, data: bytes) -> bool:
        """See SimulatedTransport."""
        if self.is_closing():
            return False
        if self._way == "plain":
            self._wire(data)
        elif self._shaken:
            self._write(data)
        else:
            self._unsent += data
        return True

    def is_closing(self) -> bool:
        """See SimulatedTransport."""
        return self._gone or (self._raw is not None and self._raw.is_closing())

    def half_close(self) -> None:
        """Send no more: TLS ends in both directions."""
        if self._raw is not None:
            self._raw.half_close()
        else:
            self._loop.call_later(_LOOK, self.reset)

    def reset(self) -> None:
        """End the connection at once."""
        self._resets = True
        if self._raw is not None:
            self._raw.reset()

    def read(self, size: int) -> None:
        """Take so many bytes more."""
        if self._raw is not None:
            self._raw.read(size)

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        self._in.write(data)
        if not self._shaken:
            self._shake()
        found, ended = bytearray(), False
        try:
            while self._shaken and (read := self._tls.read(1 << 16)):
                found += read
            ended = self._shaken
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            ended = True
        if found:
            self._peer.received(bytes(found))
        if ended:
            self.half_close()
            self.closed()

    def closed(self) -> None:
        """The server sends no more."""
        if not self._gone:
            self._gone = True
            self._peer.excused = getattr(self._peer, "excused", False) or not self._shaken
            self._peer.closed()

    @property
    def left(self) -> bool:
        """Whether the server has a descriptor of it."""
        try:
            return bool(self._ours.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def forget(self) -> None:
        """Close what is left of it: nobody looks any more."""
        self._ours.close()
        self._theirs.close()
        self._taken.close()
        if self.server_end is not None:
            self.server_end._closed = True  # it would complain that nobody has closed it


class RelaySocket:
    """One end of the socket over which a front, a `process`, relays a connection with TLS. What comes before this end has a protocol waits for it."""

    type = socket.SOCK_STREAM

    def __init__(self, loop: "SimulatedLoop", process: "SimulatedProcess | None") -> None:
        self._loop, self._process = loop, process
        self.other: RelaySocket
        self._waiting: list[bytes | None] = []
        self._unread = 0  # bytes that the other end may send once it is there
        self._transport: SimulatedTransport | None = None

    def setblocking(self, flag: bool) -> None:
        """See socket."""

    def getpeername(self) -> Any:
        """See socket. It has no name."""
        raise OSError

    def open(self, protocol: Any) -> SimulatedTransport:
        """Return the transport of this end, with its protocol."""
        transport = SimulatedTransport(self._loop, self.other, lambda: protocol, window=CAPACITY, process=self._process)
        transport.taken = self.other._read
        self._transport = transport
        transport.read(self._unread)
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._take(data)
        return transport

    def _read(self, size: int) -> None:
        if self._transport is None:
            self._unread += size
        else:
            self._transport.read(size)

    def received(self, data: bytes) -> None:
        """See Peer: the other end has sent something."""
        self._loop.call_soon(self._take, data, context=self._loop.outside.copy())

    def closed(self) -> None:
        """See Peer."""
        self._loop.call_soon(self._take, None, context=self._loop.outside.copy())

    def _take(self, data: bytes | None) -> None:
        if self._transport is None:
            self._waiting.append(data)
        elif data is None:
            self._transport.half_close()
        else:
            self._transport.send(data)

    def cut_off(self) -> None:
        """The process has ended."""
        if self._transport is None:
            self.other.closed()
        else:
            self._transport.cut_off()
