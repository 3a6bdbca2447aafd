"""Claims of section V-A: what the optimal policies look like."""

from functools import cache
from itertools import pairwise

from reproduction.claims import Claim, Judgement, Verdict, held_if
from reproduction.findings import Findings
from reproduction.published import PROFILE
from reproduction.structure import (
    GRID_LOADS,
    GRID_WEIGHTS,
    STEP,
    Search,
    paper_grid,
    random_lines,
    random_tables,
    search,
    stepped_grid,
)
from weir.policy.solve.bank import Solution
from weir.policy.solve.tables import limit_of

RANDOM = 300  # models of each kind
LOW_LOADS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)  # below those of the grid


@cache
def _on_paper() -> Search:
    return search(paper_grid())


def _control_limit(findings: Findings) -> Judgement:
    lines, stepped, tables = search(random_lines(RANDOM)), search(stepped_grid()), search(random_tables(RANDOM))
    straight = _on_paper().cases + lines.cases
    exceptions = len(_on_paper().exceptions) + len(lines.exceptions)
    text = (
        f"Straight lines: {exceptions} exceptions in {straight} models ({_on_paper().cases} of the paper's profile, {lines.cases} random). "
        f"It is no law, though: with batches padded to multiples of {STEP} there are {len(stepped.exceptions)} exceptions in {stepped.cases}, with random rising tables "
        f"{len(tables.exceptions)} in {tables.cases}."
    )
    if stepped.exceptions:
        case, state, gap = stepped.clearest
        text += f" The clearest: {case.about}: {_runs(case.solution)}. To serve with {state} waiting would cost more, each time, by as much as {gap:.2f} ms of operation do."
    verdict = Verdict.LIMITED if stepped.exceptions or tables.exceptions else Verdict.HELD
    return Judgement(verdict if not exceptions else Verdict.NOT_HELD, text)


def _runs(solution: Solution) -> str:
    """Say what a table does, run of states by run of states, up to the largest batch."""
    actions, parts, first = solution.actions[: solution.profile.max_batch_size].tolist(), [], 0
    for state in range(1, len(actions) + 1):
        if state == len(actions) or actions[state] != actions[first]:
            states = str(first) if first == state - 1 else f"{first} to {state - 1}"
            parts.append(f"{states}: {actions[first] or 'wait'}")
            first = state
    return ", ".join(parts)


def _all_that_waits(findings: Findings) -> Judgement:
    found = _on_paper()
    limit = findings.solved(0.7, 1.0, 0.0)
    first = next(n for n in range(1, 200) if 0 < limit.actions[n] < min(n, PROFILE.max_batch_size))
    return held_if(
        not found.smaller_batches,
        f"The paper does not say so; Fig. 4 may suggest it. In {found.smaller_batches} of {found.cases} models a state that one decision in a million or more meets serves fewer rows than wait; at "
        f"ρ = 0.7 and w2 = 0, for instance, {first} waiting rows are served as {limit.actions[first]}, the rest staying for the next batch.",
    )  # fmt: skip


def _grows_with_weight(findings: Findings) -> Judgement:
    falls, spans = [], []
    for load in GRID_LOADS:
        limits = [limit_of(findings.solved(load, 1.0, weight).table) for weight in GRID_WEIGHTS]
        falls += [load for left, right in pairwise(limits) if right < left]
        spans.append(f"{limits[0]} to {limits[-1]} at ρ = {load:g}")
    shown = "; ".join(spans[index] for index in (0, 5, 9, 13, 17))
    return held_if(
        not falls,
        f"For w2 from {GRID_WEIGHTS[0]:g} to {GRID_WEIGHTS[-1]:g} it falls nowhere, at {len(GRID_LOADS)} loads: from {shown}.",
    )


def _full_batches_at_500(findings: Findings) -> Judgement:
    limits = {load: findings.solved(load, 1.0, 500.0).limit for load in (*LOW_LOADS, *GRID_LOADS)}
    full = [load for load, limit in limits.items() if limit == PROFILE.max_batch_size]
    less = {load: limit for load, limit in limits.items() if limit < PROFILE.max_batch_size}
    shown = ", ".join(f"{limit} at ρ = {load:g}" for load, limit in less.items())
    held = all(load in full for load in GRID_LOADS if load >= 0.1)
    text = f"It is {PROFILE.max_batch_size} at all {len(full)} loads tried from ρ = {min(full):g} to {max(full):g}."
    if less:
        text += f" Not so at lower loads, where a full batch takes too long to collect: {shown}."
    return Judgement((Verdict.LIMITED if less else Verdict.HELD) if held else Verdict.NOT_HELD, text)


def _close_to_one(findings: Findings) -> Judgement:
    limits = {load: findings.solved(load, 1.0, 0.0).limit for load in GRID_LOADS}
    largest = max(limits.values())
    above = [load for load, limit in limits.items() if limit > 1]
    gains = [
        f"{100 * (findings.cost(load, 'work-conserving', 0.0) / findings.solved(load, 1.0, 0.0).cost - 1):.3f} % at ρ = {load:g}"
        for load in (0.7, 0.9)
    ]
    return held_if(
        largest <= 3,
        f"The limits are 1 to {largest}" + (f", above 1 for ρ from {min(above):g} to {max(above):g}" if above else "")
        + f". What the optimum gains on work-conserving: {', '.join(gains)}.",
    )  # fmt: skip


def _not_monotone(findings: Findings) -> Judgement:
    limits = [findings.solved(load, 1.0, 1.0).limit for load in GRID_LOADS]
    peak = limits.index(max(limits))
    falls = limits[-1] < limits[peak]
    return Judgement(
        Verdict.NOT_HELD if falls else Verdict.HELD,
        f"With w1 = w2 = 1 it is {limits[0]} at ρ = {GRID_LOADS[0]:g}, largest, {limits[peak]}, at ρ = {GRID_LOADS[peak]:g}, and {limits[-1]} at ρ = {GRID_LOADS[-1]:g}: near saturation "
        "batches fill while the worker is busy. So tables are not to be interpolated. The paper does not say so; Fig. 4 may suggest it.",
    )


CLAIMS = (
    Claim("abstract, I, V-A", "Optimal policies have, generally, a control limit: they wait below it and serve from it on.", _control_limit,
        "True of straight lines. With batches padded to multiples of 8, or random rising service times, there are exceptions."),
    Claim("Fig. 4, not in words", "Above the control limit, all that waits is served, up to the largest batch.", _all_that_waits,
        "Fig. 4 suggests it. Often a state serves fewer rows than wait, and leaves the rest for the next batch."),
    Claim("V-A", "The control limit grows with w2.", _grows_with_weight),
    Claim("Fig. 4, not in words", "The control limit grows with the load.", _not_monotone,
        "Fig. 4 suggests it. The limit falls again near saturation, where batches fill while the worker is busy; so tables are not to be interpolated."),
    Claim("V-A", "With w2 = 500 the control limit is the largest batch, whatever the load.", _full_batches_at_500,
        "From ρ = 0.1 on. At lower loads a full batch takes too long to collect."),
    Claim("V-A", "With w1 = 1, w2 = 0 the control limits are close to 1: waiting hardly ever pays in latency.", _close_to_one),
)  # fmt: skip
