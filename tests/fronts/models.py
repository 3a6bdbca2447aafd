"""Models that the tests of fronts serve."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

import weir


class Add(weir.Model):
    """Adds the columns of a tensor."""

    inputs = (weir.Tensor("a", "FP32", (-1, 2)),)
    outputs = (weir.Tensor("sum", "FP32", (-1,)),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["a"].sum(axis=1)}


class Texts(weir.Model):
    """Doubles texts."""

    inputs = (weir.Tensor("a", "BYTES", (-1,)),)
    outputs = (weir.Tensor("twice", "BYTES", (-1,)), weir.Tensor("length", "INT64", (-1,)))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"twice": batch["a"] + batch["a"], "length": numpy.array([len(text) for text in batch["a"]])}


class Mean(weir.Model):
    """The mean of each of its rows, which are long."""

    inputs = (weir.Tensor("a", "FP32", (-1, 20_000)),)
    outputs = (weir.Tensor("mean", "FP32", (-1,)),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"mean": batch["a"].mean(axis=1)}


class Counts(weir.Model):
    """Streams the numbers up to an item."""

    streaming = True

    def predict(self, batch: list[Any]) -> Iterator[Any]:
        for number in range(max(batch)):
            yield {index: number for index, item in enumerate(batch) if number < item}


class Measured(weir.Model):
    """Says how large its items are."""

    @classmethod
    def measure(cls, item: Any) -> weir.Measure:
        return weir.Measure(1, float(item))

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class GatedAdd(Add):
    """Adds once a named pipe has been opened for writing."""

    def __init__(self, gate: str) -> None:
        self.gate = Path(gate)
        self.waits = True

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.waits:
            self.gate.read_text()
        self.waits = False
        return super().predict(batch)


class Large(weir.Model):
    """Answers a number with a letter, many times."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [letters(item) for item in batch]


def letters(number: int) -> str:
    """Return what `Large` answers."""
    return chr(ord("a") + number % 26) * 600_000


class Rows(weir.Model):
    """Long rows, each full of one number."""

    inputs = (weir.Tensor("a", "FP32", (-1, 1)),)
    outputs = (weir.Tensor("row", "FP32", (-1, 100_000)), weir.Tensor("text", "BYTES", (-1, 1)))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"row": batch["a"].repeat(100_000, axis=1), "text": batch["a"].astype(int).astype(bytes).astype(object)}
