"""`python -m benchmarks.beside FILE`: puts two loads on a server, as the `Load` in FILE says, and prints as JSON what came of them, a `Seen`.

Interactive requests are sent at their instants, whether answers come or not, each over a connection that has nothing to do. Clients of a job send one
request after the other. Requests are bytes that are made before, and answers are only counted, so that the load itself takes little of the CPU.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

END_OF_HEAD = b"\r\n\r\n"
AFTER = 60.0  # seconds after the end for requests that have no answer yet; then they have failed


class Load(NamedTuple):
    """What is to be sent.

    Attributes:
        port: of the server.
        path: where interactive requests go, and those of the job.
        interactive: for each its instant, in seconds, and its body.
        job: the bodies of the job's requests, in order; the last is followed by the first.
        clients: how many clients the job has.
        headers: of the job's requests.
        seconds: when the last request of the job is sent.
    """

    port: int
    path: tuple[str, str]
    interactive: Sequence[tuple[float, str]] = ()
    job: Sequence[str] = ()
    clients: int = 0
    headers: str = ""
    seconds: float = 0.0


class Seen(NamedTuple):
    """What came of a load.

    Attributes:
        responses: the seconds from each interactive request to its answer; -1 for another answer than 200.
        late: how many seconds after its instant each of them was sent, as this process waited for a CPU: no answer holds it up.
        done: of each answered request of the job, its number and when that was, in seconds; the last answers come after the end.
        failed: how many requests of the job had another answer than 200.
    """

    responses: list[float]
    late: list[float]
    done: list[tuple[int, float]]
    failed: int


class Connection(asyncio.Protocol):
    """A connection with at most one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        head = received.find(END_OF_HEAD)
        if head < 0 or self._answer is None:
            return
        length = int(bytes(received[:head]).lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        if len(received) >= head + len(END_OF_HEAD) + length:
            status = int(received[9:12])
            received.clear()
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(status)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def ask(self, request: bytes) -> "asyncio.Future[int]":
        """Send a request; return the future status of its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def request_of(path: str, body: str, headers: str = "") -> bytes:
    """Return the bytes of a request."""
    content = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    )
    return head.encode() + headers.encode() + b"\r\n" + content


class Sender:
    """Sends a load to its server, and sees what comes of it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._idle: list[Connection] = []
        self._began = 0.0
        count = len(load.interactive)
        self.seen = Seen([-1.0] * count, [0.0] * count, [], 0)
        self._next = self._failed = 0

    async def run(self) -> Seen:
        """Send all, and return what was seen."""
        load = self._load
        singles = [request_of(load.path[0], body) for _, body in load.interactive]
        bulk = [request_of(load.path[1], body, load.headers) for body in load.job]
        clients = [await self._connect() for _ in range(load.clients)]
        self._began = time.perf_counter()
        jobs = [asyncio.create_task(self._job(client, bulk)) for client in clients]
        asked: list[asyncio.Task[None]] = []
        for number, (at, _) in enumerate(load.interactive):
            left = at - self._now
            if left > 0:
                await asyncio.sleep(left)
            asked.append(asyncio.create_task(self._one(number, at, singles[number])))
        asked += jobs
        if asked:
            _, left_over = await asyncio.wait(asked, timeout=AFTER + load.seconds - self._now)
            for task in left_over:
                task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for client in (*clients, *self._idle):
            client.close()
        await asyncio.sleep(0)  # they are closed in the next turn
        return self.seen._replace(failed=self._failed)

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _connect(self) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._load.port)
        return protocol

    async def _one(self, number: int, at: float, request: bytes) -> None:
        began = self._now
        self.seen.late[number] = began - at
        while self._idle and self._idle[-1].is_lost:  # the server ends what nobody uses
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        status = await connection.ask(request)
        self._idle.append(connection)
        if status == 200:
            self.seen.responses[number] = self._now - began

    async def _job(self, connection: Connection, requests: Sequence[bytes]) -> None:
        while self._now < self._load.seconds:
            number = self._next % len(requests)
            self._next += 1
            if await connection.ask(requests[number]) == 200:
                self.seen.done.append((number, self._now))
            else:
                self._failed += 1
                await asyncio.sleep(0.1)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(Sender(Load(**json.loads(Path(sys.argv[1]).read_text()))).run())._asdict()))
