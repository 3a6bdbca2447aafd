"""The instants at which requests arrive: random processes with a mean rate, recorded arrivals, and the text form of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from math import inf, isfinite, pi
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, Checked, Rule, parse_duration, setting
from weir.errors import SettingsError, reason_of

# Recorded arrivals, as CSV: the header `arrival_s,rows`, then one line per request in the order of arrival.
#
# Times are in seconds from any origin. The column `rows` may be left out if every request has one row.


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HEADER = ("arrival_s", "rows")


def read_trace(path: str | Path) -> tuple[Floats, Ints]:
    """Return the arrivals (seconds, the first at 0) and the rows of the requests recorded in the file `path`; shape
    (requests,).

    Raises SettingsError naming the file, the line, the value and the rule: numbers, times that do not go back, rows of
    at least 1, at least two requests.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"trace {str(path)!r} cannot be read: {reason_of(error)}") from error
    header = tuple(cell.strip() for cell in lines[0].split(",")) if lines else ()
    if header not in (HEADER, HEADER[:1]):
        raise SettingsError(f"{path}, line 1: must be the header {','.join(HEADER)}; is {','.join(header)!r}")
    times: list[float] = []
    rows: list[int] = []
    last = -np.inf
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            arrival, size = _read(line.split(","), len(header), last)
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: {line!r}: {error}") from None
        times.append(arrival)
        rows.append(size)
        last = arrival
    if len(times) < 2 or last <= times[0]:
        raise SettingsError(f"{path}: a trace has at least two requests, at different times; this one has {len(times)}")
    return np.array(times) - times[0], np.array(rows, dtype=np.int64)


def _read(cells: list[str], columns: int, last: float) -> tuple[float, int]:
    if len(cells) != columns:
        raise ValueError(f"must have {columns} value(s)")
    try:
        arrival = float(cells[0])
        rows = int(cells[1]) if columns > 1 else 1
    except ValueError:
        raise ValueError("must be a number of seconds and a whole number of rows") from None
    if not np.isfinite(arrival):
        raise ValueError("the arrival must be finite")
    if arrival < last:
        raise ValueError(f"arrives before the line above, at {last:g}; arrivals must not go back")
    if rows < 1:
        raise ValueError("rows must be 1 or more")
    return arrival, rows


BLOCK = 16_384  # arrivals drawn at once, so that they do not depend on how many are wanted
FINITE: Rule = (lambda value: 0.0 < value < float("inf"), "must be greater than 0, and finite")
SHARE: Rule = (lambda value: 0.0 < value < 1.0, "must lie between 0 and 1")
DEPTH: Rule = (lambda value: 0.0 <= value <= 1.0, "must be from 0 to 1")


@dataclass(frozen=True)
class Arrivals(Checked, ABC):
    """A process of arrivals. `rate` is its long-run mean in rows per second, and `rows` are those of each request."""

    name: ClassVar[str]
    rate: float = setting(MISSING, "mean rate in rows per second", rule=FINITE)
    rows: int = field(default=1, kw_only=True, metadata={"help": "rows of each request", "rule": AT_LEAST_ONE})

    @property
    def length(self) -> int | None:
        """The number of requests; None: without end."""
        return None

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return self.rate / self.rows

    @abstractmethod
    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield the arrivals in blocks: instants in seconds, ascending from 0; shape (requests of the block,)."""

    def blocks(self, rng: Generator, count: int) -> Iterator[Floats]:
        """Yield the first `count` arrivals (fewer if there are fewer) in blocks, so that memory stays bounded;
        seconds.
        """
        left = count
        for block in self.stream(rng):
            yield block[:left]
            left -= len(block)
            if left <= 0:
                return

    def times(self, rng: Generator, count: int) -> Floats:
        """Return the first `count` arrivals (fewer if there are fewer) in seconds; shape (count,)."""
        return np.concatenate([np.empty(0), *self.blocks(rng, count)])

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the rows of the requests `start` ... `stop` - 1; shape (stop - start,)."""
        return np.full(stop - start, self.rows, dtype=np.int64)


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Independent arrivals, as many independent callers cause them."""

    name = "poisson"

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield sums of exponential gaps."""
        return _sums(lambda: rng.exponential(1.0 / self.request_rate, BLOCK))


@dataclass(frozen=True)
class GammaRenewal(Arrivals):
    """Independent gaps with a Gamma law. With `cv` above 1 arrivals come in clumps; below 1 they are more even than
    Poisson.
    """

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
    """Poisson arrivals in two phases of exponential length. It starts in either with the share of time spent there."""

    name = "mmpp"
    burst: float = setting(
        5.0, "ratio of the rates of the busy and the quiet phase; inf makes the quiet phase silent", rule=AT_LEAST_ONE
    )
    share: float = setting(0.2, "share of time spent in the busy phase", rule=SHARE)
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
    """Poisson arrivals for `on` seconds, none for `off` seconds, and so on."""

    name = "on-off"
    on: float = setting(1.0, "seconds with arrivals", rule=FINITE)
    off: float = setting(1.0, "seconds without arrivals", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by inversion of the summed rate."""
        rates = np.array([self.request_rate * (self.on + self.off) / self.on, 0.0])
        return _inverted(rng, lambda: (np.tile([self.on, self.off], 64), np.tile(rates, 64)))


@dataclass(frozen=True)
class Sine(Arrivals):
    """Poisson arrivals whose rate swings around the mean: times 1 + depth·sin(2π·t/period)."""

    name = "sine"
    depth: float = setting(0.5, "amplitude of the rate, as a share of its mean", rule=DEPTH)
    period: float = setting(10.0, "seconds per cycle", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by thinning of the highest rate."""
        peak = 1.0 + self.depth

        def kept(times: Floats) -> Floats:
            swing: Floats = (1.0 + self.depth * np.sin(2.0 * pi / self.period * times)) / peak
            return swing

        return _thinned(rng, self.request_rate * peak, kept)


@dataclass(frozen=True)
class Ramp(Arrivals):
    """Poisson arrivals whose rate rises (or falls) linearly for `period` seconds, and then starts again."""

    name = "ramp"
    climb: float = setting(2.0, "rate at the end as a multiple of the rate at the start", rule=AT_LEAST_ZERO)
    period: float = setting(10.0, "seconds per ramp", rule=FINITE)

    def stream(self, rng: Generator) -> Iterator[Floats]:
        """Yield arrivals by thinning of the highest rate."""
        peak = max(1.0, self.climb)
        first = self.request_rate * 2.0 / (1.0 + self.climb)

        def kept(times: Floats) -> Floats:
            climb: Floats = (1.0 + (self.climb - 1.0) * np.mod(times / self.period, 1.0)) / peak
            return climb

        return _thinned(rng, first * peak, kept)


class RecordedArrivals(Arrivals):
    """Recorded arrivals: the same each time, whatever the random generator.

    `times` are in seconds, ascending, and `rows` those of each request (1 if None), both of shape (requests,).
    `source` names them in errors.
    """

    name = "trace"

    def __init__(self, times: Floats, rows: Ints | None = None, *, source: str = "trace") -> None:
        sizes = np.ones(len(times), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
        if len(times) < 2 or len(sizes) != len(times) or not times[-1] > times[0] or np.any(np.diff(times) < 0.0):
            raise SettingsError(f"{source}: must have at least two arrivals, ascending, and as many rows")
        # The gap after the last arrival is taken to be the mean gap.
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
        """The number of recorded requests."""
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
        """Return the rows of the requests `start` ... `stop` - 1; shape (stop - start,)."""
        return self._sizes[start:stop]

    __eq__ = object.__eq__  # not by the mean rate
    __hash__ = object.__hash__


def _sums(gaps: Callable[[], Floats]) -> Iterator[Floats]:
    """Yield running sums of gaps (seconds), which are drawn in blocks."""
    last = 0.0
    while True:
        times = last + np.cumsum(gaps())
        last = float(times[-1])
        yield times


def _thinned(rng: Generator, peak: float, kept: Callable[[Floats], Floats]) -> Iterator[Floats]:
    """Yield Poisson arrivals of rate `peak`, each kept with the probability that `kept` returns for its instant."""
    for times in _sums(lambda: rng.exponential(1.0 / peak, BLOCK)):
        yield times[rng.random(BLOCK) < kept(times)]


def _inverted(rng: Generator, segments: Callable[[], tuple[Floats, Floats]]) -> Iterator[Floats]:
    """Yield Poisson arrivals whose rate is constant on segments; `segments` returns the (seconds, rates) of the next
    ones.

    The integral of the rate, at the arrivals, is a Poisson process of rate 1. Inverting it draws no arrival in vain.
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


# The text form of arrivals: `name:load` or `name:key=value,key=value`.
#
#     poisson:0.7                  a load: the share of what the workers can serve
#     poisson:rate=200             rows per second
#     gamma:0.7,cv=2               renewal, gaps with that coefficient of variation
#     mmpp:0.7,burst=5,share=0.2,period=1s     Poisson in two phases; in the busy one, `burst` times the rate of the other
#     on-off:0.5,on=1s,off=1s      Poisson while on, nothing while off
#     sine:0.5,depth=0.8,period=10s            Poisson, the rate swings around its mean
#     ramp:0.1,to=0.9,period=60s   Poisson, the rate climbs from the one to the other, and starts again
#     constant:0.7                 equal gaps
#     trace:arrivals.csv           recorded ones
#
# A load is a share of what the workers can serve; `to` of a ramp is one too, or a rate if the start is stated as `rate=`.
# `rows=4` after any but a trace gives each request that many rows. Whatever the process, the mean rate is the stated one
# (for a ramp: the mean of its ends).


DURATIONS = ("period", "on", "off")
KINDS: dict[str, type[Arrivals]] = {
    kind.name: kind for kind in (Poisson, GammaRenewal, MarkovModulated, OnOff, Sine, Ramp, Constant)
}
EXAMPLE = "poisson:0.7 (a load) or poisson:rate=200 (rows per second)"


def parse_arrivals(text: str, *, capacity: float | None = None) -> Arrivals:
    """Return the arrivals that `text` states. A bare number is a load: that share of `capacity` (rows per second).

    Raises SettingsError naming the key, the value and the rule; also for a load if `capacity` is None.
    """
    name, colon, rest = text.partition(":")
    if name == RecordedArrivals.name:
        if not rest:
            raise SettingsError(f"arrivals={text!r}: the file must be given, as in trace:arrivals.csv")
        return RecordedArrivals(*read_trace(rest), source=rest)
    if name not in KINDS:
        raise SettingsError(
            f"arrivals={text!r}: must be one of {', '.join(KINDS)}, {RecordedArrivals.name}, such as {EXAMPLE}"
        )
    values = _numbers(rest if colon else None, KINDS[name], text)
    if ("load" in values) == ("rate" in values):
        raise SettingsError(f"arrivals={text!r}: must state the load or the rate, one of them, as in {EXAMPLE}")
    if "load" in values and capacity is None:
        raise SettingsError(f"arrivals={text!r}: a load needs a profile to be a share of; state rate=...")
    rows = int(values.pop("rows", 1))
    try:
        if KINDS[name] is Ramp and "to" not in values:
            raise SettingsError("to: must be given, the load or rate at the end of the climb")
        rate = _rate(values, 1.0 if "rate" in values or capacity is None else capacity)
        return KINDS[name](rate, rows=rows, **values)
    except SettingsError as error:
        raise SettingsError(f"arrivals={text!r}: {error.message}") from None


def _numbers(rest: str | None, kind: type[Arrivals], text: str) -> dict[str, float]:
    """Return the numbers in `rest` by key. The bare number is `load`."""
    known = ["load", *(each.name for each in fields(kind))]
    known = [("to" if key == "climb" else key) for key in known]
    values: dict[str, float] = {}
    for index, part in enumerate(rest.split(",") if rest is not None else ()):
        key, separator, value = part.partition("=")
        if not separator and index == 0:
            key, value = "load", part
        if key not in known or not (separator or index == 0):
            raise SettingsError(f"arrivals={text!r}: no setting {part!r}; it has {', '.join(known[1:])}")
        if key in values:
            raise SettingsError(f"arrivals={text!r}: {part}: {key} is given twice; give it once")
        values[key] = _number(key, value, text)
    return values


def _number(key: str, value: str, text: str) -> float:
    try:
        if key == "rows":
            return int(value)
        return parse_duration(value) if key in DURATIONS else float(value)
    except ValueError:
        rule = "a whole number" if key == "rows" else "a duration such as 1s" if key in DURATIONS else "a number"
        raise SettingsError(f"arrivals={text!r}: {key}={value!r}: must be {rule}") from None


def _rate(values: dict[str, float], unit: float) -> float:
    """Remove the load or rate from `values` and return it in rows per second; for a ramp the mean of its ends.

    `unit` is the number of rows per second that 1 stands for.
    """
    key = "rate" if "rate" in values else "load"
    value = values.pop(key)
    if not 0.0 < value < inf:
        raise SettingsError(f"{key}={value:g}: must be greater than 0, and finite")
    if (last := values.pop("to", None)) is None:
        return value * unit
    if not 0.0 <= last < inf:
        raise SettingsError(f"to={last:g}: must be 0 or more, and finite")
    values["climb"] = last / value
    return (value + last) / 2.0 * unit


__all__ = [
    "Arrivals", "Constant", "GammaRenewal", "MarkovModulated", "OnOff", "Poisson", "Ramp", "RecordedArrivals", "Sine",
    "parse_arrivals",
]  # fmt: skip
