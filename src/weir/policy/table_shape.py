"""A table as a row in line sees it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weir.policy.tables import Table, extended


@dataclass(frozen=True, eq=False)
class Rules:
    """A table as a row in line sees it."""

    table: Table

    @cached_property
    def last(self) -> int:
        """The batch from a long line."""
        return int(self.table[-1])

    @cached_property
    def steady(self) -> int:
        """The length from which on all lines are served with that batch."""
        others = np.flatnonzero(self.table != self.table[-1])
        return int(others[-1]) + 1 if len(others) else 0

    @cached_property
    def leaves_none(self) -> bool:
        """Whether every batch takes all rows, except from lines of `steady` and more."""
        return self.steady == self.last and bool((self.batch >= np.arange(self.steady + 1)).all())

    @cached_property
    def served_at(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the next length that is served."""
        lengths = np.arange(self.steady + 1)
        serving = np.where(extended(self.table, self.steady + 1) > 0, lengths, self.steady)
        return np.minimum.accumulate(serving[::-1])[::-1]

    @cached_property
    def batch(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the batch that is served next."""
        return extended(self.table, self.steady + 1)[self.served_at].astype(np.int64)
