"""The models that are measured."""

import math
import time
from typing import Any, ClassVar

import weir


class Square(weir.Model):
    """The smallest model: what is measured is the server."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Seed(weir.Model):
    """The model of "Service batching from scratch": a batch costs little more than one item."""

    max_batch_size = 200

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.001 * math.log(len(batch) + 1))
        return [x * x for x in batch]


class Length(weir.Model):
    """Takes a large body and says how long it is."""

    examples: ClassVar[list[bytes]] = [b"12345"]

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(body) for body in batch]


class Slow(weir.Model):
    """Has a known capacity: 8 items in 20 ms."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.02)
        return batch
