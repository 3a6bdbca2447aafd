"""The direct connection between a server and an actor: a Unix socket on one node, TCP between two.

Ray places the actor, and tells of its end. Its batches do not go through Ray's calls, which wake another process on the way there, and again on the
way back. The actor listens (`ConnectionOffer`), the process that speaks with Ray connects (`connect`), and passes the socket on to the server.

Frames have pickles in them, so before any is sent or read each side proves that it has the token, which came to the actor by Ray: with a hash of the token
and of a random number of the other side. Between nodes all of it is encrypted if Ray encrypts its own traffic (RAY_USE_TLS), with
the same certificates. The socket of a connection is passed from process to process, and read by what knows nothing of TLS (process/channel.py). So TLS ends
in a thread beside each end, and what is passed on is a plain socket to that thread.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

TOKEN_BYTES = 32
PATIENCE = 5.0  # seconds to connect, and again for the other side's proof
MOST_STRANGERS = 64  # who have connected and not yet proved that they have the token
_NONCE_BYTES = 32
_PROOF_BYTES = 32  # of SHA-256

Address = str | tuple[str, int]  # the name of an abstract Unix socket, or host and port


class ConnectionOffer:
    """Listens until one has connected who has `token`, whoever else connects: at `host`, an address of this node; or, if that is "", for processes of this machine only.

    Attributes:
        address: where it listens.
    """

    def __init__(self, token: bytes, host: str = "") -> None:
        self._token = token
        self._tls = context_of(server_side=True) if host else None
        self._listening = _listen(host)
        name: Any = self._listening.getsockname()
        self.address: Address = name[1:].decode() if isinstance(name, bytes) else (name[0], name[1])
        self._taken: tuple[socket.socket, list[int]] | None = None
        self._taking = threading.Lock()
        self._closed = False
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._accepting = threading.Thread(target=self._accept, name="weir-accept", daemon=True)
        self._accepting.start()

    def take(self) -> tuple[socket.socket, list[int]]:
        """Return the connection, and the descriptors that came with it, when there is one."""
        self._accepting.join()
        assert self._taken is not None  # nobody has closed this
        return self._taken

    def close(self) -> None:
        """Listen no more, and close what has connected."""
        with self._taking:
            self._closed = True
        self._end()
        self._accepting.join()
        if self._taken is not None:
            self._taken[0].close()
            _close(self._taken[1])

    def _end(self) -> None:
        """Have the thread that accepts end."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        """Let each who connects prove itself in a thread of its own: who says nothing keeps nobody out."""
        with self._listening:
            while self._taken is None:
                try:
                    connection, _ = self._listening.accept()
                except OSError:  # it was closed
                    return
                self._strangers.acquire()
                threading.Thread(target=self._try, args=(connection,), name="weir-admit", daemon=True).start()

    def _try(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = encrypted(connection, self._tls, time.monotonic() + PATIENCE)
            descriptors = _admit(connection, self._token)
        except OSError:  # a stranger, or one who has left
            connection.close()
            return
        finally:
            self._strangers.release()
        with self._taking:
            is_first = self._taken is None and not self._closed
            if is_first:
                self._taken = connection, descriptors
        if is_first:
            self._end()
        else:
            connection.close()
            _close(descriptors)


def _listen(host: str) -> socket.socket:
    if host:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0weir-{secrets.token_hex(16)}")
    listening.listen()
    return listening


def _admit(connection: socket.socket, token: bytes) -> list[int]:
    """Let the other side prove that it has `token`, and prove the same to it; return the descriptors that it sent. Raises OSError if it has not."""
    until = time.monotonic() + PATIENCE
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(PATIENCE)
    connection.sendall(ours)
    data, descriptors = _read(connection, _NONCE_BYTES + _PROOF_BYTES, until)
    theirs, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"server", ours, theirs)):
        _close(descriptors)
        raise PermissionError("it does not have the token")
    connection.sendall(_proof(token, b"actor", ours, theirs))
    _settle(connection)
    return descriptors


def connect(address: Address, token: bytes, descriptors: Sequence[int] = ()) -> socket.socket:
    """Connect to the actor that offers this at `address`, and send it `descriptors`, which it must be on this machine for. Raises OSError if that fails, or
    if whoever listens there does not have `token`."""
    until = time.monotonic() + 2 * PATIENCE
    tls = None if isinstance(address, str) else context_of(server_side=False)
    connection = (
        socket.socket(socket.AF_UNIX) if isinstance(address, str) else socket.create_connection(address, PATIENCE)
    )
    if tls is not None:
        connection = encrypted(connection, tls, until, address[0])
    try:
        if isinstance(address, str):
            connection.settimeout(PATIENCE)
            connection.connect("\0" + address)
        theirs, _ = _read(connection, _NONCE_BYTES, until)
        ours = secrets.token_bytes(_NONCE_BYTES)
        _send(connection, ours + _proof(token, b"server", theirs, ours), descriptors)
        proof, _ = _read(connection, _PROOF_BYTES, until)
        if not hmac.compare_digest(proof, _proof(token, b"actor", theirs, ours)):
            raise PermissionError(f"what listens at {address} is not the actor")
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(token: bytes, side: bytes, actors: bytes, servers: bytes) -> bytes:
    return hmac.digest(token, side + actors + servers, "sha256")


def _send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    if descriptors:
        socket.send_fds(connection, [data], descriptors)
    else:
        connection.sendall(data)


def _read(connection: socket.socket, size: int, until: float) -> tuple[bytes, list[int]]:
    """Return `size` bytes, and the descriptors among them. Raises OSError if they have not come by the instant `until`."""
    data, descriptors = b"", []
    try:
        while len(data) < size:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            more, came, _, _ = socket.recv_fds(connection, size - len(data), 2)
            descriptors += came
            if not more:
                raise ConnectionResetError("the peer disconnected")
            data += more
    except BaseException:
        _close(descriptors)
        raise
    return data, descriptors


def _settle(connection: socket.socket) -> None:
    """Make the connection one for frames: it blocks, and sends each at once."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


CHUNK_BYTES = 256 << 10
_VARIABLES = {"certificate": "RAY_TLS_SERVER_CERT", "key": "RAY_TLS_SERVER_KEY", "authority": "RAY_TLS_CA_CERT"}


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
    ours, theirs = socket.socketpair()
    agreed: Future[None] = Future()
    work = _relay(_agreement(connection, context, until, host), theirs, agreed)
    threading.Thread(target=asyncio.run, args=(work,), name="weir-tls", daemon=True).start()
    try:
        agreed.result()
    except BaseException:
        connection.close()
        ours.close()
        raise
    return ours


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _agreement(connection: socket.socket, context: ssl.SSLContext, until: float, host: str | None) -> Streams:
    """Do the handshake, and return the streams of what is encrypted. Raises OSError."""
    connection.setblocking(False)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    limits: Any = {"ssl_handshake_timeout": max(until - time.monotonic(), 0.001), "ssl_shutdown_timeout": PATIENCE}
    if host is None:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context, **limits)
    else:
        transport, _ = await loop.create_connection(
            lambda: protocol, sock=connection, ssl=context, server_hostname=host, **limits
        )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _relay(agreement: Awaitable[Streams], plain: socket.socket, agreed: "Future[None]") -> None:
    """Pass bytes between an encrypted connection and the socket `plain`, until one of them ends; then pass on what has come, and end the other.
    `agreed` gets what the agreement raises."""
    with plain:
        try:
            reader, writer = await agreement
        except BaseException as error:
            agreed.set_exception(error)
            return
        agreed.set_result(None)
        plain_reader, plain_writer = await asyncio.open_connection(sock=plain)
        await asyncio.gather(_copy(reader, plain_writer), _copy(plain_reader, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes until the end of `source` or `target`, and end `target` then."""
    with contextlib.suppress(OSError):  # ssl.SSLError is one
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
    target.close()
    with contextlib.suppress(OSError):
        await target.wait_closed()
