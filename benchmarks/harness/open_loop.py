"""An open loop: requests leave at random instants of a given rate, whether or not the answers come.

Prints the answers by code, how many could not be sent, and the times of the good ones.
Arguments: HOST PORT PATH RATE SECONDS CONNECTIONS BODY."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from statistics import quantiles
from typing import Any

import uvloop

GRACE_SECONDS = 5.0  # for the last answers


class Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self, loop: "OpenLoop") -> None:
        self.loop = loop
        self.transport: Any = None
        self.received = b""
        self.sent_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.loop.idle.append(self)
        self.loop.connections.add(self)

    def send(self, request: bytes) -> None:
        self.received = b""
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if found and len(body) >= _content_length(head) and self.sent_at is not None:
            seconds, self.sent_at = time.perf_counter() - self.sent_at, None
            self.loop.answered(int(head[9:12]), seconds)
            self.loop.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.loop.idle:
            self.loop.idle.remove(self)
        if self.sent_at is not None:
            self.loop.broken()
        self.loop.lost(self)


class OpenLoop:
    """Sends; counts what comes back."""

    def __init__(self, host: str, port: int, path: str, body: bytes) -> None:
        self.host, self.port = host, port
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.connections: set[Connection] = set()
        self.idle: list[Connection] = []
        self.closing = False
        self.codes: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.sent: int | None = None  # known at the end
        self.all_answered = asyncio.Event()
        self.connecting: set[asyncio.Task[Any]] = set()

    def answered(self, code: int, seconds: float) -> None:
        self.codes[str(code)] += 1
        if code == 200:
            self.seconds.append(seconds)
        self._note_the_end()

    def broken(self) -> None:
        self.codes["broken"] += 1
        self._note_the_end()

    def lost(self, connection: Connection) -> None:
        """Replace a connection that the server has closed."""
        self.connections.discard(connection)
        if self.closing:
            return
        task = asyncio.get_running_loop().create_task(self.connect())
        self.connecting.add(task)
        task.add_done_callback(self.connecting.discard)

    def close(self) -> None:
        """Close all connections, and open no more."""
        self.closing = True
        for task in self.connecting:
            task.cancel()
        for connection in list(self.connections):
            connection.transport.close()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: Connection(self), self.host, self.port)

    async def run(self, rate: float, seconds: float, connections: int) -> dict[str, Any]:
        """Send for `seconds` at `rate`; wait a little for the last answers."""
        await asyncio.gather(*(self.connect() for _ in range(connections)))
        chance = random.Random(1)
        start = time.perf_counter()
        due, sent = start, 0
        while (now := time.perf_counter()) < start + seconds:
            while due <= now:
                due += chance.expovariate(rate)
                sent += self._send()
            await asyncio.sleep(0.0005)
        await self._last_answers(sent)
        return self._summary(seconds, sent)

    def _send(self) -> int:
        if not self.idle:
            self.codes["unsent"] += 1
            return 0
        self.idle.pop().send(self.request)
        return 1

    async def _last_answers(self, sent: int) -> None:
        self.sent = sent
        self._note_the_end()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.all_answered.wait(), GRACE_SECONDS)

    def _note_the_end(self) -> None:
        if self.sent is not None and self.codes.total() - self.codes["unsent"] >= self.sent:
            self.all_answered.set()

    def _summary(self, seconds: float, sent: int) -> dict[str, Any]:
        answered = self.codes.total() - self.codes["unsent"]
        cuts = quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [0.0] * 99
        return {
            "codes": dict(self.codes), "sent": sent, "unanswered": sent - answered, "offered_rate": sent / seconds,
            "good_rate": self.codes["200"] / seconds, "p50": cuts[49], "p99": cuts[98],
        }  # fmt: skip


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


if __name__ == "__main__":
    host, port, path, rate, seconds, connections, body = sys.argv[1:]
    loop = OpenLoop(host, int(port), path, body.encode())
    print(json.dumps(uvloop.run(loop.run(float(rate), float(seconds), int(connections)))))
