"""The state of a request, and the only module that writes it: `settled`, `taken`, `overtaken` and `partial`.

A request begins unsettled. It waits until all of it was dispatched, at once or in pieces: the items of a list or the rows of tensors, in steps of
equal size. Its responses are gathered until the last is there. It is settled once: by that response, by an error, or because its caller has left; any
later output is dropped. Other modules read the attributes, or call the functions here.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weir.errors import ModelError, Unsupported, WeirError
from weir.messages import Dispatch, Form, Kind, Request

MISSING = object()


class State(Protocol):
    """The attributes of a request that are written here."""

    settled: bool
    taken: int
    overtaken: int
    partial: Any


# The state of a new request, in this order: all of it is still to be dispatched.
NEW: tuple[bool, int, int, Any] = False, 0, 0, None


class RequestBase:
    """The attributes of a Request, for protocols to subclass (they add `finish` and `fail`). It arrives at the instant `arrival`."""

    __slots__ = (
        "arrival", "deadline", "form", "large", "overtaken", "partial", "payload", "settled", "taken", "trace",
    )  # fmt: skip
    settled: bool
    taken: int
    overtaken: int
    partial: Any
    tag: float = 0.0
    brief: bool = False

    def __init__(self, form: Form, payload: Any, arrival: float, trace: Any = None) -> None:
        self.form = form
        self.payload = payload
        self.arrival = arrival
        self.deadline = arrival + form.timeout
        self.trace = trace
        self.large = False
        self.settled, self.taken, self.overtaken, self.partial = NEW

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Raise Unsupported: this request has one response."""
        raise Unsupported(
            f"the frontend {self.form.frontend!r} returns one response per request, but a streaming model returns several"
        )


# Dispatching, at once or in pieces.


def steps(request: Request) -> int:
    """Return into how many pieces `request` could be divided; 1 if it cannot. Items of unequal size are kept together."""
    if request.form.kind is Kind.TENSORS:
        return request.form.rows
    if request.form.kind is Kind.ITEMS:
        items = len(request.payload)
        return items if items and request.form.rows % items == 0 else 1
    return 1


def rows_left(request: Request) -> int:
    """Return how many rows of `request` are still to be dispatched."""
    taken = request.taken
    if not taken:
        return request.form.rows
    if taken >= request.form.rows:
        return 0
    return request.form.rows - taken * (request.form.rows // steps(request))


def is_gone(request: Request) -> bool:
    """Return whether nothing of `request` waits any more."""
    return request.settled or request.taken >= request.form.rows


def dispatch(request: Request, stop: int, total: int) -> None:
    """Note that `request` is dispatched up to step `stop` of `total`. `taken` is `rows` when nothing is left, whatever the number of steps."""
    request.taken = request.form.rows if stop == total else stop


def dispatch_items(requests: Iterable[Request]) -> None:
    """Note that each of `requests`, which are items of one row, is dispatched."""
    for request in requests:
        request.taken = 1


def overtake(request: Request, times: int) -> None:
    """Note that `times` more batches have gone before `request`."""
    request.overtaken += times


def lead(request: Request) -> None:
    """Note that `request` is the first in a batch: it counts as overtaken by none."""
    request.overtaken = 0


# Responses, in pieces or whole.


class ListGather:
    """The responses to the items of a list, in order, with a WeirError in the place of an item that failed."""

    __slots__ = ("left", "outputs")

    def __init__(self, count: int) -> None:
        self.outputs: list[Any] = [MISSING] * count
        self.left = count

    def has(self, start: int) -> bool:
        """Return whether the item at `start` has its response."""
        return self.outputs[start] is not MISSING

    def put(self, start: int, stop: int, output: Any) -> bool:
        """Store one item's response, if it has none. Return whether all are there."""
        if self.outputs[start] is MISSING:
            self.outputs[start] = output
            self.left -= 1
        return not self.left

    def result(self) -> Any:
        """Return the whole response."""
        return self.outputs


class TensorGather:
    """The responses to ranges of rows: dicts of arrays. One error completes the request."""

    __slots__ = ("error", "left", "pieces")

    def __init__(self, rows: int) -> None:
        self.pieces: dict[int, dict[str, Any]] = {}
        self.left = rows
        self.error: WeirError | None = None

    def has(self, start: int) -> bool:
        """Return whether the rows from `start` have their response."""
        return start in self.pieces

    def put(self, start: int, stop: int, output: Any) -> bool:
        """Store the response to rows `start` to `stop`, if they have none. Return whether the request is complete."""
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
    import numpy  # only tensor models need it, and it loads slowly

    try:
        return {name: numpy.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    except (ValueError, KeyError, TypeError) as error:
        return ModelError(f"the results of the parts of a divided request cannot be combined: {error!r}")


def has_response(request: Request, start: int) -> bool:
    """Return whether the piece from item or row `start` has its response, or the whole request is settled."""
    return request.settled or (request.partial is not None and _gather_of(request).has(start))


def respond(request: Request, start: int, stop: int, output: Any) -> tuple[Request, Any] | None:
    """Store the output or error of items or rows `start` to `stop` of `request`. If that completes the request, settle it and return it with its
    whole output or its WeirError."""
    if request.settled:
        return None
    if request.form.kind is not Kind.ITEM:
        gather = _gather_of(request)
        if not gather.put(start, stop, output):
            return None
        output = gather.result()
    request.settled = True
    return request, output


def _gather_of(request: Request) -> ListGather | TensorGather:
    """Return the object that gathers the responses of `request`; the first call makes it."""
    if request.partial is None:
        request.partial = (
            TensorGather(request.form.rows) if request.form.kind is Kind.TENSORS else ListGather(len(request.payload))
        )
    gather: ListGather | TensorGather = request.partial
    return gather


def gathered(request: Request) -> list[Any]:
    """Return the responses that were gathered for a request which was settled before it had all of them."""
    gather = request.partial
    if gather is None:
        return []
    return gather.outputs if isinstance(gather, ListGather) else list(gather.pieces.values())


def finish_each(
    requests: Sequence[Request], outputs: Sequence[Any], cut: Dispatch, failed: Callable[[Request], None]
) -> list[tuple[Request, Any]]:
    """Settle each of `requests`, which are items, with its output, and call its `finish`, before the next one: what is done with a response may settle
    another request. `failed` is called, while the exception is handled, with each request whose `finish` raised. Return the requests that were
    settled already, with their outputs."""
    unwanted: list[tuple[Request, Any]] = []
    for request, output in zip(requests, outputs, strict=True):
        if request.settled:
            unwanted.append((request, output))
            continue
        request.settled = True
        try:
            request.finish(output, cut)
        except Exception:
            failed(request)
    return unwanted


# Other ends.


def settle(request: Request) -> bool:
    """Settle `request`: its caller has left, its deadline has passed, or no worker is there to run it. Return False if it was settled already."""
    if request.settled:
        return False
    request.settled = True
    return True


def refuse(request: Request, error: WeirError) -> None:
    """Settle `request`, which was not accepted, and have it fail with `error`."""
    request.settled = True
    request.fail(error)
