"""The two models that LoadGen asks for, for Weir: of items, and of tensors for the Open Inference Protocol."""

from typing import Any

import weir
from benchmarks.peers.judged.computing import compute


class Null(weir.Model):
    """Returns what it gets: what is measured is the server."""

    max_batch_size = 32
    examples = (3,)

    def predict(self, batch: list[Any]) -> list[Any]:
        compute("null", len(batch))
        return batch


class Timed(weir.Model):
    """Takes as long for a batch as GoogLeNet on a Tesla P4, ten times slower."""

    max_batch_size = 32
    examples = (3,)

    def predict(self, batch: list[Any]) -> list[Any]:
        compute("timed", len(batch))
        return batch


class _Tensors(weir.Model):
    inputs = (weir.Tensor("x", "FP32", [-1, 1]),)
    outputs = (weir.Tensor("y", "FP32", [-1, 1]),)
    examples = ({"x": [[3.0]]},)
    max_batch_size = 32
    kind = "null"

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        compute(self.kind, len(batch["x"]))
        return {"y": batch["x"]}


class NullTensor(_Tensors):
    """The same of one number as a tensor."""


class TimedTensor(_Tensors):
    """The same of one number as a tensor."""

    kind = "timed"


MODELS = {"null": Null, "timed": Timed}
