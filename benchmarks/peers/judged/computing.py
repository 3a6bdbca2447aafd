"""How long the judged models compute: nothing, or as long as GoogLeNet on a Tesla P4, ten times slower: 3.051·b + 10.52 ms. Every server runs this."""

import os
import time

FIXED, PER_ROW = 0.01052, 0.003051  # seconds
SLEEP_ERROR = 0.0005  # seconds that a sleep may last too long


def judged() -> tuple[str, int, int]:
    """Return which model is asked for, the batch size (0: the server's own settings) and the wait in ms, as JUDGED says."""
    kind, batch, wait = os.environ["JUDGED"].split()
    return kind, int(batch), int(wait)


def compute(kind: str, rows: int) -> None:
    """Take the time of a batch of `rows`, to a few microseconds."""
    if kind == "null":
        return
    end = time.perf_counter() + FIXED + PER_ROW * rows
    time.sleep(end - time.perf_counter() - SLEEP_ERROR)
    while time.perf_counter() < end:
        pass
