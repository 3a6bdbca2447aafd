"""What the load generator meets in tests: servers that misbehave, a target without a network, clocks and wakers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from weir.bench.target import OK, Target
from weir.testing import FakeClock

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n9"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"

# Answers the n-th POST (from 0); False ends the connection.
Behaviour = Callable[[int, asyncio.StreamWriter], Awaitable[bool]]


async def good(number: int, writer: asyncio.StreamWriter) -> bool:
    writer.write(GOOD)
    return True


class Stub:
    """A server that does with each POST what `behave` says; every GET is 404."""

    def __init__(self, behave: Behaviour = good) -> None:
        self.behave = behave
        self.asked = 0
        self.stopped = False
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while await self._one(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._serving.discard(task)
            writer.transport.abort() if self.stopped else writer.close()

    async def stop(self) -> None:
        """End all connections."""
        self.stopped = True
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await asyncio.sleep(0)  # so that the sockets are closed

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(NOT_FOUND)
            return True
        return await self.answer(head, reader, writer)

    async def answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a POST; False ends the connection."""
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.bodies.append(await reader.readexactly(length))
        self.heads.append(head)
        number, self.asked = self.asked, self.asked + 1
        return await self.behave(number, writer)


@asynccontextmanager
async def stub(
    behave: Behaviour = good, *, server: Stub | None = None, **options: Any
) -> AsyncIterator[tuple[Stub, str]]:
    """Serve on a free port, and give the stub and its URL."""
    made = server or Stub(behave)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0, **options) as listening:
        scheme = "https" if "ssl" in options else "http"
        yield made, f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/infer/square"
        listening.close()
        await made.stop()


class FakeWaker:
    """Wakes on a FakeClock, as late as `late` seconds."""

    def __init__(self, clock: FakeClock, late: float = 0.0) -> None:
        self._clock = clock
        self._late = late

    async def until(self, when: float) -> None:
        self._clock.advance(max(0.0, when + self._late - self._clock()))


class Echo(Target):
    """A target without a network: each request has its answer when it is sent."""

    def __init__(self, name: str = "echo", *, outcome: str = OK, clock: Callable[[], float]) -> None:
        super().__init__(name, clock)
        self.sent: list[int] = []
        self.opened = self.closed = False
        self._outcome = outcome

    async def open(self) -> None:
        self.opened = True

    def send(self, index: int) -> None:
        self.sent.append(index)
        self.ledger.sent[index] = self._clock()
        self.ledger.end(index, self._clock(), self._outcome)

    async def close(self) -> None:
        self.closed = True
