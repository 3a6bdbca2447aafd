"""Weir's own HTTP meaning, part two: what the body of a request is to the line.

Most bodies stay as they are and the worker decodes them. A door decodes only what the line must know: the items of a
list, and the size of items that differ (`Model.measure`).
"""

from typing import Any, NamedTuple

import msgspec

from weir.errors import InvalidRequest
from weir.messages import JSON, MSGPACK, OCTETS, Kind
from weir.protocols.codings import decompress
from weir.protocols.native import Ask


class Work(NamedTuple):
    """The arguments of a RequestBase that depend on the body."""

    payload: Any
    kind: Kind
    content_type: str
    accept: str
    rows: int
    cost: float
    key: Any


def read_work(ask: Ask, body: bytes, max_body_size: int) -> list[Work]:
    """Make work of the `body` of a request: one element, unless it is a list whose items differ in size or are tensors.

    Raises InvalidRequest for an empty, damaged or malformed body, and TooLarge for one that has more than
    `max_body_size` bytes after decompression. What only the worker decodes, only the worker refuses.
    """
    if ask.coding:
        body = decompress(body, ask.coding, max_body_size)
    if not body:
        raise empty_body(ask)
    if not ask.batch:
        return [_item(ask, body)]
    items = split(body, ask.content_type)
    if ask.service.needs_measure:
        return [_item(ask, item) for item in items]
    if not items:
        return []
    return [Work(items, Kind.ITEMS, ask.content_type, ask.accept, len(items), float(len(items)), ask.key)]


def empty_body(ask: Ask) -> InvalidRequest:
    """Return the error for a body of no bytes."""
    return InvalidRequest(f"body: is empty, must be {ask.content_type}")


def split(body: bytes, content_type: str) -> list[bytes]:
    """Return the elements of a list in JSON or msgpack, each still encoded; InvalidRequest if it is none."""
    try:
        return [bytes(item) for item in _LISTS[content_type].decode(body)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: must be a list in {content_type} ({error})") from None


_LISTS: dict[str, Any] = {
    JSON: msgspec.json.Decoder(list[msgspec.Raw]),
    MSGPACK: msgspec.msgpack.Decoder(list[msgspec.Raw]),
}


def _item(ask: Ask, body: bytes) -> Work:
    service = ask.service
    if not service.needs_measure or ask.content_type not in _DECODERS:
        return Work(body, Kind.ITEM, ask.content_type, ask.accept, 1, 1.0, ask.key)
    rows, cost, key = service.measure(decode(body, ask.content_type))
    if ask.key is not None:
        key = (key, ask.key)
    return Work(body, Kind.ITEM, ask.content_type, ask.accept, rows, cost, key)


def decode(body: bytes, content_type: str) -> Any:
    """Return the value in `body`, which is JSON, msgpack or octets; InvalidRequest if it is damaged."""
    try:
        return _DECODERS[content_type](body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: must be {content_type} ({error})") from None


_DECODERS: dict[str, Any] = {
    JSON: msgspec.json.Decoder().decode,
    MSGPACK: msgspec.msgpack.Decoder().decode,
    OCTETS: bytes,
}
