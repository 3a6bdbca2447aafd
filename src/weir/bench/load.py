"""What is asked of a target: when requests leave, and for how long."""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, check, setting
from weir.errors import SettingsError
from weir.simulation.arrivals import Arrivals, parse_arrivals

Floats = NDArray[np.float64]

_SHORTEST_ROUND = 0.05  # seconds
_MOST_REQUESTS = 20_000_000  # each is in the books: some gigabytes
_FINITE = (lambda value: 0 < value < inf, "must be greater than 0, and finite")


@dataclass(frozen=True)
class LoadSettings:
    """How a run is made. Durations are in seconds."""

    arrivals: str | Arrivals = setting(
        "poisson", "when requests leave (poisson, constant, gamma:cv=2, trace:FILE, ...)"
    )
    rate: float | None = setting(None, "requests per second, where the arrivals do not say", rule=_FINITE)
    duration: float | None = setting(None, "seconds of load (default: 10, or a trace's own)", rule=_FINITE)
    concurrency: int | None = setting(
        None,
        "closed loop instead: so many callers, each waiting for its answer before it asks again",
        rule=AT_LEAST_ONE,
    )
    warm_up: float = setting(0.1, "share of each round that is not counted", rule=(
        lambda value: 0 <= value < 1, "must be 0 or more, and less than 1"
    ))  # fmt: skip
    rounds: int | None = setting(
        None, "rounds, in which targets take turns (default: 5, or 1 for a single target)", rule=AT_LEAST_ONE
    )
    seed: int = setting(1, "of what is random in the arrivals", rule=AT_LEAST_ZERO)
    max_lag_ms: float = setting(1.0, "send lag at p99 above which the run fails", rule=POSITIVE)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, eq=False)
class Load:
    """Rounds of `round_seconds`. Open loop: `times[r]` has the instants of round r, in seconds from its start; closed loop:
    `times` is None, and `concurrency` callers ask."""

    arrivals: str
    rate: float | None  # intended, requests per second
    round_seconds: float
    rounds: int
    warm_up: float  # seconds of each round
    times: list[Floats] | None
    concurrency: int | None


def make_load(settings: LoadSettings, targets: int) -> Load:
    """Return what `settings` ask for; the same for every target. Raises SettingsError."""
    rounds = settings.rounds or (1 if targets == 1 else 5)
    if settings.concurrency is not None:
        if settings.rate is not None:
            raise SettingsError(
                f"rate={settings.rate:g}: a closed loop (concurrency) has none of its own; state one of them"
            )
        seconds = _round_seconds(settings.duration or 10.0, rounds)
        name = f"closed:{settings.concurrency}"
        return Load(name, None, seconds, rounds, settings.warm_up * seconds, None, settings.concurrency)
    arrivals = _arrivals(settings)
    length = arrivals.length
    if length is None:
        _check_count(arrivals.rate, settings.duration or 10.0)
    times = _times(arrivals, settings.duration or (10.0 if length is None else None), settings.seed)
    duration = settings.duration or (10.0 if length is None else float(times[-1]) + 1e-6)
    if not len(times):
        raise SettingsError(
            f"arrivals={settings.arrivals!r}: none within {duration:g} s; a longer duration or a higher rate"
        )
    seconds = _round_seconds(duration, rounds)
    edges = np.searchsorted(times, np.arange(1, rounds) * seconds)
    parts = [part - index * seconds for index, part in enumerate(np.split(times, edges))]
    return Load(_text(settings), len(times) / duration, seconds, rounds, settings.warm_up * seconds, parts, None)


def _check_count(rate: float, duration: float) -> None:
    if rate * duration > _MOST_REQUESTS:
        raise SettingsError(
            f"rate={rate:g}, duration={duration:g}: are {rate * duration:.3g} requests; must be at most {_MOST_REQUESTS:,}"
        )


def _round_seconds(duration: float, rounds: int) -> float:
    if rounds > 1 and duration / rounds < _SHORTEST_ROUND:
        raise SettingsError(
            f"duration={duration:g}: must be at least {_SHORTEST_ROUND * rounds:g} s for {rounds} rounds"
        )
    return duration / rounds


def _times(arrivals: Arrivals, duration: float | None, seed: int) -> Floats:
    blocks = []
    for block in arrivals.stream(np.random.default_rng(seed)):
        blocks.append(block)
        if duration is not None and len(block) and block[-1] >= duration:
            break
    times = np.concatenate(blocks)
    return times if duration is None else times[times < duration]


def _text(settings: LoadSettings) -> str:
    return settings.arrivals if isinstance(settings.arrivals, str) else settings.arrivals.name


def _arrivals(settings: LoadSettings) -> Arrivals:
    """Return the process; where its text states neither a load nor a rate, `rate` is put in."""
    text, rate = settings.arrivals, settings.rate
    if not isinstance(text, str):
        return text
    name, _, rest = text.partition(":")
    parts = [part for part in rest.split(",") if part]
    stated = name == "trace" or any(part.startswith("rate=") or "=" not in part for part in parts)
    if stated and rate is not None:
        raise SettingsError(f"rate={rate:g}: arrivals={text!r} state their own; state one of them")
    if not stated and rate is None:
        raise SettingsError(f"arrivals={text!r}: how many a second? Give --rate (requests per second)")
    return parse_arrivals(text if stated else f"{name}:{','.join([f'rate={rate!r}', *parts])}")
