"""Inference of a model of texts by the protocols that are not made for texts: tensors of the Open Inference Protocol, and items.

Texts are read by the tokenizer's threads, wait by length, and have their caller's share of the queue.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from weir.embedding.calling import EmbeddingContext, check_client
from weir.embedding.native import NativeTexts
from weir.embedding.requests import renamed
from weir.embedding.texts import Encoded, Encodes, Text
from weir.errors import DeadlineExceeded, InvalidRequest, WeirError, brief
from weir.model import Tensor
from weir.protocols.status import kserve_code
from weir.serving.inference import (
    InferenceCall,
    ItemHead,
    ItemsResponse,
    asked_of,
    check_outputs,
    integer_of,
    schedule_of,
)
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, TensorValue

if TYPE_CHECKING:
    from weir.serving.service import Service


INPUTS = (Tensor("input", "BYTES", (-1,)),)
VECTORS, TRUNCATED = "output", "truncated"

_TRUTH = {"true": True, "false": False}  # some clients write every parameter as text
_NO_TOKEN = -1  # fills a row of token ids up


class TensorTexts(NamedTuple):
    """What a request asks for; see Encodes.encode."""

    texts: list[Text]
    truncate: bool | None
    dimensions: int | None
    prompt: str | None
    whole_words: bool
    client: str


def outputs(dimensions: int, *, of_tokens: bool) -> tuple[Tensor, ...]:
    """Return what answers have: vectors of so many numbers, `of_tokens` one for each token, and which texts were cut."""
    shape = (-1, -1, dimensions) if of_tokens else (-1, dimensions)
    return Tensor(VECTORS, "FP32", shape), Tensor(TRUNCATED, "BOOL", (-1,))


def read_request(request: InferenceRequest, site: EmbeddingContext, dimensions: int) -> TensorTexts:
    """Return what `request` asks a model for whose vectors have so many `dimensions`. Raises InvalidRequest naming the tensor or the
    parameter, its value and the rule."""
    said = request.parameters
    tokenized = _flag(said, "is_tokenized")
    (name,) = (tensor.name for tensor in INPUTS)
    if len(request.inputs) != 1 or request.inputs[0].name != name:
        names = ", ".join(repr(value.name) for value in request.inputs) or "none"
        raise InvalidRequest(f"tensors {names}: must be {name!r} alone")
    value = request.inputs[0]
    site.check_count(len(value.array) if value.array.ndim else 1, f"tensor {name!r}")
    keep = said.get("dimensions")
    return TensorTexts(
        _texts(value, tokenized), _flag(said, "truncate"),
        None if keep is None else integer_of("dimensions", keep, 1, dimensions),
        _text(said, "prompt"), bool(tokenized), check_client(_text(said, "client"), "parameter 'client'"),
    )  # fmt: skip


def arrays_of(encoded: Encoded) -> dict[str, Any]:
    """Return the outputs by name."""
    return {VECTORS: encoded.vectors, TRUNCATED: numpy.array(encoded.truncated, bool)}


def _texts(value: TensorValue, tokenized: bool | None) -> list[Text]:
    if value.datatype in ("INT32", "INT64"):
        return _token_ids(value, tokenized)
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


def _token_ids(value: TensorValue, tokenized: bool | None) -> list[Text]:
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


def _flag(said: Parameters, name: str) -> bool | None:
    value = said.get(name)
    if isinstance(value, str):
        value = _TRUTH.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be true or false")


def _text(said: Parameters, name: str) -> str | None:
    value = said.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be a text")


_MANY = 5_000  # elements whose reading would keep the event loop for more than about a millisecond


class TextInference:
    """Inference by `encoder`, see serving/inference.py. `of_tokens`: a text has a vector for each of its tokens."""

    queues_items = False

    def __init__(self, site: EmbeddingContext, encoder: Encodes, *, of_tokens: bool = False) -> None:
        self._site = site
        self._encoder = encoder
        self._native = NativeTexts(site, encoder)
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
        try:
            encoded = await self._encoded(service, request, call)
        except WeirError as error:
            self._site.counts.refused(service.name, call.door, kserve_code(error))
            raise renamed(error, "texts", f"tensor {INPUTS[0].name!r}") from error.__cause__
        cut = sum(encoded.truncated)
        self._site.counts.answered(service.name, call.door, len(encoded.counts), cut)
        values = asked_of(self._outputs, request, arrays_of(encoded))
        counts = {"truncated": cut, "foreign_ids": encoded.foreign}
        parameters: Parameters = {name: count for name, count in counts.items() if count}
        return InferenceResponse(service.name, values, version=service.version, id=request.id, parameters=parameters)

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """Answer a body of texts: each has a vector, or an error of its own."""
        return await self._native.infer_items(head, body, call)

    async def _read(self, request: InferenceRequest) -> TensorTexts:
        """Return what `request` asks for; of one with many texts, words or ids it is found out in a thread."""
        work = partial(read_request, request, self._site, self._encoder.dimensions)
        many = sum(value.array.size for value in request.inputs) > _MANY
        return await asyncio.to_thread(work) if many else work()

    async def _encoded(self, service: "Service", request: InferenceRequest, call: InferenceCall) -> Encoded:
        try:
            check_outputs(service, request)
            schedule = schedule_of(request.parameters)
            asked = await self._read(request)
        except WeirError as error:
            raise service.tell_refused(call.door, error) from None
        within = min((each for each in (call.timeout, schedule.timeout) if each is not None), default=None)
        if within is not None and within <= 0:
            late = DeadlineExceeded("the deadline passed before the request was read")
            raise service.tell_refused(call.door, late)
        clients, whose = self._site.clients, asked.client or call.door
        clients.asked(whose, len(asked.texts), door=call.door)
        encoded = await self._encoder.encode(
            asked.texts, door=call.door, client=asked.client, priority=schedule.priority, timeout=within,
            dimensions=asked.dimensions, truncate=asked.truncate, prompt=asked.prompt, whole_words=asked.whole_words,
            trace=call.trace,
        )  # fmt: skip
        clients.warn_of_ids(whose, encoded.foreign, service.name)
        return encoded
