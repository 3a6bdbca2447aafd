"""What the tests of clients serve, beside the example repository."""

import json
import os
import signal
from typing import Any

import numpy as np
from numpy.typing import NDArray

import weir

Arrays = dict[str, NDArray[Any]]


class Every(weir.Model):
    """Gives back tensors of every kind of datatype."""

    inputs = (
        weir.Tensor("half", "FP16", (-1, -1)), weir.Tensor("brain", "BF16", (-1, 2)), weir.Tensor("flag", "BOOL", (-1,)),
        weir.Tensor("text", "BYTES", (-1,)), weir.Tensor("big", "UINT64", (-1,)),
    )  # fmt: skip
    outputs = inputs
    max_batch_size = 8

    def predict(self, batch: Arrays) -> Arrays:
        return {tensor.name: batch[tensor.name] for tensor in self.outputs}


class Moody(weir.Model):
    """Does what each item says: "fail", "die", or goes back as it came."""

    max_batch_size = 4

    def predict(self, batch: list[Any]) -> list[Any]:
        if "die" in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail" in batch:
            raise RuntimeError("not today")
        return batch


class Scale(weir.Model):
    """A tensor model that is told its factor: y = factor * x."""

    inputs = (weir.Tensor("x", "FP32", (-1, 2)),)
    outputs = (weir.Tensor("y", "FP32", (-1, 2)),)

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = np.float32(factor)

    def predict(self, batch: Arrays) -> Arrays:
        return {"y": batch["x"] * self.factor}


def item(value: Any) -> dict[str, NDArray[Any]]:
    """Return one item as the input of a model of items."""
    return {"input": np.array([json.dumps(value)], object)}
