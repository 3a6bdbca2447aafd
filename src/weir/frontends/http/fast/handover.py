"""Connections that the fast path hands over to uvicorn's protocol, which runs the ASGI application.

uvicorn's own server does not run here, so this module does what it would do: it sets the Date header, closes connections of clients that stall in a head or
a body, and drains.
"""

import asyncio
import http
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from weir.errors import InvalidRequest, TooLarge, Unsupported, WeirError, draining
from weir.frontends.http.access_log import REFUSED
from weir.frontends.http.fast.plan import END_OF_HEAD
from weir.protocols import HttpSettings
from weir.protocols.account import Pace, head_bytes
from weir.protocols.native import content_length, head_size
from weir.wire.status import HEAD_TOO_LARGE

if TYPE_CHECKING:
    from weir.frontends.http.fast.shared import HttpShared
    from weir.protocols.account import Claim


# WebSockets under uvicorn's protocol.
#
# uvicorn alone answers pings even if nobody reads the pongs, keeps the fragments of a message separately, and lets several tasks write at the same time.
# Here nothing is read from a client that does not read; bytes that have arrived and are not parsed are charged to the server's account; and one iteration
# of the event loop parses a bounded number of frames.


# Bytes that are parsed in one iteration of the loop: of a large message, and of small messages, whose frames may be as short as six bytes.
_TURN_BYTES = 16 << 10
_SMALL_BYTES = 1 << 10

# A client that leaves this many pings unanswered is gone.
_MISSED_PINGS = 3

# Every message may have this many fragments, and one more for each 64 bytes: a fragment takes a microsecond, however short it is.
_ANY_PIECES = 1024
_BYTES_OF_PIECE = 64

_ROOM_PATIENCE = 5.0  # seconds that a message may wait until the account has room

# For uvicorn and the parser. They log each head, with keys and tokens, each message, and each connection; our access log has the connections, if it is wanted.
_log = logging.getLogger("weir.http.websocket")
# Sessions end before the handshake only if their client has left.
_log.addFilter(lambda record: not str(record.msg).startswith("ASGI callable returned without completing handshake"))
_log.setLevel(logging.WARNING)

_INVALID_TEXT, _POLICY, _TRY_AGAIN_LATER = 1007, 1008, 1013  # RFC 6455, section 7.4.1, and IANA's registry


class Charged(asyncio.Protocol):
    """Charges to the server's account what a client has not read and what has arrived and is not parsed. Both protocols below share it.

    A class must name it before uvicorn's protocol among its bases.
    """

    transport: asyncio.Transport
    _shared: "HttpShared"
    _claim: "Claim"
    _held: bytearray  # bytes that have arrived and are not parsed
    _unread = 0  # bytes written that the client has not read
    _unread_since: float | None = None  # since when the client does not read

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._held.clear()
        self._claim.close()
        self._forget_unread()
        self._shared.connections.discard(self)
        self._shared.ended.set()

    def pause_writing(self) -> None:
        """asyncio: the client does not read what was written."""
        self._unread_since = self._shared.tick
        self._unread = self.transport.get_write_buffer_size()
        self._shared.account.add(self._unread)
        super().pause_writing()

    def resume_writing(self) -> None:
        """asyncio: the client has read most of it."""
        self._unread_since = None
        self._forget_unread()
        super().resume_writing()

    def _forget_unread(self) -> None:
        self._shared.account.give(self._unread)
        self._unread = 0


class Upgraded(Charged, WebSocketsSansIOProtocol):
    """One WebSocket. It implements OpenConnection of shared.py."""

    busy = False  # websocket.py waits for the requests of its sessions

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = self.conn.logger = _log
        self.conn.debug = False
        # Status and body size, in bytes, of an error response to the opening request that is not the application's.
        self.refused_with = 0, 0
        self._joined = False
        self._opening = 0  # bytes that are charged for the opening request
        self._held = bytearray()
        self._parsed = 0  # bytes of an incomplete message, framing included
        self._pieces = 0  # further fragments of that message
        self._no_room_since: float | None = None  # since when the account is full, so that nothing is read
        self._queued = 0  # bytes of messages that the application has not taken
        self._heard = 0.0  # when bytes last arrived, or reading resumed
        self._reads_on = False  # whether the next iteration of the loop parses more
        self._sending = asyncio.Lock()

    def join(self, shared: "HttpShared", opening: int) -> None:
        """Join the connections of `shared`. The opening request has been read, and `opening` bytes are charged for it as long as the connection lives."""
        self._shared = shared
        self._claim = shared.account.claim()
        self._opening = opening
        self._heard = shared.tick
        self._joined = True
        shared.connections.add(self)
        if self.handshake_initiated and self.response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self.refused_with = self.response.status_code, len(self.response.body or b"")
        if not self.handshake_initiated:  # the parser cannot read the request, and would wait for ever
            self._refuse_to_open()
        self._count()

    def schedule_ping(self) -> None:
        """uvicorn: the next ping is due after an interval. uvicorn subtracts how late the last response came: once one had been later than an
        interval, pings would follow each other without a pause, and no response would be in time for the one that counts.
        """
        assert self.ping_interval is not None
        self.ping_timer = self.loop.call_later(self.ping_interval, self.send_keepalive_ping)

    def pause_writing(self) -> None:
        """asyncio: the client does not read what was written, so read nothing from it, neither requests nor pings."""
        super().pause_writing()
        self._regulate()

    def resume_writing(self) -> None:
        """asyncio: the client has read most of it."""
        super().resume_writing()
        self._read_on()

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have come."""
        if not self._joined:  # the opening request
            super().data_received(data)
            return
        self._heard = self._shared.tick
        self._held += data
        if not self._reads_on:
            self._read_on()

    def _read_on(self) -> None:
        """Parse some of the bytes now, and the rest in later iterations of the loop."""
        self._reads_on = False
        if self._held and self._may_parse and not self.transport.is_closing():
            piece = bytes(self._held[: _TURN_BYTES if self._parsed else _SMALL_BYTES])
            del self._held[: len(piece)]
            self._parsed += len(piece)
            super().data_received(piece)
        if self.transport.is_closing():
            self._held.clear()
            return
        self._count()
        if self._held and self._may_parse:
            self._reads_on = True
            self.loop.call_soon(self._read_on)
        self._regulate()

    @property
    def _waits(self) -> bool:
        """Whether parsing must wait: the application has not taken the last message, the client does not read, or the account is full."""
        return self.read_paused or self._unread_since is not None or self._no_room_since is not None

    @property
    def _may_parse(self) -> bool:
        """Whether frames may be parsed. Before the application has accepted the connection they may not: uvicorn would answer them before the handshake."""
        return self.handshake_complete and not self._waits

    def _regulate(self) -> None:
        if self.transport.is_closing():
            return
        if self._held or self._waits:
            self.transport.pause_reading()
        else:
            self._heard = self._shared.tick  # nothing could be heard before
            self.transport.resume_reading()

    def _count(self) -> bool:
        """Charge the bytes that the connection holds. Return whether the account has room for them.

        Without room nothing more is read. After `_ROOM_PATIENCE` seconds without room the connection ends, because its bytes keep others out too.
        """
        try:
            self._claim.hold(self._opening + len(self._held) + self._parsed + sum(map(len, self.frames)) + self._queued)
        except WeirError:
            now = self._shared.tick
            self._no_room_since = now if self._no_room_since is None else self._no_room_since
            if now - self._no_room_since > _ROOM_PATIENCE:
                self._fail(_TRY_AGAIN_LATER, "the server has no memory for more now")
        else:
            self._no_room_since = None
        return self._no_room_since is None

    def _fail(self, code: int, reason: str) -> None:
        self._held.clear()
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def handle_text(self, event: Frame) -> None:
        """uvicorn: the first fragment of a text message."""
        self._begin_message("text", event)

    def handle_bytes(self, event: Frame) -> None:
        """uvicorn: the first fragment of a binary message."""
        self._begin_message("bytes", event)

    def _begin_message(self, kind: Any, event: Frame) -> None:
        self.curr_msg_data_type = kind
        self._pieces = 0
        self.frames = [event.data] if event.fin else [bytearray(event.data)]  # type: ignore[list-item]  # grows in place
        if event.fin:
            self.send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        """uvicorn: a further fragment. It is appended to the first one, because there may be millions."""
        if self.close_sent:
            return
        self.frames[0] += event.data
        self._pieces += 1
        if self._pieces > _ANY_PIECES + len(self.frames[0]) // _BYTES_OF_PIECE:
            self._fail(_POLICY, f"a message of {len(self.frames[0])} bytes in {self._pieces} pieces")
        elif event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """uvicorn: a message is complete. Nothing more is read until the application has taken it."""
        data = bytes(self.frames[0])
        self.frames = []
        self._parsed = 0
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        else:
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
            except UnicodeDecodeError:
                self._fail(_INVALID_TEXT, "a message of text is not UTF-8")
                return
        self._queued += len(data)
        self.read_paused = True
        self.transport.pause_reading()

    def handle_parser_exception(self) -> None:
        """uvicorn: the client has violated the WebSocket protocol."""
        if self.conn.close_sent is not None:
            super().handle_parser_exception()
            return
        self._refuse_to_open()

    def _refuse_to_open(self) -> None:
        self.refused_with = 400, 0
        self.handshake_complete = self.close_sent = True
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.transport.close()

    async def receive(self) -> Any:
        """uvicorn: the application takes the next message."""
        message: Any = await super().receive()
        if message["type"] == "websocket.receive":
            self._queued = 0 if self.queue.empty() else self._queued
            if not self._reads_on:
                self._read_on()
        return message

    async def send(self, message: Any) -> None:
        """uvicorn: the application writes. One message at a time: each waits until the client has read those before it."""
        async with self._sending:
            if message["type"] == "websocket.accept" and self.transport.is_closing():
                raise ClientDisconnected  # uvicorn would drop it and log that the application did not accept
            await super().send(message)
        if self._held and not self._reads_on:
            self._read_on()

    # The sweep and the end of the server.

    def sweep(self, now: float) -> None:
        """Close the connection if its client does not read or leaves pings unanswered. Resume reading if the account has room again."""
        waits = self._no_room_since is not None and not self.transport.is_closing()
        if waits and self._count() and not self._reads_on:
            self._read_on()
        if self._unread_since is not None:
            gone = now - self._unread_since > self._shared.patience
        else:
            reads = not (self._held or self._waits)
            gone = reads and now - self._heard > _MISSED_PINGS * self._shared.settings.websocket_ping
        if gone:
            self.transport.abort()

    def drain(self) -> None:
        """Nothing to do: WebSockets.refuse ends the sessions."""

    def stop(self) -> None:
        """Close the connection with the close code for a server that stops."""
        if not self.transport.is_closing():
            self.shutdown()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()


# Seconds that the application gets to refuse a body that arrived too slowly. After that the connection is closed without a response.
_REFUSAL_TIME = 2.0

# While a request has no response, reading pauses after this many bytes of further requests.
_HELD_BYTES = 64 << 10

# A piece of a chunked body ends with the last empty line within this many bytes, so that empty lines in it do not make tiny pieces.
_PIECE_OF_CHUNKS = 1 << 10

# The framing of a chunked body may take `max_header_size` bytes, and this many more for each chunk.
_CHUNK_FRAMING = 32


class HandOver:
    """Hands connections over to uvicorn's protocol. All of them share uvicorn's state. `app` is the ASGI application."""

    def __init__(self, app: Any, settings: HttpSettings) -> None:
        self.config = Config(
            app, http=HttpToolsProtocol, ws=Upgraded, lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, timeout_keep_alive=max(1, round(settings.idle_timeout)),
            ws_max_size=settings.max_body_size, ws_ping_interval=settings.websocket_ping,
            # While reading is paused, no pong is read either, so that a timeout would close live connections. `sweep` closes dead ones.
            ws_ping_timeout=None,
            # Decompression would block the event loop: 16 KB that decompress to 16 MB take a tenth of a second.
            ws_per_message_deflate=False,
        )  # fmt: skip
        self.state = ServerState()

    def load(self) -> None:
        """Load what uvicorn's protocols need. Called once, before the first connection."""
        self.config.load()

    def on_second(self, date: bytes) -> None:
        """Set the Date header of the responses of the next second."""
        self.state.default_headers = [(b"date", date)]

    def go_on(self, shared: "HttpShared", transport: asyncio.Transport, replay: bytes) -> None:
        """Take over a connection. `replay` is what has been read from it and has no response yet."""
        protocol = UvicornConnection(self, shared)
        transport.set_write_buffer_limits()
        transport.set_protocol(protocol)
        protocol.connection_made(cast(asyncio.Transport, _Transport(transport)))
        protocol.data_received(replay)


class _Transport:
    """The transport `inner`, to which nothing is written between its failure and `connection_lost`: both event loops log such writes, from the sixth on.

    If the client of one that speaks TLS has left while reading was paused, asyncio's ends only when reading resumes; closed twice, it can neither be
    resumed nor aborted any more.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner
        # Only the transport below asyncio's TLS says that it has failed.
        self._of_asyncio = getattr(inner, "_ssl_protocol", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Write `data`, unless the connection has failed or is closed."""
        below = getattr(self._of_asyncio, "_transport", self._inner)
        if below is not None and not below.is_closing():
            self._inner.write(data)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._inner.is_closing():
            if not self._inner.can_write_eof():
                self._inner.resume_reading()
            self._inner.close()


class _Reader(httptools.HttpRequestParser):
    """llhttp's parser, which ignores an Upgrade to a protocol that the server does not speak.

    llhttp treats a request with an Upgrade header as one without a body. Clients that prefer HTTP/2 send that header with every request (RFC 7540,
    section 3.2).
    """

    def __init__(self, protocol: "UvicornConnection") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        """Parse `data`."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._protocol.on_upgrade(data[upgrade.args[0] :]):
                raise


class _Flow(FlowControl):
    """uvicorn's flow control, which also pauses reading while too many bytes wait behind the request in flight."""

    full = False

    def resume_reading(self) -> None:
        """Resume reading, unless too many bytes wait."""
        if not self.full:
            super().resume_reading()

    def regulate(self, full: bool) -> None:
        """Pause reading if `full`, else resume it."""
        if full is not self.full:
            self.full = full
            if full:
                self.pause_reading()
            else:
                self.resume_reading()


class UvicornConnection(Charged, HttpToolsProtocol):
    """uvicorn's protocol, which parses one request at a time and notes how long it has been waiting for the rest of a head or a body.

    uvicorn alone would parse all requests that arrive, even if earlier ones have no response yet. Here the bytes behind a request without a response stay
    unparsed in `_held`, which holds at most a few reads of the socket.
    """

    flow: _Flow

    def __init__(self, hand_over: HandOver, shared: "HttpShared") -> None:
        super().__init__(hand_over.config, hand_over.state, {}, asyncio.get_running_loop())
        self._shared = shared
        self._claim = shared.account.claim()
        self._held = bytearray()
        # The requests without a response, in their order; uvicorn's `cycle` is the last.
        self._open: deque[RequestResponseCycle] = deque()
        self._head_since: float | None = None
        self._pace = Pace(shared.tick)
        self._arrived = 0  # bytes of the body
        self._in_body = False
        self._left: int | None = 0  # bytes of the body that have not arrived; None if the length is unknown
        self._framing = 0  # bytes of this request that are not content
        self._chunks = 0
        self._head = 0  # bytes that are charged for the head of the request under way
        self._refusal: WeirError | None = None
        self._upgraded = False
        self.parser = _Reader(self)
        self._is_foreign = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """asyncio: the connection begins here."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._shared.connections.add(self)

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have come."""
        if self._in_body and not self._held and len(data) <= (self._left or 0):  # most of a large body
            super().data_received(data)
            return
        self._held += data
        self._read_on()

    def _read_on(self) -> None:
        while self._held and not self._waits and not self.transport.is_closing():
            piece = bytes(self._held[: self._piece_size()])
            del self._held[: len(piece)]
            super().data_received(piece)
            self._framing += len(piece)
            if self._upgraded or self.transport.is_closing() or not self._is_framed_sparingly():
                self._held.clear()
        self._count_held()

    @property
    def _waits(self) -> bool:
        """Whether a request that has arrived completely has no response yet."""
        return self.busy and not self.cycle.more_body

    def _piece_size(self) -> int:
        """Return how many bytes of `_held` may be parsed: at most the rest of one request and one more head."""
        if self._in_body and self._left:
            return self._left
        # Heads and chunked bodies end with an empty line. Content may be full of empty lines and must not be cut into tiny pieces.
        end = self._held.rfind(END_OF_HEAD, 0, _PIECE_OF_CHUNKS) if self._in_body else -1
        if end < 0:
            end = self._held.find(END_OF_HEAD)
        return len(self._held) if end < 0 else end + len(END_OF_HEAD)

    def _count_held(self) -> None:
        if self._upgraded or self.transport.is_closing():
            self._claim.close()
            return
        try:
            self._claim.hold(len(self._held) + self._head)
        except WeirError as error:
            self._held.clear()
            self._refuse(error)
        else:
            self.flow.regulate(len(self._held) >= _HELD_BYTES)

    def on_message_begin(self) -> None:
        """llhttp: the first byte of a head."""
        self._head_since = self._shared.tick
        self._in_body = False
        self._framing = self._chunks = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: a header. A trailer after a body is ignored."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """llhttp: the head is complete."""
        self._is_foreign = self.parser.should_upgrade() and self._get_upgrade() not in (None, b"websocket")
        if self._is_foreign:
            return
        self._head_since = None
        self._pace, self._arrived = Pace(self._shared.tick), 0
        self._head = head_bytes(len(self.url) + head_size(self.headers))
        self._look_at_framing()
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"  # RFC 9110, section 10.1.1
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # it does not open a WebSocket
            self._open.append(self.cycle)
        if self._shared.draining:
            self.drain()

    def _look_at_framing(self) -> None:
        """Note how long the body is. Raises the WeirError that refuses a body, which stops llhttp."""
        codings = b",".join([value for name, value in self.headers if name == b"transfer-encoding"])
        lengths = [content_length(value) for name, value in self.headers if name == b"content-length"]
        self._left = None if codings else sum(lengths)
        self._in_body = self._left != 0
        self._framing = self._chunks = 0
        if codings and codings.strip().lower() != b"chunked":
            coding = codings.decode("latin-1")
            self._stop(
                Unsupported(f"Transfer-Encoding {coding!r:.80}: only chunked is read; gzip is a Content-Encoding")
            )
        if self._in_body and self.parser.should_upgrade() and self._should_upgrade():
            self._stop(InvalidRequest("a request that opens a WebSocket must not have a body"))

    def on_body(self, body: bytes) -> None:
        """llhttp: a part of the content."""
        self._framing -= len(body)
        self._arrived += len(body)
        if self._left is not None:
            self._left -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """llhttp: the size of a chunk and its extensions."""
        self._chunks += 1

    def on_message_complete(self) -> None:
        """llhttp: the request is complete."""
        self._in_body = False
        if not self._is_foreign:
            super().on_message_complete()

    def _is_framed_sparingly(self) -> bool:
        """Refuse a head that is too large, and a body with too many chunk extensions or trailers. Return whether the request may go on."""
        limit = self._shared.settings.max_header_size
        if self._head_since is not None and self._framing > limit:
            self._refuse(TooLarge(f"head: must be at most {limit} bytes (max_header_size)"), HEAD_TOO_LARGE)
            return False
        if self._in_body and self._framing > limit + _CHUNK_FRAMING * self._chunks:
            self._refuse(InvalidRequest("body: its chunk extensions or trailers are too large"))
            return False
        return True

    def _stop(self, error: WeirError) -> None:
        self._refusal = error
        raise error

    def on_upgrade(self, rest: bytes) -> bool:
        """llhttp stops after a head with Upgrade, before `rest`. Parse the request again without that header if the protocol is not WebSocket.

        Returns whether it did so.
        """
        if not self._is_foreign:
            return False
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _Reader(self)
        self.parser.feed_data(b"\r\n".join((line, *headers, b"", rest)))
        return True

    def on_response_complete(self) -> None:
        """uvicorn: a response has been written."""
        self._open.popleft()
        super().on_response_complete()
        self._shared.ended.set()
        if self.cycle.response_complete and self._head_since is None:  # no further request has begun to arrive
            self._forget_request()
        if self._held:
            self._read_on()
        else:
            self._claim.hold(0)

    def _forget_request(self) -> None:
        """Keep nothing of the request that has its response: the connection may be idle for long, and an idle one is not charged."""
        self._head = 0
        self.url, self.headers = b"", []
        self.scope = self.cycle.scope = cast(Any, {})
        self.cycle.body.clear()

    def send_400_response(self, msg: str) -> None:
        """uvicorn: what arrived is not HTTP, or its framing is refused. A complete request before it is answered first."""
        refusal, self._refusal = self._refusal, None
        if self.busy and not self._open[0].more_body:
            self._open[0].keep_alive = False
            return
        self._refuse(refusal or InvalidRequest("request: its head, or the framing of its body, is not valid HTTP/1.1"))

    def _refuse(self, error: WeirError, status: int | None = None) -> None:
        """Refuse a request that is malformed or not read to its end, and close the connection."""
        self._shared.refused(None, error)
        first = self._open[0] if self._open else None
        self._end_all()
        if first is None or not first.response_started:
            target = self.url if first is None else first.scope["raw_path"]
            response = self._shared.handler_of(target).error_response(error, None)
            head = self._shared.heads.head(status or response.status, response.headers, len(response.body), close=True)
            self.transport.write(head + response.body)
            self._log(status or response.status, len(response.body))
        self.transport.close()

    def _end_all(self) -> None:
        """Have the application hear that nobody waits for its responses, and write no more. uvicorn would notify the last request only."""
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._end_all()
        super().connection_lost(exc)

    def _log(self, status: int, size_bytes: int) -> None:
        """Log a response that is not the application's, if there is a log. A request that the application has begun is logged by the ASGI middleware."""
        log = self._shared.log
        if log is None:
            return
        if self._open:
            cast(dict[str, Any], self._open[0].scope)[REFUSED] = status
            return
        method = (self.parser.get_method() or b"-").decode("latin-1")
        protocol = f"HTTP/{self.parser.get_http_version()}"
        log.answered(self.client, method, self.url or b"-", status, size_bytes, log.clock(), protocol)

    def handle_websocket_upgrade(self) -> None:
        """uvicorn: the connection becomes a WebSocket, with another protocol object."""
        self._upgraded = True
        self._shared.connections.discard(self)
        super().handle_websocket_upgrade()
        upgraded = cast(Upgraded, self.transport.get_protocol())
        upgraded.join(self._shared, self._head)
        status, size = upgraded.refused_with
        if status:
            self._log(status, size)
        elif self._held:  # frames that arrived with the opening request
            upgraded.data_received(bytes(self._held))

    @property
    def busy(self) -> bool:
        """Whether a request has no response yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def sweep(self, now: float) -> None:
        """Close the connection if it has been slow for too long. uvicorn closes idle ones itself."""
        settings, patience = self._shared.settings, self._shared.patience
        if self.transport.is_closing() and self._unread_since is None:
            self._unread_since = now
        if self._unread_since is not None and now - self._unread_since > patience:
            self.transport.abort()  # close would wait until the client reads
            return
        if self.busy:
            slow = self.cycle.more_body and self._pace.too_slow(now, self._arrived, patience + _REFUSAL_TIME)
        else:
            slow = self._head_since is not None and now - self._head_since > settings.header_timeout
        if slow:
            self.transport.close()

    def drain(self) -> None:
        """Close the connection after the response in flight, if there is one."""
        if self.busy:
            self.cycle.keep_alive = False

    def stop(self) -> None:
        """Close the connection. A request that has not arrived completely is refused with Draining."""
        arrives = self.cycle.more_body if self.busy else self._head_since is not None
        if arrives and not self.transport.is_closing():
            self._refuse(draining())
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()
