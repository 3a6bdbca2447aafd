"""From a profile to the bank that a server runs, in one call; and how it compares with what one would do without."""

from pathlib import Path
from typing import NamedTuple

from weir.policy.cost.latency_slo import LatencySLO
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.bank import Bank
from weir.policy.solve.evaluation import Performance, evaluate
from weir.policy.solve.tables import greedy_table, limit_table
from weir.simulation.banks import Progress, make_bank
from weir.simulation.reading import read_profile
from weir.simulation.trials import lowest


def solve(
    profile: Profile | str | Path,
    *,
    latency_weight: float = 1.0,
    energy_weight: float = 1.0,
    reference_rate: float | None = None,
    workers: int = 1,
    latency_objective: LatencySLO | str | None = None,
    max_batch_size: int | None = None,
    seed: int = 1,
    progress: Progress | None = None,
) -> Bank:
    """Return the bank of tables to serve with, for all rates up to 97 % of what the workers can serve.

    Args:
        profile: what a batch costs: a Profile, or a file written by `weir profile`.
        latency_weight: what a millisecond of mean response time costs.
        energy_weight: what a watt of mean power costs.
        reference_rate: rows per second at which these weights hold; waiting then costs the same at every rate.
        workers: how many workers serve the one line.
        latency_objective: a promise to keep with the least energy, such as "p99=20ms"; the weights then decide nothing.
        max_batch_size: the largest batch, if it is to be smaller than the profile's.
        seed: of the simulations that several workers, or an objective, need.
        progress: told (rates done, of how many).

    Write `bank.to_bytes()` to a file `NAME.npz` to serve with it: `weir serve --policy NAME.npz`.

    Raises SettingsError naming the value that cannot be.
    """
    found = profile if isinstance(profile, Profile) else read_profile(profile)
    objective = LatencySLO.parse(latency_objective) if isinstance(latency_objective, str) else latency_objective
    return make_bank(
        found if max_batch_size is None else found.up_to(max_batch_size),
        Prices(latency_weight, energy_weight, reference_rate),
        workers=workers,
        objective=objective,
        seed=seed,
        progress=progress,
    )


class Beside(NamedTuple):
    """What rules that need no solver do at a rate: `greedy`, and the control limit that is best for that very rate."""

    greedy: Performance
    best_limit: int
    best: Performance


def beside(bank: Bank) -> list[Beside]:
    """Return, for each rate of a bank for one worker, what the rules do, exactly."""
    return [_beside(bank, rate, limit) for rate, limit in zip(bank.rates.tolist(), bank.limits().tolist(), strict=True)]


def _beside(bank: Bank, rate: float, start: int) -> Beside:
    profile, most = bank.profile, bank.profile.max_batch_size
    found: dict[int, Performance] = {}

    def cost(limit: int) -> float:
        found[limit] = evaluate(profile, rate, limit_table(limit, most), bank.prices)
        return found[limit].cost

    best = lowest(cost, start, most)
    return Beside(evaluate(profile, rate, greedy_table(most), bank.prices), best, found[best])
