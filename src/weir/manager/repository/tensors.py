"""The tensors that a model's file declares, held against those that the model itself does."""

from collections.abc import Mapping, Sequence
from typing import Any

from weir.errors import SettingsError
from weir.manager.spec import ModelToServe
from weir.model import NONE, OPTIONAL, RAGGED, REQUIRED, Model, Tensor, check_model
from weir.workers.source import declared

NAMES = ("inputs", "outputs")


def with_attributes(model: type[Model], said: ModelToServe) -> type[Model]:
    """Return `model` with what its file says of it: tensors where it says none itself, whether they have a batch dimension,
    examples, sizes to warm up at.

    Raises SettingsError where the two contradict each other.
    """
    attributes: dict[str, Any] = dict(said.attributes or {})
    batch = batch_said(attributes)
    attributes.pop("batch_dimension", None)
    if attributes.pop("decoupled", False) and not model.streaming:
        raise SettingsError(
            f"{said.label}: model_transaction_policy.decoupled: a streaming model says so in its class (streaming = True)"
        )
    for key in NAMES:
        tables = attributes.pop(key, None)
        own: Sequence[Tensor] = getattr(model, key)
        if own:
            attributes[key] = tuple(_with_batch(tensor, batch, f"{said.label}: {key}") for tensor in own)
            if tables is not None:
                check_agree(tables, attributes[key], f"{said.label}: {key}")
                formats = {table["name"]: table.get("format", "") for table in tables}
                attributes[key] = tuple(
                    tensor._replace(format=formats[tensor.name] or tensor.format) for tensor in attributes[key]
                )
        elif tables is not None and not _are_items(tables):
            attributes[key] = tuple(as_tensor(table, batch or REQUIRED, f"{said.label}: {key}") for table in tables)
    attributes = {key: value for key, value in attributes.items() if value != getattr(model, key, None)}
    return check_model(declared(model, attributes)) if attributes else model


def _are_items(tables: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether this is how a configuration of ours shows the items of a model without tensors."""
    return [(table["name"] in ("input", "output"), table["datatype"], table["shape"]) for table in tables] == [
        (True, "BYTES", [])
    ]


def batch_said(attributes: Mapping[str, Any]) -> str | None:
    """Return what a file says of the batch dimension (Tensor.batch), by itself or by the shapes in its tables; None: nothing."""
    said: str | None = attributes.get("batch_dimension")
    tables = [table for key in NAMES for table in attributes.get(key, ())]
    if said != NONE and tables and all(leaves_batch_out(table) for table in tables):
        return OPTIONAL  # AMD's clients send what the file says: no batch
    return said


def leaves_batch_out(table: Mapping[str, Any]) -> bool:
    """Tell whether a table gives the shape of one row, and means that requests may have it too."""
    return not table.get("batched") and table["shape"][:1] != [-1]


def _with_batch(tensor: Tensor, said: str | None, source: str) -> Tensor:
    if said is None or said == tensor.batch:
        return tensor
    if said == REQUIRED and tensor.batch == NONE:
        raise SettingsError(
            f"{source}: {tensor.name!r} has no batch dimension, says the model itself: max_batch_size must be 0"
        )
    keeps = (
        said == REQUIRED or tensor.batch == NONE
    )  # an optional dimension is there; one that is not cannot be left out
    return tensor if keeps else tensor._replace(batch=said)


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
        _check_means(table, tensor, f"{source}: {tensor.name!r}")
        shapes = [table["shape"]] if tensor.batch == NONE else [table["shape"], [-1, *table["shape"]]]
        if not any(_fits(shape, tensor.shape) for shape in shapes):
            raise SettingsError(
                f"{source}: {tensor.name!r} has shape {table['shape']}; the model itself has {list(tensor.shape)}"
            )


def _check_means(table: Mapping[str, Any], tensor: Tensor, source: str) -> None:
    """Raise SettingsError for what the file wants of a tensor, and the model itself does not have."""
    if table.get("optional") and not tensor.optional:
        raise SettingsError(f"{source}: optional: the model itself needs it")
    if table.get("ragged") and tensor.varying != RAGGED:
        raise SettingsError(f"{source}: allow_ragged_batch: a model says so in its class (Tensor(varying='ragged'))")
    if "reshape" in table and list(tensor.reshape or ()) != table["reshape"]:
        raise SettingsError(f"{source}: reshape: is for ONNX files; a class gets what requests have")


def _fits(said: Sequence[int], own: Sequence[int]) -> bool:
    return len(said) == len(own) and all(
        one == other or -1 in (one, other) for one, other in zip(said, own, strict=True)
    )


def as_tensor(table: Mapping[str, Any], batch: str, source: str) -> Tensor:
    """Return the tensor that a table of a file declares, whose model has this `batch` dimension. Raises SettingsError for what
    only a class or an ONNX file can have."""
    shape = table["shape"]
    # Where a file of Triton's says `dims`, and in AMD's examples, the batch is left out.
    whole = batch == NONE or (shape[:1] == [-1] and not table.get("batched"))
    tensor = Tensor(
        table["name"], table["datatype"], tuple(shape if whole else [-1, *shape]), batch=batch,
        optional=bool(table.get("optional")), format=table.get("format", ""),
    )  # fmt: skip
    _check_means(table, tensor, f"{source}: {tensor.name!r}")
    return tensor
