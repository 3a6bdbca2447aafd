"""A graph as it grows: operators, inputs, and the weights that will lie in a file of their own beside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.embedding.graph.optional_dependencies import onnx

Array = NDArray[Any]

FUSED = "com.microsoft"  # onnxruntime's own operators, for CPU and CUDA alike
OPSET = 18  # the newest that onnxruntime 1.18, the oldest allowed, knows well

# Smaller weights stay within the graph: a page of a file each would be a waste.
_INLINE_BYTES = 4096
# Where a weight may begin in the file, so that it can be mapped into memory.
_ALIGNMENT = 4096


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
