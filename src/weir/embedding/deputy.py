"""Answers for a model of texts at the native doors and those of the Open Inference Protocol, as the doors of texts do: texts are read in the
threads that read, wait by length, and have their caller's share of the line."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope

from weir.embedding.calling import EmbeddingContext
from weir.embedding.native import NativeTexts
from weir.embedding.requests import renamed
from weir.embedding.tensors import INPUTS, Asked, arrays_of, outputs, read_request
from weir.embedding.texts import Encoded, Encodes
from weir.errors import DeadlineExceeded, WeirError
from weir.protocols.kserve_inference import told
from weir.protocols.native import RequestHead
from weir.protocols.payload import asked_of, check_outputs, schedule_of
from weir.protocols.response import HttpResponse
from weir.protocols.status import kserve_code
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters

if TYPE_CHECKING:
    from weir.serving.service import Service

_MANY = 5_000  # elements whose reading would keep the event loop for more than about a millisecond


class TextDeputy:
    """Has `encoder` answer. `of_tokens`: a text has a vector for each of its tokens."""

    def __init__(self, site: EmbeddingContext, encoder: Encodes, *, of_tokens: bool = False) -> None:
        self._site = site
        self._encoder = encoder
        self._native = NativeTexts(site, encoder)
        self.inputs = INPUTS
        self.outputs = outputs(encoder.dimensions, of_tokens=of_tokens)

    async def infer(
        self, service: "Service", request: InferenceRequest, *, door: str, within: float | None, trace: Any
    ) -> InferenceResponse:
        """Answer a request of the Open Inference Protocol. Raises InvalidRequest naming tensor or parameter, value and rule, and
        whatever the encoder raises."""
        try:
            encoded = await self._encoded(service, request, door, within, trace)
        except WeirError as error:
            self._site.counts.refused(service.name, door, kserve_code(error))
            raise renamed(error, "texts", f"tensor {INPUTS[0].name!r}") from error.__cause__
        cut = sum(encoded.truncated)
        self._site.counts.answered(service.name, door, len(encoded.counts), cut)
        values = asked_of(self.outputs, request, arrays_of(encoded))
        counts = {"truncated": cut, "foreign_ids": encoded.foreign}
        parameters: Parameters = {name: count for name, count in counts.items() if count}
        return InferenceResponse(service.name, values, version=service.version, id=request.id, parameters=parameters)

    async def _read(self, request: InferenceRequest) -> Asked:
        """Return what `request` asks for; of one with many texts, words or ids it is found out in a thread."""
        work = partial(read_request, request, self._site, self._encoder.dimensions)
        many = sum(value.array.size for value in request.inputs) > _MANY
        return await asyncio.to_thread(work) if many else work()

    async def answer(
        self, ask: RequestHead, body: bytes, scope: Scope, receive: Receive, trace: Any
    ) -> HttpResponse | None:
        """Answer a request of the native door, its body decompressed, errors too; None if the client leaves."""
        return await self._native.answer(ask, body, scope, receive, trace)

    async def _encoded(
        self, service: "Service", request: InferenceRequest, door: str, within: float | None, trace: Any
    ) -> Encoded:
        try:
            check_outputs(service, request)
            schedule = schedule_of(request.parameters)
            asked = await self._read(request)
        except WeirError as error:
            raise told(service, door, error) from None
        within = min((each for each in (within, schedule.timeout) if each is not None), default=None)
        if within is not None and within <= 0:
            raise told(service, door, DeadlineExceeded("the deadline passed before the request was read"))
        clients, whose = self._site.clients, asked.client or door
        clients.asked(whose, len(asked.texts), door=door)
        encoded = await self._encoder.encode(
            asked.texts, door=door, client=asked.client, priority=schedule.priority, timeout=within,
            dimensions=asked.dimensions, truncate=asked.truncate, prompt=asked.prompt, whole_words=asked.whole_words,
            trace=trace,
        )  # fmt: skip
        clients.warn_of_ids(whose, encoded.foreign, service.name)
        return encoded
