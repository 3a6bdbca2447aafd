"""Follow a row from its arrival until its own batch starts: how long it waits in line, by the size of that batch.

On its arrival the batch under way, if there is one, has a uniform rest; given that rest, the rows that came before and
behind the row are Poisson. At each decision the row has a place p in a line of m, and an age. If the table waits, the
line grows to the next length that is served, in an Erlang time; if the batch reaches the row's place, the row leaves with
it; else it moves up.

All lengths from some `steady` on are served with the same batch. A place beyond that moves up by the same, whoever comes
behind, so the number behind stays Poisson given the row's age, and only (place, age) need be kept. With most tables that
leaves nothing else: all rows of a shorter line leave with the next batch. Where some stay behind, leftovers.py follows
(length, place, age).
"""

from dataclasses import dataclass

import numpy as np

from weir.policy.ages import Grid, longer_services, poisson
from weir.policy.evaluation import QueueLaw
from weir.policy.profile import Floats, Profile
from weir.policy.residual_rows import ResidualRows
from weir.policy.table_shape import Rules
from weir.policy.tables import Table

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
    rules = Rules(table)
    services, idle = _met(profile, line)
    grid = _grid(profile, line, rules, cells) if span is None else Grid(span / cells, cells)
    waits = Waits(grid, np.zeros((profile.max_batch_size, cells)), np.zeros(profile.max_batch_size))
    if rules.leaves_none:
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
    profile: Profile, line: QueueLaw, services: list[Service], idle: Floats, grid: Grid, rules: Rules
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


def _grid(profile: Profile, line: QueueLaw, rules: Rules, cells: int) -> Grid:
    """Return cells that reach as far as all but a negligible share of the rows wait, with their own batch's time."""
    likely = line.law > _RARE
    used = np.unique(line.actions[(line.actions > 0) & likely]) - 1
    batches = 2.0 + int(np.flatnonzero(likely)[-1]) // rules.last
    cv = profile.cv[used]
    served = np.max(profile.service_time_ms[used] * (batches + 6.0 * cv * np.sqrt(batches) + 12.0 * cv**2))
    gap = int(np.max(rules.served_at - np.arange(rules.steady + 1)))
    waited = (gap + 7.0 * np.sqrt(gap) + 12.0) / line.rate_per_ms if gap > 1 else 0.0
    return Grid(float(served + waited) / cells, cells)


def _next_decision(services: list[Service], grid: Grid, rules: Rules, rate: float) -> Floats:
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


def _moved_up(profile: Profile, high: Floats, grid: Grid, rules: Rules) -> Floats:
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


def _lengths(low: Floats, grid: Grid, rules: Rules, rate: float) -> Floats:
    """Return the shares `low` [place, age] by the line's length: those behind are Poisson, given the age."""
    steady = rules.steady
    result = np.zeros((steady + 1, grid.count))
    behind = poisson(steady, rate * grid.middles)
    places = np.flatnonzero(low.sum(axis=1))
    for place in places:
        result[place:steady] += low[place] * behind[: steady - place]
    result[steady] = np.maximum(low.sum(axis=0) - result[:steady].sum(axis=0), 0.0)
    return result


def _leave(by_length: Floats, waits: Waits, rules: Rules, rate: float) -> None:
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


def _leave_idle(idle: Floats, waits: Waits, rules: Rules, rate: float) -> None:
    """Let the rows leave that find the worker waiting: with the batch that they complete, or after more have come."""
    for length in np.flatnonzero(idle).tolist():
        target = int(rules.served_at[length + 1])
        size = int(rules.batch[length + 1])
        gap = target - length - 1
        if length + 1 > size:
            continue  # it stays behind: see leftovers.py
        if gap:
            waits.later[size - 1] += idle[length] * waits.grid.erlangs(gap, rate)[-1]
        else:
            waits.at_once[size - 1] += idle[length]
