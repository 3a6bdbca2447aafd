"""What the workers of the small real model have of memory, and how long they take to start: `python -m benchmarks.memory`."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import weir
from weir.embedding.checkpoint.installed import INSTALL, installed_model
from weir.embedding.model import TextEncoder
from weir.workers.pool import ProcessPool

TEXTS = 300
DEVICE = "cpu"


class Alone(TextEncoder):
    """Shares nothing: each worker loads for itself."""

    load_shared = weir.Model.load_shared

    def load(self) -> None:
        TextEncoder.load_shared(self)
        super().load()


def megabytes(pid: int, *names: str) -> float:
    """Return what a process has of these kinds of memory, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return sum(found[f"{name}:"] for name in names) * 1024 / 1e6


async def measure(model: type[TextEncoder], directory: Path, cache: str, workers: int) -> str:
    """Return a row of the table."""
    params = {"directory": str(directory), "cache": cache, "devices": [DEVICE]}
    began = time.perf_counter()
    async with weir.Service(model, params=params, workers=workers, max_batch_size=4, max_queue_size=10_000) as service:
        seconds = time.perf_counter() - began
        words = [
            "the",
            "river",
            "flows",
            "over",
            "the",
            "weir",
            "when",
            "water",
            "rises",
            "and",
            "falls",
            "again",
            "in",
            "the",
            "long",
            "dry",
            "summer",
        ]
        texts = [" ".join((words * 4)[number % 16 : number % 16 + number % 50 + 1]) for number in range(TEXTS)]
        await asyncio.gather(*map(service.infer, texts))
        pool = service.executor
        assert isinstance(pool, ProcessPool)
        total = sum(megabytes(pid, "Pss") for pid in pool.pids())
        own = megabytes(pool.pids()[0], "Private_Dirty", "Private_Clean")
    how = "each by itself" if model is Alone else "forked" if workers > 1 else "one alone"
    return f"| {workers} | {how} | {total:.0f} | {own:.0f} | {seconds:.1f} |"


def main() -> int:
    """Print the table; return the exit code."""
    directory = installed_model()
    if directory is None:
        print(f"the model is not installed: {INSTALL}")
        return 1
    print("| workers | loaded | Pss of all, MB | one worker's own, MB | start, s |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as cache:
        asyncio.run(measure(TextEncoder, directory, cache, 1))  # makes the graph
        for model, workers in ((TextEncoder, 1), (TextEncoder, 2), (TextEncoder, 4), (Alone, 4)):
            print(asyncio.run(measure(model, directory, cache, workers)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
