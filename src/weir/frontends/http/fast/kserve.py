"""Inference on the fast path: no task, no future, and a JSON body goes to the worker undecoded.

Tensors that come as binary data lie where the body was received, in the arena; those that the answer has are sent from where the worker put them. Clients that send
tensors of one shape send the same header over and over: then the arrays are cut out of the body, and the header of the answer is written, as they were before.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weir.errors import InvalidRequest, WeirError
from weir.frontends.http.fast.native import HttpRequest, Step
from weir.messages import JSON, Dispatch, Kind
from weir.model import is_tensor_model
from weir.protocols.kserve.context import KserveContext
from weir.protocols.kserve.protocol import (
    ZLIB,
    InferAsk,
    KserveProtocol,
    KserveReply,
    Layout,
    inflated,
    layout_of,
    named_in,
    read_body,
    read_head,
    reply_to,
    size_to_read,
)
from weir.protocols.offloading import LONG_ANSWER, LONG_BODY, work_later
from weir.protocols.response import trace_headers
from weir.protocols.shared_memory import Memory
from weir.serving.delivery import discard, is_block
from weir.serving.generation import Generation
from weir.serving.hooks import HookedExecutor
from weir.serving.inference import QueueEntry, Schedule, arrays_size, as_work, response_of, schedule_of, works_of
from weir.serving.service import Service
from weir.wire.inference import ArenaArrays, InferenceRequest
from weir.wire.kserve_binary import binary_outputs, bytes_to_write, lead
from weir.wire.kserve_json import Body, BodyPeek, Outline
from weir.wire.tensors import Arrays
from weir.wire.values import SMALL_BODY

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import Head, RoutePlan


_log = logging.getLogger("weir.http")

_MAX_HEADER = 4 << 10  # bytes of JSON before binary tensors that are kept for when they come again


class KserveRequest(HttpRequest):
    """One request of `connection`. `asked` None: the worker reads the body and writes the answer."""

    __slots__ = ("asked", "layout", "memory")

    def __init__(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> None:
        super().__init__(connection, plan, payload)
        self.asked: InferenceRequest | None = None
        self.layout: Layout | None = None
        self.memory: Memory | None = None  # where outputs are wanted in regions

    def leave(self) -> None:
        """Withdraw it. What was read of it goes at once, though the batch that it is in may run on."""
        super().leave()
        self.asked = None

    def begin(self) -> None:
        """See HttpRequest. A small JSON body goes the shortest way; a body whose header has come before is not read again."""
        ask: InferAsk = self.ask
        if ask.small_json and not self.payload.startswith(ZLIB) and self._take_small():
            self.ask.service.submit(self, self.arrival)
            return
        layout = ask.layout
        if layout is not None and not layout.wants_regions:
            body = self._body()
            if memoryview(body)[: ask.header_length] == layout.header:
                self._take_layout(layout, body)
                self.ask.service.submit(self, self.arrival)
                return
        super().begin()

    def _take_small(self) -> bool:
        """Take from a small JSON body what the queue must know; tell whether the worker can read it."""
        try:
            found = self._undecoded(self.payload, self.ask.outline)
            if found is not None:
                self._take_outline(None, found)
        except WeirError as error:  # no service has been told of the request
            self.connection.shared.refused(self.ask.service, error)
            raise
        return found is not None

    def bytes_to_read(self) -> int:
        """See HttpRequest. Of tensors as binary data, other than BYTES, only the header is looked at."""
        ask: InferAsk = self.ask
        body, length = self._body(), ask.header_length
        if length is None:
            return size_to_read(body)
        if len(body) <= LONG_BODY:
            return len(body)
        header = bytes(body[:length])
        if length > LONG_BODY or b"BYTES" in header or b"\\" in header:  # an escape may stand for BYTES too
            return len(body)
        return length

    def reader(self) -> Callable[[], Step]:
        """See HttpRequest. Raises RequestErrors naming tensor, value and rule."""
        return partial(self._read_body, self._body())

    def _body(self) -> Body:
        body: Body = self.payload
        return body if type(body) is bytes else self.payload.view[self.ask.lead :]

    def _read_body(self, body: Body) -> Step:
        """Find out what the queue must know of the body."""
        ask: InferAsk = self.ask
        plain = body
        if ask.header_length is None:
            plain = inflated(body, self.connection.shared.settings.max_body_size)
            if ask.outline is not None and (found := self._undecoded(plain, ask.outline)) is not None:
                return partial(self._take_outline, None if plain is body else plain, found)
        memory = self._memory()
        asked = read_body(ask, plain, memory)
        memory.hold(asked)
        (work,) = works_of(ask.service, asked)
        return partial(self._take_read, plain, asked, memory, work, schedule_of(asked.parameters))

    def _undecoded(self, body: Body, outline: BodyPeek) -> Outline | None:
        """Return what the queue must know of a body that the worker can read; None if it cannot."""
        found = outline(body)
        return None if found.for_server or found.rows > self.ask.service.batching.max_batch_size else found

    def _take_outline(self, plain: Body | None, found: Outline) -> None:
        """`plain` is the body where it was compressed."""
        rows, key, parameters, _ = found
        if rows > 1:
            self.large = as_work(self.ask.service, None, Kind.ITEM, rows, float(rows), key).large
            self.rows, self.cost = rows, float(rows)
        self.key = key
        if parameters:
            wish = schedule_of(parameters)
            self.priority = wish.priority
            if wish.timeout is not None:
                self._expire_after(wish.timeout)
        if plain is not None:
            self.connection.charge(len(plain))
            self._take_over(plain)

    def _take_layout(self, layout: Layout, body: Body) -> None:
        self.layout = layout
        self.asked = layout.asked
        self.payload = self._with_block(layout.arrays(memoryview(body)))
        self._take_work(layout.work, layout.schedule)

    def _take_read(
        self, body: Body, asked: InferenceRequest, memory: Memory, work: QueueEntry, schedule: Schedule
    ) -> None:  # fmt: skip
        """Take a body that was decoded here."""
        self.asked, self.memory = asked, memory
        if self.ask.header_length is not None and is_tensor_model(self.ask.service.model):
            self.payload = self._with_block(work.payload)
            self._learn(body, asked, work, schedule)
        else:
            self.connection.charge(arrays_size(work.payload) or len(body))
            self._take_over(work.payload)
        self._take_work(work, schedule)

    def _memory(self) -> Memory:
        peer = self.connection.transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else None
        memory: Memory = self.plan.handler.context.memory(host, self.ask.headers)  # type: ignore[attr-defined]  # of HotKserve
        return memory

    def _learn(self, body: Body, asked: InferenceRequest, work: QueueEntry, schedule: Schedule) -> None:
        """Keep what the header means, if it has come before."""
        ask: InferAsk = self.ask
        if not 0 < (ask.header_length or 0) <= _MAX_HEADER or ask.service.needs_measure:
            return
        header = bytes(body[: ask.header_length])
        if header == ask.last_header:
            ask.layout = layout_of(header, len(body), asked, work, schedule)
        ask.last_header = header

    def _with_block(self, arrays: Arrays) -> Arrays:
        """Return `arrays`, which are views of the body, with the place that it is in."""
        return ArenaArrays(arrays, self.payload) if is_block(self.payload) else arrays

    def _take_work(self, work: QueueEntry, schedule: Schedule) -> None:
        self.kind, self.content_type, self.accept = work.kind, work.content_type, work.accept
        self.rows, self.cost, self.key, self.large = work.rows, work.cost, work.key, work.large
        self.priority = schedule.priority
        if schedule.timeout is not None:
            self._expire_after(schedule.timeout)

    def _expire_after(self, timeout: float) -> None:
        self.timeout = timeout
        self.deadline = self.arrival + timeout

    def _take_over(self, payload: Any) -> None:
        """Let `payload` stand for the one before, whose place is free then."""
        before, self.payload = self.payload, payload
        discard(before)

    def fail(self, error: BaseException) -> None:
        """Write the error, which clients do not decompress."""
        answer = self.plan.handler.error_answer(error, self.ask.service)
        answer.headers.extend(trace_headers(self))
        self._write(answer)

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        if self.asked is None:
            super()._finish_otherwise(output, dispatch)
            return
        try:
            reply = None if self.layout is None else self.layout.reply(output)
            reply = reply or self._reply(self.asked, output)
        except Exception as error:
            self._send(error)
        else:
            if reply is not None:
                self._send(reply)

    def _reply(self, asked: InferenceRequest, output: Any) -> KserveReply | None:
        """Return the answer, or None: it is being written in a thread."""
        response = response_of(self.ask.service, asked, [self.kind], [output])
        write = partial(reply_to, asked, response, self.memory or self._memory())
        size = bytes_to_write(response, binary_outputs(asked))
        if size > LONG_ANSWER:
            self.connection.charge(size)
            self.stop_thread = work_later(size, write, self._has_written, writes=True)
            return None
        reply = write()
        if self.layout is not None:
            self.layout.remember(output, response, reply)
        return reply

    def _has_written(self, found: KserveReply | Exception) -> None:
        if self.stop_thread is not None:  # else the caller has left meanwhile
            self.stop_thread = None
            self._send(found)

    def _send(self, reply: KserveReply | Exception) -> None:
        if isinstance(reply, Exception):
            if not isinstance(reply, WeirError):
                _log.error("an answer of %s cannot be written", self.ask.service.label, exc_info=reply)
            self.fail(reply)
            return
        size = sum(map(len, reply.parts))
        if self._is_compressed(size):
            self._answer(reply.as_answer())
        else:
            self._count(size)
            self.connection.answer_parts(self.plan, reply.headers + trace_headers(self), reply.parts)


class HotKserve(KserveProtocol):
    """The RouteHandler of POST /v2/models/{model}[/versions/{version}]/infer; see fastlane/plan.py."""

    request = KserveRequest
    of_service = True

    def __init__(self, context: KserveContext) -> None:
        super().__init__(context)
        self._outliners: WeakKeyDictionary[Generation, BodyPeek] = WeakKeyDictionary()

    def complete(self, plan: "RoutePlan", head: "Head", path: str) -> bool:
        """See RouteHandler. Compressed bodies, and requests that are not one entry of the queue, are for the ASGI application."""
        named = named_in(path)
        if named is None or named[2] != "infer":
            return False
        ask = read_head(self.context.registry, self.context.http, head.method, path, head.headers)
        if ask is None:
            return False
        if not head.length:
            raise InvalidRequest("body: is empty, must be an inference request")
        tensors = is_tensor_model(ask.service.model)
        if ask.coding or not ask.service.inference.queues_tensors(ask.service):
            return False
        ask.outline = self._outliner(ask.service) if tensors and not ask.service.needs_measure else None
        ask.small_json = ask.outline is not None and ask.header_length is None and head.length <= SMALL_BODY
        ask.lead = lead(ask.header_length) if ask.header_length else 0
        plan.ask = ask
        plan.answer_type = JSON
        plan.in_arena = tensors
        plan.lead = ask.lead
        return True

    def _outliner(self, service: Service) -> BodyPeek | None:
        """Return what reads the outlines of JSON bodies; None if a hook of the service wants to see the tensors."""
        if isinstance(service.executor, HookedExecutor):
            return None
        outliner = self._outliners.get(service.generation)
        if outliner is None:
            outliner = self._outliners[service.generation] = BodyPeek(service.model.inputs)
        return outliner
