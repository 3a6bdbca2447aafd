"""The last samples, written already: each is encoded once, whoever watches."""

from collections import deque
from itertools import islice

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
