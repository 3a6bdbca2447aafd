"""Policies on real servers: a load sweep of the solved policy beside the usual rules, each serving the same arrivals by turns; and that of an
encoder of sentences on a CPU, with its measured profile."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import uvloop

import weir
from benchmarks.harness.result import Part, Result, Run
from benchmarks.harness.servers import serving, weir_command
from weir.bench import LoadSettings, Outcome, Report, ServerTarget, run_bench
from weir.bench.run import TargetTurn
from weir.bench.target import Ledger
from weir.policy.cost import Profile
from weir.policy.solve.bank import Bank
from weir.text_server.server_settings import INSTALL, installed_model

SOLVED = "solved"
COLUMNS = ("load", "policy", "p50, ms", "p99, ms", "mean, ms", "responses/s", "mean batch", "busy, ms each", "errors")
Meter = Callable[[], float]  # millijoules so far


class Sweep(NamedTuple):
    """What is served, how, and with what it is asked. `rules` are the other policies, by the name they are shown under."""

    target: str
    path: str
    items: Path
    flags: Sequence[str]
    rules: Mapping[str, str]
    loads: Sequence[float]
    meter: Meter | None = None


def sweep(run: Run, asked: Sweep, bank: Bank) -> Result:
    """Serve the model once with each policy and put each load on all of them, in rounds."""
    result = Result([*COLUMNS, *(["power, W"] if asked.meter else [])])
    body = asked.items.read_text().splitlines()[0].encode()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "bank.npz"
        path.write_bytes(bank.to_bytes())
        urls = {}
        for name, policy in {SOLVED: str(path), **asked.rules}.items():
            command = weir_command(asked.target, *asked.flags, "--policy", policy)
            server = stack.enter_context(serving(name, command, path=asked.path, body=body, expected=None))
            urls[name] = server.url
        for load in asked.loads:
            settings = LoadSettings(
                "poisson", rate=load * bank.profile.max_rate, duration=4.0 * run.rounds * run.seconds,
                rounds=run.rounds, seed=round(100 * load), max_lag_ms=1.0,
            )  # fmt: skip
            targets = [ServerTarget(url, f"@{asked.items}", name=name) for name, url in urls.items()]
            report, powers = uvloop.run(measured(targets, settings, asked.meter))
            _add(result, load, report, powers)
            run.step(
                f"load {load}: mean {report.outcomes[SOLVED].response_time_ms.value:.1f} ms with the solved policy"
            )
    return result


async def measured(
    targets: Sequence[ServerTarget], settings: LoadSettings, meter: Meter | None
) -> tuple[Report, dict[str, float]]:
    """Return the report and, with a meter, the mean power in W while each target had its rounds (idle power included)."""
    readings: list[tuple[str, float, float]] = []
    loop = asyncio.get_running_loop()

    def watch(turn: TargetTurn, books: Ledger) -> None:
        if meter is not None:
            readings.append((turn.target, loop.time(), meter()))

    report = await run_bench(targets, settings, watch=watch)
    if meter is not None:
        readings.append(("", loop.time(), meter()))
    energy_mj: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for (name, began, before), (_, ended, after) in pairwise(readings):
        energy_mj[name] = energy_mj.get(name, 0.0) + after - before
        seconds[name] = seconds.get(name, 0.0) + ended - began
    return report, {name: energy_mj[name] / 1000.0 / seconds[name] for name in energy_mj}


def _add(result: Result, load: float, report: Report, powers: Mapping[str, float]) -> None:
    outcomes = report.outcomes
    for name, one in outcomes.items():
        row = _row(load, one) + ([f"{powers[name]:.1f}"] if name in powers else [])
        result.rows.append(row)
        result.values[f"{name} {load} mean"] = one.response_time_ms.value
    ours, best = outcomes[SOLVED], min(outcomes.values(), key=lambda one: one.response_time_ms.value)
    sound = not report.failures
    result.goal(
        f"load {load}: no rule's mean response time is clearly lower",
        f"solved {_interval(ours)} ms; lowest: {best.target}, {_interval(best)} ms"
        + ", but no sound measurement" * (not sound),
        sound and (best is ours or best.response_time_ms.high >= ours.response_time_ms.low),
    )
    result.notes += [f"Load {load} is not a sound measurement: {failure}." for failure in report.failures]


def _row(load: float, one: Outcome) -> list[str]:
    batches = one.batches
    mean_rows = batches.mean_rows if batches else float("nan")
    busy_ms = batches.predict_time_ms / mean_rows if batches else float("nan")
    failed = one.timeouts + one.unfinished + sum(one.errors.values())
    return [f"{load}", one.target, f"{one.p50_ms.value:.1f}", f"{one.p99_ms.value:.1f}", _interval(one),
            f"{one.throughput:.1f}", f"{mean_rows:.1f}", f"{busy_ms:.2f}", f"{failed}"]  # fmt: skip


def _interval(one: Outcome) -> str:
    mean = one.response_time_ms
    return f"{mean.value:.1f} ({mean.low:.1f} to {mean.high:.1f})"


MODEL = "weir.text_models.model:TextEncoder"
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
    params = {"directory": str(directory), "computing": {"device_map": ["cpu"]}}
    profile = weir.profile(
        MODEL, items=SENTENCES, max_batch_size=LARGEST, threads=1, seconds=PROFILE_SECONDS, params=params
    )
    run.step(f"profile: at best {profile.max_rate:.0f} texts/s, in batches of {profile.best_batch_size}")
    flags = (*FLAGS, "--param", f"directory={directory}", "--param", 'computing={"device_map": ["cpu"]}')
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


EMBEDDING = Part(
    "embedding",
    "Policies on a real model",
    "The encoder of `weir embed serve`, all-MiniLM-L6-v2, on one thread of a CPU: profiled, a policy solved for it, and served with that and with the "
    "usual rules.",
    lambda rounds: 1 + len(LOADS),
    measure,
)
