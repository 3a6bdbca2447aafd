"""The Open Inference Protocol (KServe v2), with the extensions that Triton's clients know: what all its frontends share, and inference over HTTP.

kserve_metadata.py has all documents that are not inference.

Sources: the protocol's REST specification (https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md), and Triton's
extensions for binary tensors, generation and shared memory (https://github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md,
extension_generate.md and extension_shared_memory.md).
"""

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from weir.errors import InvalidRequest, MethodNotAllowed, Unsupported, WeirError
from weir.messages import JSON, KSERVE, TRACE_FIELD_NAMES, carry
from weir.protocols.access import Access, Control
from weir.protocols.account import Account, charge_values
from weir.protocols.content_negotiation import accepted_coding, coding_of, decompress
from weir.protocols.entries import CLASS, CLASS_HEADER, QueueEntry, Schedule, class_offset
from weir.protocols.exchange import EventSource, Exchange, StreamPart, inference_of
from weir.protocols.kserve_metadata import EXTENSIONS, SHARED_MEMORY, find
from weir.protocols.native import RequestOptions, check_length
from weir.protocols.offloading import LONG_BODY, HeadMemo, written
from weir.protocols.response import Headers, HttpResponse, encode_safely, error_headers, error_value, waited_headers
from weir.protocols.settings import HttpSettings, KserveSettings
from weir.protocols.shared_memory import Memory, Regions, wants_regions
from weir.serving.settings import NAME_IN_PATH
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write, contiguous_bytes, write_response
from weir.wire.kserve_json import REGION, Body, read_generate, write_generated
from weir.wire.status import kserve_code
from weir.wire.tensors import DTYPES, Arrays, elements_bytes
from weir.wire.values import values_bytes

if TYPE_CHECKING:
    from weir.catalog.manager import Manager
    from weir.serving.handle import ModelHandle, Models
    from weir.wire.kserve_json import BodyPeek


class KserveContext:
    """What a frontend of the Open Inference Protocol needs of its server.

    `registry` has the models. `access` decides who may call the server and `control` who may change it. `manager` loads and unloads models; it is None if
    the server's models cannot change.
    """

    def __init__(
        self,
        registry: "Models",
        http: HttpSettings,
        control: Control | None = None,
        *,
        settings: KserveSettings | None = None,
        manager: "Manager | None" = None,
        access: Access | None = None,
        account: Account | None = None,
    ) -> None:
        self.registry = registry
        self.http = http
        self.control = control or Control()
        self.access = access or Access()
        self.settings = settings or KserveSettings()
        self.account = account or Account(http)
        self.regions = Regions(allowed=self.settings.allow_shared_memory, max_read=http.max_body_size)
        self._manager = manager

    @property
    def manager(self) -> "Manager":
        """What loads and unloads models. Raises Unsupported if the server's models cannot change."""
        if self._manager is None:
            raise Unsupported("this server cannot load or unload models while it runs")
        return self._manager

    @property
    def has_manager(self) -> bool:
        """Whether models can be loaded and unloaded."""
        return self._manager is not None

    @property
    def failed(self) -> dict[str, str]:
        """Why this server is not live: the reason of each model that can no longer start a worker, by label. Empty unless `liveness` is "models"."""
        if self.http.liveness == "process":
            return {}
        return {service.facts.label: service.control.failed for service in self.registry.all if service.control.failed}

    @property
    def extensions(self) -> list[str]:
        """The extensions that the server's metadata lists."""
        offered = [each for each in EXTENSIONS if self.has_manager or not each.startswith("model_repository")]
        return sorted([*offered, SHARED_MEMORY]) if self.regions.allowed else offered

    def memory(self, peer: str | None, headers: Headers) -> Memory:
        """Return the shared memory for one request: only a caller who may control the server can use it."""
        return Memory(self.regions, lambda: self.control.require_http(peer, headers))


_MAX_REPLIES = 64  # headers of responses that a Layout remembers

HEADER_LENGTH = b"inference-header-content-length"

# The codings that the protocol's clients can decompress. HTTP libraries send more of them in Accept-Encoding than the clients understand.
CODINGS = ("gzip", "deflate")

# The last part of a path of inference, below the path of a model or of one of its versions.
CALLS = ("infer", "generate", "infer_stream", "generate_stream")
_PATH = re.compile(rf"/v2/models/({NAME_IN_PATH})(?:/versions/([^/]+))?/({'|'.join(CALLS)})")


class KserveHead(RequestOptions):
    """The head of an inference request of the Open Inference Protocol.

    `header_length` is how many bytes of the body are JSON, before the binary tensors: None if the whole body is JSON, 0 if it is one raw tensor.
    """

    __slots__ = (
        "accept", "call", "content_type", "header_length", "headers", "layouts", "lead", "outline", "plain",
        "service", "small_json", "stream", "version",
    )  # fmt: skip

    def __init__(self, service: "ModelHandle", version: str, call: str = "infer") -> None:
        super().__init__(service.facts.settings.timeout)
        self.service = service
        self.version = version  # the version in the path, or ""
        self.call = call  # infer, generate, infer_stream or generate_stream
        self.stream = call.endswith("_stream")
        self.header_length: int | None = None
        self.headers: Headers = []
        # How the request enters the queue if its body is not read before.
        self.content_type = self.accept = KSERVE
        self.plain = False
        self.outline: BodyPeek | None = None  # reads rows and batch key of a JSON body that the worker decodes
        self.small_json = False  # the body is a short JSON document that `outline` can read
        self.layouts: HeadMemo[Layout] | None = None  # by the JSON before binary tensors, unless that is long
        self.lead = 0  # unused bytes before a body in shared memory, which align its tensors


def named_in(path: str) -> tuple[str, str, str] | None:
    """Return the model's name, the version ("": none) and the call in `path`; None if it is not a path of inference."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found[1], found[2] or "", found[3])


def read_head(
    registry: "Models", settings: HttpSettings, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> KserveHead | None:
    """Read the head of a request. `path` is percent-decoded and has no query; `headers` have names in lower case.

    Returns None if `path` is not a path of inference. Raises RequestErrors naming the header, its value and the rule; ModelNotFound; MethodNotAllowed;
    TooLarge if Content-Length exceeds `max_body_size`; and Unsupported for `infer` of a model that streams.
    """
    named = named_in(path)
    if named is None:
        return None
    if method != "POST":
        raise MethodNotAllowed(f"{method} {path}: takes POST only", details={"allow": ["POST"]})
    model, version, call = named
    head = KserveHead(find(registry, model, version), version, call)
    head.headers = list(headers)
    if head.service.facts.streaming and call == "infer":
        raise Unsupported(
            f"model {head.service.facts.label!r} streams its responses, but this call returns one response"
        )
    for name, value in head.headers:
        if name == b"content-length":
            check_length(value, settings.max_body_size)
        elif name == HEADER_LENGTH:
            head.header_length = _count(value)
        elif name == CLASS_HEADER:
            head.class_offset = class_offset(value.decode("latin-1").strip().lower(), "X-Weir-Class")
        elif name == b"content-encoding":
            head.coding = coding_of(value.decode("latin-1"))
        elif name in TRACE_FIELD_NAMES:
            head.carrier = carry(head.carrier, TRACE_FIELD_NAMES[name], value.decode("latin-1"))
        elif name == b"accept-encoding":
            head.accept_coding = accepted_coding(value.decode("latin-1"), CODINGS)
    return head


def _count(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        text = value[:40].decode("latin-1")
        raise InvalidRequest(f"Inference-Header-Content-Length {text!r}: must be a number of bytes")
    return int(value)


# The first byte of a zlib stream with a window of 32 KiB (RFC 1950, section 2.2). JSON cannot begin with it.
ZLIB = b"x"


def inflated(body: Body, max_size: int) -> Body:
    """Return `body`, decompressed if it is a zlib stream: some clients send one without a Content-Encoding header."""
    return decompress(bytes(body), "deflate", max_size) if bytes(body[:1]) == ZLIB else body


def size_to_read(body: Body) -> int:
    """Return about how many bytes of `body` must be read. A zlib stream counts as a long body, because its real size is unknown."""
    return len(body) if bytes(body[:1]) != ZLIB else max(len(body), LONG_BODY + 1)


def read_body(head: KserveHead, body: Body, memory: Memory) -> InferenceRequest:
    """Return the request in `body`, which is decompressed. The request's arrays may be views of `body`.

    Raises RequestErrors naming tensor, value and rule.
    """
    request = _read_request(head, body, memory)
    if head.class_offset:
        request.parameters = {**request.parameters, CLASS: "bulk"}
    return request


def _charge_values(header_length: int | None, body: Body) -> None:
    """Charge what is decoded of `body`: JSON, or the header before binary tensors, and those of BYTES."""

    def count() -> int:
        if header_length is None:
            return values_bytes(body, JSON)
        header = bytes(body[:header_length])
        size = values_bytes(header, JSON)
        return size + (elements_bytes(body[header_length:]) if kserve_binary.may_have_texts(header) else 0)

    charge_values(len(body), count)


def _read_request(head: KserveHead, body: Body, memory: Memory) -> InferenceRequest:
    name, version = head.service.facts.name, head.version
    if not len(body):
        raise InvalidRequest("body: is empty, must be an inference request")
    _charge_values(head.header_length, body)
    if head.header_length is None:
        return kserve_json.read_request(body, name, version, find=memory.find)
    if not head.header_length:
        return kserve_binary.read_raw_request(body, inference_of(head.service).inputs(head.service), name, version)
    return kserve_binary.read_request(body, head.header_length, name, version, find=memory.find)


JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


class KserveReply(NamedTuple):
    """A response whose body is in parts, so that arrays are sent without being copied."""

    headers: Headers
    parts: list[bytes | memoryview]

    def as_answer(self) -> HttpResponse:
        """Return the response with its body joined."""
        return HttpResponse(200, self.headers, b"".join(self.parts))


def reply_to(request: InferenceRequest, response: InferenceResponse, memory: Memory) -> KserveReply:
    """Return the reply that holds `response`. Outputs that `request` wants in shared memory are written to the regions that `memory` keeps.

    Raises InvalidRequest for an output that does not fit into its region.
    """
    memory.take_outputs(response)
    written = write_response(response, binary_outputs(request))
    if written.header_length is None:
        return KserveReply([JSON_TYPE], written.parts)
    return KserveReply([BINARY_TYPE, (HEADER_LENGTH, b"%d" % written.header_length)], written.parts)


def error_answer(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the response for `error`: its status, the body `{"error": text}`, the error's name in a header, and Retry-After or Allow where due."""
    headers = error_headers(error)
    if isinstance(error, WeirError):
        headers.append((ERROR_NAME.encode(), type(error).__name__.encode()))
    return HttpResponse(kserve_code(error), headers, encode_safely({"error": _text_of(error, development=development)}))


def error_event(error: WeirError) -> bytes:
    """Return the data of the event for an error that ends a stream: the body of `error_answer`, and `type`, because an event has no headers."""
    return encode_safely({"error": _text_of(error), "type": type(error).__name__})


def _text_of(error: BaseException, *, development: bool = False) -> str:
    value = error_value(error, None, development=development)
    text: str = value["message"]
    if development and isinstance(value["details"], dict) and "traceback" in value["details"]:
        text = f"{text}\n{value['details']['traceback']}"
    return text


class KserveProtocol:
    """The HttpProtocol of POST /v2/models/{model}[/versions/{version}]/{call}, where the call is infer, generate, infer_stream or generate_stream."""

    prefix = b"/v2"

    def __init__(self, context: KserveContext) -> None:
        self.context = context

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> KserveHead | None:
        """See `read_head`."""
        return read_head(self.context.registry, self.context.http, method, path, headers)

    def named(self, path: str) -> "ModelHandle | None":
        """Return the service that `path` names, or None."""
        named = named_in(path)
        try:
            return None if named is None else find(self.context.registry, *named[:2])
        except WeirError:
            return None

    def error_answer(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """Return the response for `error`."""
        return error_answer(error, development=self.context.http.development)

    async def answer(self, exchange: Exchange, head: KserveHead, body: bytes) -> HttpResponse:
        """Return the one response to `infer` or `generate`."""
        if head.call == "generate":
            response = await one_answer(exchange, await self._read_generate(exchange, head, body))
            text = await written(bytes_to_write(response), partial(write_generated, response))
            return HttpResponse(200, [JSON_TYPE], text)
        memory = self.context.memory(exchange.peer, head.headers)
        request = await self._read(exchange, head, body, memory)
        del body  # the request's tensors refer to it
        response = await exchange.infer(request)
        size = bytes_to_write(response, binary_outputs(request))
        answer = await written(size, lambda: reply_to(request, response, memory).as_answer())
        answer.headers.extend(waited_headers(exchange.waited))
        return answer

    async def stream(self, exchange: Exchange, head: KserveHead, body: bytes) -> EventSource:
        """Return the stream of responses to `infer_stream` or `generate_stream`; each is written as JSON."""
        write: Callable[[InferenceResponse], bytes] = kserve_json.write_response
        if head.call == "generate_stream":
            request, write = await self._read_generate(exchange, head, body), write_generated
        else:
            request = await self._read(exchange, head, body, self.context.memory(exchange.peer, head.headers))
            for output in request.outputs or ():
                if REGION in output.parameters:
                    error = Unsupported(f"output {output.name!r}: has {REGION}, but a stream is written as JSON")
                    raise error
        return EventSource(_events(exchange.stream(request), write), error_event, list)

    async def _read(self, exchange: Exchange, head: KserveHead, body: bytes, memory: Memory) -> InferenceRequest:
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

    async def _read_generate(self, exchange: Exchange, head: KserveHead, body: bytes) -> InferenceRequest:
        inputs = inference_of(head.service).inputs(head.service)

        def read() -> InferenceRequest:
            charge_values(len(body), partial(values_bytes, body, JSON))
            return read_generate(body, inputs, head.service.facts.name, head.version)

        request = await exchange.read(len(body), read)
        exchange.charge(sum([each.array.nbytes for each in request.inputs]))
        return request


async def one_answer(exchange: Exchange, request: InferenceRequest) -> InferenceResponse:
    """Return the only response to `request`, also of a streaming model. Raises Unsupported if the model gives none or several."""
    answers: list[InferenceResponse] = []
    async with aclosing(exchange.stream(request)) as parts:
        async for part in parts:
            answers.append(part.response)
            if len(answers) > 1:
                break
    if len(answers) != 1:
        number, label = "several responses" if answers else "no response", exchange.service.facts.label
        raise Unsupported(f"model {label!r} has given {number}, and this call has one: POST generate_stream")
    return answers[0]


async def _events(
    parts: AsyncGenerator[StreamPart, None], write: Callable[[InferenceResponse], bytes]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for part in parts:
            yield await written(bytes_to_write(part.response), partial(write, part.response))


class _ArenaPlace(NamedTuple):
    """The place of an array in a body: `offset` is in bytes from the end of the header."""

    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    offset: int


class Layout:
    """The parsed form of a `header` (JSON) that precedes binary tensors. Clients that send tensors of one shape repeat the same header.

    `request` is the request without its inputs, `entry` its queue entry without the payload.
    """

    __slots__ = ("_places", "_replies", "entry", "header", "request", "schedule", "wants_regions")

    def __init__(
        self, header: bytes, places: list[_ArenaPlace], request: InferenceRequest, entry: QueueEntry, schedule: Schedule
    ) -> None:
        self.header = header
        self.request = request
        self.wants_regions = wants_regions(request)
        self.entry = entry
        self.schedule = schedule
        self._places = places
        # By names, shapes and dtypes of earlier outputs: headers of the reply, its JSON, and the names of the arrays that follow the JSON.
        self._replies: dict[tuple[Any, ...], tuple[Headers, bytes | memoryview, list[str]]] = {}

    def arrays(self, body: memoryview) -> Arrays:
        """Return the arrays in a `body` that has this header and the same length, as read-only views."""
        rest = body.toreadonly()[len(self.header) :]
        return {name: numpy.ndarray(shape, dtype, rest, offset) for name, shape, dtype, offset in self._places}

    def reply(self, output: Arrays) -> KserveReply | None:
        """Return the reply with the arrays of `output`, if the headers for such arrays are remembered; else None."""
        known = self._replies.get(_described(output))
        if known is None:
            return None
        headers, json, names = known
        return KserveReply(headers, [json, *[contiguous_bytes(output[name]) for name in names]])

    def remember(self, output: Arrays, response: InferenceResponse, reply: KserveReply) -> None:
        """Remember the headers and the JSON of `reply` if they depend only on names, shapes and dtypes. `response` was made of `output`, and `reply` of it."""
        numbers = all(DTYPES[value.datatype] == value.array.dtype != object for value in response.outputs)
        if numbers and len(reply.parts) == 1 + len(response.outputs) and len(self._replies) < _MAX_REPLIES:
            names = [value.name for value in response.outputs]
            self._replies[_described(output)] = reply.headers, reply.parts[0], names


def _described(output: Arrays) -> tuple[Any, ...]:
    return tuple([(name, array.shape, array.dtype) for name, array in output.items()])


def layout_of(
    header: bytes, body_length: int, request: InferenceRequest, entry: QueueEntry, schedule: Schedule
) -> Layout | None:
    """Return the layout of a `request` that was read from `header` and the bytes after it.

    Returns None unless all inputs are numbers in those bytes.
    """
    places, offset = {}, 0
    for value in request.inputs:
        array = value.array
        if array.dtype.kind == "O":
            return None
        places[value.name] = _ArenaPlace(value.name, array.shape, array.dtype, offset)
        offset += array.nbytes
    if len(header) + offset != body_length:  # an input is in the JSON or in shared memory
        return None
    bare = copy(request)
    bare.inputs = []
    return Layout(header, [places[name] for name in entry.payload], bare, entry._replace(payload=None), schedule)
