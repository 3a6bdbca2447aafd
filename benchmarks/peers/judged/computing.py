"""How long the judged models compute: nothing, or as long as GoogLeNet on a Tesla P4, ten times slower: 3.051·b + 10.52 ms. Every server runs this."""

import os
import time

FIXED, PER_ROW = 0.01052, 0.003051  # seconds
SLEEP_ERROR = 0.0005  # seconds that a sleep may last too long
BUSY = "JUDGED_BUSY"  # names the file that gets a line for each batch, of any process
_BUSY = os.open(os.environ[BUSY], os.O_WRONLY | os.O_APPEND) if BUSY in os.environ else None


def judged() -> tuple[str, int, int]:
    """Return which model is asked for, the batch size (0: the server's own settings) and the wait in ms, as JUDGED says."""
    kind, batch, wait = os.environ["JUDGED"].split()
    return kind, int(batch), int(wait)


def compute(kind: str, rows: int) -> None:
    """Take the time of a batch of `rows`, to a few microseconds; where BUSY names a file, add one byte for each row and a line's end."""
    if kind == "null":
        return
    end = time.perf_counter() + FIXED + PER_ROW * rows
    if _BUSY is not None:
        os.write(_BUSY, b"." * rows + b"\n")
    time.sleep(end - time.perf_counter() - SLEEP_ERROR)
    while time.perf_counter() < end:
        pass
