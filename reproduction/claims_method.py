"""Claims of section IV: truncation, discretisation, relative value iteration, and what they cost."""

import numpy as np

from reproduction.claims import Claim, Judgement, Verdict, held_if
from reproduction.findings import LOADS, Findings
from reproduction.published import LOAD, MOST_SWEEPS, PRICES, PROFILE, TABLE
from reproduction.sweeps import sweep
from reproduction.truncated import eta_bound, iterate_values, law_of, model_of, served_table, solve_truncated
from weir.policy.cost import Floats
from weir.policy.solve.smdp import evaluate, is_stable

RATE = LOAD * PROFILE.max_rate
ETA_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 0.999)
SMALL = 100  # an s_max
BOLD = TABLE[2]  # c_o = 100: the column that the paper recommends


def _tail_falls(findings: Findings) -> Judgement:
    masses = {}
    for s_max in (40, 70, 100, 150, 200):
        model = model_of(PROFILE, RATE, PRICES, s_max, 1000.0)
        actions = np.minimum(
            findings.exact.table[np.minimum(np.arange(s_max + 2), len(findings.exact.table) - 1)], model.rows
        )
        masses[s_max] = float(law_of(model, actions.astype(np.int64))[-1])
    falls = bool(np.all(np.diff(list(masses.values())) < 0.0))
    shown = ", ".join(f"{mass:.1e} at {s_max}" for s_max, mass in masses.items())
    return held_if(falls, f"Share of decisions made in S_o under the optimal policy, by s_max: {shown}.")


def _overflow_punishes(findings: Findings) -> Judgement:
    shares = [(cost, findings.swept(cost, BOLD.s_max)) for cost in (0.0, 10.0, 100.0, 1_000.0, 10_000.0)]
    parts = [
        f"c_o = {cost:g}: " + ("waits in S_o for ever" if found.waits else f"{found.mass:.3e} visits per ms")
        for cost, found in shares
    ]
    served = [found.mass for _, found in shares if not found.waits]
    least = findings.exact.cost - BOLD.s_max / (RATE / 1000.0)
    return Judgement(
        Verdict.LIMITED if len(served) >= 2 and bool(np.all(np.diff(served) <= 1e-12)) and shares[0][1].waits else Verdict.NOT_HELD,
        f"With s_max = {BOLD.s_max}: {'; '.join(parts)}. So it decides between serving and waiting for ever (which is cheapest below g* − s_max/λ = {least:.1f}), and once the policy serves, more of it changes nothing.",
    )  # fmt: skip


def _eta_bound(findings: Findings) -> Judgement:
    """Hold equation 19 against 18, taken over every state and action."""
    parts, equal = [], True
    for load in LOADS:
        model = model_of(PROFILE, load * PROFILE.max_rate, PRICES, 100, 100.0)
        stated, least = eta_bound(model), np.inf
        for action in range(PROFILE.max_batch_size + 1):
            for state in (*range(action, 101), 101):
                stays = _stay(model.arrivals, action, state, 101)
                least = min(least, model.sojourn[action] / (1.0 - stays) if stays < 1.0 else np.inf)
        equal &= abs(stated / least - 1.0) < 1e-9
        parts.append(
            f"{stated:.4f} ms at ρ = {load:g}" + (" (= 1/λ)" if stated * model.rate_per_ms > 1.0 - 1e-9 else "")
        )
    return held_if(equal, f"(19) and (18), taken over all states and actions, give the same bound: {', '.join(parts)}.")


def _stay(arrivals: Floats, action: int, state: int, overflow: int) -> float:
    """Return the probability of being in `state` again after `action`."""
    if not action:
        return 1.0 if state == overflow else 0.0
    if action >= arrivals.shape[1]:
        return 0.0  # as many are less likely than anything that counts
    if state == overflow:
        return float(arrivals[action - 1, action + 1 :].sum())
    return float(arrivals[action - 1, action])


def _eta_speed(findings: Findings) -> Judgement:
    parts, rows = [], []
    for load in (0.3, 0.9):
        counts = [sweep(BOLD.overflow_cost, BOLD.s_max, eta_share=share, load=load).iterations for share in ETA_SHARES]
        rows.append(counts)
        parts.append(
            f"ρ = {load:g}: "
            + ", ".join(f"{count} ({share:g})" for share, count in zip(ETA_SHARES, counts, strict=True))
        )
    falls = all(bool(np.all(np.diff(counts) <= 0)) for counts in rows)
    return held_if(
        falls,
        f"Sweeps by η, as a share of its bound. {'; '.join(parts)}; {MOST_SWEEPS} means stopped. Sweeps times η varies by {100 * _spread(rows):.0f} % only.",
    )


def _spread(rows: list[list[int]]) -> float:
    """Return the largest ratio, less 1, of sweeps times η in a row, of those that ended by themselves."""
    products = [
        [count * share for count, share in zip(counts, ETA_SHARES, strict=True) if count < MOST_SWEEPS]
        for counts in rows
    ]
    return max(max(row) / min(row) for row in products) - 1.0


def _same_solution(findings: Findings) -> Judgement:
    """Put the values of value iteration into equation 16."""
    model = model_of(PROFILE, RATE, PRICES, 100, 100.0)
    swept = iterate_values(model, epsilon=1e-9, max_iterations=40_000)
    choices = model.costs + model.expected(swept.values)
    gains = (choices - swept.values) / model.sojourn[:, None]
    least = gains.min(axis=0)
    off = float(np.ptp(least))
    exact = findings.solved(LOAD, 1.0, 1.0)
    return held_if(
        off < 1e-6 and abs(float(least.mean()) - exact.cost) < 1e-4,
        f"With the values of value iteration (ε = 1e-9, {swept.iterations} sweeps) times η, (16) holds in all {len(least)} states with g = {least.mean():.7f}, within {off:.0e}; "
        f"policy iteration finds {exact.cost:.7f}.",
    )  # fmt: skip


def _accurate_is_optimal(findings: Findings) -> Judgement:
    small = findings.swept(BOLD.overflow_cost, BOLD.s_max)
    model = model_of(PROFILE, RATE, PRICES, BOLD.s_max, BOLD.overflow_cost)
    as_solved = evaluate(PROFILE, RATE, small.actions.astype(np.uint16), PRICES)
    filled = evaluate(PROFILE, RATE, served_table(PROFILE, small.actions, law_of(model, small.actions)), PRICES)
    good = abs(filled.cost / findings.exact.cost - 1.0) < 1e-6
    text = (
        f"With s_max = {BOLD.s_max} and c_o = 100, the policy, with full batches in the states that it does not visit, costs {filled.cost:.7f} in the infinite model; the optimum is "
        f"{findings.exact.cost:.7f}."
    )
    if not as_solved.stable:
        text += (
            f" As it was solved it is not even stable: in S_o it serves {small.actions[-1]} rows, which is best where later rows are lost, and not best for lines that really grow. "
            "Lines beyond s_max need a rule of their own."
        )
    return Judgement((Verdict.HELD if as_solved.stable else Verdict.LIMITED) if good else Verdict.NOT_HELD, text)


def _any_reference_state(findings: Findings) -> Judgement:
    return Judgement(
        Verdict.ARGUED,
        "By the form of (21): what is subtracted is one number for all states, so neither the differences of J between states, nor the span, nor the minimising actions depend on it.",
    )


def _multiplications(findings: Findings) -> Judgement:
    parts, ratios = [], []
    for column in TABLE:
        states = np.arange(column.s_max + 2)
        allowed = np.minimum(np.minimum(states, column.s_max), PROFILE.max_batch_size) + 1
        exact, stated = int(allowed.sum()) * len(states), PROFILE.max_batch_size * column.s_max**2
        ratios.append(exact / stated)
        parts.append(f"{exact:,} against {stated:,} (s_max = {column.s_max})")
    return Judgement(
        Verdict.LIMITED if min(ratios) > 0.5 and max(ratios) < 1.5 else Verdict.NOT_HELD,
        f"Σ|A_s||S'| against Bmax·s_max²: {'; '.join(parts)}: {100 * (min(ratios) - 1):.0f} to {100 * (max(ratios) - 1):+.0f} %. And less would do: the next states depend on s − a alone, so a sweep is one "
        "matrix product over the arrivals that matter, and a gather.",
    )  # fmt: skip


def _space(findings: Findings) -> Judgement:
    model = model_of(PROFILE, RATE, PRICES, BOLD.s_max, BOLD.overflow_cost)
    costs, law = model.costs.size, model.arrivals.size
    return held_if(
        costs + law < 4 * PROFILE.max_batch_size * BOLD.s_max,
        f"At s_max = {BOLD.s_max} the costs take {costs:,} numbers and the arrival law {law:,}; Bmax·s_max is {PROFILE.max_batch_size * BOLD.s_max:,}.",
    )


def _stays_stable(findings: Findings) -> Judgement:
    """Ask of each optimal policy whether its batches from the longest lines serve more rows than arrive."""
    exact, lost = [], []
    for load in LOADS:
        found = findings.solved(load, 1.0, 1.0)
        exact.append(is_stable(PROFILE, found.rate, found.table))
        truncated = solve_truncated(PROFILE, found.rate, PRICES, s_max=SMALL)
        if not is_stable(PROFILE, found.rate, truncated.actions.astype(np.uint16)):
            lost.append(f"{int(truncated.actions[-1])} rows at ρ = {load:g}")
    text = (
        f"Of lines of any length: the optimal table keeps up with the rate at {sum(exact)} of {len(LOADS)} loads. This is shown of these tables, each at its own rate; a table that is optimal at one rate need not "
        "keep up at another. "
    )
    if lost:
        text += (
            f"Of the model with s_max = {SMALL}: not so. The policy that is optimal there serves {', '.join(lost)} in S_o, which is less than arrives: rows that come in S_o are lost to the "
            "model, and lines that really grow are not in it."
        )
    return Judgement((Verdict.LIMITED if lost else Verdict.HELD) if all(exact) else Verdict.NOT_HELD, text)


CLAIMS = (
    Claim("IV-A", "The probability of the states above s_max falls with s_max, so that they can be left out.", _tail_falls),
    Claim("IV-A", "The abstract cost c_o keeps the optimal policy from overflowing.", _overflow_punishes,
        "It only decides between serving and waiting for ever; once the policy serves, a higher c_o changes nothing."),
    Claim("IV-A", "With ρ < 1 the optimal policy keeps the system stable.", _stays_stable,
        "True of queues of any length. The truncated model's optimal policy may serve fewer rows in S_o than arrive, because rows that arrive there are lost to the model."),
    Claim("IV-B, (19)", "η must be below min{1/λ, τ/(1 − p_a), τ/Σp_i}.", _eta_bound),
    Claim("IV-B", "The larger η, the faster value iteration converges.", _eta_speed),
    Claim("IV-B, (20)", "The discrete-time model has the same g, and η times its values satisfy (16).", _same_solution),
    Claim("IV-C", "The state s* may be chosen freely.", _any_reference_state),
    Claim("IV-C", "A sweep takes about Bmax·s_max² multiplications.", _multiplications,
        "Slightly fewer; and less would do, because the next state depends on s − a alone."),
    Claim("IV-C", "Space grows with Bmax·s_max, for only the arrival law and the costs are stored.", _space),
    Claim("IV-C", "With an accurate truncation, its optimal policy is optimal in the infinite model.", _accurate_is_optimal,
        "Only with full batches in the states that it does not visit; as it was solved, it is not even stable."),
)  # fmt: skip
