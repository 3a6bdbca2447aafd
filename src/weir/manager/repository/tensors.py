"""The tensors that a model's file declares, held against those that the model itself does."""

from collections.abc import Mapping, Sequence
from typing import Any

from weir.errors import SettingsError
from weir.manager.spec import ModelToServe
from weir.model import Model, Tensor, check_model
from weir.workers.source import declared

NAMES = ("inputs", "outputs")


def with_attributes(model: type[Model], said: ModelToServe) -> type[Model]:
    """Return `model` with what its file says of it: tensors where it says none itself, examples, sizes to warm up at.

    Raises SettingsError where the two contradict each other.
    """
    attributes: dict[str, Any] = dict(said.attributes or {})
    for key in NAMES:
        tables = attributes.pop(key, None)
        if tables is None:
            continue
        own: Sequence[Tensor] = getattr(model, key)
        if own:
            check_agree(tables, own, f"{said.label}: {key}")
        else:
            attributes[key] = tuple(as_tensor(table) for table in tables)
    return check_model(declared(model, attributes)) if attributes else model


def check_agree(tables: Sequence[Mapping[str, Any]], own: Sequence[Tensor], source: str) -> None:
    """Raise SettingsError unless the file declares exactly the tensors that the model has, in any order. Its shapes may leave
    the batch out."""
    tensors = {tensor.name: tensor for tensor in own}
    if tensors.keys() != {table["name"] for table in tables}:
        names = ", ".join(table["name"] for table in tables)
        raise SettingsError(f"{source}: are {names}; the model itself has {', '.join(tensors)}")
    for table in tables:
        tensor = tensors[table["name"]]
        if table["datatype"] != tensor.datatype:
            raise SettingsError(
                f"{source}: {tensor.name!r} has datatype {table['datatype']!r}; the model itself has {tensor.datatype!r}"
            )
        if not any(_fits(shape, tensor.shape) for shape in (table["shape"], [-1, *table["shape"]])):
            raise SettingsError(
                f"{source}: {tensor.name!r} has shape {table['shape']}; the model itself has {list(tensor.shape)}"
            )


def _fits(said: Sequence[int], own: Sequence[int]) -> bool:
    return len(said) == len(own) and all(
        one == other or -1 in (one, other) for one, other in zip(said, own, strict=True)
    )


def as_tensor(table: Mapping[str, Any]) -> Tensor:
    """Return the tensor that a table of a file declares."""
    shape = table["shape"]
    # Where a file of Triton's says `dims`, and in AMD's examples, the batch is left out.
    whole = shape if shape[:1] == [-1] and not table.get("batched") else [-1, *shape]
    return Tensor(table["name"], table["datatype"], tuple(whole))
