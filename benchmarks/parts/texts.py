"""What a text costs beside its computation: the server process by phase, requests of one text and of many, int8, and workers against the runtime alone.

The child `CLIENTS TEXTS` is the server process without sockets and without workers: it prints the microseconds of processor time of each phase for a text.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.harness.result import Part, Result, Run, count, middle, short
from benchmarks.harness.rounds import folder
from benchmarks.harness.servers import Load, Server, ask_own, load
from benchmarks.harness.texts import CORES, MODEL, described, model_directory, sample, weir, write_bodies
from weir import Service
from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.encoder import Encoder
from weir.embedding.exchange import EmbeddingContext, TextExchange
from weir.embedding.metrics import TextCounts
from weir.embedding.model import TextEncoder
from weir.embedding.openai import OPENAI
from weir.embedding.texts import NO_TOKENIZE_OPTIONS, Encoded, ModelFacts, TextTask
from weir.errors import WeirError
from weir.protocols.settings import HttpSettings
from weir.testing import FakeExecutor

CLIENTS = (1, 16, 64)
MOST_MICROSECONDS = 150
PHASES = ("parse", "tokenise", "queue", "format")
SMALL, MIDDLE, LARGE = 1, 16, 64  # texts of a request
LAYOUT = (CORES, 1)  # of the runtime without a server: processes, and threads of each
BUDGET = 256  # tokens of a batch in the child
TRIES, CHILD_TEXTS = 20, 512


class Seen(NamedTuple):
    """What one load came to. Processor times are in seconds for each text."""

    texts: float  # in a second
    front: float
    kernel: float  # of the front's, what the system spent for it on sockets and pipes
    workers: float
    alone: float  # texts in a second, with the clients' processor time taken out


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _workers_of(server: Server) -> list[int]:
    return [process.pid for process in server.front.children(recursive=True)]


def seen(server: Server, clients: int, seconds: float, bodies: Path, size: int) -> Seen:
    """Put a load of requests of `size` texts on a server."""
    workers = _workers_of(server)
    front, computing, asking = _cpu_seconds(server.front.pid), sum(map(_cpu_seconds, workers)), _asking()
    kernel = server.front.cpu_times().system
    done = load(server.url, clients, seconds, bodies=bodies)
    texts = size * _good(server, done)
    spent = (_asking() - asking) / (done.seconds * CORES)
    return Seen(
        texts / done.seconds, (_cpu_seconds(server.front.pid) - front) / texts,
        (server.front.cpu_times().system - kernel) / texts, (sum(map(_cpu_seconds, workers)) - computing) / texts, texts / done.seconds / (1.0 - spent),
    )  # fmt: skip


def _asking() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _good(server: Server, done: Load) -> int:
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name}: {done}")
    return done.requests


def _bodies(texts: Sequence[str], size: int, place: Path) -> Path:
    """Write requests of `size` texts each, one a line."""
    if size == 1:
        return write_bodies(texts, place / "1")
    file = place / str(size)
    requests = [{"input": list(texts[at : at + size]), "model": MODEL} for at in range(0, len(texts), size)]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


Measured = dict[str, list[Seen]]


def measure(run: Run) -> Result:
    """Measure the phases in a child, then the servers in rounds."""
    result = Result(
        ["what", "clients", "texts/s", "server process, µs a text", "in the kernel, µs", "workers, ms a text"]
    )
    phases = ask_own("parts.texts", "64", CHILD_TEXTS, one_thread=True)
    run.step(f"phases: {sum(phases[name] for name in PHASES):.0f} µs")
    found: Measured = {}
    offline: list[float] = []
    with ExitStack() as stack:
        place = folder(stack)
        files = {size: _bodies(sample(), size, place) for size in (SMALL, MIDDLE, LARGE)}
        servers = {
            "fp32": stack.enter_context(weir("--cache", str(place))),
            "int8": stack.enter_context(weir("--cache", str(place), "--precision", "int8", name="int8")),
        }
        cases = [(name, clients, SMALL) for name in servers for clients in CLIENTS]
        cases += [("fp32", 1, MIDDLE), ("fp32", 1, LARGE)]
        for name, server in servers.items():
            load(server.url, 16, 3.0, bodies=files[SMALL])
            run.step(f"{name}: warm")
        for _ in range(run.rounds):
            for name, clients, size in cases:
                one = seen(servers[name], clients, run.seconds, files[size], size)
                found.setdefault(_key(name, clients, size), []).append(one)
            rates = ask_own("parts.vectors", "fp32", *LAYOUT, run.seconds / 2)
            offline.append(CORES / max(rates.values()))
            run.step(
                f"64 clients: {1e6 * found[_key('fp32', 64, SMALL)][-1].front:.0f} µs of the server process for a text"
            )
    for name, clients, size in cases:
        result.rows.append(_row(name, clients, size, found))
    _conclude(result, found, phases, offline)
    return result


def _key(name: str, clients: int, size: int) -> str:
    return f"{name}, {size} a request, {clients}"


def _row(name: str, clients: int, size: int, found: Measured) -> list[str]:
    rounds = found[_key(name, clients, size)]
    texts, front, kernel, workers, _ = (middle([each[place] for each in rounds]) for place in range(5))
    what = f"{name}, {size} text{'s' if size > 1 else ''} a request"
    return [what, str(clients), count(texts), short(1e6 * front), short(1e6 * kernel), short(1e3 * workers)]


def _of(found: Measured, figure: str, name: str, clients: int, size: int = SMALL) -> list[float]:
    return [getattr(each, figure) for each in found[_key(name, clients, size)]]


def _share(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return middle([mine / other for mine, other in zip(ours, theirs, strict=True)])


def _conclude(result: Result, found: Measured, phases: Mapping[str, float], offline: list[float]) -> None:
    front = 1e6 * middle(_of(found, "front", "fp32", 64))
    result.values |= {"front 64": front, **{f"phase {name}": phases[name] for name in PHASES}}
    result.goal(
        f"64 clients, one text a request: at most {MOST_MICROSECONDS} µs of the server process", f"{front:.0f} µs",
        front <= MOST_MICROSECONDS,
    )  # fmt: skip
    result.at_least(
        f"alone, {MIDDLE} texts a request: at least 0.9 of {LARGE}, in texts/s",
        _share(_of(found, "texts", "fp32", 1, MIDDLE), _of(found, "texts", "fp32", 1, LARGE)), 0.9,
    )  # fmt: skip
    result.at_least(
        f"{LARGE} clients with one text a request at least 0.9 of one with {LARGE}, in texts/s, clients' processor time taken out",
        _share(_of(found, "alone", "fp32", LARGE), _of(found, "alone", "fp32", 1, LARGE)), 0.9,
    )  # fmt: skip
    for clients in CLIENTS:
        times = _share(_of(found, "texts", "int8", clients), _of(found, "texts", "fp32", clients))
        result.at_least(f"{clients} clients: int8 at least 2 times fp32", times, 2)
    share = _share(offline, _of(found, "workers", "fp32", 64))
    result.at_least("the runtime alone takes at least 0.95 of the workers' processor time for a text", share, 0.95)
    shown = ", ".join(f"{name} {phases[name]:.0f}" for name in PHASES)
    result.notes += [
        f"{described(sample())}; all-MiniLM-L6-v2, OpenAI's requests by wrk with one thread on the same {CORES} cores. Server process: processor time of "
        "the process that listens, for each text.",
        f"By phase, in µs, each measured by itself in one process without sockets or workers, the best of {TRIES}: {shown}. What remains of the live figure beside the "
        "kernel's work for sockets and pipes is HTTP, and caches that the workers have emptied.",
        f"The clients' processor time is taken out by dividing the rate by the share of the {CORES} cores that wrk left. The runtime alone is {CORES} processes of "
        f"one thread, with the best size of runs: {1e3 * middle(offline):.2f} ms a text.",
    ]


# The child: the server process alone.


def _best(work: Callable[[int], object], times: int) -> float:
    """Return the least processor time of a call of `work`, in microseconds."""
    least = float("inf")
    for _ in range(TRIES):
        began = time.thread_time()
        for number in range(times):
            work(number)
        least = min(least, (time.thread_time() - began) / times)
    return 1e6 * least


class Clients:
    """Clients of an encoder: each sends its next text when the one before is answered."""

    def __init__(self, encoder: Encoder, texts: Sequence[str]) -> None:
        self._encoder, self._texts = encoder, texts
        self._loop = asyncio.get_running_loop()

    async def run(self, clients: int, total: int) -> float:
        """Send so many texts; return the processor time of a text, in microseconds."""
        self._left, self._open = total, total
        self._over = self._loop.create_future()
        began = time.thread_time()
        for _ in range(clients):
            self._next()
        await self._over
        return 1e6 * (time.thread_time() - began) / total

    def _next(self) -> None:
        if self._left:
            self._left -= 1
            text = self._texts[self._left % len(self._texts)]
            if self._encoder.encode_one(text, self._done, door="bench") is None:
                raise RuntimeError(f"{text!r:.80} cannot be tokenized at once")

    def _done(self, found: Encoded | WeirError) -> None:
        self._open -= 1
        if self._open:
            self._loop.call_soon(self._next)
        else:
            self._over.set_result(None)


async def phases(clients: int, total: int) -> dict[str, float]:
    """Return the microseconds of each phase."""
    checkpoint, texts = read_checkpoint(model_directory()), sample()
    bodies = [json.dumps({"input": text, "model": MODEL}).encode() for text in texts]
    vector = np.random.default_rng(0).standard_normal((1, 384)).astype(np.float32)
    executor = FakeExecutor(lambda items: [vector[0]] * len(items), workers=CORES)
    tokenizer = checkpoint.tokenizer()
    tokenizer.encode(texts, max_length=checkpoint.max_length)

    def tokenise(number: int) -> object:
        return tokenizer.at_once(
            [texts[number]], max_length=checkpoint.max_length, truncate=True, tokenize_options=NO_TOKENIZE_OPTIONS
        )

    settings: dict[str, Any] = {
        "max_batch_size": 32,
        "max_batch_cost": BUDGET,
        "padded": True,
        "max_padding": BUDGET / 16,
    }
    async with Service(
        TextEncoder, params={"directory": str(model_directory())}, executor=executor, **settings
    ) as service:
        encoder = Encoder(
            service, tokenizer, dimensions=384, max_length=checkpoint.max_length, name=MODEL,
            facts=ModelFacts(tasks=(TextTask.EMBED,)),
        )  # fmt: skip
        context = EmbeddingContext({MODEL: encoder}, HttpSettings(), 1024, TextCounts())
        exchange = TextExchange(context, "bench")
        OPENAI.read(exchange, [], bodies[0])
        asking = Clients(encoder, texts)
        through = []
        for _ in range(TRIES):
            through.append(await asking.run(clients, total))
            executor.batches.clear()
        found = {
            "parse": _best(lambda number: OPENAI.read(TextExchange(context, "bench"), [], bodies[number]), len(bodies)),
            "tokenise": _best(tokenise, len(texts)),
            "format": _best(lambda number: OPENAI.write(exchange, Encoded(vector, [9], [False])), len(texts)),
        }
        encoder.close()
    return {**found, "queue": min(through) - found["tokenise"]}


PART = Part(
    "texts",
    "What a text costs beside its computation",
    "The server process by phase; requests of one text, of 16 and of 64; int8; the workers against the runtime alone.",
    lambda rounds: 3 + rounds,
    measure,
)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(phases(int(sys.argv[1]), int(sys.argv[2])))))
