"""`offline_vectors PRECISION PROCESSES THREADS SECONDS [DEVICE RUNTIME DIRECTORY]`: texts to vectors without a server, by the runtime that serves them.

Each process encodes all texts, once and then until SECONDS are over: tokens, then runs of texts of like length, of up to so many tokens each.
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

RUN_TOKENS = {"cpu": (1, 64, 256, 1024), "gpu": (1024, 4096, 16_384)}  # 1: each text alone
TOGETHER = {"cpu": 64, "gpu": 512}  # texts that are read at once, and then cut into runs by length


def main() -> None:
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


if __name__ == "__main__":
    main()
