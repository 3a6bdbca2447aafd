"""Claims of section V-C, Table I and Fig. 8, and the reductions that the abstract states."""

from itertools import pairwise

import numpy as np

from reproduction.claims import Claim, Judgement, Verdict, held_if
from reproduction.findings import Findings
from reproduction.published import (
    LOAD,
    MOST_SWEEPS,
    PRICES,
    PROFILE,
    SPACE_REDUCTION,
    TABLE,
    TIME_REDUCTION,
    TOLERANCE,
)
from reproduction.sweeps import Sweep
from reproduction.truncated import cost_of, law_of, model_of, overflow_cost_rate, solve_truncated
from weir.policy.solve.bank import solve

LARGE, SMALL = (10_000.0, 1_000.0, 100.0), (10.0, 0.0)
CONVERGED_STATED = {10_000.0: 35, 1_000.0: 50, 100.0: 70, 10.0: 170, 0.0: 200}  # section V-C, read off Fig. 8
OTHER_COSTS = (20.0, 30.0, 40.0, 50.0, 70.0, 150.0, 200.0, 300.0)
STABLE_FROM, STABLE_DELTA = 200, 1e-13
RATE = LOAD * PROFILE.max_rate


def _table_reproduced(findings: Findings) -> Judgement:
    found = [(column, findings.minimum(column.overflow_cost).accepted) for column in TABLE]
    sizes = all(ours.s_max == column.s_max for column, ours in found)
    counts = max(abs(ours.iterations - column.iterations) for column, ours in found)
    costs = max(abs(ours.cost / column.cost - 1.0) for column, ours in found)
    deltas = max(abs(ours.delta / column.delta - 1.0) for column, ours in found[:3])
    return held_if(
        sizes and counts <= 2 and costs < 1e-4 and deltas < 0.01,
        f"All five s_max are the same; the sweeps differ by at most {counts}, g by {costs:.1e}, relative (the printed coefficients of the profile are rounded), the three larger Δ by {100 * deltas:.1f} %.",
    )


def _reductions(findings: Findings) -> Judgement:
    best, plain = findings.minimum(100.0).accepted, findings.minimum(0.0).accepted
    space, time = 1.0 - best.space / plain.space, 1.0 - best.time / plain.time
    exact = _least_exact(0.0)
    exact_space = 1.0 - best.s_max / exact
    reproduced = abs(space - SPACE_REDUCTION) < 0.001 and abs(time - TIME_REDUCTION) < 0.001
    return Judgement(
        Verdict.LIMITED if reproduced else Verdict.NOT_HELD,
        f"c_o = 100 against c_o = 0: space {100 * space:.1f} % less, time {100 * time:.1f} % less, by the paper's own measures. But the value iteration for c_o = 0 was stopped after {MOST_SWEEPS} sweeps "
        f"with a span of {plain.span:.2g}, not below ε = 0.01. Solved exactly, c_o = 0 needs s_max = {exact}: {100 * exact_space:.1f} % less space. And the time is that of one method: policy iteration solves the "
        f"whole problem in {findings.exact.iterations} steps, with no c_o to be chosen.",
    )  # fmt: skip


def _least_exact(overflow_cost: float) -> int:
    """Return the least s_max for which serving costs less than waiting in S_o for ever, and Δ is tolerated: exactly."""
    for s_max in range(PROFILE.max_batch_size, 400):
        model = model_of(PROFILE, RATE, PRICES, s_max, overflow_cost)
        if s_max / model.rate_per_ms + overflow_cost < _served_cost():
            continue
        actions = solve_truncated(PROFILE, RATE, PRICES, s_max=s_max, overflow_cost=1_000.0).actions
        law = law_of(model, actions)
        if (
            overflow_cost_rate(model, actions, law) < TOLERANCE
            and cost_of(model, actions, law) < s_max / model.rate_per_ms + overflow_cost
        ):
            return s_max
    return 400


def _served_cost() -> float:
    return solve(PROFILE, RATE, PRICES).cost


def _all_tolerated(findings: Findings) -> Judgement:
    found = [findings.minimum(column.overflow_cost).accepted for column in TABLE]
    spread = max(each.cost for each in found) - min(each.cost for each in found)
    return held_if(
        all(each.delta < TOLERANCE for each in found) and spread < 0.001 + 5e-5,
        f"Δ is {', '.join(f'{each.delta:.2e}' for each in found)}; the largest and the smallest g differ by {spread:.6f}.",
    )


def _least_at_100(findings: Findings) -> Judgement:
    listed = {column.overflow_cost: findings.minimum(column.overflow_cost).accepted.s_max for column in TABLE}
    others = {cost: _least_between(findings, cost) for cost in OTHER_COSTS}
    best = min(others, key=lambda cost: others[cost])
    shown = ", ".join(f"{size} at {cost:g}" for cost, size in others.items())
    return Judgement(
        Verdict.LIMITED
        if others[best] < listed[100.0]
        else Verdict.HELD
        if min(listed.values()) == listed[100.0]
        else Verdict.NOT_HELD,
        f"Of the five in the table, yes: {listed[100.0]}. Others give: {shown}.",
    )


def _least_between(findings: Findings, overflow_cost: float) -> int:
    return findings.minimum(overflow_cost).accepted.s_max


def _grows_both_ways(findings: Findings) -> Judgement:
    costs = sorted({*(column.overflow_cost for column in TABLE), *OTHER_COSTS})
    work = {cost: findings.minimum(cost).accepted.time for cost in costs}
    at = min(work, key=lambda cost: work[cost])
    index = costs.index(at)
    falls = all(work[a] >= work[b] for a, b in pairwise(costs[: index + 1]))
    rises = all(work[a] <= work[b] for a, b in pairwise(costs[index:]))
    shown = ", ".join(f"{work[cost]:.2e} ({cost:g})" for cost in costs)
    return held_if(falls and rises, f"Sweeps·Bmax·s_max² by c_o: {shown}; least at {at:g}.", otherwise=Verdict.LIMITED)


def _converges(findings: Findings) -> Judgement:
    parts, good = [], []
    limit = findings.exact.cost
    for cost, stated in CONVERGED_STATED.items():
        sweeps = findings.accuracy[cost]
        reached = _settled(findings, cost)
        side = "from above" if sweeps[0].cost > limit else "from below"
        at = next(each for each in sweeps if each.s_max >= stated)
        good.append(abs(at.cost / limit - 1.0) < 0.02 and (side == "from above") == (cost in LARGE))
        parts.append(
            f"c_o = {cost:g}: {side}, within 0.5 % from s_max = {reached} on ({100 * (at.cost / limit - 1):+.2f} % at the stated {stated})"
        )
    order = [_settled(findings, cost) for cost in LARGE]
    text = f"{'; '.join(parts)}."
    if order == sorted(order, reverse=True):
        text += f" So of the large c_o the largest converges last, at {order[0]}, and the smallest first, at {order[-1]}: the stated numbers fit in the opposite order."
    return held_if(all(good), text, otherwise=Verdict.LIMITED)


def _settled(findings: Findings, overflow_cost: float) -> int:
    """Return the least s_max that was tried from which on g is within 0.5 % of its limit."""
    sweeps, limit = findings.accuracy[overflow_cost], findings.exact.cost
    off = max((each.s_max for each in sweeps if abs(each.cost / limit - 1.0) > 0.005), default=0)
    return min(each.s_max for each in sweeps if each.s_max > off)


def _delta_falls(findings: Findings) -> Judgement:
    parts, all_fall = [], True
    for cost in (*LARGE, *SMALL):
        sweeps = [each for each in findings.accuracy[cost] if each.s_max <= STABLE_FROM]
        served = [each.delta for each in sweeps if not each.waits]
        waited = [each.delta for each in sweeps if each.waits]
        falls = bool(np.all(np.diff(served) < 0.0))
        all_fall &= falls and not waited
        text = f"c_o = {cost:g}: " + ("it falls" if falls else "it does not fall throughout")
        if waited:
            text += f", once the policy serves; before, it rises from {waited[0]:.1f} to {waited[-1]:.1f}"
        parts.append(text)
    return Judgement(
        Verdict.HELD if all_fall else Verdict.LIMITED,
        f"{'; '.join(parts)}. While the policy waits in S_o for ever, all of the cost is paid there: Δ = g = s_max/λ + c_o.",
    )


def _sharp_drop(findings: Findings) -> Judgement:
    parts, good = [], True
    for cost in SMALL:
        tried = findings.minimum(cost).tried
        before, after = tried[-2], tried[-1]
        only = all(each.waits for each in tried[:-1])
        good &= only and before.delta > 1.0 and after.delta < 1e-6
        parts.append(
            f"c_o = {cost:g}: Δ falls from {before.delta:.2f} at {before.s_max} to {after.delta:.1e} at {after.s_max}, and {'every' if only else 'not every'} policy before waits in S_o. "
            f"By exact comparison serving is better from s_max = {_least_exact(cost)} on: between, the stopped iteration had not found out (span {before.span:.2g})"
        )
    serve = [cost for cost in LARGE if not any(each.waits for each in findings.minimum(cost).tried)]
    return held_if(
        good, f"{'; '.join(parts)}. All policies serve for c_o = {', '.join(f'{cost:g}' for cost in serve)}."
    )


def _stable(findings: Findings) -> Judgement:
    parts, ratios, ordered = [], [], True
    for cost in (*LARGE, *SMALL):
        tail = [each for each in findings.accuracy[cost] if each.s_max >= STABLE_FROM and not each.waits]
        ratios.append(tail[0].delta / tail[-1].delta)
        parts.append(
            f"{tail[0].delta:.1e} at {tail[0].s_max}, {tail[-1].delta:.1e} at {tail[-1].s_max} (c_o = {cost:g})"
        )
    for s_max in (220, 250):
        deltas = [findings.swept(cost, s_max).delta for cost in (0.0, 10.0, 100.0, 1_000.0, 10_000.0)]
        ordered &= bool(np.all(np.diff(deltas) > 0.0))
    flat = max(ratios) < 10.0
    largest = max(findings.swept(cost, 210).delta for cost in LARGE)
    verdict = Verdict.HELD if flat and ordered else Verdict.LIMITED if ordered else Verdict.NOT_HELD
    return Judgement(
        verdict,
        f"It {'increases' if ordered else 'does not increase'} with c_o, and it is at most {largest:.1e} at s_max = 210 (the paper: {STABLE_DELTA:g}). "
        + ("It is nearly constant" if flat else "But it is not stable: computed without subtractions it goes on falling, by the same factor a state")
        + f": {'; '.join(parts)}."
        + ("" if flat else " A plateau at 1e-13 or 1e-14 is what rounding leaves of a stationary law computed with subtractions."),
    )  # fmt: skip


def _over_and_under(findings: Findings) -> Judgement:
    limit = findings.exact.cost
    above = {cost: [each.cost - limit for each in findings.accuracy[cost] if not each.waits] for cost in LARGE}
    below = {cost: [each.cost - limit for each in findings.accuracy[cost] if each.waits] for cost in SMALL}
    high = {cost: sum(value > 0 for value in values) / len(values) for cost, values in above.items()}
    low = {cost: sum(value < 0 for value in values) / len(values) for cost, values in below.items()}
    shown = ", ".join(f"{100 * share:.0f} % of the sizes tried (c_o = {cost:g})" for cost, share in high.items())
    under = ", ".join(f"{100 * share:.0f} % (c_o = {cost:g})" for cost, share in low.items())
    return held_if(
        all(share > 0.5 for share in (*high.values(), *low.values())),
        f"g is above its limit for {shown}; below it, of the sizes whose policy waits, for {under}.",
        otherwise=Verdict.LIMITED,
    )


def _offline(findings: Findings) -> Judgement:
    loads = len(findings.weights)
    return held_if(
        findings.exact.iterations < 20,
        f"A table of {len(findings.exact.table)} small numbers is all that runs; Table I's setting takes {findings.exact.iterations} steps of policy iteration, and this report solved {loads} weights at each of five loads for Fig. 5 alone.",
    )


def _averages_only(findings: Findings) -> Judgement:
    return Judgement(
        Verdict.ARGUED,
        "It is a limitation that the paper states. Weir's latency objective and its guards against silence go beyond it; see the documentation.",
    )


def rows(findings: Findings) -> list[tuple[Sweep, int]]:
    """Return Table I: for each column what value iteration accepts, and what exact solution would."""
    return [(findings.minimum(column.overflow_cost).accepted, _least_exact(column.overflow_cost)) for column in TABLE]


CLAIMS = (
    Claim("Table I", "The numbers of the table.", _table_reproduced),
    Claim("abstract, V-C", "The abstract cost saves 63.5 % of the space and 98 % of the time.", _reductions,
        "By the paper's own measures. But value iteration for c_o = 0 was stopped before it had converged, and policy iteration takes a few steps without any c_o."),
    Claim("V-C", "All Δ of the table are below 0.001, and so are the differences between the g.", _all_tolerated),
    Claim("V-C", "The least s_max, 70, is that of c_o = 100.", _least_at_100,
        "Of the five in the table; some between need slightly less."),
    Claim("V-C", "The work grows for larger and for smaller c_o.", _grows_both_ways),
    Claim("V-C (Fig. 8)", "g falls and converges at about s_max = 35, 50, 70 for c_o = 10000, 1000, 100; it rises and converges at about 170, 200 for c_o = 10, 0.", _converges,
        "Of the large c_o, the largest converges last: the stated numbers fit in the opposite order."),
    Claim("V-C (Fig. 8)", "Large c_o mostly overestimate, small ones underestimate what the tail costs.", _over_and_under),
    Claim("V-C (Fig. 8)", "Δ falls with s_max.", _delta_falls,
        "For c_o = 10 and 0 only once the policy serves; before, it rises."),
    Claim("V-C (Fig. 8)", "For c_o = 10 and 0 it drops sharply where the policy ceases to wait for ever.", _sharp_drop),
    Claim("V-C (Fig. 8)", "From about s_max = 200 on Δ is nearly stable, at most 1e-13, and increases with c_o.", _stable,
        "It increases with c_o, but is not stable: computed without subtractions it goes on falling. The plateau is rounding."),
    Claim("VI", "The policy can be computed offline, so that the running system has no extra burden.", _offline),
    Claim("VI", "The method considers averages only, no hard limits on latency.", _averages_only),
)  # fmt: skip
