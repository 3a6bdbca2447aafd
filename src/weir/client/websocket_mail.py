"""The answers that come on one WebSocket, handed to those who wait for them."""

from itertools import count
from typing import Protocol

from weir.client.failures import ConnectionLost
from weir.client.websocket_calls import Answer
from weir.errors import InvalidRequest, Overloaded, WeirError
from weir.wire.websocket import read_answer

# Answers to one request that are kept while nobody reads them. The connection is read on meanwhile, for all others.
MOST_KEPT = 4096

Got = Answer | WeirError


class Box(Protocol):
    """Where the answers to one request are kept: a queue, of threads or of an event loop."""

    def put_nowait(self, got: Got, /) -> None:
        """Add one."""

    def qsize(self) -> int:
        """How many there are."""


class Mail:
    """Who waits for what on one connection. Whoever receives calls `deliver` and `close`; the rest may be other threads."""

    def __init__(self, url: str) -> None:
        self._boxes: dict[str, Box] = {}
        self._ids = count()
        self._url = url
        self._end = ConnectionLost(f"{url}: the connection ended before the answer")
        self._closed = False

    def expect(self, box: Box) -> str:
        """Return the id of a request whose answers go to `box`; so does the end of the connection, even if it has come."""
        own = str(next(self._ids))
        self._boxes[own] = box
        if self._closed:
            box.put_nowait(self._end)
        return own

    def forget(self, id: str) -> None:
        """Nobody waits for this any more."""
        self._boxes.pop(id, None)

    def deliver(self, message: str | bytes) -> bool:
        """Hand on one message; False if it cannot be read, and nothing can that comes after it. A reader who is too far behind
        gets no more than what was kept, and an error then."""
        try:
            answer = read_answer(message)
        except InvalidRequest as error:
            self._end = ConnectionLost(f"{self._url}: sent what cannot be read: {error.message}")
            return False
        box = self._boxes.get(answer.id)
        if box is None:
            return True
        if box.qsize() < MOST_KEPT:
            box.put_nowait(answer)
        else:
            self.forget(answer.id)
            box.put_nowait(
                Overloaded(f"{self._url}: {MOST_KEPT} answers to one request were not read: no more are kept")
            )
        return True

    def close(self) -> None:
        """The connection has ended: tell all who wait."""
        self._closed = True
        for box in list(self._boxes.values()):
            box.put_nowait(self._end)
