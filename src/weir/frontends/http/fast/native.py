"""A request of the fast path, whose end is written on the connection at once, by no task and through no future; and Weir's own protocol there."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from weir.batching.request_state import RequestBase, begin, settle
from weir.errors import WeirError
from weir.frontends.http.fast.plan import Head, HotAsk, RoutePlan
from weir.messages import Dispatch, Kind
from weir.model import is_tensor_model
from weir.protocols.native import FRONTEND, NativeProtocol, RequestHead
from weir.protocols.offloading import LONG_BODY, work_later
from weir.protocols.response import (
    LONG_COMPRESSION,
    HttpResponse,
    compressed,
    echo_headers,
    explain_headers,
    trace_headers,
)
from weir.serving.delivery import discard
from weir.serving.inference import QueueEntry, empty_body, may_be_empty, output_body, read_item

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection


_ITEM = Kind.ITEM
Step = Callable[[], None]


class HttpRequest(RequestBase):
    """One request of `connection`."""

    __slots__ = ("ask", "connection", "plan", "stop_thread")

    ask: Any  # as its handler knows it

    def __init__(self, connection: "Connection", plan: RoutePlan, payload: Any) -> None:
        # RequestBase's own constructor, with its keywords, takes twice the time; a test holds this one against it.
        ask: HotAsk = plan.ask
        self.payload = payload
        self.arrival = now = ask.service.now()
        self.timeout = timeout = ask.timeout
        self.deadline = now + timeout
        self.kind = _ITEM
        self.content_type = ask.content_type
        self.accept = ask.accept
        self.rows = 1
        self.cost = 1.0
        self.key = ask.key
        self.priority = ask.priority
        self.large = False
        self.door = FRONTEND
        self.trace = ask.traceparent
        begin(self)
        self.connection = connection
        self.plan = plan
        self.ask = ask
        self.stop_thread: Callable[[], bool] | None = None  # while its body is read, or its answer written, in a thread

    def begin(self) -> None:
        """Put it into the queue, once its body has been read if that must be. Raises the WeirError that refuses it."""
        if self.ask.plain:
            self.ask.service.submit(self, self.arrival)
        elif (size := self.bytes_to_read()) <= LONG_BODY:
            self._take(self._read())
        else:
            self.stop_thread = work_later(size, self.reader(), self._has_read)

    def _read(self) -> Step | Exception:
        try:
            return self.reader()()
        except WeirError as error:
            return error

    def _has_read(self, found: Step | Exception) -> None:
        if self.stop_thread is not None:
            self.stop_thread = None
            self.connection.attempt(self, self.plan, partial(self._take, found))
        else:  # the caller has left meanwhile
            discard(self.payload)

    def _take(self, found: Step | Exception) -> None:
        """Go on with what was found in the body. Raises it if it is an error."""
        try:
            if isinstance(found, Exception):
                raise found
            found()
        except WeirError as error:  # no service has been told of the request
            self.connection.shared.refused(self.ask.service, error)
            raise
        self.ask.service.submit(self, self.arrival)

    def leave(self) -> None:
        """Withdraw it from the queue."""
        stop, self.stop_thread = self.stop_thread, None
        if stop is None:
            self.ask.service.cancel(self)
            return
        is_read = settle(self)
        if stop() and is_read:  # what a thread reads already it gives back itself
            discard(self.payload)

    def bytes_to_read(self) -> int:
        """Return how many bytes `reader` will look at."""
        return len(self.payload)

    def reader(self) -> Callable[[], Step]:
        """Return what finds out how large the item is, in a thread if the body is long. It changes nothing, but returns the step that
        does, on the event loop. Both raise the WeirErrors that refuse the body."""
        return self._read_item

    def _read_item(self) -> Step:
        return partial(self._take_size, read_item(self.ask, self.payload))

    def _take_size(self, work: QueueEntry) -> None:
        self.rows, self.cost, self.key, self.large = work.rows, work.cost, work.key, work.large

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Write the answer."""
        connection = self.connection
        shared = connection.shared
        plan = self.plan
        if type(output) is bytes and len(output) <= plan.plain_up_to and not shared.draining:
            head = shared.heads.plain.get(plan.answer_type) or shared.heads.plain_head(plan.answer_type)
            connection.transport.write(b"%b%d\r\n\r\n%b" % (head, len(output), output))
            tally = plan.tally
            tally.received += plan.length
            tally.sent += len(output)
            connection.request_ended()
        else:
            self._finish_otherwise(output, dispatch)

    def fail(self, error: Exception) -> None:
        """Write the error."""
        self._answer(self.plan.handler.error_answer(error, self.ask.service))

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        ask = self.ask
        headers = [(b"content-type", self.plan.answer_type.encode("latin-1"))]
        if ask.explain:
            headers += explain_headers(self.arrival, dispatch)
        if isinstance(output, bytes) or self._is_compressed(len(output.view)):
            self._answer(HttpResponse(200, headers, output_body(ask, output)))
        else:
            self._count(len(output.view))
            self.connection.answer_block(self.plan, headers + echo_headers(ask) + trace_headers(self), output)

    def _is_compressed(self, size: int) -> bool:
        return bool(self.ask.accept_coding) and size > self.connection.shared.settings.compress_above

    def _answer(self, answer: HttpResponse) -> None:
        answer.headers.extend(echo_headers(self.ask))
        answer.headers.extend(trace_headers(self))
        if not self._is_compressed(len(answer.body)):
            self._write(answer)
        elif len(answer.body) <= LONG_COMPRESSION:
            self._write(compressed(answer, self.ask.accept_coding))
        else:
            loop = asyncio.get_running_loop()
            compression = loop.run_in_executor(None, compressed, answer, self.ask.accept_coding)
            compression.add_done_callback(lambda done: self._write(done.result()))

    def _write(self, answer: HttpResponse) -> None:
        self._count(len(answer.body))
        self.connection.answer(self.plan, answer)

    def _count(self, sent: int) -> None:
        self.plan.tally.received += self.plan.length
        self.plan.tally.sent += sent


class HotNative(NativeProtocol):
    """The RouteHandler of /infer, /inference and the models' own routes; see plan.py."""

    request = HttpRequest
    of_service = True

    def complete(self, plan: RoutePlan, head: Head, path: str) -> bool:
        """See RouteHandler."""
        ask = self.read_head(head.method, path, head.headers)
        if ask is None:
            return False
        if not head.length:
            if may_be_empty(ask):
                return False
            raise empty_body(ask)
        if not _is_hot(ask):
            return False
        plan.ask = ask
        plan.answer_type = ask.accept
        plan.in_arena = ask.plain
        return True


def _is_hot(ask: RequestHead) -> bool:
    """Lists, tensors, compressed bodies and what is not one entry of the queue are read by the ASGI application; it writes streams too."""
    service = ask.service
    return (
        not (ask.batch or ask.stream or ask.coding or is_tensor_model(service.model)) and service.inference.queues_items
    )
