"""The Open Inference Protocol over HTTP, with Triton's generate extension: how its requests are read and their answers written."""

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from weir.errors import InvalidRequest, MethodNotAllowed, Unsupported, WeirError
from weir.messages import KSERVE
from weir.protocols.content_negotiation import accepted_coding, coding_of, decompress
from weir.protocols.exchange import EventSource, Exchange
from weir.protocols.kserve.context import KserveContext
from weir.protocols.kserve.metadata import find
from weir.protocols.native import RequestOptions, check_length
from weir.protocols.offloading import LONG_BODY, written
from weir.protocols.response import Headers, HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.settings import HttpSettings
from weir.protocols.shared_memory import Memory, wants_regions
from weir.protocols.status import kserve_code
from weir.serving.inference import QueueEntry, Schedule, StreamPart
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write, contiguous_bytes, write_response
from weir.wire.kserve_json import REGION, Body, read_generate, write_generated
from weir.wire.tensors import DTYPES, Arrays

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.serving.service import Service
    from weir.wire.kserve_json import BodyPeek


_MAX_REPLIES = 64  # heads of answers that a Layout remembers

HEADER_LENGTH = b"inference-header-content-length"

# Clients of the protocol know no others; libraries send Accept-Encoding headers with others unasked.
CODINGS = ("gzip", "deflate")

# What the paths of inference end with, below those of a model and of each of its versions.
CALLS = ("infer", "generate", "infer_stream", "generate_stream")
_PATH = re.compile(rf"/v2/models/([^/]+)(?:/versions/([^/]+))?/({'|'.join(CALLS)})")


class InferAsk(RequestOptions):
    """The head of a request.

    `header_length` is how many bytes of the body are JSON, before the binary tensors; None if all are, 0 if the body is one
    raw tensor.
    """

    __slots__ = (
        "accept", "call", "content_type", "header_length", "headers", "last_header", "layout", "lead", "outline", "plain",
        "service", "small_json", "stream", "version",
    )  # fmt: skip

    def __init__(self, service: "Service", version: str, call: str = "infer") -> None:
        super().__init__(service.settings.timeout)
        self.service = service
        self.version = version  # that the path names, or ""
        self.call = call  # infer, generate, infer_stream or generate_stream
        self.stream = call.endswith("_stream")
        self.header_length: int | None = None
        self.headers: Headers = []
        # What a request in the queue starts from, before its body has been read.
        self.content_type = self.accept = KSERVE
        self.plain = False
        self.outline: BodyPeek | None = None  # reads what the queue must know of a JSON body that the worker decodes
        self.small_json = False  # the body is a JSON document that `outline` reads, and has few bytes
        self.last_header = b""  # JSON of the last body with binary tensors, whose layout is made if it comes again
        self.layout: Layout | None = None
        self.lead = 0  # bytes before a body in shared memory, so that its tensors are aligned


def named_in(path: str) -> tuple[str, str, str] | None:
    """Return the name, the version ("": none) and the call in `path`, or None if it is no path of inference."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found[1], found[2] or "", found[3])


def read_head(
    registry: "Registry", settings: HttpSettings, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> InferAsk | None:
    """Read the head of a request: `path` percent-decoded and without the query, `headers` with names in lower case.

    Returns None if the path is not one of inference. Raises RequestErrors naming the header, its value and the rule;
    ModelNotFound; MethodNotAllowed; TooLarge when Content-Length is over `max_body_size`; Unsupported for `infer` of a model that streams.
    """
    named = named_in(path)
    if named is None:
        return None
    if method != "POST":
        raise MethodNotAllowed(f"{method} {path}: takes POST only", details={"allow": ["POST"]})
    model, version, call = named
    ask = InferAsk(find(registry, model, version), version, call)
    ask.headers = list(headers)
    if ask.service.streaming and call == "infer":
        raise Unsupported(f"model {ask.service.label!r} streams its answers, and this call has one answer only")
    for name, value in ask.headers:
        if name == b"content-length":
            check_length(value, settings.max_body_size)
        elif name == HEADER_LENGTH:
            ask.header_length = _count(value)
        elif name == b"content-encoding":
            ask.coding = coding_of(value.decode("latin-1"))
        elif name == b"traceparent":
            ask.traceparent = value.decode("latin-1")
        elif name == b"accept-encoding":
            ask.accept_coding = accepted_coding(value.decode("latin-1"), CODINGS)
    return ask


def _count(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        text = value[:40].decode("latin-1")
        raise InvalidRequest(f"Inference-Header-Content-Length {text!r}: must be a number of bytes")
    return int(value)


ZLIB = b"x"  # a zlib stream begins with it, and no JSON does


def inflated(body: Body, max_size: int) -> Body:
    """Return `body`, or, if it is a zlib stream that no header speaks of, what is in it: some clients send that."""
    return decompress(bytes(body), "deflate", max_size) if bytes(body[:1]) == ZLIB else body


def size_to_read(body: Body) -> int:
    """Return about how many bytes must be read of `body`: of a zlib stream that is unknown, and it counts as a long one."""
    return len(body) if bytes(body[:1]) != ZLIB else max(len(body), LONG_BODY + 1)


def read_body(ask: InferAsk, body: Body, memory: Memory) -> InferenceRequest:
    """Return the request in `body`, decompressed. Its arrays may be views into it.

    Raises RequestErrors naming tensor, value and rule.
    """
    name, version = ask.service.name, ask.version
    if not len(body):
        raise InvalidRequest("body: is empty, must be an inference request")
    if ask.header_length is None:
        return kserve_json.read_request(body, name, version, find=memory.find)
    if not ask.header_length:
        return kserve_binary.read_raw_request(body, ask.service.inference.inputs(ask.service), name, version)
    return kserve_binary.read_request(body, ask.header_length, name, version, find=memory.find)


JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


class KserveReply(NamedTuple):
    """An answer whose body is in parts, so that arrays are sent from where they are."""

    headers: Headers
    parts: list[bytes | memoryview]

    def as_answer(self) -> HttpResponse:
        """Return it with the body in one piece."""
        return HttpResponse(200, self.headers, b"".join(self.parts))


def reply_to(request: InferenceRequest, response: InferenceResponse, memory: Memory) -> KserveReply:
    """Return what is written for `response`; outputs that `request` wants in shared memory, of which `memory` has hold, are put
    there.

    Raises InvalidRequest for an output that does not fit where it is wanted.
    """
    memory.take_outputs(response)
    written = write_response(response, binary_outputs(request))
    if written.header_length is None:
        return KserveReply([JSON_TYPE], written.parts)
    return KserveReply([BINARY_TYPE, (HEADER_LENGTH, b"%d" % written.header_length)], written.parts)


def error_answer(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the answer for `error`: `{"error": text}` with its code, its name in a header, and Retry-After or Allow where they
    belong."""
    headers = error_headers(error)
    if isinstance(error, WeirError):
        headers.append((ERROR_NAME.encode(), type(error).__name__.encode()))
    return HttpResponse(kserve_code(error), headers, encode_safely({"error": _text_of(error, development=development)}))


def error_event(error: WeirError) -> bytes:
    """Return the data of an event that ends a stream: what the body would be, and `type`, for an event has no headers."""
    return encode_safely({"error": _text_of(error), "type": type(error).__name__})


def _text_of(error: BaseException, *, development: bool = False) -> str:
    value = error_value(error, None, development=development)
    text: str = value["message"]
    if development and isinstance(value["details"], dict) and "traceback" in value["details"]:
        text = f"{text}\n{value['details']['traceback']}"
    return text


class KserveProtocol:
    """The protocol of POST /v2/models/{model}[/versions/{version}]/ and infer, generate, infer_stream or generate_stream; see HttpProtocol."""

    prefix = b"/v2"

    def __init__(self, context: KserveContext) -> None:
        self.context = context

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> InferAsk | None:
        """See heads.read_head."""
        return read_head(self.context.registry, self.context.http, method, path, headers)

    def named(self, path: str) -> "Service | None":
        """Return the service that `path` asks for, as far as there is one."""
        named = named_in(path)
        try:
            return None if named is None else find(self.context.registry, *named[:2])
        except WeirError:
            return None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """Return what is written for `error`."""
        return error_answer(error, development=self.context.http.development)

    async def answer(self, exchange: Exchange, head: InferAsk, body: bytes) -> HttpResponse:
        """Return the answer to a request for one."""
        if head.call == "generate":
            response = await one_answer(exchange, await self._read_generate(exchange, head, body))
            text = await written(bytes_to_write(response), partial(write_generated, response))
            return HttpResponse(200, [JSON_TYPE], text)
        memory = self.context.memory(exchange.peer, head.headers)
        request = await self._read(exchange, head, body, memory)
        del body  # its tensors have it
        response = await exchange.infer(request)
        size = bytes_to_write(response, binary_outputs(request))
        return await written(size, lambda: reply_to(request, response, memory).as_answer())

    async def stream(self, exchange: Exchange, head: InferAsk, body: bytes) -> EventSource:
        """Return the answers to a request for several; each is written as JSON."""
        write: Callable[[InferenceResponse], bytes] = kserve_json.write_response
        if head.call == "generate_stream":
            request, write = await self._read_generate(exchange, head, body), write_generated
        else:
            request = await self._read(exchange, head, body, self.context.memory(exchange.peer, head.headers))
            for output in request.outputs or ():
                if REGION in output.parameters:
                    error = Unsupported(f"output {output.name!r}: has {REGION}, but a stream is written as JSON")
                    raise exchange.refused(error)
        return EventSource(_events(exchange.stream(request), write), error_event, list)

    async def _read(self, exchange: Exchange, head: InferAsk, body: bytes, memory: Memory) -> InferenceRequest:
        def read() -> InferenceRequest:
            plain = inflated(body, self.context.http.max_body_size) if head.header_length is None else body
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


class _ArenaPlace(NamedTuple):
    """Where an array lies: `offset` counts from the end of the header."""

    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    offset: int


class Layout:
    """What a `header` before binary tensors means: `asked` is the request without its inputs, `work` its entry in the queue without its payload."""

    __slots__ = ("_places", "_replies", "asked", "header", "schedule", "wants_regions", "work")

    def __init__(
        self, header: bytes, places: list[_ArenaPlace], asked: InferenceRequest, work: QueueEntry, schedule: Schedule
    ) -> None:
        self.header = header
        self.asked = asked
        self.wants_regions = wants_regions(asked)
        self.work = work
        self.schedule = schedule
        self._places = places
        # Of outputs that have been answered: what they were -> headers, JSON, and the names of those that follow it.
        self._replies: dict[tuple[Any, ...], tuple[Headers, bytes | memoryview, list[str]]] = {}

    def arrays(self, body: memoryview) -> Arrays:
        """Return the arrays in a `body` with this header and the same length, as read-only views."""
        rest = body.toreadonly()[len(self.header) :]
        return {name: numpy.ndarray(shape, dtype, rest, offset) for name, shape, dtype, offset in self._places}

    def reply(self, output: Arrays) -> KserveReply | None:
        """Return the reply with the tensors of `output`, if one like it has been remembered."""
        known = self._replies.get(_described(output))
        if known is None:
            return None
        headers, json, names = known
        return KserveReply(headers, [json, *[contiguous_bytes(output[name]) for name in names]])

    def remember(self, output: Arrays, response: InferenceResponse, reply: KserveReply) -> None:
        """Keep the head of `reply`, which was made of `output` by way of `response`, if it depends on nothing else."""
        numbers = all(DTYPES[value.datatype] == value.array.dtype != object for value in response.outputs)
        if numbers and len(reply.parts) == 1 + len(response.outputs) and len(self._replies) < _MAX_REPLIES:
            names = [value.name for value in response.outputs]
            self._replies[_described(output)] = reply.headers, reply.parts[0], names


def _described(output: Arrays) -> tuple[Any, ...]:
    return tuple([(name, array.shape, array.dtype) for name, array in output.items()])


def layout_of(
    header: bytes, body_length: int, asked: InferenceRequest, work: QueueEntry, schedule: Schedule
) -> Layout | None:
    """Return the layout of a request that was read from `header` and the bytes after it, if these are all its inputs, and
    numbers."""
    places, offset = {}, 0
    for value in asked.inputs:
        array = value.array
        if array.dtype.kind == "O":
            return None
        places[value.name] = _ArenaPlace(value.name, array.shape, array.dtype, offset)
        offset += array.nbytes
    if len(header) + offset != body_length:  # an input stands in the JSON, or in shared memory
        return None
    bare = InferenceRequest(
        asked.model, [], version=asked.version, id=asked.id, outputs=asked.outputs, parameters=asked.parameters
    )
    bare.without_batch = asked.without_batch
    return Layout(header, [places[name] for name in work.payload], bare, work._replace(payload=None), schedule)
