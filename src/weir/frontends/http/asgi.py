"""HTTP through any ASGI server: the channel that reads bodies within bounds and sends answers, and streams of events, for inference in every protocol and for pages.

The status of a stream is decided by what comes first: an error before any answer is an ordinary error answer; later ones are events named `error`. Once
`stream_keep_alive` has passed without either, the status is 200.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, TooLarge, WeirError, brief
from weir.protocols.account import charge, unpacking
from weir.protocols.content_negotiation import coding_of, decompress
from weir.protocols.exchange import EventSource, Exchange, HttpProtocol, HttpRequestHead
from weir.protocols.native import FRONTEND, MAX_REQUEST_ID_LENGTH, check_length, head_size, too_large
from weir.protocols.offloading import LONG_BODY, off_loop, unpack
from weir.protocols.response import Headers, HttpResponse, compressed_off_loop
from weir.protocols.settings import HttpSettings
from weir.protocols.status import HEAD_TOO_LARGE
from weir.telemetry.tracecontext import CURRENT, HEADER
from weir.wire.kserve_json import parse
from weir.wire.schema import read_document
from weir.wire.sse import CONTENT_TYPE, write_comment, write_event
from weir.wire.values import decode_json

if TYPE_CHECKING:
    from weir.serving.service import Service


T = TypeVar("T")

_LINGER = 0.5  # seconds that the sender of a refused body may pause before the connection is closed
_SMALL_BODY = 65536  # bytes that are read and forgotten rather than closing the connection over them


class Body:
    """The body of one request. `unread` tells whether more of it may come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.unread = True

    async def read(self, max_body_size: int, within: float) -> bytes | None:
        """Return the whole body, or None if the client left.

        Raises TooLarge once it has more than `max_body_size` bytes, DeadlineExceeded after `within` seconds, and Overloaded when the
        account of the server has no room for it.
        """
        try:
            async with asyncio.timeout(within):
                return await self._read(max_body_size)
        except TimeoutError:
            raise DeadlineExceeded(f"body: must arrive within {within:g} s (body_timeout)") from None

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` makes of the whole body, or None, and nothing goes on, if the client leaves."""
        with suppress(Cancelled):
            return await unless_left(work, self._receive)
        return None

    async def _read(self, max_body_size: int) -> bytes | None:
        whole = bytearray()  # a list of what may be millions of crumbs would be many times as large
        while self.unread:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            self.unread = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            if len(whole) + len(chunk) > max_body_size:
                raise too_large(f"of {len(whole) + len(chunk)} bytes or more", max_body_size)
            charge(len(chunk))
            if not whole and not self.unread:
                return chunk
            whole += chunk
        return bytes(whole)


async def unpacked(body: bytes, coding: str, max_size: int, within: float) -> bytes:
    """Return `body`, which is in `coding`, decompressed and charged to the account of the server.

    What is short before and after is decompressed at once. All else waits for its turn, a few at a time, and is decompressed in a
    thread; so clients that send short bodies never wait for those that send what becomes large.

    Raises what `decompress` raises, DeadlineExceeded after `within` seconds, and Overloaded where the account has no room.
    """
    plain = _unpacked_if_short(body, coding, max_size)
    if plain is None:
        try:
            async with asyncio.timeout(within), unpacking(max_size):
                plain = await unpack(len(body), partial(decompress, body, coding, max_size))
        except TimeoutError:
            raise DeadlineExceeded(f"body: could not be decompressed within {within:g} s") from None
    charge(len(plain))
    return plain


def _unpacked_if_short(body: bytes, coding: str, max_size: int) -> bytes | None:
    if len(body) > LONG_BODY:
        return None
    try:
        return decompress(body, coding, min(max_size, LONG_BODY))
    except TooLarge:
        return None


async def discard_body(receive: Receive, within: float) -> None:
    """Read on while more comes, at most `within` seconds: a connection closed over unread bytes takes the answer with it.

    A sender who pauses has had time to read the answer.
    """
    try:
        async with asyncio.timeout(within):
            message: Message = {"more_body": True}
            while message.get("more_body", False):
                async with asyncio.timeout(_LINGER):
                    message = await receive()
    except TimeoutError:
        return


async def unless_left(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what `work` returns; the body must have been read. When the client leaves, `work` is cancelled: raises Cancelled then."""
    task = asyncio.current_task()
    assert task is not None  # coroutines run in one
    left, at_work = False, True

    def leave(_: object) -> None:
        nonlocal left
        if at_work:  # this is called a moment after it was noticed
            left = True
            task.cancel()

    leaving = asyncio.ensure_future(disconnected(receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():  # nobody else cancels it
            raise Cancelled("the caller left") from None
        raise
    finally:
        at_work = False
        leaving.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has left; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def has_large_body(scope: Scope) -> bool:
    """Tell whether a request's body is too large, or of unknown length, to be read only to be forgotten."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > _SMALL_BODY


def inner_path(scope: Scope) -> str:
    """Return the path of a request below the path that the application is mounted at."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


async def send_answer(send: Send, answer: HttpResponse, *, more: bool = False) -> None:
    """Send `answer`, whole; with `more` the server keeps the request open until an empty body follows."""
    await send(_head(answer))
    await send({"type": "http.response.body", "body": answer.body, "more_body": more})


async def send_early(
    scope: Scope, receive: Receive, send: Send, answer: HttpResponse, *, closing: bool, within: float
) -> None:
    """Send `answer` before the body of the request has been read; with `closing`, end the connection over it, after
    reading on for at most `within` seconds."""
    if not closing:
        return await send_answer(send, answer)
    if scope["http_version"].startswith("1"):  # HTTP/2 ends the stream instead and forbids the header
        answer.headers.append((b"connection", b"close"))
    await send_answer(send, answer, more=True)
    await discard_body(receive, within)
    await send({"type": "http.response.body", "body": b""})


def _head(answer: HttpResponse) -> Message:
    length = (b"content-length", b"%d" % len(answer.body))
    return {"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]}


def as_response(answer: HttpResponse) -> Response:
    """Return `answer` as what Starlette's endpoints return."""
    made = Response(answer.body, answer.status)
    made.raw_headers.extend(answer.headers)
    return made


_log = logging.getLogger("weir.http")


class AsgiCall(NamedTuple):
    """One request, its body decompressed. `receive` tells when the client leaves; `send` is for those who answer bit by bit."""

    path: dict[str, str]
    headers: Headers
    peer: str | None
    body: bytes
    receive: Receive
    send: Send
    version: str = "1.1"  # of HTTP

    async def read(self, declared: type[T]) -> T:
        """Return the JSON object that the body is as a value of the type `declared`; {} if it is empty or null. A long one is read in a thread.

        Raises InvalidRequest that names field, value and rule.
        """
        return await off_loop(len(self.body), lambda: read_document(self._document(), declared))

    def _document(self) -> dict[str, Any]:
        document = parse(decode_json, self.body, "an object") if self.body.strip() else {}
        if document is None:
            return {}
        if not isinstance(document, dict):
            raise InvalidRequest(f"body: must be an object as JSON, is {brief(document, 40)}")
        return document


Handler = Callable[[AsgiCall], Awaitable[HttpResponse | None]]

# Makes the answer to an error, as the protocol of the request writes it.
Refuse = Callable[[BaseException], HttpResponse]


class Endpoint:
    """The ASGI application that has `handler` answer; None from it means that it has answered by itself. An error is
    answered by what `refuse` makes of it."""

    def __init__(self, handler: Handler, settings: HttpSettings, refuse: Refuse) -> None:
        self._handler = handler
        self._settings = settings
        self._refusal = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        incoming = Body(receive)
        if head_size(scope["headers"]) > self._settings.max_header_size:
            limit = self._settings.max_header_size
            error = TooLarge(f"head: must be at most {limit} bytes (max_header_size)")
            await self._refuse(scope, receive, send, incoming, error, HEAD_TOO_LARGE)
            return
        try:
            body = await self._read(scope, incoming)
        except WeirError as error:
            await self._refuse(scope, receive, send, incoming, error)
            return
        if body is None:
            return
        client = scope.get("client")
        peer, version = client[0] if client else None, scope["http_version"]
        call = AsgiCall(scope["path_params"], scope["headers"], peer, body, receive, send, version)
        answer = await self._answer(scope, call)
        if answer is not None:
            await send_answer(send, identified(self._charged(answer), scope["headers"]))

    async def _read(self, scope: Scope, incoming: Body) -> bytes | None:
        settings = self._settings
        headers = dict(scope["headers"])
        if b"content-length" in headers:
            check_length(headers[b"content-length"], settings.max_body_size)
        coding = coding_of(headers.get(b"content-encoding", b"").decode("latin-1"))
        body = await incoming.read(settings.max_body_size, settings.body_timeout)
        if body is None or not coding:
            return body
        return await incoming.unless_left(unpacked(body, coding, settings.max_body_size, settings.body_timeout))

    def _charged(self, answer: HttpResponse) -> HttpResponse:
        """Return `answer`, or the error that there is no memory for it."""
        try:
            charge(len(answer.body))
        except WeirError as error:
            return self._refusal(error)
        return answer

    async def _answer(self, scope: Scope, call: AsgiCall) -> HttpResponse | None:
        try:
            return await self._handler(call)
        except Exception as error:
            if not isinstance(error, WeirError):
                _log.exception("%s %s failed", scope["method"], scope["path"])
            return self._refusal(error)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, incoming: Body, error: WeirError, status: int | None = None
    ) -> None:
        closing = incoming.unread and has_large_body(scope)
        answer = self._refusal(error)
        answer = identified(answer if status is None else answer._replace(status=status), scope["headers"])
        await send_early(scope, receive, send, answer, closing=closing, within=self._settings.body_timeout)


def identified(answer: HttpResponse, headers: Iterable[tuple[bytes, bytes]]) -> HttpResponse:
    """Return `answer`, an error too, with the X-Request-Id that came with the request, if that is not too long, and with
    the `traceparent` of its span, if it was traced."""
    trace = CURRENT.get()
    if trace is not None:
        answer.headers.append((HEADER.encode(), trace.traceparent.encode()))
    for name, value in headers:
        if name == b"x-request-id" and len(value) <= MAX_REQUEST_ID_LENGTH:
            if all(name != b"x-request-id" for name, _ in answer.headers):
                answer.headers.append((name, value))
            break
    return answer


HEAD: Headers = [
    (b"content-type", f"{CONTENT_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers (nginx) shall pass on each event
]


class EventStream:
    """One answer that is a stream. `refusal` makes a whole answer of an error that comes before any part, `identify` adds to its headers and to those of
    the stream what names the request. `sent_bytes` counts its body."""

    def __init__(
        self, source: EventSource, refusal: Refuse, identify: Callable[[HttpResponse], HttpResponse], receive: Receive,
        send: Send, keep_alive: float,
    ) -> None:  # fmt: skip
        self.sent_bytes = 0
        self._source = source
        self._refusal = refusal
        self._identify = identify
        self._receive = receive
        self._send = send
        self._keep_alive = keep_alive
        self._writing = asyncio.Lock()
        self._started = False
        self._spoke = False  # since it was looked at last

    async def run(self) -> None:
        """Send until the answers end or the client leaves."""
        leaving = asyncio.ensure_future(disconnected(self._receive))
        pumping = asyncio.ensure_future(self._pump())
        try:
            while not (pumping.done() or leaving.done()):
                self._spoke = False
                waited = (pumping, leaving)
                done, _ = await asyncio.wait(waited, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED)
                if not (done or self._spoke or self._writing.locked()):
                    await self._write(write_comment("keep-alive"))
            if pumping.done():
                pumping.result()
        finally:
            for task in (leaving, pumping):
                task.cancel()
            await asyncio.wait((leaving, pumping))

    async def _pump(self) -> None:
        try:
            async for data in self._source.parts:
                await self._write(write_event(data))
        except WeirError as error:
            if not self._started:
                self._started = True
                answer = self._identify(self._refusal(error))
                self.sent_bytes += len(answer.body)
                await send_answer(self._send, answer)
                return
            await self._write(write_event(self._source.failure(error), "error"))
        await self._write(b"", more=False)

    async def _write(self, event: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._spoke = True
            if not self._started:
                self._started = True
                headers = [*HEAD, *self._identify(HttpResponse(200, self._source.headers(), b"")).headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.sent_bytes += len(event)
            await self._send({"type": "http.response.body", "body": event, "more_body": more})


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
                    service.tell_refused(FRONTEND, error)
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
            head.service, door=FRONTEND, traceparent=head.traceparent, headers=headers, peer=client[0] if client else None
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
        work = begin(exchange, protocol, head, body)
        del body  # it is the protocol's, which lets go of it as soon as it has been read
        try:
            answer = await unless_left(work, receive)
        except Cancelled:
            return
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
                answer = await compressed_off_loop(answer, head.accept_coding)
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
        refusal = partial(protocol.error_answer, service=exchange.service)
        identify = partial(identified, headers=exchange.headers)
        async with aclosing(source.parts):
            events = EventStream(source, refusal, identify, receive, send, self._settings.stream_keep_alive)
            await events.run()
        exchange.transferred(received_bytes, events.sent_bytes)


def _error_answer(protocol: HttpProtocol, service: "Service", error: Exception) -> HttpResponse:
    if not isinstance(error, WeirError):
        _log.error("an answer of %s cannot be written", service.name, exc_info=error)
    return protocol.error_answer(error, service)
