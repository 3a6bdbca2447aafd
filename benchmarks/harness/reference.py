"""A fixed loop of the interpreter: what processor time is worth on this machine, now.

The same code takes 60 % more of it in one hour than in another where other programs share the machine's cores and caches. So does this loop, and a cost as
a multiple of it stays what it is.
"""

import time
from statistics import median

TIMES, PASSES = 51, 1000


def loop_seconds() -> float:
    """Return the processor time of the loop: the median of several."""
    return median(_timed() for _ in range(TIMES))


def _timed() -> float:
    began = time.thread_time()
    _loop()
    return time.thread_time() - began


def _loop() -> int:
    """Look up, call, branch and count, as a server does."""
    table = {number: str(number) for number in range(64)}
    total = 0
    for number in range(PASSES):
        word = table[number & 63]
        total += len(word) if word.endswith("7") else number
    return total
