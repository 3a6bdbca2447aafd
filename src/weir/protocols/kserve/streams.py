"""Streams of the protocol over HTTP: each answer is the data of a Server-Sent Event."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from weir.errors import Unsupported, WeirError
from weir.protocols.endpoint import Call
from weir.protocols.events import EventStream, Source
from weir.protocols.kserve.bodies import inflated, read_body, size_to_read
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.heads import InferAsk, read_head
from weir.protocols.kserve.replies import error_answer, error_event
from weir.protocols.kserve_inference import StreamPart, stream
from weir.protocols.metadata import inputs_of
from weir.protocols.native import DOOR
from weir.protocols.offloading import off_loop, written
from weir.protocols.response import Headers, HttpResponse
from weir.telemetry.tracecontext import CURRENT, HEADER
from weir.wire.generate import read_generate, write_generated
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import bytes_to_write
from weir.wire.kserve_json import REGION, write_response

Read = Callable[[InferAsk, Call], InferenceRequest]
Write = Callable[[InferenceResponse], bytes]


class Streams:
    """The handlers of POST /v2/models/{model}[/versions/{version}]/infer_stream and generate_stream."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site

    async def infer(self, call: Call) -> HttpResponse | None:
        """Take an inference request as /infer does; each answer is written as JSON."""
        return await self._stream(call, self._read_infer, write_response)

    async def generate(self, call: Call) -> HttpResponse | None:
        """Take a flat object (Triton's generate extension); each answer is one too."""
        return await self._stream(call, _read_generate, write_generated)

    async def _stream(self, call: Call, read: Read, write: Write) -> HttpResponse | None:
        site, version = self._site, call.path.get("version")
        path = f"/v2/models/{call.path['model']}{f'/versions/{version}' if version else ''}/infer"
        ask = read_head(site.registry, site.http, "POST", path, call.headers, streams=True)
        assert ask is not None, "the path is one of inference: this is a bug"
        service = ask.service
        try:
            request = await off_loop(size_to_read(call.body), partial(read, ask, call))
        except WeirError as error:
            for observer in service.observers:
                observer.refused(service.label, DOOR, error)
            raise
        trace = None if service.tracing is None else service.tracing.new(ask.traceparent)
        CURRENT.set(trace)
        named = [] if trace is None else [(HEADER.encode(), trace.traceparent.encode())]
        async with aclosing(stream(service, request, door=DOOR, trace=trace)) as parts:
            source = Source(_data(parts, write), partial(_refusal, named), error_event, lambda: named)
            events = EventStream(source, call.receive, call.send, site.http.stream_keep_alive)
            await events.run()
        for observer in service.observers:
            observer.transferred(service.label, DOOR, len(call.body), events.sent_bytes)
        return None

    def _read_infer(self, ask: InferAsk, call: Call) -> InferenceRequest:
        body = inflated(call.body, self._site.http.max_body_size) if ask.header_length is None else call.body
        request = read_body(ask, body, self._site.memory(call.peer, call.headers))
        for output in request.outputs or ():
            if REGION in output.parameters:
                raise Unsupported(f"output {output.name!r}: has {REGION}, but a stream is written as JSON")
        return request


def _refusal(named: Headers, error: BaseException) -> HttpResponse:
    answer = error_answer(error)
    answer.headers.extend(named)
    return answer


def _read_generate(ask: InferAsk, call: Call) -> InferenceRequest:
    return read_generate(call.body, inputs_of(ask.service), ask.service.name, ask.version)


async def _data(parts: AsyncIterator[StreamPart], write: Write) -> AsyncIterator[bytes]:
    async for part in parts:
        yield await written(bytes_to_write(part.response), partial(write, part.response))
