"""Models of the servers that the manifests' commands start."""

from collections.abc import Mapping
from typing import Any

import weir


class Square(weir.Model):
    examples = (weir.Example(3, 9),)

    def predict(self, batch: list[float]) -> list[float]:
        return [x * x for x in batch]


class Tensor(weir.Model):
    """A model of tensors, as clients of KServe ask it."""

    max_batch_size = 8
    inputs = (weir.Tensor("x", "FP32", [-1, 2]),)
    outputs = (weir.Tensor("y", "FP32", [-1, 2]),)

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": 2 * batch["x"]}
