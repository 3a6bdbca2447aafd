"""A graph as it grows: its inputs, operators and weights, and products of matrices in each precision.

Large weights lie in a file of their own beside the graph. onnx is imported by the first graph that is made.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.embedding.recipe import Precision
from weir.errors import SettingsError

Array = NDArray[Any]

FUSED = "com.microsoft"  # onnxruntime's own operators, for CPU and CUDA alike
OPSET = 18  # the newest that onnxruntime 1.18, the oldest allowed, knows well

# Smaller weights stay within the graph: a page of a file each would be a waste.
_INLINE_BYTES = 4096
# Where a weight may begin in the file, so that it can be mapped into memory.
_ALIGNMENT = 4096

# What a dense layer's result goes through, under the names in config.json, and the operators for it.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
ACTIVATIONS = ("gelu", *_TANH_GELU, "relu", "silu", "swish", "tanh", "sigmoid", "identity")


def require(package: str) -> None:
    """Raise SettingsError naming the extra if a package is not installed, without loading it."""
    if find_spec(package) is None:
        raise SettingsError(f"{package} is missing: pip install 'weir-serving[embed]'")


def onnx() -> ModuleType:
    """Return the package onnx. Raises SettingsError naming the extra where it is missing."""
    require("onnx")
    import onnx as package

    return package


class Graph(NamedTuple):
    """An ONNX model without its large weights, and these: by their place in the file beside it, one after the other."""

    model: bytes
    weights: list[tuple[int, Array]]


class Assembly:
    """Collects what a graph is made of. Values are named by strings, as in ONNX itself."""

    def __init__(self, weights_file: str) -> None:
        self._weights_file = weights_file
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._weights: list[tuple[int, Array]] = []
        self._end = 0

    def input(self, name: str, dtype: str, shape: Sequence[str]) -> str:
        """Declare an input of this numpy dtype; the shape is of names, as it varies."""
        self._inputs.append(onnx().helper.make_tensor_value_info(name, _onnx_type(dtype), list(shape)))
        return name

    def add(self, operator: str, *inputs: str, domain: str = "", result: str = "", **attributes: Any) -> str:
        """Add an operator with one output, and return the output's name."""
        return self.add_several(operator, inputs, 1, domain=domain, results=(result,) if result else (), **attributes)[
            0
        ]

    def add_several(
        self, operator: str, inputs: Sequence[str], count: int, *, domain: str = "", results: Sequence[str] = (), **attributes: Any
    ) -> list[str]:  # fmt: skip
        """Add an operator with `count` outputs, and return their names."""
        here = f"{operator}-{len(self._nodes)}"
        names = list(results) or [f"{here}.{place}" for place in range(count)]
        node = onnx().helper.make_node(operator, list(inputs), names, name=here, domain=domain, **attributes)
        self._nodes.append(node)
        return names

    def constant(self, values: Any, dtype: str) -> str:
        """Return the name of a small constant; equal ones are the same."""
        array = np.asarray(values, dtype=dtype)
        return self.weight(f"constant-{dtype}-{array.shape}-{array.tolist()}", array)

    def weight(self, name: str, value: Array) -> str:
        """Give a weight to the graph, in its own dtype. A name that is there already stays what it is."""
        if name in self._constants:
            return name
        array = np.ascontiguousarray(value) if value.ndim else value
        if array.nbytes < _INLINE_BYTES:
            self._constants[name] = onnx().numpy_helper.from_array(array, name)
            return name
        tensor = onnx().TensorProto(name=name, data_type=_onnx_type(array.dtype), dims=array.shape)
        tensor.data_location = onnx().TensorProto.EXTERNAL
        for key, told in (("location", self._weights_file), ("offset", self._end), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(told))
        self._constants[name] = tensor
        self._weights.append((self._end, array))
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return name

    def finish(self, name: str, output: str, shape: Sequence[str | int]) -> Graph:
        """Return the graph with the one float32 output `output`."""
        helper = onnx().helper
        told = helper.make_tensor_value_info(output, onnx().TensorProto.FLOAT, list(shape))
        graph = helper.make_graph(self._nodes, name, self._inputs, [told], list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="weir")
        return Graph(model.SerializeToString(), self._weights)


def _onnx_type(dtype: Any) -> int:
    return int(onnx().helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def quantize(weight: NDArray[Any], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return `weight` [in, out] as whole numbers of this many bits, and the scale of each column: their product is the weight again, nearly."""
    highest = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=0).astype(np.float32) / highest
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(weight / scale), -highest, highest).astype(np.int8), scale


def balance(weight: NDArray[Any], reach: NDArray[Any]) -> NDArray[np.float32]:
    """Return by what each input is to be divided, and its column of `weight` [out, in] multiplied, before both are rounded.

    All inputs of a product share one scale, so one that reaches far takes the others' digits; half of that, as powers, is moved into the
    weights. `reach` is how far each input goes. Source: Xiao et al. 2023 (SmoothQuant), equation 4, with α = 1/2.
    """
    widest = np.abs(weight).max(axis=0)
    least = np.finfo(np.float32).tiny
    factors = np.sqrt(np.maximum(reach, least) / np.maximum(widest, least))
    # Only their ratios matter.
    even: NDArray[np.float32] = (factors / np.exp(np.mean(np.log(factors)))).astype(np.float32)
    return even


@cache
def weight_bits() -> int:
    """Return how many bits of a weight this machine's products can take: 8, or 7.

    x86 CPUs without VNNI add two products of an unsigned and a signed byte in 16 bits, and what is larger is cut off: seven bits cannot be.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 8
    flags = next((line for line in lines if line.startswith("flags")), "")
    return 7 if flags and "vnni" not in flags else 8


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
