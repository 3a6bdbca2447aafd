from collections.abc import Sequence

import pytest

from weir.errors import InvalidRequest
from weir.wire.tensors import MAX_BYTES, element_count


@pytest.mark.parametrize(("shape", "count"), [([], 1), ([3], 3), ([2, 3, 4], 24), ([0, 5], 0)])
def test_count(shape: Sequence[int], count: int) -> None:
    assert element_count("x", shape, 8) == count


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([-1], "tensor 'x': has shape [-1], dimensions must be from 0 to"),
        ([2, -(2**70)], "dimensions must be"),
        ([MAX_BYTES + 1], "dimensions must be"),
        ([10**200], "dimensions must be"),
        ([MAX_BYTES], "takes more than"),
        ([2**31, 2**31], "takes more than"),
        ([0, 2**62], "takes more than"),
        ([1] * 40, "has 40 dimensions, must have at most 32"),
    ],
)
def test_what_cannot_be(shape: Sequence[int], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        element_count("x", shape, 8)
    assert words in caught.value.message
    assert len(caught.value.message) < 300
