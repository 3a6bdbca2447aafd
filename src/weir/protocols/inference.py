"""Inference over any ASGI server: the channel that reads the bodies of requests and writes their answers, whatever protocol they are in."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import TooLarge, WeirError
from weir.protocols.bodies import Body, has_large_body, unless_left, unpacked
from weir.protocols.endpoint import identified
from weir.protocols.events import EventStream, Source
from weir.protocols.exchange import EventSource, Exchange, HttpProtocol, HttpRequestHead
from weir.protocols.native import DOOR, head_size
from weir.protocols.response import HttpResponse, compressed
from weir.protocols.sending import inner_path, send_answer, send_early
from weir.protocols.settings import HttpSettings
from weir.protocols.status import HEAD_TOO_LARGE
from weir.telemetry.tracecontext import CURRENT

if TYPE_CHECKING:
    from weir.serving.service import Service

_log = logging.getLogger("weir.http")
_LONG_WORK = 256 << 10  # bytes whose compression would keep the event loop for too long


class AsgiInference:
    """ASGI middleware that answers the requests of `protocols`, the first of which that knows one, and leaves the rest to `app`."""

    def __init__(self, app: ASGIApp, protocols: Sequence[HttpProtocol], settings: HttpSettings) -> None:
        self._app = app
        self._protocols = protocols
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A client that leaves has its request cancelled, and gets nothing."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = inner_path(scope)
        if head_size(scope["headers"]) > self._settings.max_header_size:
            return await self._refuse_large_head(path, scope, receive, send)
        for protocol in self._protocols:
            try:
                head = protocol.read_head(scope["method"], path, scope["headers"])
            except WeirError as error:
                if (service := protocol.named(path)) is not None:
                    service.tell_refused(DOOR, error)
                refusal = identified(protocol.error_answer(error, service), scope["headers"])
                return await self._send_early(scope, receive, send, refusal, closing=has_large_body(scope))
            if head is not None:
                return await self._answer(protocol, head, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _refuse_large_head(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        error = TooLarge(f"head: must be at most {self._settings.max_header_size} bytes (max_header_size)")
        others = [each for each in self._protocols if each.prefix != b"/" and path.startswith(each.prefix.decode())]
        refusal = (*others, self._protocols[-1])[0].error_answer(error, None)._replace(status=HEAD_TOO_LARGE)
        await self._send_early(scope, receive, send, refusal, closing=True)

    async def _send_early(
        self, scope: Scope, receive: Receive, send: Send, answer: HttpResponse, *, closing: bool
    ) -> None:
        within = self._settings.body_timeout
        await send_early(scope, receive, send, answer, closing=closing, within=within)

    async def _answer(
        self, protocol: HttpProtocol, head: HttpRequestHead, scope: Scope, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        incoming = Body(receive)
        client, headers = scope.get("client"), scope["headers"]
        exchange = Exchange(
            head.service, door=DOOR, traceparent=head.traceparent, headers=headers, peer=client[0] if client else None
        )  # fmt: skip
        try:
            body = await incoming.read(self._settings.max_body_size, self._settings.body_timeout)
        except WeirError as error:
            refusal = identified(protocol.error_answer(exchange.refused(error), head.service), headers)
            return await self._send_early(scope, receive, send, refusal, closing=incoming.unread)
        if body is None:
            return
        size = len(body)
        begin = self._open if head.stream else self._respond
        answer = await unless_left(begin(exchange, protocol, head, body), receive)
        del body  # it is the protocol's, which lets go of it as soon as it has been read
        CURRENT.set(exchange.trace)
        if isinstance(answer, EventSource):
            await self._send_events(answer, exchange, protocol, size, receive, send)
        elif answer is not None:
            exchange.transferred(size, len(answer.body))
            await send_answer(send, identified(answer, headers))

    async def _respond(
        self, exchange: Exchange, protocol: HttpProtocol, head: HttpRequestHead, body: bytes
    ) -> HttpResponse:  # fmt: skip
        """Return the answer to a request, an error too."""
        try:
            if head.coding:
                body = await self._unpacked(exchange, head, body)
            answer = await protocol.answer(exchange, head, body)
            if head.accept_coding and len(answer.body) > self._settings.compress_above:
                answer = await _compressed(answer, head.accept_coding)
            exchange.charge(len(answer.body))
        except Exception as error:
            return _error_answer(protocol, head.service, error)
        return answer

    async def _open(
        self, exchange: Exchange, protocol: HttpProtocol, head: HttpRequestHead, body: bytes
    ) -> HttpResponse | EventSource:  # fmt: skip
        """Return the stream of answers to a request, or the answer that refuses it."""
        try:
            if head.coding:
                body = await self._unpacked(exchange, head, body)
            return await protocol.stream(exchange, head, body)
        except Exception as error:
            return _error_answer(protocol, head.service, error)

    async def _unpacked(self, exchange: Exchange, head: HttpRequestHead, body: bytes) -> bytes:
        try:
            return await unpacked(body, head.coding, self._settings.max_body_size, head.timeout)
        except WeirError as error:
            raise exchange.refused(error) from None

    async def _send_events(
        self, source: EventSource, exchange: Exchange, protocol: HttpProtocol, received_bytes: int, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        headers = exchange.headers

        def refusal(error: WeirError) -> HttpResponse:
            return identified(protocol.error_answer(error, exchange.service), headers)

        def named() -> list[tuple[bytes, bytes]]:
            return identified(HttpResponse(200, source.headers(), b""), headers).headers

        async with aclosing(source.parts):
            events = EventStream(
                Source(source.parts, refusal, source.failure, named), receive, send, self._settings.stream_keep_alive
            )  # fmt: skip
            await events.run()
        exchange.transferred(received_bytes, events.sent_bytes)


def _error_answer(protocol: HttpProtocol, service: "Service", error: Exception) -> HttpResponse:
    if not isinstance(error, WeirError):
        _log.error("an answer of %s cannot be written", service.name, exc_info=error)
    return protocol.error_answer(error, service)


async def _compressed(answer: HttpResponse, coding: str) -> HttpResponse:
    if len(answer.body) > _LONG_WORK:
        return await asyncio.to_thread(compressed, answer, coding)
    return compressed(answer, coding)
