"""Opens connections to one server."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from errno import errorcode
from typing import Any, TypeVar

from weir.bench.targets.address import Address, tls_context
from weir.errors import SettingsError

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Dialler:
    """Knows where the server of `address` is, once `find` has found it."""

    def __init__(self, address: Address, *, insecure: bool = False) -> None:
        self.address = address
        self.direct = not address.tls  # bytes may be sent on the socket itself
        self._tls: ssl.SSLContext | None = tls_context(insecure) if address.tls else None
        self._family = socket.AF_UNIX
        self._place: Any = address.uds

    async def find(self) -> None:
        """Look the host up, and take its first address that accepts connections. Raises SettingsError."""
        address = self.address
        places: list[tuple[Any, Any]] = [(socket.AF_UNIX, address.uds)]
        if not address.uds:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise SettingsError(f"{address.url}: {address.host}: {error.strerror}") from error
            places = [(family, place) for family, _, _, _, place in found]
        wrong: OSError = OSError("no address")
        for self._family, self._place in places:
            try:
                sock = await self._connected()
            except OSError as error:
                wrong = error
            else:
                sock.close()
                return
        raise SettingsError(f"{address.url}: no server there: {reason_of(wrong)}") from wrong

    async def dial(self, make: Callable[[socket.socket], P]) -> P:
        """Connect, and return the protocol that `make(socket)` made for it. Raises OSError."""
        loop = asyncio.get_running_loop()
        sock = await self._connected()
        protocol = make(sock)
        name = self.address.host if self._tls is not None else None
        await loop.create_connection(lambda: protocol, sock=sock, ssl=self._tls, server_hostname=name)
        return protocol

    async def _connected(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, self._place)
        except BaseException:
            sock.close()
            raise
        return sock


def reason_of(error: OSError) -> str:
    """Return what went wrong, in the system's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    # What the event loop says of a failed connection ("Connect call failed") is no reason.
    return (
        os.strerror(error.errno)
        if error.errno is not None and error.errno in errorcode
        else str(error) or type(error).__name__
    )
