"""What an open dashboard page gets: the samples that it does not have yet, and the state now."""

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
from weir.telemetry.recorder import ROWS, SECONDS
from weir.workers.timer import Cancellable

# The last samples, encoded: each is encoded once for all pages.


KEPT = 900  # samples: fifteen minutes of one a second
KEPT_BYTES = 16 << 20
SENT_BYTES = 1 << 20  # in one response; the page requests the rest at once, and others are served in between


class Ring:
    """Keeps at most `kept` samples with at most `kept_bytes` in total, and drops the oldest first. Samples are numbered from 1."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._samples: deque[bytes] = deque()
        self.size_bytes = 0
        self.last = 0  # number of the newest sample

    def put(self, sample: bytes) -> None:
        """Add the newest sample."""
        self._samples.append(sample)
        self.size_bytes += len(sample)
        self.last += 1
        while len(self._samples) > self._kept or self.size_bytes > self._kept_bytes:
            self.size_bytes -= len(self._samples.popleft())

    def since(self, number: int, size_bytes: int = SENT_BYTES) -> tuple[int, list[bytes]]:
        """Return the number of the last returned sample, and the samples after `number` in order.

        They have at most `size_bytes` in total, but there is at least one if there is any.
        """
        first = self.last - len(self._samples)  # the number before the oldest
        begin = min(max(number, first), self.last)
        taken: list[bytes] = []
        for sample in islice(self._samples, begin - first, None):
            size_bytes -= len(sample)
            if taken and size_bytes < 0:
                break
            taken.append(sample)
        return begin + len(taken), taken


SECOND = 1.0  # seconds between samples while a page is open
PATIENCE = 60.0  # seconds after the last request of a page until it counts as closed
REST = 5.0  # seconds between samples while no page is open


Later = Callable[[float, Callable[[], None]], Cancellable]  # calls a function after that many seconds


class SamplingTimer:
    """Calls `sample` with its delay in seconds: every REST seconds from `begin` on, and every second until `patience` seconds after the last `look`.

    Without `begin` there is no timer while no page is open. Nothing needs to end it: a loop that closes drops its timer.
    """

    def __init__(
        self,
        sample: Callable[[float], None],
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self._sample = sample
        self._patience = patience
        self._clock = clock
        self._later = later
        self._looked = 0.0
        self._due = 0.0
        self._always = False
        self._timer: Cancellable | None = None

    @property
    def running(self) -> bool:
        """Whether there is a timer."""
        return self._timer is not None

    def begin(self) -> None:
        """Call `sample` from now on, even while no page is open. Idempotent."""
        self._always = True
        if self._timer is None:
            self._looked = self._clock() - self._patience - SECOND
            self._sample_now()

    def look(self) -> None:
        """Note that a page is open. The first time, and after a pause, call `sample` at once."""
        before, self._looked = self._looked, self._clock()
        if self._timer is None or self._looked - before > self._patience:
            self.stop()
            self._sample_now()

    def _sample_now(self) -> None:
        self._due = self._clock()
        self._fire()

    def stop(self) -> None:
        """Stop until the next `look` or `begin`. Idempotent."""
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
        self._sample(late)
        self._due = now + pause if late >= SECOND else self._due + pause  # missed calls are not made up for
        later = self._later or asyncio.get_running_loop().call_later
        self._timer = later(max(0.0, self._due - self._clock()), self._fire)


class Watch:
    """Samples a server every second while a page is open, and every few seconds otherwise, so that a new page shows the past. It keeps fifteen minutes."""

    def __init__(
        self,
        sampler: DashboardSampler,
        ring: Ring,
        *,
        counted: bool,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self.timer = SamplingTimer(self.take, clock=clock, later=later)
        self._sampler = sampler
        self._ring = ring
        self._life = secrets.token_hex(8)  # identifies this process: another one numbers its samples from the start
        self._server = {"version": __version__, "counted": counted, "buckets": {"seconds": SECONDS, "rows": ROWS}}
        self._present = b"null"

    def take(self, late: float) -> None:
        """Take a sample."""
        changes, present = self._sampler.sample(late)
        if changes is not None:
            self._ring.put(encode_safely({"number": self._ring.last + 1, **changes}))
        self._present = encode_safely(present)

    def look(self, life: str = "", since: int = 0) -> bytes:
        """Return a JSON document with the samples after number `since`, or with all samples if `life` does not identify this process.

        In it, `last` is the `since` of the next request, and `more` says whether there are more samples already.
        """
        self.timer.look()
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
