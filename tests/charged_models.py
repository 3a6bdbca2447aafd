"""Models whose requests are charged."""

from typing import Any

import weir


class Length(weir.Model):
    def predict(self, batch: Any) -> Any:
        return [len(item) for item in batch]


class Grid(weir.Model):
    inputs = (weir.Tensor("x", "FP32", [-1, 3]),)
    outputs = (weir.Tensor("sum", "FP32", [-1]),)

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["x"].sum(axis=1)}


class Whole(weir.Model):
    inputs = (weir.Tensor("x", "INT64", [-1, -1]),)
    outputs = (weir.Tensor("sum", "INT64", [-1]),)

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["x"].sum(axis=1)}


class Words(weir.Model):
    def predict(self, batch: Any) -> Any:
        for item in batch:
            yield [item]


class Measured(weir.Model):
    @classmethod
    def measure(cls, item: Any) -> Any:
        return weir.Measure(cost=len(item))

    def predict(self, batch: Any) -> Any:
        return [len(item) for item in batch]
