"""Memory that a tensor model asks for: arrays for its outputs in the worker's results, and its own arrays for its inputs."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from weir.errors import SettingsError
from weir.model import Model, overrides
from weir.wire.pickles import LARGE_BYTES
from weir.wire.tensors import DTYPES, Arrays
from weir.workers.sizes import Sizes

Open = Callable[[int], memoryview | None]


def allocator(open_place: Open) -> Callable[[tuple[int, ...], numpy.dtype[Any]], Any]:
    """Return what `Model.output` asks; `open_place` returns shared memory of so many bytes."""

    def allocate(shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Any:
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LARGE_BYTES or dtype.hasobject:
            return numpy.empty(shape, dtype)
        view = open_place(size_bytes)
        return numpy.empty(shape, dtype) if view is None else numpy.frombuffer(view, dtype).reshape(shape)

    return allocate


def input_buffers(model: Model, max_batch_size: int) -> Arrays:
    """Return the arrays that the model wants its inputs in. Raises SettingsError for one that cannot be: an array for no
    input, of another dtype, with too few rows, or with other lengths than those that are declared."""
    kind = type(model)
    if not overrides(kind, "input_buffers"):
        return {}
    rows = Sizes(kind).filled(max_batch_size)
    given: Mapping[str, Any] = model.input_buffers(rows)
    buffers: Arrays = {}
    for name, value in given.items():
        tensor = next((tensor for tensor in kind.inputs if tensor.name == name), None)
        if tensor is None:
            raise SettingsError(f"{kind.__name__}.input_buffers: {name!r} is no input")
        array = numpy.asarray(value)
        due = DTYPES[tensor.datatype]
        if array.dtype != due:
            raise SettingsError(f"{kind.__name__}.input_buffers: {name!r} is of {array.dtype}, must be of {due}")
        fits = array.ndim == len(tensor.shape) and array.flags.writeable and len(array) >= rows
        if not fits or any(rule not in (-1, has) for rule, has in zip(tensor.shape[1:], array.shape[1:], strict=True)):
            must = f"writable and of shape {[rows, *tensor.shape[1:]]} (or with more rows)"
            raise SettingsError(
                f"{kind.__name__}.input_buffers: {name!r} has shape {list(array.shape)}, must be {must}"
            )
        buffers[name] = array
    return buffers
