"""ONNX files of a few nodes, and what their services answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

from onnx import TensorProto, helper

from weir import Service

Shape = tuple[Any, ...]


def onnx_file(
    nodes: Sequence[Any], inputs: dict[str, Shape], outputs: dict[str, Shape], constants: Sequence[Any] = (), kind: int = TensorProto.FLOAT
) -> bytes:  # fmt: skip
    """Return a file whose inputs and outputs have these shapes."""
    takes = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    makes = [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()]
    made = helper.make_graph(nodes, "g", takes, makes, constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """Return a node with these inputs and outputs."""
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def double(*shape: Any, kind: int = TensorProto.FLOAT, op: str = "Add") -> bytes:
    """Return a file that adds its input to itself."""
    node = helper.make_node(op, ["x"] if op == "Identity" else ["x", "x"], ["y"])
    return onnx_file([node], {"x": shape}, {"y": shape}, kind=kind)


def ask(service: Service, *batches: dict[str, Any]) -> list[Any]:
    """Return the answers of a service that is started for them."""

    async def main() -> list[Any]:
        async with service:
            return [await service.infer(batch) for batch in batches]

    return asyncio.run(main())
