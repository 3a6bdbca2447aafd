"""The comparisons in the order of the page; the page docs/benchmarks.md, its picture and the figures in the README, written from results.json."""

import json
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import crowd
from benchmarks.harness.result import Part, Result, commit, count, markdown
from benchmarks.harness.rounds import Rounds
from benchmarks.harness.servers import ROOT, VERSIONS, require_wrk
from benchmarks.parts import (
    aiperf,
    autoscaling,
    classes,
    core,
    demand,
    embedding,
    endpoints,
    fronts,
    goodput,
    graphs,
    in_process,
    kserve,
    live,
    loadgen,
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
BEGIN, END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"
FRONTS_PAGE = ROOT / "docs" / "how-to" / "several-fronts.md"
BEGIN_FRONTS, END_FRONTS = "<!-- costs: written by `make bench PART=fronts` -->", "<!-- end of costs -->"
DEMAND_PAGE = ROOT / "docs" / "how-to" / "a-thousand-models.md"
BEGIN_DEMAND, END_DEMAND = "<!-- loads: written by `make bench PART=demand` -->", "<!-- end of loads -->"
BEGIN_SOLVED, END_SOLVED = "<!-- solved: written by `make bench PART=theory` -->", "<!-- end of solved -->"

# mosec's ratio of the same row is the median over the rounds.
SQUARE = [
    ("square over HTTP, 64 connections, requests/s", peer, "square: Weir 64", f"square: {peer} 64")
    for peer in (square.LITSERVE, square.BENTOML)
]

# Without its wait, a peer's one connection is another thing.
ALONE = [
    (
        "one connection, mosec without batches, and so without a wait, requests/s",
        "mosec",
        "alone: Weir",
        "alone: mosec, batches of 1",
    )
]

# What the README shows of further parts once they were measured: our value and a peer's.
BESIDE = [
    (f"KServe v2: {what}, requests/s", peer, f"kserve: Weir {case}", f"kserve: {peer} {case}")
    for what, case, peer in (
        ("small JSON tensors, 64 connections", "small JSON, 64 connections", "Triton"),
        ("602 KB binary tensors, 16 connections", "602 KB binary, 16 connections", "Triton"),
    )
] + [
    *[
        (f"KServe v2 over gRPC: small tensors, {connections}, calls/s", peer, f"grpc: Weir {number}", f"grpc: {peer} {number}")
        for number, connections in ((16, "16 connections"), (1, "one connection"))
        for peer in ("Triton", "MLServer")
    ],
    *[
        (f"sentence vectors, {clients} clients, sentences/s", "infinity_emb", f"vectors: Weir {clients}", f"vectors: infinity_emb {clients}")
        for clients in (16, 64)
    ],
]  # fmt: skip

INTRODUCTION = """# Benchmarks

Weir compared with other servers on one small machine: two cores run both the load and the servers, over loopback. Read the ratios rather than the rates, and measure on your own
machine: `make bench` repeats everything and writes this page; `make bench PART=square` repeats one part, whose name is below its table. Each server has its own environment, and they
take turns in every round. Tables show medians, with the smallest and the largest in brackets; ratios are medians over the rounds. Each table names its peers' settings; others may
suit them better. `benchmarks/results.json` has further columns.

## What is not better

- An empty application on uvicorn serves a single connection, and one on grpc.aio up to 16, faster than Weir, which asks a worker process.
- Over gRPC with one connection, Triton uses less CPU time per call than Weir, and serves about as many calls per second, or a few more.
- mosec's p50 with one connection comes from its setting: it waits up to 5 ms for requests that never arrive. [Without batches](#square-over-one-connection) it serves 1.7 times as many requests as Weir on the processor of that table; 0.9 times as many on an AMD EPYC of two cores.
- At 0.9 of the capacity a solved policy costs as much as `greedy`, and at 0.5 hardly less than batches of 8.
- A server encodes sentences more slowly than the runtime alone.
- The very first start of an embedding model builds its graph, and takes as long as infinity's start.
- sentence-transformers with ONNX serves a single client that sends one paragraph a request faster ([texts](#what-a-text-costs-apart-from-its-computation)).
- infinity runs as installed, with torch, except in `PART=texts`, which tries its other engines.
"""


class View(NamedTuple):
    """What the page shows of a stored table: the columns at these places, under these titles, or no table; without what is in brackets, if `bare`; the
    rows that have a cell `only`, if one is named."""

    columns: dict[str, int]
    bare: bool = False
    only: str = ""


# Parts that are not here are shown whole.
VIEWS = {
    "square": View({"connections": 0, "server": 1, "requests/s": 2, "times mosec": 3, "p50 ms": 4, "p99 ms": 5}),
    "large-bodies": View({"server": 0, "requests/s": 1, "times mosec": 2, "GB/s": 3, "p50 ms": 4, "p99 ms": 5, "MiB most": 8}),
    "goodput": View({"protocol": 0, "times the capacity": 1, "good responses/s": 2, "of capacity": 3, "late by more than 10 ms": 4}),
    "theory": View({"load": 0, "policy": 1, "response, ms": 2, "off by": 4, "cost": 11}, only="0.7"),  # its picture shows the other loads
    "policies": View({"": 0, "entries": 1, "allowed": 2, "off by more": 3, "beyond their intervals": 4, "the worst": 5}),
    "autoscaling": View(
        {"trace": 0, "p99 objective": 1, "p99 s": 2, "worker-hours": 3, "Ray Serve": 4, "Kubernetes HPA": 5, "KEDA": 6, "saved": 7, "late": 8,
         "late, others": 9}, bare=True,
    ),
    "ray": View({"contender": 0, "kept, requests/s": 1, "p99 ms, 50/s": 2, "100/s": 3, "200/s": 4, "400/s": 5, "busy s per 1,000, 100/s": 6, "400/s ": 7}),
    "ray-batch": View({"contender": 0, "p99 ms, 25/s": 1, "50/s": 2, "100/s": 3, "400/s": 4}),
    "padding": View({"waiting": 0, "padding by arrival": 1, "by length": 2, "by arrival on a CPU": 3, "by length on a CPU": 4}),
    "classes": View({"way": 1, "p99": 3, "above alone": 4, "idle time used": 5}, only="as long as the requests"),
    "kserve": View({"requests": 0, "server": 1, "good responses/s": 2, "times Triton": 3, "p99 ms": 5, "CPU µs": 6}),
    "grpc": View({"connections": 0, "server": 1, "calls/s": 2, "times MLServer": 3, "p99 ms": 5, "CPU µs": 7}),
    "vectors": View({"clients": 0, "server": 1, "sentences/s": 2, "times infinity": 3, "p50 ms": 4, "p99 ms": 5}, only="64"),
    "texts": View({"texts/s": 0, "1 client": 1, "16": 2, "64": 3, "server process, µs a text": 4}),
    "agreement": View({"precision": 0, "mean cosine": 2, "least": 3, "same nearest": 5}, only="50 texts a request"),
    "vectors-memory": View({"server": 0, "seconds to the first vector": 1, "the very first time": 2, "MiB, PSS": 3}),
}  # fmt: skip
# Not on the page: `fronts` and `demand` have pages of their own, the service that `seed` is held against was measured on another machine, `endpoints` shows the load generator's cost rather than the server's,
# `graphs` compares what Weir computes with forms of it that nobody can choose, `live` says again what `theory` does, `simulation`
# how fast `weir simulate` is, and `solver` what the reproduction of the paper says.
HIDDEN = {"seed", "fronts", "demand", "endpoints", "graphs", "live", "simulation", "solver"}
BRACKETS = re.compile(r" \([^)]*\)")
RANGE = re.compile(r"(\([\d.,]+) to ([\d.,]+\))")


def shown(name: str, columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows that the page shows of a part's table."""
    view = VIEWS.get(name, View({title: place for place, title in enumerate(columns)}))
    cells = [[row[place] for place in view.columns.values()] for row in rows if not view.only or view.only in row]
    return list(view.columns), [[_cell(cell, view.bare) for cell in row] for row in cells]


def _cell(text: str, bare: bool) -> str:
    return BRACKETS.sub("", text) if bare else RANGE.sub(r"\1–\2", text)


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
    pages = [INTRODUCTION]
    drawn = draw(_values(stored), PICTURE)
    if drawn:
        pages.append(f"![Requests per second of Weir and its peers]({PICTURE.relative_to(PAGE.parent)})\n")
    pages += [_section(part, stored[name]) for name, part in PARTS.items() if name in stored and name not in HIDDEN]
    pages.append(_machines(stored))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(pages))
    written = [PAGE, *([PICTURE] if drawn else []), *([README] if _write_readme(stored) else [])]
    if "fronts" in stored:
        text = FRONTS_PAGE.read_text()
        FRONTS_PAGE.write_text(_between(text, BEGIN_FRONTS, END_FRONTS, lambda: _fronts(stored["fronts"])))
        written.append(FRONTS_PAGE)
    if "demand" in stored:
        text = DEMAND_PAGE.read_text()
        DEMAND_PAGE.write_text(_between(text, BEGIN_DEMAND, END_DEMAND, lambda: _demand(stored["demand"])))
        written.append(DEMAND_PAGE)
    return [str(path.relative_to(ROOT)) for path in written]


def _stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _values(stored: dict[str, Any]) -> dict[str, float]:
    """Return the values of all parts, under "part: name"."""
    return {f"{part}: {name}": value for part, of in stored.items() for name, value in of["values"].items()}


def _section(part: Part | Rounds, stored: dict[str, Any]) -> str:
    columns, rows = shown(part.name, stored["columns"], stored["rows"])
    lines = [f"## {part.title}", "", part.about, "", *([markdown(columns, rows), ""] if columns else [])]
    lines += [line for note in stored["notes"] for line in (note, "")]
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
    if {"square", "in-process", "large-bodies"} <= set(stored):
        written = _between(written, BEGIN, END, lambda: _figures(values))
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
    """Return the tables of the page on fronts: what a request costs, and what that promises on more cores."""
    of_requests = [row for row in stored["rows"] if row[0] in fronts.SHOWN]
    (_, columns, rows), measured = stored["tables"][0], stored["machine"]
    cells = [[BRACKETS.sub("", row[place]) for place in range(6)] for row in of_requests]
    costs = markdown(["requests, connections", "server", *stored["columns"][2:6]], cells)
    of_queues = [[row[1], row[9], row[7], row[8]] for row in stored["rows"] if row[0] in fronts.DIVIDED]
    queues = markdown(["workers and queues", *(stored["columns"][place] for place in (9, 7, 8))], of_queues)
    divided = f"\n\n{fronts.ABOUT_DIVIDED}\n\n{queues}" if of_queues else ""
    return f"{costs}\n\n{markdown(columns, rows)}{divided}\n\n<sub>{measured['date']}, {measured['commit']}, {measured['rounds']}</sub>"


def _demand(stored: dict[str, Any]) -> str:
    """Return the tables of the page on models on demand: what a load takes, and what traffic got."""
    (_, columns, rows), measured = stored["tables"][0], stored["machine"]
    loads = markdown(stored["columns"], stored["rows"])
    return f"{loads}\n\n{markdown(columns, rows)}\n\n<sub>{measured['date']}, {measured['commit']}</sub>"


def _solved(values: dict[str, float]) -> str:
    def cost(name: str, load: float) -> str:
        known = values.get(f"theory: {name} {load} cost")
        return "unstable" if known is None else f"{known:.1f}"

    rows = [[f"{load}", *(cost(name, load) for name in (SOLVED, AUTO, *RULES))] for load in LOADS]
    return markdown(["load", SOLVED, f"`{AUTO}`", *RULES], rows)


def _figures(values: dict[str, float]) -> str:
    def rate(name: str) -> str:
        return count(values[name])

    def beside(pairs: list[tuple[str, str, str, str]]) -> list[list[str]]:
        return [
            [label, rate(mine), f"{peer}: {rate(theirs)}", f"{values[mine] / values[theirs]:.1f}"]
            for label, peer, mine, theirs in pairs if {mine, theirs} <= values.keys()
        ]  # fmt: skip

    rows = [
        ["square over HTTP, 64 connections, requests/s", rate("square: Weir 64"), f"mosec: {rate('square: mosec 64')}",
         f"{values['square: times mosec 64']:.1f}"],
        ["square over HTTP, 256 connections, requests/s", rate("square: Weir 256"), f"mosec: {rate('square: mosec 256')}",
         f"{values['square: times mosec 256']:.1f}"],
        *beside(SQUARE),
        *beside(ALONE),
        *[[f"20,000 concurrent calls in process on {loop}, items/s", rate(f"in-process: Weir {loop}"),
           f"mpservice: {rate(f'in-process: mpservice {loop}')}", f"{values[f'in-process: times mpservice {loop}']:.1f}"]
          for loop in ("asyncio", "uvloop")],
        ["600 KB binary bodies, requests/s", rate("large-bodies: Weir"), f"mosec: {rate('large-bodies: mosec')}",
         f"{values['large-bodies: times mosec']:.1f}"],
        *beside(BESIDE),
    ]  # fmt: skip
    return markdown(["", "Weir", "peer", "times better"], sorted(rows, key=_place))


# What people serve comes first; a number squared, which shows only the server's own cost, comes last.
_ROWS = (
    "sentence vectors",
    "KServe v2: ",
    "KServe v2 over gRPC",
    "600 KB",
    "20,000 concurrent",
    "one connection",
    "square",
)


def _place(row: Sequence[str]) -> int:
    return next(place for place, start in enumerate(_ROWS) if row[0].startswith(start))


# In the order of the page.
IN_ORDER: tuple[Part | Rounds, ...] = (
    square.SQUARE,
    square.ALONE,
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
    aiperf.AIPERF,
    vectors.VECTORS,
    vectors.AGREEMENT,
    texts.PART,
    text_memory.MEMORY,
    text_memory.GROWTH,
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


class Bars(NamedTuple):
    """One panel: ours above theirs."""

    title: str
    peer: str
    ours: str  # keys of the values
    theirs: str
    times: str


PANELS = (
    Bars("HTTP, 64 connections", "mosec", "square: Weir 64", "square: mosec 64", "square: times mosec 64"),
    Bars("HTTP, 256 connections", "mosec", "square: Weir 256", "square: mosec 256", "square: times mosec 256"),
    Bars("HTTP, bodies of 600 KB", "mosec", "large-bodies: Weir", "large-bodies: mosec", "large-bodies: times mosec"),
    Bars(
        "calls in process",
        "mpservice",
        "in-process: Weir uvloop",
        "in-process: mpservice uvloop",
        "in-process: times mpservice uvloop",
    ),
)


def draw(values: dict[str, float], path: Path) -> bool:
    """Draw the panels that have been measured; tell whether there was any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in PANELS if {panel.ours, panel.theirs, panel.times} <= set(values)]
    if not panels:
        return False
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(8, 0.5 + 1.5 * rows), squeeze=False)
    for axis, panel in zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()
        else:
            _panel(axis, panel, values)
    figure.suptitle("requests per second, in the same run", x=0.01, ha="left", fontsize=10, color=INK)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return True


def _panel(axis: Any, panel: Bars, values: dict[str, float]) -> None:
    ours, theirs = values[panel.ours], values[panel.theirs]
    axis.barh([panel.peer, "Weir"], [theirs, ours], color=[THEIRS, OURS], height=0.62)
    axis.set_title(f"{panel.title}: {values[panel.times]:.1f} times", fontsize=9, color=INK, loc="left")
    axis.set_xlim(0, 1.3 * max(ours, theirs))
    for place, value in enumerate((theirs, ours)):
        axis.text(value, place, f" {value:,.0f}", va="center", fontsize=8, color=INK)
    axis.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9, labelcolor=INK)
    for side in axis.spines.values():
        side.set_visible(False)
