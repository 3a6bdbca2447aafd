"""The access log of HTTP: one line for each request of every path.

A middleware notes what goes through the ASGI application; fast/connection.py has the rest. Neither is there while the log is off.
"""

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import bounded

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LEFT = 499  # nginx's code for a client that left before its answer; it is never sent

# The key in the scope of a request for the status that was sent before the application has answered.
REFUSED = "weir.refused"

_LONGEST_PATH = 1024  # characters
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class HttpLog:
    """Writes the lines to `logger`. `clock` returns seconds."""

    def __init__(self, logger: "BoundLogger", clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self.clock = clock

    def answered(
        self, client: Any, method: str, target: bytes, status: int, size_bytes: int, began: float, protocol: str
    ) -> None:
        """Write a line for an answer. `client` is the address of the peer, as sockets have it, if it has one; of `target` only the path is
        shown, for what follows may be secret; `size_bytes` are those of the body, and `began` is when the request came."""
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
    """Return `text` without what could end a line of the log, or change how a terminal shows it."""
    return _UNPRINTABLE.sub(lambda found: f"%{ord(found[0]):02X}", text)


class Logged:
    """ASGI middleware that tells `log` of every request when its answer has been given; of a WebSocket, when it has ended."""

    def __init__(self, app: ASGIApp, log: HttpLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        answer = _Answer(send)
        began = self._log.clock()
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            answer.status = answer.status or 500  # which Starlette answers
            raise
        finally:
            target = scope.get("raw_path") or scope["path"].encode()
            method, protocol = scope.get("method", "GET"), f"HTTP/{scope.get('http_version', '1.1')}"
            status = answer.status or scope.get(REFUSED, LEFT)
            self._log.answered(scope.get("client"), method, target, status, answer.size_bytes, began, protocol)


class _Answer:
    """What was sent of one answer, by way of `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0  # none yet
        self.size_bytes = 0

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
        elif kind in ("http.response.body", "websocket.http.response.body"):
            self.size_bytes += len(message.get("body", b""))
        elif kind == "websocket.accept":
            await self._send(message)
            self.status = 101  # unless the client has left
            return
        elif kind == "websocket.send":
            self.size_bytes += len(message.get("bytes") or (message.get("text") or "").encode())
        elif kind == "websocket.close":
            self.status = self.status or 403  # which servers answer to an opening that is closed
        await self._send(message)
