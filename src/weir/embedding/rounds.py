"""Which sizes of batches are to be measured, and how often, to know how long they take on a machine that does other things too.

Sizes take turns, so that what goes on beside them for a second makes none of them alone look slow. What else a machine does only adds to a
time: so the least one counts, and it is believed once another one is close to it.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from weir.embedding.budget import MAX_ROWS, SERVER_SECONDS, Timed

MOST_TOKENS = 32_768  # in a batch
LONGEST_SECONDS = 0.15  # a size that takes longer is the last of its length
CLEARLY_WORSE = 0.85  # of the best throughput: after two sizes below that, larger ones are not tried
LEAST_TIMES, MOST_TIMES = 4, 6  # a size is measured
TWICE = 2  # what takes long is measured, and everything after so many seconds in all
MOST_SECONDS = 10.0
CLOSE = 0.1  # the two least times of a size, as a share of the least, or by what a batch costs the server: less does not matter
DOUBTED = 0.25  # of the sizes may have no two times that are close


class Size(NamedTuple):
    """So many texts, of which `shorter` have a quarter of the length."""

    rows: int
    length: int
    shorter: int = 0

    @property
    def lengths(self) -> list[int]:
        """The length of each text."""
        return [self.length] * (self.rows - self.shorter) + [max(1, self.length // 4)] * self.shorter

    @property
    def padding(self) -> int:
        """The padding in a rectangle of them, in tokens."""
        return self.rows * self.length - sum(self.lengths)


class Rounds:
    """Batches of 1, 2, 4 ... texts of each length, as far as they get faster; with `mixed` also one for each length of which most texts are shorter."""

    def __init__(self, lengths: Sequence[int], *, mixed: bool) -> None:
        self._lengths = lengths
        self._mixed = mixed
        self._times: defaultdict[Size, list[float]] = defaultdict(list)
        self._spent = 0.0

    def note(self, size: Size, seconds: float) -> None:
        """A batch of this size has taken so long."""
        self._times[size] = sorted([*self._times[size], max(seconds, 1e-9)])
        self._spent += seconds

    def due(self) -> list[Size]:
        """Return the sizes of the next round; none if all is known that will be."""
        return [size for length in self._lengths for size in self._wanted(length) if self._is_due(size)]

    @property
    def agree(self) -> bool:
        """Whether what was measured can be believed."""
        sizes = self._sizes()
        return sum(not self._is_close(size) for size in sizes) <= DOUBTED * len(sizes)

    @property
    def share(self) -> float:
        """How much of it is done, as far as one can tell."""
        times = [len(self._times[size]) for length in self._lengths for size in self._wanted(length)]
        return sum(min(count, LEAST_TIMES) for count in times) / (
            LEAST_TIMES * len(self._lengths) * (MAX_ROWS.bit_length() + 1)
        )

    def timed(self) -> list[Timed]:
        """Return the least time of each size."""
        return [Timed(size.rows, size.length, self._times[size][0], size.padding) for size in self._sizes()]

    def _sizes(self) -> list[Size]:
        return [size for length in self._lengths for size in self._wanted(length) if self._times[size]]

    def _is_due(self, size: Size) -> bool:
        times = self._times[size]
        if len(times) < TWICE:
            return True
        if self._spent >= MOST_SECONDS:
            return False
        if len(times) < LEAST_TIMES and times[0] < LONGEST_SECONDS:
            return True
        return len(times) < MOST_TIMES and not self._is_close(size)

    def _is_close(self, size: Size) -> bool:
        least, second = self._times[size][:2]
        return second - least <= max(CLOSE * least, SERVER_SECONDS)

    def _wanted(self, length: int) -> list[Size]:
        """Return the sizes of this length that are worth knowing, by what is known; the last may be new."""
        found: list[Size] = []
        best, worse, rows = 0.0, 0, 1
        while worse < 2 and rows <= MAX_ROWS and rows * length <= max(MOST_TOKENS, length):
            size = Size(rows, length)
            found.append(size)
            if not self._times[size]:
                return found
            least = self._times[size][0]
            if least >= LONGEST_SECONDS:
                break
            worse = worse + 1 if rows * length / least < CLEARLY_WORSE * best else 0
            best = max(best, rows * length / least)
            rows *= 2
        if self._mixed:
            most = max(2, found[-1].rows)
            found.append(Size(most, length, most - max(1, most // 8)))
        return found
