"""Plays policies on the same lines of arrivals, one line for each seed, and says what came of it with intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Policy
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import Arrivals
from weir.simulation.engine import ServiceTimes
from weir.simulation.rounds import Figures, PlayedRounds, Rule, figures, play
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


# The best hand-tuned rules: what someone finds who tries every setting on the very traffic that is to come.
#
# No one can do so in earnest, because the traffic is not known before. It is the hardest rival that a policy can be
# measured against, and the honest one.


Progress = Callable[[int, int], None]  # settings tried, of how many

EVERY_DELAY = (0.0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)  # seconds


class Tuned(NamedTuple):
    """The best of a family of rules on one queue. `policy` is its text form; `figures` are those of that queue."""

    policy: str
    figures: Figures


def best_limit(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, max_waiting: int = 0, services_seed: int = 1, progress: Progress | None = None,
) -> Tuned | None:  # fmt: skip
    """Return the control limit, of all there are, that costs least on single rows arriving at `arrivals` (seconds).

    With an `objective` it is the one with the least energy of those that keep it on this queue; None if none does. With
    `max_waiting`, arrivals are refused beyond so many waiting rows. Raises SettingsError for an empty queue.
    """
    most = profile.max_batch_size
    rules = {
        f"control-limit:{limit}": Rule(limit_table(limit, most).tolist(), max_waiting=max_waiting)
        for limit in range(1, most + 1)
    }
    return _best(profile, arrivals, rules, prices, workers, objective, services_seed, progress)


def best_size_or_delay(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, sizes: Iterable[int] | None = None, delays: Sequence[float] = EVERY_DELAY,
    services_seed: int = 1, progress: Progress | None = None,
) -> Tuned | None:  # fmt: skip
    """Return the size and delay that cost least on this queue, of all pairs of `sizes` (about twelve, if left out) and
    `delays` (seconds). Otherwise as `best_limit`."""
    most = profile.max_batch_size
    rules = {}
    for size in sizes or sorted({1, *(max(1, round(most * part / 12)) for part in range(1, 13))}):
        for delay in delays:
            text = f"size-or-delay:size={size},delay={1000.0 * delay:g}ms"
            rules[text] = Rule(limit_table(size, most).tolist(), allowance=[delay] * (most + 1))
    return _best(profile, arrivals, rules, prices, workers, objective, services_seed, progress)


def _best(
    profile: Profile, arrivals: Floats, rules: dict[str, Rule], prices: Prices | None, workers: int,
    objective: LatencySLO | None, services_seed: int, progress: Progress | None,
) -> Tuned | None:  # fmt: skip
    if len(arrivals) < 2 or not arrivals[-1] > 0.0:
        raise SettingsError(f"arrivals: must be two or more, at different instants; there are {len(arrivals)}")
    prices = prices or Prices()
    weights = prices.latency_weight_at(len(arrivals) / float(arrivals[-1])), prices.energy_weight
    coming, services = arrivals.tolist(), ServiceTimes(profile, services_seed)
    best, least = None, inf
    for done, (text, rule) in enumerate(rules.items(), 1):
        rounds = play(coming, rule, services, profile.max_batch_size, workers)
        if len(rounds.starts) < 2:
            continue  # it waits for more rows than there are: nothing is known of it
        seen = figures(rounds, profile, inf if objective is None else objective.deadline)
        worth = seen.excess_cost(*weights) if objective is None else seen.excess_w
        if worth < least and (objective is None or seen.late_share <= objective.late_share):
            best, least = Tuned(text, seen), worth
        if progress is not None:
            progress(done, len(rules))
    return best


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
