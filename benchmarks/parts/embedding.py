"""Policies on a real model: an encoder of sentences on a CPU, its measured profile, and the policy solved for it beside the usual rules."""

from pathlib import Path

import weir
from benchmarks.harness.result import Part, Result, Run
from benchmarks.harness.sweep import Sweep, sweep
from weir.embedding.server_settings import INSTALL, installed_model
from weir.policy.cost.profile import Profile

MODEL = "weir.embedding.model:TextEncoder"
SENTENCES = Path(__file__).parents[1] / "sentences.jsonl"
LOADS = (0.3, 0.6, 0.9)
LARGEST = 64
RULES = {
    "greedy, up to 64": "greedy",
    "full batches of 64": "full",
    "8 or 5 ms": "size-or-delay:size=8,delay=5ms",
    "32 or 20 ms": "size-or-delay:size=32,delay=20ms",
    "64 or 100 ms": "size-or-delay:size=64,delay=100ms",
}
PROFILE_SECONDS = 60.0
FLAGS = ("--max-batch-size", str(LARGEST), "--max-queue-delay", "3", "--threads", "1")


def measure(run: Run) -> Result:
    """Profile the model, solve, then serve it once with each policy."""
    directory = installed_model()
    if directory is None:
        raise FileNotFoundError(f"the small model is missing: {INSTALL}")
    params = {"directory": str(directory), "devices": ["cpu"]}
    profile = weir.profile(
        MODEL, items=SENTENCES, max_batch_size=LARGEST, threads=1, seconds=PROFILE_SECONDS, params=params
    )
    run.step(f"profile: at best {profile.max_rate:.0f} texts/s, in batches of {profile.best_batch_size}")
    flags = (*FLAGS, "--param", f"directory={directory}", "--param", 'devices=["cpu"]')
    asked = Sweep(MODEL, "/infer/textencoder", SENTENCES, flags, RULES, LOADS)
    result = sweep(run, asked, weir.solve(profile, latency_weight=1.0, energy_weight=0.0))
    result.notes += _notes(profile, run)
    return result


def _notes(profile: Profile, run: Run) -> list[str]:
    fit = profile.fit()
    sizes = (1, 2, 4, 8, 16, 32, LARGEST)
    speeds = ", ".join(f"{b}: {1000 * b / profile.service_time_ms[b - 1]:.0f}" for b in sizes)
    return [
        f"The profile, from {PROFILE_SECONDS:g} s: texts/s by batch size {speeds}; b* = {profile.best_batch_size}; "
        f"τ(b) = {fit.alpha_ms:.2f}·b + {fit.tau0_ms:.2f} ms (R² {fit.time_r2:.3f}); coefficient of variation of a text alone "
        f"{profile.cv[0]:.2f}, since texts differ in length. Solved for the mean response time alone.",
        f"`weir serve {MODEL} {' '.join(FLAGS)} --policy ...` for each, {run.rounds} rounds of {4 * run.seconds:g} s at each "
        "load, by turns; loads are shares of the profile's best rate; Poisson arrivals, 187 texts of 3 to 48 words.",
    ]


PART = Part(
    "embedding",
    "Policies on a real model",
    "The encoder of `weir embed serve`, all-MiniLM-L6-v2, on one thread of a CPU: profiled, a policy solved for it, and served with that and with the "
    "usual rules.",
    lambda rounds: 1 + len(LOADS),
    measure,
)
