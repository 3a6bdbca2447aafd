"""Inference of a model of texts by the protocols that are not those of texts: texts are read in the threads that read, wait by length, and
have their caller's share of the queue."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from weir.embedding.calling import EmbeddingContext
from weir.embedding.native import NativeTexts
from weir.embedding.requests import renamed
from weir.embedding.tensors import INPUTS, Asked, arrays_of, outputs, read_request
from weir.embedding.texts import Encoded, Encodes
from weir.errors import DeadlineExceeded, WeirError
from weir.model import Tensor
from weir.protocols.status import kserve_code
from weir.serving.inference import InferenceCall, ItemHead, ItemsResponse, asked_of, check_outputs, schedule_of
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters

if TYPE_CHECKING:
    from weir.serving.service import Service

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

    async def _read(self, request: InferenceRequest) -> Asked:
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
