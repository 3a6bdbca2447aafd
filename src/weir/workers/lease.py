"""Results that are arrays, read where the worker put them: the place is given back when the last array over it is gone.

Imported only for tensor models, as it needs numpy.
"""

from typing import Any

import numpy

from weir.workers.arena import ResultBlock


class Lease(numpy.ndarray[Any, Any]):
    """The bytes of a result, not writable, and the share in its place. Arrays over it keep it alive."""

    _block: ResultBlock | None = None  # views and copies of this array have none

    def __del__(self) -> None:
        if self._block is not None:
            self._block.release()


def lease(block: ResultBlock) -> Lease:
    """Return the bytes of `block` as an array that owns the one share in it."""
    # Made like this, and not as a view of an ordinary array: numpy would have what is made of it refer to that instead.
    leased = Lease(len(block.view), numpy.uint8, block.view)
    leased._block = block
    return leased


def owned(value: Any) -> Any:
    """Return a tensor model's answer such that its receiver may keep it and write to it."""
    if not isinstance(value, dict):
        return value
    return {name: array if array.flags.writeable else array.copy() for name, array in value.items()}
