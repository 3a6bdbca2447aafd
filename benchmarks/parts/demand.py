"""A thousand models in room for fifty: Zipf traffic with drift while workers are killed, each answer checked; and how long the load of a small model takes.

`python -m benchmarks.parts.demand PORT MODELS CALLERS SECONDS` sends the traffic, and prints what came of it.
"""

import http.client
import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.harness.result import Part, Result, Run, Table, count, mebibytes
from benchmarks.harness.servers import Server, ask_own, serving
from benchmarks.policies.on_demand import drifting

MODELS, ROOM = 1000, 50
CALLERS = 8
SECONDS = 60.0
KILL_EVERY = 0.5  # seconds
NEEDS = 20  # MB that each model states, more than it takes: so the room is for ROOM models
LOADS = 40  # of each kind
WEIGHTS = 64 << 20  # bytes of the large ones
LOADED = re.compile(r"model '(\w+)/1': loaded in ([\d.e-]+) s, takes ([\d.]+)MB")

SMALL = """import weir

class Named(weir.Model):
    def predict(self, batch):
        return [[{name!r}, item] for item in batch]
"""
LARGE = """import numpy as np
import weir

class Named(weir.Model):
    def load(self):
        self.weights = np.load({file!r}, mmap_mode={mode!r})

    def predict(self, batch):
        return [[{name!r}, item] for item in batch]
"""


def fill(folder: Path, names: list[str], config: str, text: str = SMALL, **values: object) -> None:
    """Write models that answer with their name and the item."""
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(text.format(name=name, **values))
        (folder / name / "config.toml").write_text(config)


@contextmanager
def on_demand(folder: Path, room: int, *flags: str) -> Iterator[Server]:
    """Serve the models of `folder` with room for so many that state NEEDS, and with these further flags."""
    command = [
        sys.executable, "-m", "weir", "serve", "--model-repository", str(folder), "--model-control", "on-demand",
        "--model-memory", f"{room * NEEDS}MB", "--port", "{port}", "--log-level", "info", *flags,
    ]  # fmt: skip
    with serving("Weir", command, path=f"/infer/{min(folder.iterdir()).name}", body=b"0", expected=None) as server:
        yield server


class Came(NamedTuple):
    """What came of the traffic: answers, those that were not right with what was expected, refusals that named a time to come again, and the seconds of all."""

    answers: int
    wrong: list[str]
    refused: int
    seconds: float


def send(port: int, models: int, callers: int, seconds: float) -> Came:
    """Call models by Zipf's law with drift, from so many callers at a time, and check each answer."""
    order = [each % models for each in drifting(np.random.default_rng(1))]
    numbers = islice(enumerate(cycle(order)), None)
    taking, end = threading.Lock(), time.monotonic() + seconds
    wrong: list[str] = []

    def call() -> tuple[int, int]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            return call_over(connection)

    def call_over(connection: http.client.HTTPConnection) -> tuple[int, int]:
        answers = refused = 0
        while time.monotonic() < end:
            with taking:
                number, model = next(numbers)
            while True:
                connection.request("POST", f"/infer/m{model}", str(number), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 503 or answer.headers["Retry-After"] is None:
                    break
                refused += 1
                time.sleep(0.05)
            answers += 1
            if (answer.status, body) != (200, f'["m{model}",{number}]'.encode()):
                wrong.append(f"m{model} {number}: {answer.status} {body[:300]!r}")
        return answers, refused

    began = time.monotonic()
    with ThreadPoolExecutor(callers) as threads:
        counts = [each.result() for each in [threads.submit(call) for _ in range(callers)]]
    return Came(sum(each[0] for each in counts), wrong, sum(each[1] for each in counts), time.monotonic() - began)


@contextmanager
def killing(server: psutil.Process, every: float) -> Iterator[list[int]]:
    """Kill a worker of the server now and then; yield the list of those that were killed."""
    killed: list[int] = []
    over = threading.Event()
    chance = random.Random(1)

    def kill() -> None:
        while not over.wait(every):
            templates = [
                each for each in server.children() if {"weir.workers.process.entry", "models"} <= set(each.cmdline())
            ]
            workers = {each.pid: each for template in templates for each in template.children()}
            if workers:
                pid = chance.choice(sorted(workers))
                with suppress(psutil.NoSuchProcess):
                    workers[pid].kill()
                    killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


class Load(NamedTuple):
    """How long the load of a model took, in seconds, and what it takes, in MB."""

    seconds: float
    size: float


def loads(server: Server) -> list[tuple[str, Load]]:
    """Return the loads that the server has logged, with the names of the models."""
    server.words.seek(0)
    found = LOADED.findall(server.words.read().decode())
    return [(name, Load(float(seconds), float(size))) for name, seconds, size in found]


def measure(run: Run) -> Result:
    """Measure loads alone, then traffic."""
    result = Result(["load of a model", "p50 ms", "p99 ms", "MB"])
    seconds, models = (10.0, 200) if run.quick else (SECONDS, MODELS)
    with TemporaryDirectory() as folder:
        for kind, found in _kinds(Path(folder), 10 if run.quick else LOADS, run).items():
            times = [each.seconds for each in found]
            middle, late = np.percentile(times, (50, 99))
            size = float(np.median([each.size for each in found]))
            result.rows.append([kind, f"{1e3 * middle:,.0f}", f"{1e3 * late:,.0f}", f"{size:.1f}"])
            result.values |= {f"{kind}, p50": float(middle), f"{kind}, p99": float(late), f"{kind}, MB": size}
    with TemporaryDirectory() as folder:
        fill(Path(folder), [f"m{number}" for number in range(models)], f'needs_memory = "{NEEDS}MB"\n')
        with on_demand(Path(folder), ROOM) as server:
            with killing(server.front, KILL_EVERY) as killed:
                came = Came(**ask_own("parts.demand", server.port, models, CALLERS, seconds, timeout=seconds + 120))
            _conclude(result, came, [each for _, each in loads(server)], len(killed), server)
    run.step("traffic")
    return result


def _kinds(folder: Path, number: int, run: Run) -> Mapping[str, list[Load]]:
    """Load so many models of each kind, one after the other, and return how long each took."""
    config, file = f'needs_memory = "{NEEDS}MB"\n', folder / "weights.npy"
    np.save(file, np.ones(WEIGHTS // 8))
    kinds = {
        "program of its own": (config + 'env = [{ OWN = "1" }]\n', SMALL, ""),
        "forked": (config, SMALL, ""),
        f"forked, {WEIGHTS >> 20} MiB of weights read": (config, LARGE, None),
        f"forked, {WEIGHTS >> 20} MiB of weights mapped": (config, LARGE, "r"),
    }
    found = {}
    for place, (kind, (settings, text, mode)) in enumerate(kinds.items()):
        models, names = folder / str(place), [f"m{each:03}" for each in range(number + 1)]
        fill(models, names, settings, text, file=str(file), mode=mode)
        with on_demand(models, 2 * ROOM) as server:
            for name in names:
                server.url = server.url.rpartition("/")[0] + f"/{name}"
                server.ask(b"1")
            found[kind] = [each for name, each in loads(server) if name != names[0]]  # it came before the template
        run.step(kind)
    return found


def _conclude(result: Result, came: Came, found: list[Load], killed: int, server: Server) -> None:
    rate, share = came.answers / came.seconds, len(found) / came.answers
    middle, late = np.percentile([each.seconds for each in found], (50, 99))
    memory = server.usage().memory_bytes
    row = [count(came.answers), f"{rate:.0f}", f"{100 * share:.0f} %", f"{1e3 * middle:,.0f}", f"{1e3 * late:,.0f}", count(killed), count(len(came.wrong)), mebibytes(memory)]  # fmt: skip
    columns = ["answers", "a second", "loads per answer", "load p50 ms", "load p99 ms", "workers killed", "lost or wrong", "MiB, PSS"]  # fmt: skip
    result.tables.append(Table("Zipf traffic with drift", columns, [row]))
    result.values |= {
        "rate": rate, "loads per answer": share, "load p50": float(middle), "load p99": float(late), "killed": float(killed), "wrong": float(len(came.wrong)),
        "refused": float(came.refused),
    }  # fmt: skip
    result.goal("nothing lost or wrong", "; ".join(came.wrong[:3]) or f"{count(came.answers)} right", not came.wrong)
    result.notes.append(
        f"{CALLERS} callers without a pause; a worker is killed every {KILL_EVERY:g} s. {came.refused} requests were refused with a time to come again."
    )


PART = Part(
    "demand",
    "A thousand models in room for fifty",
    "How long a small model takes to load on demand, and what traffic over 1,000 models gets while workers are killed.",
    lambda rounds: 5,
    measure,
    round=f"{SECONDS:g} s",
)


if __name__ == "__main__":
    port, models, callers, seconds = sys.argv[1:]
    print(json.dumps(send(int(port), int(models), int(callers), float(seconds))._asdict()))
