"""A server on a free port, and clients on real sockets."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from tests.frontends.http.fast.kit import Square, answers, hello, squared

from weir.catalog.registry import Registry
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.application import make_app
from weir.frontends.http.fast.shared import Clocks
from weir.frontends.http.server import HttpServer
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor

TLS = Path(__file__).parent / "tls"
FILES: Any = {"tls_certfile": str(TLS / "certificate.pem"), "tls_keyfile": str(TLS / "key.pem")}
GET = b"GET /hello HTTP/1.1\r\nHost: test\r\n\r\n"
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


_OPEN: list["Client"] = []


@asynccontextmanager
async def serving(
    executor: FakeExecutor | None = None,
    service: Service | None = None,
    app: Any = hello,
    clock: Callable[[], float] = time.monotonic,
    access: Access | None = None,
    log: HttpLog | None = None,
    **settings: Any,
) -> AsyncIterator[HttpServer]:
    """Serve numbers squared, or `service`, on a free port; with a `log`, by Weir's own application instead of `app`."""
    service = service or Service(Square, executor=executor or FakeExecutor(squared))
    context = KserveContext(Registry([service]), HttpSettings(port=0, **settings), access=access)
    server = HttpServer(context, make_app(context, log=log) if log else app, log=log, clocks=Clocks(clock))
    await service.start()
    await server.start()
    try:
        yield server
    finally:
        close_clients()
        await service.stop(0.0)
        await server.stop()


def close_clients() -> None:
    """Close all clients that are open."""
    while _OPEN:
        _OPEN.pop().close()


class Client:
    """One connection of a client. It is closed with the server at the latest."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        _OPEN.append(self)

    @classmethod
    async def connect(cls, server: HttpServer, **options: Any) -> "Client":
        """Connect to `server`."""
        return cls(*await asyncio.open_connection("127.0.0.1", server.port, **options))

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Send `request` and return code and body of the answer."""
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """Return code and body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        (answer,) = answers(head.replace(b"content-length", b"x-length"))
        return answer.status, await self.reader.readexactly(int(answer.headers.get("x-length", 0)))

    async def rest(self) -> bytes:
        """Return everything until the server closes."""
        return await self.reader.read()

    def close(self) -> None:
        """Close."""
        self.writer.close()

    def reset(self) -> None:
        """Close without a word: the server's next read fails."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
