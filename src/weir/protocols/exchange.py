"""The exchange, which connects protocols and channels. Requests enter the queue of a model here, and leave it to here.

A *protocol* does no I/O: it reads a head, reads a body, writes outputs, and writes an error. A *channel* moves bytes: it sends a response, sends the parts of
a stream, and notices that the client has left. An Exchange is one request between the two: it reads a long body in a thread, notifies the observers of
refusals and transferred bytes, begins the trace, and lets the model compute. docs/how-to/add-a-protocol.md shows an example of each.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weir.errors import ModelNotReady, WeirError
from weir.messages import CURRENT_TRACE, JSON, TRACEPARENT, Request, Trace
from weir.protocols.account import charge, charge_answer
from weir.protocols.entries import ItemHead, QueueEntry, Schedule, entries_for_one_answer
from weir.protocols.inference import (
    ItemsResponse,
    OneItem,
    QueuedRequest,
    StreamPart,
    inference_of,
    stream,
    stream_of,
)
from weir.protocols.offloading import off_loop
from weir.protocols.response import Headers, HttpResponse
from weir.serving.calls import StreamedCall
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

T = TypeVar("T")


async def once_read(find: Callable[[], T]) -> T:
    """Return what `find` returns; if it looks for a model that has not been read yet, that is read first. Raises what `find` raises."""
    try:
        return find()
    except ModelNotReady as error:
        if error.read is None:
            raise
        await error.read()
    return find()


async def answered_once_read(answer: Callable[[], Awaitable[T]]) -> T:
    """Return what `answer` returns, as `once_read` does; it must not have done anything when it raises."""
    try:
        return await answer()
    except ModelNotReady as error:
        if error.read is None:
            raise
        await error.read()
    return await answer()


class HttpRequestHead(Protocol):
    """The head of an inference request.

    `coding` is the compression of the body, and `accept_coding` that of a large response; "" is none. `timeout` is in seconds. `stream`: the response is a
    stream of events.
    """

    service: "ModelHandle"
    timeout: float
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

        Returns None if it is no request of this protocol. Raises the WeirError that refuses it.
        """

    def named(self, path: str) -> "ModelHandle | None":
        """Return the service that `path` names, or None."""

    async def answer(self, exchange: "Exchange", head: Any, body: bytes) -> HttpResponse:
        """Return the response to a request, whose `body` is decompressed. Raises the WeirError that ends the request."""

    async def stream(self, exchange: "Exchange", head: Any, body: bytes) -> EventSource:
        """Return the stream of events for a request. Raises the WeirError that refuses it before the stream begins."""

    def error_answer(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """Return the response for `error`. `service` is the one that the request names, if known."""


class Exchange:
    """One request for `service` that came through the frontend `frontend`.

    `timeout` is the caller's in seconds, or None for the service's setting. `carrier` has the headers that name the caller's span. `peer` is the caller's address, and
    `headers` (names in lower case) are those of the request, if the channel has them. `waited` is how long it has waited for a worker to start, once `infer`
    has returned.
    """

    __slots__ = ("carrier", "frontend", "headers", "peer", "service", "timeout", "trace", "waited")

    def __init__(
        self,
        service: "ModelHandle",
        *,
        frontend: str,
        timeout: float | None = None,
        carrier: dict[str, str] | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        peer: str | None = None,
    ) -> None:
        self.service = service
        self.frontend = frontend
        self.timeout = timeout
        self.carrier = carrier
        self.headers = headers
        self.peer = peer
        self.trace: Trace | None = None
        self.waited = 0.0

    # Before the service has the request.

    async def read(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads about `size_bytes` bytes: in a thread if they are many.

        Raises the WeirErrors that `work` raises.
        """
        with self:
            return await off_loop(size_bytes, work)

    def charge(self, size_bytes: int) -> None:
        """Charge memory that the request needs in addition to its body. Raises what Account.take raises."""
        with self:
            charge(size_bytes)

    def charge_answer(self, size_bytes: int) -> None:
        """Charge the answer. Raises what `charge` raises."""
        with self:
            charge_answer(size_bytes)

    def refused(self, error: WeirError) -> WeirError:
        """Notify the observers of the error that ends the request, unless they know it. Return the error.

        Whatever raises an error leaves this to the exchange and the channel. A request that was refused before it reached the service has no span.
        """
        if not error.reported:
            if self.trace is not None and not self.trace.has_span:
                self.trace = None
                CURRENT_TRACE.set(None)
            self.service.notify(self.frontend, error)
        return error

    def __enter__(self) -> None:
        """Begin a block whose errors end the request: the observers are notified of them."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, WeirError):
            self.refused(error)

    def entries(self, request: InferenceRequest) -> tuple[list[QueueEntry], Schedule]:
        """Return the queue entries of a request for one response, and its schedule. Raises Unsupported and RequestErrors."""
        with self:
            return entries_for_one_answer(self.service, request, self.timeout)

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

    def submit(self, entry: QueueEntry, schedule: Schedule, ended: Callable[[QueuedRequest], None]) -> QueuedRequest:
        """Put `entry` into the queue, and return its request. `ended` is called with it once, when it has its output or its error.

        This needs no task. When the caller leaves, call `cancel`. Raises what ModelHandle.submit raises; `ended` is not called then.
        """
        request = QueuedRequest(entry, self, schedule, ended)
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
            return await inference_of(self.service).infer(self, request)

    async def infer_items(self, head: ItemHead, body: bytes) -> ItemsResponse:
        """Return the results of a body of items, which is decompressed. Raises the WeirError that ends the whole request."""
        self.begin_trace()
        with self:
            return await inference_of(self.service).infer_items(self, head, body)

    async def infer_item(
        self, item: bytes, *, content_type: str = JSON, accept: str = JSON, priority: int = 0
    ) -> bytes:
        """Return the encoded output for one encoded item. Raises the WeirError that ends the request."""
        timeout = self.service.facts.settings.timeout if self.timeout is None else self.timeout
        head = OneItem(self.service, content_type, accept, priority, timeout)
        (body,) = (await self.infer_items(head, item)).write()
        if isinstance(body, WeirError):
            raise self.refused(body)
        return body

    def stream(self, request: InferenceRequest) -> AsyncGenerator[StreamPart, None]:
        """Yield the responses to a request of tensors: exactly one if the model does not stream. The caller must close the generator."""
        return stream(self, request)

    def stream_of(self, head: ItemHead, entry: QueueEntry) -> StreamedCall:
        """Return the streamed call of one item, for `read_parts`."""
        self.begin_trace()
        return stream_of(self, entry, Schedule(head.priority, head.timeout))

    # After the response has been written.

    def transferred(self, received_bytes: int, sent_bytes: int) -> None:
        """Notify the observers of the sizes of the request and of its response."""
        self.service.transferred(self.frontend, received_bytes, sent_bytes)
