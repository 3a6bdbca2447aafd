"""What a tensor model's `predict` returned, checked against the declaration, and divided among the entries of the batch."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy

from weir.errors import ModelError
from weir.model import RAGGED, Model, Tensor, is_batched
from weir.wire.tensors import Arrays, read_arrays, rows_of
from weir.workers.kservework import Listed
from weir.workers.sizes import Sizes

Array = numpy.ndarray[Any, Any]


class Splitter:
    """Divides the answers of one model."""

    def __init__(self, model: type[Model]) -> None:
        inputs = {tensor.name: tensor for tensor in model.inputs}
        self._batched = is_batched(model)
        self._sizes = Sizes(model)
        self._sources = {tensor.name: (tensor, inputs[tensor.like]) for tensor in model.outputs if tensor.like}
        self._returned = [self._as_returned(tensor) for tensor in model.outputs]

    def __call__(self, returned: Any, entries: Sequence[Any]) -> list[Arrays]:
        """Return the answer to each of `entries`: views of what `predict` returned, in the order declared.

        Raises ModelError, naming the tensor, for anything but the tensors declared, with as many rows as the batch had.
        """
        arrays = read_arrays(returned, self._returned, wrong_tensors)
        if not self._batched:
            return [arrays]
        counts = [entry.rows if type(entry) is Listed else rows_of(entry) for entry in entries]
        filled = self._sizes.filled(sum(counts))
        columns = [self._column(name, array, entries, counts, filled) for name, array in arrays.items()]
        return [dict(zip(arrays, parts, strict=True)) for parts in zip(*columns, strict=True)]

    def _as_returned(self, tensor: Tensor) -> Tensor:
        _, source = self._sources.get(tensor.name, (tensor, None))
        if source is None or source.varying != RAGGED:
            return tensor
        return Tensor(tensor.name, tensor.datatype, (-1, *tensor.shape[2:]))

    def _column(self, name: str, array: Array, entries: Sequence[Any], counts: list[int], filled: int) -> list[Array]:
        if name not in self._sources:
            return _rows(name, array, counts, filled)
        tensor, source = self._sources[name]
        if any(source.name not in entry for entry in entries):
            raise wrong_tensors(f"tensor {name!r} is like {source.name!r}, which preprocess has taken away")
        given = [entry[source.name] for entry in entries]
        if source.varying == RAGGED:
            return _ragged(name, array, given, filled - sum(counts))
        parts = _rows(name, array, counts, filled)
        return [_cut(tensor, part, like, source) for part, like in zip(parts, given, strict=True)]


def wrong_tensors(text: str) -> ModelError:
    """Return the error of a model that returned something else than it declares."""
    return ModelError(f"predict returned wrong tensors: {text}")


def _rows(name: str, array: Array, counts: list[int], filled: int) -> list[Array]:
    if len(array) != filled:
        raise ModelError(f"predict returned {len(array)} rows for a batch of {filled} (tensor {name!r})")
    if len(counts) == 1 and counts[0] == filled:
        return [array]
    return [array[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _cut(tensor: Tensor, part: Array, like: Array, source: Tensor) -> Array:
    """Return the part of a padded answer in the true lengths of its question."""
    index = [slice(None)] * part.ndim
    for place, source_place in zip(tensor.variable, source.variable, strict=True):
        length = like.shape[source_place]
        if part.shape[place] < length:
            raise wrong_tensors(
                f"tensor {tensor.name!r}: has shape {list(part.shape)}, must be as long as {source.name!r} {list(like.shape)}"
            )
        index[place] = slice(length)
    return part[tuple(index)]


def _ragged(name: str, array: Array, given: list[Array], more: int) -> list[Array]:
    """Divide values that come one after the other; those of `more` rows like the last were only to fill the batch up."""
    sizes = [like.shape[0] * like.shape[1] for like in given]
    due = sum(sizes) + more * given[-1].shape[1]
    if len(array) != due:
        raise ModelError(f"predict returned {len(array)} values for a batch of {due} (tensor {name!r})")
    parts = [array[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [part.reshape(*like.shape[:2], *array.shape[1:]) for part, like in zip(parts, given, strict=True)]
