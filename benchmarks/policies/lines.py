"""Plays policies on the same lines of arrivals, one line for each seed, and says what came of it with intervals."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Policy
from weir.simulation.arrivals import Arrivals
from weir.simulation.engine import ServiceTimes
from weir.simulation.rounds import Figures, PlayedRounds, Rule, figures, play
from weir.simulation.search import Tuned, best_limit, best_size_or_delay
from weir.simulation.simulator import run
from weir.simulation.statistics import LEVEL, Estimate

Player = Callable[[Floats, int], Figures | None]  # (arrivals in seconds, seed) -> what came of it; None: it cannot
SIZES = (2, 4, 8, 12, 16, 20, 24, 32)  # the grid of hand-tuned sizes and delays (seconds)
DELAYS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025)
FIRST_SEED = 101  # the banks are made with seed 1: what is measured is not what was searched on


class Effort(NamedTuple):
    """How much is played. `step(text)` moves the progress bar on, once per line and policy."""

    seeds: int
    requests: int
    step: Callable[[str], None]


Seen = dict[str, list[Figures | None]]  # by policy: one for each seed


def play_all(arrivals: Arrivals, players: Mapping[str, Player], effort: Effort) -> Seen:
    """Play every player on the same lines."""
    seen: Seen = {name: [] for name in players}
    for seed in range(FIRST_SEED, FIRST_SEED + effort.seeds):
        times = arrivals.times(np.random.default_rng([seed, 0]), effort.requests)
        for name, player in players.items():
            seen[name].append(player(times, seed))
            effort.step(f"{arrivals} seed {seed}: {name}")
    return seen


def real(profile: Profile, policy: str | Policy, *, workers: int = 1, deadline: float = np.inf) -> Player:
    """The policy itself in the real batcher."""

    def player(times: Floats, seed: int) -> Figures:
        made = run(profile, policy, times, workers=workers, services_seed=seed)
        batches = made.batches
        served = made.arrival[np.isfinite(made.end)]
        rounds = PlayedRounds(batches.start, batches.end, batches.rows, served, int(made.refused.sum()))
        return figures(rounds, profile, deadline)

    return player


def ruled(profile: Profile, rule: Rule, *, workers: int = 1, deadline: float = np.inf) -> Player:
    """A rule that nothing adapts, without the batcher."""

    def player(times: Floats, seed: int) -> Figures:
        rounds = play(times.tolist(), rule, ServiceTimes(profile, seed), profile.max_batch_size, workers)
        return figures(rounds, profile, deadline)

    return player


def tuned_limit(
    profile: Profile, prices: Prices, *, workers: int = 1, objective: LatencySLO | None = None, max_waiting: int = 0
) -> Player:
    """The best control limit for the very line that it is played on."""

    def player(times: Floats, seed: int) -> Figures | None:
        return _of(
            best_limit(
                profile,
                times,
                prices,
                workers=workers,
                objective=objective,
                max_waiting=max_waiting,
                services_seed=seed,
            )
        )

    return player


def tuned_delay(
    profile: Profile, prices: Prices, delays: Sequence[float] = DELAYS, *, sizes: Sequence[int] = SIZES,
    workers: int = 1, objective: LatencySLO | None = None,
) -> Player:  # fmt: skip
    """The best size and delay for the very line that it is played on."""

    def player(times: Floats, seed: int) -> Figures | None:
        return _of(
            best_size_or_delay(
                profile,
                times,
                prices,
                workers=workers,
                objective=objective,
                sizes=sizes,
                delays=delays,
                services_seed=seed,
            )
        )

    return player


def _of(tuned: Tuned | None) -> Figures | None:
    return None if tuned is None else tuned.figures


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over the seeds with its 95 % interval (Student's t: lines of different seeds are independent)."""
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, -np.inf, np.inf)
    half = float(stdtrit(len(values) - 1, 0.5 + LEVEL / 2)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def known(seen: Sequence[Figures | None]) -> list[Figures]:
    """Return the figures of a player that could on every line; nothing otherwise."""
    found = [each for each in seen if each is not None]
    return found if len(found) == len(seen) else []


def of(seen: Sequence[Figures | None], what: Callable[[Figures], float]) -> Estimate | None:
    """Return `what`, over the seeds; None where the player could not."""
    found = known(seen)
    return estimate([what(each) for each in found]) if found else None


def saved(
    ours: Sequence[Figures | None], theirs: Sequence[Figures | None], what: Callable[[Figures], float]
) -> Estimate | None:
    """Return the share of `what` that ours saves of theirs, line by line; None where either could not."""
    mine, other = known(ours), known(theirs)
    if not mine or not other:
        return None
    return estimate([1.0 - what(each) / what(rival) for each, rival in zip(mine, other, strict=True)])


def show(value: Estimate | None, digits: int = 2, factor: float = 1.0, unit: str = "") -> str:
    """1.234 ± 0.056, or a dash."""
    if value is None:
        return "–"
    return f"{factor * value.value:.{digits}f}{unit} ± {factor * value.half_width:.{digits}f}"


def percent(value: Estimate | None) -> str:
    """12.3 % ± 0.4"""
    return show(value, 1, 100.0, " %")
