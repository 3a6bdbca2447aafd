"""TLS for the connection between a server and an actor on another node, with the certificates that Ray itself uses (RAY_USE_TLS).

The socket of a connection is passed from process to process, and read by what knows nothing of TLS (process/channel.py). So TLS ends in a thread beside
each end, the `_Relay`, and what is passed on is a plain socket to that thread.
"""

import contextlib
import os
import select
import socket
import ssl
import threading
import time

CHUNK_BYTES = 256 << 10
MOST_BYTES = 4 << 20  # that one side may be behind the other
_VARIABLES = {
    "certificate": "RAY_TLS_SERVER_CERT",
    "key": "RAY_TLS_SERVER_KEY",
    "authority": "RAY_TLS_CA_CERT",
}


def context_of(*, server_side: bool) -> ssl.SSLContext | None:
    """Return what each connection of this side begins with; None if Ray does not encrypt what it sends between nodes. Raises OSError for a file that cannot
    be used."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    files = {name: os.environ.get(variable, "") for name, variable in _VARIABLES.items()}
    for name, file in files.items():
        if not os.path.isfile(file):
            raise ConnectionError(f"RAY_USE_TLS is set, so {_VARIABLES[name]} must name a file; it is {file!r}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files["authority"])
    context.load_cert_chain(files["certificate"], files["key"])
    return context


def encrypted(
    connection: socket.socket, context: ssl.SSLContext, until: float, host: str | None = None
) -> socket.socket:
    """Return a socket whose bytes go through `connection` encrypted; `connection` belongs to it from now on, also if this raises. `host` is the address that
    the certificate of the other side must be for; None: this is the side that was connected to. Each side must have a certificate of Ray's authority.

    Raises OSError if there is no agreement by the instant `until` of time.monotonic.
    """
    try:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=host is None, server_hostname=host)
        _agree(connection, tls, incoming, outgoing, until)
        ours, theirs = socket.socketpair()
    except BaseException:
        connection.close()
        raise
    _Relay(connection, tls, incoming, outgoing, theirs).start()
    return ours


def _agree(
    connection: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, until: float
) -> None:
    """Do the handshake. Raises OSError."""
    while True:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            is_done = False
        else:
            is_done = True
        finally:
            if outgoing.pending:
                connection.sendall(outgoing.read())
        if is_done:
            return
        data = connection.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the peer disconnected")
        incoming.write(data)


class _Relay(threading.Thread):
    """Passes bytes between an encrypted connection and a plain socket, until one of them ends; then it passes on what has come, and ends the other."""

    def __init__(
        self,
        encrypted: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        plain: socket.socket,
    ) -> None:
        super().__init__(name="weir-tls", daemon=True)
        self._encrypted = encrypted
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._plain = plain
        self._to_plain = bytearray()
        self._to_encrypted = bytearray()
        self._ended = False  # nothing more comes from one of them

    def run(self) -> None:
        """Pass bytes on."""
        with self._encrypted, self._plain:
            try:
                self._encrypted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._encrypted.setblocking(False)
                self._plain.setblocking(False)
                self._decrypt()  # what has come with the end of the handshake
                while not self._ended:
                    self._turn()
            except OSError:  # ssl.SSLError is one
                return
            for target, data in ((self._plain, self._to_plain), (self._encrypted, self._to_encrypted)):
                with contextlib.suppress(OSError):  # it was this one that has ended
                    target.setblocking(True)
                    target.sendall(data)

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._encrypted, _events(self._to_plain, self._to_encrypted))
        poll.register(self._plain, _events(self._to_encrypted, self._to_plain))
        ready = dict(poll.poll())
        if events := ready.get(self._encrypted.fileno()):
            if events & ~select.POLLOUT and len(self._to_plain) < MOST_BYTES:
                data = self._encrypted.recv(CHUNK_BYTES)
                self._incoming.write(data) if data else self._incoming.write_eof()
                self._decrypt()
            if events & select.POLLOUT:
                del self._to_encrypted[: self._encrypted.send(self._to_encrypted)]
        if events := ready.get(self._plain.fileno()):
            if events & ~select.POLLOUT and len(self._to_encrypted) < MOST_BYTES:
                self._encrypt(self._plain.recv(CHUNK_BYTES))
            if events & select.POLLOUT:
                del self._to_plain[: self._plain.send(self._to_plain)]

    def _decrypt(self) -> None:
        try:
            while data := self._tls.read(CHUNK_BYTES):
                self._to_plain += data
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._ended = True
        self._to_encrypted += self._outgoing.read()

    def _encrypt(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
        else:
            self._ended = True
        self._to_encrypted += self._outgoing.read()


def _events(received: bytearray, to_send: bytearray) -> int:
    """Return what to wait for: more to read while not too much is `received`, and room for what is `to_send`."""
    return (select.POLLIN if len(received) < MOST_BYTES else 0) | (select.POLLOUT if to_send else 0)
