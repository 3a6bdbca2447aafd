"""Whether the first dimension of an ONNX file's tensors is a batch.

The file does not say. A model's configuration does, by `max_batch_size` or by how many dimensions it gives its tensors. Without
one a first dimension of a fixed length is no batch; whether one of any length is, is tried with a few rows that are made up, and
where that cannot be done, it is one if all tensors call it by the same name. What is no batch, or may be none, is not batched.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.manager.repository.onnx_model import JOINS
from weir.manager.repository.tensors import NAMES, batch_said, leaves_batch_out
from weir.model import NONE, OPTIONAL, REQUIRED

Described = Mapping[str, Any]  # what onnx_model.py has said of a file


class Batching(NamedTuple):
    """`batch` as in Tensor; `size`: that of the batches the file was made for, 0 if it takes any; `reason`: why there are none."""

    batch: str
    size: int = 0
    reason: str = ""


def find_batching(described: Described, said: Mapping[str, Any], source: str) -> Batching:
    """Return what holds for a file with the tensors `described`, whose configuration has said these attributes.

    Raises SettingsError for a configuration that wants batches of a model that cannot have them.
    """
    stated, ranks = batch_said(said), _said_by_ranks(described, said)
    if stated == NONE or (ranks == NONE and said.get("batch_dimension") is None):
        return Batching(NONE, reason="its configuration says so")
    tensors = [table for key in NAMES for table in described[key]]
    reason = _cannot(tensors)
    if stated is None and ranks is None:
        reason = reason or _left_open(tensors, described.get(JOINS))
    if not reason:
        size = max(table["shape"][0] for table in tensors)
        return Batching(OPTIONAL if OPTIONAL in (stated, ranks) else REQUIRED, max(size, 0))
    if stated is None and ranks is None:
        return Batching(NONE, reason=reason)
    raise SettingsError(f"{source}: max_batch_size must be 0: {reason}")


def says_batching(said: Mapping[str, Any]) -> bool:
    """Tell whether a configuration with these attributes says whether there are batches."""
    return "batch_dimension" in said or any(said.get(key) for key in NAMES)


def _said_by_ranks(described: Described, said: Mapping[str, Any]) -> str | None:
    """Return what the dimensions that the configuration gives say: as many as the file has, or all but the first."""
    found = set()
    for key in NAMES:
        own = {table["name"]: table["shape"] for table in described[key]}
        for table in said.get(key, ()):
            missing = len(own.get(table["name"], ())) - len(table["shape"])
            without = bool(table.get("batched")) or leaves_batch_out(table)
            if without and missing in (0, 1):
                found.add(NONE if missing == 0 else OPTIONAL if leaves_batch_out(table) else REQUIRED)
    return found.pop() if len(found) == 1 else None


def _cannot(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Say why the first dimension cannot be a batch; "" if it may be one."""
    for table in tensors:
        if not table["shape"]:
            return f"tensor {table['name']!r} is a scalar"
    fixed = {table["shape"][0]: table["name"] for table in tensors if table["shape"][0] != -1}
    if len(fixed) > 1:
        lengths = ", ".join(f"{name!r} has {length}" for length, name in fixed.items())
        return f"the first dimensions of its tensors differ: {lengths}"
    return ""


def _left_open(tensors: Sequence[Mapping[str, Any]], joins: bool | None) -> str:
    """Say why the first dimension is no batch, or why nobody knows it; "" if it is one. `joins`: see onnx_model.joins_rows."""
    for table in tensors:
        if table["shape"][0] != -1:
            return f"tensor {table['name']!r} has the fixed first dimension {table['shape'][0]}, which may be no batch"
    if joins is not None:
        return "" if joins else "rows together are not answered as they are alone (a trial has shown)"
    names = {table["names"][0]: table["name"] for table in tensors}
    elsewhere = {name for table in tensors for name in table["names"][1:]}
    if len(names) > 1 or "" in names or names.keys() & elsewhere:
        first = ", ".join(f"{table!r}: {name or 'none'}" for name, table in names.items())
        return f"it cannot be tried, and the names of the first dimensions do not say that they are a batch ({first})"
    return ""
