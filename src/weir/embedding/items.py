"""What the native door is asked about a model of texts: items, each a text or an object that says more of one."""

from typing import Any, NamedTuple

import numpy

from weir.embedding.asking import read_field, read_text
from weir.embedding.calling import EmbeddingContext, check_text
from weir.embedding.raw import KINDS
from weir.embedding.texts import Encodes, Text
from weir.errors import InvalidRequest, WeirError
from weir.messages import OCTETS
from weir.protocols.native import RequestHead
from weir.wire.values import decode, split

_FIELDS = ("text", "pair", "is_tokenized", "dimensions", "truncate", "prompt")
_ID_BYTES = 4


class ItemOptions(NamedTuple):
    """What an item says besides its text; see Encodes.encode."""

    dimensions: int | None = None
    truncate: bool | None = None
    prompt: str | None = None
    whole_words: bool = False


class Item(NamedTuple):
    """One text, and what is wanted of it."""

    text: Text
    wish: ItemOptions = ItemOptions()


def read_items(ask: RequestHead, body: bytes, site: EmbeddingContext, encoder: Encodes) -> list[Item | WeirError]:
    """Return the items in `body`, in order: one, unless a list was asked with; of these, one that is wrong is an error in its place.

    Raises InvalidRequest for a body that is wrong as a whole.
    """
    if not ask.batch:
        return [read_item(body if ask.content_type == OCTETS else decode(body, ask.content_type), encoder)]
    parts = split(body, ask.content_type, site.max_texts)
    if parts is None:
        raise InvalidRequest(f"body: has more than {site.max_texts} texts (max_texts)")
    return [_item_or_error(part, ask.content_type, encoder) for part in parts]


def _item_or_error(part: bytes, content_type: str, encoder: Encodes) -> Item | WeirError:
    try:
        return read_item(decode(part, content_type), encoder)
    except WeirError as error:
        return error


def read_item(item: Any, encoder: Encodes) -> Item:
    """Return what an item is for `encoder`. Raises InvalidRequest naming the field and the rule."""
    if isinstance(item, bytes):
        return Item(_token_ids(item))
    if isinstance(item, (str, list)):
        return Item(read_text(item, "the item", None))
    if not isinstance(item, dict):
        raise InvalidRequest(f"an item of type {type(item).__name__}: {KINDS}")
    for name in item:
        if name not in _FIELDS:
            raise InvalidRequest(f"{str(name)[:80]!r}: there is no such field; there are {', '.join(_FIELDS)}")
    return Item(_text_of(item), _wish_of(item, encoder))


def _text_of(item: dict[str, Any]) -> Text:
    if "text" not in item:
        raise InvalidRequest(f"text: is missing; {KINDS}")
    if item.get("pair") is None:
        return read_text(item["text"], "text", read_field(item, "is_tokenized", bool, None))
    return check_text(item["text"], "text"), check_text(item["pair"], "pair")


def _wish_of(item: dict[str, Any], encoder: Encodes) -> ItemOptions:
    dimensions = read_field(item, "dimensions", int, None)
    if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
        rule = f"must be 1 to {encoder.dimensions}, as many as vectors of {encoder.name!r} have"
        raise InvalidRequest(f"dimensions={dimensions}: {rule}")
    return ItemOptions(
        dimensions, read_field(item, "truncate", bool, None), read_field(item, "prompt", str, None),
        bool(read_field(item, "is_tokenized", bool, False)),
    )  # fmt: skip


def _token_ids(item: bytes) -> Text:
    if not item or len(item) % _ID_BYTES:
        raise InvalidRequest(f"token ids of {len(item)} bytes: must be one or more, each an int32 of {_ID_BYTES} bytes")
    ids: list[int] = numpy.frombuffer(item, "<i4").tolist()
    return ids
