"""Dense layers of a graph in each precision: a matrix, a bias, and what bends the result."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.embedding.graph.assembling import FUSED, Assembly
from weir.embedding.graph.quantizing import balance, quantize, weight_bits
from weir.embedding.recipe import Precision
from weir.errors import SettingsError

Array = NDArray[Any]

# What a dense layer's result goes through, under the names in config.json, and the operators for it.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
ACTIVATIONS = ("gelu", *_TANH_GELU, "relu", "silu", "swish", "tanh", "sigmoid", "identity")


class Numbers:
    """In which numbers a graph computes, and how matrices are multiplied in them.

    On CPUs, where onnxruntime multiplies no fp16, that means tables and matrices rounded to fp16 and products in fp32; on GPUs all but the pooling
    is computed in fp16.
    """

    def __init__(self, assembly: Assembly, precision: Precision, device: str) -> None:
        self._assembly = assembly
        self.eight_bits = precision is Precision.INT8
        self._rounded = precision is Precision.FP16
        self.dtype = "float16" if self._rounded and device == "cuda" else "float32"
        self._table_dtype = "float16" if self.eight_bits or self._rounded else "float32"

    def vector(self, name: str, value: Array) -> str:
        """Add a bias, or what else there is one of for each column."""
        return self._assembly.weight(name, value.astype(self.dtype))

    def look_up(self, name: str, table: Array, rows: str) -> str:
        """Return the rows of `table` that are asked for. Tables are large and seldom read: only their rows become float32."""
        found = self._assembly.add("Gather", self._assembly.weight(name, table.astype(self._table_dtype)), rows)
        return found if self._table_dtype == self.dtype else self.cast(found, self.dtype)

    def cast(self, value: str, dtype: str) -> str:
        """Return `value` in another dtype."""
        to = {"float32": 1, "float16": 10}[dtype]  # onnx.TensorProto's numbers
        return self._assembly.add("Cast", value, to=to)

    def matrix(self, name: str, weight: Array) -> str:
        """Add a matrix [out, in], as it lies in a checkpoint, to be multiplied from the right."""
        turned = weight.T.astype(np.float16) if self._rounded else weight.T
        return self._assembly.weight(name, turned.astype(self.dtype))

    def eighth(self, name: str, weight: Array) -> tuple[str, str]:
        """Add a matrix [out, in] in eight bits; return its name and that of its scales."""
        values, scales = quantize(weight.T.astype(np.float32), weight_bits())
        return self._assembly.weight(f"{name}.int8", values), self._assembly.weight(f"{name}.scale", scales)

    def product(self, value: str, name: str, weight: Array, bias: Array, reach: Array | None = None) -> tuple[str, str]:
        """Return `value` times the matrix, and the bias that is still to be added: empty if it has been.

        `reach` is how far each number of `value` goes, where that is known: eight bits make more of it.
        """
        told = self.vector(f"{name}.bias", bias)
        if not self.eight_bits:
            return self._assembly.add("MatMul", value, self.matrix(f"{name}.weight", weight)), told
        if reach is not None:
            factors = balance(weight, reach)
            value = self._assembly.add("Mul", value, self.vector(f"{name}.balance", 1 / factors))
            weight = weight * factors
        matrix, scale = self.eighth(f"{name}.weight", weight)
        return self._assembly.add("DynamicQuantizeMatMul", value, matrix, scale, "", told, domain=FUSED), ""

    def dense(
        self, value: str, name: str, weight: Array, bias: Array, activation: str, reach: Array | None = None
    ) -> str:
        """Return `value` after a whole dense layer. Raises SettingsError naming an activation that is not known."""
        out, missing = self.product(value, name, weight, bias, reach)
        if activation == "gelu" and missing:
            return self._assembly.add("BiasGelu", out, missing, domain=FUSED)
        if activation in _TANH_GELU:
            return self._assembly.add("FastGelu", out, *([missing] if missing else []), domain=FUSED)
        return self.bend(self._assembly.add("Add", out, missing) if missing else out, activation)

    def bend(self, value: str, activation: str) -> str:
        """Return `value` after the activation of this name."""
        if activation == "gelu":
            return self._assembly.add("Gelu", value, domain=FUSED)
        if activation in ("silu", "swish"):
            return self._assembly.add("Mul", value, self._assembly.add("Sigmoid", value))
        if activation in ("relu", "tanh", "sigmoid"):
            return self._assembly.add(activation.capitalize(), value)
        if activation == "identity":
            return value
        raise SettingsError(f"activation {activation!r}: must be one of {', '.join(ACTIVATIONS)}")
