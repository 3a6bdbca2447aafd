"""Weir's own protocol on the fast path: a request that writes its own response to the connection, without a task and without a future."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from weir.batching.request_state import RequestBase, begin, settle
from weir.errors import WeirError
from weir.frontends.http.fast.plan import HotHead, HttpHead, RoutePlan
from weir.messages import Dispatch, Kind
from weir.protocols.entries import QueueEntry, empty_body, item_entry, may_be_empty, output_body
from weir.protocols.exchange import inference_of
from weir.protocols.native import FRONTEND, NativeProtocol, RequestHead
from weir.protocols.offloading import LONG_BODY, work_later
from weir.protocols.response import (
    LONG_COMPRESSION,
    HttpResponse,
    compressed,
    echo_headers,
    explain_headers,
    start_headers,
    trace_headers,
)
from weir.serving.delivery import discard

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection


_ITEM = Kind.ITEM
Step = Callable[[], None]


class HttpRequest(RequestBase):
    """One request of `connection`. kserve.py derives its own from it."""

    __slots__ = ("head", "connection", "plan", "stop_thread")

    head: Any  # as its protocol reads it

    def __init__(self, connection: "Connection", plan: RoutePlan, payload: Any) -> None:
        # As QueuedRequest does, but without an exchange, an entry and a schedule. A test compares the results of the two.
        head: HotHead = plan.head
        self.payload = payload
        self.arrival = now = head.service.now()
        self.timeout = timeout = head.timeout
        self.deadline = now + timeout
        self.kind = _ITEM
        self.content_type = head.content_type
        self.accept = head.accept
        self.rows = 1
        self.cost = 1.0
        self.key = head.key
        self.priority = head.priority
        self.large = False
        self.frontend = FRONTEND
        self.trace = head.carrier
        begin(self)
        self.connection = connection
        self.plan = plan
        self.head = head
        self.stop_thread: Callable[[], bool] | None = None  # set while a thread reads its body or writes its response

    def begin(self) -> None:
        """Put the request into the queue, after reading its body if necessary. Raises the WeirError that refuses it."""
        if self.head.plain:
            self.enter()
        elif (size := self.bytes_to_read()) <= LONG_BODY:
            self._take(self._read())
        else:
            self.stop_thread = work_later(size, self.reader(), self._has_read, account=self.connection.shared.account)

    def _read(self) -> Step | Exception:
        try:
            return self.reader()()
        except WeirError as error:
            return error

    def _has_read(self, found: Step | Exception) -> None:
        if self.stop_thread is not None:
            self.stop_thread = None
            self.connection.attempt(self, self.plan, partial(self._take, found))
        else:  # the client has left meanwhile
            discard(self.payload)

    def _take(self, found: Step | Exception) -> None:
        """Submit the request after the step `found`, which sets what was read from its body. Raises `found` if it is an error."""
        if isinstance(found, Exception):
            raise found
        found()
        self.enter()

    def enter(self) -> None:
        """Put the request into the queue, as Exchange.put does. Raises what ModelHandle.submit raises."""
        self.head.service.submit(self, self.arrival)

    def leave(self) -> None:
        """Cancel the request."""
        stop, self.stop_thread = self.stop_thread, None
        if stop is None:
            self.head.service.cancel(self)
            return
        is_read = settle(self)
        if stop() and is_read:  # otherwise the thread has begun, and `_has_read` frees the payload
            discard(self.payload)

    def bytes_to_read(self) -> int:
        """Return how many bytes `reader` will read."""
        return len(self.payload)

    def reader(self) -> Callable[[], Step]:
        """Return a function that reads the body, in a thread if the body is long. It changes nothing, but returns a step that the event loop runs.

        Both the function and the step raise the WeirErrors that refuse the body.
        """
        return self._read_item

    def _read_item(self) -> Step:
        return partial(self._take_size, item_entry(self.head, self.payload))

    def _take_size(self, entry: QueueEntry) -> None:
        self.rows, self.cost, self.key, self.large = entry.rows, entry.cost, entry.key, entry.large

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Write the response."""
        connection = self.connection
        shared = connection.shared
        plan = self.plan
        if (
            type(output) is bytes
            and len(output) <= plan.plain_up_to
            and not shared.draining
            and dispatch.woken_at is None
        ):
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
        self._answer(self._error_answer(error))

    def _error_answer(self, error: BaseException) -> HttpResponse:
        if isinstance(error, WeirError):
            self.connection.shared.refused(self.head.service, error)
        return self.plan.handler.error_answer(error, self.head.service)

    def abandon(self) -> None:
        """Close the connection: the response could not be written, and a part of it may have been."""
        self.connection.abort()

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        head = self.head
        headers = [(b"content-type", self.plan.answer_type.encode("latin-1")), *start_headers(self.arrival, dispatch)]
        if head.explain:
            headers += explain_headers(self.arrival, dispatch)
        if isinstance(output, bytes) or self._is_compressed(len(output.view)):
            self._answer(HttpResponse(200, headers, output_body(head, output)))
        else:
            self._count(len(output.view))
            self.connection.answer_block(self.plan, headers + echo_headers(head) + trace_headers(self), output)

    def _is_compressed(self, size: int) -> bool:
        return bool(self.head.accept_coding) and size > self.connection.shared.settings.compress_above

    def _answer(self, answer: HttpResponse) -> None:
        answer.headers.extend(echo_headers(self.head))
        answer.headers.extend(trace_headers(self))
        if not self._is_compressed(len(answer.body)):
            self._write(answer)
        elif len(answer.body) <= LONG_COMPRESSION:
            self._write(compressed(answer, self.head.accept_coding))
        else:
            loop = asyncio.get_running_loop()
            compression = loop.run_in_executor(None, compressed, answer, self.head.accept_coding)
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

    def complete(self, plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
        """See RouteHandler."""
        head = self.read_head(http_head.method, path, http_head.headers)
        if head is None:
            return False
        if not http_head.length:
            if may_be_empty(head):
                return False
            raise empty_body(head)
        if not _is_hot(head):
            return False
        plan.head = head
        plan.answer_type = head.accept
        plan.in_arena = head.plain
        return True


def _is_hot(head: RequestHead) -> bool:
    """Return whether the fast path answers: not lists, tensors, compressed bodies, streams, and requests that are not one queue entry."""
    if head.batch or head.stream or head.coding or head.service.facts.takes_tensors:
        return False
    return inference_of(head.service).queues_items(head.service)
