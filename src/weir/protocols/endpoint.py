"""One route as an ASGI application: the body is read within bounds and decompressed, and whatever goes wrong is answered."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from weir.errors import InvalidRequest, TooLarge, WeirError, brief
from weir.protocols.account import charge
from weir.protocols.bodies import Body, has_large_body, unpacked
from weir.protocols.compression import coding_of
from weir.protocols.native import MAX_REQUEST_ID_LENGTH, check_length, head_size
from weir.protocols.offloading import off_loop
from weir.protocols.response import Headers, HttpResponse
from weir.protocols.sending import send_answer, send_early
from weir.protocols.settings import HttpSettings
from weir.protocols.status import HEAD_TOO_LARGE
from weir.telemetry.tracecontext import CURRENT, HEADER
from weir.wire.kserve_json import parse
from weir.wire.values import decode_json

_log = logging.getLogger("weir.http")


class Call(NamedTuple):
    """One request, its body decompressed. `receive` tells when the client leaves; `send` is for those who answer bit by bit."""

    path: dict[str, str]
    headers: Headers
    peer: str | None
    body: bytes
    receive: Receive
    send: Send
    version: str = "1.1"  # of HTTP

    async def document(self) -> dict[str, Any]:
        """Return the JSON object that the body is; {} if it is empty or null. A long one is read in a thread. Raises InvalidRequest."""
        return await off_loop(len(self.body), self._document)

    def _document(self) -> dict[str, Any]:
        said = parse(decode_json, self.body, "an object") if self.body.strip() else {}
        if said is None:
            return {}
        if not isinstance(said, dict):
            raise InvalidRequest(f"body: must be an object as JSON, is {brief(said, 40)}")
        return said


Handler = Callable[[Call], Awaitable[HttpResponse | None]]

# Makes the answer of what went wrong, in the words of the protocol that was spoken.
Refuse = Callable[[BaseException], HttpResponse]


class Endpoint:
    """The ASGI application that has `handler` answer; None from it means that nothing is left to say. What goes wrong is
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
        call = Call(scope["path_params"], scope["headers"], peer, body, receive, send, version)
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
        """Return `answer`, or what says that there is no memory in which it could wait to be read."""
        try:
            charge(len(answer.body))
        except WeirError as error:
            return self._refusal(error)
        return answer

    async def _answer(self, scope: Scope, call: Call) -> HttpResponse | None:
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
