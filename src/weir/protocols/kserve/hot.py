"""Inference on the fast lane: no task, no future, and a JSON body goes to the worker undecoded.

Tensors that come as binary data lie where the body was received, in the arena; those that the answer has are sent from
where the worker put them.
"""

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weir.errors import InvalidRequest, WeirError
from weir.manager.delivery import discard, is_block
from weir.manager.hooks import HookedExecutor
from weir.manager.service import Service
from weir.messages import JSON, Dispatch, Kind
from weir.model import is_tensor_model
from weir.protocols.account import arrays_size
from weir.protocols.answers import Answer, trace_headers
from weir.protocols.contents import Schedule, response_of, schedule_of, works_of
from weir.protocols.fastlane.request import HttpRequest
from weir.protocols.inferring import find
from weir.protocols.kserve.bodies import FOR_THE_DOOR, inflated, read_body
from weir.protocols.kserve.heads import InferAsk, named_in, read_head
from weir.protocols.kserve.layouts import Layout, layout_of
from weir.protocols.kserve.replies import Reply, error_answer, reply_to
from weir.protocols.kserve.site import Site
from weir.protocols.payloads import Work, as_work
from weir.protocols.regions import Memory
from weir.wire.inference import ArenaArrays, InferenceRequest
from weir.wire.kserve_binary import lead
from weir.wire.kserve_json import Body
from weir.wire.kserve_outline import Outliner
from weir.wire.tensors import Arrays

if TYPE_CHECKING:
    from weir.protocols.fastlane.connection import Connection
    from weir.protocols.fastlane.head import Head
    from weir.protocols.fastlane.plan import Plan


_log = logging.getLogger("weir.http")

_MAX_HEADER = 4 << 10  # bytes of JSON before binary tensors that are kept for when they come again


class KserveRequest(HttpRequest):
    """One request of `connection`. `asked` None: the worker reads the body and writes the answer."""

    __slots__ = ("asked", "layout")

    def __init__(self, connection: "Connection", plan: "Plan", payload: Any) -> None:
        super().__init__(connection, plan, payload)
        self.asked: InferenceRequest | None = None
        self.layout: Layout | None = None

    def measure(self) -> None:
        """Find out what the line must know of the body. Raises RequestErrors naming tensor, value and rule."""
        ask: InferAsk = self.ask
        body: Body = self.payload
        if type(body) is not bytes:
            body = self.payload.view[ask.lead :]
        if ask.header_length is None:
            plain = inflated(body, self.connection.lane.settings.max_body_size)
            if plain is not body:
                self.connection.charge(len(plain))
                self._take_over(plain)
                body = plain
            if ask.outline is not None and self._goes_undecoded(body, ask.outline):
                return
        elif ask.layout is not None and self._is_laid_out(body, ask.layout):
            return
        self._read(body)

    def _goes_undecoded(self, body: Body, outline: Outliner) -> bool:
        """Take from the body what the line must know; tell whether the worker can do the rest."""
        rows, key, parameters, for_server = outline(body)
        service = self.ask.service
        if for_server or rows > service.batching.max_batch_size or FOR_THE_DOOR.search(body) is not None:
            return False
        if rows > 1:
            self.large = as_work(service, None, Kind.ITEM, rows, float(rows), key).large
            self.rows, self.cost = rows, float(rows)
        self.key = key
        if parameters:
            wish = schedule_of(parameters)
            self.priority = wish.priority
            if wish.timeout is not None:
                self._expire_after(wish.timeout)
        return True

    def _is_laid_out(self, body: Body, layout: Layout) -> bool:
        """Tell whether the body begins with the header that `layout` knows; if so, take it from there."""
        view = memoryview(body)
        if view[: self.ask.header_length] != layout.header:
            return False
        self.layout = layout
        self.asked = layout.asked
        self.payload = self._with_block(layout.arrays(view))
        self._take(layout.work, layout.schedule)
        return True

    def _read(self, body: Body) -> None:
        """Decode the body here."""
        self.asked = asked = read_body(self.ask, body, self._memory())
        (work,) = works_of(self.ask.service, asked)
        schedule = schedule_of(asked.parameters)
        if self.ask.header_length is not None and is_tensor_model(self.ask.service.model):
            self.payload = self._with_block(work.payload)
            self._learn(body, asked, work, schedule)
        else:
            self.connection.charge(arrays_size(work.payload) or len(body))
            self._take_over(work.payload)
        self._take(work, schedule)

    def _memory(self) -> Memory:
        peer = self.connection.transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else None
        memory: Memory = self.plan.manner.site.memory(host, self.ask.headers)  # type: ignore[attr-defined]  # of HotKserve
        return memory

    def _learn(self, body: Body, asked: InferenceRequest, work: Work, schedule: Schedule) -> None:
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

    def _take(self, work: Work, schedule: Schedule) -> None:
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
        answer = self.plan.manner.error_answer(error, self.ask.service)
        answer.headers.extend(trace_headers(self))
        self._write(answer)

    def _finish_otherwise(self, output: Any, dispatch: Dispatch) -> None:
        if self.asked is None:
            super()._finish_otherwise(output, dispatch)
            return
        try:
            reply = None if self.layout is None else self.layout.reply(output)
            if reply is None:
                reply = self._reply(self.asked, output)
        except Exception as error:
            if not isinstance(error, WeirError):
                _log.exception("an answer of %s cannot be written", self.ask.service.label)
            self.fail(error)
        else:
            self._send(reply)

    def _reply(self, asked: InferenceRequest, output: Any) -> Reply:
        response = response_of(self.ask.service, asked, [self.kind], [output])
        reply = reply_to(asked, response, self._memory())
        if self.layout is not None:
            self.layout.remember(output, response, reply)
        return reply

    def _send(self, reply: Reply) -> None:
        size = sum(map(len, reply.parts))
        if self._is_compressed(size):
            self._answer(reply.as_answer())
        else:
            self._count(size)
            self.connection.answer_parts(self.plan, reply.headers + trace_headers(self), reply.parts)


class HotKserve:
    """The Manner of POST /v2/models/{model}[/versions/{version}]/infer; see fastlane/plan.py."""

    request = KserveRequest
    of_service = True
    prefix = b"/v2"

    def __init__(self, site: Site) -> None:
        self.site = site
        self._outliners: WeakKeyDictionary[Service, Outliner] = WeakKeyDictionary()

    def complete(self, plan: "Plan", head: "Head", path: str) -> bool:
        """See Manner. Compressed bodies, items that differ in size and what a deputy answers are for the ASGI application."""
        site = self.site
        ask = read_head(site.registry, site.http, head.method, path, head.headers)
        if ask is None:
            return False
        if not head.length:
            raise InvalidRequest("body: is empty, must be an inference request")
        tensors = is_tensor_model(ask.service.model)
        if ask.coding or ask.service.deputy is not None or (ask.service.needs_measure and not tensors):
            return False
        ask.outline = self._outliner(ask.service) if tensors and not ask.service.needs_measure else None
        ask.lead = lead(ask.header_length) if ask.header_length else 0
        plan.ask = ask
        plan.answer_type = JSON
        plan.in_arena = tensors
        plan.lead = ask.lead
        return True

    def named(self, path: str) -> Service | None:
        """See Manner."""
        named = named_in(path)
        try:
            return None if named is None else find(self.site.registry, *named)
        except WeirError:
            return None

    def error_answer(self, error: BaseException, service: Service | None) -> Answer:
        """See Manner."""
        return error_answer(error, development=self.site.http.development)

    def _outliner(self, service: Service) -> Outliner | None:
        """Return what reads the outlines of JSON bodies; None if a hook of the service wants to see the tensors."""
        if isinstance(service.executor, HookedExecutor):
            return None
        outliner = self._outliners.get(service)
        if outliner is None:
            outliner = self._outliners[service] = Outliner(service.model.inputs)
        return outliner
