"""What a server of sentence vectors takes: memory by workers, time to start, and what 100,000 requests leave behind."""

import tempfile
import time
from pathlib import Path

from benchmarks.load import load
from benchmarks.result import Part, Result, Run, count, mebibytes, middle, spread
from benchmarks.servers import Server
from benchmarks.text_load import sample, write_bodies
from benchmarks.text_servers import CORES, vector_of, weir

WORKERS = (1, 4)
ASKED = 64  # texts before memory is read: every worker has computed some
REQUESTS, CLIENTS = 100_000, 64
WARM = 10_000  # requests after which memory is what it is: queues and buffers have had their largest size
GROWN = 0.05
SHORT = 24  # characters of the texts of the many requests: what is counted is requests


def measure(run: Run) -> Result:
    """Start servers, look, and then ask one 100,000 times."""
    with tempfile.TemporaryDirectory() as cache:
        return _measured(run, cache)


def _measured(run: Run, cache: str) -> Result:
    for workers in WORKERS:  # graphs are made and batches measured once
        with weir(*_flags(workers, cache)):
            pass
    result = Result(
        ["workers", "seconds to the first vector", "MiB, PSS: all", "server", "workers", "times one worker's"]
    )
    seen: dict[int, list[tuple[float, float, float]]] = {workers: [] for workers in WORKERS}
    for _ in range(run.rounds):
        for workers in WORKERS:
            seen[workers].append(_started(run, workers, cache))
    alone = middle([there for _, _, there in seen[WORKERS[0]]])
    for workers, rows in seen.items():
        began, fronts, there = (list(column) for column in zip(*rows, strict=True))
        everything = [front + worker for front, worker in zip(fronts, there, strict=True)]
        result.rows.append([
            str(workers), spread(began, lambda value: f"{value:.1f}"), *(mebibytes(middle(each)) for each in (everything, fronts, there)),
            f"{middle(there) / alone:.2f}",
        ])  # fmt: skip
        result.values |= {f"{workers} start": middle(began), f"{workers} PSS": middle(everything)}
    times = middle([there for _, _, there in seen[WORKERS[-1]]]) / alone
    result.values["PSS of workers, times"] = times
    result.goal("PSS of 4 workers at most 1.5 times that of one", f"{times:.2f}", times <= 1.5)
    _grown(run, result, cache)
    result.notes.append(
        "all-MiniLM-L6-v2 in fp32, 91 MB of weights, its graph made and its batches measured before. Workers with what they were forked from. "
        f"The 100,000 requests are short texts from {CLIENTS} clients to int8, on {CORES} cores."
    )
    return result


def _flags(workers: int, cache: str) -> tuple[str, ...]:
    return ("--workers", str(workers), "--threads", "1", "--cache", cache)


def _started(run: Run, workers: int, cache: str) -> tuple[float, float, float]:
    """Return the seconds to the first vector, and the bytes of the server's process and of its workers."""
    began = time.monotonic()
    with weir(*_flags(workers, cache)) as server:
        took = time.monotonic() - began
        for text in sample(ASKED):
            vector_of(server, text)
        front, there = _memory(server)
        run.step(f"{workers} workers: {took:.1f} s to start, {mebibytes(front + there)} MiB")
        return took, front, there


def _memory(server: Server) -> tuple[float, float]:
    below = sum(process.memory_full_info().pss for process in server.front.children(recursive=True))
    return float(server.front.memory_full_info().pss), float(below)


def _grown(run: Run, result: Result, cache: str) -> None:
    short = [text[:SHORT] for text in sample()]
    with weir("--precision", "int8", "--cache", cache) as server, tempfile.TemporaryDirectory() as folder:
        bodies = write_bodies(short, Path(folder) / "bodies")
        warm = _ask(server, bodies, WARM)
        before = sum(_memory(server))
        asked = _ask(server, bodies, REQUESTS)
        after = sum(_memory(server))
        said = f"{mebibytes(before)} MiB after {count(warm)} requests, {mebibytes(after)} MiB after {count(asked)} more"
        run.step(said)
        result.values["grown"] = after / before - 1
        result.goal(
            f"no growth over {REQUESTS:,} requests (at most {100 * GROWN:.0f} %)", said, after <= (1 + GROWN) * before
        )


def _ask(server: Server, bodies: Path, requests: int) -> int:
    done = 0
    while done < requests:
        seen = load(server.url, CLIENTS, 10, bodies=bodies)
        if seen.refused or seen.broken:
            raise RuntimeError(f"{server.name}: {seen}")
        done += seen.requests
    return done


PART = Part(
    "vectors-memory",
    "Memory of a server of sentence vectors",
    "How long it takes to start, what workers share, and what many requests leave behind.",
    lambda rounds: rounds * len(WORKERS) + 1,
    measure,
)
