"""What a text costs beside its computation: the server process by phase, requests of one text and of many, int8, workers against the runtime alone; and the
peers, see text_peers.py.

The child `CLIENTS TEXTS KIND` is the server process without sockets and without workers: it prints the microseconds of processor time of each phase for a text.
"""

import asyncio
import json
import resource
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.harness.reference import loop_seconds
from benchmarks.harness.result import Part, Result, Run, count, middle, short
from benchmarks.harness.rounds import folder
from benchmarks.harness.servers import Load, Server, ask_own, load, serving, weir_command
from benchmarks.harness.texts import (
    CORES,
    MODEL,
    WEIR,
    described,
    lengths,
    model_directory,
    sample,
    sentences,
    weir,
    write_bodies,
)
from benchmarks.parts import text_peers
from weir import Service
from weir.errors import WeirError
from weir.protocols import HttpSettings
from weir.testing import FakeExecutor
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TextEncoder
from weir.text_models.packing import written_numbers
from weir.text_models.texts import TokenRule
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import HttpExchange, HttpWork
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols.openai import embeddings
from weir.text_server.texts import Encoded, TextFacts, TextQuery, TextTask
from weir.text_server.tokenizing import TokenizerThreads

CLIENTS = (1, 16, 64)
MOST_MICROSECONDS = 150
MOST_KSERVE = 1.5  # times the cost of a KServe request whose answer is as large
KSERVE = "KServe"
TOKENS = 20
KSERVE_BODY = json.dumps(
    {"inputs": [{"name": "TOKENS", "datatype": "INT32", "shape": [1, TOKENS], "data": list(range(TOKENS))}]}
)
LOOP = "loop"
PHASES = ("parse", "tokenise", "queue", "format")
PARAGRAPH, SENTENCE = "paragraph", "sentence"
KINDS = {PARAGRAPH: sample, SENTENCE: sentences}
OURS = ("fp32", "int8")
SMALL, MIDDLE, LARGE = 1, 16, 64  # texts of a request
LAYOUT = (CORES, 1)  # of the runtime without a server: processes, and threads of each
BUDGET = 256  # tokens of a batch in the child
TRIES, CHILD_TEXTS = 20, 512
QUERY = TextQuery("bench", as_json=True)
PATIENCE = 10.0  # seconds that servers get to come to rest


class Seen(NamedTuple):
    """What one load came to. Processor times are in seconds for each text."""

    texts: float  # in a second
    front: float
    kernel: float  # of the front's, what the system spent for it on sockets and pipes
    workers: float
    alone: float  # texts in a second, with the clients' processor time taken out
    loops: float  # the front's time as a multiple of the loop in reference.py


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
    loop = loop_seconds()
    done = load(server.url, clients, seconds, bodies=bodies)
    loop = (loop + loop_seconds()) / 2
    texts = size * _good(server, done)
    spent = (_asking() - asking) / (done.seconds * CORES)
    front = (_cpu_seconds(server.front.pid) - front) / texts
    return Seen(
        texts / done.seconds, front,
        (server.front.cpu_times().system - kernel) / texts, (sum(map(_cpu_seconds, workers)) - computing) / texts, texts / done.seconds / (1.0 - spent), front / loop,
    )  # fmt: skip


def _asking() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _good(server: Server, done: Load) -> int:
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name}: {done}")
    return done.requests


def _rest(servers: Iterable[Server]) -> None:
    """Wait until no server computes: some still do for a while when nobody waits for their answers any more."""
    busy, end = True, time.monotonic() + PATIENCE
    while busy and time.monotonic() < end:
        before = [_everything(server) for server in servers]
        time.sleep(0.2)
        busy = sum(map(_everything, servers)) - sum(before) > 0.02


def _everything(server: Server) -> float:
    return _cpu_seconds(server.front.pid) + sum(map(_cpu_seconds, _workers_of(server)))


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
        ["texts/s", *map(str, CLIENTS), "server process, µs a text", "in the kernel, µs", "workers, ms a text"]
    )
    phases = {kind: ask_own("parts.texts", "64", CHILD_TEXTS, kind, one_thread=True) for kind in KINDS}
    run.step(f"phases of a sentence: {sum(phases[SENTENCE][name] for name in PHASES):.0f} µs")
    offline: list[float] = []
    with ExitStack() as whole:
        place = folder(whole)
        models, lacking = text_peers.prepare(place)
        run.step(f"the peers' models: {lacking or 'made'}")
        with ExitStack() as stack:
            servers, missing = _start(stack, place, models)
            (place / KSERVE).write_text(KSERVE_BODY + "\n")
            files = _files(place)
            rows = _texts_of_a_batch(servers["fp32"], files[SENTENCE, SMALL])
            kserve = stack.enter_context(_kserve(rows))
            found = _in_rounds(run, servers, files, offline, (kserve, place / KSERVE))
            sizes = len(kserve.ask(KSERVE_BODY.encode())), len(servers["fp32"].ask(_one_body()))
        _show(result, servers, found)
        _conclude(result, found, phases, offline)
        result.notes.append(_compared(rows, *sizes))
        text_peers.note_peers(result, missing, _rates(servers, found), CLIENTS)
        if lacking:
            result.notes.append(f"Rankings, and two outputs from one pass: *not measured: {lacking}*")
        else:
            text_peers.measure_ranking(run, models, place, result)
            text_peers.measure_both(run, models, place, result)
    return result


def _one_body() -> bytes:
    return json.dumps({"input": sentences()[0], "model": MODEL}).encode()


def _compared(rows: int, kserve: int, text: int) -> str:
    """Say what the request of KServe and that of a text have in common, given the rows of a batch and the sizes of their answers in bytes."""
    return (
        f"The KServe request is of {TOKENS} numbers to a model that computes for as long as the network, so that the caches are as cold, "
        f"in batches as large, of up to {rows}. It is answered with as many numbers: {kserve} bytes, a text {text}."
    )


def _texts_of_a_batch(server: Server, bodies: Path) -> int:
    """Return how many texts a batch has with 64 clients, on average."""
    load(server.url, 64, 2.0, bodies=bodies)
    before = _batches(server)
    load(server.url, 64, 2.0, bodies=bodies)
    texts, count = (after - at for after, at in zip(_batches(server), before, strict=True))
    return max(1, round(texts / max(count, 1.0)))


def _batches(server: Server) -> tuple[float, float]:
    """Return how many rows and how many batches there were."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    sums = [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"weir_batch_size_{what}"))
        for what in ("sum", "count")
    ]
    return sums[0], sums[1]


def _kserve(rows: int) -> AbstractContextManager[Server]:
    """Serve a model whose answer is as large as a vector, and that computes for as long as the network, in batches of up to so many `rows`."""
    flags = ("--workers", str(CORES), "--threads", "1", "--max-batch-size", str(rows))
    command = weir_command("benchmarks.models:Numbers", *flags)
    path = "/v2/models/numbers/infer"
    return serving(KSERVE, command, path=path, body=KSERVE_BODY.encode(), expected=None)


def _start(stack: ExitStack, place: Path, models: Path) -> tuple[dict[str, Server], dict[str, str]]:
    """Start our servers and the peers; return them, and why others did not start."""
    ours: dict[str, text_peers.Start] = {
        "fp32": lambda: weir("--cache", str(place)),
        "int8": lambda: weir("--cache", str(place), "--precision", "int8", name="int8"),
    }
    servers = {name: stack.enter_context(start()) for name, start in ours.items()}
    peers, missing = text_peers.started(stack, text_peers.of_vectors(models))
    return servers | peers, missing


def _files(place: Path) -> dict[tuple[str, int], Path]:
    """Return the requests by the kind of their texts, and by how many they have."""
    (own := place / SENTENCE).mkdir()
    files = {(PARAGRAPH, size): _bodies(sample(), size, place) for size in (SMALL, MIDDLE, LARGE)}
    return files | {(SENTENCE, SMALL): _bodies(sentences(), SMALL, own)}


Case = tuple[str, int, int, str]  # server, clients, texts of a request, and their kind


def _cases(servers: Iterable[str]) -> list[Case]:
    cases = [(name, clients, SMALL, PARAGRAPH) for name in servers for clients in CLIENTS]
    cases[len(CLIENTS) : len(CLIENTS)] = [("fp32", clients, SMALL, SENTENCE) for clients in CLIENTS]
    return [*cases, ("fp32", 1, MIDDLE, PARAGRAPH), ("fp32", 1, LARGE, PARAGRAPH)]


def _in_rounds(
    run: Run, servers: Mapping[str, Server], files: Mapping[tuple[str, int], Path], offline: list[float], kserve: tuple[Server, Path]
) -> Measured:  # fmt: skip
    """Put each load on its server in every round, and measure the runtime alone into `offline`."""
    found: Measured = {}
    load(kserve[0].url, 64, 2.0, bodies=kserve[1])
    for name, server in servers.items():
        load(server.url, 16, 2.0, bodies=files[PARAGRAPH, SMALL])
        if name == "fp32":
            load(server.url, 16, 2.0, bodies=files[SENTENCE, SMALL])
    run.step("warm")
    for _ in range(run.rounds):
        for name, clients, size, kind in _cases(servers):
            _rest(servers.values())
            one = seen(servers[name], clients, run.seconds, files[kind, size], size)
            found.setdefault(_key(name, clients, size, kind), []).append(one)
        found.setdefault(KSERVE, []).append(seen(kserve[0], 64, run.seconds, kserve[1], 1))
        rates = ask_own("parts.vectors", "fp32", *LAYOUT, run.seconds / 2)
        offline.append(CORES / max(rates.values()))
        cost = found[_key("fp32", 64, SMALL, SENTENCE)][-1].front
        run.step(f"64 clients: {1e6 * cost:.0f} µs of the server process for a sentence")
    return found


def _show(result: Result, servers: Mapping[str, Server], found: Measured) -> None:
    """Add a row for each server and kind of requests. Of a peer the server process computes too."""
    rows: dict[tuple[str, int, str], list[int]] = {}
    for name, clients, size, kind in _cases(servers):
        rows.setdefault((name, size, kind), []).append(clients)
    for (name, size, kind), numbers in rows.items():
        texts, front, kernel, workers = (
            {each: middle(_of(found, figure, name, each, size, kind)) for each in numbers}
            for figure in ("texts", "front", "kernel", "workers")
        )
        most = max(numbers)
        what = f"{name}, {size} {kind}{'s' if size > 1 else ''} a request"
        cells = [short(1e6 * front[most]), short(1e6 * kernel[most]), short(1e3 * workers[most])]
        if name not in OURS:
            what, cells = name, ["", "", short(1e3 * (front[most] + workers[most]))]
        result.rows.append([what, *(count(texts[each]) if each in texts else "" for each in CLIENTS), *cells])


def _rates(servers: Iterable[str], found: Measured) -> dict[tuple[str, int], list[float]]:
    """Return the texts in a second by server and clients."""
    return {
        (WEIR if name == "fp32" else name, clients): _of(found, "texts", name, clients)
        for name in servers for clients in CLIENTS
    }  # fmt: skip


def _key(name: str, clients: int, size: int, kind: str = PARAGRAPH) -> str:
    return f"{name}, {size} a request, {clients}, {kind}"


def _of(found: Measured, figure: str, name: str, clients: int, size: int = SMALL, kind: str = PARAGRAPH) -> list[float]:
    return [getattr(each, figure) for each in found[_key(name, clients, size, kind)]]


def _share(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return middle([mine / other for mine, other in zip(ours, theirs, strict=True)])


def _conclude(result: Result, found: Measured, phases: Mapping[str, Mapping[str, float]], offline: list[float]) -> None:
    by_phase = [_by_phase(result, found, kind, phases[kind]) for kind in KINDS]
    front = result.values[f"{SENTENCE}: front 64"]
    result.goal(
        f"64 clients, one sentence a request: at most {MOST_MICROSECONDS} µs of the server process", f"{front:.0f} µs",
        front <= MOST_MICROSECONDS,
    )  # fmt: skip
    loops = middle([each.loops for each in found[KSERVE]])
    result.values["KServe: loops 64"] = loops
    result.at_most(
        f"the same as a multiple of a KServe JSON request with as large an answer, both by the loop: at most {MOST_KSERVE}",
        _share(_of(found, "loops", "fp32", 64, kind=SENTENCE), [each.loops for each in found[KSERVE]]), MOST_KSERVE,
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
    tokens = lengths(sentences())
    result.notes += [
        f"{described(sample())}; {len(tokens)} sentences, of {sum(tokens) / len(tokens):.1f}; by wrk on the same {CORES} cores.",
        f"The runtime alone: {1e3 * middle(offline):.2f} ms a text. A KServe JSON request with as large a response takes {loops:.2f} loops.",
        *by_phase,
    ]


def _by_phase(result: Result, found: Measured, kind: str, phases: Mapping[str, float]) -> str:
    """Say what a text of this kind costs by phase at 64 clients, in µs, and keep the figures."""
    loops = middle(_of(found, "loops", "fp32", 64, kind=kind))
    front, kernel = (1e6 * middle(_of(found, figure, "fp32", 64, kind=kind)) for figure in ("front", "kernel"))
    each = {**{name: phases[name] for name in PHASES}, "kernel": kernel}
    result.values |= {
        f"{kind}: front 64": front,
        f"{kind}: loops 64": loops,
        **{f"{kind}: {name}": cost for name, cost in each.items()},
    }
    in_loops = {**{name: phases[name] / phases[LOOP] for name in PHASES}, "kernel": kernel / front * loops}
    shown = ", ".join(f"{name} {cost:.0f} ({in_loops[name]:.2f})" for name, cost in each.items())
    rest, rest_in_loops = front - sum(each.values()), loops - sum(in_loops.values())
    return (
        f"A {kind}, 64 clients: {front:.0f} µs ({loops:.2f} loops): {shown}, the rest {rest:.0f} ({rest_in_loops:.2f})."
    )


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
            if self._encoder.encode_one(text, QUERY, self._done) is None:
                raise RuntimeError(f"{text!r:.80} cannot be tokenized at once")

    def _done(self, found: Encoded | WeirError) -> None:
        self._open -= 1
        if self._open:
            self._loop.call_soon(self._next)
        else:
            self._over.set_result(None)


async def phases(clients: int, total: int, kind: str) -> dict[str, float]:
    """Return the microseconds of each phase for a text of this kind."""
    checkpoint = read_checkpoint(model_directory())
    tokenizer = checkpoint.tokenizer()
    at_once = partial(tokenizer.at_once, rule=TokenRule(checkpoint.max_length))
    tokenizer.encode(KINDS[kind](), TokenRule(checkpoint.max_length))
    texts = [text for text in KINDS[kind]() if at_once([text]) is not None]  # the others have signs that no word has
    bodies = [json.dumps({"input": text, "model": MODEL}).encode() for text in texts]
    vector = np.random.default_rng(0).standard_normal(384).astype(np.float32)
    written = written_numbers(vector)  # as workers do
    executor = FakeExecutor(lambda items: [written] * len(items), workers=CORES)

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
            service, TokenizerThreads(tokenizer), TextShape(384, checkpoint.max_length), name=MODEL, facts=TextFacts(tasks=(TextTask.EMBED,))
        )  # fmt: skip
        context = EmbeddingContext({MODEL: encoder}, HttpSettings(), 1024, TextCounts())

        def read(number: int) -> HttpWork:
            return embeddings.work(HttpExchange(context, embeddings.name, errors=embeddings.errors), [], bodies[number])

        work = read(0)
        asking = Clients(encoder, texts)
        through = []
        for _ in range(TRIES):
            through.append(await asking.run(clients, total))
            executor.batches.clear()
        found = Encoded(np.empty((1, 0), np.float32), [9], [False], written=written)
        least = {
            "parse": _best(read, len(bodies)),
            "tokenise": _best(lambda number: at_once([texts[number]]), len(texts)),
            "format": _best(lambda number: work.write(found), len(texts)),
        }
        encoder.close()
    return {**least, "queue": min(through) - least["tokenise"], LOOP: 1e6 * loop_seconds()}


PART = Part(
    "texts",
    "Overhead per text",
    "all-MiniLM-L6-v2: the time that the server process adds, and the peers with each of their engines.",
    lambda rounds: 3 + 3 * rounds,
    measure,
)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(phases(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))))
