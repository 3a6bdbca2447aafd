"""Vectors of images behind FastAPI, as one would write it: one encoder at a time, on all threads it may use."""

import argparse
import asyncio
import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image
from pydantic import BaseModel

app = FastAPI()


class Asked(BaseModel):
    """What a body says: images as data: URLs, in infinity's words."""

    input: list[str]
    model: str = ""
    modality: str = "image"


def by_sentence_transformers(directory: str) -> Callable[[list[Any]], Any]:
    """Return what encodes images with sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import CLIPModel

    model = SentenceTransformer(modules=[CLIPModel(directory)], device="cpu")
    return lambda images: model.encode(images, normalize_embeddings=True, show_progress_bar=False)


def by_transformers(directory: str) -> Callable[[list[Any]], Any]:
    """Return what encodes images with transformers."""
    from transformers import CLIPImageProcessor, CLIPModel

    model, processor = CLIPModel.from_pretrained(directory).eval(), CLIPImageProcessor.from_pretrained(directory)

    def encode(images: list[Any]) -> Any:
        with torch.inference_mode():
            found = model.get_image_features(**processor(images=images, return_tensors="pt"))
            vectors = getattr(found, "pooler_output", found)
            return (vectors / vectors.norm(dim=-1, keepdim=True)).numpy()

    return encode


BY = {"sentence-transformers": by_sentence_transformers, "transformers": by_transformers}


def _vectors(asked: Asked) -> list[list[float]]:
    files = [base64.b64decode(each.partition(",")[2]) for each in asked.input]
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    return [vector.tolist() for vector in app.state.encode(images)]


@app.post("/embeddings")
async def embeddings(asked: Asked) -> dict[str, Any]:
    """Answer as OpenAI's does."""
    vectors = await asyncio.get_running_loop().run_in_executor(app.state.one, _vectors, asked)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("directory", "port", "threads", "by"):
        parser.add_argument(f"--{name}", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(asked.threads))
    app.state.one = ThreadPoolExecutor(1)  # each thread that calls torch would get threads of its own
    app.state.encode = BY[asked.by](asked.directory)
    uvicorn.run(app, host="127.0.0.1", port=int(asked.port), log_level="error", access_log=False)
