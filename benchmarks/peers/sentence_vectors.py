"""sentence-transformers behind FastAPI, as one would write it: one encoder at a time, on all threads it may use; with `--ranks` a cross-encoder."""

import argparse
import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import CrossEncoder, SentenceTransformer

app = FastAPI()


class Asked(BaseModel):
    """What a body says."""

    input: str
    model: str = ""


class AskedRanking(BaseModel):
    """What a body says of documents that are to be ranked."""

    query: str
    documents: list[str]
    model: str = ""


async def alone(work: Callable[[], Any]) -> Any:
    """Do `work` always in the same thread: each that calls torch would get threads of its own, which spin against the others'."""
    return await asyncio.get_running_loop().run_in_executor(app.state.one, work)


@app.post("/v1/embeddings")
async def embeddings(asked: Asked) -> dict[str, Any]:
    """Answer as OpenAI's does."""
    vector = await alone(partial(app.state.model.encode, asked.input, show_progress_bar=False))
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector.tolist()}]}


@app.post("/rerank")
async def rerank(asked: AskedRanking) -> dict[str, Any]:
    """Answer as infinity's does."""
    ranks = await alone(partial(app.state.model.rank, asked.query, asked.documents, show_progress_bar=False))
    return {"results": [{"index": each["corpus_id"], "relevance_score": float(each["score"])} for each in ranks]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("directory", "port", "threads", "backend"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--ranks", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(int(asked.threads))
    app.state.one = ThreadPoolExecutor(1)
    kind: Any = CrossEncoder if asked.ranks else SentenceTransformer
    app.state.model = kind(asked.directory, device="cpu", backend=asked.backend)
    uvicorn.run(app, host="127.0.0.1", port=int(asked.port), log_level="error", access_log=False)
