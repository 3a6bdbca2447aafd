"""The exchange, which connects protocols and channels. Requests enter the queue of a model here, and leave it to here.

A *protocol* does no I/O: it reads a head, reads a body, writes outputs, and writes an error. A *channel* moves bytes: it sends a response, sends the parts of
a stream, and notices that the client has left. An Exchange is one request between the two: it reads a long body in a thread, notifies the observers of
refusals and transferred bytes, begins the trace, and lets the model compute. docs/how-to/add-a-protocol.md shows an example of each.

Requests become entries of their model's queue, and the outputs of these entries a response. A ModelHandle has an `inference` if a product answers the model's
requests in a way of its own: the embedding server turns texts into token sequences first. All other models have ModelInference. Whatever waits in a queue is a
QueuedRequest, alone or gathered with others, or a StreamedCall.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weir.batching.request_state import RequestBase, refuse
from weir.errors import Cancelled, InvalidRequest, ModelError, ModelNotReady, Unsupported, WeirError
from weir.messages import CURRENT_TRACE, JSON, TRACEPARENT, Dispatch, Form, Kind, Request, Trace, carrier_in, child_of
from weir.model import Tensor
from weir.protocols.access import caller_in
from weir.protocols.account import charge
from weir.protocols.entries import (
    ItemHead,
    QueueEntry,
    arrays_size,
    body_or_error,
    bytes_to_read,
    entries_of,
    inputs_of,
    item_entries,
    outputs_of,
    response_of,
    scheduled,
)
from weir.protocols.offloading import off_loop
from weir.protocols.response import Headers, HttpResponse
from weir.serving.calls import StreamedCall
from weir.serving.delivery import drop_payload
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.tensors import text_size
from weir.workers.executor import discard

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle


T = TypeVar("T")

# Is called once with a result, or with the error that there is instead.
Ended = Callable[[T | Exception], None]
# Stops what was begun, whose caller has left. Returns False if its end will be reported all the same, and otherwise anything else.
Stop = Callable[[], object]


def begin_task(work: Awaitable[T], ended: Ended[T]) -> Stop:
    """Do `work` in a task. `ended` is called with its result or error, also after it was stopped."""

    def done(task: asyncio.Future[T]) -> None:
        error = Cancelled("the request was cancelled") if task.cancelled() else task.exception()
        ended(task.result() if error is None else error if isinstance(error, Exception) else RuntimeError(error))

    def stop() -> bool:
        task.cancel()
        return False

    task = asyncio.ensure_future(work)
    task.add_done_callback(done)
    return stop


async def end_of(begin: Callable[[Ended[T]], Stop]) -> T:
    """Return the end of what `begin` begins, or raise it if it is an error. Cancelling the task that awaits this stops it. Raises what `begin` raises."""
    over: asyncio.Future[T | Exception] = asyncio.get_running_loop().create_future()
    stop = begin(lambda found: None if over.done() else over.set_result(found))
    try:
        found = await over
    except asyncio.CancelledError:
        stop()
        raise
    if isinstance(found, Exception):
        try:
            raise found
        finally:
            del found, over  # locals of its own traceback
    return found


class PassedOn(WeirError):
    """The end of a queued request to which another process of the server responds: the channel passes it on, and observers hear nothing of it."""

    reported = True


class ItemsResponse(NamedTuple):
    """The results of all items of a request.

    `write` returns the encoded output or the error of each item, in order; `size_bytes` is about how much text it writes. `dispatch` is the batch of the
    first item, or None, and `arrival` the instant at which the first item entered the queue. `extra` has more fields of an item, by its index.
    """

    size_bytes: int
    write: Callable[[], list[bytes | WeirError]]
    dispatch: Dispatch | None = None
    arrival: float = 0.0
    headers: Sequence[tuple[bytes, bytes]] = ()
    extra: Mapping[int, dict[str, Any]] = MappingProxyType({})


class StreamPart(NamedTuple):
    """One response of a stream. `last`: the model marked it as the last one. A stream may also end without such a mark."""

    response: InferenceResponse
    last: bool


class Inference:
    """Computes the responses to a model's requests from outside. By default none is one entry of a queue, and the tensors are those that the model declares."""

    def queues_items(self, service: "ModelHandle") -> bool:
        """Return whether a body of one item becomes one queue entry. If so, a channel may make the entry with `item_entry` and submit it itself."""
        return False

    def queues_tensors(self, service: "ModelHandle") -> bool:
        """Return whether an InferenceRequest becomes one queue entry. If so, a channel may make it with `entries_of` and submit it itself."""
        return False

    def inputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the input tensors that the model's metadata lists. A request may have others too."""
        return inputs_of(service.facts)

    def outputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the output tensors that the model's metadata lists."""
        return outputs_of(service.facts)

    def begin(self, exchange: "Exchange", request: InferenceRequest, ended: "Ended[InferenceResponse]") -> "Stop":
        """Begin to compute the response to a request of tensors. `ended` is called once with it, or with the error that ends the request.

        Returns what cancels the request; see Stop. The request's parameter `timeout` can only shorten the timeout of the exchange. Raises Unsupported if the
        model streams its responses, and the WeirError that refuses the request; `ended` is not called then.
        """
        raise NotImplementedError  # each kind of inference implements it

    async def infer_items(self, exchange: "Exchange", head: ItemHead, body: bytes) -> ItemsResponse:
        """Return the results of a body of items, which is decompressed. Cancelling the task that awaits this cancels the items.

        Raises the WeirError that ends the whole request. The error of one item of a list is its result.
        """
        raise NotImplementedError  # each kind of inference implements it


def inference_of(service: "ModelHandle") -> Inference:
    """Return how the requests of `service` are answered."""
    own: Inference | None = service.inference
    return MODEL_INFERENCE if own is None else own


class ModelInference(Inference):
    """Inference by a plain model: items and tensors enter its queue as they were read."""

    def queues_items(self, service: "ModelHandle") -> bool:
        """Return whether the model takes items."""
        return not service.facts.model.takes_requests

    def queues_tensors(self, service: "ModelHandle") -> bool:
        """Return whether an InferenceRequest becomes one queue entry: always, unless the model measures its items."""
        return service.facts.takes_tensors or not service.facts.needs_measure

    def begin(self, exchange: "Exchange", request: InferenceRequest, ended: "Ended[InferenceResponse]") -> "Stop":
        """See Inference."""
        entries = exchange.entries(request)
        kinds = [entry.form.kind for entry in entries]
        gathering = Gathering(exchange, alone=False)

        def gathered(found: "list[QueuedRequest] | Exception") -> None:
            if isinstance(found, Exception):
                return ended(found)
            exchange.waited = gathering.waited
            try:
                outputs = [request.output for request in found]
                response = response_of(exchange.service, request, kinds, outputs, gathering.waited)
            except Exception as error:
                ended(error)
            else:
                ended(response)

        gathering.begin([*entries], gathered)
        return gathering.withdraw

    async def infer_items(self, exchange: "Exchange", head: ItemHead, body: bytes) -> ItemsResponse:
        """See Inference."""
        entries = await exchange.read(bytes_to_read(head, body), lambda: item_entries(head, body))
        charge(sum([arrays_size(entry.payload) for entry in entries if isinstance(entry, QueueEntry)]))
        gathering = Gathering(exchange, alone=True)
        ended = await end_of(partial(gathering.begin, entries))
        return items_response(head, ended, gathering.dispatch)


MODEL_INFERENCE = ModelInference()


class QueuedRequest(RequestBase):
    """A request in the queue of its model. `ended` is called with it once, when it has its end.

    That is its `output` and the last batch that it was in, its `dispatch`; or its `error`. `dispatch` and `waited` are there only while `ended` is called: a
    batch refers to its requests, and would be in a reference cycle with them.
    """

    __slots__ = ("_ended", "dispatch", "error", "number", "output")
    number: int  # of a request that another process queues

    def __init__(
        self, form: Form, payload: Any, arrival: float, ended: Callable[[Any], None], trace: Any = None
    ) -> None:
        super().__init__(form, payload, arrival, trace)
        self._ended = ended
        self.output: Any = None
        self.error: WeirError | None = None
        self.dispatch: Dispatch | None = None

    @property
    def waited(self) -> float:
        """The seconds for which it waited for a worker to start; 0 if none had to."""
        dispatch = self.dispatch
        return 0.0 if dispatch is None or dispatch.woken_at is None else dispatch.started_for(self.arrival)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """End with the output."""
        self.output, self.dispatch = output, dispatch
        ended = self._ended
        del self._ended  # whoever is called may refer to this request
        ended(self)
        self.dispatch = None

    def fail(self, error: WeirError) -> None:
        """End with the error."""
        self.error = error
        ended = self._ended
        del self._ended
        ended(self)

    def pass_on(self) -> None:
        """End, as another process of the server responds."""
        self.fail(PassedOn())


class Gathering:
    """The requests that one request from outside is divided into. The first error ends all of them; with `alone` each ends by itself.

    `dispatch` is the batch of the first request, and `waited` how long the requests waited for a worker to start.
    """

    def __init__(self, exchange: "Exchange", *, alone: bool) -> None:
        self._exchange = exchange
        self._alone = alone
        self._left = 0
        self._then: Ended[list[QueuedRequest]] | None = None
        self.requests: list[QueuedRequest] = []
        self.dispatch: Dispatch | None = None
        self.waited = 0.0

    def begin(self, entries: list[QueueEntry | WeirError], ended: Ended[list[QueuedRequest]]) -> Stop:
        """Put `entries` into the queue. `ended` is called with their requests, in order, when all have ended, or with the first error.

        `entries` is empty afterwards, so that each payload can be freed when its own request ends. The first error cancels the other requests. With `alone`,
        an error is the end of its own request. Returns `withdraw`. Raises the error that refuses a request; with `alone` only while no other request has been
        accepted.
        """
        self._left = len(entries)
        try:
            self._submit(entries)
        except BaseException:
            self.withdraw()
            raise
        entries.clear()
        self._then = ended
        if not self._left or self._error is not None:
            self._end()
        return self.withdraw

    def withdraw(self) -> None:
        """Cancel the requests under way. Release the shared memory of outputs that nobody will read."""
        self._then = None
        for request in self.requests:
            if not request.settled:
                self._exchange.cancel(request)
            for output in request.output if isinstance(request.output, list) else [request.output]:
                discard(output)

    @property
    def _error(self) -> WeirError | None:
        """The error that ends all requests; None if there is none."""
        errors = () if self._alone else (request.error for request in self.requests if request.error is not None)
        return next(iter(errors), None)

    def _ended(self, request: QueuedRequest) -> None:
        """Count the end of one request. Release its payload now, because other requests of the same call may take long."""
        if request.error is None:
            drop_payload(request)
            self.waited = max(self.waited, request.waited)
        if self.requests and request is self.requests[0]:
            self.dispatch = request.dispatch
        self._left -= 1
        if not self._left or (not self._alone and request.error is not None):
            self._exchange.ending = request
            self._end()
            self._exchange.ending = None

    def _end(self) -> None:
        ended, self._then = self._then, None
        if ended is not None:
            error = self._error
            if error is not None:
                self.withdraw()
            ended(error or self.requests)

    def _submit(self, entries: list[QueueEntry | WeirError]) -> None:
        exchange, accepted = self._exchange, False
        for index, entry in enumerate(entries):
            # The first request has the span that the response names. The spans of the others are its siblings.
            trace = child_of(exchange.trace) if index else exchange.trace
            queued = QueueEntry(exchange.form(), None) if isinstance(entry, WeirError) else entry
            request = QueuedRequest(*queued, exchange.service.now(), self._ended, trace)
            if isinstance(entry, WeirError):
                refuse(request, entry)
            else:
                try:
                    exchange.put(request)
                except WeirError as error:
                    if not self._alone or not accepted:
                        raise
                    refuse(request, error)
                else:
                    accepted = True
            self.requests.append(request)


def items_response(
    head: ItemHead, requests: Sequence[QueuedRequest], dispatch: Dispatch | None = None
) -> ItemsResponse:
    """Return the results of `requests`, all of which have ended; `dispatch` is the batch of the first one.

    Raises the error of a single item, or of a list that failed as a whole.
    """
    ends: list[Any] = []
    for request in requests:
        as_list = head.batch and request.form.kind is Kind.ITEMS
        if request.error is not None and (as_list or not head.batch):
            raise request.error
        ends.extend(request.output if as_list else [request.error or request.output])
    size = sum([text_size(array) for end in ends if isinstance(end, dict) for array in end.values()])
    arrival = requests[0].arrival if requests else 0.0
    return ItemsResponse(size, lambda: [_item_body(head, end) for end in ends], dispatch, arrival)


def _item_body(head: ItemHead, end: Any) -> bytes | WeirError:
    return end if isinstance(end, WeirError) else body_or_error(head, end)


class OneItem(NamedTuple):
    """The head of a request for one item that has no head of its own."""

    service: "ModelHandle"
    form: Form
    batch: bool = False


# Streams.


async def read_parts(exchange: "Exchange", request: StreamedCall) -> AsyncGenerator[tuple[Any, bool], None]:
    """Submit `request`. Yield each output, and whether the model marked it as the last one.

    Closing the generator cancels the request. Raises what ModelHandle.submit raises, and the error that ends the request.
    """
    exchange.put(request)
    try:
        while True:
            try:
                part = await request.read()
            except StopAsyncIteration:
                return
            yield part
            del part  # frees it while the next one is awaited
    finally:
        request.close()


async def once_read(find: Callable[[], T]) -> T:
    """Return what `find` returns; if it looks for a model that has not been read yet, that is read first. Raises what `find` raises."""
    try:
        return find()
    except ModelNotReady as error:
        if error.read is None:
            raise
        await error.read()
    return find()


class HttpRequestHead(Protocol):
    """The head of an inference request.

    `coding` is the compression of the body, and `accept_coding` that of a large response; "" is none. `timeout` is in seconds. `stream`: the response is a
    stream of events.
    """

    service: "ModelHandle"
    timeout: float
    route: str
    coding: str
    accept_coding: str
    carrier: dict[str, str] | None
    stream: bool


class EventSource(NamedTuple):
    """The content of a stream of events.

    `parts` yields the data of each event, and raises the WeirError that ends the stream. `failure` makes the data of the event that reports an error after
    other events. `headers` returns more headers of the response; it is called with the first event.
    """

    parts: AsyncGenerator[bytes, None]
    failure: Callable[[WeirError], bytes]
    headers: Callable[[], Headers]


class HttpProtocol(Protocol):
    """A protocol of inference over HTTP. It reads and writes without I/O, and leaves everything else to the exchange."""

    @property
    def prefix(self) -> bytes:
        """The prefix of the protocol's paths. A malformed request whose path begins with it gets an error of this protocol."""

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> HttpRequestHead | None:
        """Read the head of a request. `path` is percent-decoded and has no query; `headers` have names in lower case.

        Returns None if it is not a request of this protocol. Raises the WeirError that refuses it.
        """

    def named(self, path: str) -> "ModelHandle | None":
        """Return the service that `path` names, or None."""

    async def respond(self, exchange: "Exchange", head: Any, body: bytes) -> HttpResponse:
        """Return the response to a request, whose `body` is decompressed. Raises the WeirError that ends the request."""

    async def stream(self, exchange: "Exchange", head: Any, body: bytes) -> EventSource:
        """Return the stream of events for a request. Raises the WeirError that refuses it before the stream begins."""

    def error_response(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """Return the response for `error`. `service` is the one that the request names, if known."""


class Exchange:
    """One request for `service` that came through the frontend `frontend`.

    `timeout` is the caller's in seconds, or None for the service's setting. `peer` is the caller's address, and `headers` (names in lower case) are those of the request, if
    the channel has them. They say whose key it has, and name the caller's span in `carrier`. `waited` is how long it has waited for a worker to start, once `infer`
    has returned. `responded` says whether the model has responded, so that the observers know an end of the request. `ending` is the queued request that has
    its end at present; None if none has.
    """

    __slots__ = (
        "caller", "carrier", "ending", "frontend", "headers", "peer", "responded", "route", "service", "timeout", "trace", "waited",
    )  # fmt: skip

    def __init__(
        self,
        service: "ModelHandle",
        *,
        frontend: str,
        timeout: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        peer: str | None = None,
    ) -> None:
        self.service = service
        self.frontend = frontend
        self.timeout = timeout
        self.headers = headers
        self.carrier = None if service.tracing is None else carrier_in(headers)
        self.peer = peer
        self.caller = caller_in(headers) if headers else ""
        self.trace: Trace | None = None
        self.waited = 0.0
        self.route = ""  # see Form
        self.responded = False
        self.ending: QueuedRequest | None = None

    # Before the service has the request.

    async def read(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads about `size_bytes` bytes: in a thread if they are many.

        Raises the WeirErrors that `work` raises.
        """
        return await off_loop(size_bytes, work)

    def refused(self, error: WeirError, *, whole: bool = True) -> WeirError:
        """Notify the observers of the error that ends the request, or one item of it if not `whole`, unless they know it. Return the error.

        Whatever raises an error leaves this to the exchange and the channel. A request that was refused before it reached the service has no span.
        """
        ending = self.ending
        if ending is not None and ending.dispatch is not None:
            ending.dispatch.refuse(ending, error)
        if not error.reported:
            if self.trace is not None and not self.trace.has_span:
                self.trace = None
                CURRENT_TRACE.set(None)
            error.reported = self.responded and whole and not isinstance(error, ModelError)
            self.service.notify(self.frontend, error)
        return error

    def __enter__(self) -> None:
        """Begin a block whose errors end the request: the observers are notified of them."""
        self.responded = False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, WeirError):
            self.refused(error)

    def form(self, **fields: Any) -> Form:
        """Return the form of a request for one item; `fields` are those that are not the usual ones."""
        limit = self.service.facts.settings.timeout if self.timeout is None else self.timeout
        return Form(limit, frontend=self.frontend, caller=self.caller, route=self.route, **fields)

    def entries(self, request: InferenceRequest, *, streams: bool = False) -> list[QueueEntry]:
        """Return the queue entries of a request for one response, or with `streams` for several. Raises Unsupported if the model streams its responses and
        one is wanted, and RequestErrors."""
        with self:
            if self.service.facts.streaming and not streams:
                label = self.service.facts.label
                raise Unsupported(f"model {label!r} streams its responses: send the request where streams are offered")
            form = scheduled(self.service, request, self.timeout, self.frontend, self.caller, self.route)
            return entries_of(self.service, request, form)

    def begin_trace(self) -> Trace | None:
        """Begin the request's span, as a child of the caller's, and return it; None if requests are not traced. This task's log lines name the span."""
        tracing = self.service.tracing
        if tracing is not None and self.trace is None:
            self.trace = tracing.new(self.carrier)
            CURRENT_TRACE.set(self.trace)
        return self.trace

    @property
    def trace_headers(self) -> Headers:
        """The header that names the request's span; empty if there is no span."""
        return [] if self.trace is None else [(TRACEPARENT.encode(), self.trace.traceparent.encode())]

    # Into the queue. The fast path alone submits requests of its own, which write their responses themselves.

    def put(self, request: Request) -> None:
        """Put `request` into the queue. Raises what ModelHandle.submit raises."""
        self.service.submit(request, request.arrival)

    def submit(self, entry: QueueEntry, ended: Callable[[QueuedRequest], None]) -> QueuedRequest:
        """Put `entry` into the queue, and return its request. `ended` is called with it once, when it has its output or its error.

        This needs no task. When the caller leaves, call `cancel`. Raises what ModelHandle.submit raises; `ended` is not called then.
        """
        request = QueuedRequest(*entry, self.service.now(), ended, self.trace)
        self.put(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request whose caller has left; nothing happens if it has ended."""
        self.service.cancel(request)

    # With a task. Cancelling the task that awaits one of these cancels the request.

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Return the response to a request of tensors. Raises the WeirError that ends the request."""
        self.begin_trace()
        with self:
            response: InferenceResponse = await end_of(partial(inference_of(self.service).begin, self, request))
        self.responded = True
        return response

    async def infer_items(self, head: ItemHead, body: bytes) -> ItemsResponse:
        """Return the results of a body of items, which is decompressed. Raises the WeirError that ends the whole request."""
        self.begin_trace()
        with self:
            response = await inference_of(self.service).infer_items(self, head, body)
        self.responded = True
        return response

    async def infer_item(
        self, item: bytes, *, content_type: str = JSON, accept: str = JSON, priority: int = 0
    ) -> bytes:
        """Return the encoded output for one encoded item. Raises the WeirError that ends the request."""
        head = OneItem(self.service, self.form(content_type=content_type, accept=accept, priority=priority))
        (body,) = (await self.infer_items(head, item)).write()
        if isinstance(body, WeirError):
            raise self.refused(body)
        return body

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[StreamPart, None]:
        """Yield the responses to a request of tensors: exactly one if the model does not stream. The caller must close the generator.

        Closing it, or cancelling the task, also cancels the request in its worker. Raises the WeirError that ends the request.
        """
        service = self.service
        self.begin_trace()
        with self:
            if not service.facts.streaming:
                yield StreamPart(await self.infer(request), True)
                return
            entries = self.entries(request, streams=True)
            first = entries[0]
            kind = first.form.kind
            if len(entries) > 1 or (kind is Kind.ITEMS and first.form.rows > 1):
                rows = sum(entry.form.rows for entry in entries)
                raise InvalidRequest(f"tensor 'input': has {rows} items, a stream takes one")
            item = first.payload[0] if kind is Kind.ITEMS else first.payload
            streamed = self.stream_of(first._replace(payload=item))
            async with aclosing(read_parts(self, streamed)) as parts:
                async for output, last in parts:
                    self.responded = True
                    yield StreamPart(response_of(service, request, [kind], [output]), last)

    def stream_of(self, entry: QueueEntry) -> StreamedCall:
        """Return the streamed call of one item, for `read_parts`. The tensors of a request are one item, which is not divided."""
        self.begin_trace()
        service = self.service
        form, limit = entry.form.replaced(kind=Kind.ITEM), service.facts.settings.stream_buffer
        return StreamedCall(form, entry.payload, limit, service.cancel, service.now, self.trace)

    # After the response has been written.

    def transferred(self, received_bytes: int, sent_bytes: int) -> None:
        """Notify the observers of the sizes of the request and of its response."""
        self.service.transferred(self.frontend, received_bytes, sent_bytes)
