"""The Open Inference Protocol over HTTP: small JSON tensors and large binary ones, beside Triton and MLServer."""

import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.kserve import MEAN, MLSERVER, SIMPLE, TRITON, WEIR, binary_body, servers, simple_body
from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.servers import Server, load

NAMES = (WEIR, TRITON, MLSERVER)
Seen = dict[tuple[str, str], dict[str, list[float]]]


class Case(NamedTuple):
    """One kind of request."""

    title: str
    path: str
    connections: int
    content_type: str
    body: Path
    headers: dict[str, str]
    names: tuple[str, ...]


def measure(run: Run) -> Result:
    """Alternate the servers round by round; each kind of request in turn."""
    seen: Seen = defaultdict(lambda: defaultdict(list))
    with ExitStack() as running, tempfile.TemporaryDirectory() as folder:
        cases = _cases(Path(folder))
        started = [running.enter_context(server) for server in servers(NAMES, SIMPLE, {})]
        for turn in range(run.rounds):
            for case in cases:
                for server in rotated([server for server in started if server.name in case.names], turn):
                    _one(run, server, case, seen[server.name, case.title])
    return _result(seen, cases)


def _cases(folder: Path) -> list[Case]:
    small, large = folder / "small", folder / "large"
    small.write_bytes(simple_body())
    body, headers = binary_body()
    large.write_bytes(body)
    return [
        Case("small JSON, 64 connections", SIMPLE, 64, "application/json", small, {}, NAMES),
        Case("602 KB binary, 16 connections", MEAN, 16, "application/octet-stream", large, headers, NAMES[:2]),
    ]


def _one(run: Run, server: Server, case: Case, into: dict[str, list[float]]) -> None:
    url = server.url.removesuffix(SIMPLE) + case.path
    before = server.usage()
    done = load(
        url, case.connections, run.seconds, body=case.body, content_type=case.content_type, headers=case.headers
    )
    after = server.usage()
    if done.broken or (done.refused and server.name == WEIR):
        raise RuntimeError(f"{server.name}, {case.title}: {done}")
    used = after.front_seconds + after.worker_seconds - before.front_seconds - before.worker_seconds
    into["rate"].append(done.rate)
    into["p50"].append(done.p50)
    into["p99"].append(done.p99)
    into["cpu"].append(used / done.requests)
    into["refused"].append(done.refused / done.requests)
    run.step(f"{server.name}, {case.title}: {count(done.rate)} req/s")


def _result(seen: Seen, cases: list[Case]) -> Result:
    result = Result(["requests", "server", "good answers/s", "times Triton", "p50 ms", "p99 ms", "CPU µs", "not 200"])
    for title, names in [(case.title, case.names) for case in cases]:
        for name in names:
            got = seen[name, title]
            times = ratio(got["rate"], seen[TRITON, title]["rate"])
            result.rows.append([
                title, name, spread(got["rate"], count), f"{times:.2f}", milliseconds(middle(got["p50"])),
                milliseconds(middle(got["p99"])), short(middle(got["cpu"]) * 1e6), f"{max(got['refused']):.1%}",
            ])  # fmt: skip
            result.values[f"{name} {title}"] = middle(got["rate"])
    small, large = (case.title for case in cases)
    for title, peer, wished in ((small, TRITON, 2.0), (small, MLSERVER, 15.0), (large, TRITON, 4.0)):
        times = ratio(seen[WEIR, title]["rate"], seen[peer, title]["rate"])
        result.goal(f"{title}: at least {wished:g} times {peer}", f"{times:.2f}", times >= wished)
    result.notes += [
        "Every server has one worker process for each of its models and batches of up to 64; CPU is user and system time of "
        "all processes of a server per request.",
        "Triton is the server binary of nvidia-pytriton 0.7.0 with its Python backend. There, `as_numpy()` reads wrong strides "
        "and a Tensor made of an array is empty, so its models take and give DLPack tensors; so done its answers are right.",
        "MLServer 1.7.1 refuses binary tensors over HTTP (422), so it has no part in the second.",
    ]
    return result


PART = Part(
    "kserve",
    "Open Inference Protocol over HTTP",
    "The same two models behind Weir, Triton (Python backend) and MLServer: sum and difference of two INT32 [1,16] tensors "
    "as JSON, and one FP32 [1,3,224,224] tensor in binary; wrk with one thread on the same machine.",
    lambda rounds: rounds * (2 * len(NAMES) - 1),
    measure,
)
