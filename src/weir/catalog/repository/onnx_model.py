"""The model that runs an ONNX file with onnxruntime (the extra `onnx`). Run as a program, this module prints a description of
the file as JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from weir.config import SILENCE
from weir.errors import SettingsError
from weir.model import DATATYPES as NUMPY
from weir.model import NONE, Model, Tensor
from weir.workers.cpus import threads_here

# The datatypes of the Open Inference Protocol by the names of onnxruntime's element types.
DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
        "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64",
        "string": "BYTES",
    }
)  # fmt: skip

TRY = "--try"  # also report whether rows can be joined into a batch, as JOINS
JOINS = "joins"
_TRIED_ROWS = 3
_TRIED_LENGTHS = (8, 64, 224, 1)  # for dimensions that may have any length
_TOLERANCE = 0.02  # relative; a quantized model's scales depend on all rows of the batch


class OnnxModel(Model):
    """Runs the file `path`. The platform declares its tensors from the file (see platforms.py).

    `intra_op` and `inter_op` are onnxruntime's numbers of threads within one operator and across operators. `intra_op` defaults
    to `threads`, and that to the number of CPUs that the worker may use.
    """

    path: ClassVar[str] = ""

    def __init__(self, threads: int | None = None, intra_op: int | None = None, inter_op: int | None = None) -> None:
        self._intra_op = intra_op or threads or threads_here()
        self._inter_op = inter_op

    def load(self) -> None:
        """Open a session of onnxruntime."""
        self._session = open_session(self.path, self._intra_op, self._inter_op)
        self._names = [tensor.name for tensor in self.outputs]
        self._texts = {tensor.name for tensor in self.outputs if tensor.datatype == "BYTES"}
        self._text_inputs = {tensor.name for tensor in self.inputs if tensor.datatype == "BYTES"}
        self._reshaped_inputs = [tensor for tensor in self.inputs if tensor.reshape is not None]
        self._reshaped_outputs = [tensor for tensor in self.outputs if tensor.reshape is not None]

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the graph on arrays by input name; return arrays by output name."""
        for name in self._text_inputs & batch.keys():
            batch = {**batch, name: _decoded(batch[name])}
        for tensor in self._reshaped_inputs:
            if tensor.name in batch:
                own = tensor.reshape or ()
                batch = {**batch, tensor.name: _reshaped(batch[tensor.name], row_shape(tensor), own, tensor.batch)}
        outputs = dict(zip(self._names, self._session.run(self._names, batch), strict=True))
        for tensor in self._reshaped_outputs:
            own = tensor.reshape or ()
            outputs[tensor.name] = _reshaped(outputs[tensor.name], own, row_shape(tensor), tensor.batch)
        return {name: _encoded(array) if name in self._texts else array for name, array in outputs.items()}


def open_session(path: str, intra_op: int, inter_op: int | None = None, *, optimize: bool = True) -> Any:
    """Return an onnxruntime session of the file: on GPUs if this build of onnxruntime supports them, else on CPUs."""
    os.environ.update({**SILENCE, **os.environ})
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = intra_op
    if inter_op is not None:
        options.inter_op_num_threads = inter_op
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=onnxruntime.get_available_providers())


def row_shape(tensor: Tensor) -> Sequence[int]:
    """Return a tensor's shape without the batch dimension."""
    return tensor.shape if tensor.batch == NONE else tensor.shape[1:]


def _reshaped(array: Any, before: Sequence[int], after: Sequence[int], batch: str) -> Any:
    """Return `array` reshaped to `after`, which like `before` leaves the batch dimension out. The lengths at the -1 in `after`
    are, in order, those that the array has at the -1 in `before`."""
    import numpy as np

    array = np.asarray(array)
    rows = array.shape[: 0 if batch == NONE else 1]
    lengths = array.shape[len(rows) :]
    variable = iter([length for length, rule in zip(lengths, before, strict=True) if rule == -1])
    return array.reshape(*rows, *[next(variable) if rule == -1 else rule for rule in after])


def _decoded(array: Any) -> Any:
    import numpy as np

    texts = [each.decode() if isinstance(each, bytes) else each for each in array.ravel()]
    return np.array(texts, dtype=object).reshape(array.shape)


def _encoded(array: Any) -> Any:
    import numpy as np

    encoded = np.empty(array.shape, dtype=object)
    encoded.ravel()[:] = [each.encode() if isinstance(each, str) else each for each in array.ravel()]
    return encoded


def describe(session: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the names, datatypes, shapes and dimension names of the file's `inputs` and `outputs`. `defaults` are further
    inputs that requests may omit, as the file has values for them."""
    return {
        "inputs": _tensors(session.get_inputs()),
        "outputs": _tensors(session.get_outputs()),
        "defaults": _tensors(session.get_overridable_initializers()),
    }


def joins_rows(session: Any, inputs: Sequence[Mapping[str, Any]]) -> bool | None:
    """Try with a few random rows whether a batch gives each row the response that it gets alone.

    `inputs` are described as by `describe`, and their first dimensions may have any length. Returns None if no trial was possible.
    """
    import numpy as np

    random = np.random.default_rng(1)
    for length in _TRIED_LENGTHS:
        rows = [{each["name"]: _random_row(each, length, random) for each in inputs} for _ in range(_TRIED_ROWS)]
        try:
            alone = [session.run(None, row) for row in rows]
            again = session.run(None, rows[0])
        except Exception:  # another length may work
            continue
        if not all(_is_close(*each) for each in zip(again, alone[0], strict=True)):
            return None  # the same row gets different responses
        try:
            together = session.run(None, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
        except Exception:
            return False
        columns = zip(together, *alone, strict=True)
        return all(
            len(whole) == len(rows) and all(_is_close(whole[at : at + 1], part) for at, part in enumerate(parts))
            for whole, *parts in columns
        )
    return None


def _random_row(tensor: Mapping[str, Any], length: int, random: Any) -> Any:
    shape = (1, *[length if each == -1 else each for each in tensor["shape"][1:]])
    if tensor["datatype"] in ("FP16", "FP32", "FP64"):
        return random.standard_normal(shape).astype(NUMPY[tensor["datatype"]])
    bits = random.integers(0, 2, shape)  # 0 and 1 are valid both as indices of a table and as a mask
    return bits.astype(str).astype(object) if tensor["datatype"] == "BYTES" else bits.astype(NUMPY[tensor["datatype"]])


def _is_close(one: Any, other: Any) -> bool:
    import numpy as np

    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    widest = float(np.nanmax(np.abs(other.astype(float)), initial=0.0))
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * widest, equal_nan=True))


def _tensors(nodes: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": node.name,
            "datatype": _datatype(node),
            "shape": [length if isinstance(length, int) else -1 for length in node.shape],
            "names": [length if isinstance(length, str) else "" for length in node.shape],
        }
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
        opened = open_session(sys.argv[1], 1, optimize=False)
        described: dict[str, Any] = dict(describe(opened))
        print(json.dumps(described), flush=True)  # noqa: T201 - the server reads it
        shapes = [table["shape"] for key in ("inputs", "outputs") for table in described[key]]
        if sys.argv[2:] == [TRY] and all(shape[:1] == [-1] for shape in shapes):
            print(json.dumps({**described, JOINS: joins_rows(opened, described["inputs"])}))  # noqa: T201 - as above
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
