"""ModelInfer, with one request and one response, and ModelStreamInfer, with many requests in flight in one stream, each with one or more responses.

The responses of a stream are sent as they come; only those of one request are in order, and clients assign them by id. An error of one request is a message
in the stream, and the stream continues.

Small unary requests that differ only in the bytes of their tensors share a MessageLayout, so that only the first of them is parsed.
"""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy

from weir.errors import WeirError, draining
from weir.frontends.grpc.call import (
    FRONTEND,
    Handler,
    IncomingCall,
    Left,
    Trailers,
    headers_of,
    in_task,
    name_of,
    note,
    refuse,
    text_of,
)
from weir.messages import TRACEPARENT
from weir.protocols.account import charge_values
from weir.protocols.call import InferenceCall, Writing
from weir.protocols.data_plane import find
from weir.protocols.entries import CLASS, QueueEntry, class_offset, response_of
from weir.protocols.exchange import Exchange, QueuedRequest, StreamPart, inference_of
from weir.protocols.kserve import KserveContext, Memory, Replies, wants_regions
from weir.protocols.offloading import LONG_BODY, HeadMemo
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_grpc import (
    Parsed,
    bytes_to_read,
    bytes_to_write,
    error_in_stream,
    in_stream,
    is_typed,
    message_bytes,
    parse_request,
    raw_at_end,
    read_request,
    response_pieces,
    typed_bytes,
    write_response,
)
from weir.wire.kserve_json import REGION
from weir.wire.tensors import DTYPES, Arrays

if TYPE_CHECKING:
    from weir.serving.handle import ModelFacts, ModelHandle


Read = tuple[Parsed, InferenceRequest | WeirError]


def read(context: KserveContext, call: IncomingCall, body: bytes) -> Read:
    """Return the message in `body`, and the request in it or the error that refuses it. Raises InvalidRequest if `body` is not such a message."""
    charge_values(len(body), partial(typed_bytes, body))
    parsed = parse_request(body)

    def find_in_memory(name: str, parameters: Parameters) -> memoryview | None:
        return context.memory(call.peer, headers_of(call)).find(name, parameters) if REGION in parameters else None

    try:
        request = read_request(parsed, find=find_in_memory)
        if (stated := class_in(call)) is not None:
            class_offset(stated, "x-weir-class")
            request.parameters = {CLASS: stated, **request.parameters}
    except WeirError as error:
        return parsed, error
    return parsed, request


def class_in(call: IncomingCall) -> str | None:
    """Return the class of work that the metadata of `call` state; None if they state none."""
    for name, value in call.metadata:
        if name == "x-weir-class":
            return (value if isinstance(value, str) else value.decode("latin-1")).strip().lower()
    return None


def writing_of(response: InferenceResponse, *, typed: bool = False) -> Writing:
    """Return the writing of the message of `response`, with its tensors as typed or raw contents."""
    write, length = partial(write_response, response, typed=typed), partial(message_bytes, response)
    return Writing(bytes_to_write(response, typed=typed), write, length)


class GrpcExchange(Exchange):
    """The exchange of one request over gRPC. Unary calls and streams share it."""

    __slots__ = ("_memory", "_parsed", "call", "request")

    def __init__(
        self, context: KserveContext, call: IncomingCall, parsed: Parsed, read: InferenceRequest | WeirError
    ) -> None:
        """Make the exchange of the request that `read` has returned. Raises RequestErrors."""
        message = parsed.message
        service = find(context.registry, message.model_name, message.model_version)
        headers = headers_of(call)
        super().__init__(service, frontend=FRONTEND, timeout=call.time_remaining(), headers=headers)
        self.call = call
        self.caller = call.caller
        self._parsed = parsed
        if isinstance(read, WeirError):
            try:
                raise self.refused(read) from None
            finally:
                del read  # a local of its own traceback
        self.request = read
        self._memory: Memory | None = None
        if wants_regions(read):
            self._memory = context.memory(call.peer, headers)
            try:
                self._memory.hold(read)
            except WeirError as error:
                raise self.refused(error) from None

    def writing(self, response: InferenceResponse) -> Writing:
        """Return the writing of a response. Outputs that the request wants in shared memory are written there at once."""
        if self._memory is not None and response.outputs:
            self._memory.take_outputs(response)
        return writing_of(response, typed=is_typed(self._parsed))


LONGEST = 8 << 10  # bytes of a message: in larger ones, copying takes longer than parsing
_MOST_LENGTHS = 1024  # lengths of messages that are remembered
_MOST_HEADS = 4  # lengths of heads that are remembered for messages of one length


class MessageLayout:
    """The part that messages to one service share that differ only in the bytes of their tensors. `form` is that of their queue entries."""

    __slots__ = ("_facts", "_replies", "_request", "_size_bytes", "_tags", "_tensors", "form", "model", "version")

    def __init__(
        self,
        body: bytes,
        request: InferenceRequest,
        service: "ModelHandle",
        entry: QueueEntry,
        raw: list[tuple[int, int, int]],
    ) -> None:
        """Make the layout of the first `request`. `raw` has three offsets in `body` for each raw tensor: of its field, of its bytes, and of their end."""
        self.model, self.version, self.form = request.model, request.version, entry.form
        self._facts = weakref.ref(service.facts)
        self._request = InferenceRequest(request.model, [], version=request.version, outputs=request.outputs)
        self._size_bytes = len(body)
        self._tensors = [
            (tensor.name, DTYPES[tensor.datatype], tensor.array.shape, begin, end)
            for tensor, (_, begin, end) in zip(request.inputs, raw, strict=True)
        ]
        self._tags = [(body[start:begin], start) for start, begin, _ in raw]
        self._replies: Replies[list[bytes]] = Replies()  # the pieces before the bytes of each output

    def fits(self, body: bytes) -> bool:
        """Return whether a message that begins with the head of this layout also has tensors of the same sizes at the same offsets."""
        if len(body) != self._size_bytes:
            return False
        for tag, start in self._tags:  # noqa: SIM110 - a generator would be two more calls for each request
            if not body.startswith(tag, start):
                return False
        return True

    def serves(self, facts: "ModelFacts") -> bool:
        """Return whether this layout was made for the model of `facts`, which has not been reloaded since."""
        return self._facts() is facts

    def entry(self, body: bytes, timeout: float, caller: str) -> QueueEntry:
        """Return the queue entry of a message that fits. Its tensors are read-only arrays."""
        arrays = {
            name: numpy.ndarray(shape, dtype, body[begin:end]) for name, dtype, shape, begin, end in self._tensors
        }
        form = self.form
        if timeout != form.timeout or caller != form.caller:
            self.form = form = form.replaced(timeout=timeout, caller=caller)  # most clients always state the same
        return QueueEntry(form, arrays)

    def respond(self, service: "ModelHandle", output: Arrays, waited: float = 0.0) -> bytes | Writing:
        """Return the response message for `output`, or its writing; `waited` is as for `response_of`, and so is what it raises."""
        known = None if waited else self._replies.find(output)
        if known is not None:
            return b"".join([part for piece, array in zip(*known, strict=True) for part in (piece, array.tobytes())])
        response = response_of(service, self._request, [self.form.kind], [output], waited)
        sizes = [tensor.array.nbytes for tensor in response.outputs]
        if sizes and sum(sizes) <= LONGEST and not waited:
            self._replies.remember(output, response, partial(response_pieces, response))
        return writing_of(response)


class MessageLayouts:
    """A bounded cache of layouts. A layout is stored when its second request comes."""

    def __init__(self) -> None:
        self._known: HeadMemo[MessageLayout] = HeadMemo()
        self._lengths: dict[int, tuple[int, ...]] = {}  # of heads, by the lengths of messages

    def find(self, body: bytes) -> MessageLayout | None:
        """Return the layout of the request in `body`, or None."""
        for length in self._lengths.get(len(body), ()):
            layout = self._known.find(body[:length])
            if layout is not None and layout.fits(body):
                return layout
        return None

    def learn(self, body: bytes, request: InferenceRequest, service: "ModelHandle", entry: QueueEntry) -> None:
        """Remember the layout of a request with a single queue entry, if other requests can have the same layout."""
        if len(body) > LONGEST or request.id or request.parameters or request.without_batch or not _is_plain(request):
            return
        raw = raw_at_end(body, len(request.inputs))
        if raw is None:
            return
        length, heads = raw[0][0], self._lengths.get(len(body), ())
        self._known.offer(body[:length], MessageLayout(body, request, service, entry, raw))
        if length in heads:
            return
        if len(self._lengths) >= _MOST_LENGTHS:
            self._lengths.clear()
        self._lengths[len(body)] = (length, *heads)[:_MOST_HEADS]


def _is_plain(request: InferenceRequest) -> bool:
    """Return whether the tensors of a request are numbers without parameters, and its outputs have no parameters."""
    return (
        bool(request.inputs)
        and all(tensor.datatype != "BYTES" and tensor.array.size and not tensor.parameters for tensor in request.inputs)
        and not any(output.parameters for output in request.outputs or ())
    )


class UnaryCall(InferenceCall):
    """One call of ModelInfer, with the message `body`."""

    def __init__(self, incoming: IncomingCall, body: bytes, *, development: bool) -> None:
        super().__init__(incoming.account, len(body))
        self.incoming = incoming
        self.body = body
        self.development = development
        incoming.on_left = self.leave

    def send(self, message: bytes) -> int:
        """End the call with the response."""
        self.incoming.respond(message, self._trailers)
        return len(message)

    def fail(self, error: Exception) -> None:
        """End the call with the status of `error`."""
        refuse(error, self.incoming, self._trailers, development=self.development)

    @property
    def _trailers(self) -> Trailers:
        trace = None if self.exchange is None else self.exchange.trace
        return () if trace is None else ((TRACEPARENT, trace.traceparent),)


class UnaryInference:
    """The handler of ModelInfer. `made` makes a UnaryCall of a call and its message. While `refusing` is set, all requests are refused."""

    def __init__(self, context: KserveContext, made: Callable[[IncomingCall, bytes], UnaryCall]) -> None:
        self._context = context
        self._made = made
        self._layouts = MessageLayouts()
        self.refusing = False

    def handler(self) -> Handler:
        """Return the handler for the server."""
        return Handler(self._begin)

    def _begin(self, incoming: IncomingCall, body: bytes) -> None:
        call = self._made(incoming, body)
        if self.refusing:
            call.end(draining())
        else:
            call.attempt(partial(self._enter, call))

    def _enter(self, call: UnaryCall) -> None:
        body = call.body
        layout = self._layouts.find(body) if class_in(call.incoming) is None else None
        if layout is None or not self._enter_known(layout, call):
            size = bytes_to_read(body) if len(body) > LONG_BODY else 0
            call.read(size, partial(read, self._context, call.incoming, body), partial(self._enter_read, call))

    def _enter_known(self, layout: MessageLayout, call: UnaryCall) -> bool:
        """Submit a request of a known layout. Return False, with nothing done, if the model was reloaded since."""
        service = find(self._context.registry, layout.model, layout.version)
        if not layout.serves(service.facts):
            return False
        left, caller = call.incoming.time_remaining(), call.incoming.caller
        exchange = Exchange(service, frontend=FRONTEND)
        exchange.caller = caller
        entry = layout.entry(call.body, service.facts.settings.timeout if left is None else left, caller)
        call.submit(exchange, entry, lambda ended: layout.respond(service, ended.output, ended.waited))
        return True

    def _enter_read(self, call: UnaryCall, found: Read) -> None:
        exchange = GrpcExchange(self._context, call.incoming, *found)
        service, request = exchange.service, exchange.request
        if service.tracing is not None or not inference_of(service).queues_tensors(service):
            return call.infer(exchange, request, exchange.writing)
        (entry,) = exchange.entries(request)

        def write(ended: QueuedRequest) -> Writing:
            return exchange.writing(response_of(service, request, [entry.form.kind], [ended.output], ended.waited))

        call.submit(exchange, entry, write)
        if service.facts.takes_tensors:
            self._layouts.learn(call.body, request, service, entry)


# Parameters of Triton's decoupled models (docs/user_guide/decoupled_models.md of its server). A request with the first one gets a last response
# without outputs, unless a response with outputs was marked as the last one.
WANTS_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class StreamInference:
    """The handler of ModelStreamInfer. At most `most` requests of one stream are in flight."""

    def __init__(self, context: KserveContext, most: int, *, development: bool) -> None:
        self._context = context
        self._most = most
        self._development = development
        self._refusing = asyncio.Event()

    def refuse(self) -> None:
        """Read no more requests. A stream ends when its requests in flight have been answered."""
        self._refusing.set()

    def handler(self) -> Handler:
        """Return the handler for the server."""
        return Handler(in_task(self._serve, development=self._development), takes_stream=True)

    async def _serve(self, call: IncomingCall, _: bytes) -> None:
        one = OneStream(self._context, call, self._most, development=self._development)
        reading = asyncio.create_task(one.read())
        refusing = asyncio.create_task(self._refusing.wait())
        try:
            await asyncio.wait((reading, refusing), return_when=asyncio.FIRST_COMPLETED)
            ended = reading.done()
            if not ended:
                reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await one.finish()
        finally:
            for task in (reading, refusing):
                task.cancel()
            one.leave()
        if not ended:  # the client may have sent more requests
            raise draining()


class OneStream:
    """One stream: reads requests, and writes the responses to each. Requests and responses are charged to the account of `context`."""

    def __init__(self, context: KserveContext, call: IncomingCall, most: int, *, development: bool) -> None:
        self.context = context
        self.call = call
        self._most = most
        self._development = development
        self._requests: set[StreamRequest] = set()
        self._failing: set[asyncio.Task[None]] = set()  # which write errors
        self._writing = asyncio.Lock()  # gRPC accepts one message at a time
        self._held = 0  # bytes of the requests under way
        self._changed = asyncio.Event()  # set when a request has ended, or an error was written

    async def read(self) -> None:
        """Read requests and begin them until the client sends no more."""
        while True:
            while len(self._requests) + len(self._failing) >= self._most or self._holds_much:
                await self._change()
            try:
                body = await self.call.read()
            except WeirError as error:
                self.fail(error, "", "")
                continue
            if body is None:
                return
            self._held += len(body)
            request = StreamRequest(self, body)
            del body  # only the request refers to it now, and frees it early
            self._requests.add(request)
            request.attempt(request.begin)

    async def finish(self) -> None:
        """Return when all requests that were read have been answered."""
        while self._requests or self._failing:
            await self._change()

    def leave(self) -> None:
        """Stop all requests, and write nothing more."""
        for request in list(self._requests):
            request.leave()
        for task in self._failing:
            task.cancel()

    def forget(self, request: "StreamRequest") -> None:
        """Give back what `request` held, which has ended. Idempotent."""
        if request in self._requests:
            self._requests.discard(request)
            self.call.release(request.received_bytes)
            self._held -= request.received_bytes
            self._changed.set()

    def fail(self, error: Exception, model: str, request_id: str) -> None:
        """Write the message that reports the error of a request."""
        note(error)
        text = text_of(error, development=self._development)
        task = asyncio.create_task(self._write_failure(error_in_stream(text, model, request_id, name_of(error))))
        self._failing.add(task)
        task.add_done_callback(self._has_failed)

    async def write(self, message: bytes) -> int:
        """Write a response when those before it are written. Return its size. Raises Left, and what Account.take raises."""
        size = len(message)
        self.call.charge(size)
        self._held += size
        try:
            return await self._write(message)
        finally:
            self._held -= size
            self.call.release(size)

    @property
    def _holds_much(self) -> bool:
        return bool(self._requests) and self._held > self.context.account.max_connection_bytes

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _has_failed(self, task: "asyncio.Task[None]") -> None:
        self._failing.discard(task)
        self._changed.set()

    async def _write_failure(self, message: bytes) -> None:
        with suppress(Left):
            await self._write(message)

    async def _write(self, message: bytes) -> int:
        async with self._writing:
            await self.call.write(message)
        return len(message)


class StreamRequest(InferenceCall):
    """One request of the stream `one`, with the message `body`."""

    def __init__(self, one: OneStream, body: bytes) -> None:
        super().__init__(one.call.account, len(body))
        self._one = one
        self._body = body
        self.model = self.id = ""

    def begin(self) -> None:
        """Read the message, and have the model compute it."""
        body, self._body = self._body, b""
        self.read(bytes_to_read(body), partial(read, self._one.context, self._one.call, body), self._open)

    def _open(self, found: Read) -> None:
        parsed, _ = found
        self.model, self.id = parsed.message.model_name, parsed.message.id
        exchange = GrpcExchange(self._one.context, self._one.call, *found)

        def write(part: StreamPart) -> Writing:
            part.response.parameters = {**part.response.parameters, FINAL: part.last}
            return exchange.writing(part.response)

        self.stream(exchange, exchange.request, write, ends=exchange.request.parameters.get(WANTS_FINAL) is True)

    async def send_part(self, message: bytes) -> int:
        """Write one response."""
        return await self._one.write(in_stream(message))

    def fail(self, error: Exception) -> None:
        """Write the error, unless the client has left."""
        if not isinstance(error, Left):
            self._one.fail(error, self.model, self.id)

    def release(self) -> None:
        """Have the stream forget the request."""
        super().release()
        self._one.forget(self)
