"""Sentence vectors as a caller gets them over HTTP, in each precision, held against those of sentence-transformers."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.result import Part, Result, Run
from benchmarks.harness.servers import Server
from benchmarks.harness.texts import COLUMNS, Array, compare, sample, sentence_transformers, vector_of, vectors_of, weir

SENTENCES = Path(__file__).parents[1] / "sentences.jsonl"
TEXTS, TOGETHER = 300, 50
PRECISIONS = ("fp32", "fp16", "int8")
ALONE, MANY = "a text a request", f"{TOGETHER} texts a request"


def measure(run: Run) -> Result:
    """Ask each server for the same texts, text by text and many at a time."""
    sentences = [json.loads(line) for line in SENTENCES.read_text().splitlines()]
    texts = sentences + sample(TEXTS - len(sentences))
    with sentence_transformers() as server:
        exact = _alone(server, texts)
    run.step(f"sentence-transformers: {len(exact)} vectors")
    result = Result(["precision", "asked for", *COLUMNS])
    with tempfile.TemporaryDirectory() as cache:
        for precision in PRECISIONS:
            with weir("--cache", cache, "--precision", precision) as server:
                _tell(result, precision, ALONE, _alone(server, texts), exact)
                _tell(result, precision, MANY, _together(server, texts), exact)
            run.step(f"{precision}: done")
    _goals(result)
    result.notes.append(
        f"all-MiniLM-L6-v2; {len(sentences)} sentences of Weir's own documents and {TEXTS - len(sentences)} paragraphs of the standard library's "
        "docstrings, by /v1/embeddings. The rank correlation is Spearman's, of the similarities of all pairs."
    )
    return result


def _alone(server: Server, texts: Sequence[str]) -> Array:
    return _unit([vector_of(server, text) for text in texts])


def _together(server: Server, texts: Sequence[str]) -> Array:
    return _unit(
        [vector for at in range(0, len(texts), TOGETHER) for vector in vectors_of(server, texts[at : at + TOGETHER])]
    )


def _unit(vectors: list[list[float]]) -> Array:
    found = np.array(vectors)
    unit: Array = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit


def _tell(result: Result, precision: str, way: str, found: Array, exact: Array) -> None:
    likeness = compare(found, exact)
    result.rows.append([precision, way, *likeness.shown()])
    for name, value in likeness._asdict().items():
        result.values[f"{precision}, {way}: {name}"] = value


def _goals(result: Result) -> None:
    for precision, what, wished in (("fp32", "least", 0.99999), ("fp16", "least", 0.999), ("int8", "mean", 0.98)):
        found = min(result.values[f"{precision}, {way}: {what}"] for way in (ALONE, MANY))
        result.goal(f"{precision}: {what} cosine at least {wished}", f"{found:.7f}", found >= wished)


PART = Part(
    "agreement",
    "Sentence vectors beside those of sentence-transformers",
    "all-MiniLM-L6-v2 behind `weir embed serve` in each precision: how far its vectors are from those of sentence-transformers, "
    "and how far they rank the texts otherwise.",
    lambda rounds: 1 + len(PRECISIONS),
    measure,
)
