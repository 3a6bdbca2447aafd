"""A model that is an ONNX file, run by onnxruntime (the extra `onnx`). Also run as a program: it then says what is in a file."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from weir.errors import SettingsError
from weir.model import Model
from weir.workers.launch import SILENCE

# ONNX' element types, as onnxruntime writes them, and the protocol's.
DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
        "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64",
        "string": "BYTES",
    }
)  # fmt: skip


class OnnxModel(Model):
    """Runs the file `path`. Its tensors are declared by who serves it, from the file (onnx_platform.py).

    `intra_op` and `inter_op` are onnxruntime's numbers of threads, `threads` the first of them; without them it takes as many as
    the worker may use.
    """

    path: ClassVar[str] = ""

    def __init__(self, threads: int | None = None, intra_op: int | None = None, inter_op: int | None = None) -> None:
        self._intra_op = intra_op or threads or len(os.sched_getaffinity(0))
        self._inter_op = inter_op

    def load(self) -> None:
        """Make the session."""
        self._session = open_session(self.path, self._intra_op, self._inter_op)
        self._names = [tensor.name for tensor in self.outputs]
        self._texts = {tensor.name for tensor in self.outputs if tensor.datatype == "BYTES"}
        self._text_inputs = {tensor.name for tensor in self.inputs if tensor.datatype == "BYTES"}

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the graph."""
        for name in self._text_inputs:
            batch = {**batch, name: _decoded(batch[name])}
        outputs = dict(zip(self._names, self._session.run(self._names, batch), strict=True))
        return {name: _encoded(array) if name in self._texts else array for name, array in outputs.items()}


def open_session(path: str, intra_op: int, inter_op: int | None = None, *, optimize: bool = True) -> Any:
    """Return an onnxruntime session of the file, on what it finds: GPUs where its build has them, else CPUs."""
    os.environ.update({**SILENCE, **os.environ})
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = intra_op
    if inter_op is not None:
        options.inter_op_num_threads = inter_op
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=onnxruntime.get_available_providers())


def _decoded(array: Any) -> Any:
    import numpy as np

    texts = [each.decode() if isinstance(each, bytes) else each for each in array.ravel()]
    return np.array(texts, dtype=object).reshape(array.shape)


def _encoded(array: Any) -> Any:
    import numpy as np

    encoded = np.empty(array.shape, dtype=object)
    encoded.ravel()[:] = [each.encode() if isinstance(each, str) else each for each in array.ravel()]
    return encoded


def describe(path: str) -> dict[str, list[dict[str, Any]]]:
    """Return the names, element types and shapes of the tensors that the file has."""
    session = open_session(path, 1, optimize=False)
    return {"inputs": _tensors(session.get_inputs()), "outputs": _tensors(session.get_outputs())}


def _tensors(nodes: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"name": node.name, "datatype": _datatype(node), "shape": [n if isinstance(n, int) else -1 for n in node.shape]}
        for node in nodes
    ]


def _datatype(node: Any) -> str:
    kind = str(node.type)
    element = kind.removeprefix("tensor(").removesuffix(")")
    if not kind.startswith("tensor(") or element not in DATATYPES:
        raise SettingsError(f"{node.name!r} is a {kind}: must be a tensor of one of {', '.join(DATATYPES)}")
    return DATATYPES[element]


if __name__ == "__main__":
    try:
        print(json.dumps(describe(sys.argv[1])))  # noqa: T201 - to the server, which has started this
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
