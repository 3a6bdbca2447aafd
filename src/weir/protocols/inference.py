"""The inference routes of the ASGI application; an ASGI server reads and writes the bytes."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import TooLarge, WeirError
from weir.protocols.account import arrays_size, charge
from weir.protocols.asgi_request import AsgiRequest, abandon, submit
from weir.protocols.asgi_stream import enter_stream, stream_source
from weir.protocols.bodies import Body, disconnected, has_large_body, unless_left, unpacked
from weir.protocols.events import EventStream
from weir.protocols.kserve_inference import told
from weir.protocols.native import DOOR, RequestHead, find_service, head_size, read_ask
from weir.protocols.offloading import LONG_ANSWER, LONG_BODY, off_loop, written
from weir.protocols.payloads import QueueEntry, bytes_to_read, empty_body, read_work
from weir.protocols.response import (
    HttpResponse,
    answer_of,
    compressed,
    echo_headers,
    error_answer,
    tensors_body,
    trace_headers,
)  # fmt: skip
from weir.protocols.sending import inner_path, send_answer, send_early
from weir.protocols.settings import HttpSettings
from weir.protocols.status import HEAD_TOO_LARGE
from weir.telemetry.tracecontext import CURRENT, HEADER
from weir.wire.elements import text_size

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.serving.service import Service

_log = logging.getLogger("weir.http")
_LONG_WORK = 262144  # bytes whose compression would keep the event loop for too long


class Inference:
    """ASGI middleware that answers the inference routes of `registry` and leaves the rest to `app`."""

    def __init__(self, app: ASGIApp, registry: "Registry", settings: HttpSettings) -> None:
        self._app = app
        self._registry = registry
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A client that leaves has its request cancelled, and gets nothing."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = inner_path(scope)
        if head_size(scope["headers"]) > self._settings.max_header_size:
            limit = self._settings.max_header_size
            error = TooLarge(f"head: must be at most {limit} bytes (max_header_size)")
            refusal = self._error(error, None)._replace(status=HEAD_TOO_LARGE)
            return await self._send_early(scope, receive, send, refusal, closing=True)
        try:
            ask = read_ask(self._registry, self._settings, scope["method"], path, scope["headers"])
        except WeirError as error:
            refusal = self._refusal(error, self._named(path))
            return await self._send_early(scope, receive, send, refusal, closing=has_large_body(scope))
        if ask is None:
            return await self._app(scope, receive, send)
        incoming = Body(receive)
        try:
            body = await incoming.read(self._settings.max_body_size, self._settings.body_timeout)
        except WeirError as error:
            refusal = self._refusal(error, ask.service)
            return await self._send_early(scope, receive, send, refusal, closing=incoming.unread)
        if body is None:
            return
        answer = await (
            self._stream(ask, body, receive, send) if ask.stream else self._answer(ask, body, scope, receive)
        )
        if answer is not None:
            await send_answer(send, answer)

    async def _stream(self, ask: RequestHead, body: bytes, receive: Receive, send: Send) -> HttpResponse | None:
        """Send the answers to `ask` as a stream of events, or return the answer that refuses it."""
        works = await self._read(ask, body, receive)
        if works is None or isinstance(works, HttpResponse):
            return works
        try:
            request = enter_stream(ask, works)
        except WeirError as error:  # the service told the observers
            return self._error(error, ask.service)
        try:
            source = stream_source(ask, request, development=self._settings.development)
            events = EventStream(source, receive, send, self._settings.stream_keep_alive)
            await events.run()
        finally:
            request.close()
        for observer in ask.service.observers:
            observer.transferred(ask.service.label, DOOR, len(body), events.sent_bytes)
        return None

    async def _answer(self, ask: RequestHead, body: bytes, scope: Scope, receive: Receive) -> HttpResponse | None:
        """Return the answer to `ask`, or None if the client has left."""
        if ask.service.deputy is not None:
            answer = await self._by_deputy(ask, body, scope, receive)
        else:
            works = await self._read(ask, body, receive)
            answer = await self._run(ask, works, receive) if isinstance(works, list) else works
        if answer is None:
            return None
        answer.headers.extend(echo_headers(ask))
        if ask.accept_coding and len(answer.body) > self._settings.compress_above:
            answer = await _compressed(answer, ask.accept_coding)
        try:
            charge(len(answer.body))
        except WeirError as error:
            return self._refusal(error, ask.service)
        for observer in ask.service.observers:
            observer.transferred(ask.service.label, DOOR, len(body), len(answer.body))
        return answer

    async def _read(
        self, ask: RequestHead, body: bytes, receive: Receive
    ) -> list[QueueEntry | WeirError] | HttpResponse | None:
        """Return the work in `body`, or the answer that refuses it; None if the client leaves before it is read."""
        reading = self._works(ask, body)
        try:
            if ask.coding or bytes_to_read(ask, body) > LONG_BODY:
                return await unless_left(reading, receive)
            return await reading
        except WeirError as error:
            return self._refusal(error, ask.service)

    async def _works(self, ask: RequestHead, body: bytes) -> list[QueueEntry | WeirError]:
        plain = await self._inflated(ask, body)
        works = await off_loop(bytes_to_read(ask, plain), partial(read_work, ask, plain))
        charge(sum([arrays_size(work.payload) for work in works if isinstance(work, QueueEntry)]))
        return works

    async def _by_deputy(self, ask: RequestHead, body: bytes, scope: Scope, receive: Receive) -> HttpResponse | None:
        try:
            plain = await unless_left(self._inflated(ask, body), receive) if ask.coding else body
            if plain is None:
                return None
            if not plain:
                raise empty_body(ask)
        except WeirError as error:
            return self._refusal(error, ask.service)
        trace = None if ask.service.tracing is None else ask.service.tracing.new(ask.traceparent)
        CURRENT.set(trace)
        try:
            answer: HttpResponse | None = await ask.service.deputy.answer(ask, plain, scope, receive, trace)
        except Exception as error:
            _log.exception("an answer of %s cannot be written", ask.service.name)
            answer = self._error(error, ask.service)
        if answer is not None and trace is not None:
            answer.headers.append((HEADER.encode(), trace.traceparent.encode()))
        return answer

    async def _inflated(self, ask: RequestHead, body: bytes) -> bytes:
        if not ask.coding:
            return body
        return await unpacked(body, ask.coding, self._settings.max_body_size, ask.timeout)

    async def _run(
        self, ask: RequestHead, works: list[QueueEntry | WeirError], receive: Receive
    ) -> HttpResponse | None:
        try:
            requests = await _ended(ask, works, receive)
            if requests is None:
                return None
            await _write_tensors(ask, requests)
            answer = answer_of(ask, requests, development=self._settings.development)
            answer.headers.extend(trace_headers(requests[0]) if requests else [])
            return answer
        except WeirError as error:  # the service told the observers
            return self._error(error, ask.service)
        except Exception as error:
            _log.exception("an answer of %s cannot be written", ask.service.name)
            return self._error(error, ask.service)

    async def _send_early(
        self, scope: Scope, receive: Receive, send: Send, answer: HttpResponse, *, closing: bool
    ) -> None:
        within = self._settings.body_timeout
        await send_early(scope, receive, send, answer, closing=closing, within=within)

    def _named(self, path: str) -> "Service | None":
        try:
            found = find_service(self._registry, path)
        except WeirError:
            return None
        return found[0] if found else None

    def _refusal(self, error: WeirError, service: "Service | None") -> HttpResponse:
        if service is not None:
            told(service, DOOR, error)
        return self._error(error, service)

    def _error(self, error: Exception, service: "Service | None") -> HttpResponse:
        return error_answer(
            error, service.name if service is not None else None, development=self._settings.development
        )


async def _ended(
    ask: RequestHead, works: list[QueueEntry | WeirError], receive: Receive
) -> Sequence[AsgiRequest] | None:
    """Run `works` and return their requests when all have ended; None, and nothing goes on, if the client leaves.

    `works` is empty afterwards: each request has its payload, and lets go of it at its own end.
    """
    requests, countdown = submit(ask, works)
    works.clear()
    if not requests:
        return requests
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((countdown.over, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not countdown.over.done():
            abandon(ask, requests)
    return requests if countdown.over.done() else None


async def _write_tensors(ask: RequestHead, requests: Sequence[AsgiRequest]) -> None:
    """Write the tensors with which `requests` have ended, if they are so many that they are written in a thread."""
    ended = [request for request in requests if isinstance(request.end, dict)]
    size = sum([text_size(array) for request in ended for array in request.end.values()])
    if size > LONG_ANSWER:
        bodies = await written(size, lambda: [tensors_body(ask, request.end) for request in ended])
        for request, body in zip(ended, bodies, strict=True):
            request.end = body if isinstance(body, bytes) else ask.service.tell_failed(body)


async def _compressed(answer: HttpResponse, coding: str) -> HttpResponse:
    if len(answer.body) > _LONG_WORK:
        return await asyncio.to_thread(compressed, answer, coding)
    return compressed(answer, coding)
