"""The distribution of the response time under a table, computed, not simulated.

A row waits in line until its own batch starts, and then for that batch's time. following.py computes how long it waits, in
cells of equal width; the shares that do not wait at all are kept apart, so that a quantile falls on the service time
itself where it should.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from weir.errors import SettingsError
from weir.policy.ages import Grid
from weir.policy.evaluation import QueueLaw, is_stable, line_of
from weir.policy.following import follow
from weir.policy.profile import Floats, Profile
from weir.policy.tables import Table, checked_table

CELLS = 512
_BEYOND = 1e-6  # a share of the rows that may take longer than the cells reach


@dataclass(frozen=True, eq=False)
class ResponseTime:
    """How long rows take from arrival to answer; see `response_time`.

    `masses` are shares of the rows by cell of `grid`, `at_once` shares by batch size of those who wait for nothing but
    their own batch. A table that does not serve as fast as rows arrive has neither: every time is infinite.
    """

    profile: Profile
    grid: Grid
    masses: Floats
    at_once: Floats
    stable: bool = True

    @property
    def mean_ms(self) -> float:
        """Return the mean; that of `evaluate` is exact, this one shows how fine the cells are."""
        if not self.stable:
            return inf
        waiting = float(self.masses @ self.grid.middles)
        return waiting + float(self.at_once @ self.profile.service_time_ms) + self.profile.latency_offset_ms

    def beyond(self, deadline_ms: float) -> float:
        """Return the share of rows that take longer than `deadline_ms`."""
        if not self.stable:
            return 1.0
        time = deadline_ms - self.profile.latency_offset_ms
        if time < 0.0:
            return 1.0
        later = float(np.interp(time, self.grid.edges, self._above_edges()))
        some = np.flatnonzero(self.at_once)
        return later + float(sum(self.at_once[i] * self._longer(int(i), time) for i in some))

    def quantile_ms(self, share: float) -> float:
        """Return the time within which that share of the rows is answered. Raises SettingsError unless 0 < share < 1."""
        if not 0.0 < share < 1.0:
            raise SettingsError(f"share={share!r}: must be between 0 and 1")
        if not self.stable:
            return inf
        low, high = 0.0, float(self.grid.edges[-1]) + self.profile.latency_offset_ms
        for _ in range(50):
            middle = (low + high) / 2.0
            low, high = (low, middle) if self.beyond(middle) <= 1.0 - share else (middle, high)
        return high

    def _above_edges(self) -> Floats:
        return np.concatenate((np.cumsum(self.masses[::-1])[::-1], [0.0]))

    def _longer(self, index: int, time: float) -> float:
        """Return the share of batches of index + 1 rows that take longer than `time`."""
        mean, cv = float(self.profile.service_time_ms[index]), float(self.profile.cv[index])
        if cv == 0.0:
            return float(time < mean)
        from scipy.special import gammaincc

        return float(gammaincc(1.0 / cv**2, time / (mean * cv**2)))


def response_time(profile: Profile, rate: float, table: Table, *, cells: int = CELLS) -> ResponseTime:
    """Return the distribution of the response time under `table` at `rate` rows per second, Poisson, one worker, first
    come first served. The more `cells`, the finer.

    Raises SettingsError naming the entry of a table that cannot be, or the rate.
    """
    if not (np.isfinite(rate) and rate > 0.0):
        raise SettingsError(f"rate={rate!r}: must be a number of rows per second, greater than 0")
    table = checked_table(table, profile.max_batch_size)
    none = np.zeros(profile.max_batch_size)
    if not is_stable(profile, rate, table):
        return ResponseTime(profile, Grid(1.0, 1), np.zeros(1), none, stable=False)
    return response_of(profile, line_of(profile, rate, table), table, cells=cells)


def response_of(profile: Profile, line: QueueLaw, table: Table, *, cells: int = CELLS) -> ResponseTime:
    """Return the distribution of the response time under `table`, from the law of the line under it."""
    found = _on_grid(profile, line, table, cells, None)
    while found.masses[-1] > _BEYOND:  # the last cell has all that is longer
        found = _on_grid(profile, line, table, cells, 2.0 * float(found.grid.edges[-1]))
    above = np.cumsum(found.masses[::-1])[::-1]
    reached = int(np.count_nonzero(above > _BEYOND)) + 1
    if reached < cells // 2:
        found = _on_grid(profile, line, table, cells, 1.05 * found.grid.width * reached)
    return found


def _on_grid(profile: Profile, line: QueueLaw, table: Table, cells: int, span: float | None) -> ResponseTime:
    waits = follow(profile, line, table, cells, span)
    masses = np.zeros(cells)
    for index in np.flatnonzero(waits.later.sum(axis=1)):
        masses += _served(profile, waits.grid, waits.later[index], int(index))
    return ResponseTime(profile, waits.grid, masses, waits.at_once)


def _served(profile: Profile, grid: Grid, masses: Floats, index: int) -> Floats:
    """Return `masses` of times with that of a batch of index + 1 rows added."""
    return grid.with_service(masses, float(profile.service_time_ms[index]), float(profile.cv[index]))
