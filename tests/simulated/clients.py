"""Simulated clients of HTTP: how they send, read and leave is drawn from the seed."""

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tests.simulated.asking import MIXED, Ask, draw_ask
from tests.simulated.loop import SimulatedLoop
from tests.simulated.themes import Theme
from tests.simulated.transport import Peer, SimulatedTransport

from weir.fronts.messages import LONGEST_BODY

# Seconds after which a client leaves.
LEAVING = {
    "leave": (0.0, 0.001, 0.01, 0.1, 1.0, 5.0),
    "half-close": (0.0, 0.001, 0.01, 1.0),
    "stall": (0.5, 15.0, 100.0),
    "garbage": (0.5, 15.0, 100.0),
}

PAUSES = 0.2  # the share of its turns after which a client of a plan with quiet stretches pauses


class Site(Protocol):
    """What a client sees of the simulation."""

    loop: SimulatedLoop

    def connect(self, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """Connect to the server; None if it does not listen."""

    def judge(self, ask: Ask, status: int, headers: dict[str, str], body: bytes, *, on_time: bool) -> None:
        """A response has come. `on_time`: its time is bounded."""

    def gone(self, asks: Iterable[Ask]) -> None:
        """The connection of these has gone before they had their ends."""

    def broken(self, what: str) -> None:
        """Something is wrong."""

    def stood_still(self, since: float) -> bool:
        """Whether a process of the server was stopped since then, which then answers nobody."""

    @property
    def ready(self) -> bool | None:
        """Whether the server must say that it is ready; None while it may say either."""


class Caller(Protocol):
    """Who has a Line."""

    site: Site

    def note(self, data: bytes) -> None:
        """These bytes have come."""

    def answered(self, line: "Line", status: int, headers: dict[str, str], body: bytes) -> None:
        """A response has come on `line`."""

    def lost(self, line: "Line") -> None:
        """The connection has gone."""


class Line:
    """One connection, as its client sees it. Responses go to `answered` in order."""

    def __init__(self, client: Caller, window: int | None) -> None:
        self._client = client
        self.waiting: deque[Ask] = deque()
        self.left: list[Ask] = []  # what was waiting when the client left
        self.open = True
        self.fresh = True  # nothing has been sent
        self.ending = False  # the server has announced that it closes
        self.meant = 0  # bytes that are sent, or will be
        self.slow = window is not None
        self.excused = self.slow  # whether the server may close at any time
        self._buffer = bytearray()
        self.transport = client.site.connect(self, window)
        if self.transport is None:
            self.open = False

    def received(self, data: bytes) -> None:
        self._client.note(data)
        self._buffer += data
        while self._next():
            pass

    def _next(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", 0))
        if len(self._buffer) < end + 4 + size:
            return False
        body = bytes(self._buffer[end + 4 : end + 4 + size])
        del self._buffer[: end + 4 + size]
        self._client.answered(self, int(status[9:12]), headers, body)
        return True

    def closed(self) -> None:
        if self.open:
            self.open = False
            self.excused |= self.transport is not None and self.transport.was_cut
            self._client.lost(self)


class Turn:
    """What a client does at a time: it sends `asks` on `line`, and what it does then."""

    __slots__ = ("asks", "began", "line", "over", "sent", "style")

    def __init__(self, style: str, line: Line, asks: list[Ask]) -> None:
        self.style, self.line, self.asks = style, line, asks
        self.sent = self.over = False
        self.began = 0.0


class Client:
    """Sends its requests turn by turn. `draw` is its own, so that it does the same whichever other clients there are."""

    def __init__(
        self, site: Site, index: int, seed: int, *, turns: int, pace: float, quiet: float, faults: float, timeout: float, theme: Theme,
        waits: float = 0.0,
    ) -> None:  # fmt: skip
        """`waits`: how long the server may wait for memory before it reads a long body."""
        self.site = site
        self.index = index
        self.timeout = timeout
        self._theme = theme
        self._mix = theme.mix  # of what is sent next
        self._draw = random.Random(f"{seed} client {index}")
        self._turns = turns
        self._pace = pace
        self._quiet = quiet
        self._faults = faults
        self._waits = waits
        self._number = index * 1_000_000
        self._line: Line | None = None
        self._now: Turn | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self.asked = 0
        self.done = False
        self._watching = False  # whether a timer looks for hangs

    def begin(self) -> None:
        """Start the first turn after a while."""
        self._later(self._gap(), self._turn)

    def note(self, data: bytes) -> None:
        """Add to the trace what has come, and when."""
        self._hash.update(b"%.6f " % self.site.loop.now + data)

    @property
    def trace(self) -> str:
        """The hash of all that this client has received, and of when."""
        return self._hash.hexdigest()

    def _later(self, seconds: float, step: Callable[..., Any], *arguments: Any) -> None:
        self.site.loop.call_later(seconds, step, *arguments)

    def _gap(self) -> float:
        mean = self._quiet if self._quiet and self._draw.random() < PAUSES else self._pace
        return self._draw.expovariate(1.0 / mean)

    # One turn.

    def _turn(self) -> None:
        draw = self._draw
        if not self._turns:
            self._hang_up()
            self.done = True
            return
        self._turns -= 1
        style = draw.choice(self._theme.styles)
        self._mix = MIXED._replace(wrong=self._theme.mix.wrong) if style == "mixed" else self._theme.mix
        count = draw.randint(2, 12) if style in ("pipeline", "mixed", "leave", "slow") else 1
        asks = [self._ask(small=style == "bytes", long=style == "slow") for _ in range(count)]
        data = b"".join(ask.data for ask in asks)
        pieces = [data]
        if style in ("pieces", "bytes"):
            pieces = self._pieces(data, style)
        elif style == "garbage":
            pieces, asks = [draw.randbytes(draw.randint(1, 200)) + b"\r\n\r\n"], []
        elif style == "stall":
            pieces, asks = [data[: draw.randint(1, len(data) - 1)]], []
        line = self._line
        if line is None or not line.open or line.ending or style == "slow" or draw.random() < 0.1:
            self._hang_up()
            line = self._line = Line(self, 2_000 if style == "slow" else None)
        turn = self._now = Turn(style, line, asks)
        turn.began = self.site.loop.now
        if line.transport is None or line.ending:
            self._line = None
            self._end(turn, 1.0)
            return
        self.asked += len(asks)
        for ask in asks:
            ask.timeout += self._waits if len(ask.data) > LONGEST_BODY else 0.0
            ask.named_at = line.meant + ask.names_itself_at
            line.meant += len(ask.data)
        line.waiting += asks
        line.fresh = False
        line.excused |= not asks
        self._send(turn, deque(pieces))

    def _ask(self, small: bool, long: bool) -> Ask:
        self._number += 100
        return draw_ask(
            self._draw, self._number, faults=self._faults, timeout=self.timeout, small=small, long=long, mix=self._mix
        )  # fmt: skip

    def _pieces(self, data: bytes, style: str) -> list[bytes]:
        if style == "bytes":
            return [data[at : at + 1] for at in range(len(data))]
        cuts = sorted(self._draw.randrange(len(data) + 1) for _ in range(self._draw.randint(1, 5)))
        return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < stop]

    def _send(self, turn: Turn, pieces: deque[bytes]) -> None:
        """Send the pieces. What has been answered before its last byte has gone out must have been refused."""
        line, transport = turn.line, turn.line.transport
        if not line.open or line.ending or transport is None:
            self._end(turn)
            return
        if turn.style == "bytes":
            for _ in range(min(self._draw.choice((1, 3, 30, 300)), len(pieces) - 1)):
                transport.send(pieces.popleft())  # the server may close it: then this does nothing
        piece = pieces.popleft()
        if pieces:
            transport.send(piece)
            wait = 0.0 if turn.style == "bytes" else self._draw.choice((0.0, 0.001, 0.2))
            self._later(wait, self._send, turn, pieces)
            return
        turn.sent = True
        for ask in turn.asks:
            ask.sent = ask.since = self.site.loop.now
        self._watch_for_hangs()
        transport.send(piece)
        if turn.style == "slow":
            self._later(0.0, self._read_on, turn)
        elif turn.style in LEAVING:
            self._later(self._draw.choice(LEAVING[turn.style]), self._leave, turn)
        elif not line.waiting:
            self._end(turn)

    def _read_on(self, turn: Turn) -> None:
        line = turn.line
        if line.open and line.transport is not None:
            line.transport.read(self._draw.choice((500, 5_000, 50_000)))
            self._later(self._draw.choice((0.01, 0.3, 3.0)), self._read_on, turn)

    def _leave(self, turn: Turn) -> None:
        line = turn.line
        stays = turn.style == "stall" and line.open and self.site.loop.now > turn.began + 90.0
        if stays and not self.site.stood_still(turn.began):
            self.site.broken(f"client {self.index} sent half a request, and is still connected after 90 s")
        line.left = list(line.waiting)
        line.waiting.clear()
        line.excused = True
        if line.transport is not None and line.open:
            if turn.style == "half-close":
                line.transport.half_close()
            else:
                line.transport.reset()
        self._end(turn)

    def _end(self, turn: Turn, seconds: float | None = None) -> None:
        if turn.over:
            return
        turn.over = True
        if turn.line.excused and self._line is turn.line:
            self._hang_up()
        self._later(self._gap() if seconds is None else seconds, self._turn)

    def leave(self) -> None:
        """Leave what is asked, if it has been sent."""
        turn = self._now
        if turn is not None and turn.sent and not turn.over and turn.line is self._line and turn.style not in LEAVING:
            self._leave(turn)

    # What comes back.

    def answered(self, line: Line, status: int, headers: dict[str, str], body: bytes) -> None:
        """A response has come on `line`."""
        if headers.get("connection", "").lower() == "close":
            line.ending = True
        if status < 200:
            return
        if not line.waiting:
            if not (line.excused or (line.fresh and line.ending)):
                self.site.broken(f"client {self.index} got a response to nothing: {status} {body[:200]!r}")
            return
        ask = line.waiting.popleft()
        ask.named = line.transport is not None and line.transport.delivered >= ask.named_at
        self.site.judge(ask, status, headers, body, on_time=not line.slow)
        if line.ending:
            line.waiting.clear()  # what is behind it was never begun
        if line.waiting:
            line.waiting[0].since = self.site.loop.now
        elif self._now is not None and self._now.line is line and self._now.sent and self._now.style not in LEAVING:
            self._end(self._now)

    def _watch_for_hangs(self) -> None:
        """Look for a request without an end a second after its deadline."""
        line = self._line
        if not self._watching and line is not None and line.waiting and line.waiting[0].since < math.inf:
            self._watching = True
            ask = line.waiting[0]
            self.site.loop.call_at(max(ask.since + ask.timeout, self.site.loop.now) + 1.0, self._check_for_hangs, ask)

    def _check_for_hangs(self, asked: Ask) -> None:
        self._watching = False
        line = self._line
        if (
            line is not None
            and line.waiting
            and line.waiting[0] is asked
            and not (line.excused or self.site.stood_still(asked.since))
        ):
            self.site.broken(f"client {self.index}: n={asked.n} has no end a second after its deadline")
        self._watch_for_hangs()

    def lost(self, line: Line) -> None:
        """The connection has gone."""
        self.note(b"closed")
        if line.waiting and not (line.excused or line.ending):
            lost = line.waiting[0]
            self.site.broken(f"client {self.index}: the connection closed without a response to n={lost.n}")
        self.site.gone((*line.left, *line.waiting))
        line.waiting.clear()
        if self._line is line:
            self._line = None
        if self._now is not None and self._now.line is line:
            self._end(self._now)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None and line.open and line.transport is not None:
            line.excused = True
            line.transport.half_close()
