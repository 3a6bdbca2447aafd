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


class Where(Model):
    """Says whether its input lies in shared memory, aligned, and what it sums to."""

    inputs = (Tensor("x", "FP32", (-1, -1)),)
    outputs = (Tensor("shared", "BOOL", (-1,)), Tensor("aligned", "BOOL", (-1,)), Tensor("sum", "FP64", (-1,)))

    def predict(self, batch: Any) -> Any:
        x = batch["x"]
        address = x.__array_interface__["data"][0]
        count = len(x)
        return {
            "shared": np.full(count, any(start <= address < end for start, end in shared_memory())),
            "aligned": np.full(count, address % 64 == 0),
            "sum": x.sum(axis=1, dtype=np.float64),
        }


def shared_memory() -> list[tuple[int, int]]:
    """Return where this process has mapped files that live in memory only."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "/memfd:" in line]
    return [(int(start, 16), int(end, 16)) for start, end in (line.split()[0].split("-") for line in lines)]
