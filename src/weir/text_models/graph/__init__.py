"""The ONNX graph of a sentence encoder, built from its weights: token ids in, vectors out.

This module collects inputs, operators and weights, and multiplies matrices in each precision. Large weights are stored in a separate file next to the graph. The
package onnx is imported when the first graph is built.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError, add_extra
from weir.text_models import Precision

Array = NDArray[Any]

FUSED = "com.microsoft"  # onnxruntime's own operators, for CPU and CUDA alike
OPSET = 18  # the newest opset that onnxruntime 1.18 supports fully, the oldest version that is allowed

# Smaller weights are stored in the graph, as each weight in the file takes at least a page.
_INLINE_BYTES = 4096
# Each weight begins at a multiple of this in the file, so that it can be mapped into memory.
_ALIGNMENT = 4096

# The activations, by their names in config.json.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
ACTIVATIONS = ("gelu", *_TANH_GELU, "quick_gelu", "relu", "silu", "swish", "tanh", "sigmoid", "identity")


def require(package: str) -> None:
    """Raise SettingsError, with the command that installs it, if a package is not installed. The package is not imported."""
    if find_spec(package) is None:
        raise SettingsError(f"{package} is not installed; {add_extra('embed')}")


def onnx() -> ModuleType:
    """Return the package onnx. Raises SettingsError, with the command that installs it, if it is not installed."""
    require("onnx")
    import onnx as package

    return package


class Graph(NamedTuple):
    """A serialized ONNX model without its large weights, and these weights with their offsets in the file next to it, in bytes, in order.

    `whole` is another model with the same weights, which makes further outputs that would make `model` slower; None if `model` makes all.
    """

    model: bytes
    weights: list[tuple[int, Array]]
    whole: bytes | None = None


class Output(NamedTuple):
    """An output of a graph: the name of its float32 value in the assembly, and its shape, with a name for each axis that varies."""

    value: str
    shape: Sequence[str | int]


Value = str | float | Sequence[int]  # the name of a value, or a constant: a number, or a list of whole numbers


class Assembly:
    """A graph under construction. Values are identified by strings, as in ONNX. `weights_file` is the name of the file for large weights."""

    def __init__(self, weights_file: str) -> None:
        self._weights_file = weights_file
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._weights: list[tuple[int, Array]] = []
        self._end = 0

    def input(self, name: str, dtype: str, shape: Sequence[str | int]) -> str:
        """Declare an input, once, and return its name. `dtype` is a numpy dtype; `shape` has a name for each axis that varies."""
        if all(each.name != name for each in self._inputs):
            self._inputs.append(onnx().helper.make_tensor_value_info(name, _onnx_type(dtype), list(shape)))
        return name

    def add(self, operator: str, *inputs: Value, domain: str = "", result: str = "", **attributes: Any) -> str:
        """Add an operator with one output, and return the output's name. An input may be a number or a list of numbers: a constant of float32 or int64."""
        return self.add_several(operator, inputs, 1, domain=domain, results=(result,) if result else (), **attributes)[
            0
        ]

    def add_several(
        self, operator: str, inputs: Sequence[Value], count: int, *, domain: str = "", results: Sequence[str] = (), **attributes: Any
    ) -> list[str]:  # fmt: skip
        """Add an operator with `count` outputs, and return their names; see `add`."""
        read = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        here = f"{operator}-{len(self._nodes)}"
        names = list(results) or [f"{here}.{index}" for index in range(count)]
        node = onnx().helper.make_node(operator, read, names, name=here, domain=domain, **attributes)
        self._nodes.append(node)
        return names

    def constant(self, values: Any, dtype: str = "") -> str:
        """Add a small constant, by default of float32 for a float and else of int64, and return its name. Equal constants are added once."""
        dtype = dtype or ("float32" if isinstance(values, float) else "int64")
        array = np.asarray(values, dtype=dtype)
        return self.weight(f"constant-{dtype}-{array.shape}-{array.tolist()}", array)

    def weight(self, name: str, value: Array) -> str:
        """Add a weight in its own dtype and return its name. If the name exists already, nothing is added."""
        if name in self._constants:
            return name
        array = np.ascontiguousarray(value) if value.ndim else value
        if array.nbytes < _INLINE_BYTES:
            self._constants[name] = onnx().numpy_helper.from_array(array, name)
            return name
        tensor = onnx().TensorProto(name=name, data_type=_onnx_type(array.dtype), dims=array.shape)
        tensor.data_location = onnx().TensorProto.EXTERNAL
        for key, entry in (("location", self._weights_file), ("offset", self._end), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(entry))
        self._constants[name] = tensor
        self._weights.append((self._end, array))
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return name

    def finish(self, name: str, outputs: Mapping[str, Output], whole: Mapping[str, Output] | None = None) -> Graph:
        """Return the graph called `name` with these outputs by name, and with those of `whole` a second one; each has what its outputs need."""
        return Graph(
            self._model(name, outputs), self._weights, None if whole is None else self._model(f"{name}-whole", whole)
        )

    def _model(self, name: str, outputs: Mapping[str, Output]) -> bytes:
        helper = onnx().helper
        ends = [helper.make_node("Identity", [each.value], [output]) for output, each in outputs.items()]
        infos = [
            helper.make_tensor_value_info(output, onnx().TensorProto.FLOAT, list(each.shape))
            for output, each in outputs.items()
        ]
        nodes, needed = self._nodes_for({each.value for each in outputs.values()})
        inputs = [each for each in self._inputs if each.name in needed]
        constants = [each for constant, each in self._constants.items() if constant in needed]
        graph = helper.make_graph([*nodes, *ends], name, inputs, infos, constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="weir")
        found: bytes = model.SerializeToString()
        return found

    def _nodes_for(self, values: set[str]) -> tuple[list[Any], set[str]]:
        """Return the operators that compute `values`, in order, and the names of all values that they read."""
        nodes, needed = [], set(values)
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                nodes.append(node)
                needed.update(node.input)
        return nodes[::-1], needed


def _onnx_type(dtype: Any) -> int:
    return int(onnx().helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def quantize(weight: NDArray[Any], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize `weight` [in, out] symmetrically to integers of `bits` bits. Return the integers [in, out] and a scale [out] for each column.

    The product of both is close to `weight`.
    """
    highest = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=0).astype(np.float32) / highest
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(weight / scale), -highest, highest).astype(np.int8), scale


def balance(weight: NDArray[Any], ranges: NDArray[Any]) -> NDArray[np.float32]:
    """Return a factor [in] for each input of a matrix product that is quantized: the input is divided by it, its column of `weight` multiplied.

    All inputs of a product share one scale, so an input with a large range costs the others precision. The factors move half of its range, in
    the exponent, to the weights. Source: Xiao et al. 2023 (SmoothQuant), equation 4, with α = 1/2.

    Args:
        weight: [out, in].
        ranges: [in], the greatest absolute value that is expected of each input.
    """
    widest = np.abs(weight).max(axis=0)
    least = np.finfo(np.float32).tiny
    factors = np.sqrt(np.maximum(ranges, least) / np.maximum(widest, least))
    # Only the ratios of the factors matter, so their geometric mean is made 1.
    scaled: NDArray[np.float32] = (factors / np.exp(np.mean(np.log(factors)))).astype(np.float32)
    return scaled


@cache
def weight_bits() -> int:
    """Return how many bits a quantized weight may have on this machine: 8, or 7 on x86 CPUs without VNNI.

    These CPUs add two products of an unsigned and a signed byte in 16 bits, which saturates with weights of 8 bits, and never with 7.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 8
    flags = next((line for line in lines if line.startswith("flags")), "")
    return 7 if flags and "vnni" not in flags else 8


class Numbers:
    """Adds weights and products of matrices to a graph, in one precision and for one device, "cpu" or "cuda".

    fp16 on a GPU: everything but the pooling is computed in fp16. fp16 on a CPU: tables and matrices are rounded to fp16, and products are computed
    in fp32, as onnxruntime does not multiply fp16 there. `dtype` is the numpy dtype of computed values.
    """

    def __init__(self, assembly: Assembly, precision: Precision, device: str) -> None:
        self._assembly = assembly
        self.is_int8 = precision is Precision.INT8
        self._rounded = precision is Precision.FP16
        self.dtype = "float16" if self._rounded and device == "cuda" else "float32"
        self._table_dtype = "float16" if self.is_int8 or self._rounded else "float32"

    def vector(self, name: str, value: Array) -> str:
        """Add a vector, such as a bias, and return its name."""
        return self._assembly.weight(name, value.astype(self.dtype))

    def look_up(self, name: str, table: Array, rows: str) -> str:
        """Return the rows of `table` with the indices `rows`. Only these rows are converted to `dtype`, as tables are large."""
        found = self._assembly.add("Gather", self._assembly.weight(name, table.astype(self._table_dtype)), rows)
        return found if self._table_dtype == self.dtype else self.cast(found, self.dtype)

    def cast(self, value: str, dtype: str) -> str:
        """Return `value` converted to `dtype`, float32 or float16."""
        to = {"float32": 1, "float16": 10}[dtype]  # onnx.TensorProto's numbers
        return self._assembly.add("Cast", value, to=to)

    def matrix(self, name: str, weight: Array) -> str:
        """Add a matrix [out, in], the layout of checkpoints, as [in, out], and return its name."""
        return self.rounded(name, weight.T)

    def rounded(self, name: str, weight: Array) -> str:
        """Add a weight in its own layout, rounded as matrices are, and return its name."""
        return self._assembly.weight(name, (weight.astype(np.float16) if self._rounded else weight).astype(self.dtype))

    def quantized_matrix(self, name: str, weight: Array) -> tuple[str, str]:
        """Add a matrix [out, in] as int8 [in, out] with a scale for each column; return both names."""
        values, scales = quantize(weight.T.astype(np.float32), weight_bits())
        return self._assembly.weight(f"{name}.int8", values), self._assembly.weight(f"{name}.scale", scales)

    def product(
        self, value: str, name: str, weight: Array, bias: Array | None, ranges: Array | None = None
    ) -> tuple[str, str]:
        """Multiply `value` [..., in] by `weight` [out, in]. Return the product, and the name of the bias if it remains to be added, else "".

        `ranges` [in], if known, is the greatest absolute value expected of each input; it makes int8 more precise.
        """
        bias_name = "" if bias is None else self.vector(f"{name}.bias", bias)
        if not self.is_int8:
            return self._assembly.add("MatMul", value, self.matrix(f"{name}.weight", weight)), bias_name
        if ranges is not None:
            factors = balance(weight, ranges)
            value = self._assembly.add("Mul", value, self.vector(f"{name}.balance", 1 / factors))
            weight = weight * factors
        matrix, scale = self.quantized_matrix(f"{name}.weight", weight)
        return self._assembly.add("DynamicQuantizeMatMul", value, matrix, scale, "", bias_name, domain=FUSED), ""

    def dense(
        self, value: str, name: str, weight: Array, bias: Array | None, activation: str, ranges: Array | None = None
    ) -> str:
        """Return `value` after a dense layer: product, bias and activation. Raises SettingsError naming an unknown activation."""
        out, missing = self.product(value, name, weight, bias, ranges)
        if activation == "gelu" and missing:
            return self._assembly.add("BiasGelu", out, missing, domain=FUSED)
        if activation in _TANH_GELU:
            return self._assembly.add("FastGelu", out, *([missing] if missing else []), domain=FUSED)
        return self.activate(self._assembly.add("Add", out, missing) if missing else out, activation)

    def stored_dense(
        self, value: str, name: str, weights: Mapping[str, Array], stored: str, activation: str = "identity", ranges: Array | None = None
    ) -> str:  # fmt: skip
        """Return what `dense` does, with the weight and the bias that are called `stored` in `weights`; there may be no bias."""
        weight, bias = weights[f"{stored}.weight"], weights.get(f"{stored}.bias")
        return self.dense(value, name, weight, bias, activation, ranges)

    def activate(self, value: str, activation: str) -> str:
        """Return `value` after the activation with this name. Raises SettingsError if there is none."""
        if activation == "gelu":
            return self._assembly.add("Gelu", value, domain=FUSED)
        if activation in _TANH_GELU:
            return self._assembly.add("FastGelu", value, domain=FUSED)
        if activation == "quick_gelu":
            return self._assembly.add("QuickGelu", value, domain=FUSED, alpha=1.702)
        if activation in ("silu", "swish"):
            return self._assembly.add("Mul", value, self._assembly.add("Sigmoid", value))
        if activation in ("relu", "tanh", "sigmoid"):
            return self._assembly.add(activation.capitalize(), value)
        if activation == "identity":
            return value
        raise SettingsError(f"activation {activation!r}: must be one of {', '.join(ACTIVATIONS)}")
