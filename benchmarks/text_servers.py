"""Servers of sentence vectors: Weir in a few forms, and its peers. All have as many threads in total: one for each core."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from benchmarks.peer_setup import python_of, script
from benchmarks.servers import Server, serving
from benchmarks.text_load import MODEL, model_directory

WEIR, ONE_WORKER, INT8 = "Weir", "Weir, one worker of all threads", "Weir, int8"
INFINITY, SENTENCE_TRANSFORMERS = "infinity_emb", "sentence-transformers, FastAPI"
CORES = psutil.cpu_count() or 1
_BODY = json.dumps({"input": "First do it", "model": MODEL}).encode()


def weir_texts(directory: Path, *flags: str) -> list[str]:
    """Return the command that serves the model as a user would: workers and threads chosen by itself."""
    return [sys.executable, "-m", "weir", "embed", "serve", f"{MODEL}={directory}", "--port", "{port}",
            "--host", "127.0.0.1", "--log-level", "warning", *flags]  # fmt: skip


def serving_texts(name: str, command: list[str], path: str = "/v1/embeddings") -> AbstractContextManager[Server]:
    """Run `command` until the end of the block, from its first answer on. Models are measured before their first start: that takes a while."""
    return serving(name, command, path=path, body=_BODY, expected=None, start_seconds=240.0)


def weir(*flags: str, name: str = WEIR) -> AbstractContextManager[Server]:
    """Serve with Weir."""
    return serving_texts(name, weir_texts(model_directory(), "--device-map", "cpu", *flags))


def infinity() -> AbstractContextManager[Server]:
    """Serve with infinity: torch, as it is started on a CPU."""
    command = str(Path(python_of("infinity")).with_name("infinity_emb"))
    told = ["--model-id", str(model_directory()), "--served-model-name", MODEL, "--engine", "torch", "--device", "cpu",
            "--dtype", "float32", "--no-bettertransformer", "--no-vector-disk-cache", "--host", "127.0.0.1",
            "--port", "{port}", "--log-level", "error"]  # fmt: skip
    return serving_texts(INFINITY, [*_bounded(), command, "v2", *told], "/embeddings")


def sentence_transformers() -> AbstractContextManager[Server]:
    """Serve with sentence-transformers, as one would write it."""
    # -P: beside the script is one called triton, which torch would import.
    told = ["--directory", str(model_directory()), "--port", "{port}", "--threads", str(CORES)]
    peer = "sentence-transformers"
    return serving_texts(
        SENTENCE_TRANSFORMERS, [*_bounded(), python_of(peer), "-P", script("sentence_vectors.py"), *told]
    )


def _bounded() -> list[str]:
    """Torch takes a thread for each core; nothing is fetched."""
    return ["env", f"OMP_NUM_THREADS={CORES}", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false", "DO_NOT_TRACK=1"]


def vector_of(server: Server, text: str) -> list[float]:
    """Ask for one vector."""
    return _vectors(server, text)[0]


def vectors_of(server: Server, texts: Sequence[str]) -> list[list[float]]:
    """Ask for the vectors of several texts in one request."""
    return _vectors(server, list(texts))


def _vectors(server: Server, asked: str | list[str]) -> list[list[float]]:
    answer = json.loads(server.ask(json.dumps({"input": asked, "model": MODEL}).encode()))
    return [each["embedding"] for each in answer["data"]]
