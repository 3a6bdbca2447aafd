"""Simulated clients of the WebSocket channel: many requests on one connection, whose responses come in any order."""

import json
import struct
from typing import Any

from tests.simulated.asking import ANYTIME, BINARY_HEADER, CODE_OF, MODEL_FAULTS, Ask, fault_of_answer
from tests.simulated.channels import ChannelClient, Place, fault_of_status
from tests.simulated.models import RAISED

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
GOING_AWAY, NO_MEMORY = 1001, 1013
LATE = 0.03  # seconds after its deadline in which a request has its end
_SILENCE = 1.0  # seconds beyond the last deadline after which a request hangs
_SHORT = 60.0  # seconds for which messages may wait unread, again and again, while memory is short
OPENING = (
    b"GET /v2/ws HTTP/1.1\r\nHost: simulated\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


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

    def __init__(self, site: Place, index: int) -> None:
        super().__init__(site, index)
        self._peer: _Incoming | None = None
        self._transport: Any = None
        self._asks: dict[str, Ask] = {}  # those without an end
        self._cancelled: set[str] = set()
        self._style = ""
        self._round = 0
        self._until = 0.0  # when all that was asked in this turn must have its end

    def turn(self) -> None:
        """Send some requests."""
        draw = self.draw
        style = self._style = draw.choice(
            (*("whole",) * 4, *("pieces",) * 2, "fragments", "cancel", "leave", "close", "slow")
        )
        if self._peer is None or style == "slow" or draw.random() < 0.1:
            self.leave()
            peer = self._peer = _Incoming(self)
            self._transport = self.site.connect(peer, 2_000 if style == "slow" else None)
            if self._transport is None or peer.refused or not self._transport.send(OPENING):
                self._peer = None
                self.end(1.0)
                return
        peer = self._peer
        self._round += 1
        asks = [self._drawn() for _ in range(draw.choice((1, 1, 3, 20)))]
        self.asked += len(asks)
        self._asks = {str(ask.n): ask for ask in asks}
        self._cancelled.clear()
        rounds = 1 + len(asks) // self.site.plan.http.get("websocket_in_flight", 1024)
        wait = _SHORT if "max_waiting_bytes" in self.site.plan.http else 0.0
        self._until = self.site.loop.now + rounds * max(ask.timeout for ask in asks) + wait
        data = b"".join(self._framed(ask.data) for ask in asks)
        if style == "cancel":
            for ask in draw.sample(asks, (len(asks) + 1) // 2):
                self._cancelled.add(str(ask.n))
                data += self._frame(TEXT, json.dumps({"cancel": str(ask.n)}).encode())
        elif draw.random() < 0.1:
            data += self._frame(PING, b"%d" % self._round)
        self._send(peer, data)
        self.later(self._until + _SILENCE - self.site.loop.now, self._check_for_hangs, self._round)
        if style in ("leave", "close"):
            self.later(draw.choice((0.0, 0.001, 0.01, 0.1)), self._go, self._round)
        elif style == "slow":
            self.later(0.0, self._read_on, self._round)

    def _send(self, peer: "_Incoming", data: bytes) -> None:
        size = self.draw.choice((1, 7, 1000)) if self._style == "pieces" else len(data)
        for start in range(0, len(data), size):
            self._transport.send(data[start : start + size])

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
        do = draw.choice((*RAISED, "crash", "hang", "unknown", "malformed")) if draw.random() < plan.wrong else "ok"
        wanted = {"ok": "", "unknown": "ModelNotFound", "malformed": "InvalidRequest"}.get(do)
        if wanted is None:
            wanted = "ModelCrashed" if do in ("crash", "hang") else MODEL_FAULTS.get(do, do)
        code = CODE_OF.get(do, 0)
        data = [value for row in range(rows) for value in (n + row, 0 if row else code)]
        tensor: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": [rows, 2]}
        asked: dict[str, Any] = {
            "model_name": "nothing" if do == "unknown" else "tensors",
            "id": str(n),
            "inputs": [tensor],
        }
        timeout = plan.timeout
        if draw.random() < 0.2:
            timeout = draw.choice((0.002, 0.1, 1.0))
            asked["parameters"] = {"timeout": round(timeout * 1e6)}
        if do == "malformed":
            tensor["shape"] = [rows, 3]
        if draw.random() < 0.3:
            asked["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}]
        if draw.random() < 0.3:
            raw = struct.pack(f"<{len(data)}q", *data)
            tensor["parameters"] = {"binary_data_size": len(raw)}
            head = json.dumps(asked).encode()
            message = struct.pack(">I", len(head)) + head + raw
        else:
            tensor["data"] = data
            message = json.dumps(asked).encode()
        return Ask(n, message, True, rows, timeout, wanted, sent=self.site.loop.now)

    def leave(self) -> None:
        """Close the connection."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.open = False
            self._transport.half_close()

    def _go(self, number: int) -> None:
        peer = self._peer
        if self._round != number or peer is None or not self._asks:
            return
        self._peer = None
        peer.open = False
        if self._style == "close":
            self._transport.send(self._frame(CLOSE, struct.pack(">H", 1000)))
            self.later(5.0, self._transport.reset)
        else:
            self._transport.reset()
        self._over()

    def _read_on(self, number: int) -> None:
        if self._round == number and self._peer is not None:
            self._transport.read(self.draw.choice((500, 5_000, 50_000)))
            self.later(self.draw.choice((0.01, 0.3, 2.0)), self._read_on, number)

    def _over(self) -> None:
        self._asks = {}
        if self._style == "slow":
            self.leave()
        self.end()

    def _check_for_hangs(self, number: int) -> None:
        late = self._round == number and bool(self._asks) and self._style != "slow"
        if late and not self.site.stood_still(min(ask.sent for ask in self._asks.values())):
            self.broken(f"{sorted(self._asks)} have no end {_SILENCE:g} s after their deadline")

    # What comes back.

    def came(self, opcode: int, data: bytes) -> None:
        """A frame has come."""
        if opcode == PING:
            self._transport.send(self._frame(PONG, data))
        elif opcode == CLOSE:
            code = struct.unpack(">H", data[:2])[0]
            self.note(b"close %d" % code)
            if code == GOING_AWAY or (code == NO_MEMORY and "max_waiting_bytes" in self.site.plan.http):
                self._asks_end_without_answers(goes=code == GOING_AWAY)
            else:
                self.broken(f"the server closes with {code}: {data[2:]!r}")
        elif opcode in (TEXT, BINARY):
            self.note(data)
            self._judge(opcode, data)

    def _asks_end_without_answers(self, *, goes: bool) -> None:
        """The server closes, and has not read what is left."""
        if goes and self.site.ready:
            self.broken("the server goes away, and is ready")
        self._transport.send(self._frame(CLOSE, struct.pack(">H", GOING_AWAY)))
        self.leave()
        if self._asks:
            self._over()

    def _judge(self, opcode: int, data: bytes) -> None:
        size = struct.unpack(">I", data[:4])[0] if opcode == BINARY else len(data)
        head, raw = (data[4 : 4 + size], data[4 + size :]) if opcode == BINARY else (data, b"")
        found = json.loads(head)
        if "max_waiting_bytes" in self.site.plan.http and "id" not in found and found.get("status") == 429:
            self.leave()  # there was no memory to read the id: no client knows what has failed
            if self._asks:
                self._over()
            return
        ask = self._asks.pop(found.get("id", ""), None)
        if ask is None:
            self.broken(f"a response to nothing, or a second one: {data[:300]!r}")
            return
        self.site.responses[f"message {found.get('status', 200)}"] += 1
        late = self.site.loop.now > self._until + LATE and self._style != "slow"
        if late and not self.site.stood_still(ask.sent):
            self.broken(f"n={ask.n}: it ended {self.site.loop.now - self._until:.3f} s after its deadline")
        if "error" in found:
            self._judge_error(ask, found)
        elif fault := fault_of_answer(ask, {BINARY_HEADER: str(len(head))} if raw else {}, head + raw):
            self.broken(f"n={ask.n}: {fault}")
        if not self._asks:
            self._over()

    def _judge_error(self, ask: Ask, found: dict[str, Any]) -> None:
        kind = found["type"]
        if fault := fault_of_status(kind, found["status"], kserve=True):
            self.broken(f"n={ask.n}: {fault}")
        others = {"Cancelled"} if str(ask.n) in self._cancelled else set()
        if self.site.crashed:
            others.add("ModelCrashed")
        if (
            "max_waiting_bytes" in self.site.plan.http
            or ask.rows > self.site.plan.services["tensors"]["max_queue_size"]
        ):
            others.add("TooLarge")
        if kind != ask.wanted and kind not in ANYTIME | others:
            self.broken(f"n={ask.n}: it got {kind}, must get {ask.wanted or 'its answer'}: {found['error'][:200]}")

    def refused(self, status: int) -> None:
        """The server does not open the WebSocket: too many are connected, or memory is short."""
        if status != 429 and not (status == 503 and not self.site.ready):
            self.broken(f"the WebSocket was refused with {status}")
        self.lost()

    def lost(self) -> None:
        """The connection has gone: only a slow client's may."""
        self.note(b"closed")
        peer, self._peer = self._peer, None
        if peer is not None and self._asks:
            if self._style != "slow" and not (peer.refused or self._transport.was_cut):
                self.broken(f"the connection closed without responses to {sorted(self._asks)}")
            self._over()


class _Incoming:
    """What comes on one connection."""

    def __init__(self, client: MessageClient) -> None:
        self._client = client
        self._buffer = bytearray()
        self._opened = False
        self.open = True  # for its client
        self.refused = False

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        self._buffer += data
        while self.open and (self._frame() if self._opened else self._head()):
            pass

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        if head.startswith(b"HTTP/1.1 101"):
            self._opened = True
            self._buffer = rest
            return True
        self.refused = True
        self.open = False
        self._client.later(0.0, self._client.refused, int(head[9:12]))
        return False

    def _frame(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        size, start = buffer[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return False
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return False
        opcode, data = buffer[0], bytes(buffer[start : start + size])
        del buffer[: start + size]
        if not opcode & 128:
            self._client.broken("the server sent a fragment")
        self._client.came(opcode & 15, data)
        return True

    def closed(self) -> None:
        """The server sends no more."""
        if self.open:
            self.open = False
            self._client.lost()
