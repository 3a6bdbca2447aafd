"""Policies where they are not made for the very rate, beside evaluations that share no code with Weir.

A case is a random model. Of one worker: at three rates between those of its bank, every table that may be in use there beside the
best one (policy iteration in C). Of several: the common limit beside every other limit, and what is predicted, beside the event
loop in C. Of a latency objective: the share that is late or refused at both ends and in the middle of a band, by a loop that only
asks the policy. Of the number of workers: the share that is late at 0.99 of the highest rate that is said to keep an objective.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.policies.asked_loop import asked
from benchmarks.policies.between import excess_of, in_use
from benchmarks.policies.event_loop import Interval, Seen, served_by_several, sharper
from benchmarks.policies.random_models import Drawn, drawn
from weir.errors import SettingsError
from weir.policy.cost import Floats, LatencySLO, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import boundaries_of, margins_of
from weir.policy.solve.bank import Bank, bank_of, solve_everywhere
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_of, multi_worker_table
from weir.simulation import banks
from weir.simulation.banks import MULTI_WORKER_LOADS, PROMISE_LOADS, make_bank, tables_for_several
from weir.simulation.replicas import Replicas, estimate
from weir.simulation.scaling import CapacityRequest, measure_capacity

ROOT = Path(__file__).resolve().parents[2]
EVALUATIONS = ("event_loop.c", "event_loop.py", "random_models.py", "between.py", "asked_loop.py")
BAND, LIMIT, LIMIT_BETWEEN = (
    "one worker, between rates: cost",
    "several workers: cost at a bank's rate",
    "and between rates: cost",
)
MEAN, P99 = "several workers: predicted mean", "several workers: predicted p99"
PROMISE, WORKERS = "latency objective: late or refused", "number of workers: late"
EITHER = -2.0  # of `off`: nothing was promised; -1 is the least that can be late
WORKER_COUNTS = (2, 4, 8, 16)
# Of an event loop: its stretches, and their rows. There are more until a case is surely within what is allowed.
PARTS, ROWS = 40, (20_000, 160_000, 1_280_000, 5_120_000)
SEARCH_ROWS = 5_000
SLO_PARTS, SLO_ROWS = 20, (20_000, 80_000, 320_000)  # rows of each rate, likewise
COST, MEAN_OFF, P99_OFF = 0.01, 0.01, 0.03  # what is allowed
BENDS = (0.0, 0.1, 0.3, 0.6, 0.9)  # of the work that stands for the longest responses
NEAR = 0.002 * np.arange(16)
STEPS = np.concatenate((-NEAR[:0:-1], NEAR))  # of a quantile, relative to what is predicted
STEPS = np.concatenate(([-0.5, -0.2, -0.1, -0.05], STEPS, [0.05, 0.1, 0.2, 0.5]))
TWO_ERRORS = 0.9545


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
    """Several workers: at one of the bank's loads, and by every table that may be in use somewhere on the way to the next one."""
    model, rng = _small(number, 32, 2.0), np.random.default_rng([number, 22])
    profile, prices, workers = model.profile, model.prices, WORKER_COUNTS[number % len(WORKER_COUNTS)]
    at = int(rng.integers(3, len(MULTI_WORKER_LOADS) - 1))
    capacity = workers * profile.max_rate
    loads = MULTI_WORKER_LOADS[at : at + 2]
    replicas = Replicas(profile, workers)
    tables = tables_for_several(replicas, prices, 1)
    bank = bank_of(profile, prices, workers, list(tables), list(tables.values()), [(0.0, 0.0, 0.0)] * len(tables))
    share = float(rng.uniform(0.0, 1.0))
    middle = loads[0] * (loads[1] / loads[0]) ** share
    # The bank's highest loads are the hardest: two thirds of the predictions are of the upper one.
    own = loads[number % 3 and 1]
    limit = limit_of(bank.tables[bank.index_of(own * capacity)])
    for what, load, limits in (
        (LIMIT, own, {limit}),
        (LIMIT_BETWEEN, middle, set(map(limit_of, in_use(bank, middle * capacity)))),
    ):
        about = _said(model, load, f"{workers} workers, energy weight {prices.energy_weight:.3g}")
        yield Case(what, *_beside_all_limits(model, workers, load * capacity, limits, number, about))
    about = _said(model, own, f"{workers} workers, limit {limit}")
    yield from _predicted(replicas, own * capacity, limit, number, about)


def _beside_all_limits(
    model: Drawn, workers: int, rate: float, limits: set[int], number: int, about: str
) -> tuple[str, float, float]:
    """Return what costs most of `limits`, which may be in use, beside the best of all."""
    profile, prices = model.profile, model.prices
    weights = prices.latency_weight_at(rate), prices.energy_weight

    def costs(each: int, rows: int, seed: int) -> tuple[Floats, Floats]:
        table = multi_worker_table(profile, each)
        seen = _seen(profile, rate, [table] * workers, rows, seed, float(profile.service_time_ms[-1]))
        return weights[0] * seen.sharp[:, 0] + weights[1] * seen.powers, seen.sharp[:, 1:]

    every = range(1, profile.best_batch_size + 1)
    found = {each: sharper(*costs(each, SEARCH_ROWS, 7 * number + 1)).mean for each in every}
    best, limit = min(every, key=found.__getitem__), max(limits, key=found.__getitem__)
    if best == limit:
        return f"{about}, limit {limit}, the best", 0.0, 0.0
    for rows in ROWS:  # other luck than the search's
        (ours, own), (theirs, other) = (costs(each, rows, 7 * number + 2) for each in (limit, best))
        off = sharper((ours - theirs) / theirs.mean(), np.hstack((own, other)))
        if off.high <= COST:
            break
    return f"{about}, limit {limit}, the best {best}", off.mean, (off.high - off.low) / 2.0


def _seen(
    profile: Profile, rate: float, tables: Sequence[Table], rows: int, seed: int, longest_ms: float,
    late: Sequence[float] = (),
) -> Seen:  # fmt: skip
    """Serve stretches of so many rows by tables, with controls that fit responses of up to about `longest_ms`."""
    bends = [len(tables) * longest_ms * each for each in BENDS]
    warm = max(100_000, 2 * rows)
    return served_by_several(
        profile, rate, tables, rows, parts=PARTS, warm=warm, share=0.0, late=late, seed=seed, bends=bends
    )


def _predicted(replicas: Replicas, rate: float, limit: int, number: int, about: str) -> Iterator[Case]:
    profile, table = replicas.profile, multi_worker_table(replicas.profile, limit)
    predicted = estimate(replicas, rate, table, 1)
    late = [predicted.p99_ms * (1.0 + each) for each in STEPS.tolist()]
    for rows in ROWS:
        seen = _seen(profile, rate, [table] * replicas.workers, rows, 7 * number + 3, predicted.p99_ms, late)
        mean = sharper(seen.sharp[:, 0] / predicted.response_time_ms - 1.0, seen.sharp[:, 1:])
        p99 = _quantile(seen)
        if max(-mean.low, mean.high) <= MEAN_OFF and max(-p99.low, p99.high) <= P99_OFF:
            break
    for what, off in ((MEAN, mean), (P99, p99)):
        yield Case(what, about, abs(off.mean), (off.high - off.low) / 2.0)


def _quantile(seen: Seen) -> Interval:
    """Return by how much the 99th percentile is longer than is predicted: between the last step that surely more rows exceed,
    and the first that surely fewer do."""
    found = [sharper(each, seen.sharp[:, 1:]) for each in seen.shares.T]
    low = max((step for step, each in zip(STEPS.tolist(), found, strict=True) if each.low > 0.01), default=-1.0)
    high = min((step for step, each in zip(STEPS.tolist(), found, strict=True) if each.high <= 0.01), default=1.0)
    return Interval((low + high) / 2.0, low, high)


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
    for place, rate, kept in places:
        for rows in SLO_ROWS:  # other luck each time: of so many cases some go wrong by chance
            coming = np.cumsum(np.random.default_rng([number, 24, len(place), rows]).exponential(1.0 / rate, rows))
            taken = asked(SolvedPolicy(bank), profile, coming, number)[rows // 10 :]
            lost = ~(taken <= deadline + 1e-6)
            share, half = _share(np.array([part.mean() for part in np.array_split(lost, SLO_PARTS)]))
            if share + half <= late_share or not kept.all():
                break
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
        late = [1000.0 * deadline + 1e-6]
        for rows in ROWS:
            seen = _seen(profile, rate, [table] * workers, rows, 7 * number + 4, late[0], late)
            found = sharper(seen.shares[:, 0], seen.sharp[:, 1:], TWO_ERRORS)
            if found.high <= 0.01:
                break
        share, half = max(found.mean, 0.0), (found.high - found.low) / 2.0
        where = f"{workers} workers, {'full batches' if solved else 'greedy'}, p99 = {1000 * deadline:.4g} ms, late {100 * share:.2f} %"
        yield Case(WORKERS, _said(model, rate / workers / profile.max_rate, where), share / 0.01 - 1.0, half / 0.01)


class Kind(NamedTuple):
    """Some cases: what finds the one of a number, how many there are, and the packages of Weir that decide what is found."""

    find: Callable[[int], Iterator[Case]]
    cases: int
    packages: tuple[str, ...] = ("weir.policy", "weir.simulation")

    @property
    def name(self) -> str:
        """What finds them."""
        return self.find.__name__

    @property
    def sources(self) -> list[Path]:
        """The files that what is found depends on: of Weir those that this module loads, and the evaluations'."""
        loads = f"import sys, {__name__}; print(*(m.__file__ for n, m in sorted(sys.modules.items()) if n.startswith({self.packages})), sep=chr(10))"
        run = subprocess.run([sys.executable, "-c", loads], cwd=ROOT, capture_output=True, text=True, check=True)
        evaluations = (ROOT / "tests" / "policy" / each for each in EVALUATIONS)
        return [*map(Path, run.stdout.splitlines()), Path(__file__), *evaluations]


KINDS = (Kind(between, 504, ("weir.policy",)), Kind(promises, 63), Kind(capacities, 63), Kind(several, 189))
CASES = sum(kind.cases for kind in KINDS)


def found(kind: str, number: int) -> list[Case]:
    """Return what is found in the case of that number."""
    return list(next(each for each in KINDS if each.name == kind).find(number))
