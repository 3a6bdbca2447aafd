"""What is refused at the door of the line, whatever waits in it."""

from math import inf

from weir.batching.request_state import steps
from weir.batching.settings import BatchingSettings
from weir.errors import InvalidRequest
from weir.messages import Request


def check_size(request: Request, settings: BatchingSettings) -> None:
    """Raise InvalidRequest if `request`, or a single piece of it, can never be in a batch. Where batches are padded, a single one
    that is too long for `max_batch_cost` goes alone."""
    max_rows = settings.max_batch_size
    max_cost = inf if settings.padded or settings.max_batch_cost is None else settings.max_batch_cost
    if request.rows < 1:
        raise InvalidRequest(f"rows={request.rows}: a request has at least 1 row")
    pieces = steps(request)
    rows = request.rows // pieces
    if rows > max_rows:
        raise InvalidRequest(f"rows={rows}: an item that cannot be divided has at most max_batch_size={max_rows} rows")
    if not 0.0 <= request.cost / pieces <= max_cost:
        raise InvalidRequest(f"cost={request.cost / pieces:g}: an item costs from 0 to max_batch_cost={max_cost:g}")
