"""The exchange: where protocols and channels meet, and the only place that knows how a request enters a service and leaves it.

A *protocol* is pure: it reads a head, reads a body, writes outputs, writes an error. A *channel* moves bytes: it sends an answer, sends the parts of one, and reports
that the caller has left. An Exchange is one request between the two: it reads what is long in a thread, tells the observers what was refused and what was
transferred, begins the trace, and has the model answer. docs/how-to/add-a-protocol.md shows one of each.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weir.errors import WeirError
from weir.messages import JSON, Kind
from weir.protocols.account import charge
from weir.protocols.offloading import off_loop
from weir.protocols.response import Headers, HttpResponse
from weir.serving.calls import StreamedCall
from weir.serving.inference import Gathering, ItemHead, ItemsResponse, QueueEntry, StreamPart, stream, stream_of
from weir.telemetry.tracecontext import CURRENT, HEADER, Trace
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.serving.service import Service

T = TypeVar("T")


class HttpRequestHead(Protocol):
    """The head of any request for inference. `coding` is how its body is compressed, `accept_coding` how a large answer may be, "" if not;
    `timeout` is in seconds; `stream`: it is answered by a stream of events."""

    service: "Service"
    timeout: float
    coding: str
    accept_coding: str
    traceparent: str | None
    stream: bool


class EventSource(NamedTuple):
    """What a stream of events consists of. `parts` yields the data of each event and raises the WeirError that ends them; `failure` makes the data of the
    last event of an error that comes after others; `headers` are asked for with the first event."""

    parts: AsyncGenerator[bytes, None]
    failure: Callable[[WeirError], bytes]
    headers: Callable[[], Headers]


class HttpProtocol(Protocol):
    """How requests for inference are written over HTTP. What reads and writes is pure; everything else it has the exchange do."""

    @property
    def prefix(self) -> bytes:
        """What the paths of its requests begin with, also of those that make no sense otherwise."""

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> HttpRequestHead | None:
        """Return what a head asks for, None if it is no request of this protocol. `path` is percent-decoded and has no query, names of `headers`
        are in lower case. Raises the WeirError that refuses it."""

    def named(self, path: str) -> "Service | None":
        """Return the service that `path` asks for, as far as there is one."""

    async def answer(self, exchange: "Exchange", head: Any, body: bytes) -> HttpResponse:
        """Return the answer to a request; its `body` is decompressed. Raises the WeirError that is its end."""

    async def stream(self, exchange: "Exchange", head: Any, body: bytes) -> EventSource:
        """Return the answers to a request, which has been submitted. Raises the WeirError that refuses it."""

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """Return what is written for `error` when `service` was asked for."""


class Exchange:
    """One request for `service` that came by the frontend `door`.

    `timeout` is the caller's in seconds (None: the service's setting), `traceparent` names the caller's span, `peer` is the caller's address and `headers`
    (names in lower case) are what came beside the body, as far as the channel has them.
    """

    __slots__ = ("door", "headers", "peer", "service", "timeout", "trace", "traceparent")

    def __init__(
        self, service: "Service", *, door: str, timeout: float | None = None, traceparent: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (), peer: str | None = None,
    ) -> None:  # fmt: skip
        self.service = service
        self.door = door
        self.timeout = timeout
        self.traceparent = traceparent
        self.headers = headers
        self.peer = peer
        self.trace: Trace | None = None

    # Before the service has the request.

    async def read(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` reads of about so many bytes, in a thread if they are many. The observers are told of what it refuses."""
        try:
            return await off_loop(size_bytes, work)
        except WeirError as error:
            raise self.refused(error) from None

    def charge(self, size_bytes: int) -> None:
        """Charge memory that the request takes beside its body. Raises what Account.take raises; the observers are told."""
        try:
            charge(size_bytes)
        except WeirError as error:
            raise self.refused(error) from None

    def refused(self, error: WeirError) -> WeirError:
        """Tell the observers that the request was refused before the service had it; return the error. It has no span then."""
        self.trace = None
        CURRENT.set(None)
        return self.service.tell_refused(self.door, error)

    def begin_trace(self) -> Trace | None:
        """Begin the span of the request, within its caller's, and return it; None if requests are not traced. The log lines of this task carry it."""
        tracing = self.service.tracing
        if tracing is not None and self.trace is None:
            self.trace = tracing.new(self.traceparent)
            CURRENT.set(self.trace)
        return self.trace

    @property
    def trace_headers(self) -> Headers:
        """The header that names the span of the request; none if there is no span."""
        return [] if self.trace is None else [(HEADER.encode(), self.trace.traceparent.encode())]

    # In the service. Cancelling the task that awaits withdraws the request.

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Return the answer to a request of tensors. Raises every WeirError that can be its end."""
        self.begin_trace()
        return await self.service.inference.infer(self.service, request, self)

    async def infer_items(self, head: ItemHead, body: bytes) -> ItemsResponse:
        """Return the answers to a body of items, decompressed. Raises the WeirError that is the end of them all."""
        self.begin_trace()
        return await self.service.inference.infer_items(head, body, self)

    async def infer_item(
        self, item: bytes, *, content_type: str = JSON, accept: str = JSON, priority: int = 0
    ) -> bytes:
        """Return the encoded answer to one encoded item, which is one row. Raises every WeirError that can be its end."""
        self.begin_trace()
        entry = QueueEntry(item, Kind.ITEM, content_type, accept, 1, 1.0, None, False)
        timeout = self.service.settings.timeout if self.timeout is None else self.timeout
        (request,) = await Gathering(self.service, self, timeout, priority, alone=False).run([entry])
        return as_bytes(request.end)

    def stream(self, request: InferenceRequest) -> AsyncGenerator[StreamPart, None]:
        """Yield the answers to a request of tensors; of a model that does not stream, its one. Close it in the end."""
        self.begin_trace()
        return stream(self.service, request, self)

    def stream_of(self, head: ItemHead, entry: QueueEntry) -> StreamedCall:
        """Return the request for the answers to one item, for `read_parts`."""
        self.begin_trace()
        return stream_of(self.service, entry, head.timeout, head.priority, self)

    # After the answer has been written.

    def transferred(self, received_bytes: int, sent_bytes: int) -> None:
        """Tell the observers what the request and its answer weighed."""
        for observer in self.service.observers:
            observer.transferred(self.service.label, self.door, received_bytes, sent_bytes)


def as_bytes(output: Any) -> bytes:
    """Return the bytes of an encoded answer; a Block is given back."""
    if isinstance(output, bytes):
        return output
    try:
        return bytes(output.view)
    finally:
        output.release()
