"""Models that the tests of the Open Inference Protocol serve."""

from typing import Any

import numpy as np

from weir.model import Model, Tensor

TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
    "BF16",
)  # fmt: skip


class Types(Model):
    """Gives every datatype back as it came, under the name of the datatype in capital letters."""

    inputs = tuple(Tensor(each.lower(), each, (-1, -1)) for each in TYPES)
    outputs = tuple(Tensor(each, each, (-1, -1)) for each in TYPES)

    def predict(self, batch: Any) -> Any:
        return {each: batch[each.lower()] for each in TYPES}


class Vector(Model):
    """One input of one variable length, so that a raw body can be it."""

    inputs = (Tensor("x", "FP32", (-1, -1)),)
    outputs = (Tensor("sum", "FP32", (-1,)), Tensor("twice", "FP32", (-1, -1)))

    def predict(self, batch: Any) -> Any:
        return {"sum": np.sum(batch["x"], axis=1, dtype=np.float32), "twice": batch["x"] * np.float32(2)}


class Ledger(Model):
    """Writes the number of rows of each batch into a file."""

    inputs = (Tensor("x", "FP32", (-1, 1)),)
    outputs = (Tensor("y", "FP32", (-1, 1)),)

    def __init__(self, path: str) -> None:
        self.path = path

    def predict(self, batch: Any) -> Any:
        with open(self.path, "a") as ledger:
            ledger.write(f"{len(batch['x'])}\n")
        return {"y": batch["x"]}
