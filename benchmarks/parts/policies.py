"""What banks predict, over random models, beside an event loop that was written apart (tests/policy/event_loop.c)."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from tests.policy.event_loop import Interval, interval, served
from tests.policy.random_models import SHAPES, Drawn, drawn

from benchmarks.result import Part, Result, Run
from benchmarks.servers import ROOT
from weir.figures import COLOURS, INK, figure
from weir.policy.bank import Bank, solve_bank
from weir.policy.evaluation import evaluate
from weir.policy.profile import Floats
from weir.policy.tables import Table, greedy_table, limit_table

PICTURE = ROOT / "docs" / "pictures" / "predictions.png"
ENTRIES = 2_000  # in each round
STRETCHES = 20
FEWEST, MOST = 10_000, 500_000  # rows of a stretch
NEAR = 0.02  # how far a 99th percentile may be off
EXACT = 1e-3  # and the others
LARGEST_COMPARED = 32  # batch, of models whose every control limit is evaluated
QUANTITIES = ("cost", "mean response time", "mean power", "99th percentile")
COLUMNS = [
    "",
    "allowed",
    "entries off by more",
    "worst beyond its interval",
    "off, median and 99 %",
    "interval, median and 90 %",
    "bias",
]


class Seen(NamedTuple):
    """An entry of a bank: by how much the event loop differs from the prediction, relative to it, by quantity, with half the
    width of its 99.9 % interval; and how much more, relative to ours, greedy and the best control limit cost."""

    number: int
    shape: str
    load: float
    off: tuple[float, ...]
    half: tuple[float, ...]
    greedy: float
    best_limit: float


def measure(run: Run) -> Result:
    """Solve, serve and compare that many entries of banks."""
    wanted = run.rounds * ENTRIES
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        seen: list[Seen] = []
        for one in pool.map(entry, range(wanted), chunksize=20):
            seen.append(one)
            if len(seen) % (wanted // run.rounds) == 0:
                run.step(f"{len(seen):,} entries")
    result = Result(COLUMNS)
    for index, name in enumerate(QUANTITIES):
        _add(result, name, np.array([(one.off[index], one.half[index]) for one in seen]), NEAR if index == 3 else EXACT)
    _compare(result, [one for one in seen if np.isfinite(one.best_limit)])
    _draw(seen)
    result.notes += [
        f"![What the event loop saw beside what was predicted]({PICTURE.parent.name}/{PICTURE.name})",
        f"{wanted:,} random models ({', '.join(SHAPES)} service times; batches of up to 1 to 256 rows; coefficients of variation of 0 to 2; "
        "energy weights over six decades; loads of 0.01 to 0.99), a bank of one entry each, served by an event loop in C that shares nothing "
        f"with Weir: {STRETCHES} stretches of {FEWEST:,} to {MOST:,} rows, more where the line forgets slowly. An entry counts as off where it "
        "differs by more than is allowed beyond the 99.9 % interval of what was seen; those whose lines forget too slowly for that are left out. *Bias* is the mean difference in standard errors, over "
        "all entries, with its own standard error: it would show an error far below any single interval.",
    ]
    return result


def entry(number: int) -> Seen:
    """Solve the random model of that number, and hold what is predicted against the event loop."""
    os.environ["OMP_NUM_THREADS"] = "1"
    model = drawn(number)
    profile, rate = model.profile, model.rate
    bank = solve_bank(profile, model.prices, rates=[rate])
    rows = _rows(model, bank)
    limits = [factor * float(bank.p99_ms[0]) for factor in (1.0 - NEAR, 1.0, 1.0 + NEAR)]
    loop = served(
        profile, rate, bank.tables[0], rows, parts=STRETCHES, warm=5 * rows, late=limits, seed=number + 1_000_000
    )
    weight, energy_weight = model.prices.latency_weight_at(rate), model.prices.energy_weight
    costs = weight * loop.means + energy_weight * loop.powers
    cost = weight * float(bank.response_time_ms[0]) + energy_weight * float(bank.power_w[0])
    found = [
        _off(interval(costs), cost),
        _off(interval(loop.means), float(bank.response_time_ms[0])),
        _off(interval(loop.powers), float(bank.power_w[0])),
        _off_percentile(loop.later),
    ]
    off, half = zip(*found, strict=True)
    if _forgotten_after(model, bank) > MOST:  # stretches that depend on each other have no interval
        half = (np.inf,) * len(half)
    return Seen(number, model.shape, model.load, off, half, *_rules(model, bank))


def _rows(model: Drawn, bank: Bank) -> int:
    """Return how many rows a stretch has: a line forgets within about 1 / (1 - load)² batches, the more its times vary."""
    return int(np.clip(_forgotten_after(model, bank), FEWEST, MOST))


def _forgotten_after(model: Drawn, bank: Bank) -> float:
    return float(20.0 * bank.tables[0].max() * (1.0 + model.profile.cv[0] ** 2) / (1.0 - model.load) ** 2)


def _off(seen: Interval, predicted: float) -> tuple[float, float]:
    return seen.mean / predicted - 1.0, (seen.high - seen.low) / 2.0 / predicted


def _off_percentile(later: Sequence[Interval]) -> tuple[float, float]:
    """Return how far the percentile is off from the shares of the rows that are later than a little less, that, and more."""
    below, at, above = later
    if at.mean <= 0.0 or below.mean <= above.mean:
        return 0.0, np.inf
    steep = np.log(below.mean / max(above.mean, 1e-6)) / (2.0 * NEAR)
    return float(np.log(at.mean / 0.01) / steep), float((at.high - at.low) / 2.0 / at.mean / steep)


def _rules(model: Drawn, bank: Bank) -> tuple[float, float]:
    largest = model.profile.max_batch_size
    if largest > LARGEST_COMPARED:
        return np.inf, np.inf
    cost = partial(_cost, model)
    ours, greedy = cost(bank.tables[0]), cost(greedy_table(largest))
    best = min(cost(limit_table(limit, largest)) for limit in range(1, largest + 1))
    return greedy / ours - 1.0, best / ours - 1.0


def _cost(model: Drawn, table: Table) -> float:
    return evaluate(model.profile, model.rate, table, model.prices).cost


def _add(result: Result, name: str, seen: Floats, allowed: float) -> None:
    off, half = np.abs(seen[:, 0]), seen[:, 1]
    known = np.isfinite(half) & (half > 0.0)
    beyond = np.maximum(off - half, 0.0)[known]
    share = float(np.mean(beyond > allowed))
    errors = seen[known, 0] / (half[known] / 3.88)  # Student's t with 19 degrees at 99.9 %
    bias = f"{errors.mean():+.3f} ± {errors.std() / len(errors) ** 0.5:.3f}"
    result.rows.append(
        [f"{name} ({known.sum():,} entries)", f"{100 * allowed:g} %", f"{100 * share:.2f} %", f"{100 * float(beyond.max()):.2f} %",
         _percents(off[known], (0.5, 0.99)), _percents(half[known], (0.5, 0.9)), bias]
    )  # fmt: skip
    result.values |= {f"{name} off": share, f"{name} worst": float(beyond.max()), f"{name} known": float(known.mean())}
    result.goal(
        f"{name}: at most 2 entries in a thousand off by more than {100 * allowed:g} % beyond a 99.9 % interval",
        f"{100 * share:.2f} %", share <= 0.002,
    )  # fmt: skip


def _percents(values: Floats, shares: tuple[float, float]) -> str:
    return ", ".join(f"{100 * value:.2g} %" for value in np.quantile(values, shares))


def _compare(result: Result, seen: list[Seen]) -> None:
    """Say how often plainer rules are as good, and that none is better."""
    greedy, best = (np.array([getattr(one, name) for one in seen]) for name in ("greedy", "best_limit"))
    better = float(min(greedy.min(), best.min()))
    result.goal(
        "no control limit costs less than the solved table, by more than 1e-6 of its cost",
        f"{better:.1e}",
        better > -1e-6,
    )
    says = []
    for name, more in (("greedy", greedy), ("the best control limit for the very rate", best)):
        alike = f"{100 * float(np.mean(more < 1e-3)):.0f} % of the entries {name} costs at most 0.1 % more"
        says.append(f"in {alike}, and in {100 * float(np.mean(more > 0.01)):.0f} % over 1 % more")
        result.values[f"{name} alike"] = float(np.mean(more < 1e-3))
    result.notes.append(
        f"Of the {len(seen):,} models with batches of up to {LARGEST_COMPARED} rows: {'; '.join(says)}."
    )


def _draw(seen: list[Seen]) -> None:
    with figure(PICTURE, 1, 3, size=(11.0, 3.6)) as (_, axes):
        for index, (axis, name) in enumerate(zip(axes[0], QUANTITIES[1:], strict=True), start=1):
            for shape, colour in zip(SHAPES, COLOURS, strict=False):
                some = [one for one in seen if one.shape == shape and np.isfinite(one.half[index])]
                axis.plot(
                    [100 * one.half[index] for one in some], [100 * abs(one.off[index]) for one in some],
                    ".", markersize=1.5, color=colour, label=shape, rasterized=True,
                )  # fmt: skip
            axis.plot([1e-3, 1e2], [1e-3, 1e2], color=INK, linewidth=0.8)
            axis.set(xscale="log", yscale="log", xlim=(1e-2, 1e2), ylim=(1e-4, 1e2), title=name)
            axis.set(xlabel="half the 99.9 % interval of what was seen (%)")
        axes[0][0].set(ylabel="seen beside predicted (%)")
        axes[0][0].legend(fontsize=7, markerscale=5)


PART = Part(
    "policies",
    "Predictions of solved policies",
    "What a bank says of its tables (cost, mean response time, mean power, 99th percentile) beside what they do.",
    lambda rounds: rounds,
    measure,
)
