"""The graph of a sentence encoder on one CPU thread: in other forms, and in each precision; how far its vectors and rankings are from the exact ones."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result import Result, ratio
from benchmarks.harness.rounds import Measurements, Rounds, spreads
from benchmarks.harness.texts import COLUMNS, compare, paragraphs
from weir.errors import SettingsError
from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.graph import FUSED as FUSED_DOMAIN
from weir.text_models.graph import Numbers
from weir.text_models.graph.layers import PARTS, EncoderLayers
from weir.text_models.texts import TokenRule

Array = NDArray[Any]
TEXTS, MOST_TOKENS, TOGETHER = 96, 256, 8
PLAIN, FUSED, FILLED, OURS, FP16, INT8 = (
    "fp32, operator by operator",
    "fp32, as onnxruntime fuses",
    "fp32, padding in all layers",
    "fp32, ours",
    "fp16, ours",
    "int8, ours",
)
ALONE, SORTED, MIXED = "one by one", f"by {TOGETHER}", f"by {TOGETHER} in any order"
WAYS = {ALONE: 1, SORTED: TOGETHER, MIXED: TOGETHER}


def _start(stack: ExitStack) -> Mapping[str, Any]:
    texts = _texts()
    mixed = Random(1).sample(texts, len(texts))
    with tempfile.TemporaryDirectory() as folder:
        sessions = _sessions(Path(folder))
    return {form: (session, texts, mixed) for form, session in sessions.items()}


def _one(contender: Any, way: str, seconds: float) -> dict[str, float]:
    session, texts, mixed = contender
    began = time.thread_time()  # the CPU's time, whoever else is there
    encode(session, mixed if way == MIXED else texts, WAYS[way])
    return {"rate": len(texts) / (time.thread_time() - began)}


def _vectors(contenders: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
    """Return the vectors of every form, and the texts' lengths."""
    vectors = {form: encode(session, texts, TOGETHER) for form, (session, texts, _) in contenders.items()}
    return vectors, sorted(len(text) for text in contenders[PLAIN][1])


def _conclude(result: Result, measured: Measurements) -> None:
    vectors, lengths = measured.prepared
    result.columns += COLUMNS
    for row, (form, found) in zip(result.rows, vectors.items(), strict=True):
        likeness = compare(found, vectors[PLAIN])
        row += likeness.shown()
        result.values |= {f"{form} cosine": likeness.mean, f"{form} rank correlation": likeness.ranked}
    for way in (ALONE, SORTED):
        result.at_least(f"int8 at least 2 times fp32, {way}", measured.times(INT8, OURS, way), 2, "{:.2f} times")
        gained = measured.times(OURS, FUSED, way)
        result.goal(f"ours faster than as onnxruntime fuses, {way}", f"{gained:.2f} times", gained > 1)
    gained = measured.times(OURS, FILLED, SORTED)
    result.goal(f"ours faster than with padding in all layers, {SORTED}", f"{gained:.2f} times", gained > 1)
    gained = ratio(measured.of(OURS, MIXED), measured.of(FILLED, SORTED))
    result.goal(f"ours {MIXED} faster than that {SORTED}", f"{gained:.2f} times", gained > 1)
    result.at_least("int8: mean cosine at least 0.98", result.values[f"{INT8} cosine"], 0.98, "{:.4f}")
    result.notes.append(
        f"{len(lengths)} paragraphs of docstrings of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), one thread; "
        "sentences per second of its CPU time."
    )


def encode(session: Any, texts: Sequence[Array], together: int) -> Array:
    """Return the vectors of texts, in their order, so many in a run."""
    return np.concatenate(
        [_encode(session, texts[start : start + together]) for start in range(0, len(texts), together)]
    )


def _encode(session: Any, texts: Sequence[Array]) -> Array:
    ids = np.zeros((len(texts), max(map(len, texts))), dtype=np.int32)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    feeds = {"ids": ids, "mask": mask, "types": np.zeros_like(ids), "pool": mask.astype(np.float32)}
    vectors: Array = session.run(["vectors"], feeds)[0]
    return vectors


def _texts() -> list[Array]:
    found = _checkpoint().tokenizer().encode(paragraphs()[::37][:TEXTS], TokenRule(MOST_TOKENS))
    texts: list[Array] = [np.frombuffer(each.ids, dtype="<i4") for each in found if not isinstance(each, Exception)]
    return sorted(texts, key=len)


def _checkpoint() -> Any:
    from weir.text_models.checkpoint.reading import read_checkpoint
    from weir.text_server.server_settings import INSTALL, installed_model

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = installed_model()
    if folder is None:
        raise SettingsError(f"the model that is measured is not installed: {INSTALL}")
    return read_checkpoint(folder)


def _sessions(folder: Path) -> dict[str, Any]:
    from weir.text_models.graph.building import build

    checkpoint, recipe = _checkpoint(), Recipe(Pooling.MEAN, normalize=True)
    graphs = {}
    with built_as(Plain, PlainNumbers):
        graphs[PLAIN] = build(checkpoint, recipe)
    with built_as(Fused):
        graphs[FUSED] = build(checkpoint, recipe)
    with built_as(Filled):
        graphs[FILLED] = build(checkpoint, recipe)
    for form, precision in ((OURS, Precision.FP32), (FP16, Precision.FP16), (INT8, Precision.INT8)):
        graphs[form] = build(checkpoint, Recipe(Pooling.MEAN, normalize=True, precision=precision))
    return {
        form: _open(graph, folder / str(place), as_it_is=form in (PLAIN, FUSED))
        for place, (form, graph) in enumerate(graphs.items())
    }


def _open(graph: Any, folder: Path, as_it_is: bool) -> Any:
    import onnxruntime

    from weir.text_models.graph.building import write

    folder.mkdir()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if as_it_is:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(str(write(graph, folder)), options, providers=["CPUExecutionProvider"])


_FLOAT = 1  # onnx.TensorProto's number


class Filled(EncoderLayers):
    """With padding in all layers, as a GPU computes it."""

    def __init__(self, *given: Any, device: str, **told: Any) -> None:
        super().__init__(*given, device="cuda", **told)

    def _add_and_normalize(self, value: str, dense: str, norm: str) -> None:
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        self.value = self._norm(self._assembly.add("Sum", out, missing, self.value), norm)


class Plain(Filled):
    """Attention in single operators, as exporters write it."""

    def _attend(self, name: str) -> str:
        add, shape = self._assembly.add, self._architecture
        width = shape.hidden_size // shape.heads
        apart = self._assembly.constant([0, 0, shape.heads, width], "int64")
        parts = []
        for part, order in zip(PARTS, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
            weight, bias = self._weights[f"{name}{part}.weight"], self._weights[f"{name}{part}.bias"]
            value = self._numbers.dense(self.value, name + part, weight, bias, "identity")
            parts.append(add("Transpose", add("Reshape", value, apart), perm=order))
        query, key, value = parts
        scores = add("Div", add("MatMul", query, key), self._assembly.constant(np.sqrt(width), "float32"))
        real = add("Unsqueeze", add("Cast", self._mask, to=_FLOAT), self._assembly.constant([1, 2], "int64"))
        missing = add("Sub", self._assembly.constant(1, "float32"), real)
        scores = add("Add", scores, add("Mul", missing, self._assembly.constant(-1e9, "float32")))
        seen = add("Transpose", add("MatMul", add("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        return add("Reshape", seen, self._assembly.constant([0, 0, shape.hidden_size], "int64"))


class PlainNumbers(Numbers):
    """Gelu in single operators too."""

    def dense(
        self, value: str, name: str, weight: np.ndarray, bias: np.ndarray | None, activation: str, ranges: np.ndarray | None = None
    ) -> str:  # fmt: skip
        add, constant = self._assembly.add, self._assembly.constant
        bias = np.zeros(len(weight)) if bias is None else bias
        out = add("Add", add("MatMul", value, self.matrix(f"{name}.weight", weight)), self.vector(f"{name}.bias", bias))
        if activation != "gelu":
            return out
        half = add("Erf", add("Div", out, constant(np.sqrt(2), "float32")))
        return add("Mul", add("Mul", out, add("Add", half, constant(1, "float32"))), constant(0.5, "float32"))


class Fused(Filled):
    """With onnxruntime's SkipLayerNormalization, as its optimiser writes it."""

    def _add_and_normalize(self, value: str, dense: str, norm: str) -> None:
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        inputs = (out, self.value, *self._scales(norm), missing)
        self.value = self._assembly.add(
            "SkipLayerNormalization", *inputs, domain=FUSED_DOMAIN, epsilon=self._architecture.epsilon
        )


@contextmanager
def built_as(encoder: type[EncoderLayers], numbers: type[Numbers] = Numbers) -> Iterator[None]:
    """Have graphs built in this form meanwhile."""
    with (
        patch("weir.text_models.graph.building.EncoderLayers", encoder),
        patch("weir.text_models.graph.building.Numbers", numbers),
    ):
        yield


GRAPHS = Rounds(
    "graphs",
    "Graphs of sentence encoders",
    "all-MiniLM-L6-v2 as an ONNX graph in several forms and precisions.",
    start=_start,
    one=_one,
    prepare=_vectors,
    contenders=(PLAIN, FUSED, FILLED, OURS, FP16, INT8),
    cases=tuple(WAYS),
    heads=("graph",),
    columns=tuple(spreads(f"sentences/s {way}", case=way) for way in WAYS),
    conclude=_conclude,
    progress=("rate", "{:,.0f} sentences/s".format),
    row_each=True,
)
