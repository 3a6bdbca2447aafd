"""Connections of the fast lane while there is an access log.

A connection writes each answer at once, head and body together, wherever it does so; so its transport is where answers are seen, and
connections without a log have no part of this.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from weir.protocols.fastlane.connection import Connection
from weir.protocols.fastlane.head import END_OF_HEAD
from weir.protocols.fastlane.response_writer import HEAD, IDLE
from weir.protocols.httplog import LEFT, HttpLog

if TYPE_CHECKING:
    from weir.protocols.fastlane.plan import RoutePlan
    from weir.protocols.fastlane.shared import HttpShared
    from weir.workers.executor import Block

_CONTINUE = b"HTTP/1.1 100"
_STATUS = slice(9, 12)  # of an answer
_MOST = 32  # characters of a method, or of a protocol's name


class _Heard:
    """A transport that tells `connection` of each answer that is written; for all else it is `inner`."""

    def __init__(self, inner: asyncio.Transport, connection: "LoggedConnection") -> None:
        self.inner = inner
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        """Write an answer."""
        self.inner.write(data)
        self._connection.wrote(data, len(data))

    def writelines(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write an answer, whose head comes first."""
        head, size = bytes(parts[0]), sum(map(len, parts))
        self.inner.writelines(parts)
        self._connection.wrote(head, size)


class LoggedConnection(Connection):
    """A connection that tells `log` of its answers."""

    def __init__(self, lane: "HttpShared", log: HttpLog) -> None:
        super().__init__(lane)
        self._log = log
        self._began = 0.0
        self._told = False  # of the request in flight: it has its line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._began = self._log.clock()
        super().connection_made(cast(asyncio.Transport, _Heard(cast(asyncio.Transport, transport), self)))

    def buffer_updated(self, nbytes: int) -> None:
        """Note when a request begins to arrive."""
        if self.phase is IDLE:
            self._began = self._log.clock()
        super().buffer_updated(nbytes)

    def request_ended(self) -> None:
        """Note when the next request, which may be there already, is looked at."""
        self._began = self._log.clock()
        super().request_ended()

    def wrote(self, data: bytes, size_bytes: int) -> None:
        """Tell the log of an answer that begins with `data` and has so many bytes with its head."""
        if not data.startswith(_CONTINUE):
            self._told = True
            self._tell(int(data[_STATUS]), size_bytes - data.find(END_OF_HEAD) - len(END_OF_HEAD))

    def _tell(self, status: int, size_bytes: int) -> None:
        if self.phase in (IDLE, HEAD):  # what has come is no request, or not all of one
            line = bytes(self._pending).partition(b"\r\n")[0]
        else:
            line = self._plan.head.partition(b"\r\n")[0]
        method, _, rest = line.partition(b" ")
        target, _, protocol = rest.partition(b" ")
        client = self.transport.get_extra_info("peername")
        said = method[:_MOST].decode("latin-1") or "-", target or b"-", status, size_bytes, self._began
        self._log.answered(client, *said, protocol[:_MOST].decode("latin-1") or "-")

    def _dispatch(self, plan: "RoutePlan", payload: "bytes | Block") -> None:
        self._plan = plan
        self._told = False
        super()._dispatch(plan, payload)

    def _leave(self) -> None:
        if self._request is not None and not self._told:
            self._tell(LEFT, 0)
        super()._leave()

    def _hand_over(self, head: bytes, body: bytes = b"") -> None:
        self.transport = cast(_Heard, self.transport).inner
        super()._hand_over(head, body)
