"""Other forms of the same graph, to be measured beside ours: operator by operator, with onnxruntime's own normalisation, and with padding everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from weir.embedding.graph.assembly import FUSED, Numbers
from weir.embedding.graph.encoding import PARTS, EncoderLayers

_FLOAT = 1  # onnx.TensorProto's number


class Filled(EncoderLayers):
    """With padding in all layers, as a GPU computes it."""

    def __init__(self, *given: Any, device: str, **told: Any) -> None:
        super().__init__(*given, device="cuda", **told)

    def _join(self, value: str, dense: str, norm: str) -> None:
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        self.value = self._norm(self._assembly.add("Sum", out, missing, self.value), norm)


class Plain(Filled):
    """Attention in single operators, as exporters write it."""

    def _attend(self, name: str) -> str:
        add, shape = self._assembly.add, self._architecture
        width = shape.hidden_size // shape.heads
        apart = self._assembly.constant([0, 0, shape.heads, width], "int64")
        parts = []
        for part, order in zip(PARTS, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True):
            weight, bias = self._weights[f"{name}{part}.weight"], self._weights[f"{name}{part}.bias"]
            value = self._numbers.dense(self.value, name + part, weight, bias, "identity")
            parts.append(add("Transpose", add("Reshape", value, apart), perm=order))
        query, key, value = parts
        scores = add("Div", add("MatMul", query, key), self._assembly.constant(np.sqrt(width), "float32"))
        real = add("Unsqueeze", add("Cast", self._mask, to=_FLOAT), self._assembly.constant([1, 2], "int64"))
        missing = add("Sub", self._assembly.constant(1, "float32"), real)
        scores = add("Add", scores, add("Mul", missing, self._assembly.constant(-1e9, "float32")))
        seen = add("Transpose", add("MatMul", add("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        return add("Reshape", seen, self._assembly.constant([0, 0, shape.hidden_size], "int64"))


class PlainNumbers(Numbers):
    """Gelu in single operators too."""

    def dense(
        self, value: str, name: str, weight: np.ndarray, bias: np.ndarray, activation: str, reach: np.ndarray | None = None
    ) -> str:  # fmt: skip
        add, constant = self._assembly.add, self._assembly.constant
        out = add("Add", add("MatMul", value, self.matrix(f"{name}.weight", weight)), self.vector(f"{name}.bias", bias))
        if activation != "gelu":
            return out
        half = add("Erf", add("Div", out, constant(np.sqrt(2), "float32")))
        return add("Mul", add("Mul", out, add("Add", half, constant(1, "float32"))), constant(0.5, "float32"))


class Fused(Filled):
    """With onnxruntime's SkipLayerNormalization, as its optimiser writes it."""

    def _join(self, value: str, dense: str, norm: str) -> None:
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        inputs = (out, self.value, *self._scales(norm), missing)
        self.value = self._assembly.add(
            "SkipLayerNormalization", *inputs, domain=FUSED, epsilon=self._architecture.epsilon
        )


@contextmanager
def built_as(encoder: type[EncoderLayers], numbers: type[Numbers] = Numbers) -> Iterator[None]:
    """Have graphs built in this form meanwhile."""
    with (
        patch("weir.embedding.graph.building.Encoder", encoder),
        patch("weir.embedding.graph.building.Numbers", numbers),
    ):
        yield
