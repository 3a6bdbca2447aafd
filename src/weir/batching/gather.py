"""Gather the answers of a request that has several entries, perhaps in several batches."""

from typing import Any

from weir.errors import ModelError, WeirError
from weir.messages import Kind, Request

MISSING = object()


class ListGather:
    """Answers of the items of a list, in order; a WeirError stands in the place of a failed one."""

    __slots__ = ("left", "outputs")

    def __init__(self, count: int) -> None:
        self.outputs: list[Any] = [MISSING] * count
        self.left = count

    def has(self, start: int) -> bool:
        """Tell whether the item at `start` has its answer."""
        return self.outputs[start] is not MISSING

    def put(self, start: int, stop: int, output: Any) -> bool:
        """Store one item's answer, the first time; tell whether all are there."""
        if self.outputs[start] is MISSING:
            self.outputs[start] = output
            self.left -= 1
        return not self.left

    def result(self) -> Any:
        """Return the whole answer."""
        return self.outputs


class TensorGather:
    """Answers of ranges of rows: dicts of arrays. One error is the end of all."""

    __slots__ = ("error", "left", "pieces")

    def __init__(self, rows: int) -> None:
        self.pieces: dict[int, dict[str, Any]] = {}
        self.left = rows
        self.error: WeirError | None = None

    def has(self, start: int) -> bool:
        """Tell whether the rows from `start` have their answer."""
        return start in self.pieces

    def put(self, start: int, stop: int, output: Any) -> bool:
        """Store the answer for rows `start` to `stop`, the first time; tell whether the request is at its end."""
        if isinstance(output, WeirError):
            self.error = output
        elif start not in self.pieces:
            self.pieces[start] = output
            self.left -= stop - start
        return self.error is not None or not self.left

    def result(self) -> Any:
        """Return the error, or the arrays joined along the first dimension."""
        if self.error is not None:
            return self.error
        pieces = [self.pieces[start] for start in sorted(self.pieces)]
        return pieces[0] if len(pieces) == 1 else _join(pieces)


def _join(pieces: list[dict[str, Any]]) -> Any:
    import numpy  # only tensor models need it, and it takes a while to load

    try:
        return {name: numpy.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    except (ValueError, KeyError, TypeError) as error:
        return ModelError(f"the answers to the pieces of a divided request do not fit together: {error!r}")


def left_in(request: Request) -> list[Any]:
    """Return the answers that were gathered for a request which is at its end without them."""
    gather = request.partial
    if gather is None:
        return []
    return gather.outputs if isinstance(gather, ListGather) else list(gather.pieces.values())


def gather_of(request: Request) -> ListGather | TensorGather:
    """Return where the answers of `request` are gathered, made at the first call."""
    if request.partial is None:
        request.partial = (
            TensorGather(request.rows) if request.kind is Kind.TENSORS else ListGather(len(request.payload))
        )
    gather: ListGather | TensorGather = request.partial
    return gather
