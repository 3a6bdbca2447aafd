"""Simulated clients of a streaming model, whose answers come in parts, as events over HTTP."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulated.asking import Ask, http, wanted_of
from tests.simulated.channels import SILENCE, ChannelClient, Line
from tests.simulated.models import ASKED, RAISED, STATUS, STREAMED

if TYPE_CHECKING:
    from tests.simulated.world import World


@dataclass(slots=True)
class StreamAsk(Ask):
    """One request: `size` parts, but what `do` says happens at part `at`. `came`: how many have; `failed`: it has had its error; `leaves_after` so many."""

    at: int = 0
    came: int = 0
    failed: bool = False
    leaves_after: int = 0


class StreamClient(ChannelClient):
    """Asks for one stream after the other; reads it, reads it slowly, or leaves in its middle."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        self._line: Line | None = None
        self._ask: StreamAsk | None = None
        self._style = ""

    def turn(self) -> None:
        """Ask for a stream."""
        draw = self.draw
        self._style = draw.choice(self.site.plan.theme.of_streams)
        line = self._line
        if line is None or not line.usable or self._style == "slow" or draw.random() < 0.3:
            self.leave()
            line = self._line = Line(self, 1_500 if self._style == "slow" else None)
        if line.transport is None or line.ending:  # nothing listens, or too many are connected
            self._line = None
            self.end(1.0)
            return
        ask = self._ask = self._drawn()
        ask.leaves_after = draw.randint(1, ask.size) if self._style in ("leave", "half-close") else 0
        self.asked += 1
        self.later(ask.timeout + SILENCE, self._check_for_hang, ask)
        if self._style == "slow":
            self.later(0.0, self._read_on, ask, line.transport)
        elif self._style == "leave soon":
            self.later(draw.choice((0.0, 0.001, 0.01, 0.1)), self._go, ask)
        line.add([ask])
        line.transport.send(ask.data)

    def _drawn(self) -> StreamAsk:
        draw, plan = self.draw, self.site.plan
        slow = self._style == "slow"
        n, size = self.number(), draw.choice((30, 60) if slow else (1, 2, 5, 30))
        do = draw.choice((*RAISED, *STREAMED)) if draw.random() < plan.wrong else "ok"
        timeout = plan.timeout if draw.random() < 0.8 else draw.choice((0.02, 0.2, 1.0))
        at = draw.randrange(size)
        item = {"n": n, "size": size, "do": do, "at": at, "mark": draw.random() < 0.3}
        item["pad"] = draw.choice((3_000, 30_000)) if slow else draw.choice((0, 0, 200))
        headers = () if timeout == plan.timeout else (f"X-Request-Timeout: {timeout:g}",)
        data, now = http("/infer/streams", json.dumps(item).encode(), headers), self.site.loop.now
        return StreamAsk(n, data, False, 1, timeout, wanted_of(do), size, do=do, since=now, at=at)

    def leave(self) -> None:
        """Close the connection."""
        line, self._line = self._line, None
        if line is not None and line.open and line.transport is not None:
            line.open = False
            line.transport.half_close()

    def _go(self, ask: StreamAsk) -> None:
        """Leave in the middle of a stream."""
        if self._ask is ask and self._line is not None:
            line, self._line = self._line, None
            line.open = False
            (line.transport.half_close if self._style == "half-close" else line.transport.reset)()
            self._over()

    def _read_on(self, ask: StreamAsk, transport: Any) -> None:
        if self._ask is ask:
            transport.read(self.draw.choice((300, 3_000, 30_000)))
            self.later(self.draw.choice((0.01, 0.3, 2.0)), self._read_on, ask, transport)

    def _over(self) -> None:
        self._ask = None
        if self._style == "slow":
            self.leave()
        self.end()

    # What comes back.

    def came(self, line: Line) -> None:
        """A piece of a stream has come."""
        *events, rest = bytes(line.body).split(b"\n\n")
        line.body[:] = rest
        for event in events:
            if self._ask is not None and not event.startswith(b":"):
                self._judge(self._ask, event)
        if self._ask is not None and self._ask.leaves_after and self._ask.came >= self._ask.leaves_after:
            self.later(0.0, self._go, self._ask)

    def _judge(self, ask: StreamAsk, event: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        try:
            data = json.loads(fields[b"data"])
        except (KeyError, ValueError):
            self.broken(f"n={ask.n}: an event without JSON: {event[:200]!r}")
            return
        if ask.failed:
            self.broken(f"n={ask.n}: an event after its error: {event[:200]!r}")
        elif fields.get(b"event") == b"error":
            ask.failed = True
            self._judge_error(ask, data, None)
        elif (data["n"], data["part"]) != (ask.n, ask.came):
            self.broken(f"n={ask.n}: part {ask.came} must come, and {str(data)[:200]} has come")
        else:
            ask.came += 1
            if ask.wanted and ask.came > ask.at:
                self.broken(f"n={ask.n}: it got part {ask.at}, must get {ask.wanted}")

    def _judge_error(self, ask: StreamAsk, body: Any, status: int | None) -> None:
        """Look at the error that ended a stream: its own, one that any may have, or one that another item of its batch asked for."""
        kind, wrong = body["error"]["type"], self.site.plan.wrong
        self.site.responses[kind] += 1
        also = {"ModelError"} if wrong else set()
        if wrong and ASKED in body["error"]["message"]:
            also |= {*RAISED}
        if self.site.crashed:
            also.add("WorkerLost")
        self.check_error(ask, kind, STATUS.get(kind, 0) if status is None else status, STATUS, also)

    def answered(self, line: Line, status: int) -> None:
        """A response is complete."""
        ask = self._ask
        if line.answers(status) is None or ask is None:
            return
        self.site.responses[str(status)] += 1
        if self._style != "slow":
            self.check_late(ask.n, ask.since + ask.timeout, ask.since)
        if status != 200:
            self._judge_error(ask, json.loads(bytes(line.body)), status)
        elif not ask.failed and (ask.came != ask.size or ask.wanted):
            self.broken(f"n={ask.n}: it ended after {ask.came} parts of {ask.size}, must get {ask.wanted or 'all'}")
        self._over()

    def lost(self, line: Line) -> None:
        """The connection has gone: only a slow client's may, or one that the server has announced."""
        self.note(b"closed")
        if self._line is line:
            self._line = None
            if self._ask is not None:
                if not line.excused:
                    self.broken(f"n={self._ask.n}: the connection closed after {self._ask.came} parts")
                self._over()

    def _check_for_hang(self, ask: StreamAsk) -> None:
        if self._ask is ask and self._style != "slow":
            self.check_hang(ask.n, ask.since)
