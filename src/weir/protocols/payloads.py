"""Weir's own HTTP meaning, part two: what the body of a request is to the line.

Most bodies stay as they are and the worker decodes them. A door decodes only what the line must know: the items of a
list, and the size of items that differ (`Model.measure`).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import InvalidRequest, TooLarge, WeirError
from weir.messages import JSON, LENT, MSGPACK, OBJECT, OCTETS, Kind
from weir.model import is_batched, is_tensor_model
from weir.protocols.native import RequestHead
from weir.wire.tensors import Arrays, rows_of, shape_key, to_arrays
from weir.wire.values import decode, split

if TYPE_CHECKING:
    from weir.serving.service import Service


class QueueEntry(NamedTuple):
    """The arguments of a RequestBase that depend on the body."""

    payload: Any
    kind: Kind
    content_type: str
    accept: str
    rows: int
    cost: float
    key: Any
    large: bool


# The work of an item that was refused before it could be any.
NOTHING = QueueEntry(None, Kind.ITEM, OBJECT, OBJECT, 1, 1.0, None, False)


def read_work(ask: RequestHead, body: bytes) -> list[QueueEntry | WeirError]:
    """Make work of the `body` of a request, decompressed: one element, unless it is a list whose items differ in size or
    are tensors; of these, one that cannot be work is an error in its place.

    Raises InvalidRequest for an empty or malformed body, and TooLarge for a list that can never fit into the line, before its items
    are looked into. What only the worker decodes, only the worker refuses.
    """
    if not body and not may_be_empty(ask):
        raise empty_body(ask)
    if not ask.batch:
        return [read_item(ask, body)]
    most = ask.service.batching.max_queue_size
    items = split(body, ask.content_type, most)
    if items is None:
        raise TooLarge(f"body of more than {most} items: must have at most {most} (max_queue_size)")
    if not reads_items(ask):
        return [_work(ask, items, Kind.ITEMS, len(items), float(len(items)), ask.key)] if items else []
    works = [_item_or_error(ask, item) for item in items]
    rows = sum(work.rows for work in works if isinstance(work, QueueEntry))
    if rows > most:
        raise TooLarge(f"body of {rows} rows: must have at most {most} (max_queue_size)")
    return works


# An item of a list that is looked into takes as long as so many bytes.
_ITEM_BYTES = 8


def bytes_to_read(ask: RequestHead, body: bytes) -> int:
    """Return about how many bytes `read_work` has to read of `body`; those of lists whose items are looked into count more."""
    if ask.plain:
        return 0
    return len(body) * (_ITEM_BYTES if ask.batch and reads_items(ask) else 1)


def reads_items(ask: RequestHead) -> bool:
    """Tell whether the items of a list are looked into one by one, each then a request of its own."""
    return ask.service.needs_measure or is_tensor_model(ask.service.model)


def may_be_empty(ask: RequestHead) -> bool:
    """Tell whether a body of no bytes can be an item: of bytes, or of a content type of the model's own."""
    return not ask.batch and ask.content_type not in (JSON, MSGPACK)


def empty_body(ask: RequestHead) -> InvalidRequest:
    """Return the error for a body of no bytes."""
    return InvalidRequest(f"body: is empty, must be {ask.content_type}")


def read_item(ask: RequestHead, body: bytes) -> QueueEntry:
    """Make work of one item: a body that is neither empty nor compressed, or an element of a list. Raises RequestErrors."""
    service = ask.service
    if is_tensor_model(service.model):
        return tensor_work(service, to_arrays(decode(body, ask.content_type), service.model.inputs), ask.key)
    if not service.needs_measure or ask.content_type not in (JSON, MSGPACK, OCTETS):
        return _work(ask, body, Kind.ITEM, 1, 1.0, ask.key)
    measured = service.measure(body if ask.content_type == OCTETS else decode(body, ask.content_type))
    return _work(ask, body, Kind.ITEM, measured.rows, measured.cost, _joined(measured.key, ask.key))


def _item_or_error(ask: RequestHead, body: bytes) -> QueueEntry | WeirError:
    try:
        return read_item(ask, body)
    except WeirError as error:
        return error


def tensor_work(service: "Service", arrays: Arrays, key: Any = None) -> QueueEntry:
    """Make work of `arrays`, which are as the model declares them. Raises TooLarge for more rows than the line can ever take,
    and what the model's `measure` raises."""
    alone = not is_batched(service.model)
    shapes = None if service.streaming else shape_key(arrays, service.model.inputs)  # streams are not joined
    rows, key = 1 if alone else rows_of(arrays), _joined(shapes, key)
    cost = float(rows)
    if service.needs_measure:
        measured = service.measure(arrays)
        cost, key = measured.cost, _joined(measured.key, key)
    return as_work(service, arrays, Kind.ITEM if alone else Kind.TENSORS, rows, cost, key, accept=LENT)


def _joined(measured: Any, given: Any) -> Any:
    """Return one key for two, the same as calls in process have, so that they share batches."""
    return measured if given is None else (measured, given)


def _work(ask: RequestHead, payload: Any, kind: Kind, rows: int, cost: float, key: Any) -> QueueEntry:
    return as_work(ask.service, payload, kind, rows, cost, key, content_type=ask.content_type, accept=ask.accept)


def as_work(
    service: "Service", payload: Any, kind: Kind, rows: int, cost: float, key: Any, *, content_type: str = OBJECT,
    accept: str = OBJECT,
) -> QueueEntry:  # fmt: skip
    """Return work of so many rows. Raises TooLarge for more than the line can ever take."""
    batching = service.batching
    if rows > batching.max_queue_size:
        raise TooLarge(f"body of {rows} rows: must have at most {batching.max_queue_size} (max_queue_size)")
    large = 0 < batching.small_request_size < rows
    return QueueEntry(payload, kind, content_type, accept, rows, cost, key, large)
