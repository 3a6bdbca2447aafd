"""What clients of all channels share: turns, numbers, traces, and the responses of HTTP on one connection. The number of a client says of which channel it is."""

import hashlib
import math
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulated.asking import Ask, fault_of_error

if TYPE_CHECKING:
    from tests.simulated.world import World

FIRST = 1000  # the clients of each channel begin at a multiple of it
PAUSES = 0.2  # the share of its turns after which a client of a plan with quiet stretches pauses
LATE = 0.03  # seconds after its deadline in which a request has its end: a timer's tick, and the threads that read and write long bodies
SILENCE = 1.0  # seconds beyond the deadline after which a request hangs
_DATE = re.compile(rb"Date: [^\r]*")  # of the day, where websockets refuses a handshake


class ChannelClient:
    """Does one thing after the other, until its turns are over. A subclass has `turn`, which calls `end` once. Its draws are its own, so that it does the
    same whichever other clients there are."""

    def __init__(self, site: "World", index: int) -> None:
        self.site = site
        self.index = index
        self.draw = random.Random(f"{site.plan.seed} client {index}")
        self.asked = 0
        self.done = False
        self._turns = site.plan.turns
        self._number = index * 1_000_000
        self._hash = hashlib.blake2b(digest_size=16)

    def turn(self) -> None:
        """Begin one turn."""
        raise NotImplementedError

    def leave(self) -> None:
        """The turns are over: close what is open."""

    def begin(self) -> None:
        """Start the first turn after a while."""
        self.end()

    def end(self, seconds: float | None = None) -> None:
        """Start the next turn after a while."""
        self.later(self._gap() if seconds is None else seconds, self._next)

    def _next(self) -> None:
        if not self._turns:
            self.leave()
            self.done = True
            return
        self._turns -= 1
        self.turn()

    def later(self, seconds: float, step: Callable[..., Any], *arguments: Any) -> None:
        """Call `step` after a while."""
        self.site.loop.call_later(seconds, step, *arguments)

    def _gap(self) -> float:
        plan = self.site.plan
        return self.draw.expovariate(1.0 / (plan.quiet if plan.quiet and self.draw.random() < PAUSES else plan.pace))

    def number(self) -> int:
        """Return a number that no other request has."""
        self._number += 100
        return self._number

    def note(self, data: bytes) -> None:
        """Add to the trace what has come, and when."""
        self._hash.update(b"%.6f " % self.site.loop.now + _DATE.sub(b"", data))

    @property
    def trace(self) -> str:
        """The hash of all that it has received, and of when."""
        return self._hash.hexdigest()

    def broken(self, what: str) -> None:
        """Something is wrong."""
        self.site.broken(f"client {self.index}: {what}")

    def came(self, line: Any) -> None:
        """A piece of a body has come."""

    # What is judged of every request.

    def check_late(self, n: Any, until: float, since: float) -> None:
        """A request that was sent at `since` has its end now, and should have had it at `until`."""
        late = self.site.loop.now - until
        if late > LATE and not self.site.stood_still(since):
            self.broken(f"n={n}: it ended {late:.3f} s after its deadline")

    def check_hang(self, what: Any, since: float) -> None:
        """Requests that were sent at `since` should have had their ends a while ago, and have none."""
        if not self.site.stood_still(since):
            self.broken(f"n={what}: no end {SILENCE:g} s after the deadline")

    def check_error(self, ask: Any, kind: str, status: int, table: dict[str, int], also: Collection[str] = ()) -> None:
        """`ask` has ended with an error: its own, or one that it may have for what the server is and what has befallen it, or one of `also`."""
        if fault := fault_of_error(ask, kind, status, table, self.site.excused(ask) | {*also}):
            self.broken(f"n={ask.n}: {fault}")


class Incoming:
    """What comes on one connection: the responses, whose bodies have a length or come in chunks. Its `client` has `came`, for a piece of a body, `answered`,
    for a whole response, and `lost`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._buffer = bytearray()
        self.open = True
        self.ending = False  # the server has announced that it closes
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
        return bool(found)

    def _content(self) -> bool:
        if self.headers.get("transfer-encoding") != "chunked":
            size = int(self.headers.get("content-length", 0))
            return self._take(size, 0) and self._over()
        line, found, _ = self._buffer.partition(b"\r\n")
        if not found or not self._take(int(line, 16), len(line) + 2, after=2):
            return False
        if int(line, 16):
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
        self.ending |= self.headers.get("connection", "").lower() == "close"
        self._client.answered(self, status)
        self.body.clear()
        return True

    def closed(self) -> None:
        """The server sends no more."""
        if self.open:
            self.open = False
            self._client.lost(self)


class Line(Incoming):
    """One connection of a client that sends requests in their order."""

    def __init__(self, client: Any, window: int | None) -> None:
        super().__init__(client)
        self.waiting: deque[Any] = deque()
        self.left: list[Ask] = []  # what was waiting when the client left
        self.fresh = True  # nothing has been sent
        self.meant = 0  # bytes that are sent, or will be
        self.slow = window is not None
        self.excused = self.slow  # whether the server may close at any time
        self._added_at = -math.inf  # when the last requests were sent
        self.transport = client.site.connect(self, window)
        if self.transport is None:
            self.open = False

    @property
    def usable(self) -> bool:
        """Whether the server has neither closed it nor announced to."""
        return self.open and not self.ending and not self.transport.is_closing()

    def received(self, data: bytes) -> None:
        self._client.note(data)
        super().received(data)

    def closed(self) -> None:
        site = self._client.site
        self.excused |= self.transport is not None and self.transport.was_cut
        # It has waited as long as a drain may; or it was idle while all stood still, and what is sent crosses the end of that.
        self.excused |= (site.draining or site.relays) and site.stood_still(site.loop.now)
        self.excused |= site.relays and self._added_at == site.loop.now  # what crosses the end of a relay
        super().closed()

    def hang_up(self) -> None:
        """Send no more; whatever the server does then is right."""
        if self.open and self.transport is not None:
            self.excused = True
            self.transport.half_close()

    def answers(self, status: int) -> Any:
        """Return the request that this response is to; None if there is none, or it has no other end than that the connection closes."""
        if not self.waiting:
            if not (self.excused or (self.fresh and self.ending)):
                self._client.broken(f"it got a response to nothing: {status} {bytes(self.body[:200])!r}")
            return None
        return self.waiting.popleft()

    def add(self, asks: Sequence[Any]) -> None:
        """These are sent."""
        self.waiting += asks
        self.fresh = False
        self._added_at = self._client.site.loop.now

    def go_on(self, now: float) -> None:
        """The server can begin the next request."""
        if self.ending:
            self.waiting.clear()  # what is behind it was never begun
        if self.waiting:
            self.waiting[0].since = now
