"""Models of the servers that the manifests' commands start."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import weir


class Square(weir.Model):
    examples = (weir.Example(3, 9),)

    def predict(self, batch: list[float]) -> list[float]:
        return [x * x for x in batch]


class Gate(weir.Model):
    """Answers when the file `gate` is there; the file `begun` says that a batch waits for it."""

    def __init__(self, gate: str, begun: str) -> None:
        self.gate, self.begun = Path(gate), Path(begun)

    def predict(self, batch: list[float]) -> list[float]:
        self.begun.touch()
        while not self.gate.exists():
            time.sleep(0.01)
        return batch


class Weights(weir.Model):
    """Loads as long as the file `weights` is there."""

    def __init__(self, weights: str) -> None:
        self.weights = Path(weights)

    def load(self) -> None:
        self.weights.read_bytes()

    def predict(self, batch: list[float]) -> list[float]:
        return batch


class Tensor(weir.Model):
    """A model of tensors, as clients of KServe ask it."""

    max_batch_size = 8
    inputs = (weir.Tensor("x", "FP32", [-1, 2]),)
    outputs = (weir.Tensor("y", "FP32", [-1, 2]),)

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": 2 * batch["x"]}
