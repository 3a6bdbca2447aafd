"""Warm-up: the model's examples, at several batch sizes, before anybody is served."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from weir.messages import OBJECT, Batch
from weir.model import Example, Model, is_tensor_model


def warmup_batches(model: type[Model], max_batch_size: int) -> Iterator[Batch]:
    """Return a batch of each warm-up size, filled with the examples in turn; none if there are no examples.

    An entry of a tensor model has as many rows as its example, so a batch may be smaller than its size says.
    """
    items = [example.item if isinstance(example, Example) else example for example in model.examples]
    if not items:
        return
    for size in warmup_sizes(model, max_batch_size):
        yield Batch(0, list(_filled(model, items, size)), OBJECT, OBJECT)


def warmup_sizes(model: type[Model], max_batch_size: int) -> list[int]:
    """Return the sizes to warm up at, in rising order."""
    if model.warmup_sizes is not None:
        return sorted({min(size, max_batch_size) for size in model.warmup_sizes})
    return sorted({1, math.isqrt(max_batch_size), max_batch_size})


def _filled(model: type[Model], items: list[Any], size: int) -> Iterator[Any]:
    if not is_tensor_model(model):
        return itertools.islice(itertools.cycle(items), size)
    from weir.workers.tensorwork import repeated

    return iter(repeated(model, items[0], size))  # one example, for all rows of a batch have the same shape
