"""How many threads compute a batch that runs alone on the CPU.

More threads are not always faster. A short text is too little work for them, above all in int8, and the CPU of an idle worker may be busy with other work,
such as the server's own. So each number of threads is timed on the batches themselves, by size, and the fewest threads that are nearly as fast as any win.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.text_models.runtime.contract import Runtime

MOST_SESSIONS = 3  # beside the worker's own: each takes 1 to 3 MB
TRIES = 3  # the last times that count for a number of threads; their median is compared
EVERY = 16  # one batch in so many of a size tries a number of threads by turns, since what else the CPUs do may change
GAIN = 1.1  # how many times as fast more threads must be: they take more CPU time for the same batch


def widened(runtime: "Runtime", threads: int, most: int) -> "Widths | None":
    """Open the model of `runtime`, which has `threads`, also with twice as many, four times as many and so on, at most `most`.

    Returns None if `most` is no more, or if the runtime cannot do it in little memory, see Runtime.widened.
    """
    runtimes = {threads: runtime}
    for step in range(1, MOST_SESSIONS + 1):
        count = min(threads * 2**step, most)
        if count in runtimes:
            break
        other = runtime.widened(count)
        if other is None:
            return None
        runtimes[count] = other
    return Widths(runtimes) if len(runtimes) > 1 else None


class Widths:
    """One model with several numbers of threads: `runtimes` by their threads."""

    def __init__(self, runtimes: "Mapping[int, Runtime]", clock: Callable[[], float] = time.perf_counter) -> None:
        self._runtimes = dict(sorted(runtimes.items()))
        self._clock = clock
        self._sizes: defaultdict[int, _Times] = defaultdict(_Times)

    def run(self, most: int, inputs: "Sequence[NDArray[Any]]") -> "NDArray[Any]":
        """Compute a batch as Runtime.run does, with at most `most` threads."""
        tokens = inputs[0].size
        times = self._sizes[tokens.bit_length()]
        threads = times.choose([count for count in self._runtimes if count <= most])
        began = self._clock()
        vectors = self._runtimes[threads].run(*inputs)
        times.note(threads, (self._clock() - began) / tokens)
        return vectors


class _Times:
    """The last times of each number of threads, in seconds for a token, for batches of about one size."""

    def __init__(self) -> None:
        self._last: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=TRIES))
        self._batches = 0

    def choose(self, counts: Sequence[int]) -> int:
        """Return which of these numbers of threads, in ascending order, computes the next batch."""
        untried = next((count for count in counts if len(self._last[count]) < TRIES), None)
        if untried is not None:
            return untried
        self._batches += 1
        turn, rest = divmod(self._batches, EVERY)
        if rest == 0:
            return counts[turn % len(counts)]
        usual = {count: median(self._last[count]) for count in counts}
        least = min(usual.values())
        return next(count for count in counts if usual[count] <= least * GAIN)

    def note(self, threads: int, seconds: float) -> None:
        """Add the time of a batch, for a token."""
        self._last[threads].append(seconds)
