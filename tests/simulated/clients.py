"""Simulated clients of HTTP: how they send, read and leave is drawn from the seed."""

import math
from collections import deque
from typing import TYPE_CHECKING

from tests.simulated.arenas import WAITS
from tests.simulated.asking import MIXED, Ask, draw_ask
from tests.simulated.channels import SILENCE, ChannelClient, Line

from weir.fronts.messages import LONGEST_BODY

if TYPE_CHECKING:
    from tests.simulated.world import World

# Seconds after which a client leaves.
LEAVING = {
    "leave": (0.0, 0.001, 0.01, 0.1, 1.0, 5.0),
    "half-close": (0.0, 0.001, 0.01, 1.0),
    "stall": (0.5, 15.0, 100.0),
    "garbage": (0.5, 15.0, 100.0),
}


class Turn:
    """What a client does at a time: it sends `asks` on `line`, and what it does then."""

    __slots__ = ("asks", "began", "line", "over", "sent", "style")

    def __init__(self, style: str, line: Line, asks: list[Ask], began: float) -> None:
        self.style, self.line, self.asks, self.began = style, line, asks, began
        self.sent = self.over = False


class Client(ChannelClient):
    """Sends its requests turn by turn."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        plan = site.plan
        self._theme = plan.theme
        self._mix = plan.theme.mix  # of what is sent next
        self._waits = WAITS if plan.fronts and plan.arenas is not None else 0.0  # for memory to read a long body
        self._line: Line | None = None
        self._now: Turn | None = None
        self._watching = False  # whether a timer looks for hangs

    # One turn.

    def turn(self) -> None:
        """Send some requests, in one of the styles."""
        draw = self.draw
        style = draw.choice(self._theme.styles)
        self._mix = MIXED._replace(wrong=self._theme.mix.wrong) if style == "mixed" else self._theme.mix
        count = draw.randint(2, 12) if style in ("pipeline", "mixed", "leave", "slow") else 1
        asks = [self.ask(small=style == "bytes", long=style == "slow") for _ in range(count)]
        data = b"".join(ask.data for ask in asks)
        pieces = [data]
        if style in ("pieces", "bytes"):
            pieces = self._pieces(data, style)
        elif style == "garbage":
            pieces, asks = [draw.randbytes(draw.randint(1, 200)) + b"\r\n\r\n"], []
        elif style == "stall":
            pieces, asks = [data[: draw.randint(1, len(data) - 1)]], []
        line = self._line
        if line is None or not line.usable or style == "slow" or draw.random() < 0.1:
            self.leave()
            line = self._line = Line(self, 2_000 if style == "slow" else None)
        turn = self._now = Turn(style, line, asks, self.site.loop.now)
        if line.transport is None or line.ending:
            self._line = None
            self._end(turn, 1.0)
            return
        self.asked += len(asks)
        for ask in asks:
            ask.timeout += self._waits if len(ask.data) > LONGEST_BODY else 0.0
            ask.named_at = line.meant + ask.names_itself_at
            line.meant += len(ask.data)
            ask.began = turn.began
        line.add(asks)
        line.excused |= not asks
        self._send(turn, deque(pieces))

    def ask(self, *, small: bool, long: bool) -> Ask:
        """Return the next request."""
        plan = self.site.plan
        return draw_ask(
            self.draw, self.number(), faults=plan.wrong, timeout=plan.timeout, small=small, long=long, mix=self._mix
        )

    def _pieces(self, data: bytes, style: str) -> list[bytes]:
        if style == "bytes":
            return [data[at : at + 1] for at in range(len(data))]
        cuts = sorted(self.draw.randrange(len(data) + 1) for _ in range(self.draw.randint(1, 5)))
        return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < stop]

    def _send(self, turn: Turn, pieces: deque[bytes]) -> None:
        """Send the pieces. What has been answered before its last byte has gone out must have been refused."""
        line, transport = turn.line, turn.line.transport
        if not line.open or line.ending or transport is None:
            self._end(turn)
            return
        if turn.style == "bytes":
            for _ in range(min(self.draw.choice((1, 3, 30, 300)), len(pieces) - 1)):
                transport.send(pieces.popleft())  # the server may close it: then this does nothing
        piece = pieces.popleft()
        if pieces:
            transport.send(piece)
            wait = 0.0 if turn.style == "bytes" else self.draw.choice((0.0, 0.001, 0.2))
            self.later(wait, self._send, turn, pieces)
            return
        turn.sent = True
        for ask in turn.asks:
            ask.sent = ask.since = self.site.loop.now
        self._watch_for_hangs()
        transport.send(piece)
        if turn.style == "slow":
            self.later(0.0, self._read_on, turn)
        elif turn.style in LEAVING:
            self.later(self.draw.choice(LEAVING[turn.style]), self._leave, turn)
        elif not line.waiting:
            self._end(turn)

    def _read_on(self, turn: Turn) -> None:
        if turn.line.open and turn.line.transport is not None:
            turn.line.transport.read(self.draw.choice((500, 5_000, 50_000)))
            self.later(self.draw.choice((0.01, 0.3, 3.0)), self._read_on, turn)

    def _leave(self, turn: Turn) -> None:
        line = turn.line
        stays = turn.style == "stall" and line.open and self.site.loop.now > turn.began + 90.0
        if stays and not self.site.stood_still(turn.began):
            self.broken("it sent half a request, and is still connected after 90 s")
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
            self.leave()
        self.end(seconds)

    def _waits_on(self, line: Line | None) -> bool:
        """Return whether all of this turn has been sent, on `line`, and its client stays until it is answered."""
        turn = self._now
        return turn is not None and turn.line is line and turn.sent and turn.style not in LEAVING

    def walk_away(self) -> None:
        """Leave what is asked, if it has been sent."""
        if self._now is not None and self._waits_on(self._line) and not self._now.over:
            self._leave(self._now)

    # What comes back.

    def answered(self, line: Line, status: int) -> None:
        """A response has come on `line`."""
        if status < 200 or (ask := line.answers(status)) is None:
            return
        ask.named = line.transport is not None and line.transport.delivered >= ask.named_at
        self.site.judge(ask, status, line.headers, bytes(line.body), on_time=not line.slow)
        line.go_on(self.site.loop.now)
        if not line.waiting and self._now is not None and self._waits_on(line):
            self._end(self._now)

    def _watch_for_hangs(self) -> None:
        """Look for a request without an end a second after its deadline."""
        line = self._line
        if not self._watching and line is not None and line.waiting and line.waiting[0].since < math.inf:
            self._watching = True
            ask, now = line.waiting[0], self.site.loop.now
            self.site.loop.call_at(max(ask.since + ask.timeout, now) + SILENCE, self._check_for_hangs, ask)

    def _check_for_hangs(self, asked: Ask) -> None:
        self._watching = False
        line = self._line
        if line is not None and line.waiting and line.waiting[0] is asked and not line.excused:
            self.check_hang(asked.n, asked.since)
        self._watch_for_hangs()

    def lost(self, line: Line) -> None:
        """The connection has gone."""
        self.note(b"closed")
        if line.waiting and not (line.excused or line.ending):
            self.broken(f"the connection closed without a response to n={line.waiting[0].n}")
        self.site.gone((*line.left, *line.waiting))
        line.waiting.clear()
        if self._line is line:
            self._line = None
        if self._now is not None and self._now.line is line:
            self._end(self._now)

    def leave(self) -> None:
        """Close the connection."""
        line, self._line = self._line, None
        if line is not None:
            line.hang_up()
