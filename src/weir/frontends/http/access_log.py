"""The access log of HTTP: one line for each request to any path.

The middleware logs the requests of the ASGI application, and fast/connection.py those of the fast path. Both are absent while the log is off.
"""

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import bounded

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LEFT = 499  # nginx's code for a client that left before its response; it is never sent

# The key in a request's scope for the status of a response that was sent instead of the application's.
REFUSED = "weir.refused"

_LONGEST_PATH = 1024  # characters
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class HttpLog:
    """Writes lines to `logger`. `clock` returns seconds."""

    def __init__(self, logger: "BoundLogger", clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self.clock = clock

    def answered(
        self, client: Any, method: str, target: bytes, status: int, size_bytes: int, began: float, protocol: str
    ) -> None:
        """Write the line of one response.

        `client` is the peer's address as a socket returns it, or None. Of `target` only the path is logged, because the query may be secret. `size_bytes`
        is the size of the body, and `began` the instant at which the request arrived.
        """
        path = target.partition(b"?")[0].decode("latin-1")
        self._logger.info(
            "http",
            client=str(client[0]) if isinstance(client, (tuple, list)) and client else "-",
            method=_printable(method),
            path=bounded(_printable(path), _LONGEST_PATH),
            status=status,
            bytes=size_bytes,
            milliseconds=round((self.clock() - began) * 1000, 3),
            protocol=_printable(protocol),
        )


def _printable(text: str) -> str:
    """Return `text` with percent codes for characters that could end the line or control a terminal."""
    return _UNPRINTABLE.sub(lambda found: f"%{ord(found[0]):02X}", text)


class Logged:
    """ASGI middleware that writes a line to `log` when a request has been answered, or when a WebSocket has ended."""

    def __init__(self, app: ASGIApp, log: HttpLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        response = _CountedResponse(send)
        began = self._log.clock()
        try:
            await self._app(scope, receive, response.send)
        except Exception:
            response.status = response.status or 500  # Starlette sends it
            raise
        finally:
            target = scope.get("raw_path") or scope["path"].encode()
            method, protocol = scope.get("method", "GET"), f"HTTP/{scope.get('http_version', '1.1')}"
            status = response.status or scope.get(REFUSED, LEFT)
            self._log.answered(scope.get("client"), method, target, status, response.size_bytes, began, protocol)


class _CountedResponse:
    """Passes one response on to `send`, and notes its status and size."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0  # 0: none yet
        self.size_bytes = 0

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
        elif kind in ("http.response.body", "websocket.http.response.body"):
            self.size_bytes += len(message.get("body", b""))
        elif kind == "websocket.accept":
            await self._send(message)
            self.status = 101  # unless `_send` raised, because the client has left
            return
        elif kind == "websocket.send":
            self.size_bytes += len(message.get("bytes") or (message.get("text") or "").encode())
        elif kind == "websocket.close":
            self.status = self.status or 403  # what ASGI servers send if the connection was not accepted
        await self._send(message)
