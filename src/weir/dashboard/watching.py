"""What a page that watches is told: the samples that it has not seen, and what there is now."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from weir._version import __version__
from weir.dashboard.beat import Beat, Later
from weir.dashboard.ring import Ring
from weir.dashboard.sampling import Sampler
from weir.protocols.response import encode_safely
from weir.telemetry.histogram import ROWS, SECONDS


class Watch:
    """Samples a server once a second while it is watched, and every few seconds while it is not, so that whoever comes sees what
    was; keeps the last fifteen minutes."""

    def __init__(
        self, sampler: Sampler, ring: Ring, *, counted: bool, clock: Callable[[], float] = time.monotonic,
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
