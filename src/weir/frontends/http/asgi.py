"""The ASGI channel: reads bodies within limits and sends responses and streams of events, for inference in every protocol and for pages. And the
endpoints, each declared once, from which routes, OpenAPI, the index at /, the list in a 404, refusals and the endpoints of batch jobs derive, and the
middleware that asks for the server's API key.

An error before the first event of a stream is an ordinary error response. A later error is an event named `error`. If neither an event nor an error comes
within `stream_keep_alive` seconds, the stream begins with a comment, and its status is 200.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy, deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import (
    Cancelled,
    DeadlineExceeded,
    MethodNotAllowed,
    Overloaded,
    RequestTimeout,
    TooLarge,
    Unauthorized,
    WeirError,
)
from weir.messages import CURRENT_TRACE, TRACEPARENT
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.account import Pace, charge, charge_response, release, unpacking
from weir.protocols.exchange import EventSource, Exchange, HttpProtocol, HttpRequestHead, once_read
from weir.protocols.native import FRONTEND, MAX_REQUEST_ID_LENGTH, check_length, content_length, head_size, too_large
from weir.protocols.offloading import LONG_BODY, parsed, unpack
from weir.protocols.response import Headers, HttpResponse, coding_of, compressed_off_loop, decompress, error_response
from weir.serving import NAME_IN_PATH
from weir.wire.kserve_json import read_object
from weir.wire.schema import read_document
from weir.wire.sse import CONTENT_TYPE, write_comment, write_event
from weir.wire.status import HEAD_TOO_LARGE
from weir.workers.timer import LOOP_TICK

T = TypeVar("T")

_LINGER = 0.5  # seconds that the client may pause while a refused body is discarded
_SMALL_BODY = 65536  # bytes: a smaller refused body is discarded, so that the connection can stay open


class Body:
    """The body of one request. `unread`: whether more of it may arrive."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._begun = False
        self.unread = True

    def closes(self, scope: Scope) -> bool:
        """Return whether the connection must be closed after a response that goes ahead of the body. A small body that nobody has begun to read can
        still arrive, and is discarded then; one that was being read has been too slow, or too large."""
        return self.unread and (self._begun or has_large_body(scope))

    async def read(self, max_body_size: int, within: float) -> bytes | None:
        """Return the whole body, or None if the client has left.

        Raises TooLarge as soon as it has more than `max_body_size` bytes, RequestTimeout if it arrives more slowly than Pace allows with `within`, and
        Overloaded if the account, to which Counted charges it, has no room for it.
        """
        try:
            return await self._read(max_body_size, within)
        except TimeoutError:
            raise too_slow(within) from None

    async def _read(self, max_body_size: int, within: float) -> bytes | None:
        self._begun = True
        whole = bytearray()  # a list of millions of tiny chunks would take many times the memory
        pace = Pace()
        while self.unread:
            message = await pace.next(self._receive, _size_of, within)
            if message["type"] != "http.request":
                return None
            self.unread = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            if len(whole) + len(chunk) > max_body_size:
                raise too_large(f"of {len(whole) + len(chunk)} bytes or more", max_body_size)
            if not whole and not self.unread:
                return chunk
            whole += chunk
        return bytes(whole)


def _size_of(message: Message) -> int:
    return len(message.get("body", b""))


def too_slow(within: float) -> RequestTimeout:
    """Return the error for a body that arrives more slowly than Pace allows."""
    return RequestTimeout(
        f"body: arrives too slowly; must arrive within {within:g} s, or as many for each MiB (body_timeout)"
    )


async def unpacked(body: bytes, coding: str, max_size: int, within: float) -> bytes:
    """Return `body`, which is compressed with `coding`, decompressed and charged to the account.

    A body that is short before and after is decompressed at once. The others take turns, a few at a time, and are decompressed in threads. So a client that
    sends a short body never waits for clients whose bodies become large.

    Raises what `decompress` raises, DeadlineExceeded after `within` seconds, and Overloaded if the account has no room.
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
    """Discard the rest of a body, for at most `within` seconds, or until the client pauses for _LINGER seconds.

    Closing a connection with unread bytes would reset it, and the client might lose the response (RFC 9112, section 9.6).
    """
    with suppress(TimeoutError, Overloaded, TooLarge):
        async with asyncio.timeout(within):
            message: Message = {"more_body": True}
            while message.get("more_body", False):
                async with asyncio.timeout(_LINGER):
                    message = await receive()
                release(len(message.get("body", b"")))


class ClientLeft(Cancelled):
    """The client of an ASGI call left before its response, so that nothing is sent. What a model raises is never of this class."""


async def unless_left(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client leaves, `work` is cancelled and ClientLeft is raised. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None  # coroutines run in one
    left, at_work = False, True

    def leave(_: object) -> None:
        nonlocal left
        if at_work:  # the callback may run after `work` has ended
            left = True
            task.cancel()

    leaving = asyncio.ensure_future(disconnected(receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():  # no other cancellation is pending
            raise ClientLeft("the caller disconnected") from None
        raise
    finally:
        at_work = False
        leaving.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def has_large_body(scope: Scope) -> bool:
    """Return whether a request's body is too large to be discarded, or of unknown length."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or content_length(length) > _SMALL_BODY


def inner_path(scope: Scope) -> str:
    """Return the path of a request without the prefix at which the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


async def send_response(send: Send, response: HttpResponse, *, more: bool = False) -> None:
    """Send `response`. With `more`, the request stays open until an empty body follows."""
    await send(_head(response))
    await send({"type": "http.response.body", "body": response.body, "more_body": more})


def _head(response: HttpResponse) -> Message:
    length = (b"content-length", b"%d" % len(response.body))
    return {"type": "http.response.start", "status": response.status, "headers": [*response.headers, length]}


def as_response(response: HttpResponse) -> Response:
    """Return `response` as a Starlette response."""
    made = Response(response.body, response.status)
    made.raw_headers.extend(response.headers)
    return made


_log = logging.getLogger("weir.http")

# Makes the response for an error, as the protocol of the request writes errors.
Refuse = Callable[[BaseException], HttpResponse]


class AsgiCall:
    """One request. `path` has the parameters of its path, `body` is its decompressed body where an Endpoint has read it, and `version` is that of HTTP.
    `receive` reports that the client has left. `send` is for those who send a response in parts."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: HttpSettings) -> None:
        client = scope.get("client")
        self.scope = scope
        self.path: dict[str, str] = scope.get("path_params", {})
        self.headers: Headers = scope["headers"]
        self.peer: str | None = client[0] if client else None
        self.version: str = scope["http_version"]
        self.receive = receive
        self.send = send
        self.body = b""
        self._settings = settings
        self._incoming = Body(receive)

    def part(self, headers: Headers, body: bytes) -> "AsgiCall":
        """Return a part of this call, with its own headers and body. Its response is not sent in parts, and nobody leaves it."""
        made = copy(self)
        made.headers, made.body, made.version, made.receive = headers, body, "1.0", _never
        return made

    async def refuses_head(self, refuse: Refuse) -> bool:
        """Refuse the request if its head is over the limit. Return whether it is."""
        if head_size(self.headers) <= self._settings.max_header_size:
            return False
        error = TooLarge(f"head: must be at most {self._settings.max_header_size} bytes (max_header_size)")
        await self.refuse(refuse(error)._replace(status=HEAD_TOO_LARGE))
        return True

    async def received(self) -> bytes | None:
        """Return the body as it came, or None if the client has left. Raises what Body.read raises."""
        return await self._incoming.read(self._settings.max_body_size, self._settings.body_timeout)

    async def read(self, declared: type[T]) -> T:
        """Return the body, which is a JSON object, as a value of the type `declared`. An empty body and null count as {}. A long body is read in a thread.

        Raises InvalidRequest naming field, value and rule.
        """
        return await parsed(self.body, lambda: read_document(self._document(), declared))

    def _document(self) -> dict[str, Any]:
        return {} if self.body.strip() in (b"", b"null") else read_object(self.body)

    async def respond(self, response: HttpResponse) -> None:
        """Send the response, with what identifies the request."""
        await send_response(self.send, identified(response, self.headers))

    async def refuse(self, response: HttpResponse) -> None:
        """Send the response, also before the body has arrived. A large body, or the rest of one, is discarded for a while, and the connection closed then."""
        if not self._incoming.closes(self.scope):
            return await self.respond(response)
        if self.version.startswith("1"):  # HTTP/2 forbids the header: RFC 9113, section 8.2.2
            response.headers.append((b"connection", b"close"))
        await send_response(self.send, identified(response, self.headers), more=True)
        await discard_body(self.receive, self._settings.body_timeout)
        await self.send({"type": "http.response.body", "body": b""})


async def _never() -> Message:
    left: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await left


Handler = Callable[[AsgiCall], Awaitable[HttpResponse | None]]


class _NameConvertor(Convertor[str]):
    """Takes the name of a model from a path, which may have several segments."""

    regex = NAME_IN_PATH

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model_name", _NameConvertor())


def with_names(path: str) -> str:
    """Return the path of a Route in which {model} and {worker} take names of several segments."""
    return path.replace("{model}", "{model:model_name}").replace("{worker}", "{worker:model_name}")


class Endpoint:
    """An ASGI application whose requests `handler` answers. If it returns None, it has sent the response itself. `refuse` makes the response for an error."""

    def __init__(self, handler: Handler, settings: HttpSettings, refuse: Refuse) -> None:
        self._handler = handler
        self._settings = settings
        self._refusal = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = AsgiCall(scope, receive, send, self._settings)
        if await call.refuses_head(self._refusal):
            return
        try:
            body = await self._read(call)
        except WeirError as error:
            return await call.refuse(self._refusal(error))
        if body is not None:
            call.body = body
            response = await self._respond(call)
            if response is not None:
                await call.respond(self._charged(response))

    async def _read(self, call: AsgiCall) -> bytes | None:
        settings, headers = self._settings, dict(call.headers)
        if b"content-length" in headers:
            check_length(headers[b"content-length"], settings.max_body_size)
        coding = coding_of(headers.get(b"content-encoding", b"").decode("latin-1"))
        body = await call.received()
        if body is None or not coding:
            return body
        with suppress(ClientLeft):
            return await unless_left(
                unpacked(body, coding, settings.max_body_size, settings.body_timeout), call.receive
            )
        return None

    def _charged(self, response: HttpResponse) -> HttpResponse:
        """Charge `response` and return it, or return the response for the error if the account has no room."""
        try:
            charge_response(len(response.body))
        except WeirError as error:
            error.reported = True  # the response was counted when it was made
            return self._refusal(error)
        return response

    async def _respond(self, call: AsgiCall) -> HttpResponse | None:
        try:
            return await self._handler(call)
        except Exception as error:
            if not isinstance(error, WeirError):
                _log.exception("%s %s failed", call.scope["method"], call.scope["path"])
            return self._refusal(error)


def identified(response: HttpResponse, headers: Iterable[tuple[bytes, bytes]]) -> HttpResponse:
    """Add to `response` the X-Request-Id of the request, unless it is too long, and the `traceparent` of its span if it was traced. Return it."""
    trace = CURRENT_TRACE.get()
    if trace is not None:
        response.headers.append((TRACEPARENT.encode(), trace.traceparent.encode()))
    for name, value in headers:
        if name == b"x-request-id" and len(value) <= MAX_REQUEST_ID_LENGTH:
            if all(name != b"x-request-id" for name, _ in response.headers):
                response.headers.append((name, value))
            break
    return response


HEAD: Headers = [
    (b"content-type", f"{CONTENT_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events otherwise
]


class EventStream:
    """One response that is a stream of events.

    `refusal` makes the response for an error before the first event. After `keep_alive` seconds without an event a comment is sent. `sent_bytes` is the size
    of the body so far.
    """

    def __init__(self, source: EventSource, refusal: Refuse, call: AsgiCall, keep_alive: float) -> None:
        self.sent_bytes = 0
        self._source = source
        self._refusal = refusal
        self._call = call
        self._keep_alive = keep_alive
        self._writing = asyncio.Lock()
        self._started = False
        self._last = 0.0  # when something was sent last, on the event loop's clock

    async def run(self) -> None:
        """Send events until the source ends or the client leaves."""
        leaving = asyncio.ensure_future(disconnected(self._call.receive))
        pumping = asyncio.ensure_future(self._pump())
        now = asyncio.get_running_loop().time
        self._last = now()
        try:
            while not (pumping.done() or leaving.done()):
                left = self._last + self._keep_alive - now()
                if left > 0 or self._writing.locked():
                    timeout = max(left, LOOP_TICK) if left > 0 else self._keep_alive
                    await asyncio.wait((pumping, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                else:
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
                response = self._refusal(error)
                self.sent_bytes += len(response.body)
                return await self._call.respond(response)
            await self._write(write_event(self._source.failure(error), "error"))
        await self._write(b"", more=False)

    async def _write(self, event: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._last = asyncio.get_running_loop().time()
            if not self._started:
                self._started = True
                headers = [
                    *HEAD,
                    *identified(HttpResponse(200, self._source.headers(), b""), self._call.headers).headers,
                ]
                await self._call.send({"type": "http.response.start", "status": 200, "headers": headers})
            self.sent_bytes += len(event)
            await self._call.send({"type": "http.response.body", "body": event, "more_body": more})


class AsgiInference:
    """ASGI middleware for inference. The first of `protocols` that knows a request answers it; all other requests go to `app`.

    A request is the task in which its server calls this application, so it needs no ChannelCall. Lines of batch jobs come this way too.
    """

    def __init__(self, app: ASGIApp, protocols: Sequence[HttpProtocol], settings: HttpSettings) -> None:
        self._app = app
        self._protocols = protocols
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. If the client leaves, the request is cancelled and nothing is sent."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, call = inner_path(scope), AsgiCall(scope, receive, send, self._settings)
        if await call.refuses_head(partial(self._protocol_at(path).error_response, service=None)):
            return
        for protocol in self._protocols:
            try:
                head = await once_read(partial(protocol.read_head, scope["method"], path, scope["headers"]))
            except WeirError as error:
                if (service := protocol.named(path)) is not None:
                    service.notify(FRONTEND, error)
                return await call.refuse(protocol.error_response(error, service))
            if head is not None:
                return await self._infer(protocol, head, call)
        return await self._app(scope, receive, send)

    def _protocol_at(self, path: str) -> HttpProtocol:
        """Return the protocol whose prefix `path` has, or the last one."""
        others = [each for each in self._protocols if each.prefix != b"/" and path.startswith(each.prefix.decode())]
        return (*others, self._protocols[-1])[0]

    async def _infer(self, protocol: HttpProtocol, head: HttpRequestHead, call: AsgiCall) -> None:
        headers = call.headers
        exchange = Exchange(head.service, frontend=FRONTEND, headers=headers, peer=call.peer)
        exchange.route = head.route
        try:
            body = await call.received()
        except WeirError as error:
            return await call.refuse(protocol.error_response(exchange.refused(error), head.service))
        if body is None:
            return
        size = len(body)
        work = self._respond(exchange, protocol, head, body)
        del body  # only the protocol refers to it now, and frees it as soon as it has been parsed
        try:
            response = await unless_left(work, call.receive)
        except ClientLeft:
            return
        CURRENT_TRACE.set(exchange.trace)
        if isinstance(response, EventSource):
            await self._send_events(response, exchange, protocol, size, call)
        else:
            exchange.transferred(size, len(response.body))
            await call.respond(response)

    async def _respond(
        self, exchange: Exchange, protocol: HttpProtocol, head: HttpRequestHead, body: bytes
    ) -> HttpResponse | EventSource:
        """Return the response to a request, also for an error, or the stream of events."""
        try:
            if head.coding:
                body = await unpacked(body, head.coding, self._settings.max_body_size, head.timeout)
            if head.stream:
                return await protocol.stream(exchange, head, body)
            response = await protocol.respond(exchange, head, body)
            if head.accept_coding and len(response.body) > self._settings.compress_above:
                response = await compressed_off_loop(response, head.accept_coding)
            charge_response(len(response.body))
            return response
        except Exception as error:
            if isinstance(error, WeirError):
                exchange.refused(error)
            else:
                _log.error("a response of %s cannot be written", exchange.service.facts.name, exc_info=error)
            return protocol.error_response(error, exchange.service)

    async def _send_events(
        self, source: EventSource, exchange: Exchange, protocol: HttpProtocol, received_bytes: int, call: AsgiCall
    ) -> None:
        refusal = partial(protocol.error_response, service=exchange.service)
        async with aclosing(source.parts):
            events = EventStream(source, refusal, call, self._settings.stream_keep_alive)
            await events.run()
        exchange.transferred(received_bytes, events.sent_bytes)


ANY = "*"  # all methods that no other endpoint of the path has


class HttpEndpoint(NamedTuple):
    """Handles one method at one path, which may have parameters, as a Route of Starlette writes them.

    `described` is its operation in OpenAPI, with types in place of schemas; None for one that is only for other clients. `refuse` writes an error as its API
    does; without it, errors are raised to the application. `infers`: a POST of JSON is a request for inference with one response. `example` is a body that a
    model of this server takes; None if there is none.
    """

    method: str
    path: str
    app: ASGIApp
    described: Mapping[str, Any] | None = None
    refuse: Refuse | None = None
    infers: bool = False
    example: Any = None

    @property
    def shown_path(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)


class EndpointRoute(Route):
    """The endpoints of one path. It takes all methods, so that it refuses those that it has not as its own API does."""

    def __init__(self, endpoints: Mapping[str, HttpEndpoint]) -> None:
        super().__init__(next(iter(endpoints.values())).path, self.respond)
        self.app = self.respond
        self.methods = None
        self.endpoints = endpoints

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.endpoints.get(method) or self.endpoints.get(ANY)
        if found is not None:
            return await found.app(scope, receive, send)
        allow = sorted({*self.endpoints, *(["HEAD"] if "GET" in self.endpoints else [])})
        refuse = next(iter(self.endpoints.values())).refuse
        path, known = inner_path(scope), ", ".join(each for each in allow if each != "HEAD")
        where = "; GET / lists the paths that there are" if path == "/" else ""
        error = MethodNotAllowed(f"{scope['method']} {path}: takes {known} only{where}", details={"allow": allow})
        if refuse is None or any(each.refuse is None for each in self.endpoints.values()):
            raise error
        await as_response(identified(refuse(error), scope["headers"]))(scope, receive, send)


def answered(handle: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Return the ASGI application whose requests `handle` responds to."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await handle(Request(scope, receive)))(scope, receive, send)

    return app


def routes_of(endpoints: Sequence[HttpEndpoint]) -> list[Route]:
    """Return a route for each path. Of two endpoints with the same method and path the first one counts."""
    paths: dict[str, dict[str, HttpEndpoint]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {}).setdefault(each.method, each)
    return [EndpointRoute(found) for found in paths.values()]


def described_paths(endpoints: Sequence[HttpEndpoint]) -> dict[str, dict[str, Any]]:
    """Return the operations of the `endpoints` by path and method, as OpenAPI has them, each with the parameters of its path. Of two with the same method
    and path the first one counts."""
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        if each.described is not None:
            names = [_in_path(name) for name in re.findall(r"{(\w+)}", each.shown_path)]
            named = {"parameters": [*names, *each.described.get("parameters", ())]} if names else {}
            paths.setdefault(each.shown_path, {}).setdefault(each.method.lower(), {**each.described, **named})
    return paths


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def refusals_of(endpoints: Sequence[HttpEndpoint]) -> dict[str, Refuse]:
    """Return what refuses a request without the server's key, by the beginning of its path."""
    found = {each.path.partition("{")[0].rstrip("/"): each.refuse for each in endpoints}
    return {path: refuse for path, refuse in found.items() if path and refuse is not None}


def listed(routes: Sequence[Any], prefix: str) -> str:
    """Return the methods and paths of those `routes` that begin with `prefix`, as a list for people."""
    found = [each for route in routes if isinstance(route, EndpointRoute) for each in route.endpoints.values()]
    known = [
        f"{each.method} {each.shown_path}" for each in found if each.method != ANY and each.path.startswith(prefix)
    ]
    return ", ".join(dict.fromkeys(known))


# The paths of probes, which have no key.
OPEN = frozenset(("*", "/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"))


_DENIAL = "websocket.http.response"
_BASIC = (b"www-authenticate", b'Basic realm="weir"')


class Gate:
    """Passes requests with a key, and requests to open paths, on to `app`. Refuses all others.

    `refusals` maps prefixes of paths to what makes the response; the longest prefix of a path counts.
    """

    def __init__(self, app: ASGIApp, access: Access, refusals: Mapping[str, Refuse], settings: HttpSettings) -> None:
        self._app = app
        self._access = access
        self._refusals = dict(sorted(refusals.items(), key=lambda item: -len(item[0])))
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or open one WebSocket."""
        if scope["type"] in ("http", "websocket") and inner_path(scope) not in OPEN:
            try:
                scope = {**scope, "headers": self._access.require_http(scope["headers"])}
            except Unauthorized as error:
                return await self._refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    async def _refuse(self, error: Unauthorized, scope: Scope, receive: Receive, send: Send) -> None:
        path = inner_path(scope)
        refuse = next((refuse for prefix, refuse in self._refusals.items() if path.startswith(prefix)), error_response)
        response = refuse(error)
        if scope["type"] == "websocket":
            return await deny(response, scope, send)
        if _wants_page(scope):  # a browser then asks its user for the key
            response.headers.append(_BASIC)
        await AsgiCall(scope, receive, send, self._settings).refuse(response)


def with_key(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an OpenAPI `document` that also describes the key, which paths need it, and the response to a request without it."""
    described = deepcopy(document)
    described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"key": []}]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            if path in OPEN:
                operation["security"] = []
            else:
                operation["responses"].setdefault("401", {"description": f"Unauthorized: {Unauthorized.__doc__}"})
    return described


async def deny(response: HttpResponse, scope: Scope, send: Send) -> None:
    """Refuse a WebSocket with `response`."""
    if _DENIAL not in scope.get("extensions", {}):
        return await send({"type": "websocket.close"})  # the ASGI server sends status 403

    async def send_denial(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_response(send_denial, response)


def _wants_page(scope: Scope) -> bool:
    return scope["method"] == "GET" and any(
        name == b"accept" and b"text/html" in value for name, value in scope["headers"]
    )
