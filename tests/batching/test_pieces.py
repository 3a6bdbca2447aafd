"""pieces.py: into what a request can be divided."""

import numpy
import pytest
from tests.batching.mill import Asked, listed

from weir.batching.pieces import rows_left, steps
from weir.messages import Kind


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Asked(0), 1),
        (Asked(0, rows=7), 1),
        (listed(5), 5),
        (Asked([1, 2, 3], kind=Kind.ITEMS, rows=6), 3),
        (Asked([1, 2, 3], kind=Kind.ITEMS, rows=7), 1),  # unequal items: kept together
        (Asked([], kind=Kind.ITEMS, rows=0), 1),
        (Asked({"x": numpy.zeros((4, 2))}, kind=Kind.TENSORS, rows=4), 4),
    ],
)
def test_steps(request_: Asked, expected: int) -> None:
    assert steps(request_) == expected


def test_rows_left() -> None:
    request = Asked([1, 2, 3], kind=Kind.ITEMS, rows=6)
    assert rows_left(request) == 6
    request.taken = 2
    assert rows_left(request) == 2
    request.taken = 6
    assert rows_left(request) == 0
