"""Models for real worker processes."""

import os
import time
from typing import Any

from weir import InvalidRequest, Model, Tensor


class Square(Model):
    examples = (3,)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Dangerous(Model):
    """Raises at "poison", ends its process at "killer", refuses "odd", and else says which process it is in."""

    def preprocess(self, item: Any) -> Any:
        if item == "odd":
            raise InvalidRequest("odd is not served")
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        if "killer" in batch:
            os._exit(3)
        if "poison" in batch:
            raise ArithmeticError("poison")
        return [x * x for x in batch]


class Broken(Model):
    def load(self) -> None:
        raise FileNotFoundError("weights.bin")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Total(Model):
    inputs = (Tensor("x", "FP32", [-1, -1]),)
    outputs = (Tensor("total", "FP32", [-1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"total": batch["x"].sum(axis=1)}


class Paced(Model):
    """Takes the time that its worker's environment says, and returns what kind of worker that is."""

    examples = (0,)

    def load(self) -> None:
        self.kind = os.environ["KIND"]
        self.seconds = float(os.environ["SECONDS"])

    def predict(self, batch: list[int]) -> list[str]:
        time.sleep(self.seconds)
        return [self.kind] * len(batch)
