"""What a server of sentence vectors takes: time to start, memory by workers, beside its peers."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from benchmarks.harness.result import Part, Result, Run, mebibytes, middle, ratio, rotated, spread
from benchmarks.harness.servers import Server
from benchmarks.harness.texts import (
    CORES,
    INFINITY,
    SENTENCE_TRANSFORMERS,
    infinity,
    sample,
    sentence_transformers,
    vector_of,
    weir,
)

ALONE, MANY = "Weir, 1 worker", "Weir, 4 workers"
FORKED = {ALONE: 1, MANY: 4}
ASKED = 64  # texts before memory is read: every worker has computed some

Starts = dict[str, Callable[[], AbstractContextManager[Server]]]


class Taken(NamedTuple):
    """Seconds from the command to the first vector; bytes (PSS) of the process that listens, and of those below it."""

    seconds: float
    front: float
    workers: float

    @property
    def all(self) -> float:
        """Bytes of all processes."""
        return self.front + self.workers


def measure(run: Run) -> Result:
    """Start each server once in each round, by turns, and once before that."""
    with tempfile.TemporaryDirectory() as cache:
        starts: Starts = {name: partial(weir, *_flags(workers, cache), name=name) for name, workers in FORKED.items()}
        starts |= {INFINITY: infinity, SENTENCE_TRANSFORMERS: sentence_transformers}
        first = {name: _taken(run, start, name).seconds for name, start in starts.items()}
        seen: dict[str, list[Taken]] = defaultdict(list)
        for turn in range(run.rounds):
            for name in rotated(list(starts), turn):
                seen[name].append(_taken(run, starts[name], name))
    return _result(seen, first)


def _flags(workers: int, cache: str) -> tuple[str, ...]:
    return ("--workers", str(workers), "--threads", "1", "--cache", cache)


def _taken(run: Run, start: Callable[[], AbstractContextManager[Server]], name: str) -> Taken:
    began = time.monotonic()
    with start() as server:
        seconds = time.monotonic() - began
        for text in sample(ASKED):
            vector_of(server, text)
        below = sum(process.memory_full_info().pss for process in server.front.children(recursive=True))
        taken = Taken(seconds, float(server.front.memory_full_info().pss), float(below))
    run.step(f"{name}: {seconds:.1f} s to the first vector, {mebibytes(taken.all)} MiB")
    return taken


def _result(seen: dict[str, list[Taken]], first: dict[str, float]) -> Result:
    result = Result([
        "server", "seconds to the first vector", "the very first time", "MiB, PSS: all", "the process that listens", "below it",
    ])  # fmt: skip
    for name, rows in seen.items():
        seconds, everything = [row.seconds for row in rows], middle([row.all for row in rows])
        result.rows.append([
            name, spread(seconds, lambda value: f"{value:.1f}"), f"{first[name]:.1f}", mebibytes(everything),
            mebibytes(middle([row.front for row in rows])), mebibytes(middle([row.workers for row in rows])),
        ])  # fmt: skip
        result.values |= {f"{name} start": middle(seconds), f"{name} PSS": everything}
    times = ratio([row.workers for row in seen[MANY]], [row.workers for row in seen[ALONE]])
    result.values["PSS of workers, times"] = times
    result.goal("PSS of 4 workers at most 1.5 times that of one", f"{times:.2f}", times <= 1.5)
    more = middle([(many.workers - one.workers) / 3 for many, one in zip(seen[MANY], seen[ALONE], strict=True)])
    result.values["PSS of a further worker"] = more
    result.notes.append(
        f"all-MiniLM-L6-v2 in fp32, 91 MB of weights, after {ASKED} texts. Weir's workers have one thread each, its peers {CORES}. The very first time Weir makes the "
        "model's graph and measures its batches. Workers are counted with what they were forked from; each further one "
        f"of Weir's takes {mebibytes(more)} MiB. PSS shares a file's pages among all processes of the machine that have it mapped."
    )
    return result


PART = Part(
    "vectors-memory",
    "Start and memory of a server of sentence vectors",
    "How long it takes from the command to the first vector, and what memory it takes, beside infinity and sentence-transformers "
    "behind FastAPI.",
    lambda rounds: (rounds + 1) * (len(FORKED) + 2),
    measure,
)
