"""Measures a model: the service time of every batch size, its variation, and the energy of a batch."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from math import gcd, hypot
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import ModelError, RequestError, SettingsError
from weir.numerics import isotonic, monotone_curve
from weir.policy.cost import Profile
from weir.profiling import Items, ProfilingSettings
from weir.profiling.machine import Energy, Meters, judged, modelled, read_energy, windows
from weir.profiling.sampling import CROWDED, Contention, Measuring, ServiceTimeEstimate, ServiceTimeSampler

# Which batch sizes to measure, and between which of them the service time makes a step.


ALL_UP_TO = 16  # rows
STRIDE = 1.25  # ratio of neighbouring sizes above that
VISIBLE = 0.02  # a rise by a smaller share is not a step
SIGMAS = 4.0  # standard errors by which a rise must exceed noise
STEEP = 2.0  # times as steep as the flatter side next to it, at least, is a step
MOST_PERIODS = 64  # more steps of equal width are not looked for


class Point(NamedTuple):
    """A measured size: mean service time and the standard error of that mean, in the same unit."""

    time: float
    error: float


def grid(max_batch_size: int, sizes: Sequence[int] = ()) -> list[int]:
    """Return the sizes to measure first, in rows, ascending.

    They are `sizes`, or, without any, all up to 16, then in steps of a quarter; and always 1 and the largest.

    Raises SettingsError for a size above the largest.
    """
    beyond = [size for size in sizes if size > max_batch_size]
    if beyond:
        raise SettingsError(f"sizes={beyond[0]}: must be at most max_batch_size={max_batch_size}")
    chosen = {1, max_batch_size, *sizes}
    if not sizes:
        chosen |= set(range(1, min(ALL_UP_TO, max_batch_size) + 1))
        size = float(ALL_UP_TO)
        while (size := size * STRIDE) < max_batch_size:
            chosen.add(round(size))
    return sorted(chosen)


def suspects(points: Mapping[int, Point]) -> list[int]:
    """Return the sizes to measure next, in rows; none when the edge of every step lies between two neighbours.

    They halve each gap between measured sizes across which the time rises by more than the slope of its flatter side
    explains. Several steps in one gap can look like a slope: if the edges found so far are multiples of a period, its
    multiples in the gaps are measured too.
    """
    sizes = sorted(points)
    halves = {(low + high) // 2 for low, high in _gaps(sizes) if _is_steep(points, sizes, low, high)}
    if halves:
        return sorted(halves)
    return [size for size in _periodic(points, sizes) if size not in points]


def edges(points: Mapping[int, Point]) -> list[int]:
    """Return each size, in rows, after which the time rises by a step.

    The next size was measured, takes visibly longer, and on at least one side the slope is flatter than the step.
    """
    sizes = sorted(points)
    pairs = itertools.pairwise(sizes)
    return [low for low, high in pairs if high == low + 1 and _is_steep(points, sizes, low, high)]


def _gaps(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(low, high) for low, high in itertools.pairwise(sizes) if high - low > 1]


def _is_steep(points: Mapping[int, Point], sizes: Sequence[int], low: int, high: int) -> bool:
    rise = points[high].time - points[low].time
    noise = SIGMAS * hypot(points[high].error, points[low].error)
    if rise <= max(VISIBLE * points[low].time, noise):
        return False
    width = high - low
    before = [size for size in sizes if size <= low - width][-1:]
    after = [size for size in sizes if size >= high + width][:1]
    slopes = [_slope(points, size, low) for size in before] + [_slope(points, high, size) for size in after]
    # With two sizes there is no other slope to compare with.
    return bool(slopes) and (rise - noise) / width > STEEP * max(min(slopes), 0.0)


def _slope(points: Mapping[int, Point], low: int, high: int) -> float:
    return (points[high].time - points[low].time) / (high - low)


def _periodic(points: Mapping[int, Point], sizes: Sequence[int]) -> list[int]:
    found = edges(points)
    period = gcd(*found)
    if len(found) < 3 or period < 3 or sizes[-1] // period > MOST_PERIODS:
        return []
    multiples = range(period, sizes[-1], period)
    inside = {multiple for multiple in multiples for low, high in _gaps(sizes) if low <= multiple < high}
    return sorted(inside | {multiple + 1 for multiple in inside})


# From measured sizes to a table of all sizes: never falling, with exact edges where neighbours were measured.


Floats = NDArray[np.float64]


def monotone_table(values: Mapping[int, float], errors: Mapping[int, float], max_batch_size: int) -> Floats:
    """Return a value for each size 1 ... max_batch_size, non-decreasing; shape (max_batch_size,), in the unit of
    `values`.

    `values` by size are made non-decreasing by weighted least squares (isotonic regression), the weights coming from
    `errors`. Through them goes a shape-preserving cubic (PCHIP: Fritsch and Carlson, "Monotone piecewise cubic
    interpolation", SIAM Journal on Numerical Analysis 17, 1980), which adds no bumps and keeps level parts level.
    Beyond the smallest and the largest size the table is level.
    """
    sizes = np.array(sorted(values), np.float64)
    measured = np.array([values[size] for size in sizes])
    floor = 1e-6 * float(measured.max())  # an error of 0 would have an infinite weight
    weights = np.array([max(errors[size], floor) ** -2.0 for size in sizes])
    rising = isotonic(measured, weights / weights.max())
    if len(sizes) == 1:
        return np.full(max_batch_size, rising[0])
    wanted = np.clip(np.arange(1.0, max_batch_size + 1.0), sizes[0], sizes[-1])
    return np.maximum.accumulate(monotone_curve(sizes, rising, wanted))  # rounding


def linear_table(values: Mapping[int, float], max_batch_size: int) -> Floats:
    """Return a value for each size 1 ... max_batch_size by linear interpolation of `values`, level beyond them."""
    sizes = sorted(values)
    table: Floats = np.interp(np.arange(1, max_batch_size + 1), sizes, [values[size] for size in sizes])
    return table


def along(times: Floats, values: Mapping[int, float]) -> Floats:
    """Return a value for each size, by linear interpolation of `values` over the service time: where that makes a
    step, so does the result.

    `times` has shape (max_batch_size,), as the result; `values` are by size.
    """
    sizes = np.array(sorted(values))
    # Where times are equal, the size decides: it adds almost nothing.
    over = times + 1e-9 * times[-1] * np.arange(len(times))
    table: Floats = np.interp(over, over[sizes - 1], [values[size] for size in sizes])
    return table


NO_METERS = Meters([], "")

Progress = Callable[[float, str], None]  # called with the share that is done, and what is being done

# Shares of the whole time until which the first sizes, and then the edges, are measured. The rest goes to the least
# sure means.
GRID_UNTIL, EDGES_UNTIL, EDGES_END = 0.6, 0.85, 1.25


async def measure(
    measuring: Measuring,
    items: Items,
    max_batch_size: int,
    settings: ProfilingSettings | None = None,
    *,
    worker: int = 0,
    meters: Meters = NO_METERS,
    about: Mapping[str, Any] | None = None,
    progress: Progress = lambda share, what: None,
) -> Profile:
    """Return the profile of batches of 1 ... max_batch_size rows on a worker of a started executor, which runs nothing else.

    Args:
        measuring: the executor's Listener.
        items: of which batches are made.
        max_batch_size: rows.
        settings: how thoroughly to measure.
        worker: the index of the worker.
        meters: counters of energy; the first whose power rises is used. If there are none, the profile says why.
        about: further notes for the profile.
        progress: called with the share that is done (0 to 1), and what is being done.

    Raises ModelError when the model fails on an item or its worker is lost; SettingsError when no batch can be made.
    """
    settings = settings or ProfilingSettings()
    sampler = ServiceTimeSampler(measuring, items, settings, _contention(measuring, worker), worker)
    try:
        await _measure_times(sampler, items, max_batch_size, settings, progress)
        estimates = sampler.estimates()
        energy = await _measure_energy(sampler, estimates, settings, meters, progress)
    except RequestError as error:
        raise ModelError(f"the model rejects one of the items to measure with: {error.message}") from error
    notes = {**(about or {}), "items": len(items), "content_type": items.content_type, **_notes(sampler, settings)}
    return _assembled(estimates, energy, max_batch_size, sampler.offset(), sampler.places, notes)


async def _measure_times(
    sampler: ServiceTimeSampler, items: Items, max_batch_size: int, settings: ProfilingSettings, progress: Progress
) -> None:
    sizes = list(filter(items.can_fill, grid(max_batch_size, settings.sizes)))
    if not sizes:
        raise SettingsError(f"items: none fits into a batch of {max_batch_size} rows")
    progress(0.0, "warming up")
    await sampler.warm_up(sizes)

    def part(what: str, start: float, end: float) -> Callable[[float], None]:
        return lambda share: progress(start + (end - start) * share, what)

    await sampler.settle(sizes, GRID_UNTIL, part(f"{len(sizes)} sizes", 0.0, GRID_UNTIL))
    while not settings.sizes and sampler.elapsed < EDGES_END * settings.seconds:
        more = [size for size in suspects(_points(sampler)) if items.can_fill(size)]
        if not more:
            break
        await sampler.settle(more, EDGES_UNTIL, part("looking for edges", GRID_UNTIL, EDGES_UNTIL))
    await sampler.settle(sorted(sampler.durations), 1.0, part("making sure", EDGES_UNTIL, 1.0))


async def _measure_energy(
    sampler: ServiceTimeSampler,
    estimates: Mapping[int, ServiceTimeEstimate],
    settings: ProfilingSettings,
    meters: Meters,
    progress: Progress,
) -> Energy:
    if settings.power is not None:
        return modelled(settings.power)
    if not meters.found:
        return judged((), meters.missing)
    progress(1.0, "reading energy")
    readings = await read_energy(meters.found, sampler, windows(sorted(estimates)))
    return judged(readings)


def _contention(measuring: Measuring, worker: int) -> Contention | None:
    """Return what watches the worker's process and this one; None if the worker has no process (a fake)."""
    pid = measuring.executor.states()[worker].pid
    return None if pid is None else Contention({pid, os.getpid()})


def _points(sampler: ServiceTimeSampler) -> dict[int, Point]:
    return {size: Point(each.mean, each.error) for size, each in sampler.estimates().items()}


def _assembled(
    estimates: Mapping[int, ServiceTimeEstimate],
    energy: Energy,
    max_batch_size: int,
    offset: float,
    pipeline_depth: int,
    notes: dict[str, Any],
) -> Profile:
    means = {size: 1000.0 * each.mean for size, each in estimates.items()}
    errors = {size: 1000.0 * each.error for size, each in estimates.items()}
    times = monotone_table(means, errors, max_batch_size)
    warnings = [*notes.pop("warnings"), *_falling(means, errors, times), *energy.warnings]
    notes = {**notes, **energy.about, **({"warnings": warnings} if warnings else {})}
    energies = along(times, energy.batch_mj) if energy.batch_mj else energy.watts * times
    cv = linear_table({size: each.cv for size, each in estimates.items()}, max_batch_size)
    return Profile(times, energies, cv, 1000.0 * offset, pipeline_depth, energy.source, notes)


def _falling(means: Mapping[int, float], errors: Mapping[int, float], times: Floats) -> list[str]:
    """Return a warning if larger batches are clearly faster than smaller ones, which the table cannot show."""
    falls = [size for size in means if means[size] - times[size - 1] > 4.0 * errors[size] + 0.02 * means[size]]
    if not falls:
        return []
    worst = max(falls, key=lambda size: means[size] / times[size - 1])
    return [
        f"a batch of {worst} took {means[worst]:.4g} ms, longer than some larger ones: the table, which never falls, has "
        f"{times[worst - 1]:.4g} ms there"
    ]


def _notes(sampler: ServiceTimeSampler, settings: ProfilingSettings) -> dict[str, Any]:
    estimates = sampler.estimates()
    worst = max(estimates, key=lambda size: estimates[size].relative)
    sure = sum(each.relative <= settings.confidence for each in estimates.values())
    left_out = sum(each.left_out for each in estimates.values())
    lost = sum(each.left_out_seconds for each in estimates.values())
    spent = sum(each.mean * each.counted for each in estimates.values())
    waited = sampler.crowding
    return {
        "sizes_measured": list(estimates),
        "edges": edges(_points(sampler)),
        "batches": sampler.batches,
        "seconds": round(sampler.elapsed, 1),
        "confidence": f"{sure} of {len(estimates)} means within {settings.confidence:.1%} (95 % interval); the least sure, of "
        f"size {worst}, within {estimates[worst].relative:.1%}",
        "left_out": f"{left_out} batches that the machine delayed: they would add {lost / spent:.2%} to the time",
        "service_time": "from dispatch to the last responses, as a server sees it: the way to the worker, its waking up, the model, the "
        "way back",
        "waited_for_cpu": f"{waited:.2%} of the time, because of other processes",
        "seed": settings.seed,
        "warnings": crowded(waited),
    }


def crowded(waited: float) -> list[str]:
    """Return a warning if `waited`, the seconds lost to other processes per second, is large."""
    if waited < CROWDED:
        return []
    return [f"other processes had the CPUs for {min(1.0, waited):.0%} of the time: measure again on a quieter machine"]
