"""What banks predict, over random models, beside an event loop that was written apart (tests/policy/event_loop.c); and what the
policies cost under bursts and recorded traffic, beside greedy and the clairvoyant optimum."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from reproduction.drawing import COLOURS, INK, figure

from benchmarks.harness.result import Part, Result, Run, Table, resumed
from benchmarks.harness.servers import ROOT
from benchmarks.policies import bursts
from benchmarks.policies.event_loop import LEVEL, Controls, Interval, Seen, controls, interval, served
from benchmarks.policies.random_models import SHAPES, Drawn, drawn
from weir.numerics import student_quantile
from weir.policy.cost import Floats
from weir.policy.solve.bank import Bank, solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import Table as Actions
from weir.policy.solve.tables import greedy_table, limit_table

PICTURE = ROOT / "docs" / "pictures" / "predictions.png"
ENTRIES, STEP = 2_000, 100  # in each round, and in each step of the progress
QUICK = 500  # entries, of a quick run
SOURCES = [  # what an entry comes of
    ROOT / "src" / "weir" / "policy", Path(__file__),
    *(ROOT / "tests" / "policy" / name for name in ("event_loop.c", "event_loop.py", "random_models.py")),
]  # fmt: skip
STRETCHES = 40
ROWS = (5_000, 20_000, 50_000)  # of a stretch: more where fewer do not say enough
ENOUGH, ENOUGH_LATE = 5e-4, 0.01  # half widths, of the mean and of the 99th percentile, that say enough
NEAR = 0.02  # how far a 99th percentile may be off
ROUNDING = 1e-8  # an interval that is rounding only
EXACT = 1e-3  # and the others
LARGEST_COMPARED = 32  # batch, of models whose every control limit is evaluated
WORST = 3  # entries that are shown
QUANTITIES = ("cost", "mean response time", "mean power", "99th percentile")
COLUMNS = [
    "", "entries", "allowed", "off by more, as seen", "and beyond their intervals", "the worst, and its interval",
    "interval, median and 99 %", "bias",
]  # fmt: skip


class Entry(NamedTuple):
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
    """Solve, serve and compare that many entries of banks; then hold the policies against greedy where the rate changes."""
    wanted = QUICK if run.quick else run.rounds * ENTRIES
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of the processes that are started
    result = Result(COLUMNS)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        seen = list(_entries(run, pool, wanted))
        rows = []
        for row in _bursts(pool, 2 if run.quick else len(bursts.SHOWN)):
            rows.append(row)
            run.step(row[0])
    for index, name in enumerate(QUANTITIES):
        _add(result, name, seen, index, EXACT)
    _add(result, QUANTITIES[3], seen, 3, NEAR)
    _compare(result, [one for one in seen if np.isfinite(one.best_limit)])
    result.tables += [_worst(seen), Table("Bursts and recorded traffic, with a w2 of 1", bursts.COLUMNS, rows)]
    _draw(seen, run.picture(PICTURE))
    result.notes += _notes(wanted)
    return result


def _entries(run: Run, pool: ProcessPoolExecutor, wanted: int) -> Iterator[Entry]:
    """Yield that many entries; those that a run found which was stopped are not looked for again."""
    found = resumed("entries", SOURCES, lambda first: pool.map(entry, range(first, wanted), chunksize=10))
    for count, one in enumerate(islice(found, wanted), start=1):
        yield Entry(*one)
        if count % STEP == 0:
            run.step(f"{count:,} entries")


def _bursts(pool: ProcessPoolExecutor, wanted: int) -> Iterator[list[str]]:
    """Yield that many rows of bursts and recorded traffic, likewise."""
    found = resumed("bursts", bursts.SOURCES, lambda first: pool.map(bursts.shown, range(first, wanted)))
    return islice(found, wanted)


def _notes(wanted: int) -> list[str]:
    return [
        f"![What the event loop measured, and what was predicted]({PICTURE.parent.name}/{PICTURE.name})",
        f"{wanted:,} random models (batches of up to 256 rows, coefficients of variation of 0 to 2, loads of 0.01 to 0.99), each served by an event loop in C that shares no code "
        f"with Weir, for {STRETCHES} stretches of {ROWS[0]:,} to {ROWS[-1]:,} rows. Intervals are 99.9 %. The predicted p99 has a standard error of up to 0.5 %.",
    ]


def entry(number: int) -> Entry:
    """Solve the random model of that number, and hold what is predicted against the event loop."""
    model = drawn(number)
    bank = solve_bank(model.profile, model.prices, rates=[model.rate])
    given = controls(model.profile, model.rate, bank.tables[0])
    wanted = ROWS[0]
    for rows in ROWS:
        if rows >= wanted or rows == ROWS[-1]:
            off, half = zip(*_beside(model, bank, rows, given), strict=True)
            late = half[3] if np.isfinite(half[3]) or _forgotten(model, bank) < ROWS[-1] else 0.0
            missing = max(max(half[:3]) / ENOUGH, late / ENOUGH_LATE)
            if missing < 1.0:
                break
            wanted = min(rows * missing**2, ROWS[-1])
    return Entry(number, model.shape, model.load, off, half, *_rules(model, bank))


def _forgotten(model: Drawn, bank: Bank) -> float:
    """Return within about how many rows a line forgets how long it was."""
    return 20.0 * float(bank.tables[0].max()) * (1.0 + float(model.profile.cv[0]) ** 2) / (1.0 - model.load) ** 2


def _beside(model: Drawn, bank: Bank, rows: int, given: Controls) -> list[tuple[float, float]]:
    """Return for each quantity how far the event loop is from the prediction, and half its interval, relative to it."""
    profile, rate, table = model.profile, model.rate, bank.tables[0]
    response, power = float(bank.response_time_ms[0]), float(bank.power_w[0])
    limits = [factor * float(bank.p99_ms[0]) for factor in (1.0 - NEAR, 1.0, 1.0 + NEAR)]
    forgotten = _forgotten(model, bank)
    loop = served(
        profile, rate, table, rows, parts=STRETCHES, warm=int(5.0 * min(forgotten, rows)), late=limits, share=0.0,
        seed=model.number + 1_000_000, sharpened=given,
    )  # fmt: skip
    weight, energy_weight = model.prices.latency_weight_at(rate), model.prices.energy_weight
    weights = np.array([weight, energy_weight])
    predicted = np.array([response, power])
    return [
        _off(interval(loop.sharp @ weights), float(predicted @ weights)),
        _off(interval(loop.sharp[:, 0]), response),
        _off(interval(loop.sharp[:, 1]), power),
        _off_percentile(loop) if forgotten < rows else (0.0, np.inf),
    ]


def _off(seen: Interval, predicted: float) -> tuple[float, float]:
    return seen.mean / predicted - 1.0, (seen.high - seen.low) / 2.0 / predicted


def _off_percentile(loop: Seen) -> tuple[float, float]:
    """Return how far the percentile is off from the shares of the rows that are later than a little less, that, and more:
    what they are where a stretch's mean response time and power are what they are in the long run."""
    beyond = np.stack((loop.means, loop.powers), axis=1) - loop.sharp.mean(axis=0)
    design = np.concatenate((np.ones((STRETCHES, 1)), beyond), axis=1)
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ loop.shares
    left = loop.shares[:, 1] - design @ fitted[:, 1]
    free = STRETCHES - design.shape[1]
    half = float(student_quantile(free, 0.5 + LEVEL / 2.0) * np.sqrt(inverse[0, 0] * float(left @ left) / free))
    below, at, above = fitted[0].tolist()
    if min(at, above) <= 0.0 or below <= above:
        return 0.0, np.inf
    steep = np.log(below / above) / (2.0 * NEAR)
    return float(np.log(at / 0.01) / steep), float(half / at / steep)


def _rules(model: Drawn, bank: Bank) -> tuple[float, float]:
    largest = model.profile.max_batch_size
    if largest > LARGEST_COMPARED:
        return np.inf, np.inf
    cost = partial(_cost, model)
    ours, greedy = cost(bank.tables[0]), cost(greedy_table(largest))
    best = min(cost(limit_table(limit, largest)) for limit in range(1, largest + 1))
    return greedy / ours - 1.0, best / ours - 1.0


def _cost(model: Drawn, table: Actions) -> float:
    return evaluate(model.profile, model.rate, table, model.prices).cost


def _add(result: Result, name: str, seen: list[Entry], index: int, allowed: float) -> None:
    known = [one for one in seen if one.half[index] < np.inf]
    off, half = (np.array([getattr(one, what)[index] for one in known]) for what in ("off", "half"))
    beyond = np.maximum(np.abs(off) - half, 0.0)
    seen_share, share = (float(np.mean(each > allowed)) for each in (np.abs(off), beyond))
    worst = int(np.argmax(beyond if beyond.any() else np.abs(off)))
    noisy = half > ROUNDING
    errors = off[noisy] / half[noisy] * student_quantile(STRETCHES - 1, 0.5 + LEVEL / 2.0)
    bias = f"{errors.mean():+.3f} ± {errors.std() / len(errors) ** 0.5:.3f}" if noisy.any() else ""
    result.rows.append([
        name, f"{len(known):,}", f"{100 * allowed:g} %", f"{100 * seen_share:.2f} %", f"{100 * share:.2f} %",
        _shown(known[worst], index), _percents(half, (0.5, 0.99)), bias,
    ])  # fmt: skip
    text = f"{name}, {100 * allowed:g} %"
    result.values |= {
        f"{text}: off": share,
        f"{text}: worst": float(beyond.max()),
        f"{name}: known": len(known) / len(seen),
    }
    if index < 3 or allowed == NEAR:
        result.goal(
            f"{name}: at most 2 entries in a thousand off by more than {100 * allowed:g} % beyond a 99.9 % interval",
            f"{100 * share:.2f} %", share <= 0.002,
        )  # fmt: skip


def _shown(one: Entry, index: int) -> str:
    return f"{100 * one.off[index]:+.3f} % ± {100 * one.half[index]:.3f}"


def _worst(seen: list[Entry]) -> Table:
    """Return the entries that are furthest beyond their intervals, of each quantity."""
    rows = []
    for index, name in enumerate(QUANTITIES):
        known = [one for one in seen if one.half[index] < np.inf]
        for one in sorted(known, key=lambda one: one.half[index] - abs(one.off[index]))[:WORST]:
            model = drawn(one.number)
            profile = model.profile
            about = f"{one.shape}, B {profile.max_batch_size}, CV {profile.cv[0]:.2f}, load {one.load:.2f}"
            rows.append([name, f"{one.number}", about, _shown(one, index)])
    return Table("The entries furthest beyond their intervals", ["", "number", "model", "off, and its interval"], rows)


def _percents(values: Floats, shares: tuple[float, float]) -> str:
    return ", ".join(f"{100 * value:.2g} %" for value in np.quantile(values, shares))


def _compare(result: Result, seen: list[Entry]) -> None:
    """Say how often plainer rules are as good, and that none is better."""
    greedy, best = (np.array([getattr(one, name) for one in seen]) for name in ("greedy", "best_limit"))
    better = float(min(greedy.min(), best.min()))
    result.goal(
        "no control limit costs less than the solved table, by more than 1e-6 of its cost",
        f"{better:.1e}",
        better > -1e-6,
    )
    says = []
    for name, more in (("greedy", greedy), ("the best control limit for that rate", best)):
        alike = f"{100 * float(np.mean(more < 1e-3)):.0f} % of the entries {name} costs at most 0.1 % more"
        says.append(f"in {alike}, and in {100 * float(np.mean(more > 0.01)):.0f} % over 1 % more")
        result.values[f"{name} alike"] = float(np.mean(more < 1e-3))
    result.notes.append(
        f"Of the {len(seen):,} models with batches of up to {LARGEST_COMPARED} rows: {'; '.join(says)}."
    )


def _draw(seen: list[Entry], path: Path) -> None:
    with figure(path, 1, 3, size=(11.0, 3.6)) as (_, axes):
        for axis, index in zip(axes[0], (0, 1, 3), strict=True):  # of power the interval is rounding only
            some = [one for one in seen if 0.0 < one.half[index] < np.inf]
            for shape, colour in zip(SHAPES, COLOURS, strict=False):
                of = [one for one in some if one.shape == shape]
                axis.plot(
                    [100 * one.half[index] for one in of], [100 * abs(one.off[index]) for one in of],
                    ".", markersize=1.5, color=colour, label=shape, rasterized=True,
                )  # fmt: skip
            low, high = _range([100 * one.half[index] for one in some])
            axis.plot([low, high], [low, high], color=INK, linewidth=0.8)
            axis.axhline(100 * (NEAR if index == 3 else EXACT), color=INK, linewidth=0.8, linestyle=":")
            axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low / 100.0, 3.0 * high))
            axis.set(title=QUANTITIES[index], xlabel="half the 99.9 % interval of what was seen (%)")
        axes[0][0].set(ylabel="difference from predicted (%)")
        axes[0][0].legend(fontsize=7, markerscale=5)


def _range(values: list[float]) -> tuple[float, float]:
    return min(values) / 2.0, max(*values, 0.1) * 2.0


PART = Part(
    "policies",
    "Predictions of solved policies",
    "What a policy file predicts, compared with what its tables do.",
    lambda rounds: rounds * ENTRIES // STEP + len(bursts.SHOWN),
    measure,
    f"{ENTRIES:,} entries",
)
