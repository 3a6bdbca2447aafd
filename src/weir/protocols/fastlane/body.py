"""Where a large body is received: the kernel copies it there, and nobody copies it again."""

from typing import Any, Protocol

from weir.workers.executor import Block


class Account(Protocol):
    """Counts the bodies that are being received into ordinary memory."""

    buffered_bytes: int


class Place(Protocol):
    """Memory for one body."""

    @property
    def view(self) -> memoryview:
        """Exactly as long as the body."""

    def payload(self) -> Any:
        """Return the complete body as the payload of a request; the place is the request's then."""

    def give_up(self) -> None:
        """Free it: the body will not be completed."""


class BlockPlace:
    """A block of the arena; the body begins `lead` bytes after it."""

    __slots__ = ("_block", "view")

    def __init__(self, block: Block, size: int, lead: int = 0) -> None:
        self._block = block
        self.view = block.view[lead : lead + size]

    def payload(self) -> Block:
        """Return the block itself."""
        self.view.release()
        return self._block

    def give_up(self) -> None:
        """Release the block."""
        self.view.release()
        self._block.release()


class Buffer:
    """Ordinary memory, which is counted as long as it is in use."""

    __slots__ = ("_account", "_data", "view")

    def __init__(self, size: int, account: Account) -> None:
        self._data = bytearray(size)
        self._account = account
        self.view = memoryview(self._data)

    def payload(self) -> bytes:
        """Return the bytes."""
        payload = bytes(self._data)
        self.give_up()
        return payload

    def give_up(self) -> None:
        """Give the bytes back to the account."""
        self._account.buffered_bytes -= len(self._data)
        self.view.release()


class Reception:
    """A body that is arriving in `place`."""

    __slots__ = ("_at", "place")

    def __init__(self, place: Place, beginning: memoryview) -> None:
        self.place = place
        self._at = len(beginning)
        place.view[: self._at] = beginning

    def room(self) -> memoryview:
        """Return the part that has not arrived."""
        return self.place.view[self._at :]

    def received(self, size: int) -> bool:
        """Note that `size` bytes more have arrived; tell whether the body is complete."""
        self._at += size
        return self._at == len(self.place.view)
