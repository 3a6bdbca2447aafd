"""Connections with TLS, which cannot be passed on by their descriptor: their keys are the front's.

So the front keeps such a connection and relays its plain bytes over a Unix socket, of which the dispatcher gets the other end in place of the connection.
"""

import asyncio
import logging
import socket
from functools import partial
from typing import Any

from weir.fronts.passing import Address, ConnectionSender, Origin
from weir.protocols.account import Account, Claim

_log = logging.getLogger("weir.http")


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
    """The connections that a front relays. What the other side has not read is charged to `account`."""

    def __init__(self, sender: ConnectionSender, account: Account) -> None:
        self._sender = sender
        self._account = account
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, transport: asyncio.Transport, replay: bytes) -> None:
        """Relay a connection from now on. `replay` is what has been read from it and has no response yet."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            _log.warning("a connection cannot be handed over: %s", error)
            transport.abort()
            return
        client = _End(self._account.claim())
        client.connection_made(transport)
        transport.pause_reading()
        transport.set_protocol(client)
        transport.set_write_buffer_limits()
        self._sender.send(theirs.detach(), replay, _origin_of(transport))
        task = asyncio.ensure_future(self._relay(client, ours))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _relay(self, client: "_End", ours: socket.socket) -> None:
        ours.setblocking(False)
        make = partial(_End, self._account.claim(), client)
        _, dispatcher = await asyncio.get_running_loop().create_unix_connection(make, sock=ours)
        client.other = dispatcher
        if client.gone.done():
            dispatcher.transport.close()
        else:
            client.transport.resume_reading()
        await client.gone
        await dispatcher.gone

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
        self.gone.set_result(None)
        if self.other is not None:
            self.other.transport.close()


def _origin_of(transport: asyncio.Transport) -> Origin:
    return Origin(*[_address(transport.get_extra_info(each)) for each in ("peername", "sockname")])


def _address(name: Any) -> Address:
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])  # IPv6 has more
    return name if isinstance(name, str) and name else None
