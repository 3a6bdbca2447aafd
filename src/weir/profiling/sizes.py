"""Which batch sizes to measure, and where a step hides between two of them. Nothing is measured here."""

import itertools
from collections.abc import Mapping, Sequence
from math import gcd, hypot
from typing import NamedTuple

from weir.errors import SettingsError

ALL_UP_TO = 16
STRIDE = 1.25
VISIBLE = 0.02  # a rise by less than this share is no step
SIGMAS = 4.0
STEEP = 2.0  # times as steep as the ground beside it: not explained by interpolation
MOST_PERIODS = 64


class Point(NamedTuple):
    """A measured size: mean service time and the standard error of that mean, in one unit."""

    time: float
    error: float


def grid(max_batch_size: int, sizes: Sequence[int] = ()) -> list[int]:
    """Return the sizes to measure first, ascending: `sizes` if there are any, else all up to 16, then steps of a quarter; and
    always 1 and the largest.

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
    """Return the sizes to measure next, halving each gap between measured sizes across which the time rises by more than the
    ground on its flatter side explains; none when every step's edge is between two neighbours.

    Several steps in one gap can look like a slope: where edges found so far are whole multiples of a period, its
    multiples in the gaps are looked at too.
    """
    sizes = sorted(points)
    halves = {(low + high) // 2 for low, high in _gaps(sizes) if _is_steep(points, sizes, low, high)}
    if halves:
        return sorted(halves)
    return [size for size in _periodic(points, sizes) if size not in points]


def edges(points: Mapping[int, Point]) -> list[int]:
    """Return each size after which the time rises by a step: the next size was measured, costs visibly more, and the ground
    on at least one side is flatter than the step is."""
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
    # Beside the only two sizes there is no ground to compare with, and a line is all that can be said.
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
