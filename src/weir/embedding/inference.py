"""Inference of a model of texts by the protocols that are not made for texts: tensors of the Open Inference Protocol, and items of Weir's own.

A request of tensors has one end; each item has an end of its own, a vector or an error. Texts are read by the tokenizer's threads, wait by length, and have
their caller's share of the queue.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.embedding.exchange import (
    NO_OPTIONS,
    EmbeddingContext,
    TextExchange,
    TextOptions,
    as_json,
    check_client,
    check_dimensions,
    check_text,
    mark_headers,
    read_field,
    read_text,
)
from weir.embedding.http import TextHead
from weir.embedding.model import KINDS
from weir.embedding.requests import renamed
from weir.embedding.texts import Encoded, Encodes, Text
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, WeirError, brief
from weir.messages import JSON, OCTETS, Dispatch
from weir.model import Tensor
from weir.protocols.status import http_code, kserve_code
from weir.serving.inference import (
    InferenceCall,
    ItemHead,
    ItemsResponse,
    asked_of,
    check_outputs,
    empty_body,
    integer_of,
    schedule_of,
)
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, TensorValue
from weir.wire.tensors import TEXT_BYTES
from weir.wire.values import decode, split

if TYPE_CHECKING:
    from weir.serving.service import Service

INPUTS = (Tensor("input", "BYTES", (-1,)),)
VECTORS, TRUNCATED = "output", "truncated"

_TRUTH = {"true": True, "false": False}  # some clients write every parameter as text
_NO_TOKEN = -1  # fills a row of token ids up


def outputs(dimensions: int, *, of_tokens: bool) -> tuple[Tensor, ...]:
    """Return what answers have: vectors of so many numbers, `of_tokens` one for each token, and which texts were cut."""
    shape = (-1, -1, dimensions) if of_tokens else (-1, dimensions)
    return Tensor(VECTORS, "FP32", shape), Tensor(TRUNCATED, "BOOL", (-1,))


def read_tensors(exchange: TextExchange, request: InferenceRequest, encoder: Encodes) -> None:
    """Read what `request` asks of `encoder` into `exchange`. Raises InvalidRequest naming the tensor or the parameter, its value and the rule."""
    parameters = request.parameters
    tokenized = _flag(parameters, "is_tokenized")
    (name,) = (tensor.name for tensor in INPUTS)
    if len(request.inputs) != 1 or request.inputs[0].name != name:
        names = ", ".join(repr(value.name) for value in request.inputs) or "none"
        raise InvalidRequest(f"tensors {names}: must be {name!r} alone")
    value = request.inputs[0]
    exchange.context.check_count(len(value.array) if value.array.ndim else 1, f"tensor {name!r}")
    keep = parameters.get("dimensions")
    exchange.texts = _texts(value, tokenized)
    truncate = _flag(parameters, "truncate")
    dimensions = None if keep is None else integer_of("dimensions", keep, 1, encoder.dimensions)
    exchange.options = TextOptions(dimensions, truncate, _text(parameters, "prompt"), bool(tokenized))
    exchange.client = check_client(_text(parameters, "client"), "parameter 'client'")
    exchange.whose = exchange.client or exchange.door


def arrays_of(encoded: Encoded) -> dict[str, Any]:
    """Return the outputs by name."""
    return {VECTORS: encoded.vectors, TRUNCATED: numpy.array(encoded.truncated, bool)}


def _texts(value: TensorValue, tokenized: bool | None) -> list[Text]:
    if value.datatype in ("INT32", "INT64"):
        return _ids(value, tokenized)
    if value.datatype != "BYTES":
        raise InvalidRequest(
            f"tensor {value.name!r}: has datatype {value.datatype!r}, must be BYTES (texts), INT32 or INT64 (token ids)"
        )
    shape = value.array.shape
    rows = value.array.tolist()
    if len(shape) == 2 and tokenized is not None:
        return [
            [_decoded(value, row, word) for word in _ended(value, row, words, b"")] for row, words in enumerate(rows)
        ]
    if tokenized:
        raise InvalidRequest(f"tensor {value.name!r}: has shape {list(shape)}, must be [texts, words] (is_tokenized)")
    if len(shape) == 2 and shape[1] == 2:
        return [(_decoded(value, row, first), _decoded(value, row, other)) for row, (first, other) in enumerate(rows)]
    if len(shape) != 1:
        raise InvalidRequest(
            f"tensor {value.name!r}: has shape {list(shape)}, must be [texts], [texts, 2] for pairs, or with the parameter "
            "is_tokenized [texts, words]"
        )
    return [_decoded(value, row, text) for row, text in enumerate(rows)]


def _ids(value: TensorValue, tokenized: bool | None) -> list[Text]:
    shape = value.array.shape
    if tokenized:
        raise InvalidRequest(f"tensor {value.name!r}: has token ids, must have words (is_tokenized)")
    if len(shape) != 2:
        raise InvalidRequest(f"tensor {value.name!r}: has shape {list(shape)}, must be [texts, tokens] for token ids")
    return [_ended(value, row, ids, _NO_TOKEN) for row, ids in enumerate(value.array.tolist())]


def _ended(value: TensorValue, row: int, elements: list[Any], filler: bytes | int) -> list[Any]:
    """Return a row without what fills it up."""
    count = len(elements)
    while count and elements[count - 1] == filler:
        count -= 1
    if not count:
        raise InvalidRequest(f"tensor {value.name!r}[{row}]: is empty, must have a word or a token id")
    return elements[:count]


def _decoded(value: TensorValue, row: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"tensor {value.name!r}[{row}]: must be a text in UTF-8 ({error.reason})") from None


def _flag(parameters: Parameters, name: str) -> bool | None:
    value = parameters.get(name)
    if isinstance(value, str):
        value = _TRUTH.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be true or false")


def _text(parameters: Parameters, name: str) -> str | None:
    value = parameters.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be a text")


# Items.

_FIELDS = ("text", "pair", "is_tokenized", "dimensions", "truncate", "prompt")
_ID_BYTES = 4


class Item(NamedTuple):
    """One text, and what is wanted of it."""

    text: Text
    options: TextOptions = NO_OPTIONS


def read_items(head: ItemHead, body: bytes, context: EmbeddingContext, encoder: Encodes) -> list[Item | WeirError]:
    """Return the items in `body`, in order: one, unless a list was asked with; of these, one that is wrong is an error in its place.

    Raises InvalidRequest for a body that is wrong as a whole.
    """
    if not body:
        raise empty_body(head)
    if not head.batch:
        return [read_item(body if head.content_type == OCTETS else decode(body, head.content_type), encoder)]
    parts = split(body, head.content_type, context.max_texts)
    if parts is None:
        raise InvalidRequest(f"body: has more than {context.max_texts} texts (max_texts)")
    return [_item_or_error(part, head.content_type, encoder) for part in parts]


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
    return Item(_text_of(item), _options_of(item, encoder))


def _text_of(item: dict[str, Any]) -> Text:
    if "text" not in item:
        raise InvalidRequest(f"text: is missing; {KINDS}")
    if item.get("pair") is None:
        return read_text(item["text"], "text", read_field(item, "is_tokenized", bool, None))
    return check_text(item["text"], "text"), check_text(item["pair"], "pair")


def _options_of(item: dict[str, Any], encoder: Encodes) -> TextOptions:
    dimensions = read_field(item, "dimensions", int, None)
    check_dimensions(dimensions, encoder)
    return TextOptions(
        dimensions, read_field(item, "truncate", bool, None), read_field(item, "prompt", str, None),
        bool(read_field(item, "is_tokenized", bool, False)),
    )  # fmt: skip


def _token_ids(item: bytes) -> Text:
    if not item or len(item) % _ID_BYTES:
        raise InvalidRequest(f"token ids of {len(item)} bytes: must be one or more, each an int32 of {_ID_BYTES} bytes")
    ids: list[int] = numpy.frombuffer(item, "<i4").tolist()
    return ids


_ITEM_BYTES = 8  # as which a byte of items counts that are looked into one by one
_AT_ONCE = 64  # groups of one request that are under way; each is a request of its own to the encoder


class Vector(NamedTuple):
    """The end of an item that has a vector, or one for each token; whether its text was cut."""

    numbers: NDArray[Any]
    truncated: bool


End = Vector | WeirError


_MANY = 5_000  # elements whose reading would keep the event loop for more than about a millisecond


class TextInference:
    """Inference by `encoder`, see serving/inference.py. `of_tokens`: a text has a vector for each of its tokens."""

    queues_items = False

    def __init__(self, context: EmbeddingContext, encoder: Encodes, *, of_tokens: bool = False) -> None:
        self._context = context
        self._encoder = encoder
        self._outputs = outputs(encoder.dimensions, of_tokens=of_tokens)

    def queues_tensors(self, service: "Service") -> bool:
        """No request is one entry of the queue."""
        return False

    def inputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the tensors of texts. Token ids may be sent besides."""
        return INPUTS

    def outputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the tensors of vectors."""
        return self._outputs

    async def infer(self, service: "Service", request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """Answer a request of tensors. Raises InvalidRequest naming tensor or parameter, value and rule, and whatever the encoder raises."""
        exchange = TextExchange(self._context, call.door, self._encoder, trace=call.trace)
        try:
            await self._read(exchange, service, request, call)
            encoded = await exchange.vectors()
        except WeirError as error:
            exchange.refused(kserve_code(error))
            raise renamed(error, "texts", f"tensor {INPUTS[0].name!r}") from error.__cause__
        cut = sum(encoded.truncated)
        exchange.answered(len(encoded.counts), cut)
        values = asked_of(self._outputs, request, arrays_of(encoded))
        counts = {"truncated": cut, "foreign_ids": encoded.foreign}
        parameters: Parameters = {name: count for name, count in counts.items() if count}
        return InferenceResponse(service.name, values, version=service.version, id=request.id, parameters=parameters)

    async def _read(
        self, exchange: TextExchange, service: "Service", request: InferenceRequest, call: InferenceCall
    ) -> None:
        """Read what `request` asks for; of one with many texts, words or ids it is found out in a thread."""
        try:
            check_outputs(service, request)
            schedule = schedule_of(request.parameters)
            work = partial(read_tensors, exchange, request, self._encoder)
            many = sum(value.array.size for value in request.inputs) > _MANY
            await asyncio.to_thread(work) if many else work()
        except WeirError as error:
            raise service.tell_refused(call.door, error) from None
        exchange.priority = schedule.priority
        exchange.timeout = min((each for each in (call.timeout, schedule.timeout) if each is not None), default=None)
        if exchange.timeout is not None and exchange.timeout <= 0:
            late = DeadlineExceeded("the deadline passed before the request was read")
            raise service.tell_refused(call.door, late)

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """Answer a body of texts: each has a vector, or an error of its own."""
        exchange = TextExchange(self._context, call.door, self._encoder, trace=call.trace)
        try:
            asked = TextHead([*call.headers])
            items = await self._items(head, body, call)
            asked.ask(exchange, call.peer)
            exchange.asked(len(items))
            groups = ItemGroups(exchange, head, items)
            ends = await groups.ends(call.trace)
            exchange.warn_of_ids(groups.foreign)
            if not head.batch and isinstance(ends[0], WeirError):
                raise ends[0]
        except WeirError as error:
            exchange.refused(http_code(error))
            raise
        vectors = [end for end in ends if isinstance(end, Vector)]
        cut = sum(vector.truncated for vector in vectors)
        exchange.answered(len(vectors), cut)
        beside = {
            place: {"truncated": True} for place, end in enumerate(ends) if isinstance(end, Vector) and end.truncated
        }
        size = TEXT_BYTES * sum(vector.numbers.size for vector in vectors)
        dispatch, arrival = groups.dispatch or (None, 0.0)
        write = partial(_bodies, ends, head.accept)
        return ItemsResponse(size, write, dispatch, arrival, mark_headers(cut, groups.foreign), beside)

    async def _items(self, head: ItemHead, body: bytes, call: InferenceCall) -> list[Item | WeirError]:
        read = partial(read_items, head, body, self._context, self._encoder)
        items = await call.read(_ITEM_BYTES * len(body), read)
        for item in items:
            if isinstance(item, WeirError):
                head.service.tell_refused(call.door, item)
        return items


class ItemGroups:
    """The items of one request: those with equal options are encoded together. `dispatch` is the batch of the first that is answered; `foreign` counts items
    that came as token ids of another model, see Encoded."""

    def __init__(self, exchange: TextExchange, head: ItemHead, items: list[Item | WeirError]) -> None:
        self._exchange = exchange
        self._head = head
        self._items = items
        self.dispatch: tuple[Dispatch, float] | None = None
        self.foreign = 0

    async def ends(self, trace: Any) -> list[End]:
        """Return the end of each item. Raises CapacityError if that is the end of all of them."""
        alike: dict[TextOptions, list[int]] = {}
        ends: list[Any] = list(self._items)
        for place, item in enumerate(self._items):
            if isinstance(item, Item):
                alike.setdefault(item.options, []).append(place)
        waiting = iter(alike.items())
        # The first has the span that the caller hears of; the others are beside it.
        traces = chain([trace], repeat(getattr(trace, "traceparent", None)))
        began = asyncio.get_running_loop().time()

        async def encode_next() -> None:
            for (options, places), own in zip(waiting, traces):  # noqa: B905 - the traces have no end
                left = self._head.timeout - (asyncio.get_running_loop().time() - began)
                encoded = await self._encoded(options, places, own, left)
                if len(alike) == 1 and isinstance(encoded, CapacityError):
                    raise encoded
                for row, place in enumerate(places):
                    ends[place] = encoded if isinstance(encoded, WeirError) else _end(encoded, row)

        await asyncio.gather(*[encode_next() for _ in range(min(_AT_ONCE, len(alike)))])
        return ends

    async def _encoded(
        self, options: TextOptions, places: list[int], trace: Any, timeout: float
    ) -> Encoded | WeirError:
        texts: list[Text] = [item.text for place in places if isinstance(item := self._items[place], Item)]
        try:
            if timeout <= 0:
                raise DeadlineExceeded("the deadline passed before all texts were computed")
            encoded = await self._exchange.encode(texts, options, timeout, trace, each=True)
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
