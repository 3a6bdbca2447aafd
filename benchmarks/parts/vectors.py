"""Sentence vectors over HTTP, one text a request, beside infinity, sentence-transformers, and the same runtime without a server.

The child `PRECISION PROCESSES THREADS SECONDS [DEVICE RUNTIME DIRECTORY]` is that runtime: each process encodes all texts, once and then
until SECONDS are over. It prints texts per second of all processes together for each size of a run.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.servers import Server, ask_own, load
from benchmarks.harness.texts import (
    CORES,
    INFINITY,
    INT8,
    ONE_WORKER,
    SENTENCE_TRANSFORMERS,
    WEIR,
    described,
    infinity,
    model_directory,
    sample,
    sentence_transformers,
    vector_of,
    weir,
    write_bodies,
)
from weir.embedding.model import TextEncoder

CLIENTS = (1, 16, 64)
MANY = CLIENTS[1:]
SERVERS = (WEIR, ONE_WORKER, INT8, INFINITY, SENTENCE_TRANSFORMERS)
COMPARED = 64  # texts whose vectors are compared
LAYOUTS = {f"one process of {CORES} threads": (1, CORES), f"{CORES} processes of one thread": (CORES, 1)}
PATIENCE = 20.0  # seconds that servers get to come to rest
TRIES = 8  # sizes and layouts that are tried without a server, in one round


class Seen(NamedTuple):
    """What was measured, by server and clients, and by precision and way where there was no server; a number for each round."""

    served: defaultdict[tuple[str, int], defaultdict[str, list[float]]]
    offline: defaultdict[str, defaultdict[str, list[float]]]


def measure(run: Run) -> Result:
    """Alternate the servers round by round; each number of clients in turn."""
    texts = sample()
    seen = Seen(defaultdict(lambda: defaultdict(list)), defaultdict(lambda: defaultdict(list)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        bodies = write_bodies(texts, Path(folder) / "bodies")
        servers = [running.enter_context(server) for server in _servers(folder)]
        vectors = {server.name: _vectors(server, texts[:COMPARED]) for server in servers}
        for turn in range(run.rounds):
            for clients in CLIENTS:
                for server in rotated(servers, turn):
                    _rest(servers)
                    _one(run, server, clients, bodies, seen)
            _rest(servers)
            _offline(run, seen, rotated(list(LAYOUTS), turn))
    return _result(seen, vectors, texts)


def _rest(servers: Sequence[Server]) -> None:
    """Wait until no server computes: some still do for a while when nobody waits for their answers any more."""
    end = time.monotonic() + PATIENCE
    busy = True
    while busy and time.monotonic() < end:
        before = _used(servers)
        time.sleep(0.5)
        busy = _used(servers) - before > 0.05


def _used(servers: Sequence[Server]) -> float:
    return sum(used.front_seconds + used.worker_seconds for used in (server.usage() for server in servers))


def _servers(cache: str) -> list[AbstractContextManager[Server]]:
    """With a cache of its own Weir measures its batches now, as at a first start, and not what it kept of a busier hour."""
    kept = ("--cache", cache)
    return [
        weir(*kept), weir(*kept, "--workers", "1", name=ONE_WORKER), weir(*kept, "--precision", "int8", name=INT8),
        infinity(), sentence_transformers(),
    ]  # fmt: skip


def _vectors(server: Server, texts: list[str]) -> np.ndarray:
    found = np.array([vector_of(server, text) for text in texts])
    unit: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit


def _one(run: Run, server: Server, clients: int, bodies: Path, seen: Seen) -> None:
    before = server.usage()
    done = load(server.url, clients, run.seconds if clients > 1 else run.seconds / 2, bodies=bodies)
    after = server.usage()
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name} with {clients} clients: {done}")
    into = seen.served[server.name, clients]
    into["rate"].append(done.rate)
    into["p50"].append(done.p50)
    into["p99"].append(done.p99)
    into["front"].append((after.front_seconds - before.front_seconds) / done.requests)
    into["worker"].append((after.worker_seconds - before.worker_seconds) / done.requests)
    into["memory"].append(after.memory_bytes)
    run.step(f"{server.name}, {clients} clients: {count(done.rate)} sentences/s")


def _offline(run: Run, seen: Seen, layouts: list[str]) -> None:
    for layout in layouts:
        found = ask_own("parts.vectors", "fp32", *LAYOUTS[layout], run.seconds / TRIES * 2)
        for size, rate in found.items():
            seen.offline["fp32"][f"{layout}, {_size(int(size))}"].append(rate)
    run.step(f"without a server: {count(max(rates[-1] for rates in seen.offline['fp32'].values()))} sentences/s")


def _size(run_tokens: int) -> str:
    return "text by text" if run_tokens == 1 else f"runs of up to {run_tokens:,} tokens"


def _result(seen: Seen, vectors: dict[str, np.ndarray], texts: list[str]) -> Result:
    result = Result([
        "clients", "server", "sentences/s", "times infinity", "p50 ms", "p99 ms", "CPU ms front", "CPU ms workers",
    ])  # fmt: skip
    for clients in CLIENTS:
        for name in SERVERS:
            got = seen.served[name, clients]
            times = ratio(got["rate"], seen.served[INFINITY, clients]["rate"])
            result.rows.append([
                str(clients), name, spread(got["rate"], count), f"{times:.2f}", milliseconds(middle(got["p50"])),
                milliseconds(middle(got["p99"])), *(short(middle(got[part]) * 1e3) for part in ("front", "worker")),
            ])  # fmt: skip
            result.values |= {f"{name} {clients}": middle(got["rate"]), f"{name} {clients} p50": middle(got["p50"])}
            result.values[f"{name} {clients} times infinity"] = times
    way = _best(seen)
    result.rows.append(["", f"Weir's runtime, no server: {way}", spread(seen.offline["fp32"][way], count), *[""] * 5])
    _goals(result, seen, way)
    _accuracy(result, vectors)
    _notes(result, seen, texts)
    return result


def _best(seen: Seen) -> str:
    ways = seen.offline["fp32"]
    return max(ways, key=lambda way: middle(ways[way]))


def _goals(result: Result, seen: Seen, way: str) -> None:
    for clients in MANY:
        times = result.values[f"{WEIR} {clients} times infinity"]
        result.goal(f"{clients} clients: at least 2 times infinity's sentences/s", f"{times:.2f}", times >= 2)
    ours, theirs = (seen.served[name, 1]["p50"] for name in (WEIR, INFINITY))
    result.goal(
        "1 client: lower p50 than infinity",
        f"{milliseconds(middle(ours))} ms against {milliseconds(middle(theirs))} ms", ratio(theirs, ours) > 1,
    )  # fmt: skip
    for clients in MANY:
        share = ratio(seen.served[WEIR, clients]["rate"], seen.offline["fp32"][way])
        result.values[f"share of offline {clients}"] = share
        text = f"{clients} clients: at least 0.95 of the runtime without a server"
        result.goal(text, f"{share:.2f}", share >= 0.95)
    for clients in MANY:
        times = ratio(seen.served[INT8, clients]["rate"], seen.served[WEIR, clients]["rate"])
        result.values[f"int8 {clients}"] = times
        result.goal(f"{clients} clients: int8 at least 2 times fp32", f"{times:.2f}", times >= 2)


def _accuracy(result: Result, vectors: dict[str, np.ndarray]) -> None:
    for name, least in ((WEIR, 0.99999), (INT8, 0.98)):
        cosines = (vectors[name] * vectors[SENTENCE_TRANSFORMERS]).sum(axis=1)
        result.goal(
            f"{name}: mean cosine with sentence-transformers at least {least}",
            f"{cosines.mean():.6f} (least {cosines.min():.6f})", bool(cosines.mean() >= least),
        )  # fmt: skip


def _notes(result: Result, seen: Seen, texts: list[str]) -> None:
    memory = ", ".join(f"{name} {middle(seen.served[name, 64]['memory']) / 2**20:.0f}" for name in SERVERS)
    ways = "; ".join(f"{way} {count(middle(rates))}" for way, rates in seen.offline["fp32"].items())
    result.notes += [
        f"all-MiniLM-L6-v2 in fp32 unless said otherwise. {described(texts)}; one text a request, asked for by turns in one order, "
        f"by wrk with one thread on the same {CORES} cores. Every server computes with {CORES} threads. CPU is a sentence's, of the process that "
        "listens and of those below it.",
        f"Without a server the same texts, all of them, become arrays of vectors in processes that do nothing else, with {CORES} threads in all: tokens of "
        f"{TOGETHER['cpu']} at once, then runs of texts of like length. Reading requests and writing answers is not in it. The best of these ways counts, "
        f"sentences/s: {ways}.",
        f"MiB (PSS) after the load: {memory}.",
    ]


RUN_TOKENS = {"cpu": (1, 64, 256, 1024), "gpu": (1024, 4096, 16_384)}  # 1: each text alone
TOGETHER = {"cpu": 64, "gpu": 512}  # texts that are read at once, and then cut into runs by length


def encode_offline() -> None:
    """Measure."""
    precision, processes, threads, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    device, runtime, directory = sys.argv[5:] or ("cpu", "onnx", str(model_directory()))
    kind = "cpu" if device == "cpu" else "gpu"
    params = {
        "directory": directory,
        "precision": precision,
        "threads": threads,
        "devices": [device],
        "runtime": runtime,
    }
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(processes)]
    children = [context.Process(target=_encode, args=(there, params, TOGETHER[kind])) for _, there in ends]
    for child in children:
        child.start()
    for here, _ in ends:
        here.recv()
    found = {}
    for run_tokens in RUN_TOKENS[kind]:
        for here, _ in ends:
            here.send((run_tokens, seconds))
        found[run_tokens] = sum(here.recv() for here, _ in ends)
    for here, _ in ends:
        here.send(None)
    for child in children:
        child.join()
    print(json.dumps(found))


def _encode(line: Connection, params: dict[str, Any], together: int) -> None:
    model, texts = _model(params), sample()
    _run(model, texts[:together])
    line.send("ready")
    while (asked := line.recv()) is not None:
        model.run_tokens, seconds = asked
        passes, began = 0, time.perf_counter()
        while not passes or time.perf_counter() - began < seconds:
            for place in range(0, len(texts), together):
                _run(model, texts[place : place + together])
            passes += 1
        line.send(passes * len(texts) / (time.perf_counter() - began))


def _model(params: dict[str, Any]) -> TextEncoder:
    model = TextEncoder(**params)
    model.load_shared()
    model.worker_index = 0
    model.load()
    return model


def _run(model: TextEncoder, texts: list[Any]) -> None:
    model.predict(model.preprocess_batch(texts))


PART = Part(
    "vectors",
    "Sentence vectors",
    "all-MiniLM-L6-v2 on all cores, single sentences over HTTP from 1, 16 and 64 clients at once, beside infinity and "
    "sentence-transformers behind FastAPI.",
    lambda rounds: rounds * (len(CLIENTS) * len(SERVERS) + 1),
    measure,
)


if __name__ == "__main__":
    encode_offline()
