"""sentence-transformers behind FastAPI, as one would write it: one encoder at a time, on all threads it may use."""

import argparse
import threading
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
def embeddings(asked: Asked) -> dict[str, Any]:
    """Answer as OpenAI's does. Called in a thread; torch's own threads are not shared between calls."""
    with app.state.one:
        vector = app.state.model.encode(asked.input, show_progress_bar=False)
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector.tolist()}]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("directory", "port", "threads"):
        parser.add_argument(f"--{name}", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(asked.threads))
    app.state.one = threading.Lock()
    app.state.model = SentenceTransformer(asked.directory, device="cpu")
    uvicorn.run(app, host="127.0.0.1", port=int(asked.port), log_level="error", access_log=False)
