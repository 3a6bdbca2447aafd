"""Finds the passages that answer a question: embeddings find candidates, a reranker orders them.

`python search.py QUESTION [--url URL] [--file TEXTS]`, beside `weir embed serve EMBEDDER RERANKER`.
"""

import argparse
from pathlib import Path
from typing import Any

import httpx
import numpy as np

PASSAGES = Path(__file__).with_name("passages.txt")


def embed(client: httpx.Client, texts: list[str]) -> np.ndarray:
    """Return the unit vectors of texts, one a row."""
    answer = client.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()
    vectors: np.ndarray = np.array([each["embedding"] for each in answer["data"]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def search(client: httpx.Client, passages: list[str], question: str, best: int = 3) -> list[tuple[float, str]]:
    """Return the best passages for a question, each with the reranker's score."""
    vectors = embed(client, [question, *passages])
    nearest = np.argsort(vectors[1:] @ -vectors[0])[:10]
    candidates = [passages[index] for index in nearest]
    asked: dict[str, Any] = {"query": question, "texts": candidates}
    ranked = client.post("/rerank", json=asked).raise_for_status().json()
    return [(each["score"], candidates[each["index"]]) for each in ranked[:best]]


def main() -> None:
    """Print the best passages, the best first."""
    parser = argparse.ArgumentParser(description="Find the passages that answer a question.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000", help="where weir embed serve listens")
    parser.add_argument("--file", type=Path, default=PASSAGES, help="passages, one a line")
    given = parser.parse_args()
    passages = [line for line in given.file.read_text().splitlines() if line.strip()]
    with httpx.Client(base_url=given.url, timeout=60) as client:
        for score, passage in search(client, passages, given.question):
            print(f"{score:6.3f}  {passage}")


if __name__ == "__main__":
    main()
