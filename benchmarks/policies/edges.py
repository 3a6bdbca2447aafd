"""Policies where they are not made for the very rate, beside evaluations that share no code with Weir.

A case is a random model. Of one worker: at three rates between those of its bank, every table that may be in use there beside the
best one (policy iteration in C). Of several: the common limit beside every other limit, and what is predicted, beside the event
loop in C. Of a latency objective: the share that is late or refused at both ends and in the middle of a band, by a loop that only
asks the policy. Of the number of workers: the share that is late at 0.99 of the highest rate that is said to keep an objective.
"""

from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from tests.policy.asked_loop import asked
from tests.policy.between import excess_of
from tests.policy.event_loop import Interval, interval, served_by_several
from tests.policy.random_models import Drawn, drawn

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import Floats
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import boundaries_of, margins_of
from weir.policy.solve.bank import Bank, bank_of, solve_everywhere
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_of, multi_worker_table
from weir.simulation import banks
from weir.simulation.banks import MULTI_WORKER_LOADS, PROMISE_LOADS, make_bank
from weir.simulation.replicas import Replicas, best_tables, estimate
from weir.simulation.scaling import CapacityRequest, measure_capacity

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "src" / "weir" / each for each in ("policy", "simulation")), Path(__file__),
    *(ROOT / "tests" / "policy" / each for each in ("event_loop.c", "event_loop.py", "random_models.py", "between.py", "asked_loop.py")),
]  # fmt: skip
BAND, LIMIT, LIMIT_BETWEEN = (
    "one worker, between rates: cost",
    "several workers: cost at a bank's rate",
    "and between rates: cost",
)
MEAN, P99 = "several workers: predicted mean", "several workers: predicted p99"
PROMISE, WORKERS = "latency objective: late or refused", "number of workers: late"
EITHER = -2.0  # of `off`: nothing was promised; -1 is the least that can be late
WORKER_COUNTS = (2, 4, 8, 16)
ROWS, PARTS = 20_000, 20  # of an event loop's stretch
SEARCH_ROWS, SEARCH_PARTS = 5_000, 10
MOST_ROWS = 500_000  # of a stretch, where fewer do not say enough
ENOUGH_MEAN, ENOUGH_P99 = 0.003, 0.01  # half widths that say enough
SLO_ROWS, SURE_ROWS = 20_000, 100_000  # of each rate, and where an objective seems to be broken


class Case(NamedTuple):
    """What was found: of which quantity, about what, how far it is off, and half of its 99.9 % interval (two standard errors
    where it is a share that an objective allows)."""

    what: str
    about: str
    off: float
    half: float


def _small(number: int, most: int, steadiest: float) -> Drawn:
    """Return the first random model from that number on with batches of at most `most` rows and no larger coefficient."""
    model = drawn(number)
    while not 2 <= model.profile.max_batch_size <= most or model.profile.cv.max() > steadiest:
        number += 100_000
        model = drawn(number)
    return model


def _said(model: Drawn, load: float, *more: str) -> str:
    profile = model.profile
    about = f"drawn({model.number}): {model.shape}, B {profile.max_batch_size}, cv {profile.cv[0]:.2f}, load {load:.4g}"
    return ", ".join((about, *more))


def between(number: int) -> Iterator[Case]:
    """One worker: a low, a moderate and a high load."""
    model, rng = _small(number, 64, 2.0), np.random.default_rng([number, 21])
    bank = tables_of(model)
    loads = np.exp(rng.uniform(log(0.001), log(0.1))), rng.uniform(0.1, 0.8), rng.uniform(0.8, 0.99)
    for load in map(float, loads):
        off, half = excess_of(model, bank, load)
        yield Case(BAND, _said(model, load, f"energy weight {model.prices.energy_weight:.3g}"), off, half)


def tables_of(model: Drawn) -> Bank:
    """Return the bank that `solve_bank` makes, without its predictions: they take half of the time, and are held elsewhere."""
    found = solve_everywhere(model.profile, model.prices)
    rates, tables = [each.rate for each in found], [each.table for each in found]
    return bank_of(model.profile, model.prices, 1, rates, tables, [(0.0, 0.0, 0.0)] * len(found))


def several(number: int) -> Iterator[Case]:
    """Several workers: at one of the bank's loads, and halfway (or elsewhere) to the next."""
    model, rng = _small(number, 32, 2.0), np.random.default_rng([number, 22])
    profile, prices, workers = model.profile, model.prices, WORKER_COUNTS[number % len(WORKER_COUNTS)]
    at = int(rng.integers(3, len(MULTI_WORKER_LOADS) - 1))
    capacity = workers * profile.max_rate
    loads = MULTI_WORKER_LOADS[at : at + 2]
    rates = [load * capacity for load in loads]
    replicas = Replicas(profile, workers)  # as make_bank does for all loads
    limits = [limit_of(table) for table in best_tables(replicas, rates, prices, 1)]
    share = float(rng.uniform(0.0, 1.0))
    middle = loads[0] * (loads[1] / loads[0]) ** share
    # The bank's highest loads are the hardest: two thirds of the predictions are of the upper one.
    own = number % 3 and 1
    for what, load, limit in ((LIMIT, loads[own], limits[own]), (LIMIT_BETWEEN, middle, limits[share > 0.5])):
        about = _said(model, load, f"{workers} workers, energy weight {prices.energy_weight:.3g}, limit {limit}")
        yield Case(what, *_beside_all_limits(model, workers, load * capacity, limit, number, about))
    about = _said(model, loads[own], f"{workers} workers, limit {limits[own]}")
    yield from _predicted(replicas, rates[own], limits[own], number, about)


def _beside_all_limits(
    model: Drawn, workers: int, rate: float, limit: int, number: int, about: str
) -> tuple[str, float, float]:
    profile, prices = model.profile, model.prices
    weights = prices.latency_weight_at(rate), prices.energy_weight

    def costs(each: int, rows: int, parts: int, seed: int) -> Floats:
        tables = [multi_worker_table(profile, each)] * workers
        seen = served_by_several(profile, rate, tables, rows, parts=parts, warm=rows, share=0.0, seed=seed)
        return weights[0] * seen.means + weights[1] * seen.powers

    every = range(1, profile.best_batch_size + 1)
    best = min(every, key=lambda each: float(costs(each, SEARCH_ROWS, SEARCH_PARTS, 7 * number + 1).mean()))
    if best == limit:
        return f"{about}, the best", 0.0, 0.0
    # Other luck than the search's.
    ours, theirs = (costs(each, 2 * ROWS, PARTS, 7 * number + 2) for each in (limit, best))
    off = interval((ours - theirs) / theirs.mean())
    return f"{about}, the best {best}", off.mean, (off.high - off.low) / 2.0


def _predicted(replicas: Replicas, rate: float, limit: int, number: int, about: str) -> Iterator[Case]:
    profile, table = replicas.profile, multi_worker_table(replicas.profile, limit)
    predicted = estimate(replicas, rate, table, 1)
    rows = ROWS
    while True:
        seen = served_by_several(
            profile, rate, [table] * replicas.workers, rows, parts=PARTS, warm=5 * rows, seed=7 * number + 3
        )
        mean = _off(interval(seen.means), predicted.response_time_ms)
        p99 = _off(interval(seen.quantiles), predicted.p99_ms)
        missing = max(mean[1] / ENOUGH_MEAN, p99[1] / ENOUGH_P99)
        if missing <= 1.0 or rows == MOST_ROWS:
            break
        rows = int(min(max(rows * missing**2, 2 * rows), MOST_ROWS))
    yield Case(MEAN, about, *mean)
    yield Case(P99, about, *p99)


def _off(seen: Interval, predicted: float) -> tuple[float, float]:
    return abs(seen.mean / predicted - 1.0), (seen.high - seen.low) / 2.0 / predicted


def promises(number: int) -> Iterator[Case]:
    """A latency objective: both ends and the middle of the band of one load. Its neighbours are made too, others are not."""
    model, rng = _small(number, 24, 0.3), np.random.default_rng([number, 23])
    profile, at = model.profile, int(rng.integers(1, len(PROMISE_LOADS) - 1))
    late_share = float(rng.choice([0.001, 0.01, 0.05]))
    deadline = float(rng.uniform(2.5, 10.0)) * float(profile.service_time_ms[profile.best_batch_size - 1]) / 1000.0
    objective = LatencySLO(deadline, late_share)
    with patch.object(banks, "PROMISE_LOADS", PROMISE_LOADS[at - 1 : at + 2]):
        try:
            bank = make_bank(profile, objective=objective)
        except SettingsError:
            return  # it says that it cannot be kept
    ends = [
        edge * (1.0 + sign * margin)
        for edge, margin, sign in zip(boundaries_of(bank)[1:3], margins_of(bank)[1:3], (-1, 1), strict=True)
    ]
    says = np.isfinite(bank.p99_ms[:3])  # at a rate; between two, it says so if it does at both
    places = (
        ("lower end", ends[0], says[:2]),
        ("middle", float(bank.rates[1]), says[1:2]),
        ("upper end", ends[1], says[1:]),
    )
    for number_of, (place, rate, kept) in enumerate(places):
        rows = SLO_ROWS
        while True:
            coming = np.cumsum(np.random.default_rng([number, 24, number_of, rows]).exponential(1.0 / rate, rows))
            taken = asked(SolvedPolicy(bank), profile, coming, number)[rows // 10 :]
            lost = ~(taken <= deadline + 1e-6)
            share, half = _share(np.array([part.mean() for part in np.array_split(lost, PARTS)]))
            if rows == SURE_ROWS or share - half <= late_share or not kept.all():
                break
            rows = SURE_ROWS  # other luck, too: of so many cases some go wrong by chance
        where = f"{place} of load {PROMISE_LOADS[at]}, p{100 * (1 - late_share):g} = {1000 * deadline:.4g} ms"
        about = f"{_said(model, rate / profile.max_rate, where)}, late or refused {100 * share:.2f} %, of it refused {100 * np.isnan(taken).mean():.2f} %"
        yield Case(PROMISE, about, share / late_share - 1.0 if kept.all() else EITHER, half / late_share)


def _share(parts: Floats) -> tuple[float, float]:
    """Return the mean, and two standard errors of it."""
    return float(parts.mean()), 2.0 * float(parts.std(ddof=1)) / len(parts) ** 0.5


def capacities(number: int) -> Iterator[Case]:
    """The number of workers: one, and the most."""
    model, rng = _small(number, 32, 0.5), np.random.default_rng([number, 25])
    profile, most, solved = model.profile, int(rng.choice([2, 3, 4, 8])), bool(rng.random() < 0.5)
    deadline = float(rng.uniform(2.0, 8.0)) * float(profile.service_time_ms[profile.best_batch_size - 1]) / 1000.0
    request = CapacityRequest(profile, most, 1.0, objective=LatencySLO(deadline, 0.01), solved=solved)
    try:
        capacity = measure_capacity(request)
    except SettingsError:
        return  # it says that one worker cannot keep it
    table = full_batch_table(profile) if solved else greedy_table(profile.max_batch_size)
    for workers in (1, most):
        rate = 0.99 * capacity.rates[workers - 1]
        seen = served_by_several(
            profile, rate, [table] * workers, 2 * ROWS, parts=PARTS, warm=5 * ROWS, share=0.0,
            late=[1000.0 * deadline + 1e-6], seed=7 * number + 4,
        )  # fmt: skip
        share, half = _share(seen.shares[:, 0])
        where = f"{workers} workers, {'full batches' if solved else 'greedy'}, p99 = {1000 * deadline:.4g} ms, late {100 * share:.2f} %"
        yield Case(WORKERS, _said(model, rate / workers / profile.max_rate, where), share / 0.01 - 1.0, half / 0.01)


Kind = Callable[[int], Iterator[Case]]
# In turn, so that a run that is stopped has something of each.
TURN: Sequence[Kind] = (
    between, several, between, promises, between, several, between, capacities, between, several, between, between, between,
)  # fmt: skip
MODELS = 500  # of one worker
CASES = -(-MODELS // TURN.count(between)) * len(TURN)


def case(number: int) -> list[Case]:
    """Return what is found in the case of that number."""
    turn, place = divmod(number, len(TURN))
    kind = TURN[place]
    return list(kind(turn * TURN.count(kind) + TURN[:place].count(kind)))
