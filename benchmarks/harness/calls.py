"""Calls over gRPC at little cost: the frames of HTTP/2 are written and read here.

A client of grpcio costs several times as much as a call costs the server. What is sent is prepared but for the timeout; of what comes only the
frames that end a call are looked at. The server is told to keep no table of headers, so that equal trailers are equal bytes, and are decoded once.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import grpc
from hpack import Decoder

Ended = Callable[[str], None]  # told how a call ended: the name of its status, or RST_STREAM with its code

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_HEAD_BYTES = 9
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS = 1, 2, 3  # settings
_FIRST_WINDOW = 65535  # bytes that may be sent on a connection before the server asks for more
_MOST_DECODED = 1000
_NAMES = {str(status.value[0]): status.name for status in grpc.StatusCode}


class Calls(asyncio.Protocol):
    """Calls `method` with `message`; any number may be under way, as far as the server allows."""

    def __init__(self, authority: str, method: str, message: bytes) -> None:
        self._transport: Any = None
        self._received = b""
        self._next_stream = 1
        self._most = 100  # calls under way, until the server has said how many
        self._window = _FIRST_WINDOW
        self._calls: dict[int, Ended] = {}
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, str] = {}
        self._fields = (
            b"\x83\x86" + _literal(b"\x04", method.encode()) + _literal(b"\x01", authority.encode())
            + _literal(b"\x0f\x10", b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
            + b"\x00" + _text(b"grpc-timeout")
        )  # fmt: skip
        self._body = struct.pack(">?I", False, len(message)) + message
        self.ready = asyncio.get_running_loop().create_future()

    def call(self, timeout: float, ended: Ended) -> bool:
        """Send a call, and have `ended` called when it has its end; False if the server allows no more for now."""
        if len(self._calls) >= self._most or self._window < len(self._body) or self._transport.is_closing():
            return False
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._calls[stream] = ended
        self._window -= len(self._body)
        block = self._fields + _text(b"%du" % max(1, int(1e6 * timeout)))
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, self._body)
        )
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0)
        more = struct.pack(">I", (1 << 31) - 1 - _FIRST_WINDOW)
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, error: Exception | None) -> None:
        calls, self._calls = self._calls, {}
        for ended in calls.values():
            ended("connection lost")

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        place = 0
        while len(received) - place >= _HEAD_BYTES:
            begin = place + _HEAD_BYTES
            end = begin + int.from_bytes(received[place : place + 3])
            if end > len(received):
                break
            kind, flags, stream = received[place + 3], received[place + 4], int.from_bytes(received[place + 5 : begin])
            self._take(kind, flags, stream, received[begin:end])
            place = end
        self._received = received[place:]

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _HEADERS:
            status = self._status(body)  # whatever it says, the decoder has to know it
            if flags & _END_STREAM:
                self._calls.pop(stream)(status)
        elif kind == _RST_STREAM:
            ended = self._calls.pop(stream, None)
            if ended is not None:
                ended(f"RST_STREAM {int.from_bytes(body)}")
        elif kind == _SETTINGS and not flags & _ACK:
            self._set(body)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, body))
        elif kind == _WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(body)
        elif kind == _GOAWAY:
            self._transport.close()
        elif kind == _CONTINUATION:
            raise ValueError("headers longer than a frame: not expected of this server")

    def _set(self, body: bytes) -> None:
        settings = dict(struct.iter_unpack(">HI", body))
        self._most = settings.get(_MAX_STREAMS, 1 << 31)
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        if not self.ready.done():
            self.ready.set_result(None)

    def _status(self, block: bytes) -> str:
        status = self._decoded.get(block)
        if status is None:
            if len(self._decoded) >= _MOST_DECODED:
                self._decoded.clear()
            fields = {bytes(name): bytes(value).decode() for name, value in self._decoder.decode(block, raw=True)}
            status = self._decoded[block] = _NAMES.get(fields.get(b"grpc-status", ""), "no status")
        return status


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _text(value: bytes) -> bytes:
    """Return a string of HPACK that is shorter than 127 bytes."""
    if len(value) >= 127:
        raise ValueError(f"{value!r}: must be shorter than 127 bytes")
    return bytes([len(value)]) + value


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a field that no table keeps, with a name by its number."""
    return name + _text(value)
