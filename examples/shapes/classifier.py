"""Names the shape on a picture: `weir serve classifier.py:Shapes`, after `python train.py` has written shapes.onnx."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel

import weir

SIZE = 28
NAMES = ("circle", "square", "triangle")


class Shape(BaseModel):
    """What is on the picture, and how sure the model is."""

    shape: str
    score: float


class Shapes(weir.Model):
    """Takes PNG and JPEG pictures."""

    content_types = ("image/png", "image/jpeg")
    Output = Shape
    max_batch_size = 64

    def __init__(self, file: str = "shapes.onnx") -> None:
        self._file = Path(file).resolve()

    def load(self) -> None:
        import onnxruntime

        self._session: Any = onnxruntime.InferenceSession(self._file, providers=["CPUExecutionProvider"])

    def decode(self, body: bytes, content_type: str) -> np.ndarray:
        try:
            picture = Image.open(io.BytesIO(body)).convert("L").resize((SIZE, SIZE))
        except UnidentifiedImageError:
            raise weir.InvalidRequest("the body is no picture; send PNG or JPEG") from None
        return np.asarray(picture, "float32").ravel() / 255

    def predict(self, batch: list[np.ndarray]) -> list[Shape]:
        (scores,) = self._session.run(None, {"pixels": np.stack(batch)})
        return [Shape(shape=NAMES[row.argmax()], score=round(float(row.max()), 4)) for row in scores]
