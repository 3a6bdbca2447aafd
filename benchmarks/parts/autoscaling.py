"""How many workers two recorded hours need: Weir's rule beside those of Ray Serve, Kubernetes and KEDA, each of them tuned for the
very trace. Virtual time, the real batcher."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from reproduction.drawing import COLOURS, MARKERS, figure

from benchmarks.autoscalers import parse_autoscaler
from benchmarks.harness.result import Part, Result, Run, Table, resumed
from benchmarks.harness.servers import ROOT
from weir.policy.cost import LatencySLO, Profile
from weir.policy.scaling import WorkerRange
from weir.simulation.arrivals import read_trace
from weir.simulation.scaling import ScalingTrial

TRACES = {"chat": "azure-conv.csv", "code": "azure-code.csv"}
FOLDER = ROOT / "benchmarks" / "policies" / "traces"
PICTURE = ROOT / "docs" / "pictures" / "autoscaling.png"
SOURCES = [ROOT / "src" / "weir" / each for each in ("policy", "simulation", "batching")] + [
    Path(__file__),
    ROOT / "benchmarks" / "autoscalers.py",
]
# A batch of b takes 1.5 + 0.6·b seconds: 6.3 s for the largest, so one worker answers 1.27 requests per second.
PROFILE = Profile.linear(alpha_ms=600.0, tau0_ms=1500.0, max_batch_size=8)
ALLOWED, START_UP = WorkerRange(1, 16), 20.0
PROMISES = {"chat": (12, 15, 20, 30), "code": (15, 20, 25, 30, 40)}  # seconds of the 99th percentile
MAIN = {"chat": 15, "code": 30}  # the promises of the goals
SAVED = 0.2
OURS, OTHERS = "weir", {"ray": "Ray Serve", "hpa": "Kubernetes HPA", "keda": "KEDA"}
DEFAULTS = {"ray": "ray", "hpa": "hpa", "keda": "keda"}
QUICK = 8  # every so many of the settings that are tried, in a quick run


class Played(NamedTuple):
    """What a rule did with a trace: the promise that ours had (seconds), worker-hours, and response times in seconds."""

    trace: str
    promise: float
    rule: str
    hours: float
    p99: float
    late: list[float]  # the share of the answers that took longer than each of the promises of the trace


def settings() -> Iterator[str]:
    """Yield what is tried of each rule, its defaults included."""
    for target, up, down, look in product((1, 2, 3, 4, 5, 6, 8, 10, 14), (0, 10, 30), (10, 60, 300, 600), (5, 30)):
        yield f"ray:target={target},upscale={up}s,downscale={down}s,look_back={look}s"
    for share, window in product((0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95), (0, 60, 120, 300, 600)):
        yield f"hpa:target={share},stabilisation={window}s"
    for rows, window in product((0.5, 1, 2, 3, 5, 8, 12, 16), (0, 60, 120, 300, 600)):
        yield f"keda:target={rows},stabilisation={window}s"


def tried(every: int) -> list[tuple[str, float, str]]:
    """Return what is played: a trace, the promise, and the rule."""
    rules = [*DEFAULTS.values(), *list(settings())[::every]]
    return [
        *((trace, float(promise), OURS) for trace, promises in PROMISES.items() for promise in promises),
        *((trace, float(MAIN[trace]), rule) for trace in TRACES for rule in rules),
    ]


@cache
def trial(trace: str, promise: float) -> ScalingTrial:
    """Return what all rules of a trace have in common."""
    times, _ = read_trace(FOLDER / TRACES[trace])
    return ScalingTrial(PROFILE, times, ALLOWED, START_UP, objective=LatencySLO(promise))


def play(what: tuple[str, float, str]) -> Played:
    """Play one rule."""
    trace, promise, rule = what
    made = trial(trace, promise)
    run = made.run(OURS if rule == OURS else parse_autoscaler(rule, ALLOWED))
    taken = (run.run.end - run.run.arrival)[run.run.arrival >= run.since]
    outcome = made.outcome_of(rule, run)
    late = [float((taken > each).mean()) for each in PROMISES[trace]]
    return Played(trace, promise, rule, outcome.worker_hours, outcome.p99_ms / 1000.0, late)


def measure(run: Run) -> Result:
    """Play all, and set the best of each rule beside ours."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of the processes that are started
    todo = tried(QUICK if run.quick else 1)
    played: list[Played] = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        name = "autoscaling-quick" if run.quick else "autoscaling"
        for each in resumed(name, SOURCES, lambda first: pool.map(play, todo[first:], chunksize=4)):
            played.append(Played(*each))
            if len(played) % 50 == 0:
                run.step(f"{len(played)} of {len(todo)} simulations")
    result = Result(
        [
            "trace",
            "promise",
            "p99 s",
            "worker-hours",
            *(f"{name}, tuned" for name in OTHERS.values()),
            "fewer than the best",
            "late",
            "late with as many hours, the best of the others",
        ]
    )
    for ours in [each for each in played if each.rule == OURS]:
        _beside(result, ours, played)
    result.tables.append(_defaults(played))
    result.notes += _notes(len(todo))
    _draw(played)
    return result


def _of(played: Sequence[Played], trace: str, rule: str) -> list[Played]:
    return [each for each in played if each.trace == trace and each.rule.partition(":")[0] == rule]


def _beside(result: Result, ours: Played, played: Sequence[Played]) -> None:
    """Add the row of one promise: of each other rule the fewest worker-hours with a 99th percentile that is no longer."""
    cells, best = [], float("inf")
    for rule in OTHERS:
        as_good = [each for each in _of(played, ours.trace, rule) if each.p99 <= ours.p99]
        found = min(as_good, key=lambda each: each.hours, default=None)
        cells.append(
            "none as good"
            if found is None
            else f"{found.hours:.2f} ({found.rule.partition(':')[2] or 'defaults'}: {found.p99:.1f} s)"
        )
        best = min(best, float("inf") if found is None else found.hours)
    saved = 1.0 - ours.hours / best
    shown = [ours.trace, f"{ours.promise:g} s", f"{ours.p99:.1f}", f"{ours.hours:.2f}", *cells, f"{100 * saved:.0f} %"]
    result.rows.append([*shown, *_late(result, ours, played)])
    result.values[f"saved {ours.trace} {ours.promise:g}"] = saved
    if ours.promise == MAIN[ours.trace]:
        text = f"{ours.trace}, {ours.promise:g} s: at least 20 % fewer worker-hours than the best tuned rule with the same p99"
        result.goal(text, f"{100 * saved:.0f} %", saved >= SAVED)


def _late(result: Result, ours: Played, played: Sequence[Played]) -> list[str]:
    """Return the share of our answers that are late, and the least of the settings that have no more worker-hours."""
    place = PROMISES[ours.trace].index(int(ours.promise))
    same = [each for rule in OTHERS for each in _of(played, ours.trace, rule) if each.hours <= ours.hours]
    least = min(same, key=lambda each: each.late[place])
    if ours.promise == MAIN[ours.trace]:
        text = f"{ours.trace}, {ours.promise:g} s: fewer late answers than any tuned rule with as many worker-hours"
        shares = f"{100 * ours.late[place]:.2f} %, not {100 * least.late[place]:.2f} %"
        result.goal(text, shares, ours.late[place] < least.late[place])
    return [
        f"{100 * ours.late[place]:.2f} %",
        f"{100 * least.late[place]:.2f} % ({least.rule}: {least.hours:.2f} h)",
    ]


def _defaults(played: Sequence[Played]) -> Table:
    rows = [
        [trace, OTHERS[rule], f"{each.hours:.2f}", f"{each.p99:.1f}"]
        for trace in TRACES for rule in OTHERS for each in _of(played, trace, rule) if each.rule == rule
    ]  # fmt: skip
    return Table("With their defaults", ["trace", "rule", "worker-hours", "p99 s"], rows)


def _notes(count: int) -> list[str]:
    return [
        f"![Worker-hours and 99th percentile of each rule]({PICTURE.parent.name}/{PICTURE.name})",
        f"Arrivals at two Azure LLM services on 2023-11-16 (CC-BY 4.0). A batch of b takes 1.5 + 0.6·b seconds, at most 8 requests; {ALLOWED} workers start in {START_UP:g} s. "
        f"Weir is told only the objective; each other rule has its best setting of {count:,} simulations on this trace. *Late, others* "
        "is that of the best other rule with as many worker-hours. After silence (code), no rule has workers ready.",
    ]


def _draw(played: Sequence[Played]) -> None:
    names = {OURS: "Weir, by objective"} | {rule: f"{name}, all settings" for rule, name in OTHERS.items()}
    with figure(PICTURE, 1, len(TRACES), size=(11.0, 4.2)) as (drawing, axes):
        for panel, trace in zip(axes[0], TRACES, strict=True):
            for place, (rule, name) in reversed(list(enumerate(names.items()))):
                seen = _of(played, trace, rule)
                panel.plot(
                    [each.hours for each in seen], [each.p99 for each in seen], linestyle="-" if rule == OURS else "none", label=name,
                    color=COLOURS[place], marker=MARKERS[place], markersize=6 if rule == OURS else 3, alpha=1.0 if rule == OURS else 0.5,
                )  # fmt: skip
            panel.set_title(f"the {trace} service's hour", fontsize=9)
            panel.set_xlabel("worker-hours")
            panel.set_ylabel("99th percentile of the response time (s)")
            panel.set_ylim(0.0, 60.0)
        axes[0, 0].legend(fontsize=7)
        drawing.suptitle("as many workers as the load needs: to the left and below is better", fontsize=9)


PART = Part(
    "autoscaling",
    "As many workers as the load needs",
    "Worker-hours for the same p99 or better over two recorded hours, compared with the rules of Ray Serve, Kubernetes and KEDA, each tuned for the trace (simulated).",
    lambda rounds: len(tried(1)) // 50,
    measure,
    "one trace each, which is always the same",
)
