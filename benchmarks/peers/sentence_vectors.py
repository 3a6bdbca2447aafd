"""sentence-transformers behind FastAPI, as one would write it: one encoder at a time, on all threads it may use."""

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

app = FastAPI()


class Asked(BaseModel):
    """What a body says."""

    input: str
    model: str = ""


@app.post("/v1/embeddings")
async def embeddings(asked: Asked) -> dict[str, Any]:
    """Answer as OpenAI's does. Always in the same thread: each that calls torch would get threads of its own, which spin against the others'."""
    encode = partial(app.state.model.encode, asked.input, show_progress_bar=False)
    vector = await asyncio.get_running_loop().run_in_executor(app.state.one, encode)
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector.tolist()}]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("directory", "port", "threads"):
        parser.add_argument(f"--{name}", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(asked.threads))
    app.state.one = ThreadPoolExecutor(1)
    app.state.model = SentenceTransformer(asked.directory, device="cpu")
    uvicorn.run(app, host="127.0.0.1", port=int(asked.port), log_level="error", access_log=False)
