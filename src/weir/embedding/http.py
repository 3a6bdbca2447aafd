"""The HTTP channels of requests for vectors: an ASGI call, and a connection of the fast path.

Small requests are answered on the fast path: one task for each, and no ASGI between it and its connection. What a head or a body wants beyond a few short
texts is for the ASGI application, which gets the connection then.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterator
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from starlette.types import Send

from weir.embedding.encoder import SMALL
from weir.embedding.exchange import EmbeddingContext, TextExchange, check_client, mark_headers
from weir.embedding.texts import Encoded
from weir.errors import Cancelled, WeirError
from weir.frontends.http.asgi import AsgiCall, identified, unless_left
from weir.messages import JSON
from weir.protocols.native import RequestOptions
from weir.protocols.offloading import LONG_ANSWER, off_loop, written
from weir.protocols.response import Headers, HttpResponse, compressed_off_loop, echo_headers
from weir.wire.cells import LARGE_BYTES
from weir.wire.tensors import TEXT_BYTES

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import Head, RoutePlan
    from weir.serving.service import Service

_log = logging.getLogger("weir.http")

CLIENT_ID = b"x-client-id"
_LARGEST = 1_000_000  # numbers that are about 20 MB as text
_NUMBERS_AT_ONCE = 65_536  # that are written together: about a megabyte as text
_JSON_HEADER = (b"content-type", JSON.encode())


class Listing(NamedTuple):
    """An object whose fields are `lead`, at least one, and behind them `name`: a list of `length` items, of `numbers` numbers each.
    `items` returns those from one place up to another."""

    lead: dict[str, Any]
    name: str
    length: int
    numbers: int
    items: Callable[[int, int], list[Any]]

    def parts(self) -> Iterator[bytes]:
        """Return it as JSON, bit by bit."""
        step = max(1, _NUMBERS_AT_ONCE // self.numbers)
        opening = msgspec.json.encode(self.lead)[:-1] + b',"%b":[' % self.name.encode()
        for start in range(0, self.length, step):
            yield opening + msgspec.json.encode(self.items(start, min(start + step, self.length)))[1:-1]
            opening = b","
        yield b"]}"

    def whole(self) -> HttpResponse:
        """Return the answer that it is."""
        if self.length * self.numbers <= _NUMBERS_AT_ONCE:
            body = msgspec.json.encode({**self.lead, self.name: self.items(0, self.length)})
        else:
            body = b"".join(self.parts())
        return HttpResponse(200, [_JSON_HEADER], body)


async def send_listing(send: Send, listing: Listing, headers: Headers) -> int:
    """Send `listing` bit by bit, with `headers` beside its own; return how many bytes it was. Each bit is made in a thread when
    most of the one before has been read."""
    headers = [_JSON_HEADER, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    parts, sent = listing.parts(), 0
    while part := await asyncio.to_thread(next, parts, b""):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        sent += len(part)
    await send({"type": "http.response.body", "body": b""})
    return sent


class TextProtocol(Protocol):
    """How requests for vectors are written over HTTP. It is pure. `name` is what its requests are counted as, and `path` takes them."""

    name: str
    path: str

    def read(self, exchange: TextExchange, headers: Headers, body: bytes) -> None:
        """Read the texts, the options and the model that a request asks for into `exchange`. Raises what is wrong with the request."""

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse | Listing:
        """Return the answer with the vectors. Raises Unsupported for vectors that the protocol cannot say."""

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the answer for `error`; `identity` is what the caller calls the request, as far as it was read."""


class TextHead(RequestOptions):
    """What the head of a request says. `client` is whom the caller says to be (X-Client-Id). `timeout` is 0 where the server's own holds. Raises the
    errors of `RequestOptions`."""

    __slots__ = ("client",)

    def __init__(self, headers: Headers) -> None:
        super().__init__(0.0)
        self.client = ""
        for name, value in headers:
            if name == CLIENT_ID:
                self.client = check_client(value.decode("latin-1"), "X-Client-Id")
            else:
                self.read(name, value)

    def whose(self, peer: str | None) -> str:
        """Return who is counted: whom the caller says to be, or else its address."""
        return self.client or peer or "local"

    def ask(self, exchange: TextExchange, peer: str | None) -> None:
        """Tell `exchange` who asks and until when. Whom the body named goes before the head."""
        exchange.client = exchange.client or self.client
        exchange.whose = exchange.client or peer or "local"
        exchange.priority = self.priority
        exchange.timeout = self.timeout or None
        exchange.trace = self.traceparent


class HttpTexts:
    """Answers the requests of `protocol`: those of ASGI by itself, those of the fast path by what it has in common with them."""

    def __init__(self, protocol: TextProtocol, context: EmbeddingContext) -> None:
        self.protocol = protocol
        self.context = context

    async def __call__(self, call: AsgiCall) -> HttpResponse | None:
        """Return the answer to `call`, whatever becomes of it; None: nothing is left to say."""
        exchange = TextExchange(self.context, self.protocol.name)
        try:
            await off_loop(len(call.body), partial(self.protocol.read, exchange, call.headers, call.body))
            head = TextHead(call.headers)
            head.ask(exchange, call.peer)
            encoded = await unless_left(exchange.vectors(), call.receive)
            return await self._answer_call(exchange, encoded, head, call)
        except Cancelled:
            return None
        except WeirError as error:
            return self.refusal(error, exchange)

    def refusal(self, error: BaseException, exchange: TextExchange | None = None) -> HttpResponse:
        """Return the answer for `error`, which is counted; without `exchange` nothing is known of the request."""
        exchange = exchange or TextExchange(self.context, self.protocol.name)
        answer = self.protocol.error_answer(error, exchange.identity, development=self.context.http.development)
        exchange.refused(answer.status)
        return answer

    async def _answer_call(
        self, exchange: TextExchange, encoded: Encoded, head: TextHead, call: AsgiCall
    ) -> HttpResponse | None:
        """Return the answer, or send the largest bit by bit, uncompressed: then nothing is left to say."""
        if encoded.vectors.size > _LARGEST and call.version != "1.0":
            made = self.protocol.write(exchange, encoded)
            if isinstance(made, Listing):
                headers = identified(HttpResponse(200, _marks(encoded), b""), call.headers).headers
                sent = await unless_left(send_listing(call.send, made, headers), call.receive)
                exchange.delivered(encoded, len(call.body), sent)
                return None
        return await self.answer(exchange, encoded, head, len(call.body))

    async def answer(
        self, exchange: TextExchange, encoded: Encoded, head: TextHead, received_bytes: int
    ) -> HttpResponse:
        """Return the answer with the vectors, compressed if the caller likes that. A long one is made in a thread. It is counted."""
        write = partial(self._whole, exchange, encoded)
        size_bytes = TEXT_BYTES * encoded.vectors.size
        answer = await written(size_bytes, write) if size_bytes > LONG_ANSWER else write()
        if head.accept_coding and len(answer.body) > self.context.http.compress_above:
            answer = await compressed_off_loop(answer, head.accept_coding)
        exchange.delivered(encoded, received_bytes, len(answer.body))
        return answer

    def _whole(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        made = self.protocol.write(exchange, encoded)
        answer = made.whole() if isinstance(made, Listing) else made
        answer.headers.extend(_marks(encoded))
        return answer


def _marks(encoded: Encoded) -> Headers:
    return mark_headers(sum(encoded.truncated), encoded.foreign)


class FastTexts:
    """The RouteHandler of the requests that `texts` answers; see frontends/http/fast/plan.py. `models` have one vector for each text, so that no answer
    is large."""

    of_service = False

    def __init__(self, texts: HttpTexts, models: Container[str]) -> None:
        self.texts = texts
        self.models = models
        self.prefix = texts.protocol.path.encode()
        self._longest = min(LARGE_BYTES, texts.context.http.max_body_size)

    def request(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> "FastTextRequest":
        """See RouteHandler."""
        return FastTextRequest(self, connection, plan, payload)

    def complete(self, plan: "RoutePlan", head: "Head", path: str) -> bool:
        """See RouteHandler. What is wrong with a head the ASGI application says."""
        if path != self.texts.protocol.path or not 0 < head.length <= self._longest or plan.expects_continue:
            return False
        try:
            asked = TextHead(head.headers)
        except WeirError:
            return False
        if asked.coding:
            return False
        plan.ask = (asked, head.headers)
        return True

    def named(self, path: str) -> "Service | None":
        """See RouteHandler: the body names the model."""
        return None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """See RouteHandler."""
        return self.texts.refusal(error)


class FastTextRequest:
    """One request on `connection`, see HotRequest."""

    __slots__ = ("_connection", "_exchange", "_handler", "_head", "_headers", "_plan", "_task", "payload")

    def __init__(self, handler: FastTexts, connection: "Connection", plan: "RoutePlan", payload: bytes) -> None:
        self.payload = payload
        self._handler = handler
        self._connection = connection
        self._plan = plan
        self._head, self._headers = plan.ask
        self._exchange = TextExchange(handler.texts.context, handler.texts.protocol.name)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """See HotRequest."""
        exchange = self._exchange
        try:
            self._handler.texts.protocol.read(exchange, self._headers, self.payload)
        except WeirError as error:
            return self._refuse(error)
        if len(exchange.texts) > SMALL or exchange.model not in self._handler.models:
            return self._connection.hand_over(self._plan, self.payload)
        self._head.ask(exchange, _peer(self._connection))
        # A context of its own: what is current in that of a call before, whose answer made room for this, is not of this one.
        self._task = asyncio.get_running_loop().create_task(self._answered(), context=Context())

    async def _answered(self) -> None:
        texts, exchange = self._handler.texts, self._exchange
        try:
            answer = await texts.answer(exchange, await exchange.vectors(), self._head, len(self.payload))
        except Cancelled:
            return self._connection.abort()
        except WeirError as error:
            answer = texts.refusal(error, exchange)
        except Exception as error:
            _log.exception("POST %s failed", texts.protocol.path)
            answer = texts.refusal(error, exchange)
        self._connection.answer(self._plan, identified(answer, self._headers))

    def fail(self, error: Exception) -> None:
        """See HotRequest."""
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        answer = self._handler.texts.refusal(error, self._exchange)
        answer.headers.extend(echo_headers(self._head))
        self._connection.answer(self._plan, answer)

    def leave(self) -> None:
        """See HotRequest."""
        if self._task is not None:
            self._task.cancel()


def _peer(connection: "Connection") -> str | None:
    host = connection.transport.get_extra_info("peername")
    return host[0] if isinstance(host, tuple) else None


# How calls are described in OpenAPI.

Schema = dict[str, Any]

TEXT_SCHEMA: Schema = {"type": "string", "minLength": 1}
IDS_SCHEMA: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
WORDS_SCHEMA: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_HEADERS = [
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        ("X-Request-Timeout", "seconds until the request expires", {"type": "number", "exclusiveMinimum": 0}),
        ("X-Request-Priority", "higher goes first; 0 if not given", {"type": "integer"}),
        ("X-Client-Id", "whose texts these are, so that nobody takes more than a fair share", {"type": "string", "minLength": 1, "maxLength": 128}),
        ("X-Request-Id", "sent back with the answer", {"type": "string", "maxLength": 256}),
    )
]  # fmt: skip
DIMENSIONS_SCHEMA: Schema = {
    "type": ["integer", "null"], "minimum": 1, "description": "keeps the first numbers of each vector",
}  # fmt: skip
TRUNCATE_SCHEMA: Schema = {
    "type": ["boolean", "null"], "description": "false refuses a text that is longer than the model reads",
}  # fmt: skip
PROMPT_SCHEMA: Schema = {
    "type": ["string", "null"],
    "description": "put before every text: the name of one of the model's prompts, or the text itself, which ends with a space or a colon",
}  # fmt: skip
TRUNCATED_SCHEMA: Schema = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "places of the texts that were cut",
}


def described_page(name: str, summary: str, answer: Schema, error: Schema) -> dict[str, Any]:
    """Return the OpenAPI operation of a page; `name` is its operationId."""
    return {
        "operationId": name,
        "tags": ["texts"],
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": {JSON: {"schema": answer}}},
            "default": {"description": "What is wrong", "content": {JSON: {"schema": error}}},
        },
    }


def described_call(name: str, summary: str, body: Schema, answer: Schema, error: Schema) -> dict[str, Any]:
    """Return the OpenAPI operation of a call for vectors, with the headers that all of them read."""
    return {
        **described_page(name, summary, answer, error),
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {JSON: {"schema": body}}},
    }
