"""Binary bodies of 600 KB, through shared memory, beside mosec."""

import tempfile
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from benchmarks.harness.result import Part, Result, Run, count, mebibytes, middle, milliseconds, ratio, rotated, spread
from benchmarks.harness.servers import Server, load, python_of, script, serving, weir_command

BODY_BYTES = 224 * 224 * 3 * 4
CONNECTIONS = 16
OCTETS = "application/octet-stream"
WEIR, MOSEC = "Weir", "mosec"
Seen = dict[str, dict[str, list[float]]]


def measure(run: Run) -> Result:
    """One round to warm up, which is where the memory is counted from; then the alternated rounds."""
    seen: Seen = defaultdict(lambda: defaultdict(list))
    with ExitStack() as running, tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body"
        body.write_bytes(bytes(BODY_BYTES))
        servers = [running.enter_context(server) for server in _servers()]
        for turn in range(run.rounds + 1):
            for server in rotated(servers, turn):
                _one(run, server, body, seen[server.name])
    return _result(seen)


def _servers() -> list[AbstractContextManager[Server]]:
    weir = weir_command("benchmarks.models:Length", "--max-batch-size", "64")
    mosec = [python_of("mosec"), script("mosec_length.py"), "--port", "{port}", "--log-level", "error"]
    return [
        serving(WEIR, weir, path="/infer/length", body=b"12345", expected=b"5", content_type=OCTETS),
        serving(MOSEC, mosec, path="/inference", body=b"12345", expected=b"5", content_type=OCTETS),
    ]


def _one(run: Run, server: Server, body: Path, into: dict[str, list[float]]) -> None:
    done = load(server.url, CONNECTIONS, run.seconds, body=body, content_type=OCTETS)
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name}: {done}")
    into["rate"].append(done.rate)
    into["p50"].append(done.p50)
    into["p99"].append(done.p99)
    into["memory"].append(server.usage().memory_bytes)
    run.step(f"{server.name}: {count(done.rate)} req/s")


def _result(seen: Seen) -> Result:
    result = Result(
        ["server", "requests/s", "times mosec", "GB/s", "p50 ms", "p99 ms", "MiB before", "MiB after", "MiB most"]
    )
    for name in (WEIR, MOSEC):
        got, rates = seen[name], seen[name]["rate"][1:]
        memory = got["memory"]
        result.rows.append([
            name, spread(rates, count), f"{ratio(rates, seen[MOSEC]['rate'][1:]):.2f}", f"{middle(rates) * BODY_BYTES / 1e9:.2f}",
            milliseconds(middle(got["p50"][1:])), milliseconds(middle(got["p99"][1:])),
            mebibytes(memory[0]), mebibytes(memory[-1]), mebibytes(max(memory)),
        ])  # fmt: skip
        result.values[name] = middle(rates)
    growth = seen[WEIR]["memory"][-1] / seen[WEIR]["memory"][0]
    result.values["times mosec"] = ratio(seen[WEIR]["rate"][1:], seen[MOSEC]["rate"][1:])
    result.goal("at least 4,000 requests/s", count(result.values[WEIR]), result.values[WEIR] >= 4000)
    result.goal("flat memory: after at most 1.1 times before", f"{growth:.3f}", growth <= 1.1)
    result.notes.append(
        "Memory is that of all processes of the server, shared pages counted once; before: after one round of load."
    )
    return result


PART = Part(
    "large-bodies",
    "Large binary bodies",
    f"{BODY_BYTES:,} bytes of application/octet-stream to a worker process that answers their length, {CONNECTIONS} connections.",
    lambda rounds: (rounds + 1) * 2,
    measure,
)
