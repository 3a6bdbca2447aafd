"""Servers of sentence vectors, ours and the peers'; the texts they are asked for; how far their vectors are from the exact ones; and what they did when."""

import ast
import json
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.harness.servers import Server, ask, python_of, script, serving
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.texts import TokenRule
from weir.text_server.server_settings import INSTALL, installed_model

TEXTS = 512  # asked for by turns: every server has them in the same order, again and again
STRATA = 8
MODEL = "all-minilm-l6-v2"


def model_directory() -> Path:
    """Return the folder of the model that is measured; end with how to install it."""
    folder = installed_model()
    if folder is None:
        raise SystemExit(f"the model that is measured is not installed: {INSTALL}")
    return folder


def sample(count: int = TEXTS) -> list[str]:
    """Return so many of the paragraphs of the standard library's docstrings, always the same, in an order by chance, but such that every
    STRATA in a row are of as many kinds of length: who gets on less far has not had shorter ones."""
    chance = random.Random(0)
    found = sorted(chance.sample(paragraphs(), count), key=len)
    kinds = [found[count * place // STRATA : count * (place + 1) // STRATA] for place in range(STRATA)]
    for kind in kinds:
        chance.shuffle(kind)
    rows = [[text for text in row if text is not None] for row in zip_longest(*kinds)]
    return [text for row in rows for text in chance.sample(row, len(row))]


def write_bodies(texts: Sequence[str], file: Path, **more: Any) -> Path:
    """Write a request for the vector of each text, one a line, in OpenAI's words and `more`."""
    file.write_text("".join(json.dumps({"input": text, "model": MODEL, **more}) + "\n" for text in texts))
    return file


SENTENCES = Path(__file__).parents[1] / "sentences.jsonl"


def sentences() -> list[str]:
    """Return the single sentences, of Weir's own documents."""
    return [json.loads(line) for line in SENTENCES.read_text().splitlines()]


def lengths(texts: Sequence[str]) -> list[int]:
    """Return how many tokens the model reads of each text, in order of length."""
    checkpoint = read_checkpoint(model_directory())
    found = checkpoint.tokenizer().encode(texts, TokenRule(checkpoint.max_length))
    return sorted(len(each.ids) // 4 for each in found if not isinstance(each, Exception))


def described(texts: Sequence[str]) -> str:
    """Say how long the texts are."""
    counts = lengths(texts)
    return (
        f"{len(texts)} paragraphs of the standard library's docstrings, of {counts[0]} to {counts[-1]} tokens, "
        f"{sum(counts) / len(counts):.1f} on average"
    )


FEWEST_LETTERS = 8


def paragraphs() -> list[str]:
    """Return all of them, each once, in the order of the files' names."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = (text for file in sorted(folder.glob("*.py")) for text in _of(file))
    return list(dict.fromkeys(found))


def _of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for text in (ast.get_docstring(node) or "").split("\n\n"):
                words = " ".join(text.split())
                if len(words) >= FEWEST_LETTERS:
                    yield words


WEIR, ONE_WORKER, INT8 = "Weir", "Weir, one worker of all threads", "Weir, int8"
INFINITY, SENTENCE_TRANSFORMERS, VLLM = "infinity_emb", "sentence-transformers, FastAPI", "vLLM"
OPTIMUM = "infinity_emb, optimum"
INFINITY_ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("--engine", "torch", "--no-bettertransformer"),
    "bettertransformer": ("--engine", "torch", "--bettertransformer"),
    "optimum": ("--engine", "optimum"),
}
CORES = psutil.cpu_count() or 1
_BODY = json.dumps({"input": "First do it", "model": MODEL}).encode()


def weir_texts(directory: Path, *flags: str) -> list[str]:
    """Return the command that serves the model as a user would: workers and threads chosen by itself."""
    return [sys.executable, "-m", "weir", "embed", "serve", f"{MODEL}={directory}", "--port", "{port}",
            "--host", "127.0.0.1", "--log-level", "warning", *flags]  # fmt: skip


def serving_texts(
    name: str, command: list[str], path: str = "/v1/embeddings", body: bytes = _BODY
) -> AbstractContextManager[Server]:
    """Run `command` until the end of the block, from its first answer on. Models are measured before their first start: that takes a while."""
    return serving(name, command, path=path, body=body, expected=None, start_seconds=240.0)


def weir(*flags: str, name: str = WEIR) -> AbstractContextManager[Server]:
    """Serve with Weir."""
    return serving_texts(name, weir_texts(model_directory(), "--device-map", "cpu", *flags))


def infinity(
    engine: str = "torch", directory: Path | None = None, *, name: str = INFINITY, path: str = "/embeddings", body: bytes = _BODY
) -> AbstractContextManager[Server]:  # fmt: skip
    """Serve with an engine of infinity's, as it is started on a CPU."""
    peer = "infinity-optimum" if engine == "optimum" else "infinity"
    command = str(Path(python_of(peer)).with_name("infinity_emb"))
    # It takes the path of an ONNX file for its name, which is so in the model's own folder only; it keeps what it makes of the file by the model's name.
    inside = [] if directory is None else [f"--chdir={directory}", f"HF_HUB_CACHE={directory}.hub"]
    model = model_directory() if directory is None else "."
    told = ["--model-id", str(model), "--served-model-name", MODEL, *INFINITY_ENGINES[engine], "--device", "cpu",
            "--dtype", "float32", "--no-vector-disk-cache", "--host", "127.0.0.1",
            "--port", "{port}", "--log-level", "error"]  # fmt: skip
    return serving_texts(name, ["env", *inside, *bounded(), command, "v2", *told], path, body)


def vllm() -> AbstractContextManager[Server]:
    """Serve with vLLM's pooling runner on CPUs, which compiles the model at its start."""
    told = f"--runner pooling --served-model-name {MODEL} --dtype float32 --host 127.0.0.1 --port {{port}}".split()
    quiet = ["VLLM_NO_USAGE_STATS=1", "VLLM_LOGGING_LEVEL=ERROR", "VLLM_CPU_KVCACHE_SPACE=1"]
    program = [python_of("vllm"), "-P", script("vllm_server.py"), "serve", str(model_directory())]
    return serving_texts(VLLM, [*bounded(), *quiet, *program, *told])


def sentence_transformers(
    backend: str = "torch", directory: Path | None = None, *, name: str = SENTENCE_TRANSFORMERS, ranks: bool = False
) -> AbstractContextManager[Server]:
    """Serve with sentence-transformers, as one would write it; with `ranks` a cross-encoder."""
    # -P: beside the script is one called triton, which torch would import.
    model, peer = directory or model_directory(), "sentence-transformers" if backend == "torch" else PREPARED_BY
    told = ["--directory", str(model), "--port", "{port}", "--threads", str(CORES), "--backend", backend]
    command = [*bounded(), python_of(peer), "-P", script("sentence_vectors.py"), *told]
    if ranks:
        return serving_texts(name, [*command, "--ranks"], "/rerank", rank_body(("First do it",)))
    return serving_texts(name, command)


def bounded() -> list[str]:
    """Torch takes a thread for each core; nothing is fetched."""
    return ["env", f"OMP_NUM_THREADS={CORES}", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false", "DO_NOT_TRACK=1"]


PREPARED_BY = "sentence-transformers-onnx"  # the environment that has what writes ONNX files


def prepared(place: Path) -> Path:
    """Write what the peers need of the model, see peers/prepare_models.py; return the folder with it."""
    folder = place / "prepared"
    folder.mkdir()
    ask([*bounded(), python_of(PREPARED_BY), "-P", script("prepare_models.py"), str(model_directory()), str(folder)])
    return folder


def write_ranker(folder: Path) -> Path:
    """Make `folder`, a cross-encoder with the network of the model and a random classifier, which takes as long as a trained one; return it."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model_directory(), folder, ignore=shutil.ignore_patterns("modules.json", "*sentence*"))
    weights = {f"bert.{name}": array for name, array in load_file(folder / "model.safetensors").items()}
    width = weights["bert.pooler.dense.bias"].size
    random_row = np.random.default_rng(0).normal(0.0, 0.02, (1, width)).astype(np.float32)
    weights |= {"classifier.weight": random_row, "classifier.bias": np.zeros(1, np.float32)}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}, "label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rank_body(documents: Sequence[str], query: str = "How is a batch cut?") -> bytes:
    """Return a request that ranks documents, in infinity's words."""
    return json.dumps({"model": MODEL, "query": query, "documents": list(documents)}).encode()


def vectors_of(server: Server, texts: Sequence[str]) -> list[list[float]]:
    """Ask for the vectors of some texts in one request; of a single one as clients do that have one only."""
    body = {"input": texts[0] if len(texts) == 1 else list(texts), "model": MODEL}
    answer = json.loads(server.ask(json.dumps(body).encode()))
    return [each["embedding"] for each in answer["data"]]


Array = NDArray[Any]


class Likeness(NamedTuple):
    """What `compare` found."""

    mean: float  # of the cosines of each vector with the exact one
    least: float
    ranked: float  # Spearman's rank correlation, of the similarities of all pairs
    nearest: float  # the share of texts whose nearest stays the nearest

    def shown(self) -> list[str]:
        """Return the cells of COLUMNS."""
        return [f"{self.mean:.6f}", f"{self.least:.6f}", f"{self.ranked:.4f}", f"{100 * self.nearest:.1f} %"]


COLUMNS = ["cosine (mean)", "(least)", "rank correlation", "nearest is the same"]


def compare(found: Array, exact: Array) -> Likeness:
    """Compare vectors, one a row."""
    from scipy.stats import spearmanr

    cosines = (found * exact).sum(axis=1)
    mine, theirs = found @ found.T, exact @ exact.T
    pairs = np.triu_indices(len(found), 1)
    ranked = spearmanr(mine[pairs], theirs[pairs]).statistic
    for similar in (mine, theirs):
        np.fill_diagonal(similar, -1)
    nearest = (mine.argmax(axis=1) == theirs.argmax(axis=1)).mean()
    return Likeness(float(cosines.mean()), float(cosines.min()), float(ranked), float(nearest))
