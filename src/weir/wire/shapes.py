"""The shapes that strangers claim: checked before any memory is taken for them."""

import math
from collections.abc import Sequence

from weir.errors import InvalidRequest

MAX_DIMENSIONS = 32  # numpy 1 can do no more
MAX_BYTES = (1 << 63) - 1


def element_count(name: str, shape: Sequence[int], item_bytes: int) -> int:
    """Return how many elements a tensor of this shape has, each of at least `item_bytes`.

    Raises InvalidRequest that names the tensor for a dimension below 0, too many of them, or a product beyond what can be
    addressed (also where a dimension of 0 makes the product itself 0).
    """
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"tensor {name!r}: has {len(shape)} dimensions, must have at most {MAX_DIMENSIONS}")
    for length in shape:
        if not 0 <= length <= MAX_BYTES:
            raise InvalidRequest(
                f"tensor {name!r}: has shape {_short(shape)}, dimensions must be from 0 to {MAX_BYTES}"
            )
    if math.prod([length or 1 for length in shape]) * item_bytes > MAX_BYTES:
        raise InvalidRequest(f"tensor {name!r}: shape {_short(shape)} takes more than {MAX_BYTES} bytes")
    return math.prod(shape)


def _short(shape: Sequence[int]) -> str:
    text = str(list(shape))
    return text if len(text) <= 100 else f"{text[:100]}..."
