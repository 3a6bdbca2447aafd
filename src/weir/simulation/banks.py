"""Makes the bank that a server runs, for one or several workers, with or without a latency SLO.

One worker without an objective is solved exactly (policy/solve/). No exact solution is known for the other cases: one
control limit for each rate is found by simulation, all candidates on the same arrivals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weir.policy.cost import ROUNDING, Floats, LatencySLO, Prices, Profile, read_profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import HYSTERESIS, LOWER, Bank, bank_of, hysteresis, solve_bank
from weir.policy.solve.smdp import Performance, evaluate
from weir.policy.solve.tables import Table, greedy_table, limit_of, limit_table, multi_worker_table, stacked
from weir.simulation.arrivals import MarkovModulated
from weir.simulation.replicas import (
    SEARCH_BATCHES,
    SEARCH_QUEUES,
    SEARCH_ROWS,
    TRIED,
    ReplicaCase,
    ReplicaEstimate,
    ReplicaFigures,
    Replicas,
    best_tables,
    estimate,
)
from weir.simulation.search import BURST, BURST_BATCHES, SURE, Figures, SloSearch, lowest
from weir.simulation.simulator import check_count, run
from weir.simulation.statistics import STRETCHES

Progress = Callable[[int, int], None]  # rates done, and their number

# Loads, as shares of the capacity of all workers together.
MULTI_WORKER_LOADS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.86, 0.9, 0.94, 0.97)
# By how much, relative to the least cost, a table may cost more before a rate is added; and how often rates are added.
DEARER, ROUNDS = 0.008, 5
LOWER_RATES = 5  # each LOWER times less than the one above
# With an objective; close together where the limit falls and refusals begin.
PROMISE_LOADS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.83, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96, 0.97)
# Loads at which more arrives than can be served; the estimate of a lower rate may be as high.
BEYOND = (1.0, 1.1)
FLOORS = (0.0, 0.85, 0.93, 1.0, 1.05, 2.0)  # loads below which no request is refused, tried in this order
CHECKED_LOADS, CHECKED_REQUESTS = (0.7, 0.8, 0.85), 40_000
BURST_LOADS = (0.1, 0.2, 0.3, 0.5)  # mean loads in bursts at which waits must not lose anything
PROMISE_REQUESTS = 30_000


def make_bank(
    profile: Profile,
    prices: Prices | None = None,
    *,
    workers: int = 1,
    objective: LatencySLO | None = None,
    seed: int = 1,
    progress: Progress | None = None,
) -> Bank:
    """Return the bank with the least cost; with an objective, the one with the least energy that keeps it.

    With the objective to answer most requests in time it is the bank that does.

    Args:
        profile: the costs of a batch on one worker.
        prices: the weights of latency and energy; with an objective they have no effect.
        workers: the number of workers that serve the one queue.
        objective: the latency SLO.
        seed: of the simulations; the same seed gives the same bank.
        progress: called with (rates done, their number).

    Raises SettingsError for fewer than one worker, and, naming it, for an objective that cannot be kept.
    """
    prices = prices or Prices()
    check_count("workers", workers, 1)
    check_count("seed", seed, 0)
    report = progress or (lambda done, total: None)
    if objective is not None:
        return _promised(profile, prices, workers, objective, seed, report)
    if workers > 1:
        return _for_several(profile, prices, workers, seed, report)
    return solve_bank(profile, prices)


def _for_several(profile: Profile, prices: Prices, workers: int, seed: int, report: Progress) -> Bank:
    replicas = Replicas(profile, workers)
    tables = tables_for_several(replicas, prices, seed)
    seen = []
    for done, (rate, table) in enumerate(tables.items(), 1):
        seen.append(estimate(replicas, rate, table, seed))
        report(done, len(tables))
    return bank_of(profile, prices, workers, list(tables), list(tables.values()), _predicted(seen))


def tables_for_several(replicas: Replicas, prices: Prices, seed: int) -> dict[float, Table]:
    """Return the tables of a bank for several workers by rate, in rows per second, ascending.

    The rates are those of MULTI_WORKER_LOADS, lower ones until rows no longer wait for others, and further ones between
    neighbours of which a table surely costs over DEARER more than the best one known, somewhere where it may be in use.
    """
    capacity = replicas.workers * replicas.profile.max_rate
    rates = [load * capacity for load in MULTI_WORKER_LOADS]
    found = dict(zip(rates, best_tables(replicas, rates, prices, seed), strict=True))
    found |= _below(replicas, prices, seed, rates[0], limit_of(found[rates[0]]))
    pairs = list(pairwise(sorted(found)))
    for _ in range(ROUNDS):
        added = _between(replicas, prices, seed, found, pairs)
        found |= added
        pairs = [pair for pair in pairwise(sorted(found)) if not added.keys().isdisjoint(pair)]
    limits = {rate: limit_of(found[rate]) for rate in sorted(found)}
    alike = {
        rate
        for low, rate, high in zip(limits, list(limits)[1:], list(limits)[2:], strict=False)
        if limits[low] == limits[rate] == limits[high]
    }
    return {rate: found[rate] for rate in limits if rate in rates or rate not in alike}


def _below(replicas: Replicas, prices: Prices, seed: int, lowest: float, limit: int) -> dict[float, Table]:
    """Return tables for rates below the `lowest`, whose limit is `limit`, down to one from which on it does not change."""
    rates = [lowest / LOWER**step for step in range(1, LOWER_RATES + 1)] if limit > 1 else []
    found = dict(zip(rates, best_tables(replicas, rates, prices, seed), strict=True))
    limits = [limit, *map(limit_of, found.values())]
    while len(limits) > 1 and limits[-1] == limits[-2]:
        limits.pop()
        found.popitem()
    return found


def _between(
    replicas: Replicas, prices: Prices, seed: int, found: Mapping[float, Table], pairs: Sequence[tuple[float, float]]
) -> dict[float, Table]:
    """Return, for those `pairs` of neighbouring rates that need one, a rate halfway, by ratio, and the table with the best
    of the limits from the one's to the other's.
    """
    cases, profile = [], replicas.profile
    pairs = [(low, high) for low, high in pairs if limit_of(found[low]) != limit_of(found[high])]
    tried = [_limits(limit_of(found[low]), limit_of(found[high])) for low, high in pairs]
    most = max(map(max, tried), default=1)
    draws = replicas.draws(SEARCH_QUEUES, SEARCH_ROWS + SEARCH_BATCHES * most, [seed, 5])
    for (low, high), limits in zip(pairs, tried, strict=True):
        tables = [multi_worker_table(profile, limit) for limit in limits]
        margin = 1.0 + hysteresis(low, high)
        cases += [ReplicaCase(sqrt(low * high) * factor, tables, draws) for factor in (margin, 1.0 / margin)]
    excess = [_excess(case.rate, prices, made) for case, made in zip(cases, replicas.serve_all(cases), strict=True)]
    added = {}
    for (low, high), limits, above, below in zip(pairs, tried, excess[::2], excess[1::2], strict=True):
        if max(_bounds(above[0])[0], _bounds(below[-1])[0]) > DEARER:
            best = int((above + below).mean(axis=1).argmin())
            added[sqrt(low * high)] = multi_worker_table(profile, limits[best])
    return added


def _limits(low: int, high: int) -> list[int]:
    """Return at most TRIED limits from that of the lower rate to that of the higher one."""
    return list(dict.fromkeys(np.linspace(low, high, TRIED).astype(int).tolist()))


def _excess(rate: float, prices: Prices, made: ReplicaFigures) -> Floats:
    """Return by what share of the least cost each table costs more in each queue; shape (tables, queues)."""
    costs = prices.latency_weight_at(rate) * made.response_ms + prices.energy_weight * made.power_w
    least = costs[costs.mean(axis=1).argmin()]
    return np.asarray((costs - least) / least.mean(), dtype=np.float64)


def _promised(
    profile: Profile, prices: Prices, workers: int, objective: LatencySLO, seed: int, report: Progress
) -> Bank:
    """Return the bank for an objective. Each table keeps it at all rates at which it is used: halfway, by ratio, to its
    neighbours, and as far beyond as the hysteresis ever allows; the true rate also differs from its estimate.
    """
    search = SloSearch(profile, objective, workers=workers, seed=seed)
    trials, bursts = search.trials(PROMISE_REQUESTS), search.trials(PROMISE_REQUESTS, 1, bursts=True)
    allowed = search.admission
    loads = (*PROMISE_LOADS, *BEYOND)
    rates = workers * profile.max_rate * np.array(loads)
    highest = np.append(np.sqrt(rates[:-1] * rates[1:]), rates[-1])
    lowest = np.append(rates[0], highest[:-1])
    found, seen = [], []
    for done, (low, rate, worst) in enumerate(zip(lowest.tolist(), rates.tolist(), highest.tolist(), strict=True), 1):
        if objective.counts_refusals:
            kept = search.most_in_time(low, worst, trials, bursts)
            seen.append(trials(rate, search.rule(kept.limit, kept.max_waiting, rate=rate)))
        else:
            kept = search.at((low * (1.0 - HYSTERESIS), rate, worst * (1.0 + HYSTERESIS)), trials, rate)
            seen.append(kept.figures)
        found.append(kept)
        report(done, len(rates))
    firsts = [search.table(kept.limit, kept.max_waiting) for kept in found]
    bank = bank_of(profile, prices, workers, rates, firsts, _predicted(seen))
    made = replace(
        bank,
        objective=search.objective,
        max_waiting=np.array([allowed.max_waiting if kept.max_waiting is None else kept.max_waiting for kept in found]),
    )
    return _checked_in_time(made, search, seed) if objective.counts_refusals else made


def _checked_in_time(bank: Bank, search: SloSearch, seed: int) -> Bank:
    """Return `bank`, greedy below the lowest of FLOORS from which refusals do not surely lose more than greedy does.

    The bound of each band was found at a known rate. The policy only has an estimate, which is too high just after
    many arrivals; then the queue is long, and rows may be refused that the greedy policy would still answer in time.
    So the policy itself is simulated. If service times vary, it is also simulated in bursts, and unless it surely
    loses no more than greedy there, no row waits on purpose.
    """
    lines = []
    for number, load in enumerate(CHECKED_LOADS):
        rng = np.random.default_rng([seed, 3, number])
        lines.append(np.cumsum(rng.exponential(1.0 / (load * bank.capacity), CHECKED_REQUESTS)))

    def lost(policy: str | SolvedPolicy, times: Floats) -> Floats:
        """Return what is lost in each stretch of the arrivals at `times` (seconds); shape (STRETCHES,)."""
        made = run(bank.profile, policy, times, workers=bank.workers, services_seed=seed)
        taken = made.end - made.arrival + bank.profile.latency_offset_ms / 1000.0
        late = taken > search.objective.deadline + 2.0 * ROUNDING
        each = np.where(made.refused, search.objective.refusal_price, late)
        return np.array([part.sum() for part in np.array_split(each, STRETCHES)])

    def loses_no_more(tried: Bank, lines: Sequence[Floats]) -> bool:
        policy = SolvedPolicy(tried)
        return all(_bounds(lost(policy, times) - lost("greedy", times))[1] <= 0.0 for times in lines)

    if bank.profile.cv.any() and not loses_no_more(bank, _bursts(bank, seed)):
        bank = _without_waits(bank)
    greedy = [lost("greedy", times) for times in lines]
    for floor in FLOORS:
        tried = _greedy_below(bank, search, floor)
        policy = SolvedPolicy(tried)
        if all(_bounds(lost(policy, times) - most)[0] <= 0.0 for times, most in zip(lines, greedy, strict=True)):
            break
    return tried


def _bursts(bank: Bank, seed: int) -> list[Floats]:
    """Return arrivals in bursts that last some of the longest batches, at nearly three times the mean rate; seconds."""
    period = BURST_BATCHES * float(bank.profile.service_time_ms.max()) / 1000.0
    processes = [MarkovModulated(load * bank.capacity, burst=BURST, period=period) for load in BURST_LOADS]
    return [
        process.times(np.random.default_rng([seed, 4, number]), CHECKED_REQUESTS)
        for number, process in enumerate(processes)
    ]


def _without_waits(bank: Bank) -> Bank:
    """Return `bank` with tables that dispatch all waiting rows where they waited."""
    rows = np.minimum(np.arange(bank.tables.shape[1]), bank.profile.max_batch_size)
    tables = np.where(bank.tables == 0, rows, bank.tables).astype(np.uint16)
    return replace(bank, tables=tables)


def _bounds(beyond: Floats) -> tuple[float, float]:
    """Return between what the mean of these differences, of the same arrivals, surely lies; shape (stretches,)."""
    mean, error = float(beyond.mean()), float(np.std(beyond, ddof=1)) / len(beyond) ** 0.5
    return mean - SURE * error, mean + SURE * error


def _greedy_below(bank: Bank, search: SloSearch, floor: float) -> Bank:
    """Return `bank` without refusals, and without waits where there were refusals, below that load."""
    tables, bounds = list(bank.tables), bank.max_waiting.copy()
    for index in np.flatnonzero((bank.rates < floor * bank.capacity) & (bounds > 0)).tolist():
        tables[index], bounds[index] = search.table(1, 0), 0
    return replace(bank, tables=stacked(tables), max_waiting=bounds)


def _predicted(seen: Sequence[Figures | ReplicaEstimate]) -> list[tuple[float, float, float]]:
    return [(each.response_time_ms, each.p99_ms, each.power_w) for each in seen]


# From a profile to the bank that a server runs, in one call; and how it compares with rules that need no solver.


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
    """Return the policy tables to serve with (a Bank), for all rates up to 97 % of the workers' capacity.

    Args:
        profile: the costs of a batch: a Profile, or a file written by `weir profile`.
        latency_weight: weight of a millisecond of mean response time.
        energy_weight: weight of a watt of mean power.
        reference_rate: rows per second at which these weights hold; waiting then costs the same at every rate.
        workers: the number of workers that serve the one queue.
        latency_objective: a latency to keep with the least energy, such as "p99=20ms"; the weights then have no
            effect.
        max_batch_size: the largest batch in rows, if it shall be smaller than the profile's.
        seed: of the simulations that several workers, or an objective, need.
        progress: called with (rates done, their number).

    Write `bank.to_bytes()` to a file `NAME.npz` to serve with it: `weir serve --policy NAME.npz`.

    Raises SettingsError naming the value that breaks a rule.
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
    """Says what rules without a solver do at a rate: `greedy`, and the control limit (rows) that is best for that very
    rate.
    """

    greedy: Performance
    best_limit: int
    best: Performance


def beside(bank: Bank) -> list[Beside]:
    """Return, for each rate of a bank for one worker, what these rules do, exactly."""
    return [_beside(bank, rate, limit) for rate, limit in zip(bank.rates.tolist(), bank.limits().tolist(), strict=True)]


def _beside(bank: Bank, rate: float, start: int) -> Beside:
    profile, most = bank.profile, bank.profile.max_batch_size
    found: dict[int, Performance] = {}

    def cost(limit: int) -> float:
        found[limit] = evaluate(profile, rate, limit_table(limit, most), bank.prices)
        return found[limit].cost

    best = lowest(cost, start, most)
    return Beside(evaluate(profile, rate, greedy_table(most), bank.prices), best, found[best])
