"""Which places in a range of bytes are taken: pure bookkeeping, no memory."""

from bisect import bisect_left, insort

_RUN = 4  # places of the same length that there shall be room for where a run begins

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions want of an array


class Allocator:
    """Hands out places in a range of `size_bytes`: after the last one, or else best fit first, lowest address among equals.

    Places that are asked for one after the other lie one after the other, so that what belongs together need not be brought
    together (adjoining.py). No such run goes further than twice what is taken: low addresses are reused soon, while they
    are still in caches, and memory that was never needed is never touched. Free neighbours are joined at once, so what was
    given back is always whole again. Each call costs two or three binary searches.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self.free_bytes = self.size_bytes
        self._taken: dict[int, int] = {}  # offset -> length
        self._lengths: dict[int, int] = {}  # free places: offset -> length
        self._offsets: dict[int, int] = {}  # free places: end -> offset
        self._sorted: list[tuple[int, int]] = []  # free places: (length, offset)
        self._end = 0  # of the place handed out last
        if self.size_bytes:
            self._insert(0, self.size_bytes)

    def __len__(self) -> int:
        return len(self._taken)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a place of `size_bytes`, aligned to 64, or None when no free place is as long."""
        length = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        offset = self._following(length)
        if offset is None:
            offset = self._fitting(_RUN * length)
        if offset is None:
            offset = self._fitting(length)
        if offset is None:
            return None
        found = self._lengths[offset]
        self._remove(offset, found)
        if found > length:
            self._insert(offset + length, found - length)
        self._taken[offset] = length
        self.free_bytes -= length
        self._end = offset + length
        return offset

    def _following(self, length: int) -> int | None:
        """Return the end of the last place if there is room after it, and it is not too far away."""
        taken_bytes = self.size_bytes - self.free_bytes
        end = self._end
        return end if end <= 2 * taken_bytes and self._lengths.get(end, 0) >= length else None

    def _fitting(self, length: int) -> int | None:
        """Return the free place that fits best; None if none is as long."""
        position = bisect_left(self._sorted, (length, 0))
        return None if position == len(self._sorted) else self._sorted[position][1]

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
