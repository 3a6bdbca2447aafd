"""Connections that go on under uvicorn's protocol, with the ASGI application.

uvicorn's own server does not run here, so what it would do is done here: the Date header, an end for clients that stall
in a head or a body, and the drain.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from weir.errors import InvalidRequest
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.protocols.fastlane.lane import Lane


# Seconds that the application gets to say that a body came too slowly, before the connection is closed without a word.
_TELLING = 2.0


class _NoHeads(logging.Filter):
    """For debugging, what reads WebSockets would log every head, with keys and tokens, and every message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether `record` may be logged."""
        return record.levelno > logging.DEBUG


_NO_HEADS = _NoHeads()


class HandOver:
    """Makes the protocols that go on with connections; they share uvicorn's state. `app` is the ASGI application."""

    def __init__(self, app: Any, settings: HttpSettings) -> None:
        self.config = Config(
            app, http=HttpToolsProtocol, lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, timeout_keep_alive=max(1, round(settings.idle_timeout)),
            ws_max_size=settings.max_body_size, ws_ping_interval=settings.websocket_ping,
            # Where nothing is read because too much is under way, no pong is read either: TCP finds out who is dead.
            ws_ping_timeout=None,
        )  # fmt: skip
        self.state = ServerState()
        logging.getLogger("uvicorn.error").addFilter(_NO_HEADS)  # adds it once

    def on_second(self, date: bytes) -> None:
        """Take the date for the answers of the next second."""
        self.state.default_headers = [(b"date", date)]

    def stop(self) -> None:
        """Tell the WebSockets that the server ends; the other connections are in the lane's care."""
        for connection in list(self.state.connections):
            if not isinstance(connection, HandedOver):
                connection.shutdown()

    def go_on(self, lane: "Lane", transport: asyncio.Transport, replay: bytes) -> None:
        """Take over the connection; `replay` has been read from it and not been answered."""
        protocol = HandedOver(self, lane)
        transport.set_write_buffer_limits()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(replay)


class _Reader(httptools.HttpRequestParser):
    """llhttp, for which a request that wishes for another protocol has no body. Clients that would like HTTP/2 wish so with
    every request that they send."""

    def __init__(self, protocol: "HandedOver") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        """Read on."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._protocol.on_upgrade(data[upgrade.args[0] :]):
                raise


class HandedOver(HttpToolsProtocol):
    """uvicorn's protocol, which notes since when it has been waiting for the rest of a head or a body."""

    def __init__(self, hand_over: HandOver, lane: "Lane") -> None:
        super().__init__(hand_over.config, hand_over.state, {}, asyncio.get_running_loop())
        self._lane = lane
        self._head_since: float | None = None
        self._body_since = lane.tick
        self._unread_since: float | None = None  # since when the client has not read what was written
        self.parser = _Reader(self)
        self._is_foreign = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Take the connection over."""
        super().connection_made(transport)
        self._lane.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._lane.connections.discard(self)
        self._lane.ended.set()

    def pause_writing(self) -> None:
        """asyncio: much is written and not read."""
        self._unread_since = self._lane.tick
        super().pause_writing()

    def resume_writing(self) -> None:
        """asyncio: most of it has been read."""
        self._unread_since = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        """llhttp: the first byte of a head."""
        self._head_since = self._lane.tick
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """llhttp: the head is complete."""
        self._is_foreign = self.parser.should_upgrade() and self._get_upgrade() not in (None, b"websocket")
        if self._is_foreign:
            return
        self._head_since = None
        self._body_since = self._lane.tick
        super().on_headers_complete()
        if self._lane.draining:
            self.drain()

    def on_message_complete(self) -> None:
        """llhttp: the end of a request."""
        if not self._is_foreign:
            super().on_message_complete()

    def on_upgrade(self, rest: bytes) -> bool:
        """llhttp gives up after a head, before `rest`: tell whether it was read anew, without the wish for another protocol
        than ours and WebSocket."""
        if not self._is_foreign:
            return False
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _Reader(self)
        self.parser.feed_data(b"\r\n".join((line, *headers, b"", rest)))
        return True

    def on_response_complete(self) -> None:
        """uvicorn: an answer has been written."""
        super().on_response_complete()
        self._lane.ended.set()

    def send_400_response(self, msg: str) -> None:
        """uvicorn: what came is not HTTP. A request before it, if one has come whole, gets its answer first."""
        if self.busy and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        error = InvalidRequest("request: its head, or the framing of its body, is not valid HTTP/1.1")
        self._lane.refused(None, error)
        answer = self._lane.manner_of(self.url).error_answer(error, None)
        head = self._lane.heads.head(answer.status, answer.headers, len(answer.body), close=True)
        self.transport.write(head + answer.body)
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """uvicorn: the connection goes on under a protocol of its own, which is in uvicorn's state from now on."""
        super().handle_websocket_upgrade()
        self._lane.connections.discard(self)

    @property
    def busy(self) -> bool:
        """Whether a request has no answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def sweep(self, now: float) -> None:
        """Close the connection if it has been slow for too long; uvicorn closes idle ones itself."""
        settings = self._lane.settings
        if self._unread_since is not None and now - self._unread_since > settings.body_timeout:
            self.transport.abort()  # to close it would wait for the client to read
            return
        if self.busy:
            slow = self.cycle.more_body and now - self._body_since > settings.body_timeout + _TELLING
        else:
            slow = self._head_since is not None and now - self._head_since > settings.header_timeout
        if slow:
            self.transport.close()

    def drain(self) -> None:
        """Close the connection after the answer that is being made, if one is."""
        if self.busy:
            self.cycle.keep_alive = False

    def stop(self) -> None:
        """Close the connection."""
        self.transport.close()

    def abort(self) -> None:
        """Close it at once."""
        self.transport.abort()
