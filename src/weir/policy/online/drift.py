"""Finds out whether service times still are those of the profile, and by how much each batch size has changed.

Each batch says by which factor it took longer than the profile's mean, on a logarithmic scale, on which twice as long
and half as long are equally far from 0.

*Noticing* is a two-sided cumulative sum (Page, "Continuous inspection schemes", Biometrika 41, 1954). What exceeds an
allowance is added to a sum, and what falls short of it is subtracted, down to 0. One sum watches for longer times and
one for shorter. There is such a pair for all batches together, which notices a change of all sizes soonest, one for
each doubling of the size and one for each size, for a change that only some sizes show. A sum above its threshold is an alarm. The
allowance is half of the smallest change worth noticing (10 %), or half a standard deviation if that is more. The
threshold h is such that chance exceeds it, from any one batch on, with the probability of a value five standard
deviations off (Wald's bound exp(-2·allowance·h/σ²) = 2.9e-7), but at least five standard deviations. A single batch
counts as at most four standard deviations, so that one pause of the machine is not taken for a change of the model.

*Measuring* begins with the alarm, because the batches before it are a mixture of old and new times. The batches after
it are divided into ranges of sizes, at the sizes where their medians differ most, as long as a difference is certain. The
median of each range is its change, and 0 where that is not certain. More batches are awaited while they cannot say.

*Certain* is what exceeds four standard errors. How much times vary is learned here, since a profile knows only the
machine that it was measured on: from one batch to the next of about the same size, and from one second of work to the
next, for a machine that others use now and then. Both are medians of differences, which neither a change nor rare
pauses affect.
"""

from itertools import accumulate, groupby, pairwise
from math import exp, hypot, log, log1p, sqrt
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from weir.policy.cost import Profile

NOTICEABLE = 0.1  # relative change of the service time for which new tables are worth solving
MATTERS = log1p(NOTICEABLE) / 2.0  # a measured change of log τ that counts
LEAST_SPREAD = 0.03  # standard deviation of log τ that is assumed at first, for clocks and other load ...
LEAST_WANDER = 0.005  # ... and that of its mean over STRETCH
STRETCH = 1.0  # seconds of work
FIVE_SIGMA = -log(2.87e-7)
THRESHOLD = 5.0  # standard deviations, at least
OUTLIER = 4.0  # standard deviations that one batch counts at most
CERTAIN = 4.0  # standard errors
BATCHES = 20  # after an alarm, from which the change is measured; twice as many while they cannot say, ...
MOST_BATCHES = 5120  # ... up to this many
FEWEST = 5  # batches of a range of sizes
NORMAL = 0.6745  # median of |x| of a standard normal law
OF_A_MEDIAN = 1.2533  # its standard error, as a multiple of that of the mean


Size = tuple[int, list[float]]  # rows, and what each batch of them took longer, as a difference of log τ


class Drift(NamedTuple):
    """Service times have changed: those of b rows by `factors[b - 1]` (above 1: they are longer), as the last
    `batches` batches show.

    Sizes of which no batch came are taken to have changed as the nearest. But if only large batches come and have become
    slow, smaller ones might be the way out, and would never come. So `tried`, if not 0, is a size that would now serve the most
    rows per second if it is as fast as before: some batches of it show whether it is.
    """

    factors: tuple[float, ...]
    batches: int
    tried: int = 0


class Range(NamedTuple):
    """Batches of `first` to `last` rows have taken longer by `change`, as a difference of log τ; 0: not certainly. Chance
    alone does not exceed `bound`.
    """

    first: int
    last: int
    change: float
    bound: float


class Spread:
    """The standard deviation of values that come one after another, about a level that may change: `value`.

    It follows the median of the differences between neighbours, with `gain` as the relative step, and never falls
    below `least`.
    """

    __slots__ = ("_down", "_last", "_least", "_up", "value")

    def __init__(self, least: float, gain: float) -> None:
        self.value = self._least = least
        self._up, self._down = 1.0 + gain, 1.0 - gain
        self._last: float | None = None

    def observe(self, value: float) -> None:
        """Take note of the next value."""
        if self._last is not None:
            typical = NORMAL * sqrt(2.0) * self.value
            self.value = max(self.value * (self._up if abs(value - self._last) > typical else self._down), self._least)
        self._last = value


class DriftDetector:
    """Compares the service times of one model with its profile. `observe` each batch.

    After it has reported a Drift, `compare_with` the profile that this leads to.
    """

    __slots__ = (
        "_known", "_last", "_laws", "_needed", "_own", "_reports", "_since", "_spreads", "_stretch", "_sums", "_wander", "_watched", "_worked",
    )  # fmt: skip

    def __init__(self, profile: Profile) -> None:
        self._wander = Spread(LEAST_WANDER, 0.02)
        self._stretch = (0, 0.0, 0.0)  # batches, and the sums of what they took longer and of their seconds
        self._spreads = [Spread(LEAST_SPREAD, 0.02) for _ in range(profile.max_batch_size.bit_length() + 1)]
        self._last = 0.0  # the change that was reported last
        self._reports = 0
        # By doubling, the reports until one of them last agreed with the profile.
        self._known = [0] * len(self._spreads)
        self.compare_with(profile)

    def compare_with(self, profile: Profile) -> None:
        """Compare with `profile`, of the same sizes, from now on. What was learned of how much times vary stays."""
        # By size, the mean and the standard deviation of log τ. Of a log-normal law that mean is less than the log of
        # the mean.
        spreads = [log1p(cv * cv) for cv in profile.cv.tolist()]
        times = profile.service_time_ms.tolist()
        self._laws = [(log(ms / 1000.0) - each / 2.0, sqrt(each)) for ms, each in zip(times, spreads, strict=True)]
        self._restart()

    def _restart(self) -> None:
        groups = 1 + len(self._laws) + len(self._spreads)  # all batches; those of each size; and of each doubling of it
        self._sums = [[0.0, 0.0] for _ in range(groups)]
        self._watched = 0  # the index of those that have raised an alarm
        self._since: list[tuple[int, float]] = []  # after it: rows, and log τ observed/τ(b)
        self._worked = 0.0  # the seconds that these batches took
        self._own = 0  # how many of them belong to the sums that have raised the alarm
        self._needed = 0  # how many shall; 0 before an alarm

    def observe(self, rows: int, seconds: float) -> Drift | None:
        """Take note that a batch of `rows` rows took `seconds`. Return by how much service times have changed, or
        None.

        Batch sizes that the profile does not have, and times that are not above 0, are ignored.
        """
        if not 1 <= rows <= len(self._laws) or seconds <= 0.0:
            return None
        mean, spread = self._laws[rows - 1]
        excess = log(seconds) - mean
        doubling = (rows - 1).bit_length()
        known = self._spreads[doubling]
        known.observe(excess)
        spread = max(spread, known.value)
        clipped = min(max(excess, -OUTLIER * spread), OUTLIER * spread)
        self._follow(clipped, seconds)
        groups = (0, rows, len(self._laws) + 1 + doubling)
        if not self._needed:
            self._watch(clipped, spread, groups, doubling)
            return None
        self._since.append((rows, excess))
        self._worked += seconds
        self._own += self._watched in groups
        enough = self._own >= self._needed or len(self._since) >= MOST_BATCHES
        return self._measured() if enough else None

    def _follow(self, excess: float, seconds: float) -> None:
        """Learn how much the mean over a second of work varies."""
        batches, total, worked = self._stretch
        batches, total, worked = batches + 1, total + excess, worked + seconds
        if worked >= STRETCH and batches >= BATCHES:
            self._wander.observe(total / batches)
            batches, total, worked = 0, 0.0, 0.0
        self._stretch = batches, total, worked

    def _watch(self, excess: float, spread: float, groups: tuple[int, ...], doubling: int) -> None:
        allowance = max(log1p(NOTICEABLE), spread) / 2.0
        threshold = max(FIVE_SIGMA * spread * spread / (2.0 * allowance), THRESHOLD * spread)
        if abs(excess) <= allowance:
            self._known[doubling] = self._reports
        for watched in groups:
            sums = self._sums[watched]
            slower, faster = sums[0] + excess - allowance, sums[1] - excess - allowance
            sums[0], sums[1] = slower if slower > 0.0 else 0.0, faster if faster > 0.0 else 0.0
            if slower > threshold or faster > threshold:
                self._watched, self._needed = watched, BATCHES

    def _measured(self) -> Drift | None:
        """Return what the batches since the alarm show. None: nothing, or they cannot say yet."""
        batches = sorted(self._since)
        sizes = [(rows, [excess for _, excess in group]) for rows, group in groupby(batches, key=itemgetter(0))]
        ranges = [found for part in self._parts(sizes) for found in self._ranges(part)]
        changes, tried = self._changes(ranges)
        if any(each.change for each in ranges):
            self._note_reversal(max((each.change for each in ranges), key=abs))
            self._reports += 1
            for rows, _ in sizes:
                self._known[(rows - 1).bit_length()] = self._reports
            self._restart()
            return Drift(tuple(map(exp, changes)), len(batches), tried)
        if len(batches) >= MOST_BATCHES or all(each.bound < MATTERS for each in ranges):
            self._restart()
        else:
            self._needed *= 2
        return None

    def _note_reversal(self, change: float) -> None:
        """Note that `change` is reported. If it takes back the one before, that was not a change: times vary that much."""
        if change * self._last < 0.0:
            self._wander.value = max(self._wander.value, min(abs(change), abs(self._last)))
        self._last = change

    def _parts(self, sizes: list[Size]) -> list[list[Size]]:
        """Divide `sizes` into those that have raised the alarm, and those below and above, if it was not all of them."""
        top = len(self._laws)
        ours = [self._watched in (0, rows, top + 1 + (rows - 1).bit_length()) for rows, _ in sizes]
        inside, others = (
            [each for each, own in zip(sizes, ours, strict=True) if own is wanted] for wanted in (True, False)
        )
        if not others or not self._differ(inside, others):
            return [sizes]
        return [[each for each, _ in group] for _, group in groupby(zip(sizes, ours, strict=True), key=itemgetter(1))]

    def _ranges(self, sizes: list[Size]) -> list[Range]:
        """Divide `sizes` where their times have certainly changed by other factors."""
        middle = _middle(sizes)
        if middle and self._differ(sizes[:middle], sizes[middle:]):
            return [found for part in (sizes[:middle], sizes[middle:]) for found in self._ranges(part)]
        change, bound = self._change(sizes)
        return [Range(sizes[0][0], sizes[-1][0], change if abs(change) > max(bound, MATTERS) else 0.0, bound)]

    def _differ(self, sizes: list[Size], others: list[Size]) -> bool:
        """Return whether the times of both have certainly changed by other factors."""
        (one, one_bound), (other, other_bound) = map(self._change, (sizes, others))
        return abs(one - other) > max(hypot(one_bound, other_bound), MATTERS)

    def _changes(self, ranges: list[Range]) -> tuple[list[float], int]:
        """Return the change of log τ by size, and the size to try: see Drift. Sizes between two ranges have changed as the
        slower one.
        """
        first, last, changes = ranges[0], ranges[-1], [0.0] * len(self._laws)
        for below, above in pairwise(ranges):
            changes[below.last : above.first] = [max(below.change, above.change)] * (above.first - below.last)
        for each in ranges:
            changes[each.first - 1 : each.last] = [each.change] * (each.last - each.first + 1)
        for size in range(last.last + 1, len(changes) + 1):
            changes[size - 1] = last.change if self._follows(size, last.last) else 0.0
        lower = [size for size in range(1, first.first) if self._follows(size, first.first)]
        rates = [
            log(size) - law[0] - change for size, (law, change) in enumerate(zip(self._laws, changes, strict=True), 1)
        ]
        about = 1 << (first.first - 1).bit_length() >> 1  # larger ones are about as large as those that came
        best = max((size for size in lower if size <= about), key=lambda size: rates[size - 1], default=0)
        for size in lower:
            changes[size - 1] = first.change
            rates[size - 1] -= first.change
        return changes, best if first.change > 0.0 and best and rates[best - 1] + first.change > max(rates) else 0

    def _follows(self, size: int, known: int) -> bool:
        """Return whether batches of `size`, of which none came since the alarm, are taken to have changed as those of
        `known` rows: the last of about that size that agreed with the profile came after no more reports than the last of
        about `known` rows that did.
        """
        return self._known[(size - 1).bit_length()] <= self._known[(known - 1).bit_length()]

    def _change(self, sizes: list[Size]) -> tuple[float, float]:
        """Return the change of log τ that batches show, and what chance alone does not exceed."""
        values = [value for _, each in sizes for value in each]
        change = median(values)
        spread = median(abs(value - change) for value in values) / NORMAL
        spread = max(spread, *(self._spreads[(rows - 1).bit_length()].value for rows, _ in sizes))
        wander = self._wander.value / sqrt(max(self._worked / STRETCH, 1.0))
        return change, CERTAIN * hypot(OF_A_MEDIAN * spread / sqrt(len(values)), wander)


def _middle(sizes: list[Size]) -> int:
    """Return where to divide `sizes` so that the means of both parts differ most; 0 if there are too few batches."""
    counts = [len(values) for _, values in sizes]
    sums = [count * median(values) for count, (_, values) in zip(counts, sizes, strict=True)]
    total, batches = sum(sums), sum(counts)
    best, middle = 0.0, 0
    for index, (below, under) in enumerate(zip(accumulate(sums), accumulate(counts), strict=True), 1):
        over = batches - under
        if min(under, over) >= FEWEST and (between := (below - total * under / batches) ** 2 / (under * over)) > best:
            best, middle = between, index
    return middle
