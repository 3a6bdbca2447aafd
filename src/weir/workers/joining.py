"""The entries of a batch as the one dict of arrays that a tensor model's `predict` gets.

Rows are joined along the first dimension. What the model declares of its inputs (Tensor.varying, allowed_batch_sizes,
owns_inputs) is done here, and parting.py undoes it with the answers.
"""

from collections.abc import Sequence
from typing import Any

import numpy

from weir.errors import SettingsError
from weir.model import GROUP, PAD, Model, Tensor
from weir.wire.tensors import DTYPES, Arrays, rows_of
from weir.workers.sizes import Sizes

Array = numpy.ndarray[Any, Any]


class Joiner:
    """Joins the entries of batches for one model."""

    def __init__(self, model: type[Model]) -> None:
        """Raises SettingsError for a `pad_value` that its datatype cannot hold."""
        self._varying = {tensor.name: tensor for tensor in model.inputs if tensor.varying != GROUP}
        self._pads = {tensor.name: _pad_value(model, tensor) for tensor in model.inputs if tensor.varying == PAD}
        self.sizes = Sizes(model)
        self._owns = model.owns_inputs

    def __call__(self, entries: Sequence[Arrays]) -> Arrays:
        """Return what `predict` gets. Where one entry is the whole batch its arrays are not copied."""
        entries = self._filled_up(entries)
        batch: Arrays = {}
        for name in entries[0]:
            parts = [entry[name] for entry in entries]
            tensor = self._varying.get(name)
            if tensor is None:
                batch[name] = self._joined(parts)
                continue
            if tensor.varying == PAD:
                batch[name] = self._padded(parts, tensor)
            else:
                batch[name] = self._joined(list(map(_flat, parts)))
            batch[tensor.lengths_name] = _lengths(parts, tensor)
        return batch

    def _filled_up(self, entries: Sequence[Arrays]) -> Sequence[Arrays]:
        """Return `entries`, and if that is not as many rows as an allowed size, an entry that fills them up."""
        if not self.sizes:
            return entries
        rows = sum(map(rows_of, entries))
        more = self.sizes.filled(rows) - rows
        if not more:
            return entries
        last = {name: numpy.repeat(array[-1:], more, axis=0) for name, array in entries[-1].items()}
        return [*entries, last]

    def _joined(self, parts: list[Array]) -> Array:
        if len(parts) > 1:
            joined = numpy.concatenate(parts)
        else:
            joined = parts[0].copy() if self._owns else parts[0].view()
        if not self._owns:
            joined.flags.writeable = False
        return joined

    def _padded(self, parts: list[Array], tensor: Tensor) -> Array:
        shapes = [part.shape[1:] for part in parts]
        if shapes.count(shapes[0]) == len(shapes):
            return self._joined(parts)
        longest = [max(lengths) for lengths in zip(*shapes, strict=True)]
        padded = numpy.full((sum(map(len, parts)), *longest), self._pads[tensor.name], parts[0].dtype)
        start = 0
        for part in parts:
            rows = slice(start, start + len(part))
            padded[rows, *map(slice, part.shape[1:])] = part
            start = rows.stop
        padded.flags.writeable = self._owns
        return padded


def _flat(part: Array) -> Array:
    return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])


def _lengths(parts: list[Array], tensor: Tensor) -> Array:
    """One row for each row of the batch: its lengths in the dimensions that vary."""
    lengths = numpy.array([[part.shape[place] for place in tensor.variable] for part in parts], numpy.int64)
    each = numpy.repeat(lengths, [len(part) for part in parts], axis=0)
    return each[:, 0] if len(tensor.variable) == 1 else each


def _pad_value(model: type[Model], tensor: Tensor) -> Any:
    value, dtype = tensor.pad_value, DTYPES[tensor.datatype]
    if tensor.datatype == "BYTES":
        return value or b""
    if tensor.datatype == "BF16":
        return numpy.array(value, "<f4").view("<u4") >> 16
    try:
        with numpy.errstate(over="raise"):
            return numpy.array(value, dtype)
    except (OverflowError, FloatingPointError, ValueError) as error:
        raise SettingsError(
            f"{model.__name__}: tensor {tensor.name!r} has pad_value={value!r}, which is no {tensor.datatype} ({error})"
        ) from None
