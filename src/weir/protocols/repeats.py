"""Memory of the beginnings of requests that were seen before, so that only the first ones are parsed."""

from typing import Generic, TypeVar

Meaning = TypeVar("Meaning")

_MAX_HEAD_BYTES = 4 << 10


class HeadMemo(Generic[Meaning]):
    """A bounded cache from the exact bytes of a head to its meaning.

    A head is stored when it is offered for the second time, so that a head that contains a unique id costs only a hash. A full cache drops its oldest
    entry.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 1 << 20, max_seen: int = 4096) -> None:
        self._entries: dict[bytes, Meaning] = {}
        self._seen: set[int] = set()
        self._bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_seen = max_seen
        self.find = self._entries.get  # the hot path: one dictionary look-up without a Python call around it

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, head: bytes, meaning: Meaning) -> None:
        """Store `meaning` for `head` if this head has been offered before."""
        if len(head) > _MAX_HEAD_BYTES:
            return
        mark = hash(head)
        if mark not in self._seen:
            if len(self._seen) >= self._max_seen:
                self._seen.clear()
            self._seen.add(mark)
        elif head not in self._entries:
            self._insert(head, meaning)

    def _insert(self, head: bytes, meaning: Meaning) -> None:
        while self._entries and (len(self._entries) >= self._max_entries or self._bytes + len(head) > self._max_bytes):
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._bytes -= len(oldest)
        self._entries[head] = meaning
        self._bytes += len(head)

    def clear(self) -> None:
        """Drop all entries: the routes or the settings have changed."""
        self._entries.clear()
        self._seen.clear()
        self._bytes = 0
