"""Which of two tables decides the next batch, when a share of the batches is the second's.

Where a promise is kept at least cost by neither of two tables but by a mix of them, the mix is made without chance: what
the second table is owed adds up with each batch, and whenever it is a whole batch, it gets one (error diffusion). Of any
number of batches in a row, the second thus decides the share asked for to within one batch, where chance would be off by the
square root of their number; and the same run decides the same.
"""


class Mixing:
    """`second` says whether the next batch is the second table's; `cut` goes on to the one after."""

    __slots__ = ("_owed", "second")

    def __init__(self) -> None:
        self.second = False
        self._owed = 0.5  # of a batch: half, so that counts are rounded and not cut off

    def cut(self, share: float) -> None:
        """A batch was cut; of those that follow, `share` are the second table's, 0 to 1. It may change with every batch."""
        self._owed += share
        self.second = self._owed >= 1.0
        if self.second:
            self._owed -= 1.0
