"""Simulated clients that send damaged requests: valid ones of all channels, cut, doubled, flipped and spliced. Nothing is promised to them but HTTP and an error
of the table; the server must keep its promises to all others, and have nothing left of them."""

import json
import random

from tests.simulated.asking import ERROR_HEADER, draw_ask, fault_of_status, http, tensor_document
from tests.simulated.channels import ChannelClient, Incoming, Line
from tests.simulated.messages import OPENING, SWITCHING, TEXT, frame
from tests.simulated.models import KSERVE_STATUS, STATUS

FIRST_NUMBER = 9 * 10**15  # no beginning of it is the number of another client's request
_MOST = 100  # damaged requests at a time
_INSERTED = (b"\r\n", b"\r\n\r\n", b"\x00", b": ", b"0", b"-", b"\xff\xfe")


def damaged(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Return `data` with one to three faults; `other` is another request."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        kind = draw.choice(("cut", "leave out", "double", "flip", "flip", "byte", "splice", "insert"))
        if kind == "cut":
            data = data[:start]
        elif kind == "leave out":
            data = data[:start] + data[stop:]
        elif kind == "double":
            data = data[:stop] + data[start:]
        elif kind == "splice":
            data = data[:start] + other[draw.randrange(len(other)) :]
        elif kind == "insert":
            data = data[:start] + draw.choice(_INSERTED) + data[start:]
        elif start < len(data):
            changed = data[start] ^ 1 << draw.randrange(8) if kind == "flip" else draw.randrange(256)
            data = data[:start] + bytes([changed]) + data[start + 1 :]
        data = data or b"\r\n"
    return data


def valid(draw: random.Random, n: int, *, streams: bool) -> bytes:
    """Return a valid request of some channel, of a number from `n` on."""
    chance = draw.random()
    if chance < 0.15 and streams:
        body = json.dumps({"n": n, "size": 2, "do": "ok", "at": 0, "mark": False, "pad": 0}).encode()
        return http("/infer/streams", body)
    if chance < 0.3:
        document, _ = tensor_document(n, 1, "ok", binary=False, wants_binary=False, model_name="tensors")
        return OPENING + frame(TEXT, json.dumps(document).encode(), draw.randbytes(4)) * draw.choice((1, 3))
    asks = [draw_ask(draw, n + count, faults=0.0, timeout=1.0, small=True) for count in range(draw.choice((1, 1, 3)))]
    return b"".join(ask.data for ask in asks)


class FuzzClient(ChannelClient):
    """Sends a damaged request on a new connection each turn, reads for a while, and leaves."""

    def turn(self) -> None:
        """See ChannelClient."""
        draw = self.draw
        streams = "streams" in self.site.plan.services
        numbers = (FIRST_NUMBER + self.number() for _ in range(2))
        data = damaged(draw, *[valid(draw, n, streams=streams) for n in numbers])
        line = Line(self, None)
        if line.transport is None:
            self.end(1.0)
            return
        self.asked += 1
        size = max(draw.choice((len(data), len(data), 1, 7, 100)), len(data) // _MOST)
        for start in range(0, len(data), size):
            line.transport.send(data[start : start + size])
        self.later(draw.choice((0.0, 0.01, 0.5, 5.0)), self._go, line)

    def _go(self, line: Line) -> None:
        if line.open and line.transport is not None:
            line.open = False
            if self.draw.random() < 0.5:
                line.transport.half_close()
                self.later(5.0, line.transport.reset)
            else:
                line.transport.reset()
        self.end()

    # What comes back.

    def answered(self, line: Line, status: int) -> None:
        """A response is complete."""
        self.site.responses[f"damaged {status}"] += 1
        if status == SWITCHING:
            line.open = False  # what follows is no HTTP
        elif status >= 400:
            kind, table = error_of(line)
            if fault := fault_of_status(kind or "", status, table) if kind is not None or status >= 500 else "":
                self.broken(f"{fault}: {bytes(line.body)[:200]!r}")

    def lost(self, line: Line) -> None:
        """The connection has gone, as it may."""
        self.note(b"closed")


def error_of(incoming: Incoming) -> tuple[str | None, dict[str, int]]:
    """Return the error in a response, None if it has none, and the table of its protocol."""
    try:
        error = json.loads(bytes(incoming.body))["error"]
    except (ValueError, KeyError, TypeError):
        return None, STATUS
    if isinstance(error, dict):
        return str(error["type"]), STATUS
    return incoming.headers.get(ERROR_HEADER, ""), KSERVE_STATUS
