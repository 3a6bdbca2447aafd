"""What servers of texts have of memory.

`python -m benchmarks.memory` prints what the workers of the small real model have, and how long they take to start.

`python -m benchmarks.memory given-back MODEL [--texts N]` prints what a server has before, during and after a large request, for each process what it has
for itself (USS). The server has a minute to give back what it took; the exit code is 1 if it keeps more than KEPT of what it had before.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import psutil

import weir
from benchmarks.harness.result import markdown, mebibytes
from benchmarks.harness.texts import model_directory, sample
from weir.bench.vectors import text_server
from weir.text_models import ComputingSettings
from weir.text_models.model import TextEncoder
from weir.workers.process.pool import ProcessPool

TEXTS = 300
DEVICE = "cpu"


class Alone(TextEncoder):
    """Shares nothing: each worker loads for itself."""

    load_shared = weir.Model.load_shared

    def load(self) -> None:
        TextEncoder.load_shared(self)
        super().load()


async def measure(model: type[TextEncoder], directory: Path, cache: str, workers: int) -> list[str]:
    """Return a row of the table."""
    computing = ComputingSettings(cache=cache, device_map=[DEVICE])
    params = {"directory": str(directory), "computing": computing}
    began = time.perf_counter()
    async with weir.Service(model, params=params, workers=workers, max_batch_size=4, max_queue_size=10_000) as service:
        seconds = time.perf_counter() - began
        await asyncio.gather(*map(service.infer, sample(TEXTS)))
        pool = service.executor
        assert isinstance(pool, ProcessPool)
        used = [psutil.Process(pid).memory_full_info() for pid in pool.pids()]
    how = "each by itself" if model is Alone else "forked" if workers > 1 else "one alone"
    pss, own = sum(each.pss for each in used) / 1e6, used[0].uss / 1e6
    return [f"{workers}", how, f"{pss:.0f}", f"{own:.0f}", f"{seconds:.1f}"]


def measure_workers() -> int:
    """Print the table of workers; return the exit code."""
    directory, rows = model_directory(), []
    with tempfile.TemporaryDirectory() as cache:
        asyncio.run(measure(TextEncoder, directory, cache, 1))  # makes the graph
        for model, workers in ((TextEncoder, 1), (TextEncoder, 2), (TextEncoder, 4), (Alone, 4)):
            rows.append(asyncio.run(measure(model, directory, cache, workers)))
    print(markdown(["workers", "loaded", "Pss of all, MB", "one worker's own, MB", "start, s"], rows))
    return 0


KEPT = 1.5  # times what it had before
PATIENCE = 40.0


def own_memory(process: psutil.Process) -> tuple[float, float]:
    """Return the bytes of the process that listens, and of those below it."""
    below = [each.memory_full_info().uss for each in process.children(recursive=True)]
    return float(process.memory_full_info().uss), float(sum(below))


def ask(url: str, texts: list[str]) -> int:
    """Ask for the vectors; return how many bytes the answer has."""
    body = msgspec.json.encode({"id": 1, "texts": texts})
    head = {"Content-Type": "application/json", "Accept": "application/json", "X-Request-Timeout": "3600"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/encode", body, head), timeout=3600) as answer:
        return len(answer.read())


def give_back(model: str, count: int) -> int:
    """Send a request of `count` texts and print the memory; return the exit code."""
    with text_server([model, "--device-map", "cpu", "--no-calibrate"]) as server:
        (process,) = [each for each in psutil.Process().children() if "weir" in " ".join(each.cmdline())]
        ask(server.http, [f"warm {number}" for number in range(500)])
        time.sleep(1.0)
        before, most = own_memory(process), [0.0, 0.0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                most[:] = map(max, most, own_memory(process))

        watching = threading.Thread(target=watch)
        watching.start()
        began = time.monotonic()
        size = ask(server.http, [f"a text of its own, number {number}" for number in range(count)])
        seconds = time.monotonic() - began
        done.set()
        watching.join()
        after = own_memory(process)
        began = time.monotonic()
        while own_memory(process)[0] > KEPT * before[0] and time.monotonic() < began + PATIENCE:
            time.sleep(0.5)
        rest = own_memory(process)
        waited = time.monotonic() - began
    print(
        f"{count:,} texts in {seconds:.1f} s, an answer of {mebibytes(size)} MiB; MiB of the server and of its workers:"
    )
    rows = {"before": before, "at most": most, "right after": after, f"{waited:.0f} s later": rest}
    for name, (own, below) in rows.items():
        print(f"{name:14} {mebibytes(own):>8} {mebibytes(below):>8}")
    return int(rest[0] > KEPT * before[0])


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser("benchmarks.memory", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("workers", "given-back"), default="workers")
    parser.add_argument("model", nargs="?", help="of given-back: the model's folder (default: the small one)")
    parser.add_argument("--texts", type=int, default=100_000, help="of given-back")
    asked = parser.parse_args()
    if asked.what == "workers":
        return measure_workers()
    return give_back(asked.model or str(model_directory()), asked.texts)


if __name__ == "__main__":
    sys.exit(main())
