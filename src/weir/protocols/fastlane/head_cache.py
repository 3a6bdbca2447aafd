"""What heads mean, for heads that come again byte by byte: most clients send the same few over and over."""

from typing import Generic, TypeVar

Meaning = TypeVar("Meaning")

_MAX_HEAD_BYTES = 4 << 10


class HeadMemo(Generic[Meaning]):
    """A bounded memory from the exact bytes of a head to its meaning.

    A head is taken in when it is offered a second time, so that heads with a unique id in them cost nothing but a
    hash each. When it is full, the oldest goes.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 1 << 20, max_seen: int = 4096) -> None:
        self._entries: dict[bytes, Meaning] = {}
        self._seen: set[int] = set()
        self._bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_seen = max_seen
        self.find = self._entries.get  # the hot path: one dictionary look-up, no call of ours in between

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, head: bytes, meaning: Meaning) -> None:
        """Remember that `head` means `meaning`, if it has been offered before."""
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
        """Forget everything: the routes or the settings have changed."""
        self._entries.clear()
        self._seen.clear()
        self._bytes = 0
