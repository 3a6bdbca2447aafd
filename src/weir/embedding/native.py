"""A model of texts at the native endpoints: each item is a text with an end of its own, a vector or an error."""

import asyncio
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.embedding.calling import (
    FOREIGN,
    TRUNCATED,
    Caller,
    EmbeddingContext,
    as_json,
    check_text,
    read_field,
    read_text,
)
from weir.embedding.model import KINDS
from weir.embedding.texts import Encoded, Encodes, Text
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, WeirError
from weir.messages import JSON, OCTETS, Dispatch
from weir.protocols.native import FRONTEND
from weir.protocols.status import http_code
from weir.serving.inference import InferenceCall, ItemHead, ItemsResponse, empty_body
from weir.wire.tensors import TEXT_BYTES
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


def read_items(ask: ItemHead, body: bytes, site: EmbeddingContext, encoder: Encodes) -> list[Item | WeirError]:
    """Return the items in `body`, in order: one, unless a list was asked with; of these, one that is wrong is an error in its place.

    Raises InvalidRequest for a body that is wrong as a whole.
    """
    if not body:
        raise empty_body(ask)
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


_ITEM_BYTES = 8  # as which a byte of items counts that are looked into one by one
_AT_ONCE = 64  # wishes of one request that are under way; each is a request of its own to the encoder


class Vector(NamedTuple):
    """The end of an item that has a vector, or one for each token; whether its text was cut."""

    numbers: NDArray[Any]
    truncated: bool


End = Vector | WeirError


class NativeTexts:
    """Answers bodies of texts by `encoder`."""

    def __init__(self, site: EmbeddingContext, encoder: Encodes) -> None:
        self._site = site
        self._encoder = encoder

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """See serving.inference.Inference."""
        name, counts = head.service.name, self._site.counts
        try:
            caller = Caller([*call.headers])
            items = await self._items(head, body, call)
            whose = caller.whose(call.peer)
            self._site.clients.asked(whose, len(items), door=call.door)
            work = _Work(self._encoder, head, items, caller.client)
            ends = await work.ends(call.trace)
            self._site.clients.warn_of_ids(whose, work.foreign, name)
            if not head.batch and isinstance(ends[0], WeirError):
                raise ends[0]
        except WeirError as error:
            counts.refused(name, call.door, http_code(error))
            raise
        vectors = [end for end in ends if isinstance(end, Vector)]
        cut = sum(vector.truncated for vector in vectors)
        counts.answered(name, call.door, len(vectors), cut)
        headers = [(TRUNCATED, b"%d" % cut)] if cut else []
        headers += [(FOREIGN, b"%d" % work.foreign)] if work.foreign else []
        beside = {
            place: {"truncated": True} for place, end in enumerate(ends) if isinstance(end, Vector) and end.truncated
        }
        size = TEXT_BYTES * sum(vector.numbers.size for vector in vectors)
        dispatch, arrival = work.dispatch or (None, 0.0)
        return ItemsResponse(size, partial(_bodies, ends, head.accept), dispatch, arrival, headers, beside)

    async def _items(self, head: ItemHead, body: bytes, call: InferenceCall) -> list[Item | WeirError]:
        read = partial(read_items, head, body, self._site, self._encoder)
        items = await call.read(_ITEM_BYTES * len(body), read)
        for item in items:
            if isinstance(item, WeirError):
                head.service.tell_refused(call.door, item)
        return items


class _Work:
    """The items of one request on their way: those that want the same go together. `dispatch` is the batch of the first answered;
    `foreign` counts items that came as token ids of another model, see Encoded."""

    def __init__(self, encoder: Encodes, ask: ItemHead, items: list[Item | WeirError], client: str) -> None:
        self._encoder = encoder
        self._ask = ask
        self._items = items
        self._client = client
        self.dispatch: tuple[Dispatch, float] | None = None
        self.foreign = 0

    async def ends(self, trace: Any) -> list[End]:
        """Return the end of each item. Raises CapacityError if that is the end of all of them."""
        alike: dict[ItemOptions, list[int]] = {}
        ends: list[Any] = list(self._items)
        for place, item in enumerate(self._items):
            if isinstance(item, Item):
                alike.setdefault(item.wish, []).append(place)
        waiting = iter(alike.items())
        # The first has the span that the caller hears of; the others are beside it.
        traces = chain([trace], repeat(getattr(trace, "traceparent", None)))
        began = asyncio.get_running_loop().time()

        async def encode_next() -> None:
            for (wish, places), own in zip(waiting, traces):  # noqa: B905 - the traces have no end
                left = self._ask.timeout - (asyncio.get_running_loop().time() - began)
                encoded = await self._encoded(wish, places, own, left)
                if len(alike) == 1 and isinstance(encoded, CapacityError):
                    raise encoded
                for row, place in enumerate(places):
                    ends[place] = encoded if isinstance(encoded, WeirError) else _end(encoded, row)

        await asyncio.gather(*[encode_next() for _ in range(min(_AT_ONCE, len(alike)))])
        return ends

    async def _encoded(self, wish: ItemOptions, places: list[int], trace: Any, timeout: float) -> Encoded | WeirError:
        ask = self._ask
        texts: list[Text] = [item.text for place in places if isinstance(item := self._items[place], Item)]
        try:
            if timeout <= 0:
                raise DeadlineExceeded("the deadline passed before all texts were computed")
            encoded = await self._encoder.encode(
                texts, door=FRONTEND, client=self._client, priority=ask.priority, timeout=timeout,
                dimensions=wish.dimensions, truncate=wish.truncate, prompt=wish.prompt, whole_words=wish.whole_words,
                each=True, trace=trace,
            )  # fmt: skip
        except WeirError as error:
            return error
        self.dispatch = self.dispatch or encoded.dispatch
        self.foreign += encoded.foreign
        return encoded


def _end(encoded: Encoded, row: int) -> End:
    error = encoded.errors[row] if encoded.errors else None
    if error is not None:
        return error
    numbers = encoded.vectors[row]
    return Vector(numbers if encoded.lengths is None else numbers[: encoded.lengths[row]], encoded.truncated[row])


def _bodies(ends: list[End], accept: str) -> list[bytes | WeirError]:
    return [end if isinstance(end, WeirError) else _output(end.numbers, accept) for end in ends]


def _output(numbers: NDArray[Any], accept: str) -> bytes:
    if accept == JSON:
        return bytes(as_json(numbers[None])[0])
    if accept == OCTETS:
        return numbers.astype("<f4", order="C", copy=False).tobytes()
    return msgspec.msgpack.encode(numbers.tolist())
