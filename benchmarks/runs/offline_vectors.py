"""`offline_vectors PRECISION PROCESSES THREADS SECONDS`: texts to vectors without a server, by the runtime that serves them.

Each process encodes all texts again and again: tokens, then runs of texts of like length, of up to so many tokens each.
Prints texts per second of all processes together for each size of a run, as JSON.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.text_load import model_directory, sample
from weir.embedding.model import TextEncoder

RUN_TOKENS = (1, 64, 256, 1024)  # 1: each text alone
TOGETHER = 64  # texts that are read at once, and then cut into runs by length


def main() -> None:
    """Measure."""
    precision, processes, threads, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(processes)]
    children = [context.Process(target=_encode, args=(there, precision, threads)) for _, there in ends]
    for child in children:
        child.start()
    for here, _ in ends:
        here.recv()
    found = {}
    for run_tokens in RUN_TOKENS:
        for here, _ in ends:
            here.send((run_tokens, seconds))
        found[run_tokens] = sum(here.recv() for here, _ in ends)
    for here, _ in ends:
        here.send(None)
    for child in children:
        child.join()
    print(json.dumps(found))


def _encode(line: Connection, precision: str, threads: int) -> None:
    model, texts = _model(precision, threads), sample()
    _run(model, texts[:TOGETHER])
    line.send("ready")
    while (asked := line.recv()) is not None:
        model.run_tokens, seconds = asked
        done, place, began = 0, 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            _run(model, texts[place : place + TOGETHER])
            done += len(texts[place : place + TOGETHER])
            place = (place + TOGETHER) % len(texts)
        line.send(done / (time.perf_counter() - began))


def _model(precision: str, threads: int) -> TextEncoder:
    model = TextEncoder(str(model_directory()), precision=precision, threads=threads, devices=["cpu"])
    model.load_shared()
    model.worker_index = 0
    model.load()
    return model


def _run(model: TextEncoder, texts: list[Any]) -> None:
    model.predict(model.preprocess_batch(texts))


if __name__ == "__main__":
    main()
