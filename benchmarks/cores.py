"""`python -m benchmarks.cores`: what several fronts serve on a machine with many cores, where the load has cores of its own. Needs wrk and h2load.

Small requests go to workers that only sleep, so that what reads, checks and writes is the limit; texts, with `--texts DIRECTORY`, go to a real model on
`--device`. Every server is started for itself. Prints tables, and writes cores.md and cores.json into the working directory.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.request import urlopen

from rich.console import Console

from benchmarks.harness.result import Result, count, markdown
from benchmarks.harness.servers import Load, Server, free_port, load, require_wrk, script, serving, weir_command
from benchmarks.harness.texts import sample, serving_texts, weir_texts, write_bodies
from benchmarks.parts.fronts import ONE_TEXT, cpu_seconds
from benchmarks.parts.kserve import METHOD, SIMPLE, grpc_load, request_body, simple_body

SQUARE, KSERVE, GRPC, TEXTS = "square", "KServe JSON", "gRPC", "texts"
MOSEC, GUNICORN = "mosec", "gunicorn, whole servers"
WORKERS = 4  # that only sleep
BATCH = 128
CONNECTIONS = 768
THREADS = 4  # of the load
WARM_UP = 1.0  # seconds of load that do not count
SHARE = 0.8  # of K times one front, which K fronts should serve until the dispatcher is full
FULL = 0.85  # of a CPU: from here on the dispatcher counts as full


class Case(NamedTuple):
    """One kind of request to one number of fronts: how to start the server, and how to load it for so many seconds."""

    what: str
    server: str
    start: Callable[[], AbstractContextManager[Server]]
    run: Callable[[Server, float], Load]


def main() -> int:
    """Measure every case, in turns, and print what was found."""
    asked = _arguments()
    require_wrk()
    console = Console()
    seen: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        bodies = write_bodies(sample(), Path(folder) / "bodies")
        cases = list(_cases(asked, bodies))
        for number in range(asked.rounds):
            for case in cases:
                try:
                    figures = _measured(case, asked.seconds)
                except RuntimeError as error:
                    console.print(f"round {number + 1}: {case.what}, {case.server}: {error}", markup=False)
                    continue
                seen[case.what, case.server].append(figures)
                console.print(
                    f"round {number + 1}: {case.what}, {case.server}: {figures['rate']:,.0f}/s, dispatcher {figures['dispatcher']:.0%} of a CPU",
                    markup=False, soft_wrap=True,
                )  # fmt: skip
    result = _result(seen)
    result.print(console, "Several fronts on many cores")
    about = f"{platform.python_version()}, {os.cpu_count()} CPUs, {asked.rounds} of {asked.seconds:g} s, {CONNECTIONS} connections, {asked.workers} workers"
    Path("cores.md").write_text(f"{markdown(result.columns, result.rows)}\n\n<sub>Python {about}</sub>\n")
    Path("cores.json").write_text(json.dumps([[*key, found] for key, found in seen.items()]))
    return 0 if seen else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.cores", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternated rounds, of which the median counts")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load, each time")
    parser.add_argument(
        "--fronts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of fronts (default: 1 2 4 8)"
    )
    parser.add_argument("--what", nargs="+", choices=(SQUARE, KSERVE, GRPC), default=[SQUARE, KSERVE, GRPC])
    parser.add_argument("--workers", type=int, default=WORKERS, help="that sleep")
    parser.add_argument("--texts", type=Path, metavar="DIRECTORY", help="a model of sentence vectors, served as well")
    parser.add_argument("--device", default="cpu", help="of that model: cpu, or the number of a GPU")
    parser.add_argument("--texts-only", action="store_true", help="leave the small requests out")
    return parser.parse_args()


def _cases(asked: argparse.Namespace, bodies: Path) -> Iterator[Case]:
    """Yield the cases; those of one kind of request are neighbours, so that a busy minute falls on all of them."""
    for what in [] if asked.texts_only else asked.what:
        yield from (_small(what, _name(fronts), asked, fronts) for fronts in asked.fronts)
        if what == SQUARE and find_spec("mosec"):
            yield Case(what, MOSEC, partial(_mosec, asked.workers), _wrk)
        if what == SQUARE and find_spec("gunicorn"):
            yield from (Case(what, f"{GUNICORN} {many}", partial(_gunicorn, many), _wrk) for many in asked.fronts[1:])
    for fronts in asked.fronts if asked.texts else ():
        yield Case(TEXTS, _name(fronts), partial(_texts, asked, fronts), partial(_wrk, bodies=bodies))


def _name(fronts: int) -> str:
    return f"--fronts {fronts}"


def _wrk(server: Server, seconds: float, bodies: Path | None = None) -> Load:
    return load(server.url, CONNECTIONS, seconds, body=server.body, bodies=bodies, threads=THREADS)


def _small(what: str, name: str, asked: argparse.Namespace, fronts: int) -> Case:
    model, path, body = ("Nap", "/infer/model", b"3") if what == SQUARE else ("SimpleNap", SIMPLE, simple_body())
    flags = ["--name", path.split("/")[-1 if what == SQUARE else -2], "--workers", str(asked.workers)]
    flags += ["--max-batch-size", str(BATCH), "--fronts", str(fronts)]
    if what != GRPC:
        command = weir_command(f"benchmarks.models:{model}", *flags)
        return Case(what, name, lambda: serving(what, command, path=path, body=body, expected=None), _wrk)
    port = free_port()
    command = weir_command(f"benchmarks.models:{model}", *flags, "--grpc-port", str(port))
    call = partial(grpc_load, port, METHOD, request_body(), CONNECTIONS, threads=THREADS)
    return Case(
        what,
        name,
        lambda: serving(what, command, path=path, body=body, expected=None),
        lambda _, seconds: call(seconds),
    )


def _mosec(workers: int) -> AbstractContextManager[Server]:
    command = [
        sys.executable,
        script("mosec_server.py"),
        "nap",
        str(workers),
        "--port",
        "{port}",
        "--log-level",
        "error",
    ]
    return serving(MOSEC, command, path="/inference", body=b"3", expected=None)


def _gunicorn(many: int) -> AbstractContextManager[Server]:
    """Whole servers of Weir behind one port, each with a queue and a worker of its own."""
    flags = [
        "-k",
        "uvicorn_worker.UvicornWorker",
        "--workers",
        str(many),
        "--bind",
        "127.0.0.1:{port}",
        "--log-level",
        "error",
    ]
    command = [sys.executable, "-m", "gunicorn", *flags, "benchmarks.peers.whole_server:app"]
    return serving(GUNICORN, command, path="/infer/model", body=b"3", expected=None)


def _texts(asked: argparse.Namespace, fronts: int) -> AbstractContextManager[Server]:
    flags = ("--runtime", "torch", "--precision", "fp16") if asked.device != "cpu" else ()
    command = weir_texts(asked.texts, *flags, "--device-map", asked.device, "--fronts", str(fronts))
    return serving_texts(TEXTS, command, body=ONE_TEXT)


def _measured(case: Case, seconds: float) -> dict[str, float]:
    """Return the rate, the latencies, the CPUs that each kind of process filled, and the mean batch where the server says it."""
    with case.start() as server:
        case.run(server, WARM_UP)
        before, counts = cpu_seconds(server), _batches(server)
        began = time.monotonic()
        done = case.run(server, seconds)
        took = time.monotonic() - began
        after, later = cpu_seconds(server), _batches(server)
        lone = None if case.what == GRPC else load(server.url, 1, WARM_UP, body=server.body)
    rows, batches = (later[0] - counts[0], later[1] - counts[1]) if counts and later else (0.0, 0.0)
    figures = {"rate": done.rate, "p50": done.p50, "p99": done.p99, "refused": float(done.refused + done.broken)}
    figures |= {"lone": lone.p50} if lone else {}
    return (
        figures
        | {name: (after[name] - before[name]) / took for name in before}
        | ({"batch": rows / batches} if batches else {})
    )


def _batches(server: Server) -> tuple[float, float] | None:
    """Return how many rows a server of Weir has served, and in how many batches; None of any other, or of several."""
    if server.name in (MOSEC, GUNICORN):
        return None
    with urlopen(f"http://127.0.0.1:{server.port}/v2/models/stats") as answer:
        (model,) = json.load(answer)["model_stats"]
    sizes = {each["batch_size"]: each["compute_infer"]["count"] for each in model["batch_stats"]}
    return float(sum(size * many for size, many in sizes.items())), float(sum(sizes.values()))


def _result(seen: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]) -> Result:
    columns = ["requests", "server", "requests/s", "times one front", "p50 ms", "p99 ms", "p50 of one connection, ms", "rows a batch", "CPUs: dispatcher", "fronts", "workers", "CPU µs both"]  # fmt: skip
    result = Result(columns)
    for (what, server), found in seen.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        alone = seen.get((what, _name(1)))
        times = middle["rate"] / statistics.median(each["rate"] for each in alone) if alone else math.nan
        result.rows.append([
            what, server, count(middle["rate"]), f"{times:.2f}", f"{1000 * middle['p50']:.1f}", f"{1000 * middle['p99']:.1f}",
            f"{1000 * middle['lone']:.2f}" if "lone" in middle else "",
            f"{middle['batch']:.0f}" if "batch" in middle else "", *(f"{middle[name]:.2f}" for name in ("dispatcher", "fronts", "workers")),
            f"{1e6 * (middle['dispatcher'] + middle['fronts']) / middle['rate']:.1f}",
        ])  # fmt: skip
        if server.startswith("--fronts ") and (fronts := int(server.split()[1])) > 1 and middle["dispatcher"] < FULL:
            result.at_least(f"{what}, {server}: {SHARE} of so many times one front", times / fronts, SHARE)
    return result


if __name__ == "__main__":
    sys.exit(main())
