"""The Open Inference Protocol over HTTP, with Triton's generate extension: how its requests are read and their answers written."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from weir.errors import Unsupported, WeirError
from weir.protocols.exchange import EventSource, Exchange
from weir.protocols.kserve.bodies import inflated, read_body, size_to_read
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.heads import InferAsk, named_in, read_head
from weir.protocols.kserve.replies import JSON_TYPE, error_answer, error_event, reply_to
from weir.protocols.metadata import find
from weir.protocols.offloading import written
from weir.protocols.response import HttpResponse
from weir.protocols.shared_memory import Memory
from weir.serving.inference import StreamPart
from weir.wire.generate import read_generate, write_generated
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write
from weir.wire.kserve_json import REGION, write_response

if TYPE_CHECKING:
    from weir.serving.service import Service


class KserveProtocol:
    """The protocol of POST /v2/models/{model}[/versions/{version}]/ and infer, generate, infer_stream or generate_stream; see HttpProtocol."""

    prefix = b"/v2"

    def __init__(self, site: KServeContext) -> None:
        self.site = site

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> InferAsk | None:
        """See heads.read_head."""
        return read_head(self.site.registry, self.site.http, method, path, headers)

    def named(self, path: str) -> "Service | None":
        """Return the service that `path` asks for, as far as there is one."""
        named = named_in(path)
        try:
            return None if named is None else find(self.site.registry, *named[:2])
        except WeirError:
            return None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """Return what is written for `error`."""
        return error_answer(error, development=self.site.http.development)

    async def answer(self, exchange: Exchange, head: InferAsk, body: bytes) -> HttpResponse:
        """Return the answer to a request for one."""
        if head.call == "generate":
            response = await one_answer(exchange, await self._read_generate(exchange, head, body))
            text = await written(bytes_to_write(response), partial(write_generated, response))
            return HttpResponse(200, [JSON_TYPE], text)
        memory = self.site.memory(exchange.peer, head.headers)
        request = await self._read(exchange, head, body, memory)
        del body  # its tensors have it
        response = await exchange.infer(request)
        size = bytes_to_write(response, binary_outputs(request))
        return await written(size, lambda: reply_to(request, response, memory).as_answer())

    async def stream(self, exchange: Exchange, head: InferAsk, body: bytes) -> EventSource:
        """Return the answers to a request for several; each is written as JSON."""
        write: Callable[[InferenceResponse], bytes] = write_response
        if head.call == "generate_stream":
            request, write = await self._read_generate(exchange, head, body), write_generated
        else:
            request = await self._read(exchange, head, body, self.site.memory(exchange.peer, head.headers))
            for output in request.outputs or ():
                if REGION in output.parameters:
                    error = Unsupported(f"output {output.name!r}: has {REGION}, but a stream is written as JSON")
                    raise exchange.refused(error)
        return EventSource(_events(exchange.stream(request), write), error_event, list)

    async def _read(self, exchange: Exchange, head: InferAsk, body: bytes, memory: Memory) -> InferenceRequest:
        def read() -> InferenceRequest:
            plain = inflated(body, self.site.http.max_body_size) if head.header_length is None else body
            request = read_body(head, plain, memory)
            if not head.stream:
                memory.hold(request)
            return request

        request = await exchange.read(size_to_read(body), read)
        if head.header_length is None:
            exchange.charge(sum([each.array.nbytes for each in request.inputs]))
        return request

    async def _read_generate(self, exchange: Exchange, head: InferAsk, body: bytes) -> InferenceRequest:
        inputs = head.service.inference.inputs(head.service)
        request = await exchange.read(
            len(body), partial(read_generate, body, inputs, head.service.name, head.version)
        )  # fmt: skip
        exchange.charge(sum([each.array.nbytes for each in request.inputs]))
        return request


async def one_answer(exchange: Exchange, request: InferenceRequest) -> InferenceResponse:
    """Return the only answer to `request`, of a model that streams too. Raises Unsupported if it gives another number of them."""
    answers: list[InferenceResponse] = []
    async with aclosing(exchange.stream(request)) as parts:
        async for part in parts:
            answers.append(part.response)
            if len(answers) > 1:
                break
    if len(answers) != 1:
        number, label = "several answers" if answers else "no answer", exchange.service.label
        raise Unsupported(f"model {label!r} has given {number}, and this call has one: POST generate_stream")
    return answers[0]


async def _events(
    parts: AsyncGenerator[StreamPart, None], write: Callable[[InferenceResponse], bytes]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for part in parts:
            yield await written(bytes_to_write(part.response), partial(write, part.response))
