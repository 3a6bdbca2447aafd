"""JSON Schemas of what a model reads and writes, from the types, tensors and examples that it declares."""

import re
from collections.abc import Sequence
from typing import Any

from weir.messages import JSON
from weir.model import Example, Model, Tensor, is_tensor_model
from weir.wire.schema import REF_TEMPLATE, schema_of
from weir.wire.values import UNWRITABLE, decode, encode

Schema = dict[str, Any]

_COMPONENTS = REF_TEMPLATE.format("")
_NUMBERS = {
    "BOOL": "boolean",
    "BYTES": "string",
    "BF16": "number",
    "FP16": "number",
    "FP32": "number",
    "FP64": "number",
}


class Described:
    """What a model reads (`item`) and writes (`answer`) as schemas, the `components` these refer to, and `examples`."""

    def __init__(self, model: type[Model], name: str) -> None:
        self.components: dict[str, Schema] = {}
        self._prefix = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        if is_tensor_model(model):
            self.item, self.answer = tensors_schema(model.inputs), tensors_schema(model.outputs)
        else:
            self.item = self._schema(model.Input, "Input")
            self.answer = self._schema(model.Output, "Output")
        self.examples = [example_value(each) for each in model.examples]

    def _schema(self, declared: Any, role: str) -> Schema:
        """Return the schema of a declared type, with its components under names that no other model's have."""
        if declared is None:
            return {}
        schema, components = schema_of(declared, role).json_schema(output=role == "Output")
        prefix = f"{self._prefix}.{role}."
        self.components |= {prefix + name: _renamed(each, prefix) for name, each in components.items()}
        renamed: Schema = _renamed(schema, prefix)
        return renamed


def _renamed(schema: Any, prefix: str) -> Any:
    """Return `schema` with every reference leading to the component of that name with `prefix`."""
    if isinstance(schema, list):
        return [_renamed(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(each, prefix) for key, each in schema.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith(_COMPONENTS):
        renamed["$ref"] = _COMPONENTS + prefix + reference[len(_COMPONENTS) :]
    mapping = renamed.get("mapping")  # of a discriminator: tag -> reference
    if isinstance(mapping, dict) and "propertyName" in renamed:
        renamed["mapping"] = {tag: _renamed({"$ref": each}, prefix)["$ref"] for tag, each in mapping.items()}
    return renamed


def tensors_schema(tensors: Sequence[Tensor]) -> Schema:
    """Return the schema of an object that holds these tensors as nested lists."""
    return {
        "type": "object",
        "properties": {tensor.name: _tensor_schema(tensor) for tensor in tensors},
        "required": [tensor.name for tensor in tensors if not tensor.optional],
    }


def _tensor_schema(tensor: Tensor) -> Schema:
    schema: Schema = {"type": _NUMBERS.get(tensor.datatype, "integer")}
    for length in reversed(tensor.shape):
        bounds = {} if length < 0 else {"minItems": length, "maxItems": length}
        schema = {"type": "array", "items": schema, **bounds}
    return schema | {"description": f"{tensor.datatype}, shape {list(tensor.shape)}"}


def example_value(example: Any) -> dict[str, Any]:
    """Return an example as {"item", "answer"}, JSON-able; "answer" only if the model says what it must be."""
    given = example if isinstance(example, Example) else Example(example)
    shown = {"item": _plain(given.item)}
    if given.expected is not ...:
        shown["answer"] = _plain(given.expected)
    return shown


def _plain(value: Any) -> Any:
    """Return `value` as JSON says it; what JSON cannot say, as its repr."""
    try:
        return decode(encode(value, JSON), JSON)
    except UNWRITABLE:
        return repr(value)
