"""Follow the rows that a batch leaves behind while the line is short: by the line's length, their place and their age.

Tables of stepped profiles do so: a batch of 16 where 20 wait. How many came behind then says which batch is next, so the
length must be kept too. A place only ever falls, so one pass from the last place to the first is enough.
"""

import numpy as np
from numpy.typing import NDArray

from weir.policy.ages import Grid, poisson, services
from weir.policy.profile import Floats, Profile
from weir.policy.table_shape import Rules

_RARE = 1e-10


class ResidualRows:
    """Rows with places up to `steady`, given by place and age; `taken` are those who leave with the next batch, by length
    (up to `steady`, which stands for all above) and age."""

    def __init__(self, profile: Profile, arrivals: Floats, grid: Grid, rules: Rules, longest: int, rate: float) -> None:
        self._profile, self._arrivals, self._grid, self._rules = profile, arrivals, grid, rules
        self._longest, self._rate = longest, rate
        self._behind = poisson(longest, rate * grid.middles)
        gaps = rules.served_at - np.arange(rules.steady + 1)
        self._erlangs = grid.erlangs(max(1, int(gaps.max())), rate)
        self._staying: dict[int, Floats] = {}
        self.taken = np.zeros((rules.steady + 1, grid.count))

    def add(self, place: int, ages: Floats) -> None:
        """Add rows of that place and those ages: those behind them are Poisson, given the age."""
        if ages.sum() > _RARE:
            room = self._longest - place
            by_length = np.zeros((self._longest + 1, self._grid.count))
            by_length[place:] = ages * self._behind[: room + 1]
            by_length[-1] += np.maximum(ages - by_length.sum(axis=0), 0.0)
            self._decide(place, by_length)

    def add_idle(self, share: float, length: int) -> None:
        """Add the rows that find the worker waiting and are the last of that many, and stay behind all the same."""
        target = int(self._rules.served_at[length])
        if target > length:
            self._keep(length, target, share * self._erlangs[target - length - 1])
        else:
            size = int(self._rules.batch[length])
            ages = share * self._grid.none[None, :]
            self._serve(length, size, np.array([length]), ages, self._grid.width / 2.0)

    def run(self) -> None:
        """Let all that stay behind move up until a batch takes them."""
        for place in range(self._rules.steady, 0, -1):
            staying = self._staying.pop(place, None)
            if staying is None:
                continue
            sizes = self._rules.batch[np.minimum(np.arange(self._longest + 1), self._rules.steady)]
            met = staying.sum(axis=1) > _RARE / 100.0
            for size in np.unique(sizes[met]).tolist():
                lengths = np.flatnonzero(met & (sizes == size))
                self._serve(place, size, lengths, staying[lengths])

    def _serve(self, place: int, size: int, lengths: NDArray[np.int64], ages: Floats, spent: float = 0.0) -> None:
        """Let a batch of `size` leave those at `place` behind, whose ages are those given by length before it, less `spent`. The
        longer it takes, the more rows come."""
        mean, cv = float(self._profile.service_time_ms[size - 1]), float(self._profile.cv[size - 1])
        by_length = np.zeros((self._longest + 1, self._grid.count))
        for time, share in zip(*services(mean, cv), strict=True):
            come = poisson(self._arrivals.shape[1] - 1, np.array([self._rate * time]))[:, 0]
            law = np.zeros((self._longest + 1, len(lengths)))
            for column, length in enumerate(lengths.tolist()):
                start = length - size
                kept = min(len(come), self._longest - start)
                law[start : start + kept, column] = come[:kept]
                law[-1, column] += max(0.0, 1.0 - float(come[:kept].sum()))
            by_length += share * (law @ self._grid.shifted(ages, max(0.0, time - spent)))
        self._decide(place - size, by_length)

    def _decide(self, place: int, by_length: Floats) -> None:
        """Take those whom the next batch reaches, and keep the others, who wait for it first if need be."""
        rules = self._rules
        for length in np.flatnonzero(by_length.sum(axis=1) > _RARE / 100.0).tolist():
            index = min(length, rules.steady)
            gap, ages = int(rules.served_at[index]) - index, by_length[length]
            if place <= rules.batch[index]:
                self.taken[index] += ages
            else:
                self._keep(place, length + gap, self._grid.added(ages, self._erlangs[gap - 1]) if gap else ages)

    def _keep(self, place: int, length: int, ages: Floats) -> None:
        if place not in self._staying:
            self._staying[place] = np.zeros((self._longest + 1, self._grid.count))
        self._staying[place][length] += ages
