"""The entries of a batch as the one dict of arrays that a tensor model's `predict` gets.

Rows are joined along the first dimension. What the model declares of its inputs (Tensor.varying, allowed_batch_sizes,
owns_inputs) is done here, and splitting.py undoes it with the answers.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from weir.errors import SettingsError
from weir.model import GROUP, PAD, Model, Tensor, is_batched
from weir.wire.bfloat16 import to_bits
from weir.wire.tensors import DTYPES, Arrays, rows_of
from weir.workers.adjoining import adjoined
from weir.workers.kservework import Listed, joined
from weir.workers.sizes import Sizes

Array = numpy.ndarray[Any, Any]


class Stacker:
    """Joins the entries of batches for one model."""

    def __init__(self, model: type[Model], buffers: Arrays | None = None) -> None:
        """`buffers`: arrays that these inputs are gathered into (see buffers.py). Raises SettingsError for a `pad_value` that
        its datatype cannot hold."""
        self._declared = tuple(model.inputs)
        self._varying = {tensor.name: tensor for tensor in model.inputs if tensor.varying != GROUP}
        self._pads = {tensor.name: _pad_value(model, tensor) for tensor in model.inputs if tensor.varying == PAD}
        self._buffers = buffers or {}
        self._sizes = Sizes(model)
        self._owns = model.owns_inputs
        self._batched = is_batched(model)

    def __call__(self, entries: Sequence[Arrays | Listed]) -> Arrays:
        """Return what `predict` gets. Where one entry is the whole batch its arrays are not copied."""
        listed = [entry for entry in entries if isinstance(entry, Listed)]
        batch = joined(listed, self._declared) if len(listed) == len(entries) else None
        if batch is None:
            return self._join(
                [entry.arrays(self._declared) if isinstance(entry, Listed) else entry for entry in entries]
            )
        for array in batch.values():
            array.flags.writeable = self._owns
        return batch

    def _join(self, entries: Sequence[Arrays]) -> Arrays:
        if not self._batched:
            (entry,) = entries
            return {name: self._whole([array]) for name, array in entry.items()}
        entries = self._filled_up(entries)
        batch: Arrays = {}
        for name in entries[0]:
            parts = [entry[name] for entry in entries]
            tensor = self._varying.get(name)
            if tensor is None:
                batch[name] = self._gathered(name, parts)
                continue
            if tensor.varying == PAD:
                batch[name] = self._padded(parts, tensor)
            else:
                batch[name] = self._whole(list(map(_flat, parts)))
            batch[tensor.lengths_name] = _lengths(parts, tensor)
        return batch

    def _filled_up(self, entries: Sequence[Arrays]) -> Sequence[Arrays]:
        """Return `entries`, and if that is not as many rows as an allowed size, an entry that fills them up."""
        if not self._sizes:
            return entries
        rows = sum(map(rows_of, entries))
        more = self._sizes.filled(rows) - rows
        if not more:
            return entries
        last = {name: numpy.repeat(array[-1:], more, axis=0) for name, array in entries[-1].items()}
        return [*entries, last]

    def _gathered(self, name: str, parts: list[Array]) -> Array:
        rows = sum(map(len, parts))
        into = self._buffers.get(name)
        if into is None or into.shape[1:] != parts[0].shape[1:] or len(into) < rows:
            return self._whole(parts)
        return numpy.concatenate(parts, out=into[:rows])

    def _whole(self, parts: list[Array]) -> Array:
        if len(parts) > 1:
            adjoining = None if self._owns else adjoined(parts)
            whole = numpy.concatenate(parts) if adjoining is None else adjoining
        else:
            whole = parts[0].copy() if self._owns else parts[0].view()
        if not self._owns:
            whole.flags.writeable = False
        return whole

    def _padded(self, parts: list[Array], tensor: Tensor) -> Array:
        rows = sum(map(len, parts))
        shapes = [part.shape[1:] for part in parts]
        longest = tuple([max(lengths) for lengths in zip(*shapes, strict=True)])
        into = self._buffers.get(tensor.name)
        if into is None or len(into) < rows or any(map(operator.gt, longest, into.shape[1:])):
            if shapes.count(longest) == len(shapes):
                return self._whole(parts)
            into = numpy.empty((rows, *longest), parts[0].dtype)
        padded = into[:rows]
        padded[...] = self._pads[tensor.name]
        start = 0
        for part in parts:
            stop = start + len(part)
            padded[start:stop, *map(slice, part.shape[1:])] = part
            start = stop
        if tensor.name not in self._buffers:
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
        return to_bits(numpy.array(value, numpy.float32))
    try:
        with numpy.errstate(over="raise"):
            return numpy.array(value, dtype)
    except (OverflowError, FloatingPointError, ValueError) as error:
        raise SettingsError(
            f"{model.__name__}: tensor {tensor.name!r} has pad_value={value!r}, which is no {tensor.datatype} ({error})"
        ) from None
