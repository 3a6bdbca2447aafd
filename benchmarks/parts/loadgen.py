"""MLPerf LoadGen, unmodified, asks Weir's frontends and the peers: a model that computes nothing, and one that takes as long as a small network.

Each server runs alone. LoadGen's own verdict counts; a run with a response that is wrong or refused is not valid either. The rate of Server is the
highest that LoadGen calls valid, found by bisection below the rate of Offline. LoadGen's summaries are kept in benchmarks/loadgen/summaries.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.harness.result import Part, Result, Run, count, milliseconds, resumed
from benchmarks.harness.servers import PEERS, ROOT, Server, ask, free_port, python_of, serving, weir_command
from benchmarks.loadgen.messages import JSON_BODY, binary_body
from benchmarks.peers.judged.computing import FIXED, PER_ROW

SUMMARY = "mlperf_log_summary.txt"
SUMMARIES = ROOT / "benchmarks" / "loadgen" / "summaries"
JUDGED = PEERS / "judged"
NULL, TIMED = "null", "timed"
BOUND_MS = 5000 * (FIXED + PER_ROW)  # five times what one row takes
CLIENT_MS = 2.0  # of it, for the client: an objective counts from the request's arrival in the server to the answer
SHARES = {NULL: 0.6, TIMED: 1.0}  # of the seconds of load: many queries a second need less time for a percentile
STEP, QUICK_STEP, SMALLEST_STEP = (
    0.02,
    0.15,
    1.0,
)  # of Server: a share of the rate, or queries/s, at which bisection ends
CONNECTIONS = 256
FEWEST = 700  # queries of Server: LoadGen calls none valid with fewer than 459, and of as many not one may be late
MOST_SECONDS = 60.0  # to reach them
PATIENCE = 60.0  # seconds beyond five times those of load: a server that needs more has not kept up
EXPECTED = {NULL: 4000.0, TIMED: 200.0}  # queries/s, to begin with
# What LoadGen's summary calls what the tables show.
_LINES = {
    "rate": r"(?:Completed samples per second|QPS w/ loadgen overhead|Samples per second) *: *([\d.e+]+)",
    "p50_ns": r"50.00 percentile latency \(ns\) *: *(\d+)",
    "p90_ns": r"90.00 percentile latency \(ns\) *: *(\d+)",
    "p99_ns": r"99.00 percentile latency \(ns\) *: *(\d+)",
}


class Settings(NamedTuple):
    """How a server is set: a peer by a batch size and the longest wait, Weir by flags."""

    batch: int = 0  # 0: the server's own settings
    wait_ms: int = 0
    flags: str = ""

    def __str__(self) -> str:
        return f"batches of {self.batch}, {self.wait_ms} ms" if self.batch else self.flags or "its own"


DEFAULTS = Settings()


class Asked(NamedTuple):
    """A server that runs, and how the system under test asks it."""

    server: Server | None
    arguments: list[str]


@dataclass(frozen=True)
class Contender:
    """A frontend. `start(kind, settings)` runs its server."""

    name: str
    start: Callable[[str, Settings], Any]
    ours: bool = False


def _http(
    server: Server, path: str, body: str, expected: str, head: str = "", type_: str = "application/json"
) -> list[str]:
    return ["http", *(["--head", head] if head else []), str(server.port), path, body, type_, expected]


@contextmanager
def _weir(frontend: str, kind: str, settings: Settings) -> Iterator[Asked]:
    if frontend == "process":
        yield Asked(None, ["process", kind])
        return
    name = kind if frontend == "http" else f"{kind}tensor"
    model = {"null": "Null", "timed": "Timed"}[kind] + ("" if frontend == "http" else "Tensor")
    grpc = free_port()
    command = weir_command(f"benchmarks.loadgen.models:{model}", "--grpc-port", str(grpc), *settings.flags.split())
    path, body, expected = (
        (f"/infer/{name}", "3", "3") if frontend == "http" else (f"/v2/models/{name}/infer", JSON_BODY, "3.0")
    )
    with (
        serving("Weir", command, path=path, body=body.encode(), expected=None) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        if frontend == "grpc":
            yield Asked(server, ["grpc", str(grpc), name])
        elif frontend == "binary":
            yield Asked(server, _binary(server, path, folder))
        else:
            yield Asked(server, _http(server, path, body, expected))


def _binary(server: Server, path: str, folder: str) -> list[str]:
    body, head = binary_body()
    kept = Path(folder, "body")
    kept.write_bytes(body)
    return _http(server, path, f"@{kept}", '"y"', head, "application/octet-stream")


def _judged(kind: str, settings: Settings) -> list[str]:
    return ["env", f"JUDGED={kind} {settings.batch} {settings.wait_ms}", f"PYTHONPATH={JUDGED}"]


def _plain(peer: str, path: str, command: Callable[[], list[str]], body: str = "3", expected: str = "3") -> Contender:
    @contextmanager
    def start(kind: str, settings: Settings) -> Iterator[Asked]:
        words = [*_judged(kind, settings), *command()]
        with serving(peer, words, path=path, body=body.encode(), expected=None) as server:
            yield Asked(server, _http(server, path, body, expected))

    return Contender(peer, start)


def _script(peer: str, *more: str) -> Callable[[], list[str]]:
    return lambda: [python_of(peer), str(JUDGED / f"{peer.partition('-')[0]}_server.py"), "--port", "{port}", *more]


def _bentoml() -> list[str]:
    run = [python_of("bentoml"), "-m", "bentoml", "serve", f"{JUDGED / 'bentoml_server.py'}:Judged"]
    return [*run, "--host", "127.0.0.1", "--port", "{port}", "--quiet"]


def _inference_protocol(name: str, peer: str, script: str, frontend: str) -> Contender:
    path = "/v2/models/judged/infer"

    @contextmanager
    def start(kind: str, settings: Settings) -> Iterator[Asked]:
        grpc = free_port()
        command = [*_judged(kind, settings), python_of(peer), str(JUDGED / script), "{port}", str(grpc)]
        with (
            serving(name, command, path=path, body=JSON_BODY.encode(), expected=None) as server,
            tempfile.TemporaryDirectory() as folder,
        ):
            if frontend == "grpc":
                yield Asked(server, ["grpc", str(grpc), "judged"])
            elif frontend == "binary":
                yield Asked(server, _binary(server, path, folder))
            else:
                yield Asked(server, _http(server, path, JSON_BODY, "3.0"))

    return Contender(f"{name}, {LABELS[frontend]}", start)


LABELS = {
    "process": "in process",
    "http": "HTTP",
    "json": "KServe JSON",
    "binary": "KServe binary",
    "grpc": "KServe gRPC",
}


def _ours(frontend: str) -> Contender:
    return Contender(f"Weir, {LABELS[frontend]}", lambda kind, settings: _weir(frontend, kind, settings), ours=True)


CONTENDERS = [
    *map(_ours, LABELS),
    _plain("mosec", "/inference", _script("mosec", "--log-level", "error")),
    _plain("litserve", "/predict", _script("litserve")),
    _plain("bentoml", "/infer", _bentoml, '{"numbers": [3]}', "[3]"),
    _plain("ray-serve", "/infer", _script("ray-serve")),
    _inference_protocol("MLServer", "mlserver", "mlserver_judged.py", "json"),
    _inference_protocol("MLServer", "mlserver", "mlserver_judged.py", "grpc"),
    _inference_protocol("Triton", "triton", "triton_judged.py", "json"),
    _inference_protocol("Triton", "triton", "triton_judged.py", "binary"),
    _inference_protocol("Triton", "triton", "triton_judged.py", "grpc"),
]
OURS = next(each for each in CONTENDERS if each.name == f"Weir, {LABELS['http']}")
SOURCES = [
    ROOT / "src",
    ROOT / "benchmarks" / "loadgen",
    JUDGED,
    *sorted((ROOT / "benchmarks" / "parts").glob("loadgen*.py")),
]


def figures(summary: str) -> dict[str, Any]:
    """Return LoadGen's verdict and its figures."""
    found = {name: re.search(line, summary) for name, line in _LINES.items()}
    return {
        "valid": "Result is : VALID" in summary,
        **{name: float(match[1]) for name, match in found.items() if match is not None},
    }


def _file_of(name: str) -> str:
    return name.replace(" ", "-").replace(",", "").lower()


def forget(run: Run, name: str) -> None:
    """Remove the summaries of earlier runs."""
    for each in run.picture(SUMMARIES).glob(f"{_file_of(name)}-*"):
        each.unlink()


class Judge:
    """Has LoadGen ask one server."""

    def __init__(self, asked: Asked, name: str, run: Run, seconds: float, fewest: int = FEWEST) -> None:
        self.asked, self.name, self.seconds, self.fewest = asked, name, seconds, fewest
        self.summaries = run.picture(SUMMARIES)

    def run(
        self, scenario: str, rate: float = 100.0, connections: int = CONNECTIONS, seconds: float | None = None
    ) -> dict[str, Any]:
        """Run a scenario, of Server with at least `fewest` queries, and keep its summary."""
        seconds = max(seconds or self.seconds, min(MOST_SECONDS, self.fewest / rate) if scenario == "Server" else 0.0)
        with tempfile.TemporaryDirectory() as folder:
            command = [
                python_of("loadgen"), "-m", "benchmarks.loadgen.sut", scenario, "--rate", f"{rate:.6g}", "--bound-ms", f"{BOUND_MS:.6g}",
                "--seconds", f"{seconds:g}", "--connections", str(connections), "--output", folder, *self.asked.arguments,
            ]  # fmt: skip
            try:
                wrong = ask(command, timeout=PATIENCE + 5.0 * seconds)["wrong"]
            except subprocess.TimeoutExpired:
                return {"valid": False, "rate": 0.0}
            found = figures(Path(folder, SUMMARY).read_text())
            self.summaries.mkdir(exist_ok=True)
            kept = self.summaries / f"{_file_of(self.name)}-{scenario.lower()}.txt"
            if scenario != "Server" or found["valid"] or not kept.exists():  # of Server, the highest that was valid
                shutil.copy(Path(folder, SUMMARY), kept)
        return {**found, "valid": found["valid"] and not wrong}

    def offline(self, expected: float) -> dict[str, Any]:
        """Run Offline, after a short run that says which rate to expect."""
        first = self.run("Offline", expected, seconds=1.0)
        return self.run("Offline", 1.1 * first["rate"]) if first["rate"] else first

    def highest(self, high: float, low: float = 0.0, step: float = STEP) -> tuple[float, dict[str, Any]]:
        """Return the highest rate of Server between `low` and `high` that is valid, and what was found there; `low` if none is."""
        best = dict[str, Any]()
        while high - low > max(SMALLEST_STEP, step * high):
            rate = (low + high) / 2
            found = self.run("Server", rate)
            if found["valid"]:
                low, best = rate, found
            else:
                high = rate
        return low, best


def _measure(run: Run) -> Result:
    """Judge every contender that is installed. A run that was stopped goes on where it was."""
    result = Result(
        [
            "model",
            "server",
            "Server, valid queries/s",
            "p99 ms there",
            "SingleStream p90 ms",
            "MultiStream p99 ms",
            "Offline/s",
        ]
    )
    rates: dict[tuple[str, str], float] = {}
    judged = [(kind, contender) for kind in (NULL, TIMED) for contender in CONTENDERS]
    for (kind, contender), [row, rate] in kept(run, "rows", judged, lambda each: _row(run, *each)):
        result.rows.append([kind, contender.name, *row])
        rates[kind, contender.name] = rate
        run.step(f"{kind}, {contender.name}: {count(rate)} queries/s")
    _conclude(result, rates)
    return result


T = TypeVar("T")


def kept(run: Run, name: str, subjects: Sequence[T], find: Callable[[T], Any]) -> Iterator[tuple[T, Any]]:
    """Yield each subject with what `find` returns for it, or returned in an earlier run on the same code for as many seconds."""
    if run.quick:
        yield from ((each, find(each)) for each in subjects)
        return
    name = f"loadgen-{name}-{run.seconds:g}"
    yield from zip(subjects, resumed(name, SOURCES, lambda first: map(find, subjects[first:])), strict=True)


def _row(run: Run, kind: str, contender: Contender) -> tuple[list[str], float]:
    """Return the cells of a contender, and its rate of Server in queries/s."""
    forget(run, f"{contender.name} {kind}")
    with contender.start(kind, DEFAULTS) as asked:
        judge = Judge(asked, f"{contender.name} {kind}", run, SHARES[kind] * run.seconds)
        offline = judge.offline(EXPECTED[kind])
        single = judge.run("SingleStream", connections=1)
        several = judge.run("MultiStream", connections=8)
        rate, there = judge.highest(offline["rate"], step=QUICK_STEP if run.quick else STEP)

    def shown(found: dict[str, Any], name: str) -> str:
        if name not in found or not found.get("rate", 1.0):
            return f"not within {PATIENCE + 5.0 * judge.seconds:.0f} s"
        text = count(found[name]) if name == "rate" else milliseconds(found[name] / 1e9)
        return text if found["valid"] else f"{text} (INVALID)"

    return [
        count(rate), milliseconds(there["p99_ns"] / 1e9) if there else "", shown(single, "p90_ns"),
        shown(several, "p99_ns"), shown(offline, "rate"),
    ], rate  # fmt: skip


def _conclude(result: Result, rates: dict[tuple[str, str], float]) -> None:
    result.values |= {f"{kind} {name}": rate for (kind, name), rate in rates.items()}
    ours = {each.name for each in CONTENDERS if each.ours and each.name != f"Weir, {LABELS['process']}"}
    for kind, wished in ((NULL, 2.0), (TIMED, 1.3)):
        weir = max(rates[kind, name] for name in ours)
        others = {name: rate for (of, name), rate in rates.items() if of == kind and not name.startswith("Weir")}
        peer = max(others, key=others.__getitem__)
        result.at_least(
            f"{kind}: at least {wished:g} times the best peer by its own settings ({peer})",
            weir / max(1.0, others[peer]),
            wished,
        )
    result.notes += [
        f"`{TIMED}` sleeps {1000 * FIXED:g} + {1000 * PER_ROW:g}·b ms for a batch of b. In *Server*, arrivals are Poisson and 99 % "
        f"of the responses must take at most {BOUND_MS:.0f} ms ({CLIENT_MS:g} ms of it for the client); the rate is the highest valid one found by bisection to {100 * STEP:g} %. Each server has one worker "
        "process; peers run with their default settings, which batch only in BentoML. A wrong or refused response makes a run invalid.",
    ]


LOADGEN = Part(
    "loadgen",
    "Judged by MLPerf LoadGen",
    "[LoadGen](https://github.com/mlcommons/inference/tree/master/loadgen) queries a model in its scenarios Server, SingleStream, MultiStream (8 at once) and Offline.",
    lambda rounds: 2 * len(CONTENDERS),
    _measure,
)
