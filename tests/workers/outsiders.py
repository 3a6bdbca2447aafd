"""Workers that attach from outside, in this loop, for tests."""

import asyncio
from typing import Self

from weir.wire.frames import ASK, decode_jobs, encode_reply
from weir.workers.settings import parse_address


class Outsider:
    """One connection of a worker. What it reads and says is up to the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: str, greeting: bytes = ASK) -> Self:
        """Attach, and ask for work."""
        where = parse_address(address, "address")
        if where.path:
            worker = cls(*await asyncio.open_unix_connection(where.path))
        else:
            worker = cls(*await asyncio.open_connection(where.host, where.port))
        worker.writer.write(greeting)
        return worker

    async def jobs(self) -> dict[str, bytes]:
        """Return the next batch."""
        async with asyncio.timeout(60):
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return decode_jobs(await self.reader.readexactly(size))

    def answer(self, bodies: dict[str, bytes], *failed: str) -> None:
        """Answer a batch."""
        self.writer.write(encode_reply(bodies, failed))

    async def upper(self) -> None:
        """Answer batches in upper case until the server closes the connection."""
        while True:
            try:
                jobs = await self.jobs()
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self.answer({key: body.upper() for key, body in jobs.items()})

    async def closed(self) -> bool:
        """Wait until the server has closed the connection; tell that it has."""
        async with asyncio.timeout(60):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    async def leave(self) -> None:
        """Close the connection."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return
