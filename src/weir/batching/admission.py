"""What is refused at the door of the line, whatever waits in it."""

from weir.batching.pieces import steps
from weir.errors import InvalidRequest
from weir.messages import Request


def check_size(request: Request, max_rows: int, max_cost: float) -> None:
    """Raise InvalidRequest if `request`, or a single piece of it, can never be in a batch."""
    if request.rows < 1:
        raise InvalidRequest(f"rows={request.rows}: a request has at least 1 row")
    pieces = steps(request)
    rows = request.rows // pieces
    if rows > max_rows:
        raise InvalidRequest(f"rows={rows}: an item that cannot be divided has at most max_batch_size={max_rows} rows")
    if not 0.0 <= request.cost / pieces <= max_cost:
        raise InvalidRequest(f"cost={request.cost / pieces:g}: an item costs from 0 to max_batch_cost={max_cost:g}")
