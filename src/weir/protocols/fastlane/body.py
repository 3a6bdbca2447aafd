"""Where a large body is received: in shared memory, where nobody copies it again, or, without that, in ordinary memory.

A client that announces much and sends little must not keep others out. So ordinary memory is taken as the bytes come, and
charged to the server's account; and a body in shared memory that has hardly begun to arrive can be moved to ordinary
memory, for one that needs its place.
"""

from typing import Any, Protocol

from weir.protocols.account import Account, Claim
from weir.workers.executor import Block

# Ordinary memory is taken in pieces: of this many bytes at first, then of as many as have arrived.
_FIRST_PIECE_BYTES = 64 << 10


class Place(Protocol):
    """Memory for one body, which fills up."""

    @property
    def arrived(self) -> int:
        """How many bytes of the body have come."""

    @property
    def claim(self) -> Claim | None:
        """What the body holds of the account; None where it is not charged."""

    def room(self) -> memoryview:
        """Return where the next bytes go."""

    def received(self, size: int) -> bool:
        """Note that so many bytes have come there; tell whether the body is complete. Raises Overloaded where there is no room for
        more."""

    def payload(self) -> Any:
        """Return the complete body as the payload of a request; the place, and the claim, are the request's then."""

    def give_up(self) -> None:
        """Free it: the body will not be completed."""


class BlockPlace:
    """A block of the arena; the body begins `lead` bytes after it. The arena has its own bound: it is not charged."""

    __slots__ = ("_block", "_view", "arrived")

    claim = None

    def __init__(self, block: Block, size: int, lead: int = 0) -> None:
        self._block = block
        self._view = block.view[lead : lead + size]
        self.arrived = 0

    def room(self) -> memoryview:
        """Return the part that has not arrived."""
        return self._view[self.arrived :]

    def received(self, size: int) -> bool:
        """See Place."""
        self.arrived += size
        return self.arrived == len(self._view)

    def payload(self) -> Block:
        """Return the block itself."""
        self._view.release()
        return self._block

    def moved(self, account: Account) -> "Buffer":
        """Return ordinary memory with what has come, and free the block. Raises Overloaded; nothing has changed then."""
        buffer = Buffer(len(self._view), account)
        with self._view[: self.arrived] as come:
            fill(buffer, come)
        self.give_up()
        return buffer

    def give_up(self) -> None:
        """Release the block."""
        self._view.release()
        self._block.release()


class Buffer:
    """Ordinary memory, as much as has arrived or twice that. Raises Overloaded, also when more arrives, where the account has no room."""

    __slots__ = ("_at", "_pieces", "_size", "arrived", "claim")

    def __init__(self, size: int, account: Account) -> None:
        self.arrived = 0
        self.claim = account.claim()
        self._size = size
        self._pieces: list[bytearray] = []
        self._at = 0  # where the last piece goes on
        self._grow()

    def _grow(self) -> None:
        size = min(max(_FIRST_PIECE_BYTES, self.arrived), self._size - self.arrived)
        self.claim.take(size)
        self._pieces.append(bytearray(size))
        self._at = 0

    def room(self) -> memoryview:
        """Return the rest of the last piece."""
        return memoryview(self._pieces[-1])[self._at :]

    def received(self, size: int) -> bool:
        """See Place."""
        self.arrived += size
        self._at += size
        if self.arrived == self._size:
            return True
        if self._at == len(self._pieces[-1]):
            self._grow()
        return False

    def payload(self) -> bytes:
        """Return the bytes."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def give_up(self) -> None:
        """Give the bytes back to the account."""
        self._pieces.clear()
        self.claim.close()


def fill(place: Place, data: memoryview) -> bool:
    """Put `data`, which has come elsewhere, into `place`; tell whether the body is complete. Raises what Place.received raises."""
    complete = False
    while len(data):
        room = place.room()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        room.release()
        complete = place.received(size)
        data = data[size:]
    return complete
