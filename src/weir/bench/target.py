"""What is measured: something that takes requests."""

from typing import Protocol

from weir.bench.batches import Counts
from weir.bench.ledger import Ledger


class Target(Protocol):
    """All methods are called from one event loop. `send` notes in the ledger of the round when the request left and, once
    it is so, how it ended; every request has an end, at the latest when `give_up` has been called for long enough."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    @property
    def connections(self) -> int | None:
        """How many connections were open at most; None where there are none."""

    @property
    def held(self) -> int:
        """How many requests had to wait for a connection, because no more were allowed."""

    async def open(self) -> None:
        """Get ready, and make sure that requests are answered. Raises SettingsError, in one line."""

    async def start_round(self, ledger: Ledger) -> None:
        """Get ready for a round, whose books are `ledger`."""

    def send(self, index: int) -> None:
        """Send the request `index` of the round."""

    def give_up(self) -> None:
        """End what has been under way for too long. Called some twenty times a second."""

    async def counts(self) -> Counts | None:
        """Return what has been counted so far; None if it cannot be known."""

    async def close(self) -> None:
        """Leave nothing open. Idempotent."""
