"""Clients of bert-as-service over ZeroMQ in the simulated server: two connections each, of bytes of ZMTP, and one identity with which they come again."""

import json
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.simulated.asking import Ask, fault_of_error, wanted_of
from tests.simulated.channels import ChannelClient
from tests.simulated.fuzzing import damaged
from tests.simulated.models import CODES, STATUS
from tests.simulated.texts import FIRST_TEXT, MOST_TEXTS, draw_text
from tests.simulated.transport import READ_BYTES, SimulatedTransport

from weir.text_server.bert_as_service.frames import COMMANDS, GREETING, pack, ready
from weir.text_server.bert_as_service.frames import frame as frame_of

if TYPE_CHECKING:
    from tests.simulated.world import World

PORT = 5555  # for requests; the next one is for responses
STYLES = (*("ask",) * 6, "pieces", "late", "leave", "leave", "slow", "command", "damage", "stall")
_ALL_ARE_KEPT = 1 << 20  # bytes that may be unread
_ABSENT = (0.0, 0.001, 0.3, 3.0, 20.0)  # seconds until a client that has left comes again
_WRONG: tuple[Any, ...] = (b"[1]", b'["a"', b"{}", b"[]", b'["1 0"]')  # with another count


def draw_settings(draw: random.Random) -> dict[str, Any]:
    """Return the settings of ZeroMQ of a plan."""
    drawn = {
        "zmq_grace": draw.choice((0.5, 5.0)), "zmq_max_unread": draw.choice((64 << 20, 2000)), "zmq_max_in_flight": draw.choice((256 << 20, 50_000)),
        "zmq_max_message_size": draw.choice((256 << 20, 3000)), "zmq_max_response_size": draw.choice((2 << 30, 400)),
    }  # fmt: skip
    return {"zmq_port": PORT, **drawn}


class _Wire:
    """One connection of a client. Whole messages that come go to its `message`; `fair`: the server has no reason to close it."""

    def __init__(self, client: "ZeroMqClient", kind: str, window: int | None = None) -> None:
        self._client, self._kind = client, kind
        self._buffer, self._frames = bytearray(), list[bytes]()
        self._left = len(GREETING)
        self.fair, self.open = window is None, True
        self.transport: SimulatedTransport | None = client.site.loop.dial(PORT + (kind == "SUB"), self, window)
        if self.transport is not None:
            self.transport.send(GREETING + ready(kind))

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        self._buffer += data
        if self._left and len(self._buffer) >= self._left:
            del self._buffer[: self._left]
            self._left = 0
        while not self._left and len(self._buffer) > 1:
            flags, head = self._buffer[0], 9 if self._buffer[0] & 2 else 2
            end = head + int.from_bytes(self._buffer[1:head], "big")
            if len(self._buffer) < max(end, head):
                return
            body = bytes(self._buffer[head:end])
            del self._buffer[:end]
            if flags & 4:
                continue
            self._frames.append(body)
            if not flags & 1:
                frames, self._frames = self._frames, []
                self._client.message(frames)

    def closed(self) -> None:
        """The server sends no more."""
        if self.open:
            self.open = False
            self._client.lost(self)

    def end(self) -> None:
        """Leave."""
        if self.open:
            self.open = False
            if self.transport is not None:
                self.transport.reset()


class ZeroMqClient(ChannelClient):
    """Sends requests turn by turn. Each of those that wait for its response, of one who stays and reads, has one; any other has at most one."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        self._number = FIRST_TEXT + 500_000_000 + index % 1000 * 1_000_000
        self._identity = b"client %d" % index
        self._wires: list[_Wire] = []
        self._due: dict[bytes, Ask | None] = {}  # what must have its response; None for a command
        self._may: dict[bytes, Ask | None] = {}  # what may have one
        self._busy = False
        self._left_at = -math.inf  # when it left last and had requests

    def turn(self) -> None:
        """Do something in one of the styles."""
        draw, style, connected = self.draw, self.draw.choice(STYLES), bool(self._wires)
        if style in ("damage", "stall"):
            self._strange(style)
            return
        if style in ("late", "slow") or not all(wire.fair for wire in self._wires) or not self._wires:
            self.leave()
            self._connect(style)
        if style != "late":
            self._subscribe(self._wires)
        if not self._wires:
            self.end(1.0)
            return
        data = [self._request(style) for _ in range(draw.choice((1, 1, 3, 12)))]
        self._busy = True
        pieces = [b"".join(data)]
        if style == "pieces":
            cuts = sorted(draw.randrange(len(pieces[0])) for _ in range(4))
            pieces = [pieces[0][start:end] for start, end in zip([0, *cuts], [*cuts, len(pieces[0])], strict=True)]
        self._send(self._wires, pieces)
        if style == "late":
            self.later(draw.choice((0.0, 0.1, 0.4)), self._subscribe, self._wires)
            plan, absent = self.site.plan, self.site.loop.now - self._left_at
            kept = plan.zeromq["zmq_max_unread"] >= _ALL_ARE_KEPT and "max_waiting_bytes" not in plan.http
            # The server may send to the connection that was just closed until it knows of its end.
            if connected or not kept or plan.zeromq["zmq_grace"] < 1.0 or absent < 3.0 * plan.zeromq["zmq_grace"]:
                self._forgive()
        elif style == "slow":
            self._forgive()
            self.later(draw.choice((0.01, 3.0, 100.0)), self._read_on, self._wires)
        elif style == "leave":
            self.later(draw.choice((0.0, 0.001, 0.05, 1.0)), self._leave)
        self._look()

    def _connect(self, style: str) -> None:
        inward = _Wire(self, "PUSH")
        self._wires = [inward] if inward.transport is not None and not inward.transport.is_closing() else []
        if style != "late":
            self._subscribe(self._wires, 1000 if style == "slow" else None)

    def _subscribe(self, wires: list[_Wire], window: int | None = None) -> None:
        if wires is self._wires and len(wires) == 1:
            wire = _Wire(self, "SUB", window)
            wires.append(wire)
            topic = frame_of(b"\1" + self._identity)
            if wire.transport is None or not wire.transport.send(topic):
                self._leave()

    def _request(self, style: str) -> bytes:
        draw, plan = self.draw, self.site.plan
        n, limits = self.number(), plan.zeromq
        count = draw.choice((1, 1, 3, MOST_TEXTS))
        texts = [draw_text(draw, n + place, plan.wrong / count, small=False) for place in range(count)]
        errors = {wanted_of(CODES[text[1]]) for text in texts if text[1]}
        as_ids = draw.random() < 0.2
        payload = json.dumps(texts if as_ids else [" ".join(map(str, text)) for text in texts]).encode()
        ask: Ask | None = Ask(n, b"", False, count, 0.0, min(errors, default=""), extra=frozenset(errors))
        assert ask is not None
        if draw.random() < plan.wrong / 3:
            payload, ask.wanted, ask.extra = draw.choice(_WRONG), "InvalidRequest", frozenset()
            count = 2
        if style == "command":
            payload, ask, count = draw.choice(sorted(COMMANDS)[:2]), None, 0
        elif len(payload) > limits["zmq_max_message_size"] or 16 * count > limits["zmq_max_response_size"]:
            ask.wanted, ask.extra = "TooLarge", frozenset()
        elif len(payload) + 100 > limits["zmq_max_message_size"]:
            ask.extra |= {"TooLarge"}
        ask_id = b"%d" % n
        self.asked += 1
        self._due[ask_id] = ask
        return b"".join(pack([self._identity, payload, ask_id, b"%d" % count]))

    def _send(self, wires: list[_Wire], pieces: list[bytes]) -> None:
        if wires is not self._wires or not wires:
            return
        assert wires[0].transport is not None
        wires[0].transport.send(pieces[0])
        if len(pieces) > 1:
            self.later(self.draw.choice((0.0, 0.001, 0.2)), self._send, wires, pieces[1:])

    def _read_on(self, wires: list[_Wire]) -> None:
        if wires is self._wires and len(wires) == 2 and wires[1].transport is not None:
            wires[1].transport.read(self.draw.choice((100, READ_BYTES)))
            if self._may and wires[1].open:
                self.later(self.draw.choice((0.01, 0.3)), self._read_on, wires)

    def _leave(self) -> None:
        self.leave()
        self._look(self.draw.choice(_ABSENT))

    def leave(self) -> None:
        """Close both connections: what was sent may have a response all the same, when this client comes again."""
        wires, self._wires = self._wires, []
        if self._may or self._due:
            self._left_at = self.site.loop.now
        self._forgive()
        for wire in wires:
            wire.end()

    def _forgive(self) -> None:
        self._may |= self._due
        self._due.clear()

    def _look(self, seconds: float | None = None) -> None:
        """End the turn if nothing must come any more."""
        if self._busy and not self._due:
            self._busy = False
            self.end(seconds)

    def _strange(self, style: str) -> None:
        """Send what is damaged, or not all of it, on a connection of its own."""
        wire = _Wire(self, self.draw.choice(("PUSH", "SUB")))
        wire.fair, wire.open = False, False
        self.asked += 1
        if wire.transport is not None:
            whole = GREETING + ready("PUSH") + b"".join(pack([b"stranger", b'["5 0"]', b"1", b"1"]))
            bad = damaged(self.draw, whole, frame_of(self.draw.randbytes(300)))
            wire.transport.send(bad if style == "damage" else bad[: self.draw.randrange(len(bad) + 1)])
            self.later(self.draw.choice((0.0, 0.5, 100.0)), wire.transport.reset)
        self.end()

    # What comes back.

    def message(self, frames: list[bytes]) -> None:
        """A message of the server's has come."""
        topic, head, number = frames[0], json.loads(frames[1]), frames[-1]
        table = self._due if number in self._due else self._may
        if topic != self._identity or number not in table:
            self.broken(f"a response to nothing, or a second one: {topic!r} {number!r} {str(head)[:200]}")
            return
        ask = table.pop(number)
        if ask is not None:
            self.note(b"".join(frames))
            error = head.get("error")
            self.site.responses[f"zeromq {'' if error is None else error['type']}"] += 1
            if fault := self._fault_of(ask, head, frames):
                self.broken(f"n={ask.n}: {fault}")
        elif "server_version" not in head:
            self.broken(f"a command got {str(head)[:300]}")
        self._look()

    def _fault_of(self, ask: Ask, head: dict[str, Any], frames: list[bytes]) -> str:
        if (error := head.get("error")) is not None:
            also = self.site.excused(ask) - {"DeadlineExceeded"} | ask.extra
            return str(fault_of_error(ask, error["type"], error["status"], STATUS, also))
        self.site.vectors_came()
        found = np.frombuffer(frames[2], head["dtype"]).reshape(head["shape"])
        right = all(row[1] == (ask.n + place) % 9973 for place, row in enumerate(found))
        return "" if right and len(found) == ask.rows and not ask.wanted else f"it got {found[:3]}, of {ask.wanted!r}"

    def lost(self, wire: _Wire) -> None:
        """The server has closed a connection: right if it ends, or has as many as it may."""
        if wire in self._wires:
            if wire.fair and not self.site.draining and "max_connections" not in self.site.plan.http:
                self.broken("the server closed its connection")
            self._leave()
