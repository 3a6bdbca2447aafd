"""The distribution of the response time under a table, computed, not simulated.

A row waits in line until its own batch starts, and then for that batch's time. It is computed in cells of equal width how long
it waits; the shares that do not wait at all are kept apart, so that a quantile falls on the service time itself where it should.
"""

from dataclasses import dataclass
from math import ceil, inf, log

import numpy as np
from numpy.typing import NDArray

from reproduction.bounded import QueueLaw, queue_law
from weir.errors import SettingsError
from weir.policy.cost import Floats, Profile
from weir.policy.solve.bank import TableShape
from weir.policy.solve.smdp import is_stable
from weir.policy.solve.tables import Table, checked_table, decay

# Distributions of a time on a grid of cells: mass by cell, evenly spread within it.


@dataclass(frozen=True)
class Grid:
    """`count` cells of `width` ms from 0 on. What lies beyond the last is counted in it."""

    width: float
    count: int

    @property
    def edges(self) -> Floats:
        """Return the count + 1 edges of the cells."""
        return np.asarray(self.width * np.arange(self.count + 1), dtype=np.float64)

    @property
    def middles(self) -> Floats:
        """Return the middle of each cell."""
        return np.asarray(self.width * (np.arange(self.count) + 0.5), dtype=np.float64)

    def uniform(self, longest: Floats) -> Floats:
        """Return the masses of times uniform on 0 ... longest[i]; shape [i, count]."""
        below = np.minimum(self.edges / longest[:, None], 1.0)
        below[:, -1] = 1.0
        return np.diff(below, axis=1)

    def shifted(self, masses: Floats, by: float) -> Floats:
        """Return the masses of times that are longer by `by`."""
        whole, part = divmod(by / self.width, 1.0)
        start = min(int(whole), self.count - 1)
        padded = np.zeros((*masses.shape[:-1], self.count + start + 1))
        padded[..., start:-1] += (1.0 - part) * masses
        padded[..., start + 1 :] += part * masses
        return self._folded(padded)

    def added(self, masses: Floats, kernel: Floats) -> Floats:
        """Return the masses of the sum of two independent times, `kernel` in such cells too."""
        length = 2 * self.count
        product = np.fft.irfft(np.fft.rfft(masses, length) * np.fft.rfft(kernel, length), length)
        # Two uniform places within cells add up to a triangle over two cells: half in each.
        product = (product + np.roll(product, 1, axis=-1)) / 2.0
        return self._folded(np.maximum(product, 0.0))

    def erlangs(self, most: int, rate_per_ms: float) -> Floats:
        """Return the masses of the time in which i + 1 rows arrive, i = 0 ... most - 1; shape [most, count]."""
        below = 1.0 - np.cumsum(poisson(most - 1, rate_per_ms * self.edges), axis=0)
        below[:, -1] = 1.0
        return np.maximum(np.diff(below, axis=1), 0.0)

    @property
    def none(self) -> Floats:
        """Return the masses of a time of 0: half a cell more, on average."""
        first = np.zeros(self.count)
        first[0] = 1.0
        return first

    def with_service(self, masses: Floats, mean: float, cv: float) -> Floats:
        """Return the masses of times with that of a batch added, which is Gamma distributed, or fixed if cv is 0."""
        return self.shifted(masses, mean) if cv == 0.0 else self.added(masses, self.gamma(mean, cv))

    def gamma(self, mean: float, cv: float) -> Floats:
        """Return the masses of a Gamma distributed time."""
        from scipy.special import gammainc  # evaluating needs it, serving does not

        below = gammainc(1.0 / cv**2, self.edges / (mean * cv**2))
        below[-1] = 1.0
        return np.diff(below)

    def _folded(self, padded: Floats) -> Floats:
        kept = padded[..., : self.count].copy()
        kept[..., -1] += padded[..., self.count :].sum(axis=-1)
        return kept


def poisson(most: int, means: Floats) -> Floats:
    """Return P[N = k] for k = 0 ... most by row, for each of `means` by column."""
    counts = np.arange(most + 1)
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))
    with np.errstate(divide="ignore"):
        logs = np.log(means)
    with np.errstate(invalid="ignore"):
        table = np.exp(counts[:, None] * logs - means - factorials[:, None])
    table[:, means == 0.0] = (counts == 0)[:, None]
    return np.asarray(table, dtype=np.float64)


def longer_services(mean: float, cv: float) -> tuple[Floats, Floats]:
    """Return times and shares that stand for the service under way as an arriving row meets it, which is longer than most:
    Gauss's nodes for the length-biased Gamma distribution."""
    if cv == 0.0:
        return np.array([mean]), np.array([1.0])
    return _nodes(mean, cv, 1.0 / cv**2)


def services(mean: float, cv: float) -> tuple[Floats, Floats]:
    """Return times and shares that stand for those of all batches: Gauss's nodes for the Gamma distribution."""
    if cv == 0.0:
        return np.array([mean]), np.array([1.0])
    return _nodes(mean, cv, 1.0 / cv**2 - 1.0)


def _nodes(mean: float, cv: float, power: float) -> tuple[Floats, Floats]:
    """Return Gauss's nodes for the density x^power·e^-x (generalised Laguerre), in units of mean·cv²."""
    orders = np.arange(8 if cv <= 0.3 else 24)
    off = np.sqrt(orders[1:] * (orders[1:] + power))
    jacobi = np.diag(2.0 * orders + 1.0 + power) + np.diag(off, 1) + np.diag(off, -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return nodes * mean * cv**2, vectors[0] ** 2


# Follow the rows that a batch leaves behind while the line is short: by the line's length, their place and their age.
#
# Tables of stepped profiles do so: a batch of 16 where 20 wait. How many came behind then says which batch is next, so the
# length must be kept too. A place only ever falls, so one pass from the last place to the first is enough.


_RARE_ROWS = 1e-10


class ResidualRows:
    """Rows with places up to `steady`, given by place and age; `taken` are those who leave with the next batch, by length
    (up to `steady`, which stands for all above) and age."""

    def __init__(
        self, profile: Profile, arrivals: Floats, grid: Grid, rules: TableShape, longest: int, rate: float
    ) -> None:
        self._profile, self._arrivals, self._grid, self._rules = profile, arrivals, grid, rules
        self._longest, self._rate = longest, rate
        self._behind = poisson(longest, rate * grid.middles)
        gaps = rules.served_at - np.arange(rules.steady + 1)
        self._erlangs = grid.erlangs(max(1, int(gaps.max())), rate)
        self._staying: dict[int, Floats] = {}
        self.taken = np.zeros((rules.steady + 1, grid.count))

    def add(self, place: int, ages: Floats) -> None:
        """Add rows of that place and those ages: those behind them are Poisson, given the age."""
        if ages.sum() > _RARE_ROWS:
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
            met = staying.sum(axis=1) > _RARE_ROWS / 100.0
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
        for length in np.flatnonzero(by_length.sum(axis=1) > _RARE_ROWS / 100.0).tolist():
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


# Follow a row from its arrival until its own batch starts: how long it waits in line, by the size of that batch.
#
# On its arrival the batch under way, if there is one, has a uniform rest; given that rest, the rows that came before and
# behind the row are Poisson. At each decision the row has a place p in a line of m, and an age. If the table waits, the
# line grows to the next length that is served, in an Erlang time; if the batch reaches the row's place, the row leaves with
# it; else it moves up.
#
# All lengths from some `steady` on are served with the same batch. A place beyond that moves up by the same, whoever comes
# behind, so the number behind stays Poisson given the row's age, and only (place, age) need be kept. With most tables that
# leaves nothing else: all rows of a shorter line leave with the next batch. Where some stay behind, ResidualRows follows
# (length, place, age).


_RARE = 1e-9  # a share of the rows not worth following


@dataclass(frozen=True, eq=False)
class Waits:
    """How long rows wait until their own batch starts: shares by the batch's size and by cell of `grid`, and the shares,
    by size, of those who do not wait at all."""

    grid: Grid
    later: Floats
    at_once: Floats


@dataclass(frozen=True, eq=False)
class Service:
    """A kind of batch that rows meet under way when they arrive: it takes `time` ms in all, and the share of rows that
    meet it with r rows left in line is `met[r]`."""

    size: int
    time: float
    met: Floats


def follow(profile: Profile, line: QueueLaw, table: Table, cells: int, span: float | None = None) -> Waits:
    """Return how long rows wait until their own batch starts, in so many cells; they reach as far as `span` ms, or as can be
    told from the line's law."""
    rules = TableShape(table)
    services, idle = _met(profile, line)
    grid = _grid(profile, line, rules, cells) if span is None else Grid(span / cells, cells)
    waits = Waits(grid, np.zeros((profile.max_batch_size, cells)), np.zeros(profile.max_batch_size))
    if _leaves_none(rules):
        by_length = _next_decision(services, grid, rules, line.rate_per_ms)
        high = _places(services, grid, rules.steady + 1, line.rate_per_ms)
        by_length[-1] = np.maximum(by_length[-1] - high.sum(axis=0), 0.0)
        by_length += _lengths(_moved_up(profile, high, grid, rules), grid, rules, line.rate_per_ms)
    else:
        by_length = _with_leftovers(profile, line, services, idle, grid, rules)
    _leave(by_length, waits, rules, line.rate_per_ms)
    _leave_idle(idle, waits, rules, line.rate_per_ms)
    return waits


def _with_leftovers(
    profile: Profile, line: QueueLaw, services: list[Service], idle: Floats, grid: Grid, rules: TableShape
) -> Floats:
    """Return what `_next_decision` and those who move up come to, where batches leave some rows behind."""
    longest = int(np.flatnonzero(line.law > _RARE)[-1]) + profile.max_batch_size
    rest = ResidualRows(profile, line.arrivals, grid, rules, max(longest, rules.steady + 1), line.rate_per_ms)
    places = _places(services, grid, 0, line.rate_per_ms)
    low = _moved_up(profile, places[rules.steady + 1 :], grid, rules)
    near = places[: rules.steady + 1]
    low[: len(near)] += near
    for place in range(1, rules.steady + 1):
        rest.add(place, low[place])
    for length in np.flatnonzero(idle).tolist():
        if length + 1 > rules.batch[length + 1]:
            rest.add_idle(float(idle[length]), length + 1)
    rest.run()
    return rest.taken


def _met(profile: Profile, line: QueueLaw) -> tuple[list[Service], Floats]:
    """Return what batches rows meet under way, and the shares of rows that find the worker waiting, by the line's length
    without them."""
    rate, serves = line.rate_per_ms, line.actions > 0
    spent = line.law * np.where(serves, profile.service_time_ms[line.actions - 1], 1.0 / rate)
    shares = spent / spent.sum()
    services = []
    for size in np.unique(line.actions[serves & (shares > _RARE)]).tolist():
        states = np.flatnonzero(line.actions == size)
        left = line.rows[states] - size
        met = np.bincount(left, weights=shares[states])
        mean, cv = float(profile.service_time_ms[size - 1]), float(profile.cv[size - 1])
        services += [Service(size, time, met * part) for time, part in zip(*longer_services(mean, cv), strict=True)]
    return services, np.where(serves, 0.0, shares)


def _grid(profile: Profile, line: QueueLaw, rules: TableShape, cells: int) -> Grid:
    """Return cells that reach as far as all but a negligible share of the rows wait, with their own batch's time."""
    likely = line.law > _RARE
    used = np.unique(line.actions[(line.actions > 0) & likely]) - 1
    batches = 2.0 + int(np.flatnonzero(likely)[-1]) // rules.last
    cv = profile.cv[used]
    served = np.max(profile.service_time_ms[used] * (batches + 6.0 * cv * np.sqrt(batches) + 12.0 * cv**2))
    gap = int(np.max(rules.served_at - np.arange(rules.steady + 1)))
    waited = (gap + 7.0 * np.sqrt(gap) + 12.0) / line.rate_per_ms if gap > 1 else 0.0
    return Grid(float(served + waited) / cells, cells)


def _next_decision(services: list[Service], grid: Grid, rules: TableShape, rate: float) -> Floats:
    """Return the shares of rows by the line's length at the first decision after their arrival (the last entry stands for
    `steady` and more), and their ages then, for those who met a batch. How many came is independent of when the row did."""
    steady = rules.steady
    times = np.array([service.time for service in services])
    come = poisson(steady, rate * times)  # others who come during the batch
    by_service = np.zeros((steady + 1, len(services)))
    for index, service in enumerate(services):
        for left in np.flatnonzero(service.met[:steady]):
            by_service[left + 1 : steady, index] += service.met[left] * come[: steady - left - 1, index]
        by_service[steady, index] = max(0.0, service.met.sum() - by_service[:steady, index].sum())
    result: Floats = by_service @ grid.uniform(times)
    return result


def _places(services: list[Service], grid: Grid, first: int, rate: float) -> Floats:
    """Return the shares of rows with place `first` + i at the first decision, and their ages, if they met a batch."""
    parts = []
    for service in services:
        mean = rate * service.time
        came = int(mean + 7.0 * np.sqrt(mean) + 12.0)
        if len(service.met) + came < first:
            continue
        columns = min(grid.count, int(service.time / grid.width) + 1)
        before = poisson(came, rate * np.maximum(service.time - grid.middles[:columns], 0.0))
        before *= grid.uniform(np.array([service.time]))[:, :columns]
        places = _placed(service.met, before)[first:]
        kept = np.flatnonzero(places.sum(axis=1) > _RARE)
        if len(kept):
            parts.append(places[: int(kept[-1]) + 1])
    result = np.zeros((max((len(part) for part in parts), default=0), grid.count))
    for part in parts:
        result[: len(part), : part.shape[1]] += part
    return result


def _placed(met: Floats, before: Floats) -> Floats:
    """Return the ages by place: 1 + the rows left in line + those who came before."""
    size = len(met) + len(before)
    if np.count_nonzero(met) == 1:
        result = np.zeros((size, before.shape[1]))
        left = int(np.argmax(met))
        result[left + 1 : left + 1 + len(before)] = met[left] * before
        return result
    spectrum = np.fft.rfft(before, size, axis=0) * np.fft.rfft(met, size)[:, None]
    placed: Floats = np.fft.irfft(spectrum, size, axis=0)
    return np.maximum(np.roll(placed, 1, axis=0), 0.0)


def _moved_up(profile: Profile, high: Floats, grid: Grid, rules: TableShape) -> Floats:
    """Return the shares of rows with place i = 0 ... steady, once those beyond have moved up, and their ages.

    Those farthest back are moved first, and on with those they then stand among.
    """
    steady, last = rules.steady, rules.last
    mean, cv = float(profile.service_time_ms[last - 1]), float(profile.cv[last - 1])
    low = np.zeros((steady + 1, grid.count))
    moved = np.zeros((last, grid.count))
    for start in range((len(high) - 1) // last * last, -1, -last):
        part = high[start : start + last]
        moved[: len(part)] += part
        moved = grid.with_service(moved, mean, cv)
    low[steady + 1 - last :] = moved
    return low


def _lengths(low: Floats, grid: Grid, rules: TableShape, rate: float) -> Floats:
    """Return the shares `low` [place, age] by the line's length: those behind are Poisson, given the age."""
    steady = rules.steady
    result = np.zeros((steady + 1, grid.count))
    behind = poisson(steady, rate * grid.middles)
    places = np.flatnonzero(low.sum(axis=1))
    for place in places:
        result[place:steady] += low[place] * behind[: steady - place]
    result[steady] = np.maximum(low.sum(axis=0) - result[:steady].sum(axis=0), 0.0)
    return result


def _leave(by_length: Floats, waits: Waits, rules: TableShape, rate: float) -> None:
    """Let all rows, given by the line's length and age, leave with the next batch, which they wait for if need be."""
    gaps = rules.served_at - np.arange(rules.steady + 1)
    for length in range(1, rules.steady + 1):
        if not gaps[length]:
            waits.later[rules.batch[length] - 1] += by_length[length]
    waiting = np.flatnonzero((gaps > 0) & (by_length.sum(axis=1) > _RARE))
    if not len(waiting):
        return
    erlangs = waits.grid.erlangs(int(gaps.max()), rate)
    for target in np.unique(rules.served_at[waiting]):
        some = waiting[rules.served_at[waiting] == target]
        added = waits.grid.added(by_length[some], erlangs[gaps[some] - 1])
        waits.later[rules.batch[target] - 1] += added.sum(axis=0)


def _leave_idle(idle: Floats, waits: Waits, rules: TableShape, rate: float) -> None:
    """Let the rows leave that find the worker waiting: with the batch that they complete, or after more have come."""
    for length in np.flatnonzero(idle).tolist():
        target = int(rules.served_at[length + 1])
        size = int(rules.batch[length + 1])
        gap = target - length - 1
        if length + 1 > size:
            continue  # it stays behind: see ResidualRows
        if gap:
            waits.later[size - 1] += idle[length] * waits.grid.erlangs(gap, rate)[-1]
        else:
            waits.at_once[size - 1] += idle[length]


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


def _leaves_none(rules: TableShape) -> bool:
    """Say whether every batch takes all rows, except from queues of `steady` and more."""
    return rules.steady == rules.last and bool((rules.batch >= np.arange(rules.steady + 1)).all())


_TAIL = 1e-14  # about the share of the decisions that may lie beyond the states that are looked at


def line_of(profile: Profile, rate: float, table: Table) -> QueueLaw:
    """Return the stationary law of a line under a stable table, over as many states as matter."""
    size = _enough_states(profile, rate / 1000.0, table)
    return queue_law(profile, rate / 1000.0, table, np.minimum(np.arange(size + 2), size))


def _enough_states(profile: Profile, rate_per_ms: float, table: Table) -> int:
    size = int(table[-1])
    fall = log(decay(profile, rate_per_ms, size))
    return len(table) + profile.max_batch_size + ceil(-log(_TAIL) / fall)
