"""The connections of one target: as many as are needed at once, up to a bound."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from weir.bench.ledger import TIMEOUT, UNSENT
from weir.bench.targets.answers import HttpAnswer, outcome_of
from weir.bench.targets.connection import NOBODY, Connection
from weir.bench.targets.dialling import Dialler, reason_of
from weir.bench.targets.tasks import Tasks


class Books(Protocol):
    """What a pool reports to."""

    def left(self, index: int, now: float) -> None:
        """The request `index` was sent, just before `now`."""

    def ended(self, index: int, outcome: str) -> None:
        """The request `index` has its end."""


class Pool:
    """Sends each request on a connection of its own, which it keeps for others.

    `limit` bounds the connections; a request for which there is none waits here, and `held` counts those that waited
    because of the bound. Up to `spare` connections are opened ahead of need. A request without an answer `timeout`
    seconds after it was sent is given up by `give_up`, with its connection.
    """

    def __init__(
        self, dialler: Dialler, books: Books, *, limit: int, spare: int, timeout: float, clock: Callable[[], float]
    ) -> None:
        self._dialler = dialler
        self._books = books
        self._limit = limit
        self._spare = spare
        self._timeout = timeout
        self._clock = clock
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._waiting: deque[tuple[int, bytes, float]] = deque()
        self._opening = Tasks()
        self.held = 0
        self.most = 0  # connections that were open at the same time

    async def warm(self) -> None:
        """Open the first spare connections."""
        self._grow()
        await self._opening.wait()

    def send(self, index: int, data: bytes) -> None:
        """Send a request now, or as soon as there is a connection."""
        if self._idle:
            self._leave(self._idle.pop(), index, data)  # the last used: its memory is warm
        else:
            self._waiting.append((index, data, self._clock()))
            self.held += self._size >= self._limit
        if len(self._idle) < self._spare:
            self._grow()

    def give_up(self) -> None:
        """End the requests that have had no answer for too long."""
        limit = self._clock() - self._timeout
        for connection in [each for each in self._busy if each.since <= limit]:
            connection.close()
            self._busy.discard(connection)
            self._books.ended(connection.index, TIMEOUT)
        while self._waiting and self._waiting[0][2] <= limit:
            self._books.ended(self._waiting.popleft()[0], UNSENT)
        if self._waiting:
            self._grow()

    async def close(self) -> None:
        """Drop all connections."""
        await self._opening.end()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()
        await asyncio.sleep(0)  # so that the sockets are closed

    # What connections say.

    def answered(self, connection: Connection, index: int, answer: HttpAnswer) -> None:
        """Note an answer, and use the connection again."""
        self._busy.discard(connection)
        self._books.ended(index, outcome_of(answer))
        if answer.keeps and not connection.unsent:
            self._free(connection)
        else:
            connection.close()
            self._grow_if_needed()

    def broken(self, connection: Connection, index: int, why: str) -> None:
        """Note a connection that is gone."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if index != NOBODY:
            self._books.ended(index, why)
        self._grow_if_needed()

    def _free(self, connection: Connection) -> None:
        if self._waiting:
            index, data, _ = self._waiting.popleft()
            self._leave(connection, index, data)
        else:
            self._idle.append(connection)

    def _leave(self, connection: Connection, index: int, data: bytes) -> None:
        self._busy.add(connection)
        connection.send(index, data)
        connection.since = now = self._clock()
        self._books.left(index, now)

    @property
    def _size(self) -> int:
        return len(self._idle) + len(self._busy) + len(self._opening)

    def _grow_if_needed(self) -> None:
        if self._waiting:
            self._grow()

    def _grow(self) -> None:
        wanted = len(self._waiting) + self._spare - len(self._idle) - len(self._opening)
        for _ in range(min(wanted, self._limit - self._size)):
            self._opening.start(self._open())

    async def _open(self) -> None:
        try:
            connection = await self._dialler.dial(lambda sock: Connection(self, sock, direct=self._dialler.direct))
        except OSError as error:
            if self._waiting:  # each failure is the end of one of them, so that there is an end of trying
                self._books.ended(self._waiting.popleft()[0], f"connect: {reason_of(error)}")
            return
        self._free(connection)
        self.most = max(self.most, len(self._idle) + len(self._busy))
