"""A connection that has become a WebSocket, under uvicorn's protocol.

uvicorn answers pings whether or not anybody reads the pongs, keeps every piece of a message apart, and lets all who answer
write at once. Here a client that does not read is not read either; what has come and was not looked at is charged to the
server's account; and one turn of the event loop parses a bounded number of frames.
"""

import asyncio
import http
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.protocols.account import Claim
    from weir.protocols.fastlane.shared import HttpShared

# Bytes that are parsed in one turn of the loop: of a large message, and of small ones, of which a turn shall not have many. Six are
# a frame.
_TURN_BYTES = 16 << 10
_SMALL_BYTES = 1 << 10

# A client that answers none of so many pings is gone.
_MISSED_PINGS = 3

# Pieces that any message may have, and bytes for each one more: a piece takes a microsecond, however little is in it.
_ANY_PIECES = 1024
_BYTES_OF_PIECE = 64

_ROOM_PATIENCE = 5.0  # seconds that a message may wait for others to make room for it

_INVALID_TEXT, _POLICY, _TRY_AGAIN_LATER = 1007, 1008, 1013  # of RFC 6455, 7.4.1, and of the IANA's list


class Charged(asyncio.Protocol):
    """What the protocols that go on under uvicorn's have in common: what a client has not read, and what has come and was not parsed,
    is charged to the server's account until the connection is gone. To be named before uvicorn's class."""

    transport: asyncio.Transport
    _lane: "HttpShared"
    _claim: "Claim"
    _held: bytearray  # has come, and was not parsed
    _unread = 0  # bytes written that the client has not read
    _unread_since: float | None = None  # since when it has not

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._held.clear()
        self._claim.close()
        self._forget_unread()
        self._lane.connections.discard(self)
        self._lane.ended.set()

    def pause_writing(self) -> None:
        """asyncio: much is written and not read."""
        self._unread_since = self._lane.tick
        self._unread = self.transport.get_write_buffer_size()
        self._lane.account.add(self._unread)
        super().pause_writing()

    def resume_writing(self) -> None:
        """asyncio: most of it has been read."""
        self._unread_since = None
        self._forget_unread()
        super().resume_writing()

    def _forget_unread(self) -> None:
        self._lane.account.give(self._unread)
        self._unread = 0


class Upgraded(Charged, WebSocketsSansIOProtocol):
    """One WebSocket; see Swept in shared.py for what the lane wants of it."""

    busy = False  # the sessions drain themselves

    def __init__(self, *arguments: Any, **said: Any) -> None:
        super().__init__(*arguments, **said)
        self.refused_with = (
            0,
            0,
        )  # status, and bytes of the body, of an answer that no application has given to the request that opens it
        self._joined = False
        self._held = bytearray()  # has come, and was not parsed
        self._parsed = 0  # bytes of a message that is not complete, as they came
        self._pieces = 0  # of that message
        self._no_room_since: float | None = None  # the account is full: nothing more is read
        self._queued = 0  # bytes of messages that the application has not taken
        self._heard = 0.0  # when something came, or reading began again
        self._reads_on = False  # in the next turn of the loop
        self._sending = asyncio.Lock()

    def join(self, lane: "HttpShared") -> None:
        """Be one of the connections of `lane`; the request that opens it has been read."""
        self._lane = lane
        self._claim = lane.account.claim()
        self._heard = lane.tick
        self._joined = True
        lane.connections.add(self)
        if self.handshake_initiated and self.response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self.refused_with = self.response.status_code, len(self.response.body or b"")
        if not self.handshake_initiated:  # what reads WebSockets cannot read the request: it waits, and would for ever
            self._refuse_to_open()

    def pause_writing(self) -> None:
        """asyncio: much is written and not read; so nothing is read either, be it requests or pings."""
        super().pause_writing()
        self._regulate()

    def resume_writing(self) -> None:
        """asyncio: most of it has been read."""
        super().resume_writing()
        self._read_on()

    # What arrives.

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have come."""
        if not self._joined:  # uvicorn: the request that opens it
            super().data_received(data)
            return
        self._heard = self._lane.tick
        self._held += data
        if not self._reads_on:
            self._read_on()

    def _read_on(self) -> None:
        """Parse some of what is there, and the rest in further turns of the loop."""
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
        """Whether nothing is to be parsed: the application has not taken the last message, the client does not read, or there is no room."""
        return self.read_paused or self._unread_since is not None or self._no_room_since is not None

    @property
    def _may_parse(self) -> bool:
        """Whether frames may be read. Before the application has accepted, none is: uvicorn would answer them ahead of the opening,
        and could not say that the connection is open."""
        return self.handshake_complete and not self._waits

    def _regulate(self) -> None:
        if self.transport.is_closing():
            return
        if self._held or self._waits:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _count(self) -> bool:
        """Charge what is held here, and tell whether there is room for it. Where there is no room nothing is read until there is some; where there is none for too long the
        connection ends, for what it holds is in the way of others too."""
        try:
            self._claim.hold(len(self._held) + self._parsed + sum(map(len, self.frames)) + self._queued)
        except WeirError:
            now = self._lane.tick
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
        """uvicorn: the first piece of a message of text."""
        self._begin_message("text", event)

    def handle_bytes(self, event: Frame) -> None:
        """uvicorn: the first piece of a binary message."""
        self._begin_message("bytes", event)

    def _begin_message(self, kind: Any, event: Frame) -> None:
        self.curr_msg_data_type = kind
        self._pieces = 0
        self.frames = [event.data] if event.fin else [bytearray(event.data)]  # type: ignore[list-item]  # grows in place
        if event.fin:
            self.send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        """uvicorn: a further piece; it is not kept as a piece, for there may be millions."""
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
        """uvicorn: what came is no WebSocket, or not one that can go on."""
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
        """uvicorn: the application takes what came."""
        message: Any = await super().receive()
        if message["type"] == "websocket.receive":
            self._queued = 0 if self.queue.empty() else self._queued
            self._heard = self._lane.tick
            if not self._reads_on:
                self._read_on()
        return message

    async def send(self, message: Any) -> None:
        """uvicorn: the application writes; one message at a time, for each shall wait until those before were read."""
        async with self._sending:
            if message["type"] == "websocket.accept" and self.transport.is_closing():
                raise ClientDisconnected  # uvicorn would drop it, and complain of an application that does not accept
            await super().send(message)
        if self._held and not self._reads_on:
            self._read_on()

    # The sweep and the end of the server.

    def sweep(self, now: float) -> None:
        """Close the connection if its client does not read, or answers no pings; read on if there is room again."""
        waits = self._no_room_since is not None and not self.transport.is_closing()
        if waits and self._count() and not self._reads_on:
            self._read_on()
        if self._unread_since is not None:
            gone = now - self._unread_since > self._lane.patience
        else:
            gone = not self._waits and now - self._heard > _MISSED_PINGS * self._lane.settings.websocket_ping
        if gone:
            self.transport.abort()

    def drain(self) -> None:
        """Nothing to do: its session hears of it."""

    def stop(self) -> None:
        """Close the connection, and say that the server ends."""
        if not self.transport.is_closing():
            self.shutdown()

    def abort(self) -> None:
        """Close it at once."""
        self.transport.abort()
