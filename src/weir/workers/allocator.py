"""Which places in a range of bytes are taken: pure bookkeeping, no memory."""

from bisect import bisect_left, insort

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions want of an array


class Allocator:
    """Hands out places in a range of `size_bytes`, best fit first, lowest address among equals.

    Free neighbours are joined at once, so what was given back is always whole again. Each call costs two or three
    binary searches; low addresses are reused first, so memory that was never needed is never touched.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self.free_bytes = self.size_bytes
        self._taken: dict[int, int] = {}  # offset -> length
        self._lengths: dict[int, int] = {}  # free places: offset -> length
        self._offsets: dict[int, int] = {}  # free places: end -> offset
        self._sorted: list[tuple[int, int]] = []  # free places: (length, offset)
        if self.size_bytes:
            self._insert(0, self.size_bytes)

    def __len__(self) -> int:
        return len(self._taken)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a place of `size_bytes`, aligned to 64, or None when no free place is as long."""
        length = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        position = bisect_left(self._sorted, (length, 0))
        if position == len(self._sorted):
            return None
        found, offset = self._sorted.pop(position)
        del self._lengths[offset], self._offsets[offset + found]
        if found > length:
            self._insert(offset + length, found - length)
        self._taken[offset] = length
        self.free_bytes -= length
        return offset

    def free(self, offset: int) -> None:
        """Give the place at `offset` back. Raises KeyError when it is not taken; nothing is changed then."""
        length = self._taken.pop(offset)
        self.free_bytes += length
        following = self._lengths.get(offset + length)
        if following is not None:
            self._remove(offset + length, following)
            length += following
        before = self._offsets.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, length = before, length + offset - before
        self._insert(offset, length)

    def _insert(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        self._offsets[offset + length] = offset
        insort(self._sorted, (length, offset))

    def _remove(self, offset: int, length: int) -> None:
        del self._lengths[offset], self._offsets[offset + length]
        del self._sorted[bisect_left(self._sorted, (length, offset))]
