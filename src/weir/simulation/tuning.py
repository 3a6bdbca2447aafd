"""The best hand-tuned rules: what someone finds who tries every setting on the very traffic that is to come.

No one can do so in earnest, because the traffic is not known before. It is the hardest rival that a policy can be
measured against, and the honest one.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from weir.errors import SettingsError
from weir.policy.cost.latency_slo import LatencySLO
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.tables import limit_table
from weir.simulation.rounds import Figures, Rule, figures, play
from weir.simulation.services import Services

Progress = Callable[[int, int], None]  # settings tried, of how many

DELAYS = (0.0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)  # seconds


class Tuned(NamedTuple):
    """The best of a family of rules on one line. `policy` is its text form; `figures` are those of that line."""

    policy: str
    figures: Figures


def best_limit(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, max_waiting: int = 0, services_seed: int = 1, progress: Progress | None = None,
) -> Tuned | None:  # fmt: skip
    """Return the control limit, of all there are, that costs least on single rows arriving at `arrivals` (seconds).

    With an `objective` it is the one with the least energy of those that keep it on this line; None if none does. With
    `max_waiting`, arrivals are refused beyond so many waiting rows. Raises SettingsError for an empty line.
    """
    most = profile.max_batch_size
    rules = {
        f"control-limit:{limit}": Rule(limit_table(limit, most).tolist(), max_waiting=max_waiting)
        for limit in range(1, most + 1)
    }
    return _best(profile, arrivals, rules, prices, workers, objective, services_seed, progress)


def best_size_or_delay(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, sizes: Iterable[int] | None = None, delays: Sequence[float] = DELAYS,
    services_seed: int = 1, progress: Progress | None = None,
) -> Tuned | None:  # fmt: skip
    """Return the size and delay that cost least on this line, of all pairs of `sizes` (about twelve, if left out) and
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
    coming, services = arrivals.tolist(), Services(profile, services_seed)
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
