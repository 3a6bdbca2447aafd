"""Inference, as one task for each request: what the fast lane does not take, and all of it under another ASGI server."""

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from weir.errors import Unsupported, WeirError
from weir.protocols.account import charge
from weir.protocols.bodies import unless_left
from weir.protocols.endpoint import Call
from weir.protocols.kserve.bodies import inflated, read_body, size_to_read
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.heads import InferAsk, read_head
from weir.protocols.kserve.replies import JSON_TYPE, reply_to
from weir.protocols.kserve_inference import infer, stream, told
from weir.protocols.metadata import inputs_of
from weir.protocols.native import DOOR
from weir.protocols.offloading import off_loop, written
from weir.protocols.response import HttpResponse, compressed
from weir.protocols.shared_memory import Memory
from weir.telemetry.tracecontext import CURRENT, Trace
from weir.wire.generate import read_generate, write_generated
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write

if TYPE_CHECKING:
    from weir.serving.service import Service

_LONG_WORK = 256 << 10  # bytes whose compression would keep the event loop for too long


class Inference:
    """The handlers of POST /v2/models/{model}[/versions/{version}]/infer and generate."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site

    async def __call__(self, call: Call) -> HttpResponse | None:
        """Answer one request; None if the client leaves, whose request is cancelled then."""
        site, version = self._site, call.path.get("version")
        path = f"/v2/models/{call.path['model']}{f'/versions/{version}' if version else ''}/infer"
        ask = read_head(site.registry, site.http, "POST", path, call.headers)
        assert ask is not None, "the path is one of inference: this is a bug"
        memory = site.memory(call.peer, call.headers)
        request = await unless_left(self.read(ask, call.body, memory), call.receive)
        if request is None:
            return None
        trace = None if ask.service.tracing is None else ask.service.tracing.new(ask.traceparent)
        CURRENT.set(trace)
        response = await unless_left(infer(ask.service, request, door=DOOR, trace=trace), call.receive)
        if response is None:
            return None
        size = bytes_to_write(response, binary_outputs(request))
        answer = await written(size, lambda: reply_to(request, response, memory).as_answer())
        if ask.accept_coding and len(answer.body) > site.http.compress_above:
            answer = await _compressed(answer, ask.accept_coding)
        for observer in ask.service.observers:
            observer.transferred(ask.service.label, DOOR, len(call.body), len(answer.body))
        return answer

    async def generate(self, call: Call) -> HttpResponse | None:
        """Answer a flat object (Triton's generate extension) with one; None if the client leaves."""
        site, version = self._site, call.path.get("version")
        path = f"/v2/models/{call.path['model']}{f'/versions/{version}' if version else ''}/infer"
        ask = read_head(site.registry, site.http, "POST", path, call.headers, streams=True)
        assert ask is not None, "the path is one of inference: this is a bug"
        try:
            read = partial(read_generate, call.body, inputs_of(ask.service), ask.service.name, ask.version)
            request = await off_loop(len(call.body), read)
            charge(sum([each.array.nbytes for each in request.inputs]))
        except WeirError as error:
            raise told(ask.service, DOOR, error) from None
        trace = None if ask.service.tracing is None else ask.service.tracing.new(ask.traceparent)
        CURRENT.set(trace)
        response = await unless_left(one_answer(ask.service, request, trace), call.receive)
        if response is None:
            return None
        body = await written(bytes_to_write(response), partial(write_generated, response))
        answer = HttpResponse(200, [JSON_TYPE], body)
        for observer in ask.service.observers:
            observer.transferred(ask.service.label, DOOR, len(call.body), len(answer.body))
        return answer

    async def read(self, ask: InferAsk, body: bytes, memory: Memory) -> InferenceRequest:
        """Return the request in `body`. Raises what is wrong with it, of which the observers have been told."""

        def read() -> InferenceRequest:
            plain = inflated(body, self._site.http.max_body_size) if ask.header_length is None else body
            return read_body(ask, plain, memory)

        try:
            request = await off_loop(size_to_read(body), read)
            memory.hold(request)
            if ask.header_length is None:
                charge(sum([each.array.nbytes for each in request.inputs]))
            return request
        except WeirError as error:
            raise told(ask.service, DOOR, error) from None


async def one_answer(service: "Service", request: InferenceRequest, trace: Trace | None) -> InferenceResponse:
    """Return the only answer to `request`, of a model that streams too. Raises Unsupported if it gives another number of them."""
    answers: list[InferenceResponse] = []
    async with aclosing(stream(service, request, door=DOOR, trace=trace)) as parts:
        async for part in parts:
            answers.append(part.response)
            if len(answers) > 1:
                break
    if len(answers) != 1:
        number = "several answers" if answers else "no answer"
        raise Unsupported(f"model {service.label!r} has given {number}, and this call has one: POST generate_stream")
    return answers[0]


async def _compressed(answer: HttpResponse, coding: str) -> HttpResponse:
    if len(answer.body) > _LONG_WORK:
        return await asyncio.to_thread(compressed, answer, coding)
    return compressed(answer, coding)
