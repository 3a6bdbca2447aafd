"""The HTTP channels of requests for vectors: an ASGI call, and a connection of the fast path.

Requests with small responses are answered on the fast path: each has one task, and no ASGI between the task and its connection. For any other request the
connection is handed over to the ASGI application.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.types import Send

from weir.errors import WeirError
from weir.frontends.http.asgi import AsgiCall, ClientLeft, Endpoint, Handler, HttpEndpoint, identified, unless_left
from weir.frontends.http.openapi import described_headers, operation
from weir.messages import JSON
from weir.protocols.account import CLAIM
from weir.protocols.native import RequestOptions
from weir.protocols.offloading import LONG_ANSWER, parsed, written
from weir.protocols.response import (
    JSON_HEADER,
    Headers,
    HttpResponse,
    compressed_off_loop,
    echo_headers,
    encode_safely,
    error_headers,
    start_headers,
)
from weir.text_models.texts import TextOutput
from weir.text_server.encoder import DETAIL_BYTES
from weir.text_server.exchange import EmbeddingContext, TextExchange, check_client, mark_headers, read_object
from weir.text_server.requests import SMALL_REQUEST
from weir.text_server.texts import TEXTS_FIELD, Encoded, TextTask
from weir.wire.cells import LARGE_BYTES
from weir.wire.status import http_code
from weir.wire.tensors import TEXT_BYTES

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import HttpHead, RoutePlan
    from weir.serving.handle import ModelHandle

_log = logging.getLogger("weir.http")

CLIENT_ID = b"x-client-id"
_STREAMED_ABOVE = 1_000_000  # numbers, about 20 MB of JSON; a larger answer is sent in parts
_NUMBERS_PER_PART = 65_536  # numbers of one part, about a megabyte of JSON


class JsonList(NamedTuple):
    """A long list within a JSON document.

    Attributes:
        opening: the JSON before the list, with its bracket.
        length: the number of items in the list.
        numbers: how many numbers an item has, about.
        items: returns the items from one index up to another.
    """

    opening: bytes
    length: int
    numbers: int
    items: Callable[[int, int], list[Any]]

    def parts(self) -> Iterator[bytes]:
        """Yield the JSON in parts, with what stands before the list, and without its closing bracket."""
        step = max(1, _NUMBERS_PER_PART // max(self.numbers, 1))
        opening = self.opening
        for start in range(0, self.length, step):
            yield opening + msgspec.json.encode(self.items(start, min(start + step, self.length)))[1:-1]
            opening = b","
        if not self.length:
            yield opening


class Listing(NamedTuple):
    """A JSON document with long lists.

    Attributes:
        lists: the lists, in order.
        closing: the JSON behind the last list, with its bracket.
        headers: headers of the response in addition to its content type.
    """

    lists: Sequence[JsonList]
    closing: bytes
    headers: Headers = []  # noqa: RUF012 - nobody adds to it

    def parts(self) -> Iterator[bytes]:
        """Yield the JSON in parts."""
        for each in self.lists:
            yield from each.parts()
        yield self.closing

    def whole(self) -> HttpResponse:
        """Return the answer with the whole document as its body."""
        return HttpResponse(200, [JSON_HEADER, *self.headers], b"".join(self.parts()))


def listing(
    lead: Mapping[str, Any] | None,
    name: str,
    length: int,
    numbers: int,
    items: Callable[[int, int], list[Any]],
    headers: Headers | None = None,
) -> Listing:
    """Return an object with the fields `lead`, at least one, that ends with the list `name`; without `lead` a list alone. See JsonList and Listing."""
    opening = b"[" if lead is None else msgspec.json.encode(lead)[:-1] + b',"%b":[' % name.encode()
    return Listing([JsonList(opening, length, numbers, items)], b"]" if lead is None else b"]}", headers or [])


async def send_listing(send: Send, listing: Listing, headers: Headers) -> int:
    """Send the response `listing` in parts, with `headers` added. Return the size of the body in bytes.

    Each part is encoded in a thread once the client has read most of the part before.
    """
    headers = [JSON_HEADER, *listing.headers, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    parts, sent = listing.parts(), 0
    while part := await asyncio.to_thread(next, parts, b""):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        sent += len(part)
    await send({"type": "http.response.body", "body": b""})
    return sent


class ErrorForm(NamedTuple):
    """How an API writes errors.

    Attributes:
        document: returns the document for an error, with the caller's id of the request, and with a traceback only for development.
        status: returns the status of an error.
    """

    document: Callable[[BaseException, Any, bool], Mapping[str, Any]]
    status: Callable[[BaseException], int] = http_code


class TextProtocol:
    """A protocol for requests for vectors over HTTP; it is pure.

    Attributes:
        name: the name of the endpoint in metrics.
        paths: the paths of its endpoints.
        field: the name of the texts in errors.
        errors: how its API writes errors.
    """

    name: str
    paths: Sequence[str]
    field: str
    errors: ErrorForm

    def read(self, exchange: TextExchange, headers: Headers, body: bytes) -> None:
        """Read texts, options and model of a request into `exchange`. Raises the error of an invalid request."""
        self.read_document(exchange, read_object(body))

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the body, decoded and without fields that are null, into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        raise NotImplementedError

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse | Listing:
        """Return the response with the vectors. Raises Unsupported if the protocol has no form for them."""
        raise NotImplementedError

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the response for `error`. `identity` is the caller's id of the request, if it was read."""
        named = error.renamed({TEXTS_FIELD: self.field}) if isinstance(error, WeirError) else error
        document = self.errors.document(named, identity, development)
        return HttpResponse(self.errors.status(named), error_headers(named), encode_safely(document))


class EitherProtocol(TextProtocol):
    """The paths of `own`, which another API has too: a body with the field `mark` is in the form of `other`. The request's identity is its form."""

    def __init__(self, own: TextProtocol, mark: str, other: TextProtocol) -> None:
        self.name, self.paths = own.name, own.paths
        self._own = own
        self._mark = mark
        self._other = other

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """See TextProtocol."""
        exchange.identity = self._other if self._mark in document else self._own
        exchange.identity.read_document(exchange, document)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse | Listing:
        """See TextProtocol."""
        form: TextProtocol = exchange.identity
        return form.write(exchange, encoded)

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """See TextProtocol."""
        form: TextProtocol = identity or self._own
        return form.error_answer(error, development=development)


class TextHead(RequestOptions):
    """The options in the head of a request. `client` is the header X-Client-Id. `timeout` is 0 for the server's setting.

    The constructor raises the errors of RequestOptions.
    """

    __slots__ = ("client",)

    def __init__(self, headers: Headers) -> None:
        super().__init__(0.0)
        self.client = ""
        for name, value in headers:
            if name == CLIENT_ID:
                self.client = check_client(value.decode("latin-1"), "X-Client-Id")
            else:
                self.read(name, value)

    def client_name(self, peer: str | None) -> str:
        """Return the name under which the client is counted: its X-Client-Id, or else its address."""
        return self.client or peer or "local"

    def apply_to(self, exchange: TextExchange, peer: str | None) -> None:
        """Set client, priority, timeout and trace of `exchange`. A client that the body names goes before that of the head."""
        exchange.client = exchange.client or self.client
        exchange.client_name = exchange.client or peer or "local"
        exchange.priority = self.priority
        exchange.timeout = self.timeout or None
        exchange.trace = self.carrier


class HttpTexts:
    """Answers the requests of `protocol`. It is called with those of ASGI; FastTexts uses its parts for those of the fast path."""

    def __init__(self, protocol: TextProtocol, context: EmbeddingContext) -> None:
        self.protocol = protocol
        self.context = context

    async def __call__(self, call: AsgiCall) -> HttpResponse | None:
        """Return the response to `call`, also for an error; None if it has been sent already or the caller has left."""
        exchange = TextExchange(self.context, self.protocol.name)
        try:
            content_type = dict(call.headers).get(b"content-type", b"").decode("latin-1")
            await parsed(call.body, partial(self.protocol.read, exchange, call.headers, call.body), content_type)
            head = TextHead(call.headers)
            head.apply_to(exchange, call.peer)
            encoded = await unless_left(exchange.vectors(), call.receive)
            return await self._answer_call(exchange, encoded, head, call)
        except ClientLeft:
            return None
        except WeirError as error:
            return self.refusal(error, exchange)

    def refusal(self, error: BaseException, exchange: TextExchange | None = None) -> HttpResponse:
        """Return the answer for `error`, and count it. Without `exchange` nothing of the request has been read."""
        exchange = exchange or TextExchange(self.context, self.protocol.name)
        answer = self.protocol.error_answer(error, exchange.identity, development=self.context.http.development)
        exchange.refused(answer.status)
        return answer

    async def _answer_call(
        self, exchange: TextExchange, encoded: Encoded, head: TextHead, call: AsgiCall
    ) -> HttpResponse | None:
        """Return the response; a very large one is sent in parts, uncompressed, and the result is None."""
        if _numbers(encoded) > _STREAMED_ABOVE and call.version != "1.0":
            listing = self.protocol.write(exchange, encoded)
            if isinstance(listing, Listing):
                headers = identified(HttpResponse(200, _marks(encoded), b""), call.headers).headers
                sent = await unless_left(send_listing(call.send, listing, headers), call.receive)
                exchange.delivered(encoded, len(call.body), sent)
                return None
        return await self.answer(exchange, encoded, head, len(call.body))

    async def answer(
        self, exchange: TextExchange, encoded: Encoded, head: TextHead, received_bytes: int
    ) -> HttpResponse:
        """Return the answer with the vectors, compressed if the caller accepts that, and count it. A long one is encoded in a thread."""
        write = partial(self.whole, exchange, encoded)
        size_bytes = _size(encoded) + _found_size(exchange.found)
        answer = await written(size_bytes, write) if size_bytes > LONG_ANSWER else write()
        if head.accept_coding and len(answer.body) > self.context.http.compress_above:
            answer = await compressed_off_loop(answer, head.accept_coding)
        exchange.delivered(encoded, received_bytes, len(answer.body))
        return answer

    def whole(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the answer with the vectors, not compressed and not counted."""
        written = self.protocol.write(exchange, encoded)
        answer = written.whole() if isinstance(written, Listing) else written
        answer.headers.extend(_marks(encoded))
        return answer


def _marks(encoded: Encoded) -> Headers:
    dispatch, arrival = encoded.dispatch or (None, 0.0)
    waited = start_headers(arrival, dispatch) if dispatch is not None and dispatch.woken_at is not None else []
    cut = sum(encoded.truncated)
    return mark_headers(cut, encoded.foreign) + waited if cut or encoded.foreign else waited


def _size(encoded: Encoded) -> int:
    """Return about how many bytes the vectors take as JSON."""
    return TEXT_BYTES * _numbers(encoded) if encoded.written is None else len(encoded.written)


def _found_size(found: Any) -> int:
    """Return about how many bytes the texts, or the tokens of texts, that were found take as JSON."""
    return sum([len(each) if isinstance(each, str) else DETAIL_BYTES * len(each) for each in found or ()])


def _numbers(encoded: Encoded) -> int:
    """Return how many numbers the outputs have together."""
    return encoded.vectors.size + sum(each.size for results in encoded.further.values() for each in results)


class FastTexts:
    """The RouteHandler, see frontends/http/fast/plan.py, of the endpoints of `texts`, whose protocols write errors alike. Only requests for `models` are
    answered, which have no vectors of tokens, so that answers are small."""

    of_service = False

    def __init__(self, texts: Sequence[HttpTexts], models: Container[str]) -> None:
        self.models = models
        self._texts = {path: each for each in texts for path in each.protocol.paths}
        self._errors = texts[0]
        self.prefix = tuple(path.encode() for path in self._texts if path != "/")
        self._longest = min(LARGE_BYTES, self._errors.context.http.max_body_size)

    def request(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> "FastTextRequest":
        """See RouteHandler."""
        return FastTextRequest(self, connection, plan, payload)

    def complete(self, plan: "RoutePlan", http_head: "HttpHead", path: str) -> bool:
        """See RouteHandler. An invalid head is left to the ASGI application, which answers with the error."""
        texts = self._texts.get(path)
        if texts is None or not 0 < http_head.length <= self._longest or plan.expects_continue:
            return False
        try:
            head = TextHead(http_head.headers)
        except WeirError:
            return False
        if head.coding:
            return False
        plan.head = (texts, head, http_head.headers)
        return True

    def named(self, path: str) -> "ModelHandle | None":
        """See RouteHandler: the body names the model."""
        return None

    def error_answer(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """See RouteHandler."""
        return self._errors.refusal(error)


class FastTextRequest:
    """One request on a connection of the fast path; see HotRequest."""

    __slots__ = (
        "_connection", "_exchange", "_head", "_headers", "_models", "_plan", "_task", "_texts", "_withdraw", "payload"
    )  # fmt: skip

    def __init__(self, handler: FastTexts, connection: "Connection", plan: "RoutePlan", payload: bytes) -> None:
        self.payload = payload
        self._models = handler.models
        self._connection = connection
        self._plan = plan
        self._texts, self._head, self._headers = plan.head
        self._exchange = TextExchange(self._texts.context, self._texts.protocol.name)
        self._task: asyncio.Task[None] | None = None
        self._withdraw: Callable[[], object] | None = None

    def begin(self) -> None:
        """See HotRequest."""
        exchange = self._exchange
        try:
            self._texts.protocol.read(exchange, self._headers, self.payload)
        except WeirError as error:
            return self._refuse(error)
        if exchange.model not in self._models or not _has_small_answer(exchange):
            return self._connection.hand_over(self._plan, self.payload)
        self._head.apply_to(exchange, self._connection.peer)
        try:
            self._withdraw = exchange.begin_one(self._one_answered)
        except WeirError as error:
            exchange.received(1)
            return self._answer(self._texts.refusal(error, exchange))
        if self._withdraw is None:
            self._run(self._answered())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        # A new context: the current one may be that of an earlier request on this connection, with its trace and claim.
        self._task = asyncio.get_running_loop().create_task(work, context=Context())

    def _one_answered(self, encoded: Encoded | WeirError) -> None:
        """Answer the request with the vector of its only text, or with its error."""
        self._withdraw = None
        texts, exchange = self._texts, self._exchange
        if isinstance(encoded, WeirError):
            return self._end_with(encoded)
        if self._head.accept_coding and _size(encoded) > texts.context.http.compress_above:
            return self._run(self._answered(encoded))
        try:
            answer = texts.whole(exchange, encoded)
            exchange.delivered(encoded, len(self.payload), len(answer.body))
        except Exception as error:
            answer = self._failed(error)
        if self._head.request_id is not None:
            answer.headers.extend(echo_headers(self._head))
        self._connection.answer(self._plan, answer)  # such requests are not traced (see Encoder.encode_one)

    async def _answered(self, encoded: Encoded | None = None) -> None:
        """Answer the request with its vectors, which are computed unless they are there. What they hold is charged as in an ASGI call."""
        texts, exchange = self._texts, self._exchange
        try:
            with self._connection.shared.account.claim() as claim:
                CLAIM.set(claim)
                encoded = encoded or await exchange.vectors()
                answer = await texts.answer(exchange, encoded, self._head, len(self.payload))
        except Exception as error:
            self._end_with(error)
        else:
            self._answer(answer)

    def _end_with(self, error: Exception) -> None:
        """Answer with `error`."""
        self._answer(self._failed(error))

    def _failed(self, error: Exception) -> HttpResponse:
        """Return the answer for `error`, and log it unless it is one that callers are to expect."""
        if not isinstance(error, WeirError):
            _log.exception("POST %s failed", self._texts.protocol.paths[0])
        texts: HttpTexts = self._texts
        return texts.refusal(error, self._exchange)

    def _answer(self, answer: HttpResponse) -> None:
        answer.headers.extend(echo_headers(self._head))
        self._connection.answer(self._plan, identified(answer, ()))

    def fail(self, error: Exception) -> None:
        """See HotRequest."""
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        answer = self._texts.refusal(error, self._exchange)
        answer.headers.extend(echo_headers(self._head))
        self._connection.answer(self._plan, answer)

    def leave(self) -> None:
        """See HotRequest."""
        if self._withdraw is not None:
            self._withdraw()
        if self._task is not None:
            self._task.cancel()


def _has_small_answer(exchange: TextExchange) -> bool:
    """Return whether the response need not be sent in parts: to a few texts, but for vectors of their tokens, or to more with a vector or scores each."""
    encoder, options = exchange.encoder, exchange.options
    if TextOutput.TOKENS in options.outputs:
        return False
    count = len(exchange.texts)
    if count <= SMALL_REQUEST:
        return True
    if (
        encoder is None
        or exchange.work is not None
        or options.outputs
        or TextOutput.SPARSE in encoder.facts.outputs[:1]
    ):
        return False
    return TEXT_BYTES * count * (options.dimensions or encoder.dimensions) <= LONG_ANSWER


# How an API of texts is declared.


class TextCall(NamedTuple):
    """An endpoint for texts: its protocol, which has its paths, and what OpenAPI says of the first of them: the types of body and response, and an `example` of
    the body, which models with `task` take; None: all do. The others are for other clients."""

    protocol: TextProtocol
    summary: str
    body: Any
    example: Any
    answer: Any
    task: TextTask | None = None


class TextPage(NamedTuple):
    """A path of an API that takes no texts, what answers it, and what OpenAPI says of it. `body` is None where it has none."""

    method: str
    path: str
    summary: str
    answer: Any
    handler: Handler
    body: Any = None
    example: Any = None


class TextApi:
    """The endpoints of one API of texts, which write errors alike, as the type `error`. Its endpoints follow from `calls` and `pages`."""

    def __init__(
        self, context: EmbeddingContext, error: Any, calls: Sequence[TextCall], pages: Sequence[TextPage] = ()
    ) -> None:
        self.context = context
        self.texts = [HttpTexts(call.protocol, context) for call in calls]
        self._error = error
        self._calls = calls
        self._pages = pages

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints."""
        refuse = self.texts[0].refusal
        app = partial(Endpoint, settings=self.context.http, refuse=refuse)
        described = partial(described_call, error=self._error)
        found: list[HttpEndpoint] = []
        for call, texts in zip(self._calls, self.texts, strict=True):
            first, *others = call.protocol.paths
            shown = described(first, call.summary, call.body, call.example, call.answer)
            able = call.task is None or any(call.task in each.facts.tasks for each in self.context.encoders.values())
            example = call.example if able else None
            found.append(HttpEndpoint("POST", first, app(texts), shown, refuse, infers=True, example=example))
            found += [HttpEndpoint("POST", path, app(texts), None, refuse, infers=True) for path in others]
        for page in self._pages:
            method, path, summary = page.method, page.path, page.summary
            shown = (
                operation(method, path, summary, page.answer, self._error, tag="texts")
                if page.body is None
                else described(path, summary, page.body, page.example, page.answer)
            )
            found.append(HttpEndpoint(method.upper(), path.replace("}", ":path}"), app(page.handler), shown, refuse))
        return found


def described_call(path: str, summary: str, body: Any, example: Any, answer: Any, error: Any) -> dict[str, Any]:
    """Return the OpenAPI operation of a call for vectors, with the headers that all of them read. `example` is a body as the type `body` declares it."""
    content = {JSON: {"schema": body, "examples": {"1": {"value": example}}}}
    return {
        **operation("post", path, summary, answer, error, tag="texts"),
        "parameters": described_headers(("X-Request-Timeout", "X-Request-Priority", "X-Client-Id", "X-Request-Id")),
        "requestBody": {"required": True, "content": content},
    }
