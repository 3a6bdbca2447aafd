"""The account of all processes of a server: each has a row of figures in shared memory, which it alone writes and all read.

So `max_connections` and `max_waiting_bytes` are those of the whole server. Processes that charge at the same instant may exceed a limit by what each of
them charges then.
"""

import array
import mmap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from weir.protocols.account import Account
from weir.protocols.settings import HttpSettings

# Places in a row, which fills a line of the CPU's cache.
_CONNECTIONS, _BYTES, _REFUSED, _CALLS, _FIELDS = 0, 1, 2, 3, 8
_WORD = 8  # bytes
T = TypeVar("T")


class SharedFigures:
    """Rows of numbers in shared memory, which has the descriptor `fd`: one for each of `count` processes."""

    def __init__(self, fd: int, count: int) -> None:
        self._memory: mmap.mmap | None = mmap.mmap(fd, table_bytes(count))
        self.count = count
        self._numbers: memoryview | array.array[int] = memoryview(self._memory).cast("q")

    def put(self, index: int, place: int, number: int) -> None:
        """Set a number in the row of a process."""
        self._numbers[index * _FIELDS + place] = number

    def total(self, place: int) -> int:
        """Return the sum of a column."""
        return sum(self._numbers[place::_FIELDS].tolist())

    def connections(self, index: int) -> int:
        """Return how many connections a process has."""
        return self._numbers[index * _FIELDS + _CONNECTIONS]

    def clear(self, index: int) -> None:
        """Note that a process has ended: it has no connections and no calls, and holds no bytes."""
        for place in (_CONNECTIONS, _BYTES, _CALLS):
            self.put(index, place, 0)

    def close(self) -> None:
        """Give the memory back. The numbers stay as they are, for this process alone. Idempotent."""
        if self._memory is not None and isinstance(self._numbers, memoryview):
            numbers, self._numbers = self._numbers, array.array("q", self._numbers.tolist())
            numbers.release()
            self._memory.close()
            self._memory = None


def table_bytes(count: int) -> int:
    """Return how many bytes of shared memory `count` processes need."""
    return count * _FIELDS * _WORD


class SharedAccount(Account):
    """The account of one process, whose limits are those of all. `index` is its row."""

    __slots__ = ("_figures", "_index")

    def __init__(self, settings: HttpSettings, figures: SharedFigures, index: int) -> None:
        super().__init__(settings)
        self._figures = figures
        self._index = index

    def take(self, size_bytes: int) -> None:
        """See Account."""
        total = self.total_bytes
        if total + size_bytes > self.max_bytes:
            raise self._refusal(size_bytes, total)
        self.held_bytes += size_bytes
        self._figures.put(self._index, _BYTES, self.held_bytes)

    def add(self, size_bytes: int) -> None:
        """See Account."""
        super().add(size_bytes)
        self._figures.put(self._index, _BYTES, self.held_bytes)
        self._pressed |= self.over

    def give(self, size_bytes: int) -> None:
        """See Account."""
        super().give(size_bytes)
        self._figures.put(self._index, _BYTES, self.held_bytes)

    def connection_set(self) -> set[Any]:
        """See Account."""
        return _Published(self.publish)

    def count_call(self, change: int) -> int:
        """See Account."""
        self._figures.put(self._index, _CALLS, super().count_call(change))
        return self._figures.total(_CALLS)

    @property
    def sharers(self) -> int:
        """See Account."""
        return self._figures.count

    @property
    def total_bytes(self) -> int:
        """See Account."""
        return self._figures.total(_BYTES) + self.reading_bytes

    @property
    def total_refused(self) -> int:
        """See Account."""
        self._figures.put(self._index, _REFUSED, self.refused)
        return self._figures.total(_REFUSED)

    @property
    def connections(self) -> int:
        """See Account."""
        self.publish()
        return self._figures.total(_CONNECTIONS)

    def publish(self) -> None:
        """Show the other processes what only `counters` know: they are asked, and notify nobody. A process does this once a second."""
        self._figures.put(self._index, _CONNECTIONS, sum([count() for count in self.counters]))
        self._figures.put(self._index, _REFUSED, self.refused)


class _Published(set[T]):
    """A set that reports when it has changed. Only `add` and `discard` change it."""

    def __init__(self, changed: Callable[[], None], members: Iterable[T] = ()) -> None:
        super().__init__(members)
        self._changed = changed

    def add(self, member: T, /) -> None:
        """Add a member."""
        super().add(member)
        self._changed()

    def discard(self, member: object, /) -> None:
        """Remove a member, if it is one."""
        super().discard(member)
        self._changed()
