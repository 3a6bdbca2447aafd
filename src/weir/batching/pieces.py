"""How a request can be divided: into steps of equal size, an item of a list or a row of tensors each.

A request that cannot be divided has one step. `request.taken` counts the steps dispatched so far, and is `request.rows`
as soon as nothing of it is left in the line, so that `taken >= rows` says that it has gone.
"""

from weir.messages import Kind, Request


def steps(request: Request) -> int:
    """Return into how many pieces `request` could be divided. Items of unequal size are kept together."""
    if request.kind is Kind.TENSORS:
        return request.rows
    if request.kind is Kind.ITEMS:
        items = len(request.payload)
        return items if items and request.rows % items == 0 else 1
    return 1


def rows_left(request: Request) -> int:
    """Return how many rows of `request` are still to be dispatched."""
    taken = request.taken
    if not taken:
        return request.rows
    if taken >= request.rows:
        return 0
    return request.rows - taken * (request.rows // steps(request))
