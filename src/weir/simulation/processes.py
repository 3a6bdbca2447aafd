"""When requests arrive: processes with a mean rate (their text form: arrivals.py)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field
from math import isfinite, pi
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from weir.errors import SettingsError
from weir.fields import AT_LEAST_ONE, AT_LEAST_ZERO, Rule, check, setting
from weir.simulation.traces import Floats, Ints

BLOCK = 16_384  # arrivals drawn at once; what is drawn does not depend on how many are asked for
FINITE: Rule = (lambda value: 0.0 < value < float("inf"), "must be greater than 0, and finite")
SHARE: Rule = (lambda value: 0.0 < value < 1.0, "must lie between 0 and 1")
DEPTH: Rule = (lambda value: 0.0 <= value <= 1.0, "must be from 0 to 1")


@dataclass(frozen=True)
class Arrivals(ABC):
    """A process of arrivals. `rate` is its long-run mean in rows per second, `rows` what each request has.

    `length` is how many requests there are, None for as many as one likes.
    """

    name: ClassVar[str]
    rate: float = setting(MISSING, "mean rate in rows per second", rule=FINITE)
    rows: int = field(default=1, kw_only=True, metadata={"help": "rows of each request", "rule": AT_LEAST_ONE})

    def __post_init__(self) -> None:
        check(self)

    @property
    def length(self) -> int | None:
        """How many requests there are; None: as many as one likes."""
        return None

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return self.rate / self.rows

    @abstractmethod
    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield the arrivals in seconds, ascending from 0, block after block."""

    def blocks(self, rng: Generator, count: int) -> Iterator[Floats]:
        """Yield the first `count` arrivals block after block (fewer if there are fewer): memory stays bounded."""
        left = count
        for block in self.stream(rng):
            yield block[:left]
            left -= len(block)
            if left <= 0:
                return

    def times(self, rng: Generator, count: int) -> Floats:
        """Return the first `count` arrivals (fewer if there are fewer)."""
        return np.concatenate([np.empty(0), *self.blocks(rng, count)])

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the rows of the requests of those indices."""
        return np.full(stop - start, self.rows, dtype=np.int64)


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Independent arrivals: what many callers who do not know of each other make."""

    name = "poisson"

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield sums of exponential gaps."""
        return _sums(lambda: rng.exponential(1.0 / self.request_rate, BLOCK))


@dataclass(frozen=True)
class GammaRenewal(Arrivals):
    """Independent gaps of a Gamma law: `cv` above 1 comes in clumps, below 1 is more even than Poisson."""

    name = "gamma"
    cv: float = setting(2.0, "coefficient of variation of the gaps", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield sums of Gamma gaps."""
        shape = 1.0 / self.cv**2
        return _sums(lambda: rng.gamma(shape, 1.0 / (self.request_rate * shape), BLOCK))


@dataclass(frozen=True)
class Constant(Arrivals):
    """Equal gaps."""

    name = "constant"

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield multiples of the gap, each rounded once."""
        first = 1
        while True:
            yield np.arange(first, first + BLOCK) / self.request_rate
            first += BLOCK


@dataclass(frozen=True)
class MarkovModulated(Arrivals):
    """Poisson arrivals in two phases of exponential length; it starts in either as often as it is there."""

    name = "mmpp"
    burst: float = setting(
        5.0, "rate of the busy phase over that of the other; inf: the other is silent", rule=AT_LEAST_ONE
    )
    share: float = setting(0.2, "share of the time spent in the busy phase", rule=SHARE)
    period: float = setting(1.0, "mean seconds from one busy phase to the next", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by inversion of the summed rate."""
        quiet = 0.0 if not isfinite(self.burst) else self.request_rate / (1.0 - self.share + self.share * self.burst)
        busy = (self.request_rate - (1.0 - self.share) * quiet) / self.share
        first = bool(rng.random() < self.share)
        rates = np.array([busy, quiet] if first else [quiet, busy])
        means = self.period * np.array([self.share, 1.0 - self.share])
        means = means if first else means[::-1]
        return _inverted(rng, lambda: (rng.exponential(np.tile(means, 64)), np.tile(rates, 64)))


@dataclass(frozen=True)
class OnOff(Arrivals):
    """Poisson arrivals for `on` seconds, silence for `off` seconds, and so on."""

    name = "on-off"
    on: float = setting(1.0, "seconds with arrivals", rule=FINITE)
    off: float = setting(1.0, "seconds without", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by inversion of the summed rate."""
        rates = np.array([self.request_rate * (self.on + self.off) / self.on, 0.0])
        return _inverted(rng, lambda: (np.tile([self.on, self.off], 64), np.tile(rates, 64)))


@dataclass(frozen=True)
class Sine(Arrivals):
    """Poisson arrivals whose rate swings around the mean: times 1 + depth·sin(2π·t/period)."""

    name = "sine"
    depth: float = setting(0.5, "how far the rate swings, as a share of the mean", rule=DEPTH)
    period: float = setting(10.0, "seconds of one swing", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by thinning of the highest rate."""
        peak = 1.0 + self.depth

        def kept(times: Floats) -> Floats:
            swing: Floats = (1.0 + self.depth * np.sin(2.0 * pi / self.period * times)) / peak
            return swing

        return _thinned(rng, self.request_rate * peak, kept)


@dataclass(frozen=True)
class Ramp(Arrivals):
    """Poisson arrivals whose rate climbs (or falls) in a straight line over `period` seconds, and starts again."""

    name = "ramp"
    climb: float = setting(2.0, "rate at the end, a multiple of that at the start", rule=AT_LEAST_ZERO)
    period: float = setting(10.0, "seconds of one climb", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by thinning of the highest rate."""
        peak = max(1.0, self.climb)
        first = self.request_rate * 2.0 / (1.0 + self.climb)

        def kept(times: Floats) -> Floats:
            climb: Floats = (1.0 + (self.climb - 1.0) * np.mod(times / self.period, 1.0)) / peak
            return climb

        return _thinned(rng, first * peak, kept)


class Trace(Arrivals):
    """Arrivals as they were recorded. The same each time, whatever the generator."""

    name = "trace"

    def __init__(self, times: Floats, rows: Ints | None = None, *, source: str = "trace") -> None:
        sizes = np.ones(len(times), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
        if len(times) < 2 or len(sizes) != len(times) or not times[-1] > times[0] or np.any(np.diff(times) < 0.0):
            raise SettingsError(f"{source}: must have at least two arrivals, ascending, and as many rows")
        # The gap that would follow the last arrival is taken to be the mean one.
        span = float(times[-1] - times[0]) * len(times) / (len(times) - 1)
        super().__init__(float(sizes.sum()) / span)
        object.__setattr__(self, "_times", np.asarray(times, dtype=np.float64) - times[0])
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_source", source)

    _times: Floats
    _sizes: Ints
    _source: str

    @property
    def length(self) -> int | None:
        """How many were recorded."""
        return len(self._times)

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return self.rate * len(self._times) / float(self._sizes.sum())

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield the recorded arrivals."""
        for start in range(0, len(self._times), BLOCK):
            yield self._times[start : start + BLOCK]

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the rows of the requests of those indices."""
        return self._sizes[start:stop]

    __eq__ = object.__eq__  # not by the mean rate
    __hash__ = object.__hash__


def _sums(gaps: Callable[[], Floats]) -> Iterator[Floats]:
    """Yield the running sums of gaps that are drawn block by block."""
    last = 0.0
    while True:
        times = last + np.cumsum(gaps())
        last = float(times[-1])
        yield times


def _thinned(rng: Generator, peak: float, kept: Callable[[Floats], Floats]) -> Iterator[Floats]:
    """Yield Poisson arrivals of rate `peak`, each with the probability that `kept` says for its time."""
    for times in _sums(lambda: rng.exponential(1.0 / peak, BLOCK)):
        yield times[rng.random(BLOCK) < kept(times)]


def _inverted(rng: Generator, segments: Callable[[], tuple[Floats, Floats]]) -> Iterator[Floats]:
    """Yield Poisson arrivals whose rate is constant on segments: `segments` gives the next ones' (seconds, rates).

    The summed rate at the arrivals is a Poisson process of rate 1; it is inverted, so no arrival is drawn in vain.
    """
    sums, times = np.zeros(1), np.zeros(1)  # the ends of segments, in summed rate and in seconds
    for targets in _sums(lambda: rng.exponential(1.0, BLOCK)):
        while sums[-1] <= targets[-1]:
            seconds, rates = segments()
            times = np.append(times, times[-1] + np.cumsum(seconds))
            sums = np.append(sums, sums[-1] + np.cumsum(seconds * rates))
        yield np.interp(targets, sums, times)
        passed = int(np.searchsorted(sums, targets[-1], side="right")) - 1
        sums, times = sums[passed:], times[passed:]
