"""ModelInfer and ModelStreamInfer: one request and one answer, or many requests under way in one stream, each with one answer or several.

Answers of a stream go back as they come, in the order of each request alone; clients tell requests apart by their ids. The error of one is a message in the stream,
which goes on. Small unary requests that differ in nothing but the bytes of their tensors share a form: what was found out about the first holds for all.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from weir.batching.request_state import RequestBase
from weir.errors import Draining, WeirError
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
from weir.frontends.http.fast.plan import HeadMemo
from weir.messages import Dispatch
from weir.model import is_tensor_model
from weir.protocols.account import CLAIM
from weir.protocols.exchange import Exchange
from weir.protocols.kserve.context import KserveContext
from weir.protocols.kserve.metadata import find
from weir.protocols.offloading import LONG_ANSWER, LONG_BODY, off_loop, work_later, written
from weir.protocols.shared_memory import Memory, wants_regions
from weir.serving.inference import QueueEntry, entries_for_one_answer, response_of
from weir.telemetry.tracecontext import HEADER
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_grpc import (
    Parsed,
    bytes_to_read,
    bytes_to_write,
    error_in_stream,
    in_stream,
    is_typed,
    parse_request,
    raw_at_end,
    read_request,
    response_pieces,
    write_response,
)
from weir.wire.kserve_json import REGION
from weir.wire.tensors import DTYPES, Arrays

if TYPE_CHECKING:
    from weir.serving.service import Service


Read = tuple[Parsed, InferenceRequest | WeirError]


def read(context: KserveContext, call: IncomingCall, body: bytes) -> Read:
    """Return the message in `body`, and the request that it is or what is wrong with it. Raises InvalidRequest if it is no message."""
    parsed = parse_request(body)

    def find_in_memory(name: str, parameters: Parameters) -> memoryview | None:
        return context.memory(call.peer, headers_of(call)).find(name, parameters) if REGION in parameters else None

    try:
        return parsed, read_request(parsed, find=find_in_memory)
    except WeirError as error:
        return parsed, error


async def read_long(context: KserveContext, call: IncomingCall, body: bytes) -> Read:
    """Return the same; what takes long is read in a thread."""
    return await off_loop(bytes_to_read(body), partial(read, context, call, body))


class Writing(NamedTuple):
    """An answer that is to be written: about how long that takes, as bytes of text, and what does it. It changes nothing that others see."""

    size_bytes: int
    write: Callable[[], bytes]

    @classmethod
    def of(cls, response: InferenceResponse, *, typed: bool = False) -> "Writing":
        """Return what writes `response`, its tensors `typed` or raw."""
        return cls(bytes_to_write(response, typed=typed), partial(write_response, response, typed=typed))


class GrpcExchange(Exchange):
    """One request and its answer as messages of gRPC: what the unary call and streams share."""

    __slots__ = ("_memory", "_parsed", "call", "request")

    def __init__(
        self, context: KserveContext, call: IncomingCall, parsed: Parsed, read: InferenceRequest | WeirError
    ) -> None:
        """Take what was `read`. Raises RequestErrors; the observers of its service are told of a request that is malformed."""
        message = parsed.message
        service = find(context.registry, message.model_name, message.model_version)
        super().__init__(service, door=FRONTEND, timeout=call.time_remaining())
        if service.tracing is not None:
            caller_span = dict(headers_of(call)).get(HEADER.encode())
            self.traceparent = None if caller_span is None else caller_span.decode("latin-1")
        self.call = call
        self._parsed = parsed
        if isinstance(read, WeirError):
            raise self.refused(read) from None
        self.request = read
        self._memory: Memory | None = None
        if wants_regions(read):
            self._memory = context.memory(call.peer, headers_of(call))
            try:
                self._memory.hold(read)
            except WeirError as error:
                raise self.refused(error) from None

    def writing(self, response: InferenceResponse) -> "Writing":
        """Return what writes an answer; what its request wants in shared memory is put there at once."""
        if self._memory is not None and response.outputs:
            self._memory.take_outputs(response)
        return Writing.of(response, typed=is_typed(self._parsed))

    async def write(self, response: InferenceResponse) -> bytes:
        """Return the body of an answer, as `writing` does; a long one is written in a thread."""
        return await written(*self.writing(response))


LONGEST = 8 << 10  # bytes of a message; of larger ones the bytes themselves take longer than all the rest
_MOST_LENGTHS = 1024  # of messages that are told apart
_MOST_HEADS = 4  # lengths of heads, for messages of one length
_BYTES = DTYPES["BYTES"]
_MOST_ANSWERS = 64  # shapes of answers to requests of one form


class Form:
    """What requests to one service have in common. `work` is that of the first one: others have other arrays."""

    __slots__ = (
        "_answers", "_dtypes", "_names", "_request", "_generation", "_size_bytes", "_tags", "_tensors", "model", "version", "work",
    )  # fmt: skip

    def __init__(
        self, body: bytes, request: InferenceRequest, service: "Service", work: QueueEntry, raw: list[tuple[int, int, int]]
    ) -> None:  # fmt: skip
        """Take the first request, and where in its `body` each of its raw tensors has its field, its bytes and its end."""
        self.model, self.version, self.work = request.model, request.version, work
        self._generation = weakref.ref(service.generation)
        self._request = InferenceRequest(request.model, [], version=request.version, outputs=request.outputs)
        self._size_bytes = len(body)
        self._tensors = [
            (tensor.name, DTYPES[tensor.datatype], tensor.array.shape, begin, end)
            for tensor, (_, begin, end) in zip(request.inputs, raw, strict=True)
        ]
        self._tags = [(body[start:begin], start) for start, begin, _ in raw]
        asked = None if request.outputs is None else {output.name for output in request.outputs}
        outputs = [tensor for tensor in service.model.outputs if asked is None or tensor.name in asked]
        self._names = [tensor.name for tensor in outputs]
        self._dtypes = [DTYPES[tensor.datatype] for tensor in outputs]
        self._answers: dict[tuple[tuple[int, ...], ...], list[bytes]] = {}

    def fits(self, body: bytes) -> bool:
        """Tell whether the message `body`, which has the head of this form, has its tensors too."""
        if len(body) != self._size_bytes:
            return False
        return all(body.startswith(tag, start) for tag, start in self._tags)

    def serves(self, service: "Service") -> bool:
        """Tell whether this is what requests to `service` are, and it has not been reloaded since."""
        return self._generation() is service.generation

    def arrays(self, body: bytes) -> Arrays:
        """Return the tensors of a message that fits. They cannot be written to."""
        return {name: numpy.ndarray(shape, dtype, body[begin:end]) for name, dtype, shape, begin, end in self._tensors}

    def respond(self, service: "Service", output: Any) -> bytes | Writing:
        """Return the answer to a request that ended with `output`: its body, or what is to write it. Raises what `response_of` raises."""
        if type(output) is dict and all(map(output.__contains__, self._names)):
            arrays = [output[name] for name in self._names]
            pieces = self._answers.get(tuple([array.shape for array in arrays]))
            if pieces is not None and [array.dtype for array in arrays] == self._dtypes:
                parts = [part for piece, array in zip(pieces, arrays, strict=True) for part in (piece, array.tobytes())]
                return b"".join(parts)
        response = response_of(service, self._request, [self.work.kind], [output])
        self._learn(response)
        return Writing.of(response)

    def _learn(self, response: InferenceResponse) -> None:
        """Remember how answers of these shapes are written, if they are small and all numbers."""
        arrays = [tensor.array for tensor in response.outputs]
        is_small = bool(arrays) and sum([array.nbytes for array in arrays]) <= LONGEST
        if is_small and len(self._answers) < _MOST_ANSWERS and _BYTES not in self._dtypes:
            self._answers[tuple([array.shape for array in arrays])] = response_pieces(response)


class Forms:
    """A bounded memory of forms, which are known from the second request on."""

    def __init__(self) -> None:
        self._known: HeadMemo[Form] = HeadMemo()
        self._lengths: dict[int, tuple[int, ...]] = {}  # of heads, by the lengths of messages

    def find(self, body: bytes) -> Form | None:
        """Return the form of the request in `body`, if it is known."""
        for length in self._lengths.get(len(body), ()):
            form = self._known.find(body[:length])
            if form is not None and form.fits(body):
                return form
        return None

    def learn(self, body: bytes, request: InferenceRequest, service: "Service", work: QueueEntry) -> None:
        """Remember the form of a request whose `work` is all that it is, if others may have it."""
        if len(body) > LONGEST or request.id or request.parameters or request.without_batch or not _is_plain(request):
            return
        raw = raw_at_end(body, len(request.inputs))
        if raw is not None:
            head = body[: raw[0][0]]
            self._known.offer(head, Form(body, request, service, work._replace(payload=None), raw))
            self._remember(len(body), len(head))

    def _remember(self, length: int, head: int) -> None:
        heads = self._lengths.get(length, ())
        if head in heads:
            return
        if len(self._lengths) >= _MOST_LENGTHS:
            self._lengths.clear()
        self._lengths[length] = (head, *heads)[:_MOST_HEADS]


def _is_plain(request: InferenceRequest) -> bool:
    """Tell whether all of a request besides its shapes are bytes of numbers."""
    return (
        bool(request.inputs)
        and all(tensor.datatype != "BYTES" and tensor.array.size and not tensor.parameters for tensor in request.inputs)
        and not any(output.parameters for output in request.outputs or ())
    )


class Inferred(RequestBase):
    """One call in the queue: it needs no task, for whatever happens to it ends it. `respond` makes of its output the body of its
    answer, or what is to write that."""

    __slots__ = ("_call", "_development", "_exchange", "_received_bytes", "_respond")

    def __init__(
        self, call: IncomingCall, exchange: Exchange, work: QueueEntry, timeout: float, priority: int, received_bytes: int,
        respond: Callable[[Any], bytes | Writing], *, development: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            work.payload, exchange.service.now(), timeout, kind=work.kind, content_type=work.content_type,
            accept=work.accept, rows=work.rows, cost=work.cost, key=work.key, priority=priority, large=work.large,
            door=FRONTEND,
        )  # fmt: skip
        self._call = call
        self._exchange = exchange
        self._received_bytes = received_bytes
        self._respond = respond
        self._development = development

    def submit(self) -> None:
        """Enter the queue, and leave it when the caller leaves. Raises what Service.submit raises."""
        self._call.on_left = self._withdraw
        self._exchange.service.submit(self, self.arrival)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Answer; a long answer is written in a thread."""
        try:
            answer = self._respond(output)
            if isinstance(answer, Writing):
                if answer.size_bytes > LONG_ANSWER:
                    self._call.charge(answer.size_bytes)
                    self._call.on_left = work_later(*answer, self._written, writes=True)
                    return
                answer = answer.write()
        except Exception as error:
            refuse(error, self._call, development=self._development)
        else:
            self._written(answer)

    def _written(self, answer: bytes | Exception) -> None:
        if isinstance(answer, Exception):
            refuse(answer, self._call, development=self._development)
        else:
            self._call.end(body=answer)
            self._exchange.transferred(self._received_bytes, len(answer))

    def fail(self, error: WeirError) -> None:
        """Refuse."""
        refuse(error, self._call, development=self._development)

    def _withdraw(self) -> None:
        self._exchange.service.cancel(self)


class UnaryInference:
    """The handler of ModelInfer. Set `refusing` when no more requests are taken."""

    def __init__(self, context: KserveContext, *, development: bool) -> None:
        self._context = context
        self._development = development
        self._forms = Forms()
        self.refusing = False

    def handler(self) -> Handler:
        """Return what gRPC calls."""
        return Handler(self._begin)

    def _begin(self, call: IncomingCall, body: bytes) -> None:
        if call.over:
            return
        try:
            if self.refusing:
                raise refusal()
            form = self._forms.find(body)
            if form is None or not self._begin_known(form, call, body):
                self._begin_any(call, body)
        except Exception as error:
            refuse(error, call, development=self._development)

    def _begin_known(self, form: Form, call: IncomingCall, body: bytes) -> bool:
        """Submit a request of a known form; tell whether it is of the model that is served now."""
        service = find(self._context.registry, form.model, form.version)
        if not form.serves(service):
            return False
        work = form.work._replace(payload=form.arrays(body))
        limit, timeout = call.time_remaining(), service.settings.timeout
        timeout = timeout if limit is None or limit > timeout else limit
        respond = partial(form.respond, service)
        exchange = Exchange(service, door=FRONTEND)
        Inferred(call, exchange, work, timeout, 0, len(body), respond, development=self._development).submit()
        return True

    def _begin_any(self, call: IncomingCall, body: bytes) -> None:
        if len(body) > LONG_BODY and bytes_to_read(body) > LONG_BODY:
            in_task(self._read_long, development=self._development)(call, body)
            return
        exchange = GrpcExchange(self._context, call, *read(self._context, call, body))
        service, request = exchange.service, exchange.request
        if service.tracing is not None or not service.inference.queues_tensors(service):
            in_task(partial(self._infer, exchange), development=self._development)(call, body)
            return
        (work,), timeout, priority = entries_for_one_answer(service, request, FRONTEND, exchange.timeout)

        def respond(output: Any) -> Writing:
            return exchange.writing(response_of(service, request, [work.kind], [output]))

        Inferred(call, exchange, work, timeout, priority, len(body), respond, development=self._development).submit()
        if is_tensor_model(service.model):
            self._forms.learn(body, request, service, work)

    async def _read_long(self, call: IncomingCall, body: bytes) -> None:
        await self._infer(GrpcExchange(self._context, call, *await read_long(self._context, call, body)), call, body)

    async def _infer(self, exchange: GrpcExchange, call: IncomingCall, body: bytes) -> None:
        """Answer where one request may become several, its log lines carry a trace, or it was read in a thread."""
        trailers: Trailers = ()
        try:
            trace = exchange.begin_trace()
            if trace is not None:
                trailers = ((HEADER, trace.traceparent),)
            response = await exchange.infer(exchange.request)
            answer = await exchange.write(response)
        except Exception as error:
            refuse(error, call, trailers, development=self._development)
        else:
            call.end(trailers=trailers, body=answer)
            exchange.transferred(len(body), len(answer))


def refusal() -> Draining:
    """Return the error for a request that comes when no more are taken."""
    return Draining("the server is being stopped and accepts no more requests", retry_after=1.0)


# A request with this parameter gets a last answer without outputs, if the last one with outputs was not marked as the last.
WANTS_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"


class StreamInference:
    """The handler of ModelStreamInfer. At most `most` requests of one stream are under way."""

    def __init__(self, context: KserveContext, most: int, *, development: bool) -> None:
        self._context = context
        self._most = most
        self._development = development
        self._refusing = asyncio.Event()

    def refuse(self) -> None:
        """Read no more requests; streams end once those under way have their answers."""
        self._refusing.set()

    def handler(self) -> Handler:
        """Return what gRPC calls."""
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
            for task in (reading, refusing, *one.tasks):
                task.cancel()
        if not ended:  # the client would have asked for more
            raise refusal()


class OneStream:
    """One call: reads requests, runs each in a task of its own, and writes what comes. They are charged to the account of `context`."""

    def __init__(self, context: KserveContext, call: IncomingCall, most: int, *, development: bool) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._context = context
        self._call = call
        self._development = development
        self._room = asyncio.Semaphore(most)
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._claim = context.account.claim()
        self._fewer = asyncio.Event()  # a request has ended

    async def read(self) -> None:
        """Take requests until the client sends no more."""
        while True:
            await self._room.acquire()
            while self.tasks and self._claim.held_bytes > self._context.account.max_connection_bytes:
                self._fewer.clear()
                await self._fewer.wait()
            body = await self._call.read()
            if body is None:
                return
            task = asyncio.create_task(self._answer(body))
            del body  # it is the task's, which drops it
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Return when all that was read has its answers."""
        if self.tasks:
            await asyncio.wait(self.tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._room.release()
        self._fewer.set()

    async def _answer(self, body: bytes) -> None:
        """Answer one request. What it holds is gone before its error, if it has one, waits for the client to read."""
        size = len(body)
        try:
            self._claim.take(size)
        except WeirError as error:
            failure: bytes | None = self._failure(error, "", "")
        else:
            try:
                with self._context.account.claim() as claim:
                    CLAIM.set(claim)
                    failure = await self._answered(body)
            finally:
                self._claim.give(size)
        del body
        if failure is not None:
            with suppress(Left):
                await self._write(failure)

    async def _answered(self, body: bytes) -> bytes | None:
        """Write the answers to one request; return the error message if that failed."""
        model = request_id = ""
        try:
            parsed, read = await read_long(self._context, self._call, body)
            model, request_id = parsed.message.model_name, parsed.message.id
            exchange = GrpcExchange(self._context, self._call, parsed, read)
            sent = 0
            async with aclosing(answers_to(exchange)) as answers:
                async for answer in answers:
                    message = in_stream(answer)
                    del answer
                    sent += await self._write_counted(message)
            exchange.transferred(len(body), sent)
        except Left:
            return None
        except Exception as error:
            return self._failure(error, model, request_id)
        return None

    def _failure(self, error: Exception, model: str, request_id: str) -> bytes:
        note(error)
        return error_in_stream(text_of(error, development=self._development), model, request_id, name_of(error))

    async def _write_counted(self, message: bytes) -> int:
        self._claim.take(len(message))
        try:
            return await self._write(message)
        finally:
            self._claim.give(len(message))

    async def _write(self, message: bytes) -> int:
        """Write a message after those before. Raises Left, also where the client does not read for too long: the call ends then."""
        try:
            async with asyncio.timeout(self._context.http.body_timeout), self._writing:
                await self._call.write(message)
        except TimeoutError:
            self._call.cancel()
            raise Left from None
        return len(message)


async def answers_to(exchange: GrpcExchange) -> AsyncGenerator[bytes, None]:
    """Yield the bodies of the answers to one request; each tells whether it is the last."""
    request = exchange.request
    wants_final = request.parameters.get(WANTS_FINAL) is True
    said_final = False
    async with aclosing(exchange.stream(request)) as parts:
        async for part in parts:
            part.response.parameters = {**part.response.parameters, FINAL: part.last}
            said_final = part.last
            answer = await exchange.write(part.response)
            del part  # nor does it wait beside its own bytes for the client to read
            yield answer
            del answer
    if wants_final and not said_final:
        service = exchange.service
        yield await exchange.write(
            InferenceResponse(service.name, [], version=service.version, id=request.id, parameters={FINAL: True})
        )
