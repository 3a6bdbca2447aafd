"""What the workers of the small real model have of memory, and how long they take to start: `python -m benchmarks.memory`."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import psutil

import weir
from benchmarks.harness.texts import sample
from weir.embedding.model import TextEncoder
from weir.embedding.server_settings import INSTALL, installed_model
from weir.workers.pool import ProcessPool

TEXTS = 300
DEVICE = "cpu"


class Alone(TextEncoder):
    """Shares nothing: each worker loads for itself."""

    load_shared = weir.Model.load_shared

    def load(self) -> None:
        TextEncoder.load_shared(self)
        super().load()


async def measure(model: type[TextEncoder], directory: Path, cache: str, workers: int) -> str:
    """Return a row of the table."""
    params = {"directory": str(directory), "cache": cache, "devices": [DEVICE]}
    began = time.perf_counter()
    async with weir.Service(model, params=params, workers=workers, max_batch_size=4, max_queue_size=10_000) as service:
        seconds = time.perf_counter() - began
        await asyncio.gather(*map(service.infer, sample(TEXTS)))
        pool = service.executor
        assert isinstance(pool, ProcessPool)
        used = [psutil.Process(pid).memory_full_info() for pid in pool.pids()]
    how = "each by itself" if model is Alone else "forked" if workers > 1 else "one alone"
    pss, own = sum(each.pss for each in used) / 1e6, used[0].uss / 1e6
    return f"| {workers} | {how} | {pss:.0f} | {own:.0f} | {seconds:.1f} |"


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
