"""The comparisons in the order of the page; the page docs/benchmarks.md, its picture and the figures in the README, written from results.json."""

import json
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import crowd
from benchmarks.harness.result import Part, Result, commit, count, markdown
from benchmarks.harness.rounds import Rounds
from benchmarks.harness.servers import ROOT, VERSIONS, require_wrk
from benchmarks.harness.settings import ways
from benchmarks.harness.texts import INFINITY, SENTENCE_TRANSFORMERS, VLLM, WEIR
from benchmarks.parts import (
    aiperf,
    alone,
    autoscaling,
    classes,
    core,
    demand,
    embedding,
    endpoints,
    fronts,
    goodput,
    graphs,
    images,
    in_process,
    kserve,
    live,
    loadgen,
    loadgen_swept,
    overload,
    padding,
    policies,
    policy_edges,
    ray,
    ray_batch,
    ray_more,
    square,
    text_memory,
    texts,
    vectors,
)
from benchmarks.parts.live import AUTO, LOADS, RULES, SOLVED

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "pictures" / "benchmarks.png"
README = ROOT / "README.md"
BEGIN, END = "<!-- gain: written by `make bench` -->", "<!-- end of gain -->"
README_NEEDS = {"square", "in-process", "large-bodies"}
CORES = ROOT / "benchmarks" / "cores.md"  # measured by benchmarks.cores on another machine
BEGIN_SOLVED, END_SOLVED = "<!-- solved: written by `make bench PART=theory` -->", "<!-- end of solved -->"

# What is compared with the best way to run a peer, and the name of its value.
WAYS = [
    *[
        (f"square over HTTP, {connections} connections, requests/s", peer, f"square: {{}} {connections}")
        for peer, connections in (
            (square.MOSEC, 64),
            (square.MOSEC, 256),
            (square.RAY, 64),
            (square.LITSERVE, 64),
            (square.BENTOML, 64),
        )
    ],
    ("600 KB binary bodies, requests/s", square.MOSEC, "large-bodies: {}"),
    ("KServe v2: small JSON tensors, 64 connections, requests/s", kserve.TRITON, f"kserve: {{}} {kserve.SMALL}"),
    ("KServe v2: 602 KB binary tensors, 16 connections, requests/s", kserve.TRITON, f"kserve: {{}} {kserve.LARGE}"),
    *[
        (f"KServe v2 over gRPC: small tensors, {connections}, calls/s", peer, f"grpc: {{}} {number}")
        for number, connections in ((16, "16 connections"), (1, "one connection"))
        for peer in (kserve.TRITON, kserve.MLSERVER)
    ],
    *[
        (f"sentence vectors, {clients} clients, sentences/s", peer, f"vectors: {{}} {clients}")
        for clients in vectors.MANY
        for peer in (INFINITY, VLLM)
    ],
]

# Without its wait, a peer's one connection is another thing.
ALONE = [
    (
        "square over HTTP, one connection, mosec without batching, requests/s",
        "mosec",
        "alone: Weir 1",
        "alone: mosec, batches of 1 1",
    )
]

INTRODUCTION = """# Benchmarks

The load and the servers share two cores and talk over loopback, so look at the ratios rather than the rates. `make bench` repeats everything and writes this page; `make bench PART=square`
repeats the part named below a table. Each server has its own environment, and the servers take turns in every round. Tables show medians, some with the smallest and the largest value in
brackets; `benchmarks/results.json` has the rest. Peers run with the stated settings (in process, mpservice waits up to 5 ms for a batch); the glance shows the fastest of those measured.

## Where Weir is not better

{faster}- These empty servers have no worker processes; Weir does. With one connection, mosec with batches of 1 and Triton over gRPC use less CPU time per request.
- At 0.9 of the capacity a solved policy costs as much as `greedy`, and at 0.5 hardly less than batches of 8.
- A server encodes fewer sentences than the bare runtime.
- The very first start of an embedding model builds its graph, and takes as long as infinity's start.
- For a single client with one paragraph per request, sentence-transformers with ONNX is faster ([texts](#overhead-per-text)).
"""


class View(NamedTuple):
    """What the page shows of a part: the columns at these places, under these titles; without what is in brackets, if `bare`; the rows that have one of
    the cells in `only`, if there are any; and so many of its notes."""

    columns: dict[str, int]
    bare: bool = False
    only: tuple[str, ...] = ()
    notes: int = 9


RAY_SHOWN = (
    ray.WEIR,
    ray.AUTO,
    ray.DROP_IN,
    ray.DEFAULT,
    *ray.OPTIMISED,
    "@serve.batch, 32 and 5 ms",
    "capacity router, 32 and 10 ms",
)
# Parts that are not here are shown whole.
VIEWS = {
    "square": View({"connections": 0, "server": 1, "requests/s": 2, "times mosec": 3, "p50 ms": 4, "p99 ms": 5}, only=("64",)),
    "alone": View({"one connection": 1, "requests/s": 2, "p50 ms": 3, "p99 ms": 4, "CPU µs": 5}, bare=True, only=("1",)),
    "large-bodies": View({"server": 0, "requests/s": 1, "times mosec": 2, "p50 ms": 4, "p99 ms": 5, "peak MiB": 8}, bare=True),
    "goodput": View({"protocol": 0, "times the capacity": 1, "good responses/s": 2, "of capacity": 3, "late by more than 10 ms": 4}, bare=True, only=("20",)),
    "theory": View({"load": 0, "policy": 1, "response, ms": 2, "off by": 4, "cost": 11}, only=("0.7",), bare=True, notes=2),  # its picture shows the other loads
    "policies": View({"": 0, "entries": 1, "allowed": 2, "off by more": 3, "beyond their intervals": 4, "worst": 5}),
    "policy-edges": View({"": 0, "cases": 1, "allowed": 2, "beyond": 3, "certainly": 4, "certainly within": 5, "worst": 6}, notes=1),
    "decisions": View({"waiting": 0, "submit, µs": 1, "decision, µs": 2, "request in the core, µs": 3}, bare=True),
    "slow-clients": View({"": 0, "requests/s": 1, "p50 ms": 2, "p99 ms": 3}, bare=True),
    "overload": View({"": 0, "median": 1}, bare=True),
    "loadgen": View({"server": 1, "Server, valid queries/s": 2, "p99 ms there": 3, "SingleStream p90 ms": 4, "Offline/s": 6}, only=("timed",), bare=True),
    "autoscaling": View(
        {"trace": 0, "p99 objective": 1, "worker-hours": 3, "Ray Serve": 4, "Kubernetes HPA": 5, "KEDA": 6, "saved": 7, "late": 8, "late, others": 9},
        bare=True, only=("15 s", "30 s"),
    ),
    "ray": View({"contender": 0, "kept, requests/s": 1, "p99 ms, 50/s": 2, "100/s": 3, "200/s": 4, "400/s": 5, "busy s, 100/s": 6, "400/s ": 7}, only=RAY_SHOWN),
    "ray-batch": View({"contender": 0, "p99 ms, 25/s": 1, "50/s": 2, "100/s": 3, "400/s": 4}),
    "padding": View({"waiting": 0, "padding by arrival": 1, "by length": 2, "by arrival on a CPU": 3, "by length on a CPU": 4}, only=("16", "256")),
    "classes": View({"way": 1, "p99": 3, "above alone": 4, "idle time used": 5}, only=("as long as the requests",)),
    "kserve": View({"requests": 0, "server": 1, "good responses/s": 2, "times Triton": 3, "p99 ms": 5, "CPU µs": 6}, bare=True),
    "grpc": View({"connections": 0, "server": 1, "calls/s": 2, "times MLServer": 3, "p99 ms": 5, "CPU µs": 7}, bare=True),
    "vectors": View({"clients": 0, "server": 1, "sentences/s": 2, "times infinity": 3, "p50 ms": 4, "p99 ms": 5}, only=("64",), notes=1),
    "texts": View({"texts/s": 0, "1 client": 1, "16": 2, "64": 3, "server process, µs a text": 4}, notes=1),
    "agreement": View({"precision": 0, "mean cosine": 2, "least": 3, "same nearest": 5}, only=("50 texts a request",)),
    "images": View({"clients": 0, "server": 1, "images/s": 2, "p50 ms": 3, "MiB, PSS": 5}, only=("1", "16")),
    "vectors-growth": View({"requests": 0, "server, MiB": 1, "workers, MiB": 2}, only=("5,000", "100,000")),
    "vectors-memory": View({"server": 0, "seconds to the first vector": 1, "on the very first start": 2, "MiB, PSS": 3}, bare=True),
}  # fmt: skip
# Not on the page: `seed` is compared with a service that ran on another machine; `endpoints` shows the cost of the load generator, not of the
# server; `graphs` compares graphs that nobody can choose; `live` repeats `theory`, `in-process` the glance, `ray-batch` a case of `ray`, and `crowd` what the tests assert; `simulation` and `solver` time Weir's own tools.
HIDDEN = {
    "seed",
    "in-process",
    "endpoints",
    "graphs",
    "live",
    "ray-batch",
    "crowd",
    "simulation",
    "solver",
}
BRACKETS = re.compile(r" \([^)]*\)")
RANGE = re.compile(r"(\([\d.,]+) to ([\d.,]+\))")


def shown(name: str, columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows that the page shows of a part's table."""
    view = _view(name, columns)
    cells = [
        [row[place] for place in view.columns.values()] for row in rows if not view.only or set(view.only) & set(row)
    ]
    return list(view.columns), [[_cell(cell, view.bare) for cell in row] for row in cells]


def _view(name: str, columns: list[str]) -> View:
    return VIEWS.get(name, View({title: place for place, title in enumerate(columns)}))


def _cell(text: str, bare: bool) -> str:
    return BRACKETS.sub("", text) if bare else RANGE.sub(r"\1–\2", text)


# Parts of which the page also shows the tables beside the main one.
WITH_MORE = ("alone", "demand")

# Of the machine, what is shown below each part; the rest, where the parts do not differ in it, is shown once.
SHOWN = ("date", "commit", "rounds")


def keep(part: Part | Rounds, result: Result, machine: dict[str, str]) -> None:
    """Store one part's outcome; it replaces an earlier one."""
    stored = _stored()
    stored[part.name] = {"machine": machine, **asdict(result)}
    RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def write() -> list[str]:
    """Write all that can be written from what is stored; return the paths."""
    stored = _stored()
    values = _values(stored)
    pages = [INTRODUCTION.format(faster="".join(f"- {line}\n" for line in _faster(values)))]
    drawn = set(stored) >= README_NEEDS and draw(values, PICTURE)
    if drawn:
        pages.append(
            f"## At a glance\n\n![How many times its peer's rate Weir reaches]({PICTURE.relative_to(PAGE.parent)})\n\n{_figures(values)}\n"
        )
    pages += [_section(part, stored[name]) for name, part in PARTS.items() if name in stored and name not in HIDDEN]
    pages.append(_machines(stored))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(pages))
    written = [PAGE, *([PICTURE] if drawn else []), *([README] if _write_readme(stored) else [])]
    return [str(path.relative_to(ROOT)) for path in written]


def _stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _values(stored: dict[str, Any]) -> dict[str, float]:
    """Return the values of all parts, under "part: name"."""
    return {f"{part}: {name}": value for part, of in stored.items() for name, value in of["values"].items()}


# Parts of which the page says where others are faster, and what their cases count.
COMPARED = (
    (square.SQUARE, "connections: "),
    (alone.ALONE, "connections: "),
    (square.BODIES, ""),
    (kserve.HTTP, ""),
    (kserve.GRPC, "connections: "),
    (vectors.VECTORS, "clients: "),
)


def _faster(values: dict[str, float]) -> list[str]:
    """Say of each server that is not Weir where it is faster, from the figures."""
    found = []
    for part, counted in COMPARED:
        for name in part.contenders:
            ours = alone.WEIR_KSERVE if part is alone.ALONE and name in alone.TENSORS else WEIR
            both = {
                case: [values.get(f"{part.name}: {each} {case}".strip(), 0.0) for each in (name, ours)]
                for case in part.cases
            }
            ratios = {case: theirs / own for case, (theirs, own) in both.items() if theirs > own > 0}
            if ratios and not name.startswith(WEIR):
                cases = f" ({counted}{', '.join(map(str, ratios))})" if len(part.cases) > 1 else ""
                found.append(f"{part.title}{cases}: {name} serves up to {max(ratios.values()):.1f} times as many.")
    return found


def _section(part: Part | Rounds, stored: dict[str, Any]) -> str:
    columns, rows = shown(part.name, stored["columns"], stored["rows"])
    tables = _fronts(stored) if part.name == "fronts" else markdown(columns, rows)
    if part.name in WITH_MORE:
        tables = "\n\n".join([tables, *(markdown(more, cells) for _, more, cells in stored["tables"])])
    lines = [f"## {part.title}", "", part.about, "", *([tables, ""] if columns else [])]
    lines += [line for note in stored["notes"][: _view(part.name, columns).notes] for line in (note, "")]
    measured = [stored["machine"][name] for name in SHOWN if name in stored["machine"]]
    lines += [f"<sub>`PART={part.name}`: {', '.join(measured).replace(' of ', ' × ')}</sub>", ""]
    return "\n".join(lines)


def _machines(stored: dict[str, Any]) -> str:
    """Return the hardware and the versions of all parts: of each thing the values there were."""
    lines = ["## Hardware and versions", ""]
    for name in dict.fromkeys(name for part in stored.values() for name in part["machine"] if name not in SHOWN):
        values = [part["machine"][name] for part in stored.values() if part["machine"].get(name)]
        # Later parts name more peers; the longest list has them all.
        shown = max(values, key=len) if name == "peers" else "; ".join(dict.fromkeys(values))
        lines.append(f"- {name}: {shown}")
    return "\n".join([*lines, ""])


def _write_readme(stored: dict[str, Any]) -> bool:
    """Replace what is between each pair of marks, where both are there and its parts have been measured."""
    text, values = README.read_text(), _values(stored)
    written = text
    if set(stored) >= README_NEEDS:
        written = _between(written, BEGIN, END, lambda: _gain(values))
    if "theory" in stored:
        written = _between(written, BEGIN_SOLVED, END_SOLVED, lambda: _solved(values))
    if written != text:
        README.write_text(written)
    return written != text


def _between(text: str, begin: str, end: str, make: Callable[[], str]) -> str:
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"


def _fronts(stored: dict[str, Any]) -> str:
    """Return the tables on fronts: what a request costs, what that promises on more cores, and what many cores served."""
    of_requests = [row for row in stored["rows"] if row[0] in fronts.SHOWN]
    _, columns, rows = stored["tables"][0]
    cells = [[BRACKETS.sub("", row[place]) for place in range(6)] for row in of_requests]
    costs = markdown(["requests, connections", "server", *stored["columns"][2:6]], cells)
    of_queues = [[row[1], row[9], row[7], row[8]] for row in stored["rows"] if row[0] in fronts.DIVIDED]
    queues = markdown(["workers and queues", *(stored["columns"][place] for place in (9, 7, 8))], of_queues)
    divided = f"\n\n{fronts.ABOUT_DIVIDED}\n\n{queues}" if of_queues else ""
    many = f"\n\n{CORES.read_text().strip()}" if CORES.exists() else ""
    return f"{costs}\n\n{markdown(columns, rows)}{divided}{many}"


def _solved(values: dict[str, float]) -> str:
    def cost(name: str, load: float) -> str:
        known = values.get(f"theory: {name} {load} cost")
        return "unstable" if known is None else f"{known:.1f}"

    rows = [[f"{load}", *(cost(name, load) for name in (SOLVED, AUTO, *RULES))] for load in LOADS]
    return markdown(["load", SOLVED, f"`{AUTO}`", *RULES], rows)


def _gain(values: dict[str, float]) -> str:
    """Return what one gains over a loop behind FastAPI, in one sentence; nothing where that was not measured."""
    ours, theirs = (f"vectors: {name} 64" for name in (WEIR, SENTENCE_TRANSFORMERS))
    if not {ours, theirs} <= values.keys():
        return ""
    return (
        f"On two CPU cores, with 64 clients, Weir encodes **{count(values[ours])} sentences a second** with all-MiniLM-L6-v2, in batches and as an ONNX graph; a FastAPI handler that calls "
        f"sentence-transformers on PyTorch for one text at a time encodes {count(values[theirs])}. That is **{values[ours] / values[theirs]:.1f} times as many**, by batching and by the "
        "runtime ([how it was measured](docs/benchmarks.md#sentence-vectors))."
    )


class Figure(NamedTuple):
    """Our rate and a peer's at one thing."""

    what: str
    peer: str
    ours: float
    theirs: float
    times: float


def _beside(values: dict[str, float]) -> list[Figure]:
    """Return every comparison that was measured, in the order of the page."""

    def at(ours: str, theirs: str, times: str = "") -> tuple[float, float, float]:
        return values[ours], values[theirs], values[times] if times else values[ours] / values[theirs]

    found = [
        *[Figure(f"20,000 concurrent calls in process on {loop}, items/s", "mpservice",
                 *at(f"in-process: Weir {loop}", f"in-process: mpservice {loop}", f"in-process: times mpservice {loop}"))
          for loop in ("asyncio", "uvloop")],
        *[Figure(what, theirs, *at(of.format("Weir"), of.format(theirs))) for what, peer, of in WAYS for theirs in _best(values, peer, of)],
        *[Figure(label, peer, *at(ours, theirs)) for label, peer, ours, theirs in ALONE if {ours, theirs} <= values.keys()],
    ]  # fmt: skip
    return sorted(
        found, key=lambda figure: next(place for place, start in enumerate(_ROWS) if figure.what.startswith(start))
    )


def _best(values: dict[str, float], peer: str, of: str) -> list[str]:
    """Return the fastest row of a peer: that with its defaults or one of its fast modes; none where it was not measured."""
    found = {name: values[of.format(name)] for name in ways(peer) if of.format(name) in values}
    return [max(found, key=found.__getitem__)] if found else []


def _figures(values: dict[str, float]) -> str:
    rows = [
        [each.what, count(each.ours), f"{each.peer}: {count(each.theirs)}", f"{each.times:.1f}"]
        for each in _beside(values)
    ]
    return markdown(["", "Weir", "peer", "speed-up"], rows)


# What people serve comes first; a number squared, which shows only the server's own cost, comes last.
_ROWS = (
    "sentence vectors",
    "KServe v2: ",
    "KServe v2 over gRPC",
    "600 KB",
    "20,000 concurrent",
    "square",
)


# In the order of the page.
IN_ORDER: tuple[Part | Rounds, ...] = (
    square.SQUARE,
    alone.ALONE,
    in_process.CALLS,
    in_process.SEED,
    square.BODIES,
    fronts.PART,
    demand.PART,
    core.DECISIONS,
    overload.OVERLOAD,
    goodput.GOODPUT,
    overload.SLOW_CLIENTS,
    core.SOLVER,
    core.SIMULATION,
    live.THEORY,
    live.LIVE,
    policies.PART,
    policy_edges.PART,
    autoscaling.PART,
    ray.RAY,
    ray_batch.BATCH,
    ray_more.MORE,
    embedding.EMBEDDING,
    padding.PART,
    classes.PART,
    graphs.GRAPHS,
    kserve.HTTP,
    kserve.GRPC,
    endpoints.ENDPOINTS,
    loadgen.LOADGEN,
    loadgen_swept.SWEPT_PART,
    aiperf.AIPERF,
    vectors.VECTORS,
    vectors.AGREEMENT,
    texts.PART,
    text_memory.MEMORY,
    text_memory.GROWTH,
    images.PART,
    crowd.PART,
)
PARTS: dict[str, Part | Rounds] = {part.name: part for part in IN_ORDER}


LIBRARIES = ("weir-serving", "uvloop", "httptools", "uvicorn", "msgspec", "numpy")


def describe() -> dict[str, str]:
    """Return hardware and versions, as they are shown."""
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return {
        "processor": f"{_processor()}, {psutil.cpu_count()} logical cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": libraries,
        "commit": commit(),
        "peers": ", ".join(dict.fromkeys(requirements[0].replace("==", " ") for requirements in VERSIONS.values())),
        "load": " ".join(_said(require_wrk(), "-v").split()[:2]),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _said(*command: str) -> str:
    # wrk -v ends with status 1.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


OURS, THEIRS, INK = "#1f6f8b", "#c9ced6", "#30363d"


def draw(values: dict[str, float], path: Path) -> bool:
    """Draw a bar for each comparison: how many times the peer's rate ours is, on a scale on which twice and half are equally far from 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = _beside(values)
    figure, axis = plt.subplots(figsize=(9, 0.6 + 0.29 * len(found)))
    places = range(len(found))
    axis.barh(
        places,
        [each.times - 1.0 for each in found],
        left=1.0,
        color=[OURS if each.times > 1.0 else THEIRS for each in found],
        height=0.66,
    )
    for place, each in zip(places, found, strict=True):
        axis.text(
            max(1.0, each.times) * 1.04, place, f"{each.times:.1f} × {each.peer}", va="center", fontsize=8, color=INK
        )
    axis.set_yticks(places, [each.what.rpartition(",")[0] for each in found])
    axis.set_xscale("log")
    axis.set_xlim(min(0.5, *(each.times for each in found)), 4.0 * max(each.times for each in found))
    axis.set_xticks([1.0, 10.0, 100.0], ["as fast", "10 times", "100 times"])
    axis.minorticks_off()
    axis.axvline(1.0, color=INK, linewidth=0.8)
    axis.invert_yaxis()
    axis.tick_params(left=False, labelsize=8, labelcolor=INK)
    for side in axis.spines.values():
        side.set_visible(False)
    figure.suptitle(
        "Weir's throughput as a multiple of its peer's: same machine, same run",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return True
