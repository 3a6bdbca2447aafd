"""The platform `onnx`. The tensors of a model are read from its file, in a separate process: the server does not load
onnxruntime, so a file that makes onnxruntime crash does not harm the server.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weir.catalog.repository.model_files import (
    TENSORS,
    batch_dimension_of,
    leaves_batch_out,
    need,
    only_file,
    read_apart,
    with_attributes,
)
from weir.catalog.repository.onnx_model import JOINS, TRY, OnnxModel, row_shape
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError
from weir.model import NONE, OPTIONAL, REQUIRED, Model, Tensor, check_model
from weir.serving.delivery import logger
from weir.workers.process.launch import python_path
from weir.workers.source import declared

Described = Mapping[str, Any]  # what onnx_model.py prints about a file


class OnnxBatching(NamedTuple):
    """Whether requests for a file can be batched.

    Attributes:
        batch: as Tensor.batch.
        size: the only batch size, in rows, that the file accepts; 0 if it accepts any.
        reason: why requests cannot be batched; "" if they can.
    """

    batch: str
    size: int = 0
    reason: str = ""


def find_batching(described: Described, configured: Mapping[str, Any], source: str) -> OnnxBatching:
    """Return whether requests can be batched for a file with the tensors `described` and the attributes `configured`.

    Raises SettingsError for a configuration that wants batches of a model that cannot have them.
    """
    stated, ranks = batch_dimension_of(configured), _batch_dimension_by_ranks(described, configured)
    if stated == NONE or (ranks == NONE and configured.get("batch_dimension") is None):
        return OnnxBatching(NONE, reason="its configuration says so")
    tensors = [table for key in TENSORS for table in described[key]]
    reason = _why_no_batch(tensors)
    if stated is None and ranks is None:
        reason = reason or _why_unknown(tensors, described.get(JOINS))
    if not reason:
        size = max(table["shape"][0] for table in tensors)
        return OnnxBatching(OPTIONAL if OPTIONAL in (stated, ranks) else REQUIRED, max(size, 0))
    if stated is None and ranks is None:
        return OnnxBatching(NONE, reason=reason)
    raise SettingsError(f"{source}: max_batch_size must be 0: {reason}")


def states_batching(configured: Mapping[str, Any]) -> bool:
    """Return whether the attributes of a configuration state, or imply, whether requests are batched."""
    return "batch_dimension" in configured or any(configured.get(key) for key in TENSORS)


def _batch_dimension_by_ranks(described: Described, configured: Mapping[str, Any]) -> str | None:
    """Return the batch dimension that follows from the number of dimensions in the configuration: all that the file has, or all
    but the first. None if nothing follows."""
    found = set()
    for key in TENSORS:
        own = {table["name"]: table["shape"] for table in described[key]}
        for table in configured.get(key, ()):
            missing = len(own.get(table["name"], ())) - len(table["shape"])
            without = bool(table.get("batched")) or leaves_batch_out(table)
            if without and missing in (0, 1):
                found.add(NONE if missing == 0 else OPTIONAL if leaves_batch_out(table) else REQUIRED)
    return found.pop() if len(found) == 1 else None


def _why_no_batch(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return why the first dimension cannot be a batch; "" if it may be one."""
    for table in tensors:
        if not table["shape"]:
            return f"tensor {table['name']!r} is a scalar"
    fixed = {table["shape"][0]: table["name"] for table in tensors if table["shape"][0] != -1}
    if len(fixed) > 1:
        lengths = ", ".join(f"{name!r} has {length}" for length, name in fixed.items())
        return f"the first dimensions of its tensors differ: {lengths}"
    return ""


def _why_unknown(tensors: Sequence[Mapping[str, Any]], joins: bool | None) -> str:
    """Return why the first dimension is not a batch or why that is unknown; "" if it is a batch. `joins` is the result of
    onnx_model.joins_rows."""
    for table in tensors:
        if table["shape"][0] != -1:
            return f"tensor {table['name']!r} has the fixed first dimension {table['shape'][0]}, which may be no batch"
    if joins is not None:
        return "" if joins else "rows together are not answered as they are alone (a trial has shown that)"
    names = {table["names"][0]: table["name"] for table in tensors}
    elsewhere = {name for table in tensors for name in table["names"][1:]}
    if len(names) > 1 or "" in names or names.keys() & elsewhere:
        first = ", ".join(f"{table!r}: {name or 'none'}" for name, table in names.items())
        return f"it cannot be tried, and the names of the first dimensions do not say that they are a batch ({first})"
    return ""


class OnnxPlatform:
    """The platform `onnx`: ONNX files, run by onnxruntime."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the file. Raises SettingsError; see Platform."""
        need("onnxruntime", "onnx", model)
        path = only_file(model, [".onnx"])
        configured = _with_file_shapes(model.attributes or {}, model.label)
        described = _described(path, model.label, *([] if states_batching(configured) else [TRY]))
        described["inputs"] += _optional_inputs(configured, described)
        batching = find_batching(described, configured, model.label)
        if batching.reason:
            logger.info("model %r: each request runs alone: %s", model.label, batching.reason)
        tensors = {key: tuple(_tensor(table, batching) for table in described[key]) for key in TENSORS}
        sizes: dict[str, Any] = {}
        if batching.size:  # the file was made for batches of this size, and accepts no others
            sizes = {"max_batch_size": batching.size, "allowed_batch_sizes": (batching.size,)}
        found = declared(OnnxModel, {**tensors, **sizes, "path": str(path), "unbatched": batching.reason})
        found = with_attributes(found, model._replace(attributes=configured))
        return _with_request_shapes(found, model.attributes or {})


def _with_file_shapes(attributes: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `attributes` with the shapes of the file's tensors, where `reshape` makes them differ from those of requests."""
    own = dict(attributes)
    for key in TENSORS:
        tables = []
        for table in own.get(key, ()):
            if "reshape" in table:
                _check_reshape(table, f"{source}: {key}: {table['name']!r}")
                table = {**table, "shape": table["reshape"]}
                del table["reshape"]
            tables.append(table)
        if tables:
            own[key] = tuple(tables)
    return own


def _check_reshape(table: Mapping[str, Any], source: str) -> None:
    before, after = table["shape"], table["reshape"]
    if before.count(-1) != after.count(-1):
        raise SettingsError(f"{source}: reshape={after}: must have as many lengths of -1 as {before}")
    if math.prod(before) != math.prod(after):
        raise SettingsError(f"{source}: reshape={after}: must have as many elements as {before}")


def _with_request_shapes(model: type[Model], attributes: Mapping[str, Any]) -> type[Model]:
    """Return `model` with the shapes that its configuration gives to the tensors of requests and responses."""
    changed: dict[str, Any] = {}
    for key in TENSORS:
        shapes = {table["name"]: table["shape"] for table in attributes.get(key, ()) if "reshape" in table}
        if shapes:
            tensors: Sequence[Tensor] = getattr(model, key)
            changed[key] = tuple(
                _reshaped(tensor, shapes[tensor.name]) if tensor.name in shapes else tensor for tensor in tensors
            )
    return check_model(declared(model, changed)) if changed else model


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    whole = shape if tensor.batch == NONE else (-1, *shape)
    return tensor._replace(shape=tuple(whole), reshape=tuple(row_shape(tensor)))


def _optional_inputs(configured: Mapping[str, Any], described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs that the configuration names and for which the file has default values: requests may omit them."""
    wanted = {table["name"] for table in configured.get("inputs", ())}
    return [{**table, "optional": True} for table in described["defaults"] if table["name"] in wanted]


def _described(path: Path, source: str, *more: str) -> dict[str, Any]:
    """Return the file's description, as onnx_model prints it. With TRY in `more`, it also has JOINS, if that can be determined."""
    environment = {"PYTHONPATH": python_path(""), "PATH": ""}
    what = f"{source}: {path.name}: its tensors cannot be read"
    return read_apart("weir.catalog.repository.onnx_model", [str(path), *more], what, environment)


def _tensor(table: Mapping[str, Any], batching: OnnxBatching) -> Tensor:
    shape = tuple(table["shape"])
    whole = shape if batching.batch == NONE else (-1, *shape[1:])
    optional = bool(table.get("optional"))
    return Tensor(table["name"], table["datatype"], whole, batch=batching.batch, optional=optional)
