"""What is thrown away is counted and logged, however much of it there is."""

import time
from collections import Counter
from collections.abc import Callable

from structlog.stdlib import BoundLogger

INTERVAL = 1.0  # seconds between two lines about the same


class Drops:
    """Counts what was dropped, by kind, here and in `counted`, and logs each kind once a second at most."""

    def __init__(
        self, logger: BoundLogger, counted: Callable[[str, int], None] = lambda kind, times: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._counted = counted
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # when, and how many there were

    def __call__(self, kind: str, reason: object, peer: str = "", client: str = "", *, times: int = 1) -> None:
        """Something of this `kind`, one of a few, was dropped so many `times`: it came from the address `peer`, or was asked for by `client`."""
        self.counts[kind] += times
        self._counted(kind, times)
        now = self._clock()
        when, before = self._logged.get(kind, (None, 0))
        if when is not None and now < when + INTERVAL:
            return
        self._logged[kind] = (now, self.counts[kind])
        self._logger.warning(
            "dropped", kind=kind, door="zeromq", peer=peer, client=client, reason=str(reason),
            since_last=self.counts[kind] - before,
        )  # fmt: skip
