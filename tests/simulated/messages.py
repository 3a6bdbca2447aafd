"""Simulated clients of the WebSocket channel: many requests on one connection, whose responses come in any order."""

import json
import struct
from typing import TYPE_CHECKING, Any

from tests.simulated.asking import BINARY_HEADER, Ask, fault_of_answer, tensor_document, wanted_of
from tests.simulated.channels import SILENCE, ChannelClient, Line
from tests.simulated.models import KSERVE_STATUS, RAISED

if TYPE_CHECKING:
    from tests.simulated.world import World

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
SWITCHING = 101
GOING_AWAY, NO_MEMORY = 1001, 1013
_SHORT = 60.0  # seconds for which messages may wait unread, again and again, while memory is short
OPENING = (
    b"GET /v2/ws HTTP/1.1\r\nHost: simulated\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
_STYLES = (*("whole",) * 4, *("pieces",) * 2, "fragments", "cancel", "leave", "close", "slow")


def frame(opcode: int, data: bytes, mask: bytes, *, fin: bool = True) -> bytes:
    """Return a frame of a client (RFC 6455, section 5.2)."""
    size = len(data)
    if size < 126:
        length = bytes([128 | size])
    else:
        length = b"\xfe" + struct.pack(">H", size) if size < 1 << 16 else b"\xff" + struct.pack(">Q", size)
    masks = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(data, "big") ^ int.from_bytes(masks, "big")).to_bytes(size, "big")
    return bytes([fin << 7 | opcode]) + length + mask + masked


class MessageClient(ChannelClient):
    """Sends some requests on its connection each turn, cancels some of them, and waits for all; or leaves before that. It is the Peer of its connection."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        self._line: _Frames | None = None
        self._transport: Any = None
        self._asks: dict[str, Ask] = {}  # those without an end
        self._cancelled: set[str] = set()
        self._style = ""
        self._round = 0
        self._until = 0.0  # when all that was asked in this turn must have its end
        self._short_of_memory = "max_waiting_bytes" in site.plan.http

    def turn(self) -> None:
        """Send some requests."""
        draw = self.draw
        style = self._style = draw.choice(_STYLES)
        if self._line is None or style == "slow" or draw.random() < 0.1:
            self.leave()
            line = self._line = _Frames(self, 2_000 if style == "slow" else None)
            self._transport = line.transport
            if self._transport is None or not line.open or not self._transport.send(OPENING):
                self._line = None
                self.end(1.0)
                return
        self._round += 1
        asks = [self._drawn() for _ in range(draw.choice((1, 1, 3, 20)))]
        self.asked += len(asks)
        self._asks = {str(ask.n): ask for ask in asks}
        self._cancelled.clear()
        rounds = 1 + len(asks) // self.site.plan.http.get("websocket_in_flight", 1024)
        wait = _SHORT if self._short_of_memory else 0.0
        self._until = self.site.loop.now + rounds * max(ask.timeout for ask in asks) + wait
        data = b"".join(self._framed(ask.data) for ask in asks)
        if style == "cancel":
            for ask in draw.sample(asks, (len(asks) + 1) // 2):
                self._cancelled.add(str(ask.n))
                data += self._frame(TEXT, json.dumps({"cancel": str(ask.n)}).encode())
        elif draw.random() < 0.1:
            data += self._frame(PING, b"%d" % self._round)
        size = draw.choice((1, 7, 1000)) if style == "pieces" else len(data)
        for start in range(0, len(data), size):
            self._transport.send(data[start : start + size])
        self.later(self._until + SILENCE - self.site.loop.now, self._check_for_hangs, self._round)
        if style in ("leave", "close"):
            self.later(draw.choice((0.0, 0.001, 0.01, 0.1)), self._go, self._round)
        elif style == "slow":
            self.later(0.0, self._read_on, self._round)

    def _frame(self, opcode: int, data: bytes, *, fin: bool = True) -> bytes:
        return frame(opcode, data, self.draw.randbytes(4), fin=fin)

    def _framed(self, data: bytes) -> bytes:
        """Return a message as one frame, or in fragments with a ping among them."""
        opcode = TEXT if data.startswith(b"{") else BINARY
        if self._style != "fragments":
            return self._frame(opcode, data)
        middle = self.draw.randrange(len(data))
        first, rest = self._frame(opcode, data[:middle], fin=False), self._frame(0, data[middle:])
        return first + self._frame(PING, b"among fragments") + rest

    def _drawn(self) -> Ask:
        """Return a request of a few rows, as JSON or in binary form."""
        draw, plan = self.draw, self.site.plan
        n, rows = self.number(), draw.choice((1, 1, 2, 30))
        do = draw.choice((*RAISED, "crash", "hang", "unknown", "shape")) if draw.random() < plan.wrong else "ok"
        fields: dict[str, Any] = {"model_name": "nothing" if do == "unknown" else "tensors"}
        timeout = plan.timeout
        if draw.random() < 0.2:
            timeout = draw.choice((0.002, 0.1, 1.0))
            fields["parameters"] = {"timeout": round(timeout * 1e6)}
        wants_binary, binary = draw.random() < 0.3, draw.random() < 0.3
        document, raw = tensor_document(n, rows, do, binary=binary, wants_binary=wants_binary, **fields)
        message = json.dumps(document).encode()
        if binary:
            message = struct.pack(">I", len(message)) + message + raw
        return Ask(n, message, True, rows, timeout, wanted_of(do), sent=self.site.loop.now)

    def leave(self) -> None:
        """Close the connection."""
        line, self._line = self._line, None
        if line is not None:
            line.open = False
            self._transport.half_close()

    def _go(self, number: int) -> None:
        line = self._line
        if self._round != number or line is None or not self._asks:
            return
        self._line = None
        line.open = False
        if self._style == "close":
            self._transport.send(self._frame(CLOSE, struct.pack(">H", 1000)))
            self.later(5.0, self._transport.reset)
        else:
            self._transport.reset()
        self._over()

    def _read_on(self, number: int) -> None:
        if self._round == number and self._line is not None:
            self._transport.read(self.draw.choice((500, 5_000, 50_000)))
            self.later(self.draw.choice((0.01, 0.3, 2.0)), self._read_on, number)

    def _over(self) -> None:
        self._asks = {}
        if self._style == "slow":
            self.leave()
        self.end()

    def _check_for_hangs(self, number: int) -> None:
        if self._round == number and self._asks and self._style != "slow":
            self.check_hang(sorted(self._asks), min(ask.sent for ask in self._asks.values()))

    # What comes back.

    def frame_came(self, opcode: int, data: bytes) -> None:
        """A frame has come."""
        if opcode == PING:
            self._transport.send(self._frame(PONG, data))
        elif opcode == CLOSE:
            code = struct.unpack(">H", data[:2])[0]
            if code == GOING_AWAY and self.site.ready:
                self.broken("the server goes away, and is ready")
            elif code != GOING_AWAY and not (code == NO_MEMORY and self._short_of_memory):
                self.broken(f"the server closes with {code}: {data[2:]!r}")
            self._transport.send(self._frame(CLOSE, struct.pack(">H", GOING_AWAY)))
            self._end_unread()
        elif opcode in (TEXT, BINARY):
            self._judge(opcode, data)

    def _end_unread(self) -> None:
        """The server has not read what is left."""
        self.leave()
        if self._asks:
            self._over()

    def _judge(self, opcode: int, data: bytes) -> None:
        size = struct.unpack(">I", data[:4])[0] if opcode == BINARY else len(data)
        head, raw = (data[4 : 4 + size], data[4 + size :]) if opcode == BINARY else (data, b"")
        found = json.loads(head)
        if self._short_of_memory and "id" not in found and found.get("status") == 429:
            self._end_unread()  # there was no memory to read the id: no client knows what has failed
            return
        ask = self._asks.pop(found.get("id", ""), None)
        if ask is None:
            self.broken(f"a response to nothing, or a second one: {data[:300]!r}")
            return
        self.site.responses[f"message {found.get('status', 200)}"] += 1
        if self._style != "slow":
            self.check_late(ask.n, self._until, ask.sent)
        if "error" in found:
            also = {"Cancelled"} if str(ask.n) in self._cancelled else ()
            self.check_error(ask, found["type"], found["status"], KSERVE_STATUS, also)
        elif fault := fault_of_answer(ask, {BINARY_HEADER: str(len(head))} if raw else {}, head + raw):
            self.broken(f"n={ask.n}: {fault}")
        if not self._asks:
            self._over()

    def answered(self, line: Line, status: int) -> None:
        """The server does not open the WebSocket: too many are connected, or memory is short."""
        if status != 429 and not (status == 503 and not self.site.ready):
            self.broken(f"the WebSocket was refused with {status}")
        line.excused = True
        line.open = False
        self.later(0.0, self.lost, line)

    def lost(self, line: Line) -> None:
        """The connection has gone: only a slow client's may."""
        self.note(b"closed")
        if self._line is line:
            self._line = None
            if self._asks:
                if not line.excused:
                    self.broken(f"the connection closed without responses to {sorted(self._asks)}")
                self._over()


class _Frames(Line):
    """What comes on one connection: frames, once the server has opened the WebSocket."""

    def _content(self) -> bool:
        if self.status != SWITCHING:
            return super()._content()
        buffer, start = self._buffer, 2
        if len(buffer) < 2:
            return False
        if (size := buffer[1]) >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return False
        opcode, data = buffer[0], bytes(buffer[start : start + size])
        del buffer[: start + size]
        if not opcode & 128:
            self._client.broken("the server sent a fragment")
        self._client.frame_came(opcode & 15, data)
        return True
