"""Weir's own HTTP meaning, part two: what the body of a request is to the line.

Most bodies stay as they are and the worker decodes them. A door decodes only what the line must know: the items of a
list, and the size of items that differ (`Model.measure`).
"""

from typing import Any, NamedTuple

from weir.errors import InvalidRequest, TooLarge, WeirError
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, Kind
from weir.model import is_tensor_model
from weir.protocols.native import Ask
from weir.wire.tensors import rows_of, shape_key, to_arrays
from weir.wire.values import decode, split


class Work(NamedTuple):
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
NOTHING = Work(None, Kind.ITEM, OBJECT, OBJECT, 1, 1.0, None, False)


def read_work(ask: Ask, body: bytes) -> list[Work | WeirError]:
    """Make work of the `body` of a request, decompressed: one element, unless it is a list whose items differ in size or
    are tensors; of these, one that cannot be work is an error in its place.

    Raises InvalidRequest for an empty or malformed body, and TooLarge for a list that can never fit into the line. What
    only the worker decodes, only the worker refuses.
    """
    if not body:
        raise empty_body(ask)
    if not ask.batch:
        return [read_item(ask, body)]
    items = split(body, ask.content_type)
    if ask.service.needs_measure or is_tensor_model(ask.service.model):
        return [_item_or_error(ask, item) for item in items]
    return [_work(ask, items, Kind.ITEMS, len(items), float(len(items)), ask.key)] if items else []


def empty_body(ask: Ask) -> InvalidRequest:
    """Return the error for a body of no bytes."""
    return InvalidRequest(f"body: is empty, must be {ask.content_type}")


def read_item(ask: Ask, body: bytes) -> Work:
    """Make work of one item: a body that is neither empty nor compressed, or an element of a list. Raises RequestErrors."""
    service = ask.service
    if is_tensor_model(service.model):
        return _tensors(ask, decode(body, ask.content_type))
    if not service.needs_measure or ask.content_type not in (JSON, MSGPACK, OCTETS):
        return _work(ask, body, Kind.ITEM, 1, 1.0, ask.key)
    measured = service.measure(body if ask.content_type == OCTETS else decode(body, ask.content_type))
    return _work(ask, body, Kind.ITEM, measured.rows, measured.cost, _joined(measured.key, ask.key))


def _item_or_error(ask: Ask, body: bytes) -> Work | WeirError:
    try:
        return read_item(ask, body)
    except WeirError as error:
        return error


def _tensors(ask: Ask, value: Any) -> Work:
    arrays = to_arrays(value, ask.service.model.inputs)
    rows, key = rows_of(arrays), _joined(shape_key(arrays), ask.key)
    cost = float(rows)
    if ask.service.needs_measure:
        measured = ask.service.measure(arrays)
        cost, key = measured.cost, _joined(measured.key, key)
    return _work(ask, arrays, Kind.TENSORS, rows, cost, key)._replace(content_type=OBJECT, accept=OBJECT)


def _joined(measured: Any, given: Any) -> Any:
    """Return one key for two, the same as calls in process have, so that they share batches."""
    return measured if given is None else (measured, given)


def _work(ask: Ask, payload: Any, kind: Kind, rows: int, cost: float, key: Any) -> Work:
    batching = ask.service.batching
    if rows > batching.max_queue_size:
        raise TooLarge(f"body of {rows} rows: must have at most {batching.max_queue_size} (max_queue_size)")
    large = 0 < batching.small_request_size < rows
    return Work(payload, kind, ask.content_type, ask.accept, rows, cost, key, large)
