"""admission.py: what can never be in a batch is refused, and the message says why."""

from math import nan

import pytest
from tests.batching.mill import Asked, listed

from weir.batching.batcher import check_size
from weir.batching.settings import BatchingSettings
from weir.errors import InvalidRequest
from weir.messages import Kind

LIMITS = BatchingSettings(max_batch_size=8, max_batch_cost=5.0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Asked(0, rows=0), "rows=0: a request has at least 1 row"),
        (Asked([], kind=Kind.ITEMS, rows=0), "rows=0"),
        (Asked(0, rows=9), "rows=9: an item that cannot be divided has at most max_batch_size=8 rows"),
        (Asked([1, 2], kind=Kind.ITEMS, rows=18), "rows=9"),
        (Asked(0, cost=5.5), "cost=5.5: an item costs from 0 to max_batch_cost=5"),
        (Asked(0, cost=nan), "cost=nan"),
        (Asked(0, cost=-1.0), "cost=-1"),
        (Asked([1, 2], kind=Kind.ITEMS, rows=2, cost=11.0), "cost=5.5"),
    ],
)
def test_refused(request_: Asked, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_size(request_, LIMITS)


def test_accepted() -> None:
    check_size(listed(1000, cost=1000.0), LIMITS)
    check_size(Asked(0, rows=8, cost=5.0), LIMITS)
    check_size(Asked(0, cost=1e9), BatchingSettings(max_batch_size=8))
    check_size(Asked(0, cost=1e9), BatchingSettings(max_batch_cost=5.0, padded=True))
