"""Claims of sections I to III: about batches, the model and its costs."""

import numpy as np

from reproduction.claims import Claim, Judgement, Verdict, held_if
from reproduction.findings import LOADS, WORK_CONSERVING, Findings
from reproduction.published import MAX_RATE_PER_MS, PRICES, PROFILE
from reproduction.truncated import model_of
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import limit_table
from weir.simulation.simulator import simulate


def _per_row(findings: Findings) -> Judgement:
    times = PROFILE.service_time_ms / PROFILE.sizes
    energies = PROFILE.energy_mj / PROFILE.sizes
    falls = bool(np.all(np.diff(times) < 0.0) and np.all(np.diff(energies) < 0.0))
    return held_if(
        falls,
        f"From 1 row to {PROFILE.max_batch_size}, time per row falls at every step, from {times[0]:.3f} to {times[-1]:.3f} ms, "
        f"energy per row from {energies[0]:.1f} to {energies[-1]:.1f} mJ.",
    )  # fmt: skip


def _largest_is_fastest(findings: Findings) -> Judgement:
    best, rate = PROFILE.best_batch_size, PROFILE.max_rate / 1000.0
    text = f"The fastest size is {best}, at {rate:.4f} rows per ms; the paper prints {MAX_RATE_PER_MS}."
    limits = " It follows from the straight line τ(b) = αb + τ0; a measured profile need not have it, so Weir uses b* = argmax b/τ(b)."
    return Judgement(
        Verdict.LIMITED if best == PROFILE.max_batch_size and abs(rate - MAX_RATE_PER_MS) < 0.01 else Verdict.NOT_HELD,
        text + limits,
    )


def _longer_response(findings: Findings) -> Judgement:
    parts, exceptions = [], []
    for load in LOADS:
        times = [
            evaluate(PROFILE, load * PROFILE.max_rate, limit_table(limit, PROFILE.max_batch_size)).response_time_ms
            for limit in range(1, PROFILE.max_batch_size + 1)
        ]
        shortest = int(np.argmin(times)) + 1
        parts.append(f"{times[0]:.2f} ms at limit 1, {times[-1]:.2f} at {PROFILE.max_batch_size} (ρ = {load:g})")
        if shortest > 1:
            exceptions.append(
                f"at ρ = {load:g} limit {shortest} is the quickest, by {100 * (1 - times[shortest - 1] / times[0]):.2g} %"
            )
    text = f"Mean response time by control limit: {'; '.join(parts)}."
    if exceptions:
        text += f" Waiting a little can shorten it, though: {'; '.join(exceptions)}."
    return Judgement(Verdict.LIMITED if exceptions else Verdict.HELD, text)


def _static_does_not_fit(findings: Findings) -> Judgement:
    low = findings.benchmark(0.1, "static 32").response_time_ms
    greedy = findings.benchmark(0.1, WORK_CONSERVING).response_time_ms
    unstable = [load for load in LOADS if not findings.benchmark(load, "static 8").stable]
    served = findings.benchmark(0.9, "static 8").throughput / 1000.0
    offered = 0.9 * PROFILE.max_rate / 1000.0
    return held_if(
        low > 10.0 * greedy and bool(unstable),
        f"Batches of exactly 32 at ρ = 0.1 respond in {low:.1f} ms, work-conserving ones in {greedy:.2f} ms. Batches of exactly 8 at ρ = 0.9 serve "
        f"{served:.2f} of the {offered:.2f} rows that come per ms.",
    )  # fmt: skip


def _work_conserving_is_not_optimal(findings: Findings) -> Judgement:
    above = {load: _excess(findings, load, WORK_CONSERVING, 1.0) for load in LOADS}
    shown = ", ".join(f"{100 * value:.2f} % (ρ = {load:g})" for load, value in above.items())
    return held_if(min(above.values()) > 0.0, f"With w1 = w2 = 1 it costs more than the solved policy by {shown}.")


def _excess(findings: Findings, load: float, name: str, energy_weight: float) -> float:
    return findings.cost(load, name, energy_weight) / findings.optimum(load, energy_weight) - 1.0


def _little(findings: Findings) -> Judgement:
    """Compare W, which comes from rows in the system, with the response times of simulated rows."""
    inside, parts = True, []
    for load in (0.3, 0.9):
        seen = simulate(
            PROFILE, {"limit": "control-limit:limit=8"}, f"poisson:{load:g}", requests=100_000, seed=1
        ).outcomes["limit"]
        table = limit_table(8, PROFILE.max_batch_size)
        exact = evaluate(PROFILE, load * PROFILE.max_rate, table).response_time_ms
        inside &= exact in seen.response_time_ms
        parts.append(
            f"{exact:.3f} ms from the rows in the system, {seen.response_time_ms.low:.3f} to {seen.response_time_ms.high:.3f} "
            f"from single rows, simulated (ρ = {load:g})"
        )
    return held_if(inside, f"Control limit 8: {'; '.join(parts)}.")


def _holding_cost(findings: Findings) -> Judgement:
    """Integrate equation 8 numerically and compare with equation 9."""
    rate = 0.9 * PROFILE.max_rate
    model = model_of(PROFILE, rate, PRICES, 100)
    per_ms, worst = rate / 1000.0, 0.0
    for action in (1, 8, 32):
        tau = float(PROFILE.service_time_ms[action - 1])
        instants = (np.arange(20_000) + 0.5) / 20_000 * tau
        for state in (action, 60):
            integral = float(np.mean(state + per_ms * instants)) * tau / per_ms + float(PROFILE.energy_mj[action - 1])
            worst = max(worst, abs(integral / float(model.costs[action, state]) - 1.0))
    return held_if(
        worst < 1e-6,
        f"Numerical integration agrees within {worst:.1e}, relative, for three batch sizes in two states each.",
    )


def _unichain(findings: Findings) -> Judgement:
    model = model_of(PROFILE, 0.9 * PROFILE.max_rate, PRICES, 70)
    most = float(model.arrivals[:, -1].min())
    return Judgement(
        Verdict.LIMITED if most > 0.0 else Verdict.NOT_HELD,
        "In the finite model every state leads to S_o under every policy: by waiting, or because any number of rows may arrive during a batch (at ρ = 0.9 and "
        f"s_max = 70 with a probability of at least {most:.1e}). So there is one closed class. In the infinite model a policy that waits for ever has none, and no stationary "
        "law; the policies that matter serve.",
    )  # fmt: skip


def _by_others(findings: Findings) -> Judgement:
    return Judgement(
        Verdict.NOT_COMPUTED, "It is about other works, or about who was first. Nothing here can decide it."
    )


def _measured_by_others(findings: Findings) -> Judgement:
    fit = PROFILE.fit()
    return Judgement(
        Verdict.NOT_COMPUTED,
        "The measured points are not published, only these lines: "
        f"τ(b) = {fit.alpha_ms:.4f}·b + {fit.tau0_ms:.3f} ms, ζ(b) = {fit.beta_mj:.2f}·b + {fit.zeta0_mj:.2f} mJ for the P4, and none for the V100. `weir profile` fits both "
        "lines to a model of yours, with R², and measures the coefficient of variation.",
    )  # fmt: skip


def _existence(findings: Findings) -> Judgement:
    return Judgement(
        Verdict.NOT_COMPUTED,
        "A theorem (Sennott, 1989), cited with conditions that the paper does not write out. What is computed is consistent with it: policy iteration ends at every load tried.",
    )


CLAIMS = (
    Claim("abstract, I", "Larger batches use less time and less energy per request.", _per_row),
    Claim("abstract, I", "Larger batches may lengthen the response time.", _longer_response,
        "At high load, waiting for a second row is slightly quicker than not waiting."),
    Claim("I", "A batch size that is fixed in advance responds poorly at low load and has too little throughput at high load.", _static_does_not_fit),
    Claim("I", "The work-conserving policy is not optimal, because it gives up larger batches.", _work_conserving_is_not_optimal),
    Claim("I", "What other systems lack (SERF no batching, BATCH no arrivals during processing); that this is the first SMDP solution.", _by_others,
        "It is about other works."),
    Claim("II, Fig. 2 and 3", "Processing times hardly vary; time and energy grow linearly with the batch size.", _measured_by_others,
        "The measured points are not published. `weir profile` fits both lines to your model."),
    Claim("II", "Throughput and energy efficiency never fall with the batch size, so the largest batch is the fastest: 2.96 requests per ms.", _largest_is_fastest,
        "It follows from the straight line; a measured profile need not have it, so Weir uses b* = argmax b/τ(b)."),
    Claim("II", "By Little's law, the mean response time may be replaced by the mean number of requests.", _little),
    Claim("III, (9)", "The cost until the next decision is w2·ζ + w1·(s·τ/λ + τ²/2).", _holding_cost),
    Claim("III", "The model is unichain.", _unichain,
        "True of the finite model. In the infinite one a policy that waits for ever has no stationary law."),
    Claim("III", "An optimal stationary deterministic policy exists in the infinite model.", _existence,
        "A theorem (Sennott, 1989); policy iteration ends at every load tried."),
)  # fmt: skip
