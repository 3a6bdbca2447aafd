"""Inference with a text model over protocols that are not made for texts: tensors of the Open Inference Protocol, and items of Weir's native protocol.

A request with tensors succeeds or fails as a whole; each item has a result of its own, a vector or an error. All texts pass through the model's encoder,
so that clients share the queue fairly.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, UnsupportedMediaType, WeirError, brief
from weir.images import ImageLimits, Picture, read_base64
from weir.messages import JSON, OCTETS, Dispatch, child_of
from weir.model import Tensor
from weir.protocols.account import charge_values
from weir.protocols.entries import ItemHead, check_outputs, empty_body, integer_of, schedule_of, select_outputs
from weir.protocols.exchange import Ended, Inference, ItemsResponse, Stop, begin_task
from weir.text_models.model import ITEM_RULE
from weir.text_models.packing import packed, sparse_vector
from weir.text_models.texts import ImageItem, Text, TextItem, TextOptionFields, TextOutput
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork
from weir.text_server.http import TextHead, mark_headers
from weir.text_server.pictures import Asked, as_bmp, fetched, read_image
from weir.text_server.texts import NO_OPTIONS, TEXTS_FIELD, Encoded, Encodes, TextOptions, no_images
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, TensorValue
from weir.wire.schema import read_document
from weir.wire.status import http_code, kserve_code
from weir.wire.tensors import TEXT_BYTES
from weir.wire.values import decode, split, values_bytes

if TYPE_CHECKING:
    from weir.protocols.exchange import Exchange
    from weir.serving.handle import ModelHandle

INPUTS = (Tensor("input", "BYTES", (-1,)),)
# What a request to a model with a vision tower may have in place of texts: pixels in red, green and blue; or image files, as BYTES.
IMAGE_INPUT = Tensor("image", "UINT8", (-1, -1, -1, 3))
VECTORS, TRUNCATED = "output", "truncated"
SPARSE_INDICES, SPARSE_VALUES, OF_TOKENS, TOKEN_COUNTS = "sparse_indices", "sparse_values", "tokens", "token_counts"
# The tensors of a response in addition to the first two, which are only answered where a request names them, by the output that they are of.
_FURTHER = {TextOutput.SPARSE: (SPARSE_INDICES, SPARSE_VALUES), TextOutput.TOKENS: (OF_TOKENS, TOKEN_COUNTS)}

_TEXT_PARAMETERS = ("truncation_direction", "prompt", "prompt_name", "input_type", "instruction")
_TRUTH = {"true": True, "false": False}  # some clients send every parameter as a string
_NO_TOKEN = -1  # the padding of a row of token ids


def outputs(
    dimensions: int, *, of_tokens: bool, size_of_tokens: int = 0, further: Sequence[TextOutput] = ()
) -> tuple[Tensor, ...]:
    """Return the tensors of a response: the vectors, for each text or with `of_tokens` for each token, whether each text was cut, and those of the outputs
    `further`, where the vector of a token has `size_of_tokens` numbers."""
    shape = (-1, -1, dimensions) if of_tokens else (-1, dimensions)
    more = {
        TextOutput.SPARSE: (Tensor(SPARSE_INDICES, "INT64", (-1, -1)), Tensor(SPARSE_VALUES, "FP32", (-1, -1))),
        TextOutput.TOKENS: (Tensor(OF_TOKENS, "FP32", (-1, -1, size_of_tokens)), Tensor(TOKEN_COUNTS, "INT32", (-1,))),
    }
    own = (Tensor(VECTORS, "FP32", shape), Tensor(TRUNCATED, "BOOL", (-1,)))
    return own + tuple(tensor for output in further for tensor in more.get(output, ()))


def wanted_outputs(request: InferenceRequest, encoder: Encodes) -> list[TextOutput] | None:
    """Return the outputs whose tensors a request names, the model's own always; None if it names none in addition to those of the latter."""
    names = {output.name for output in request.outputs or ()}
    further = [output for output, tensors in _FURTHER.items() if names & set(tensors)]
    return [*encoder.facts.outputs[:1], *further] if further else None


def read_tensors(
    exchange: TextExchange, request: InferenceRequest, encoder: Encodes
) -> TextWork[dict[str, NDArray[Any]]]:
    """Return the work of `request`, which writes the arrays of the response. Raises InvalidRequest naming the tensor or the parameter, its value and the rule."""
    parameters = request.parameters
    tokenized = _flag(parameters, "is_tokenized")
    known = [tensor.name for tensor in inputs_of(encoder)]
    if len(request.inputs) != 1 or request.inputs[0].name not in known:
        names = ", ".join(repr(value.name) for value in request.inputs) or "none"
        raise InvalidRequest(f"tensors {names}: must be {' or '.join(map(repr, known))} alone")
    value = request.inputs[0]
    is_one = not value.array.ndim or (value.datatype == IMAGE_INPUT.datatype and value.array.ndim == 3)
    exchange.context.check_count(1 if is_one else len(value.array), f"tensor {value.name!r}")
    keep = parameters.get("dimensions")
    texts = _pictures(value, exchange.context.images) if value.name == IMAGE_INPUT.name else _texts(value, tokenized)
    fields = TextOptionFields(
        dimensions=None if keep is None else integer_of("dimensions", keep, 1, encoder.dimensions),
        truncate=_flag(parameters, "truncate"),
        **{name: _text(parameters, name) for name in _TEXT_PARAMETERS},
    )
    wanted = wanted_outputs(request, encoder)
    options = forms.options_of(fields, encoder, whole_words=bool(tokenized), outputs=wanted)
    exchange.client = forms.check_client(_text(parameters, "client"), "parameter 'client'")
    exchange.peer = exchange.frontend
    return TextWork(encoder, texts, arrays_of, options)


def arrays_of(encoded: Encoded) -> dict[str, NDArray[Any]]:
    """Return the arrays of the response by the names of the tensors."""
    arrays = {VECTORS: encoded.vectors, TRUNCATED: numpy.array(encoded.truncated, bool)}
    if terms := encoded.further.get(TextOutput.SPARSE):
        arrays[SPARSE_INDICES] = _filled([each[:, 0].astype(numpy.int64) for each in terms], -1)
        arrays[SPARSE_VALUES] = _filled([each[:, 1] for each in terms], 0)
    if tokens := encoded.further.get(TextOutput.TOKENS):
        arrays[OF_TOKENS] = _filled(tokens, 0)
        arrays[TOKEN_COUNTS] = numpy.array(list(map(len, tokens)), numpy.int32)
    return arrays


def _filled(rows: Sequence[NDArray[Any]], filler: int) -> NDArray[Any]:
    """Return arrays of different lengths as one, filled up with `filler` behind the shorter ones."""
    filled = numpy.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), filler, rows[0].dtype)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return filled


def _texts(value: TensorValue, tokenized: bool | None) -> list[Text]:
    shape, name, kind = value.array.shape, f"tensor {value.name!r}", value.datatype
    is_ids = kind in ("INT32", "INT64")
    if not is_ids and kind != "BYTES":
        raise InvalidRequest(f"{name}: has datatype {kind!r}, must be BYTES (texts), INT32 or INT64 (token ids)")
    if is_ids and tokenized:
        raise InvalidRequest(f"{name}: has token ids, must have words (is_tokenized)")
    if is_ids and len(shape) != 2:
        raise InvalidRequest(f"{name}: has shape {list(shape)}, must be [texts, tokens] for token ids")
    rows = value.array.tolist()
    if is_ids:
        return [_unpadded(value, row, ids, _NO_TOKEN) for row, ids in enumerate(rows)]
    if len(shape) == 2 and tokenized is not None:
        words = [_unpadded(value, row, words, b"") for row, words in enumerate(rows)]
        return [[_decoded(value, row, word) for word in each] for row, each in enumerate(words)]
    if tokenized:
        raise InvalidRequest(f"{name}: has shape {list(shape)}, must be [texts, words] (is_tokenized)")
    if len(shape) == 2 and shape[1] == 2:
        return [(_decoded(value, row, first), _decoded(value, row, other)) for row, (first, other) in enumerate(rows)]
    if len(shape) != 1:
        rule = "must be [texts], [texts, 2] for pairs, or with the parameter is_tokenized [texts, words]"
        raise InvalidRequest(f"{name}: has shape {list(shape)}, {rule}")
    return [_decoded(value, row, text) for row, text in enumerate(rows)]


def _pictures(value: TensorValue, limits: ImageLimits) -> list[Text]:
    array, shape = value.array, value.array.shape
    if value.datatype == "BYTES" and len(shape) == 1:
        return [_picture(each, f"tensor {value.name!r}[{row}]", limits) for row, each in enumerate(array.tolist())]
    if value.datatype != IMAGE_INPUT.datatype or len(shape) not in (3, 4) or shape[-1] != 3 or not array.size:
        rule = "must be UINT8 [height, width, 3] or [images, height, width, 3], or BYTES [images] with image files"
        raise InvalidRequest(f"tensor {value.name!r}: has datatype {value.datatype!r} and shape {list(shape)}, {rule}")
    return [Picture(as_bmp(pixels)) for pixels in array.reshape(-1, *shape[-3:])]


def _picture(file: bytes, where: str, limits: ImageLimits) -> Picture:
    """Return the picture of an image file, or of one in base64: JSON has no other way to write it, and no image file is ASCII."""
    if not file.isascii():
        return Picture(file)
    try:
        return Picture(read_base64(file.decode(), limits))
    except InvalidRequest as error:
        raise error.of(where) from None


def inputs_of(encoder: Encodes) -> Sequence[Tensor]:
    """Return the tensors of which a request has one."""
    return INPUTS if encoder.facts.vision is None else (*INPUTS, IMAGE_INPUT)


def _unpadded(value: TensorValue, row: int, elements: list[Any], filler: bytes | int) -> list[Any]:
    """Return a row of words or token ids without its padding. Raises InvalidRequest if nothing is left."""
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


def _stated(parameters: Parameters, name: str, kind: type, rule: str) -> Any:
    value = parameters.get(name)
    if kind is bool and isinstance(value, str):
        value = _TRUTH.get(value.lower(), value)
    if value is None or isinstance(value, kind):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be {rule}")


_flag = partial(_stated, kind=bool, rule="true or false")
_text = partial(_stated, kind=str, rule="a text")


# Items.

_ID_BYTES = 4


class Item(NamedTuple):
    """One text, and its options."""

    text: Asked
    options: TextOptions = NO_OPTIONS


def read_items(head: ItemHead, body: bytes, context: EmbeddingContext, encoder: Encodes) -> list[Item | WeirError]:
    """Return the items in `body`, in order: one, or with `head.batch` a list, in which an invalid item is replaced by its error.

    Raises InvalidRequest for a body that is invalid as a whole.
    """
    if not body:
        raise empty_body(head)
    read = partial(read_item, encoder=encoder, limits=context.images)
    if not head.batch:
        return [read(body if head.form.content_type == OCTETS else decode(body, head.form.content_type))]
    parts = split(body, head.form.content_type, context.max_texts)
    if parts is None:
        raise InvalidRequest(f"body: has more than {context.max_texts} texts (max_texts)")
    return [_item_or_error(part, head.form.content_type, read) for part in parts]


def _item_or_error(part: bytes, content_type: str, read: Callable[[Any], Item]) -> Item | WeirError:
    try:
        return read(decode(part, content_type))
    except WeirError as error:
        return error


def read_item(item: Any, encoder: Encodes, limits: ImageLimits) -> Item:
    """Return the text or the picture, and the options of a decoded item. Raises InvalidRequest naming the field and the rule."""
    if isinstance(item, bytes):
        return Item(_token_ids(item))
    if isinstance(item, (str, list)):
        return Item(forms.read_text(item, "the item", None))
    if not isinstance(item, dict):
        raise InvalidRequest(f"an item of type {type(item).__name__}: {ITEM_RULE}")
    if "image" in item:
        if encoder.facts.vision is None:
            raise no_images(encoder.name)
        image = read_document(item, ImageItem)
        return Item(read_image(image.image, "image", limits), _item_options(image, encoder))
    if "text" not in item:
        raise InvalidRequest(f"text: is missing; {ITEM_RULE}")
    fields = read_document(item, TextItem)
    options = _item_options(fields, encoder, whole_words=bool(fields.is_tokenized))
    if fields.pair is None:
        return Item(forms.read_text(fields.text, "text", fields.is_tokenized), options)
    return Item((forms.check_text(fields.text, "text"), forms.check_text(fields.pair, "pair")), options)


def _item_options(fields: TextItem | ImageItem, encoder: Encodes, *, whole_words: bool = False) -> TextOptions:
    options = forms.options_of(fields, encoder, whole_words=whole_words, outputs=fields.outputs)
    own = encoder.facts.outputs[:1]
    return options._replace(outputs=own) if fields.outputs and not options.outputs else options


def _token_ids(item: bytes) -> Text:
    if not item or len(item) % _ID_BYTES:
        raise InvalidRequest(f"token ids of {len(item)} bytes: must be one or more, each an int32 of {_ID_BYTES} bytes")
    ids: list[int] = numpy.frombuffer(item, "<i4").tolist()
    return ids


_ITEM_BYTES = 8  # reading a byte of items counts as reading this many bytes, as items are checked one by one
_MAX_CONCURRENT = 64  # groups of one request that are encoded at the same time; each group is a request to the encoder


class ItemVector(NamedTuple):
    """The result of an item: its vector or one for each token, or each of the outputs that the item asked for; and whether its text was cut."""

    made: NDArray[Any] | Mapping[TextOutput, NDArray[Any]]
    truncated: bool

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(each.size for each in self.made.values()) if isinstance(self.made, Mapping) else self.made.size


class EncodedItems(NamedTuple):
    """The result of each item of a request, which is a vector or an error. For `dispatch` and `foreign`, those of all items, see Encoded."""

    results: list[ItemVector | WeirError]
    dispatch: tuple[Dispatch, float] | None
    foreign: int


_LARGE = 5_000  # elements of tensors; more are read in a thread, as that takes longer than about a millisecond


class TextInference(Inference):
    """Inference with `encoder`, where a text becomes a token sequence first; see protocols/exchange.py. With `of_tokens` the model has a vector for each token and no other; `size_of_tokens` is the size of
    those that the same pass makes."""

    def __init__(
        self, context: EmbeddingContext, encoder: Encodes, *, of_tokens: bool = False, size_of_tokens: int = 0
    ) -> None:
        self._context = context
        self._encoder = encoder
        size, more = encoder.dimensions, encoder.facts.outputs[1:]
        self._outputs = outputs(size, of_tokens=of_tokens, size_of_tokens=size_of_tokens, further=more)

    def inputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the tensors of which a request has one. Token ids are accepted too, as INT32 or INT64, and image files, as BYTES."""
        return inputs_of(self._encoder)

    def outputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the tensors of a response."""
        return self._outputs

    def begin(self, call: "Exchange", request: InferenceRequest, ended: Ended[InferenceResponse]) -> Stop:
        """Answer a request with tensors, in a task. It ends with InvalidRequest naming tensor or parameter, value and rule, or what `Encodes.encode` raises."""
        return begin_task(self._infer(call, request), ended)

    async def _infer(self, call: "Exchange", request: InferenceRequest) -> InferenceResponse:
        exchange = TextExchange(self._context, call.frontend, self._encoder.name, trace=call.trace)
        try:
            work = await self._read(exchange, request, call)
            exchange.received(len(work.texts))
            encoded = await exchange.run(work)
        except WeirError as error:
            exchange.refused(kserve_code(error))
            tensors = ", ".join(repr(each.name) for each in request.inputs)
            raise error.renamed({TEXTS_FIELD: f"tensor {tensors}"}) from error.__cause__
        cut = sum(encoded.truncated)
        exchange.answered(len(encoded.counts), cut)
        arrays = work.write(encoded)
        values = select_outputs([tensor for tensor in self._outputs if tensor.name in arrays], request, arrays)
        counts = {"truncated": cut, "foreign_ids": encoded.foreign}
        parameters: Parameters = {name: count for name, count in counts.items() if count}
        facts = call.service.facts
        return InferenceResponse(facts.name, values, version=facts.version, id=request.id, parameters=parameters)

    async def _read(
        self, exchange: TextExchange, request: InferenceRequest, call: "Exchange"
    ) -> TextWork[dict[str, NDArray[Any]]]:
        """Return the work of `request`, read in a thread if it is large. Raises the error of an invalid or late request."""
        facts = call.service.facts
        check_outputs(self._outputs, request, facts.name)
        schedule = schedule_of(request.parameters, facts.model)
        read = partial(read_tensors, exchange, request, self._encoder)
        many = sum(value.array.size for value in request.inputs) > _LARGE
        work = await asyncio.to_thread(read) if many else read()
        exchange.priority = schedule.priority
        exchange.timeout = min((each for each in (call.timeout, schedule.timeout) if each is not None), default=None)
        if exchange.timeout is not None and exchange.timeout <= 0:
            raise DeadlineExceeded("the deadline passed before the request was read")
        return work

    async def infer_items(self, call: "Exchange", head: ItemHead, body: bytes) -> ItemsResponse:
        """Answer a body of items: each has a vector or an error. Raises the error of a single item, and of a body that is invalid as a whole."""
        exchange = TextExchange(self._context, call.frontend, self._encoder.name, trace=call.trace)
        try:
            options = TextHead([*call.headers])
            items = await self._items(head, body, call)
            options.apply_to(exchange, call.peer)
            exchange.received(len(items))
            encoded = await encode_items(self._encoder, exchange, items, head.form.timeout, call.trace)
            results = encoded.results
            exchange.warn_of_ids(encoded.foreign)
            if not head.batch and isinstance(results[0], WeirError):
                raise results[0]
        except WeirError as error:
            exchange.refused(http_code(error))
            raise
        vectors = {index: each for index, each in enumerate(results) if isinstance(each, ItemVector)}
        further = {index: {"truncated": True} for index, each in vectors.items() if each.truncated}
        exchange.answered(len(vectors), len(further))
        size = TEXT_BYTES * sum(vector.size for vector in vectors.values())
        dispatch, arrival = encoded.dispatch or (None, 0.0)
        write = partial(_bodies, results, head.form.accept)
        return ItemsResponse(size, write, dispatch, arrival, mark_headers(len(further), encoded.foreign), further)

    async def _items(self, head: ItemHead, body: bytes, call: "Exchange") -> list[Item | WeirError]:
        def read() -> list[Item | WeirError]:
            charge_values(len(body), partial(values_bytes, body, head.form.content_type))
            return read_items(head, body, self._context, self._encoder)

        return await call.read(_ITEM_BYTES * len(body), read)


async def encode_items(
    encoder: Encodes, exchange: TextExchange, items: Sequence[Item | WeirError], timeout: float, trace: Any
) -> EncodedItems:
    """Encode the items of a request within `timeout` seconds, those with equal options together. Raises CapacityError if all have the same options and
    that is their result."""
    now = asyncio.get_running_loop().time
    end = now() + timeout
    if exchange.context.images.allow_url:
        texts = [item.text if isinstance(item, Item) else item for item in items]
        found_texts = await fetched(texts, exchange.context.fetch, timeout, each=True)
        items = [
            text if isinstance(text, WeirError) else item._replace(text=text) if isinstance(item, Item) else item
            for item, text in zip(items, found_texts, strict=True)
        ]
    alike: dict[TextOptions, list[int]] = {}
    for index, item in enumerate(items):
        if isinstance(item, Item):
            alike.setdefault(item.options, []).append(index)
    results: list[Any] = [*items]
    found: list[Encoded] = []
    waiting = iter(alike.items())
    # The first group has the trace of the request, which the response names; the spans of the others are siblings.
    traces = chain([trace], repeat(child_of(trace)))

    async def encode_next() -> None:
        for (options, indices), own in zip(waiting, traces):  # noqa: B905 - the traces have no end
            try:
                if end <= now():
                    raise DeadlineExceeded("the deadline passed before all texts were computed")
                query = exchange.query(options, end - now(), own, each=True)
                texts = [item.text for index in indices if isinstance(item := items[index], Item)]
                encoded = await encoder.encode(texts, query)
            except WeirError as error:
                if len(alike) == 1 and isinstance(error, CapacityError):
                    raise
                for index in indices:
                    results[index] = error
                continue
            found.append(encoded)
            exchange.count_images(encoded)
            for row, index in enumerate(indices):
                results[index] = _item_result(encoded, row, options.outputs)

    await asyncio.gather(*[encode_next() for _ in range(min(_MAX_CONCURRENT, len(alike)))])
    dispatch = next((each.dispatch for each in found if each.dispatch), None)
    return EncodedItems(results, dispatch, sum(each.foreign for each in found))


def _item_result(encoded: Encoded, row: int, outputs: Sequence[TextOutput]) -> ItemVector | WeirError:
    error = encoded.errors[row] if encoded.errors else None
    if error is not None:
        return error
    made = encoded.outputs(outputs, row) if outputs else encoded.output(row)
    return ItemVector(made, encoded.truncated[row])


def _bodies(results: Sequence[ItemVector | WeirError], accept: str) -> list[bytes | WeirError]:
    return [each if isinstance(each, WeirError) else _body(each.made, accept) for each in results]


def _body(made: NDArray[Any] | Mapping[TextOutput, NDArray[Any]], accept: str) -> bytes | WeirError:
    """Return a vector, or an object with each of the outputs that an item asked for by its name."""
    encode = msgspec.json.encode if accept == JSON else msgspec.msgpack.encode
    if isinstance(made, Mapping):
        if accept == OCTETS:
            rule = f"accept {OCTETS!r}: has room for one vector; outputs are written as {JSON} or msgpack"
            return UnsupportedMediaType(rule)
        return encode({output: _value(output, found, accept) for output, found in made.items()})
    if accept == OCTETS:
        return made.astype("<f4", order="C", copy=False).tobytes()
    return encode(_value(TextOutput.DENSE, made, accept))


def _value(output: TextOutput, found: NDArray[Any], accept: str) -> Any:
    if output is TextOutput.SPARSE:
        return sparse_vector(found)
    if accept != JSON:
        return found.tolist()
    return packed(found) if found.ndim > 1 else packed(found[None])[0]
