"""Policies between the rates that they are made for, with several workers, and at the edges of a latency objective."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import monotonic
from typing import Any

from benchmarks.harness.result import Part, Result, Run, Table, resumed
from benchmarks.policies import edges
from benchmarks.policies.edges import Case

ROUND_SECONDS, QUICK_SECONDS, STEP_SECONDS = 240.0, 60.0, 10.0
AHEAD = 2
ALLOWED = {
    edges.BAND: 0.0025, edges.LIMIT: edges.COST, edges.LIMIT_BETWEEN: edges.COST, edges.MEAN: edges.MEAN_OFF,
    edges.P99: edges.P99_OFF, edges.PROMISE: 0.0, edges.WORKERS: 0.0,
}  # fmt: skip
SHARES = (edges.PROMISE, edges.WORKERS)  # of these `off` is relative to what is allowed
SHOWN = 4  # of each quantity, of the cases that are surely beyond
COLUMNS = ["", "cases", "allowed", "beyond, as seen", "surely", "within, surely", "the worst, and its interval"]


def measure(run: Run) -> Result:
    """Try cases until the time is over, or there are no more."""
    found = list(_cases(run, QUICK_SECONDS if run.quick else run.rounds * ROUND_SECONDS))
    result = result_of([Case(*each) for cases in found for each in cases])
    result.notes.insert(0, _about(len(found)))
    return result


def _cases(run: Run, seconds: float) -> Iterator[list[list[Any]]]:
    """Yield what each case says; those that a run has found which was stopped are not tried again."""
    # Of the processes that are started: with more, threads spin.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    began = shown = monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for number, each in enumerate(evenly([(_of(kind, pool), kind.cases) for kind in edges.KINDS]), 1):
            yield each
            while monotonic() - shown > STEP_SECONDS:
                shown += STEP_SECONDS
                run.step(f"{number:,} of {edges.CASES:,} cases")
            if monotonic() - began > seconds:
                break
        pool.shutdown(cancel_futures=True)


def evenly(found: Sequence[tuple[Iterator[Any], int]]) -> Iterator[Any]:
    """Yield what all iterators do, of which each has so many, such that a run that ends early has tried the same share of each."""
    order = sorted((place / many, at) for at, (_, many) in enumerate(found) for place in range(many))
    for _, at in order:
        yield next(found[at][0])


def _of(kind: edges.Kind, pool: ProcessPoolExecutor) -> Iterator[list[list[Any]]]:
    find = partial(edges.found, kind.name)
    return resumed(f"edges-{kind.name}", kind.sources, lambda first: _ahead(pool, find, range(first, kind.cases)))


def _ahead(
    pool: ProcessPoolExecutor, find: Callable[[int], list[Case]], numbers: Iterable[int]
) -> Iterator[list[Case]]:
    """Yield what is found of `numbers`, in their order, and let the pool try AHEAD further ones."""
    tried: deque[Future[list[Case]]] = deque()
    for number in numbers:
        tried.append(pool.submit(find, number))
        if len(tried) > AHEAD:
            yield tried.popleft().result()
    for each in tried:
        yield each.result()


def result_of(found: list[Case]) -> Result:
    """Return the table, the goals, and every case that is surely beyond what is allowed."""
    result, beyond = Result(COLUMNS), []
    for what, allowed in ALLOWED.items():
        promised = [each for each in found if each.what == what and each.off != edges.EITHER]
        if not promised:
            continue
        surely = sorted(
            (each for each in promised if each.off - each.half > allowed), key=lambda each: each.half - each.off
        )
        worst = (surely or sorted(promised, key=lambda each: -each.off))[0]
        seen = sum(each.off > allowed for each in promised)
        within = sum(each.off + each.half <= allowed for each in promised)
        result.rows.append([
            what, f"{len(promised):,}", "as promised" if what in SHARES else f"{100 * allowed:g} %", f"{seen:,}", f"{len(surely):,}",
            f"{within:,}", _shown(worst),
        ])  # fmt: skip
        result.goal(f"{what}: none surely beyond what is allowed", f"{len(surely)} of {len(promised)}", not surely)
        result.values[f"{what}: surely beyond"], result.values[f"{what}: cases"] = len(surely), len(promised)
        beyond += surely
    result.tables.append(
        Table(
            "Certainly beyond what is allowed",
            ["", "off by", "model"],
            [[each.what, _shown(each), each.about] for each in beyond],
        )
    )
    result.notes += _exceptions(beyond)
    neither = sum(each.off == edges.EITHER for each in found)
    result.notes.append(f"At {neither} further rates the policy file does not claim to keep its latency objective.")
    return result


def _shown(each: Case) -> str:
    if each.what in SHARES:
        return f"{1.0 + each.off:.2f} ± {each.half:.2f} of what may be late"
    return f"{100 * each.off:.2f} % ± {100 * each.half:.2f}"


def _exceptions(beyond: list[Case]) -> list[str]:
    lines = []
    for what in ALLOWED:
        some = [each for each in beyond if each.what == what]
        lines += [f"- {what}: {_shown(each)}. {each.about}" for each in some[:SHOWN]]
    if not lines:
        return []
    return [
        "Certainly beyond the limit (`drawn` is in `benchmarks/policies/random_models.py`):",
        "\n".join(lines),
    ]


def _about(numbers: int) -> str:
    return (
        f"{numbers:,} of {edges.CASES:,} cases with random models; several workers are 2 to 16, at loads of 0.03 to 0.97. "
        "Costs are compared with policy iteration or an event loop in C, limits with all other limits. Intervals "
        "are 99.9 %, or two standard errors for shares that are late."
    )  # fmt: skip


PART = Part(
    "policy-edges",
    "Policies between rates, with several workers and at the edges",
    "Policies where no table was made for the exact rate, compared with evaluations that share no code with Weir.",
    lambda rounds: int(rounds * ROUND_SECONDS / STEP_SECONDS),
    measure,
    f"{ROUND_SECONDS / 60:g} minutes on one core",
)
