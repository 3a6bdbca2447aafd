"""A whole run: targets side by side, in rounds, and what came of it."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from weir.bench.load import Load, LoadSettings, make_load
from weir.bench.outcome import Outcome, make_outcome
from weir.bench.rounds import Clock, Round, run_round
from weir.bench.target import Ledger, Target
from weir.errors import SettingsError


@dataclass(frozen=True, eq=False)
class Report:
    """What a run measured. `outcomes` has each target's by its name; `failures` say, one line each, why the run is no
    measurement (none: it is one)."""

    arrivals: str
    rate: float | None  # meant, requests per second; None in a closed loop
    duration: float  # seconds of load on each target
    rounds: int
    warm_up: float  # seconds of each round
    seed: int
    max_lag_ms: float
    outcomes: dict[str, Outcome]
    failures: list[str]

    @property
    def outcome(self) -> Outcome:
        """The first target's, which is the only one as a rule."""
        return next(iter(self.outcomes.values()))


@dataclass(frozen=True)
class Turn:
    """A round of one target: the `index`-th of `count` turns, each of so many seconds."""

    target: str
    index: int
    count: int
    seconds: float


Watch = Callable[[Turn, Ledger], None]


async def run_bench(
    targets: Sequence[Target], settings: LoadSettings, *, clock: Clock = time.monotonic,
    watch: Watch = lambda turn, books: None,
) -> Report:  # fmt: skip
    """Put the same load on each of `targets`, in turns, and return what was measured.

    `watch(turn, books)` is called at the start of each round. Raises SettingsError when a
    target cannot be had; all that was opened is closed again.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"targets {', '.join(names) or 'none'}: must be one or more, of different names")
    load = make_load(settings, len(targets))
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    try:
        for target in targets:
            await target.open()
        with _without_pauses():
            for index in range(load.rounds):
                for place, target in enumerate(_turned(targets, index)):
                    turn = Turn(
                        target.name, index * len(targets) + place, load.rounds * len(targets), load.round_seconds
                    )
                    shown = partial(watch, turn)
                    rounds[target.name].append(await run_round(target, load, index, clock=clock, watch=shown))
    finally:
        for target in targets:
            await target.close()
    outcomes = {
        target.name: make_outcome(target.name, load, rounds[target.name], target.connections, target.held)
        for target in targets
    }
    return _report(load, settings, outcomes)


def _turned(targets: Sequence[Target], index: int) -> list[Target]:
    """Let another target be the first in each round: what is first may find the machine in another state."""
    first = index % len(targets)
    return [*targets[first:], *targets[:first]]


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Keep the garbage collector away from what is there already: to look through it takes longer than a request."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _report(load: Load, settings: LoadSettings, outcomes: dict[str, Outcome]) -> Report:
    return Report(
        arrivals=load.arrivals,
        rate=load.rate,
        duration=load.round_seconds * load.rounds,
        rounds=load.rounds,
        warm_up=load.warm_up,
        seed=settings.seed,
        max_lag_ms=settings.max_lag_ms,
        outcomes=outcomes,
        failures=[line for outcome in outcomes.values() for line in _failures(outcome, settings.max_lag_ms)],
    )


def _failures(outcome: Outcome, max_lag_ms: float) -> list[str]:
    lines = []
    if outcome.rate is not None and outcome.lag.p99_ms > max_lag_ms:
        held = f", {outcome.held} of them for want of a connection (max_connections)" if outcome.held else ""
        lines.append(
            f"{outcome.target}: requests left late: {outcome.lag.p99_ms:.2f} ms at p99, which must be at most"
            f" {max_lag_ms:g} ms (max_lag_ms){held}; the load is not what was asked for"
        )
    if not outcome.answered:
        worst = max(outcome.errors, key=lambda kind: outcome.errors[kind], default="timeout")
        lines.append(f"{outcome.target}: no request was answered ({worst})")
    return lines
