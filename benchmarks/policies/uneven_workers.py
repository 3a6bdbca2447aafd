"""One model on a fast and a slow worker, exactly: by uneven.c, which shares no code with the solver."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.policies.event_loop import compiled
from weir.policy.cost import Profile
from weir.policy.solve.uneven import STEPS, UnevenTable

Batches = NDArray[np.int32]

PRECISION = 1e-5


class Workers(NamedTuple):
    """The times of batches of 1, 2, ... rows on both workers, in whole steps; the arrivals per step; and the energy per step."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    rate: float
    energies: tuple[float, float] = (0.0, 0.0)

    @property
    def most(self) -> int:
        """How many rows wait at most; arrivals beyond are lost, which hardly ever happens."""
        return 5 * len(self.first)

    def profiles(self) -> tuple[Profile, Profile]:
        """Return the profiles, a step being a millisecond."""
        times = np.array([self.first, self.second], dtype=np.float64)
        made = [
            Profile(each, energy * each, np.zeros(len(each))) for each, energy in zip(times, self.energies, strict=True)
        ]
        return made[0], made[1]

    def best(self) -> float:
        """Return the least mean cost per row of any policy."""
        return self._solve(None)

    def cost_of(self, table: UnevenTable) -> float:
        """Return the mean cost per row of `table`."""
        return self._solve((self._by_step(table.first, 1), self._by_step(table.second, 0)))

    def greedy(self) -> float:
        """Return the mean cost per row of starting all that waits on any idle worker, the first one before the second."""
        rows = np.minimum(np.arange(self.most + 1), len(self.first))
        return self._solve((np.tile(rows, (max(self.second) + 1, 1)), np.tile(rows, (max(self.first) + 1, 1))))

    def _by_step(self, rows: NDArray[np.int64], other: int) -> NDArray[np.int64]:
        """Return the batches of a worker by the steps until the `other` one is free, and by rows waiting."""
        longest = max((self.first, self.second)[other])
        steps = np.minimum(np.maximum(np.rint(np.arange(longest + 1) / longest * STEPS[other]), 1), STEPS[other])
        steps[0] = 0
        waiting = np.minimum(np.arange(self.most + 1), rows.shape[1] - 1)
        found: NDArray[np.int64] = rows[steps.astype(np.int64)][:, waiting]
        return found

    def _solve(self, given: tuple[NDArray[np.int64], NDArray[np.int64]] | None) -> float:
        longest, slowest, largest = max(self.first), max(self.second), len(self.first)
        shapes = ((slowest + 1, self.most + 1), (longest + 1, self.most + 1))
        first, second = (
            np.zeros(shape, np.int32) if given is None else np.ascontiguousarray(given[place], np.int32)
            for place, shape in enumerate(shapes)
        )
        call = compiled(SOURCE).uneven
        call.restype = ctypes.c_double
        found: float = call(
            self.most, largest, longest, slowest, _ints(self.first), _ints(self.second), ctypes.c_double(self.rate),
            (ctypes.c_double * 2)(*self.energies), int(given is not None), first.ctypes.data_as(ctypes.c_void_p),
            second.ctypes.data_as(ctypes.c_void_p), ctypes.c_double(PRECISION),
        )  # fmt: skip
        return found


SOURCE = Path(__file__).with_name("uneven.c")


def _ints(times: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * (len(times) + 1))(0, *times)
