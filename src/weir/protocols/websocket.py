"""The WebSocket door: many requests of the Open Inference Protocol on one connection, answered by id as they end.

A connection has at most `websocket_in_flight` requests under way; while it has, nothing is read from its socket. At a drain
nothing more is read, what is under way gets its answers, and the connection is closed with 1001.
"""

import asyncio
from typing import TYPE_CHECKING

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from weir.protocols.account import Account
from weir.protocols.origin_check import allowed
from weir.protocols.session import Session
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.catalog.registry import Registry

PATHS = ("/v2/ws", "/models/infer")


class WebSockets:
    """All the WebSockets of a server; what their requests and answers hold is charged to `account`."""

    def __init__(self, registry: "Registry", settings: HttpSettings, account: Account | None = None) -> None:
        self._account = account or Account(settings)
        self._registry = registry
        self._settings = settings
        self._sessions: set[Session] = set()
        self._refusing = False
        self._none_left = asyncio.Event()

    def routes(self) -> list[WebSocketRoute]:
        """Return Starlette's routes to them."""
        return [WebSocketRoute(path, self.serve) for path in PATHS]

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._sessions)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one connection to its end. One that a page of another origin opens is refused with 403."""
        if not allowed(socket.headers.getlist("origin"), socket.headers.get("host", ""), self._settings.cors_origins):
            await socket.close()
            return
        session = Session(socket, self._registry, self._settings, self._account)
        if self._refusing:
            session.refuse()
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._none_left.set()

    def refuse(self) -> None:
        """Read no more requests. Every connection closes when what is under way has been answered."""
        self._refusing = True
        for session in self._sessions:
            session.refuse()

    async def closed(self) -> None:
        """Return when no connection is open."""
        while self._sessions:
            self._none_left.clear()
            await self._none_left.wait()
