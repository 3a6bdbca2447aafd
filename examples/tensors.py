"""A tensor model: named arrays in, named arrays out, the batch as first dimension.

weir serve examples.tensors:Affine
curl -d '{"x": [[1, 2, 3]]}' localhost:8000/infer/affine
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import weir


class Affine(weir.Model):
    """y = x W + b, with weights drawn from `seed`."""

    inputs = (weir.Tensor("x", "FP32", (-1, 3)),)
    outputs = (weir.Tensor("y", "FP32", (-1, 2)),)
    examples = ({"x": [[1.0, 0.0, 0.0]]},)

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def load(self) -> None:
        chance = np.random.default_rng(self.seed)
        self.weights = chance.standard_normal((3, 2)).astype(np.float32)
        self.bias = chance.standard_normal(2).astype(np.float32)

    def predict(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {"y": batch["x"] @ self.weights + self.bias}
