"""`python -m benchmarks.loading`: does loading a second model slow the first one down?

A server has a repository of two models. The first is asked at a constant rate all the time, whether answers come or not; the
second is loaded and unloaded again. Each round has four windows of the same length: a quiet one, one that a load takes, one beside a
process that has nothing to do with the server and only computes, and one beside processes that have nothing to do with the server and do what
the second model does when it is loaded, both at the same lowest priority as a worker that loads. What is compared are the latencies of
all requests that were sent in each kind of window, over all rounds. The last two show what the system makes of a busy CPU and of
imports and large arrays on it: no server can load a model and do better than that.
"""

import argparse
import asyncio
import gc
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx

SERVED = """
import time
import weir

class First(weir.Model):
    max_batch_size = 8

    def predict(self, batch):
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return batch
"""
LOADED = """
import numpy as np
import weir

class Second(weir.Model):
    examples = (1,)

    def load(self):
        import scipy.stats  # what is large is imported where it is used: the server's process only needs the class

        random = np.random.default_rng(1)
        self.weights = [random.normal(size=(1024, 1024)).astype(np.float32) for _ in range(32)]

    def predict(self, batch):
        value = np.ones((len(batch), 1024), dtype=np.float32)
        for weights in self.weights:
            value = np.tanh(value @ weights)
        return [float(each) for each in value[:, 0]]
"""
LOWEST_PRIORITY = """
import os

if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.nice(19)
"""
COMPUTING = f"{LOWEST_PRIORITY}\nwhile True:\n    pass\n"
SAME_WORK = f"{LOWEST_PRIORITY}\n{LOADED}\nmodel = Second()\nmodel.load()\nmodel.predict([1])\n"
AGAIN = f"import subprocess, sys\n{LOWEST_PRIORITY}\nwhile True:\n    subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
CONNECTIONS = 32
REST = 0.5  # seconds after a change before the next window
REQUEST = b"POST /infer/first HTTP/1.1\r\nHost: bench\r\nContent-Length: 1\r\n\r\n0"


class Load:
    """Asks at `rate`; `latencies` has, for each answer, when it was due to be sent and how long after that it came."""

    def __init__(self, port: int, rate: float) -> None:
        self.latencies: list[tuple[float, float]] = []
        self.failed = 0
        self._port = port
        self._rate = rate
        self._due: asyncio.Queue[float] = asyncio.Queue()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask within the block."""
        tasks = [asyncio.create_task(self._ask()) for _ in range(CONNECTIONS)] + [asyncio.create_task(self._pace())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def within(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        """Return the latencies of what was due in one of `windows`."""
        return [late for due, late in self.latencies if any(begin <= due < end for begin, end in windows)]

    async def _pace(self) -> None:
        begun, sent = time.perf_counter(), 0
        while True:
            due = begun + sent / self._rate
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            self._due.put_nowait(due)
            sent += 1

    async def _ask(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while True:
            due = await self._due.get()
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            self.latencies.append((due, time.perf_counter() - due))
            self.failed += head[9:12] != b"200"


async def measure(url: str, rounds: int, rate: float) -> None:
    """Print what came of so many rounds."""
    loading: list[tuple[float, float]] = []
    quiet: list[tuple[float, float]] = []
    beside: dict[str, list[tuple[float, float]]] = {
        "beside a process that computes": [],
        "beside processes that load the same": [],
    }
    controls = ([COMPUTING], [AGAIN, SAME_WORK])
    load = Load(int(url.rpartition(":")[2]), rate)
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client, load.running():
        # What a client does once must not hold up the requests of a window.
        (await client.get("/health/ready")).raise_for_status()
        await asyncio.sleep(2.0)
        for _ in range(rounds):
            begun = time.perf_counter()
            (await client.post("/v2/repository/models/second/load")).raise_for_status()
            loading.append((begun, time.perf_counter()))
            (await client.post("/v2/repository/models/second/unload")).raise_for_status()
            await asyncio.sleep(REST)
            quiet.append(await _window(loading[-1]))
            for arguments, windows in zip(controls, beside.values(), strict=True):
                with _running(arguments):
                    await asyncio.sleep(REST)
                    windows.append(await _window(loading[-1]))
                await asyncio.sleep(REST)
    took = statistics.median(end - begun for begun, end in loading)
    print(f"{rounds} loads of {took:.2f} s (median), {rate:g} requests/s, {load.failed} not answered with 200")
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        base = _quantile(load.within(quiet), share)
        others = {
            when: _quantile(load.within(windows), share)
            for when, windows in {"while loading": loading, **beside}.items()
        }
        compared = ", ".join(
            f"{1000 * other:.2f} ms {when} ({100 * (other / base - 1):+.0f} %)" for when, other in others.items()
        )
        print(f"{name}: {1000 * base:.2f} ms quiet, {compared}")


async def _window(like: tuple[float, float]) -> tuple[float, float]:
    """Wait for as long as the window `like` lasted and return what was waited."""
    begun = time.perf_counter()
    await asyncio.sleep(like[1] - like[0])
    return begun, time.perf_counter()


@contextmanager
def _running(arguments: Sequence[str]) -> Iterator[None]:
    """Within the block a Python process runs, whose code and arguments these are, and what it starts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", *arguments], env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _quantile(latencies: list[float], share: float) -> float:
    return sorted(latencies)[int(share * len(latencies))]


def main() -> None:
    """Serve, measure, stop."""
    parser = argparse.ArgumentParser("benchmarks.loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    asked = parser.parse_args()
    gc.disable()  # a collection would hold up the requests, and be taken for the server's time
    with tempfile.TemporaryDirectory() as folder:
        for name, code in (("first", SERVED), ("second", LOADED)):
            version = Path(folder) / name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(code)
        command = [
            sys.executable,
            "-m",
            "weir",
            "serve",
            "--model-repository",
            folder,
            "--load",
            "first",
            "--port",
            "0",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            assert server.stdout is not None
            url = next(
                found[1] for line in server.stdout if (found := re.search(r"curl .*?(http://\S+?)/infer/", line))
            )
            asyncio.run(measure(url, asked.rounds, asked.rate))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
