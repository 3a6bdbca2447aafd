"""Simulated clients of a streaming model, whose answers come in parts, as events over HTTP."""

import json
import math
from typing import Any, NamedTuple, Protocol

from tests.simulated.asking import ANYTIME, MODEL_FAULTS
from tests.simulated.channels import ChannelClient, Place, fault_of_status
from tests.simulated.models import ASKED, RAISED, STREAMED

LATE = 0.03  # seconds after the deadline in which a stream has its end
_SILENCE = 1.0  # seconds beyond the deadline after which a stream hangs


class StreamAsk(NamedTuple):
    """One request: `size` parts, but what `do` says happens at part `at`."""

    n: int
    size: int
    do: str
    at: int
    timeout: float
    data: bytes

    @property
    def wanted(self) -> str:
        """The type of the error that ends it; "" for none."""
        if self.do == "ok":
            return ""
        named = {"returns": "NotFound", "outside": "ModelError", "crash": "ModelCrashed", "hang": "ModelCrashed"}
        return named.get(self.do) or MODEL_FAULTS.get(self.do, self.do)


class Reader(Protocol):
    """Who has an Incoming."""

    def came(self, incoming: "Incoming") -> None:
        """A piece of a body has come."""

    def answered(self, incoming: "Incoming", status: int) -> None:
        """A response is complete."""

    def lost(self, incoming: "Incoming") -> None:
        """The connection has gone."""


class Incoming:
    """What comes on one connection: the responses, whose bodies have a length or come in chunks."""

    def __init__(self, client: Reader) -> None:
        self._client = client
        self._buffer = bytearray()
        self.open = True
        self.ending = False
        self.status = 0  # of the response that comes
        self.headers: dict[str, str] = {}
        self.body = bytearray()  # of which has not been looked at

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        self._buffer += data
        while self.open and (self._head() if not self.status else self._content()):
            pass

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if found:
            self._buffer = rest
            first, *lines = head.decode("latin-1").split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self.status = int(first[9:12])
            self.ending = self.headers.get("connection", "").lower() == "close"
        return bool(found)

    def _content(self) -> bool:
        if self.headers.get("transfer-encoding") != "chunked":
            size = int(self.headers.get("content-length", 0))
            return self._take(size, 0) and self._over()
        line, found, _ = self._buffer.partition(b"\r\n")
        if not found:
            return False
        size = int(line, 16)
        if not self._take(size, len(line) + 2, after=2):
            return False
        if size:
            self._client.came(self)
            return True
        return self._over()

    def _take(self, size: int, start: int, *, after: int = 0) -> bool:
        end = start + size + after
        if len(self._buffer) < end:
            return False
        self.body += self._buffer[start : start + size]
        del self._buffer[:end]
        return True

    def _over(self) -> bool:
        status, self.status = self.status, 0
        self._client.answered(self, status)
        self.body.clear()
        return True

    def closed(self) -> None:
        """The server sends no more."""
        if self.open:
            self.open = False
            self._client.lost(self)


class StreamClient(ChannelClient):
    """Asks for one stream after the other; reads it, reads it slowly, or leaves in its middle."""

    def __init__(self, site: Place, index: int) -> None:
        super().__init__(site, index)
        self._incoming: Incoming | None = None
        self._transport: Any = None
        self._ask: StreamAsk | None = None
        self._since = math.inf
        self._parts = 0  # of the stream under way
        self._failed = False  # whether it has had its error
        self._style = ""
        self._leaves_after = 0

    def turn(self) -> None:
        """Ask for a stream."""
        draw = self.draw
        self._style = draw.choice(self.site.plan.theme.of_streams)
        incoming = self._incoming
        if incoming is None or not incoming.open or incoming.ending or self._style == "slow" or draw.random() < 0.3:
            self.leave()
            incoming = self._incoming = Incoming(self)
            self._transport = self.site.connect(incoming, 1_500 if self._style == "slow" else None)
        if self._transport is None or incoming.ending:  # nothing listens, or too many are connected
            self._incoming = None
            self.end(1.0)
            return
        ask = self._ask = self._drawn()
        self._parts, self._failed, self._since = 0, False, self.site.loop.now
        self._leaves_after = draw.randint(1, ask.size) if self._style in ("leave", "half-close") else 0
        self.asked += 1
        self.later(ask.timeout + _SILENCE, self._check_for_hang, ask)
        if self._style == "slow":
            self.later(0.0, self._read_on, ask)
        elif self._style == "leave soon":
            self.later(draw.choice((0.0, 0.001, 0.01, 0.1)), self._go, ask)
        self._transport.send(ask.data)

    def _drawn(self) -> StreamAsk:
        draw, plan = self.draw, self.site.plan
        slow = self._style == "slow"
        n, size = self.number(), draw.choice((30, 60) if slow else (1, 2, 5, 30))
        do = draw.choice((*RAISED, *STREAMED)) if draw.random() < plan.wrong else "ok"
        timeout = plan.timeout if draw.random() < 0.8 else draw.choice((0.02, 0.2, 1.0))
        at = draw.randrange(size)
        item = {"n": n, "size": size, "do": do, "at": at, "mark": draw.random() < 0.3}
        item["pad"] = draw.choice((3_000, 30_000)) if slow else draw.choice((0, 0, 200))
        body = json.dumps(item).encode()
        limit = b"" if timeout == plan.timeout else b"X-Request-Timeout: %g\r\n" % timeout
        head = b"POST /infer/streams HTTP/1.1\r\nHost: simulated\r\n%bContent-Length: %d\r\n\r\n" % (limit, len(body))
        return StreamAsk(n, size, do, at, timeout, head + body)

    def leave(self) -> None:
        """Close the connection."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None and incoming.open:
            incoming.open = False
            self._transport.half_close()

    def _go(self, ask: StreamAsk) -> None:
        """Leave in the middle of a stream."""
        if self._ask is ask and self._incoming is not None:
            self._incoming.open = False
            self._incoming = None
            if self._style == "half-close":
                self._transport.half_close()
            else:
                self._transport.reset()
            self._over()

    def _read_on(self, ask: StreamAsk) -> None:
        if self._ask is ask:
            self._transport.read(self.draw.choice((300, 3_000, 30_000)))
            self.later(self.draw.choice((0.01, 0.3, 2.0)), self._read_on, ask)

    def _over(self) -> None:
        self._ask = None
        if self._style == "slow":
            self.leave()
        self.end()

    # What comes back.

    def came(self, incoming: Incoming) -> None:
        """A piece of a stream has come."""
        *events, rest = bytes(incoming.body).split(b"\n\n")
        incoming.body[:] = rest
        for event in events:
            self.note(event)
            if self._ask is not None and not event.startswith(b":"):
                self._judge(self._ask, event, incoming)
        if self._ask is not None and self._leaves_after and self._parts >= self._leaves_after:
            self.later(0.0, self._go, self._ask)

    def _judge(self, ask: StreamAsk, event: bytes, incoming: Incoming) -> None:
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        try:
            data = json.loads(fields[b"data"])
        except (KeyError, ValueError):
            self.broken(f"n={ask.n}: an event without JSON: {event[:200]!r}")
            return
        if self._failed:
            self.broken(f"n={ask.n}: an event after its error: {event[:200]!r}")
        elif fields.get(b"event") == b"error":
            self._failed = True
            self._judge_error(ask, data, None)
        elif (data["n"], data["part"]) != (ask.n, self._parts):
            self.broken(f"n={ask.n}: part {self._parts} must come, and {str(data)[:200]} has come")
        else:
            self._parts += 1
            if ask.wanted and self._parts > ask.at:
                self.broken(f"n={ask.n}: it got part {ask.at}, must get {ask.wanted}")

    def _judge_error(self, ask: StreamAsk, body: Any, status: int | None) -> None:
        """Look at the error that ended a stream: its own, one that any may have, or one that another item of its batch asked for."""
        kind, message = body["error"]["type"], body["error"]["message"]
        self.site.responses[kind] += 1
        if status is not None and (fault := fault_of_status(kind, status, kserve=False)):
            self.broken(f"n={ask.n}: {fault}")
        others = {"ModelError"} if self.site.plan.wrong else set()
        if self.site.plan.wrong and ASKED in message:
            others |= {*RAISED}
        if self.site.crashed:
            others |= {"ModelCrashed", "WorkerLost"}
        if "max_waiting_bytes" in self.site.plan.http:
            others.add("TooLarge")
        if kind != ask.wanted and kind not in ANYTIME | others:
            self.broken(f"n={ask.n}: it got {kind}, must get {ask.wanted or 'its parts'}: {message[:200]}")

    def answered(self, incoming: Incoming, status: int) -> None:
        """A response is complete."""
        ask = self._ask
        if ask is None:
            if not incoming.ending:
                self.broken(f"it got a response to nothing: {status} {bytes(incoming.body)[:200]!r}")
            return
        self.note(b"%d end" % status)
        self.site.responses[str(status)] += 1
        late = self.site.loop.now - self._since - ask.timeout
        if late > LATE and self._style != "slow" and not self.site.stood_still(self._since):
            self.broken(f"n={ask.n}: the stream ended {late:.3f} s after its deadline")
        if status != 200:
            self._judge_error(ask, json.loads(bytes(incoming.body)), status)
        elif not self._failed and (self._parts != ask.size or ask.wanted):
            self.broken(f"n={ask.n}: it ended after {self._parts} parts of {ask.size}, must get {ask.wanted or 'all'}")
        self._over()

    def lost(self, incoming: Incoming) -> None:
        """The connection has gone: only a slow client's may, or one that the server has announced."""
        self.note(b"closed")
        if self._incoming is incoming:
            self._incoming = None
            if self._ask is not None:
                if self._style != "slow" and not self._transport.was_cut:
                    self.broken(f"n={self._ask.n}: the connection closed after {self._parts} parts")
                self._over()

    def _check_for_hang(self, ask: StreamAsk) -> None:
        if self._ask is ask and self._style != "slow" and not self.site.stood_still(self._since):
            self.broken(f"n={ask.n}: the stream has no end {_SILENCE:g} s after its deadline")
