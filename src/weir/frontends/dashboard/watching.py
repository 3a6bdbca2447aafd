"""What a page that watches is sent: the samples that it has not seen, and the state now."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from weir._version import __version__
from weir.frontends.dashboard.sampling import DashboardSampler
from weir.protocols.response import encode_safely
from weir.serving.driver import Cancellable
from weir.telemetry.recorder import ROWS, SECONDS

# The last samples, written already: each is encoded once for all who watch.


KEPT = 900  # samples: fifteen minutes of one a second
KEPT_BYTES = 16 << 20
SENT_BYTES = 1 << 20  # at once: the rest is asked for at once too, and the event loop has a breath in between


class Ring:
    """At most `kept` samples of at most `kept_bytes` together, the oldest forgotten first. They are numbered from 1."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._samples: deque[bytes] = deque()
        self.size_bytes = 0
        self.last = 0  # the number of the newest

    def put(self, sample: bytes) -> None:
        """Add the newest."""
        self._samples.append(sample)
        self.size_bytes += len(sample)
        self.last += 1
        while len(self._samples) > self._kept or self.size_bytes > self._kept_bytes:
            self.size_bytes -= len(self._samples.popleft())

    def since(self, number: int, size_bytes: int = SENT_BYTES) -> tuple[int, list[bytes]]:
        """Return the samples after `number` in their order, no more than `size_bytes` but at least one if there is one; and
        the number of the last of them."""
        first = self.last - len(self._samples)  # the number before the oldest
        begin = min(max(number, first), self.last)
        taken: list[bytes] = []
        for sample in islice(self._samples, begin - first, None):
            size_bytes -= len(sample)
            if taken and size_bytes < 0:
                break
            taken.append(sample)
        return begin + len(taken), taken


# Calls a function once a second while a page watches and a while longer, and seldom when none does.


SECOND = 1.0
PATIENCE = 60.0  # seconds after the last look that it goes on so
REST = 5.0  # seconds between beats while no page watches


Later = Callable[[float, Callable[[], None]], Cancellable]  # calls back after so many seconds


class Beat:
    """Calls `strike` with how late it comes, in seconds: from `begin` on every REST seconds, and every second from a `look` until `patience`
    after the last.

    Without `begin` there is no timer while no page watches. It needs no end: a loop that closes forgets its timer.
    """

    def __init__(
        self, strike: Callable[[float], None], *, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:  # fmt: skip
        self._strike = strike
        self._patience = patience
        self._clock = clock
        self._later = later
        self._looked = 0.0
        self._due = 0.0
        self._always = False
        self._timer: Cancellable | None = None

    @property
    def beating(self) -> bool:
        """Whether it goes on."""
        return self._timer is not None

    def begin(self) -> None:
        """Beat from now on, whether or not a page watches. Idempotent."""
        self._always = True
        if self._timer is None:
            self._looked = self._clock() - self._patience - SECOND
            self._strike_now()

    def look(self) -> None:
        """Note that a page watches; the first time, and after a pause, beat at once."""
        before, self._looked = self._looked, self._clock()
        if self._timer is None or self._looked - before > self._patience:
            self.stop()
            self._strike_now()

    def _strike_now(self) -> None:
        self._due = self._clock()
        self._fire()

    def stop(self) -> None:
        """Beat no more until a page watches. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = self._clock()
        self._timer = None
        is_watched = now - self._looked <= self._patience
        if not is_watched and not self._always:
            return
        late, pause = now - self._due, SECOND if is_watched else REST
        self._strike(late)
        self._due = now + pause if late >= SECOND else self._due + pause  # what was missed is not made up for
        later = self._later or asyncio.get_running_loop().call_later
        self._timer = later(max(0.0, self._due - self._clock()), self._fire)


class Watch:
    """Samples a server once a second while it is watched, and every few seconds while it is not, so that whoever comes sees what
    was; keeps the last fifteen minutes."""

    def __init__(
        self, sampler: DashboardSampler, ring: Ring, *, counted: bool, clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:  # fmt: skip
        self.beat = Beat(self.take, clock=clock, later=later)
        self._sampler = sampler
        self._ring = ring
        self._life = secrets.token_hex(8)  # of this process: numbers of samples mean nothing in another's
        self._server = {"version": __version__, "counted": counted, "buckets": {"seconds": SECONDS, "rows": ROWS}}
        self._present = b"null"

    def take(self, late: float) -> None:
        """Take a sample."""
        changes, present = self._sampler.sample(late)
        if changes is not None:
            self._ring.put(encode_safely({"number": self._ring.last + 1, **changes}))
        self._present = encode_safely(present)

    def look(self, life: str = "", since: int = 0) -> bytes:
        """Return a JSON document with the samples after number `since` of the process `life`; of any other, all there are.

        `last` is the number to ask on from; `more`: ask at once.
        """
        self.beat.look()
        last, samples = self._ring.since(since if life == self._life else 0)
        document: dict[str, Any] = {
            "life": self._life,
            "server": self._server,
            "last": last,
            "more": last < self._ring.last,
            "now": msgspec.Raw(self._present),
            "samples": [msgspec.Raw(sample) for sample in samples],
        }
        return msgspec.json.encode(document)
