"""The Open Inference Protocol (KServe v2), with the extensions that Triton's clients know: what all its frontends share, and inference over HTTP.

data_plane.py has all calls that are not inference.

Sources: the protocol's REST specification (https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md), and Triton's
extensions for binary tensors, generation and shared memory (https://github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md,
extension_generate.md and extension_shared_memory.md).

A region of shared memory is part of a file in /dev/shm that belongs to its client. The server reads and writes it with system calls and does not map it: a
client that shortened a mapped file would crash this process.
"""

import os
import re
import stat
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy

from weir.errors import Conflict, Forbidden, InvalidRequest, MethodNotAllowed, TooLarge, Unsupported, WeirError, brief
from weir.messages import JSON, KSERVE, Form
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.access import Access, Control
from weir.protocols.account import Account, charge, charge_values
from weir.protocols.data_plane import EXTENSIONS, SHARED_MEMORY, RegionStatus, find
from weir.protocols.entries import CLASS, QueueEntry
from weir.protocols.exchange import EventSource, Exchange, StreamPart, inference_of
from weir.protocols.native import COMMON, RequestHead, RequestOptions, check_length, read_head_for
from weir.protocols.offloading import LONG_BODY, HeadMemo, written
from weir.protocols.response import (
    JSON_HEADER,
    Headers,
    HttpResponse,
    accepted_coding,
    decompress,
    encode_safely,
    error_headers,
    error_value,
    waited_headers,
)
from weir.serving import NAME_IN_PATH
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_binary import binary_outputs, bytes_to_write, contiguous_bytes, raw_bytes, write_response
from weir.wire.kserve_json import REGION, Body, nowhere, read_generate, write_generated
from weir.wire.status import kserve_code
from weir.wire.tensors import DTYPES, Arrays, elements_bytes
from weir.wire.values import UNREADABLE, unreadable, values_bytes

if TYPE_CHECKING:
    from weir.catalog.manager import Manager
    from weir.serving.handle import ModelHandle, Models
    from weir.wire.kserve_json import BodyPeek

T = TypeVar("T")

FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?(?!\.\.?$)[A-Za-z0-9._-]{1,255}")
_MAX_BYTES = (1 << 63) - 1
_MAX_REGIONS = 1000

OFF = "shared memory is switched off on this server (--allow-shared-memory switches it on for callers on this machine)"


class Region:
    """One region: `byte_size` bytes from `offset` on of the file that `key` names.

    The file descriptor `fd` is closed when nothing refers to the region any more: a request may still use a region that has been unregistered.
    """

    __slots__ = ("__weakref__", "byte_size", "fd", "key", "name", "offset")

    def __init__(self, name: str, key: str, offset: int, byte_size: int, fd: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def status(self) -> RegionStatus:
        """Return the description that clients see."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, byte_size: int) -> bytearray:
        """Return a copy of `byte_size` bytes from `offset` on, which must lie in the region. Raises InvalidRequest if the file has become shorter."""
        data = bytearray(byte_size)
        view, at = memoryview(data), 0
        while at < byte_size:
            count = os.preadv(self.fd, [view[at:]], self.offset + offset + at)
            if not count:
                raise self._shorter()
            at += count
        return data

    def write(self, offset: int, room: int, data: bytes | memoryview) -> None:
        """Write `data` from `offset` on. Raises InvalidRequest if it is longer than `room` bytes, or if the file has become shorter."""
        if len(data) > room:
            raise InvalidRequest(f"shared memory region {self.name!r}: {room} bytes for an output that has {len(data)}")
        if os.fstat(self.fd).st_size < self.offset + offset + len(data):
            raise self._shorter()
        view, at = memoryview(data), 0
        while at < len(view):
            at += os.pwritev(self.fd, [view[at:]], self.offset + offset + at)

    def _shorter(self) -> InvalidRequest:
        return InvalidRequest(f"shared memory region {self.name!r}: its client shrank {self.key!r}")


class Regions:
    """The regions of one server. If `allowed` is False, no region can be registered. A tensor may have at most `max_read` bytes.

    Every error is a RequestError that names the region, the value and the rule.
    """

    def __init__(self, *, allowed: bool = False, max_read: int = 16 << 20, folder: Path = FOLDER) -> None:
        self.allowed = allowed
        self._max_read = max_read
        self._folder = folder
        self._regions: dict[str, Region] = {}
        # Unregistered, but a request that is under way writes there: as with Triton, they are listed until it ends.
        self._leaving: weakref.WeakValueDictionary[str, Region] = weakref.WeakValueDictionary()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open the region: `byte_size` bytes from `offset` on of the shared memory object `key`."""
        self._check_allowed()
        if name in self._regions:
            raise Conflict(f"shared memory region {name!r} is already registered; unregister it first")
        if len(self._regions) >= _MAX_REGIONS:
            raise Conflict(f"shared memory region {name!r}: {_MAX_REGIONS} are registered, that is the limit")
        if not (0 <= offset <= _MAX_BYTES and 0 < byte_size <= _MAX_BYTES - offset):
            raise InvalidRequest(
                f"shared memory region {name!r}: offset={offset}, byte_size={byte_size}: offset must be at least 0 and byte_size at least 1"
            )
        fd = self._open(name, key)
        size = os.fstat(fd).st_size
        if offset + byte_size > size:
            os.close(fd)
            raise InvalidRequest(
                f"shared memory region {name!r}: bytes {offset} to {offset + byte_size}, but {key!r} has {size}"
            )
        self._regions[name] = Region(name, key, offset, byte_size, fd)

    def unregister(self, name: str = "") -> None:
        """Close the region of this name, if there is one; without a name, all. One that a request uses is closed when the request ends."""
        self._check_allowed()
        for each in [name] if name else list(self._regions):
            if each in self._regions:
                self._leaving[each] = self._regions.pop(each)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Describe the region of this name; without a name, all regions, also those that requests still use."""
        self._check_allowed()
        used = {**self._leaving, **self._regions}
        regions = [used[name] if name in used else self._find(name)] if name else used.values()
        return [region.status() for region in regions]

    def read(self, name: str, offset: int, byte_size: int) -> bytearray:
        """Return a copy of `byte_size` bytes of a region, from `offset` on."""
        region = self.find(name, offset, byte_size)
        if byte_size > self._max_read:
            raise TooLarge(
                f"shared memory region {name!r}: {byte_size} bytes for a tensor: must be at most {self._max_read} "
                "(max_body_size)"
            )
        return region.read(offset, byte_size)

    def close(self) -> None:
        """Forget all regions. A region that a request uses is closed when the request ends."""
        self._regions.clear()

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise Forbidden(OFF)

    def _find(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise InvalidRequest(f"Unable to find shared memory region: {name!r}; register it first")
        return region

    def find(self, name: str, offset: int, byte_size: int) -> Region:
        """Return the region of this name. Raises InvalidRequest unless `byte_size` bytes from `offset` on lie in it."""
        self._check_allowed()
        region = self._find(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InvalidRequest(
                f"shared memory region {name!r}: bytes {offset} to {offset + byte_size} lie outside of its "
                f"{region.byte_size}"
            )
        return region

    def _open(self, name: str, key: str) -> int:
        if not _KEY.fullmatch(key):
            raise InvalidRequest(
                f"shared memory region {name!r}: key={brief(key)}: must be of letters, digits and . _ -, in {self._folder}"
            )
        path = self._folder / key.removeprefix("/")
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(
                f"Unable to open shared memory region: {name!r}: key={key!r}: {os.strerror(error.errno or 0)}"
            ) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidRequest(f"shared memory region {name!r}: key={key!r}: is not a shared memory object")
        return fd


class Memory:
    """The shared memory of one request. `check` raises Forbidden or Unauthorized if its caller may not use shared memory."""

    def __init__(self, regions: Regions, check: Callable[[], None]) -> None:
        self._regions = regions
        self._check = check
        self._held: dict[str, tuple[Region, int, int]] = {}  # by name of an output: region, offset and room in bytes

    def find(self, name: str, parameters: Parameters) -> memoryview | None:
        """Return the bytes of the input tensor `name` if its parameters name a region, else None."""
        if REGION not in parameters:
            nowhere(name, parameters)  # raises if the parameters announce binary data
            return None
        self._check()
        return memoryview(self._regions.read(*place_of(f"tensor {name!r}", parameters)))

    def hold(self, request: InferenceRequest) -> None:
        """Keep the regions for the outputs of `request`, because they may be unregistered while the model computes.

        Raises InvalidRequest for a region that does not exist or is too small.
        """
        for output in request.outputs or ():
            if REGION in output.parameters:
                self._check()
                name, offset, room = place_of(f"output {output.name!r}", output.parameters)
                self._held[output.name] = self._regions.find(name, offset, room), offset, room

    def take_outputs(self, response: InferenceResponse) -> None:
        """Write each output for which `hold` has kept a region into that region, and note the place in the output's parameters in `response`.

        Raises InvalidRequest for an output that does not fit.
        """
        for value in response.outputs:
            if value.name in self._held:
                region, offset, room = self._held[value.name]
                data = raw_bytes(value)
                region.write(offset, room, data)
                place: Parameters = {
                    REGION: region.name,
                    "shared_memory_byte_size": len(data),
                    "shared_memory_offset": offset,
                }
                value.parameters = {**value.parameters, **place}


def wants_regions(request: InferenceRequest) -> bool:
    """Return whether `request` wants any output in shared memory."""
    return any(REGION in output.parameters for output in request.outputs or ())


def place_of(what: str, parameters: Parameters) -> tuple[str, int, int]:
    """Return the region, the offset and the size in bytes that `parameters` state. Raises InvalidRequest naming `what`, the value and the rule."""
    region = parameters[REGION]
    if not isinstance(region, str):
        raise InvalidRequest(f"{what}: {REGION}={brief(region, 40)}: must be the name of a region")
    return (
        region,
        _size(what, "shared_memory_offset", parameters, 0),
        _size(what, "shared_memory_byte_size", parameters),
    )


def _size(what: str, name: str, parameters: Parameters, default: Any = None) -> int:
    value = parameters.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{what}: {name}={brief(value, 40)}: must be a number of bytes")
    return value


class KserveContext:
    """The part of its server that a frontend of the Open Inference Protocol needs.

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
        """The part that loads and unloads models. Raises Unsupported if the server's models cannot change."""
        if self._manager is None:
            raise Unsupported("this server cannot load or unload models while it runs")
        return self._manager

    @property
    def has_manager(self) -> bool:
        """Whether models can be loaded and unloaded."""
        return self._manager is not None

    @property
    def failed(self) -> dict[str, str]:
        """The reasons why this server is not live: that of each model that can no longer start a worker, by label. Empty unless `liveness` is "models"."""
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


_MAX_REPLIES = 64  # kinds of outputs whose responses a Layout remembers

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
        "call", "header_length", "headers", "layouts", "lead", "outline", "outlined",
        "service", "small_json", "stream", "version",
    )  # fmt: skip

    def __init__(self, service: "ModelHandle", version: str, call: str = "infer") -> None:
        of_version = "/versions/{version}" if version else ""
        super().__init__(service.facts.settings.timeout, f"/v2/models/{{model}}{of_version}/{call}")
        self.service = service
        self.version = version  # the version in the path, or ""
        self.call = call  # infer, generate, infer_stream or generate_stream
        self.stream = call.endswith("_stream")
        self.header_length: int | None = None
        self.headers: Headers = []
        self.outline: BodyPeek | None = None  # reads rows and batch key of a JSON body that the worker decodes
        self.outlined: tuple[int, Any, Any, Form] | None = (
            None  # the last outline that was found, and the form of its request
        )
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
        elif name == b"accept-encoding":
            head.accept_coding = accepted_coding(value.decode("latin-1"), CODINGS)
        elif name in COMMON:
            COMMON[name](head, value.decode("latin-1"))
    head.form = head.made_form(KSERVE, KSERVE)
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


BINARY_TYPE = (b"content-type", b"application/octet-stream")


class KserveReply(NamedTuple):
    """A response whose body is in parts, so that arrays are sent without being copied."""

    headers: Headers
    parts: list[bytes | memoryview]

    def as_http(self) -> HttpResponse:
        """Return the response with its body joined."""
        return HttpResponse(200, self.headers, b"".join(self.parts))


def reply_to(request: InferenceRequest, response: InferenceResponse, memory: Memory) -> KserveReply:
    """Return the reply that holds `response`. Outputs that `request` wants in shared memory are written to the regions that `memory` keeps.

    Raises InvalidRequest for an output that does not fit into its region.
    """
    memory.take_outputs(response)
    written = write_response(response, binary_outputs(request))
    if written.header_length is None:
        return KserveReply([JSON_HEADER], written.parts)
    return KserveReply([BINARY_TYPE, (HEADER_LENGTH, b"%d" % written.header_length)], written.parts)


def error_response(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the response for `error`: its status, the body `{"error": text}`, the error's name in a header, and Retry-After or Allow where due."""
    headers = error_headers(error)
    if isinstance(error, WeirError):
        headers.append((ERROR_NAME.encode(), type(error).__name__.encode()))
    return HttpResponse(kserve_code(error), headers, encode_safely({"error": _text_of(error, development=development)}))


def error_event(error: WeirError) -> bytes:
    """Return the data of the event for an error that ends a stream: the body of `error_response`, and `type`, because an event has no headers."""
    return encode_safely({"error": _text_of(error), "type": type(error).__name__})


def _text_of(error: BaseException, *, development: bool = False) -> str:
    value = error_value(error, None, development=development)
    text: str = value["message"]
    if development and isinstance(value["details"], dict) and "traceback" in value["details"]:
        text = f"{text}\n{value['details']['traceback']}"
    return text


class _OfContext:
    """The base class of the protocols of both versions."""

    def __init__(self, context: KserveContext) -> None:
        self.context = context

    def error_response(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """Return the response for `error`."""
        return error_response(error, development=self.context.http.development)


class KserveProtocol(_OfContext):
    """The HttpProtocol of POST /v2/models/{model}[/versions/{version}]/{call}, where the call is infer, generate, infer_stream or generate_stream."""

    prefix = b"/v2"

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

    async def respond(self, exchange: Exchange, head: KserveHead, body: bytes) -> HttpResponse:
        """Return the one response to `infer` or `generate`."""
        if head.call == "generate":
            response = await one_response(exchange, await self._read_generate(exchange, head, body))
            text = await written(bytes_to_write(response), partial(write_generated, response))
            return HttpResponse(200, [JSON_HEADER], text)
        memory = self.context.memory(exchange.peer, head.headers)
        request = await self._read(exchange, head, body, memory)
        del body  # the request's tensors refer to it
        response = await exchange.infer(request)
        size = bytes_to_write(response, binary_outputs(request))
        reply = await written(size, lambda: reply_to(request, response, memory).as_http())
        reply.headers.extend(waited_headers(exchange.waited))
        return reply

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
            charge(sum([each.array.nbytes for each in request.inputs]))
        return request

    async def _read_generate(self, exchange: Exchange, head: KserveHead, body: bytes) -> InferenceRequest:
        inputs = inference_of(head.service).inputs(head.service)

        def read() -> InferenceRequest:
            charge_values(len(body), partial(values_bytes, body, JSON))
            return read_generate(body, inputs, head.service.facts.name, head.version)

        request = await exchange.read(len(body), read)
        charge(sum([each.array.nbytes for each in request.inputs]))
        return request


V1 = "/v1/models"  # of the first version of KServe's protocol
_PREDICT = re.compile(rf"{V1}/({NAME_IN_PATH}):predict")


class KserveV1Protocol(_OfContext):
    """The HttpProtocol of POST /v1/models/{model}:predict: each of the `instances` is an item, and the `predictions` are the outputs."""

    prefix = b"/"  # other protocols have paths below /v1, too

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """See HttpProtocol. Request and response are JSON, whatever the headers say."""
        if (named := _PREDICT.fullmatch(path)) is None:
            return None
        kept = [each for each in headers if each[0] not in (b"accept", b"content-type")]
        return read_head_for(self.context.registry.get(named[1]), self.context.http, method, path, kept, batch=True)

    def named(self, path: str) -> "ModelHandle | None":
        """Return the service that `path` names, or None."""
        named = _PREDICT.fullmatch(path)
        return None if named is None else self.context.registry.services.get(named[1])

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """Return the predictions. Raises the first error of an instance."""
        instances = await exchange.read(len(body), partial(_instances, body))
        charge(len(instances))
        response = await exchange.infer_items(head, instances)
        outputs = []
        for index, output in enumerate(await written(response.size_bytes, response.write)):
            if isinstance(output, WeirError):
                raise exchange.refused(output, whole=False).at("instances", index)
            outputs.append(output)
        headers = [JSON_HEADER, *response.headers]
        return HttpResponse(200, headers, b'{"predictions":[%b]}' % b",".join(outputs))

    async def stream(self, exchange: Exchange, head: RequestHead, body: bytes) -> EventSource:
        """Raise Unsupported: the head of a request to a streaming model has been refused."""
        raise Unsupported(f"model {head.service.facts.name!r} is streaming")


def _instances(body: bytes) -> bytes:
    """Return the list of instances, which is JSON. Raises InvalidRequest."""
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise unreadable(error, JSON, body) from error
    instances = bytes(found.get("instances") or found.get("inputs") or b"")  # KServe's own server takes both names
    if not instances.startswith(b"["):
        raise InvalidRequest("instances: must be a list of items")
    return instances


async def one_response(exchange: Exchange, request: InferenceRequest) -> InferenceResponse:
    """Return the only response to `request`, also of a streaming model. Raises Unsupported if the model gives none or several."""
    responses: list[InferenceResponse] = []
    async with aclosing(exchange.stream(request)) as parts:
        async for part in parts:
            responses.append(part.response)
            if len(responses) > 1:
                break
    if len(responses) != 1:
        number, label = "several responses" if responses else "no response", exchange.service.facts.label
        raise Unsupported(f"model {label!r} has given {number}, and this call has one: POST generate_stream")
    return responses[0]


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


class Replies(Generic[T]):
    """A bounded memory of how the responses to similar requests are written. What is written depends only on names, shapes and dtypes of a model's outputs."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[T, list[str]]] = {}

    def find(self, output: Arrays) -> tuple[T, list[numpy.ndarray[Any, Any]]] | None:
        """Return what is remembered for an `output` like this, and the arrays whose bytes belong into it, in order; None if nothing is."""
        known = self._known.get(_described(output))
        return None if known is None else (known[0], [output[name] for name in known[1]])

    def remember(self, output: Arrays, response: InferenceResponse, write: Callable[[], T]) -> None:
        """Remember what `write` returns for outputs like `output`, of which `response` was made, if the arrays are written as they are."""
        numbers = all(DTYPES[value.datatype] == value.array.dtype != object for value in response.outputs)
        if numbers and len(self._known) < _MAX_REPLIES:
            self._known[_described(output)] = write(), [value.name for value in response.outputs]


def _described(output: Arrays) -> tuple[Any, ...]:
    return tuple([(name, array.shape, array.dtype) for name, array in output.items()])


class Layout:
    """The parsed form of a `header` (JSON) that precedes binary tensors. Clients that send tensors of one shape repeat the same header.

    `request` is the request without its inputs, and `form` that of its queue entry.
    """

    __slots__ = ("_places", "_replies", "form", "header", "request", "wants_regions")

    def __init__(self, header: bytes, places: list[_ArenaPlace], request: InferenceRequest, form: Form) -> None:
        self.header = header
        self.request = request
        self.wants_regions = wants_regions(request)
        self.form = form
        self._places = places
        self._replies: Replies[tuple[Headers, bytes | memoryview]] = Replies()  # headers, and the JSON before arrays

    def arrays(self, body: memoryview) -> Arrays:
        """Return the arrays in a `body` that has this header and the same length, as read-only views."""
        rest = body.toreadonly()[len(self.header) :]
        return {name: numpy.ndarray(shape, dtype, rest, offset) for name, shape, dtype, offset in self._places}

    def reply(self, output: Arrays) -> KserveReply | None:
        """Return the reply with the arrays of `output`, if the headers for such arrays are remembered; else None."""
        known = self._replies.find(output)
        if known is None:
            return None
        (headers, json), arrays = known
        return KserveReply(headers, [json, *map(contiguous_bytes, arrays)])

    def remember(self, output: Arrays, response: InferenceResponse, reply: KserveReply) -> None:
        """Remember the headers and the JSON of `reply` if they depend only on names, shapes and dtypes. `response` was made of `output`, and `reply` of it."""
        if len(reply.parts) == 1 + len(response.outputs):
            self._replies.remember(output, response, lambda: (reply.headers, reply.parts[0]))


def layout_of(header: bytes, body_length: int, request: InferenceRequest, entry: QueueEntry) -> Layout | None:
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
    return Layout(header, [places[name] for name in entry.payload], bare, entry.form)
