"""Square over HTTP, one worker process, JSON, batches up to 64, beside mosec; and an application that does nothing."""

import sys
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack

from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.servers import Server, load, python_of, script, serving, weir_command

CONNECTIONS = (1, 64, 256)
WISHED = {64: 3.0, 256: 2.5}
WEIR, MOSEC, NOTHING = "Weir", "mosec", "nothing on uvicorn"
Seen = dict[tuple[str, int], dict[str, list[float]]]


def measure(run: Run) -> Result:
    """Alternate the servers round by round; each number of connections in turn."""
    seen: Seen = defaultdict(lambda: defaultdict(list))
    with ExitStack() as running:
        servers = [running.enter_context(server) for server in _servers()]
        for turn in range(run.rounds):
            for connections in CONNECTIONS:
                for server in rotated(servers, turn):
                    _one(run, server, connections, seen[server.name, connections])
    return _result(seen)


def _servers() -> list[AbstractContextManager[Server]]:
    weir = weir_command("benchmarks.models:Square", "--max-batch-size", "64")
    mosec = [python_of("mosec"), script("mosec_square.py"), "--port", "{port}", "--log-level", "error"]
    nothing = [sys.executable, "-m", "uvicorn", "--app-dir", script(""), "nothing:app", "--port", "{port}",
               "--no-access-log", "--log-level", "error"]  # fmt: skip
    return [
        serving(WEIR, weir, path="/infer/square", body=b"3", expected=b"9"),
        serving(MOSEC, mosec, path="/inference", body=b"3", expected=b"9"),
        serving(NOTHING, nothing, path="/", body=b"3", expected=b"9"),
    ]


def _one(run: Run, server: Server, connections: int, into: dict[str, list[float]]) -> None:
    before = server.usage()
    done = load(server.url, connections, run.seconds)
    after = server.usage()
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name} at {connections} connections: {done}")
    into["rate"].append(done.rate)
    into["p50"].append(done.p50)
    into["p99"].append(done.p99)
    into["front"].append((after.front_seconds - before.front_seconds) / done.requests)
    into["worker"].append((after.worker_seconds - before.worker_seconds) / done.requests)
    run.step(f"{server.name}, {connections} connections: {count(done.rate)} req/s")


def _result(seen: Seen) -> Result:
    result = Result(
        ["connections", "server", "requests/s", "times mosec", "p50 ms", "p99 ms", "CPU µs front", "CPU µs workers"]
    )
    for connections in CONNECTIONS:
        for name in (WEIR, MOSEC, NOTHING):
            got = seen[name, connections]
            times = ratio(got["rate"], seen[MOSEC, connections]["rate"])
            result.rows.append([
                str(connections), name, spread(got["rate"], count), f"{times:.2f}", milliseconds(middle(got["p50"])),
                milliseconds(middle(got["p99"])), *(short(middle(got[part]) * 1e6) for part in ("front", "worker")),
            ])  # fmt: skip
            result.values[f"{name} {connections}"] = middle(got["rate"])
    _goals(result, seen)
    result.notes.append(
        "CPU is user and system time per request: of the process that listens (for mosec its Rust front is a child, so it "
        "counts under workers), and of everything below it."
    )
    return result


def _goals(result: Result, seen: Seen) -> None:
    for connections, wished in WISHED.items():
        times = ratio(seen[WEIR, connections]["rate"], seen[MOSEC, connections]["rate"])
        result.values[f"times mosec {connections}"] = times
        result.goal(f"{connections} connections: at least {wished:g} times mosec", f"{times:.2f}", times >= wished)
    mosec = ratio(seen[MOSEC, 1]["p50"], seen[WEIR, 1]["p50"])
    nothing = ratio(seen[WEIR, 1]["p50"], seen[NOTHING, 1]["p50"])
    result.values["p50 1"] = middle(seen[WEIR, 1]["p50"])
    result.values["p50 1 mosec"] = middle(seen[MOSEC, 1]["p50"])
    result.goal("1 connection: p50 at most 1/30 of mosec's", f"1/{mosec:.1f}", mosec >= 30)
    result.goal("1 connection: p50 at most twice that of nothing on uvicorn", f"{nothing:.2f}", nothing <= 2)


PART = Part(
    "square",
    "Square over HTTP",
    "One worker process, JSON, batches of up to 64 (mosec waits up to 5 ms for them), wrk with one thread on the same machine.",
    lambda rounds: rounds * len(CONNECTIONS) * 3,
    measure,
)
