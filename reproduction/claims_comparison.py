"""Claims of section V-B, and of the abstract and section I that rest on it: the solved policy against others."""

import numpy as np

from reproduction.claims import Claim, Judgement, Verdict, held_if
from reproduction.findings import LOADS, WORK_CONSERVING, Findings
from reproduction.frontier import Corner, least_power_w
from reproduction.neighbours import dominating
from reproduction.published import LARGEST_WEIGHT, PROFILE
from reproduction.structure import GRID_LOADS
from weir.policy.solve.smdp import evaluate, is_stable
from weir.policy.solve.tables import static_table

FAR = 0.05  # relative: from here on a policy is called far from optimal
NEAR = 0.01
ROUNDING = 1e-9


def _ratios(findings: Findings, load: float, name: str) -> list[float]:
    """Return cost / optimum for each w2 of Fig. 5."""
    return [findings.cost(load, name, weight) / findings.optimum(load, weight) for weight in findings.weights]


def _always_best(findings: Findings) -> Judgement:
    cells = [ratio - 1.0 for load in LOADS for name in findings.tables for ratio in _ratios(findings, load, name)]
    finite = [cell for cell in cells if np.isfinite(cell)]
    return held_if(
        min(cells) >= -ROUNDING,
        f"{len(cells)} comparisons (five loads, four policies, {len(findings.weights)} values of w2 from 0 to {LARGEST_WEIGHT:g}): the other policy is never cheaper (least difference {100 * min(finite):.1e} %), it costs up "
        f"to {100 * max(finite):.0f} % more, and is unstable in {len(cells) - len(finite)}. It cannot be otherwise: all of them are policies of the same model, of which the optimum was found.",
    )  # fmt: skip


def _adapts(findings: Findings) -> Judgement:
    parts = [f"{findings.solved(load, 1.0, 1.0).limit} at ρ = {load:g}" for load in LOADS]
    best = {load: min((findings.cost(load, name, 1.0), name) for name in findings.tables) for load in LOADS}
    gains = [
        f"{100 * (best[load][0] / findings.optimum(load, 1.0) - 1):.1f} % at ρ = {load:g} ({best[load][1]})"
        for load in LOADS
    ]
    return held_if(
        len(set(parts)) > 1,
        f"With w1 = w2 = 1 the control limit is {', '.join(parts)}. The best of the four other policies costs more by {', '.join(gains)}. Each load has a policy of its own: the load must be known, and switching is not part of the paper.",
    )  # fmt: skip


def _flexible(findings: Findings) -> Judgement:
    parts = []
    for load in LOADS:
        found = findings.frontier(load)
        parts.append(
            f"{found[0].response_time_ms:.2f} ms and {found[0].power_w:.2f} W to {found[-1].response_time_ms:.2f} ms and {found[-1].power_w:.2f} W, {len(found)} corners (ρ = {load:g})"
        )
    return held_if(all(len(findings.frontier(load)) > 3 for load in LOADS), f"From {'; '.join(parts)}.")


def _work_conserving_far(findings: Findings) -> Judgement:
    parts, verdicts = [], []
    for load in LOADS:
        ratios = [
            ratio
            for weight, ratio in zip(findings.weights, _ratios(findings, load, WORK_CONSERVING), strict=True)
            if weight > 5.0
        ]
        verdicts.append(min(ratios) - 1.0 > FAR)
        parts.append(f"{100 * (min(ratios) - 1):.1f} to {100 * (max(ratios) - 1):.1f} % (ρ = {load:g})")
    return Judgement(
        Verdict.HELD if all(verdicts) else Verdict.LIMITED if any(verdicts) else Verdict.NOT_HELD,
        f"For w2 above 5 it costs more than the optimum by {'; '.join(parts)}. Near saturation batches fill by themselves, and it is nearly optimal.",
    )


def _maximum_batching_bad(findings: Findings) -> Judgement:
    low, high = _ratios(findings, 0.1, "static 32"), _ratios(findings, 0.9, "static 32")
    return held_if(
        min(low) - 1.0 > FAR,
        f"At ρ = 0.1 it costs {min(low):.2f} to {max(low):.1f} times the optimum, at ρ = 0.9 {min(high):.3f} to {max(high):.2f} times.",
    )


def _static_near(findings: Findings) -> Judgement:
    parts, near = [], []
    for name in ("static 8", "static 16"):
        load, weight, ratio = min(
            (
                (load, weight, ratio)
                for load in LOADS
                for weight, ratio in zip(findings.weights, _ratios(findings, load, name), strict=True)
            ),
            key=lambda each: each[2],
        )
        near.append(ratio - 1.0 < NEAR)
        parts.append(f"{name} within {100 * (ratio - 1):.2g} % at ρ = {load:g}, w2 = {weight:g}")
    return held_if(all(near), f"Closest: {'; '.join(parts)}.")


def _ends(findings: Findings) -> Judgement:
    parts, near = [], []
    for load in LOADS:
        found = findings.frontier(load)
        for name, end in ((WORK_CONSERVING, found[0]), ("static 32", found[-1])):
            other = findings.benchmark(load, name)
            off = max(abs(other.response_time_ms / end.response_time_ms - 1.0), abs(other.power_w / end.power_w - 1.0))
            near.append(off < NEAR)
            parts.append(f"{100 * off:.2g}")
    return held_if(
        all(near),
        f"They are off the ends by at most {max(map(float, parts)):.2g} %, in response time or power, at five loads.",
    )


def _static_8_above(findings: Findings) -> Judgement:
    other, found = findings.benchmark(0.7, "static 8"), findings.frontier(0.7)
    corner = _quicker(found, other.response_time_ms)
    return held_if(
        corner.power_w < other.power_w,
        f"Batches of 8: {other.response_time_ms:.3f} ms and {other.power_w:.3f} W. The solved policy with control limit {corner.limit}: {corner.response_time_ms:.3f} ms and {corner.power_w:.3f} W, better in "
        f"both; at the very same response time a mix needs {least_power_w(found, other.response_time_ms):.3f} W.",
    )  # fmt: skip


def _quicker(found: list[Corner], response_time_ms: float) -> Corner:
    """Return the corner with the least power among those that respond no later than that."""
    return min((each for each in found if each.response_time_ms <= response_time_ms), key=lambda each: each.power_w)


def _static_8_unstable(findings: Findings) -> Judgement:
    share = 8 / float(PROFILE.service_time_ms[7]) * 1000.0 / PROFILE.max_rate
    tried = [load for load in GRID_LOADS if load >= 0.8]
    stable = [load for load in tried if is_stable(PROFILE, load * PROFILE.max_rate, static_table(8))]
    return held_if(
        not stable, f"It serves at most {share:.4f} of the maximum rate, so it is unstable from ρ = {share:.4f} on."
    )


def _static_16_slow(findings: Findings) -> Judgement:
    other, found = findings.benchmark(0.9, "static 16"), findings.frontier(0.9)
    thrifty = min((each for each in found if each.power_w <= other.power_w), key=lambda each: each.response_time_ms)
    return held_if(
        other.response_time_ms > 1.5 * thrifty.response_time_ms,
        f"At ρ = 0.9 batches of 16 respond in {other.response_time_ms:.2f} ms with {other.power_w:.2f} W; a solved policy does with no more power in {thrifty.response_time_ms:.2f} ms, "
        f"and even batches of 32 in {findings.benchmark(0.9, 'static 32').response_time_ms:.2f} ms.",
    )  # fmt: skip


def _never_more_energy(findings: Findings) -> Judgement:
    """Hold every static size at many loads against single corners, and against mixes of two."""
    tried, escaped, above = 0, [], [0.0]
    for load in LOADS:
        found = findings.frontier(load)
        for size in range(1, PROFILE.max_batch_size + 1):
            other = evaluate(PROFILE, load * PROFILE.max_rate, static_table(size))
            if not other.stable:
                continue
            tried += 1
            single = any(
                each.response_time_ms <= other.response_time_ms * (1 + ROUNDING)
                and each.power_w <= other.power_w * (1 + ROUNDING)
                for each in found
            )
            excess = other.power_w / least_power_w(found, other.response_time_ms) - 1.0
            above.append(excess)
            if not single:
                escaped.append(excess)
    text = (
        f"Of mixes it is true: for each of {tried} stable static batch sizes (1 to {PROFILE.max_batch_size}, five loads) some mix of two solved policies needs no more power at the same response time, "
        f"and is no slower with the same power. Of single solved policies it is not: {len(escaped)} of the {tried} are not dominated by any; they lie between two corners, at most {100 * max(escaped, default=0.0):.2f} % above the line between these."
    )
    verdict = Verdict.LIMITED if escaped else Verdict.HELD
    return Judgement(verdict if min(above) >= -ROUNDING else Verdict.NOT_HELD, f"{text} {_static_16(findings)}")


def _static_16(findings: Findings) -> str:
    found, other = findings.frontier(0.7), findings.benchmark(0.7, "static 16")
    left = _quicker(found, other.response_time_ms)
    right = next(each for each in found if each.response_time_ms > other.response_time_ms)
    mixed = least_power_w(found, other.response_time_ms)
    share = (other.response_time_ms - left.response_time_ms) / (right.response_time_ms - left.response_time_ms)
    better, tried = dominating(0.7, (left.table, right.table), other)
    text = (
        f"Batches of 16 at ρ = 0.7: {other.response_time_ms:.4f} ms and {other.power_w:.4f} W, between the corners of control limit {left.limit} ({left.response_time_ms:.4f} ms, {left.power_w:.4f} W: more power) and "
        f"{right.limit} ({right.response_time_ms:.4f} ms, {right.power_w:.4f} W: slower). Spending {100 * share:.1f} % of the time with the second and the rest with the first gives the same response time with {mixed:.4f} W, "
        f"{100 * (1 - mixed / other.power_w):.2f} % less. "
    )
    if not better:
        return (
            text
            + f"None of {tried:,} tables that differ from one of these two in one state's action dominates it either."
        )
    table, found_performance = better[0]
    return text + (
        f"Of {tried:,} tables that differ from one of these two in one state's action, {len(better)} dominate it, the thriftiest with {found_performance.response_time_ms:.4f} ms and {found_performance.power_w:.4f} W "
        f"({table}); they are optimal for no weights, so the paper's procedure does not find them."
    )


CLAIMS = (
    Claim("abstract, I, V-B", "The solved policies have the best objective of all policies in all settings.", _always_best),
    Claim("I, V-B", "At the same response time they never use more energy than any other policy, and the other way round.", _never_more_energy,
        "True of mixes of two solved policies. Some static sizes are dominated by no single solved policy; they lie just above the line between two."),
    Claim("abstract, I", "They adapt to the traffic intensity.", _adapts),
    Claim("abstract, I, V-B", "By the weights, latency and power can be balanced flexibly.", _flexible),
    Claim("V-B (Fig. 5)", "The work-conserving policy is far from optimal for w2 > 5.", _work_conserving_far,
        "Near saturation batches fill by themselves, and it is nearly optimal."),
    Claim("V-B (Fig. 5)", "Maximum batching works badly at ρ = 0.1.", _maximum_batching_bad),
    Claim("V-B (Fig. 5 to 7)", "The other static sizes come close to the optimum for certain parameters.", _static_near),
    Claim("V-B (Fig. 6, 7)", "Work-conserving and maximum batching are near the two ends of the trade-off curve.", _ends),
    Claim("V-B (Fig. 6, 7)", "Batches of 8 at ρ = 0.7 use more energy than a solved policy that responds as quickly.", _static_8_above),
    Claim("V-B", "Batches of 8 do not keep up from ρ = 0.8 on.", _static_8_unstable),
    Claim("V-B (Fig. 6)", "Batches of 16 respond considerably later at ρ = 0.9.", _static_16_slow),
)  # fmt: skip
