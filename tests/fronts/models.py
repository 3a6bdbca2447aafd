"""Models that the tests of fronts serve."""

from collections.abc import Iterator
from typing import Any

import weir


class Add(weir.Model):
    """Adds the columns of a tensor."""

    inputs = (weir.Tensor("a", "FP32", (-1, 2)),)
    outputs = (weir.Tensor("sum", "FP32", (-1,)),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["a"].sum(axis=1)}


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
