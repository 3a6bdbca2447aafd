"""Requests on the fast path, without a task and without a future: of Weir's own protocol, and of the Open Inference Protocol.

Each writes its own response to the connection. A JSON body goes to the worker undecoded. Binary tensors stay where the body was received, in
the arena, and the tensors of the response are sent from where the worker put them. Clients that send tensors of one shape repeat the same
JSON header. Its parsed form is kept as a Layout, so that neither this header nor that of the response is made again.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weir.batching.request_state import NEW, RequestBase, settle
from weir.errors import InvalidRequest, ModelError, WeirError
from weir.frontends.http.fast.plan import HotHead, HttpHead, RoutePlan
from weir.messages import JSON, Dispatch, Form
from weir.protocols.account import charge_values
from weir.protocols.call import ChannelCall
from weir.protocols.entries import (
    QueueEntry,
    arrays_size,
    empty_body,
    entries_of,
    item_entry,
    may_be_empty,
    output_body,
    response_of,
    schedule_of,
)
from weir.protocols.exchange import inference_of
from weir.protocols.kserve import (
    ZLIB,
    KserveContext,
    KserveHead,
    KserveProtocol,
    KserveReply,
    Layout,
    Memory,
    inflated,
    layout_of,
    named_in,
    read_body,
    read_head,
    reply_to,
    size_to_read,
)
from weir.protocols.native import NativeProtocol, RequestHead
from weir.protocols.offloading import LONG_BODY, LONG_RESPONSE, HeadMemo, work_later
from weir.protocols.response import (
    LONG_COMPRESSION,
    HttpResponse,
    compressed,
    echo_headers,
    explain_headers,
    start_headers,
    trace_headers,
)
from weir.serving.handle import ModelFacts, ModelHandle
from weir.wire.inference import HEAD, ArenaArrays, InferenceRequest, Parameters
from weir.wire.kserve_binary import binary_outputs, bytes_to_write, lead, may_have_texts
from weir.wire.kserve_json import Body, BodyPeek, Outline
from weir.wire.tensors import Arrays
from weir.wire.values import SMALL_BODY, objects_bytes
from weir.workers.executor import discard, is_block

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import HttpHead, RoutePlan

_log = logging.getLogger("weir.http")

Step = Callable[[], None]


class HttpRequest(RequestBase, ChannelCall):
    """One request of `connection`. The Open Inference Protocol derives its own from it."""

    __slots__ = ("_stop", "connection", "head", "number", "over", "plan")

    head: Any  # as its protocol reads it
    number: int  # of a request that another process queues

    def __init__(self, connection: "Connection", plan: RoutePlan, payload: Any) -> None:
        # The constructors inlined: they run once per request. A test compares what this one and they set.
        head: HotHead = plan.head
        self.form = form = head.form
        self.payload = payload
        self.arrival = now = head.service.now()
        self.deadline = now + form.timeout
        self.trace = head.carrier
        self.large = False
        self.settled, self.taken, self.overtaken, self.partial = NEW
        self.connection = connection
        self.plan = plan
        self.head = head
        self.over = False
        self._stop = None  # set while a thread reads its body or writes its response

    def begin(self) -> None:
        """Read the body, in a thread if it is long, and put the request into the queue. Raises the WeirError that refuses it."""
        if (size := self.bytes_to_read()) <= LONG_BODY:
            self.reader()()()
        else:
            self._stop = work_later(size, self.reader(), self.after(call), account=self.connection.shared.account)

    def enter(self) -> None:
        """Put the request into the queue, as Exchange.put does. Raises what ModelHandle.submit raises."""
        self.head.service.submit(self, self.arrival)

    def leave(self) -> None:
        """Cancel the request."""
        if self._stop is None:
            self.head.service.cancel(self)
        else:
            super().leave()

    def release(self) -> None:
        """Free the body, unless the queue has had the request."""
        if settle(self):
            discard(self.payload)

    def report(self, error: Exception) -> None:
        """Log `error` unless it is one that callers are to expect."""
        if not isinstance(error, WeirError):
            what = "a request for %s cannot be read, or its response cannot be written"
            _log.error(what, self.head.service.facts.label, exc_info=error)

    def bytes_to_read(self) -> int:
        """Return how many bytes `reader` will read."""
        return len(self.payload)

    def reader(self) -> Callable[[], Step]:
        """Return a function that reads the body, in a thread if the body is long. It changes nothing, but returns the step that the event loop takes next.

        Both the function and the step raise the WeirErrors that refuse the body.
        """
        return self._read_item

    def _read_item(self) -> Step:
        return partial(self.enter_as, item_entry(self.head, self.payload).form)

    def enter_as(self, form: Form) -> None:
        """Put the request into the queue with the form that was read from its body. Raises what ModelHandle.submit raises."""
        self.form = form
        self.deadline = self.arrival + form.timeout
        self.enter()

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
            head = shared.heads.plain.get(plan.response_type) or shared.heads.plain_head(plan.response_type)
            connection.transport.write(b"%b%d\r\n\r\n%b" % (head, len(output), output))
            tally = plan.tally
            tally.received += plan.length
            tally.sent += len(output)
            connection.request_ended()
            return
        try:
            self._finish_otherwise(output, dispatch)
        except WeirError as error:
            dispatch.refuse(self, error)
            self.end(error)

    def end(self, error: Exception) -> None:
        """See ChannelCall. The observers know an end of what was in the queue."""
        if self.settled and isinstance(error, WeirError):
            error.reported = error.reported or not isinstance(error, ModelError)
        super().end(error)

    def fail(self, error: Exception) -> None:
        """Write the error."""
        self._send_response(self._error_response(error))

    def pass_on(self) -> None:
        """Have another process of the server respond."""
        self.connection.hand_over(self.plan, self.received())
        self.release()

    def received(self) -> bytes:
        """Return the body as it came."""
        return self.bytes_of(self.payload)

    def bytes_of(self, body: Any) -> bytes:
        """Return what `body` has of the request: all of it, or a Block behind the plan's lead."""
        return body if type(body) is bytes else bytes(body.view[self.plan.lead :])

    def _error_response(self, error: BaseException) -> HttpResponse:
        if isinstance(error, WeirError):
            self.connection.shared.refused(self.head.service, error)
        return self.plan.handler.error_response(error, self.head.service)

    def abandon(self) -> None:
        """Close the connection: the response could not be written, and a part of it may have been."""
        self.connection.abort()

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        if type(output) is bytes:
            self.charge_response(len(output))
        head = self.head
        headers = [(b"content-type", self.plan.response_type.encode("latin-1")), *start_headers(self.arrival, dispatch)]
        if self.form.explain:
            headers += explain_headers(self.arrival, dispatch)
        if isinstance(output, bytes) or self._is_compressed(len(output.view)):
            self._send_response(HttpResponse(200, headers, output_body(head, output)))
        else:
            self._count(len(output.view))
            self.connection.respond_block(self.plan, headers + echo_headers(head) + trace_headers(self), output)

    def charge_response(self, size: int) -> None:
        """Charge a response of `size` bytes, if that is long, until it is written: what its client does not read is charged from then on. Raises what
        Account.take raises."""
        if size > LONG_RESPONSE:
            self.connection.charge(size)

    def _is_compressed(self, size: int) -> bool:
        return bool(self.head.accept_coding) and size > self.connection.shared.settings.compress_above

    def _send_response(self, response: HttpResponse) -> None:
        response.headers.extend(echo_headers(self.head))
        response.headers.extend(trace_headers(self))
        if not self._is_compressed(len(response.body)):
            self._write(response)
        elif len(response.body) <= LONG_COMPRESSION:
            self._write(compressed(response, self.head.accept_coding))
        else:
            loop = asyncio.get_running_loop()
            compression = loop.run_in_executor(None, compressed, response, self.head.accept_coding)
            compression.add_done_callback(lambda done: self._write(done.result()))

    def _write(self, response: HttpResponse) -> None:
        self._count(len(response.body))
        self.connection.respond(self.plan, response)

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
        plan.response_type = head.form.accept
        plan.in_arena = plan.undecoded = head.undecoded
        return True


def _is_hot(head: RequestHead) -> bool:
    """Return whether the fast path answers: not lists, tensors, compressed bodies, streams, and requests that are not one queue entry."""
    if head.batch or head.stream or head.coding or head.service.facts.takes_tensors:
        return False
    return inference_of(head.service).queues_items(head.service)


_MAX_HEADER = 4 << 10  # bytes: a longer JSON header before binary tensors gets no Layout
_MAX_LAYOUTS = 4  # of requests with the same HTTP head, such as those of a client that sends tensors of several shapes


class KserveRequest(HttpRequest):
    """One request of `connection`. If `inference_request` is None, the worker reads the body and writes the response."""

    __slots__ = ("dispatch", "inference_request", "layout", "memory")

    def __init__(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> None:
        super().__init__(connection, plan, payload)
        self.inference_request: InferenceRequest | None = None
        self.layout: Layout | None = None
        self.dispatch: Dispatch | None = None  # the batch that answered it
        self.memory: Memory | None = None  # for outputs in regions of shared memory

    def leave(self) -> None:
        """Cancel the request. What was read of it is freed at once, though its batch may still run."""
        super().leave()
        self.inference_request = None

    def begin(self) -> None:
        """See HttpRequest. There are short cuts for a small JSON body, and for a body whose header is that of the Layout."""
        head: KserveHead = self.head
        if head.small_json and not self.payload.startswith(ZLIB) and self._enters_small():
            return
        if head.layouts is not None:
            body = self._body()
            layout = head.layouts.find(bytes(memoryview(body)[: head.header_length]))
            if layout is not None and not layout.wants_regions:
                self._enter_layout(layout, body)
                return
        super().begin()

    def _enters_small(self) -> bool:
        """Enter the queue with the rows, the batch key and the parameters of a small JSON body. Return False, with nothing done, if the worker cannot read it."""
        found = self.undecoded(self.payload, self.head.outline)
        if found is not None:
            self.enter_outline(None, found)
        return found is not None

    def bytes_to_read(self) -> int:
        """See HttpRequest. Of binary tensors other than BYTES only the header is read."""
        head: KserveHead = self.head
        body, length = self._body(), head.header_length
        if length is None:
            return size_to_read(body)
        if len(body) <= LONG_BODY:
            return len(body)
        header = bytes(body[:length])
        if length > LONG_BODY or may_have_texts(header):
            return len(body)
        return length

    def reader(self) -> Callable[[], Step]:
        """See HttpRequest. Raises RequestErrors naming tensor, value and rule."""
        return partial(self.read_body, self._body())

    def _body(self) -> Body:
        body: Body = self.payload
        return body if type(body) is bytes else self.payload.view[self.head.lead :]

    def read_body(self, body: Body) -> Step:
        """Read the body as far as the queue must know it. Return the step that enters the queue with what was read."""
        head: KserveHead = self.head
        plain = body
        if head.header_length is None:
            plain = inflated(body, self.connection.shared.settings.max_body_size)
            if head.outline is not None:
                charge_values(len(plain), lambda: objects_bytes(bytes(plain)))
                if (found := self.undecoded(plain, head.outline)) is not None:
                    return partial(self.enter_outline, None if plain is body else plain, found)
        return self.read_tensors(plain)

    def read_tensors(self, plain: Body) -> Step:
        """Read a decompressed body whose tensors are decoded in this process. Return the step that enters the queue with them."""
        head: KserveHead = self.head
        memory = self._memory()
        request = read_body(head, plain, memory)
        memory.hold(request)
        (entry,) = entries_of(head.service, request, self._scheduled(request.parameters))
        return partial(self._enter_read, plain, request, memory, entry)

    def _scheduled(self, parameters: Parameters, offset: int = 0) -> Form:
        """Return the form of a request with these parameters; `offset` is the part of its priority that they do not state."""
        form: Form = self.head.form
        schedule = schedule_of(parameters, self.head.service.facts.model)
        priority = schedule.priority + offset
        if schedule.timeout is None and priority == form.priority:
            return form
        return form.replaced(priority=priority, timeout=schedule.timeout or form.timeout)

    def undecoded(self, body: Body, outline: BodyPeek) -> Outline | None:
        """Return the rows, batch key and parameters of a `body` that the worker can read; None if it cannot."""
        found = outline(body)
        return None if found.for_server or found.rows > self.head.service.facts.batching.max_batch_size else found

    def enter_outline(self, plain: Body | None, found: Outline) -> None:
        """Enter the queue with what the outline says. `plain` is the decompressed body, if it was compressed."""
        if plain is not None:
            self.connection.charge(len(plain))
            self._take_over(plain)
        self.enter_as(self._outlined(found))

    def _outlined(self, found: Outline) -> Form:
        """Return the form of a request with this outline. Requests with one head mostly have one outline."""
        head: KserveHead = self.head
        if head.outlined is not None and head.outlined[:3] == found[:3]:
            return head.outlined[3]
        form = self._scheduled(found.parameters, head.class_offset).replaced(
            rows=found.rows, cost=float(found.rows), key=found.key
        )
        head.outlined = (*found[:3], form)
        return form

    def _enter_layout(self, layout: Layout, body: Body) -> None:
        self.layout = layout
        self.inference_request = layout.request
        self.payload = self._with_block(layout.arrays(memoryview(body)))
        self.enter_as(layout.form)

    def _enter_read(self, body: Body, request: InferenceRequest, memory: Memory, entry: QueueEntry) -> None:
        """Enter the queue with what was read from a body that is decoded in this process."""
        self.inference_request, self.memory = request, memory
        if self.head.header_length is not None and self.head.service.facts.takes_tensors:
            self.payload = self._with_block(entry.payload)
            self._learn(body, request, entry)
        else:
            self.connection.charge(arrays_size(entry.payload) or len(body))
            self._take_over(entry.payload)
        self.enter_as(entry.form)

    def _memory(self) -> Memory:
        peer = self.connection.transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else None
        memory: Memory = self.plan.handler.context.memory(host, self.head.headers)  # type: ignore[attr-defined]  # of HotKserve
        return memory

    def _learn(self, body: Body, request: InferenceRequest, entry: QueueEntry) -> None:
        """Remember the Layout of the header, if it can be used again."""
        head: KserveHead = self.head
        if head.layouts is not None and HEAD not in entry.payload:
            header = bytes(body[: head.header_length])
            if (layout := layout_of(header, len(body), request, entry)) is not None:
                head.layouts.offer(header, layout)

    def _with_block(self, arrays: Arrays) -> Arrays:
        """Return `arrays`, which are views of the body, together with the block of the arena that holds the body."""
        return ArenaArrays(arrays, self.payload) if is_block(self.payload) else arrays

    def _take_over(self, payload: Any) -> None:
        """Replace the payload, and free the previous one."""
        before, self.payload = self.payload, payload
        discard(before)

    def fail(self, error: Exception) -> None:
        """Write the error, uncompressed: clients of the protocol do not decompress errors."""
        response = self._error_response(error)
        response.headers.extend(trace_headers(self))
        self._write(response)

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        if self.inference_request is None:
            super()._finish_otherwise(output, dispatch)
            return
        self.dispatch = dispatch
        try:
            waited = dispatch.started_for(self.arrival)
            reply = None if self.layout is None or waited else self.layout.reply(output)
            reply = reply or self._reply(self.inference_request, output, waited)
        except WeirError:
            raise
        except Exception as error:
            self.end(error)
        else:
            if reply is not None:
                self._send(reply, is_charged=False)

    def _reply(self, request: InferenceRequest, output: Any, waited: float) -> KserveReply | None:
        """Return the reply; None if a thread writes it, because it is long."""
        response = response_of(self.head.service, request, [self.form.kind], [output], waited)
        write = partial(reply_to, request, response, self.memory or self._memory())
        size = bytes_to_write(response, binary_outputs(request))
        if size > LONG_RESPONSE:
            self.connection.charge(size)
            account = self.connection.shared.account
            self._stop = work_later(size, write, self.after(self._send), account=account, writes=True)
            return None
        reply = write()
        if self.layout is not None and not waited:
            self.layout.remember(output, response, reply)
        return reply

    def report(self, error: Exception) -> None:
        """See HttpRequest."""
        self.memory = self.dispatch = None
        super().report(error)

    def _send(self, reply: KserveReply, *, is_charged: bool = True) -> None:
        # The connection may keep this request for long. Regions are closed now, and the batch, which refers to its requests, is freed.
        self.memory = None
        dispatch, self.dispatch = self.dispatch, None
        size = sum(map(len, reply.parts))
        if not is_charged:
            self.charge_response(size)
        headers = [*reply.headers, *start_headers(self.arrival, dispatch)]  # the layout keeps those of the reply
        if self._is_compressed(size):
            self._send_response(HttpResponse(200, headers, b"".join(reply.parts)))
        else:
            self._count(size)
            self.connection.respond_parts(self.plan, headers + trace_headers(self), reply.parts)


class HotKserve(KserveProtocol):
    """The RouteHandler (see plan.py) of POST /v2/models/{model}[/versions/{version}]/infer."""

    request = KserveRequest
    of_service = True

    def __init__(self, context: KserveContext) -> None:
        super().__init__(context)
        self._outliners: WeakKeyDictionary[ModelFacts, BodyPeek] = WeakKeyDictionary()

    def complete(self, plan: "RoutePlan", http_head: "HttpHead", path: str) -> bool:
        """See RouteHandler. The ASGI application answers compressed bodies and requests that are not one queue entry."""
        named = named_in(path)
        if named is None or named[2] != "infer":
            return False
        head = read_head(self.context.registry, self.context.http, http_head.method, path, http_head.headers)
        if head is None:
            return False
        if not http_head.length:
            raise InvalidRequest("body: is empty, must be an inference request")
        tensors = head.service.facts.takes_tensors
        if head.coding or not inference_of(head.service).queues_tensors(head.service):
            return False
        head.outline = self._outliner(head.service) if tensors and not head.service.facts.needs_measure else None
        head.small_json = head.outline is not None and head.header_length is None and http_head.length <= SMALL_BODY
        if head.header_length:
            head.lead = lead(head.header_length)
            if head.header_length <= _MAX_HEADER and not head.service.facts.needs_measure:
                head.layouts = HeadMemo(max_entries=_MAX_LAYOUTS, max_seen=64)
        plan.head = head
        plan.response_type = JSON
        plan.in_arena = tensors
        plan.lead = head.lead
        return True

    def _outliner(self, service: ModelHandle) -> BodyPeek | None:
        """Return the reader of outlines of JSON bodies. None if workers cannot write the responses."""
        if not service.facts.writes_bodies:
            return None
        outliner = self._outliners.get(service.facts)
        if outliner is None:
            outliner = self._outliners[service.facts] = BodyPeek(service.facts.model.inputs)
        return outliner
