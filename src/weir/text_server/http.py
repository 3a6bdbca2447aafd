"""The HTTP channels of requests for texts: an ASGI call, and a connection of the fast path; and how the endpoints of a product are declared.

Requests with small responses are answered on the fast path, without ASGI between them and their connection. For any other request the connection is handed
over to the ASGI application.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, get_type_hints

import msgspec
from starlette.types import Send

from weir.errors import InvalidRequest, WeirError
from weir.frontends.http.asgi import AsgiCall, ClientLeft, Endpoint, Handler, HttpEndpoint, identified, unless_left
from weir.frontends.http.openapi import described_headers, operation
from weir.messages import JSON
from weir.protocols.account import CLAIM, Account, charge_values
from weir.protocols.exchange import PassedOn
from weir.protocols.native import RequestOptions
from weir.protocols.offloading import LONG_RESPONSE, charge_body
from weir.protocols.response import (
    JSON_HEADER,
    Headers,
    HttpResponse,
    compressed_off_loop,
    echo_headers,
    encode_safely,
    error_headers,
    start_headers,
    trace_headers,
)
from weir.text_models.texts import TextOutput
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextCall, TextExchange, TextWork, numbers_of
from weir.text_server.pictures import UPLOADS, has_pictures, is_upload, read_upload
from weir.text_server.requests import SMALL_REQUEST
from weir.text_server.texts import TEXTS_FIELD, Encoded, TextTask
from weir.wire.cells import LARGE_BYTES
from weir.wire.schema import any_of, wrong_field
from weir.wire.status import http_code
from weir.wire.tensors import TEXT_BYTES
from weir.workers.timer import resolve

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import HttpHead, RoutePlan
    from weir.serving.handle import ModelHandle

_log = logging.getLogger("weir.http")

CLIENT_ID, TRUNCATED, FOREIGN = b"x-client-id", b"x-weir-truncated", b"x-weir-foreign-ids"
_STREAMED_ABOVE = 1_000_000  # numbers, about 20 MB of JSON; a larger response is sent in parts
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
    headers: Sequence[tuple[bytes, bytes]] = ()

    def parts(self) -> Iterator[bytes]:
        """Yield the JSON in parts."""
        for each in self.lists:
            yield from each.parts()
        yield self.closing

    def whole(self) -> HttpResponse:
        """Return the response with the whole document as its body."""
        return HttpResponse(200, [JSON_HEADER, *self.headers], b"".join(self.parts()))


def listing(
    lead: Mapping[str, Any] | None,
    name: str,
    length: int,
    numbers: int,
    items: Callable[[int, int], list[Any]],
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Listing:
    """Return an object with the fields `lead`, at least one, that ends with the list `name`; without `lead` a list alone. See JsonList and Listing."""
    opening = b"[" if lead is None else msgspec.json.encode(lead)[:-1] + b',"%b":[' % name.encode()
    return Listing([JsonList(opening, length, numbers, items)], b"]" if lead is None else b"]}", headers)


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
        document: returns the document for an error, with a traceback only for development.
        status: returns the status of an error.
        field: the name of the texts in errors.
    """

    document: Callable[[BaseException, bool], Mapping[str, Any]]
    status: Callable[[BaseException], int] = http_code
    field: str = TEXTS_FIELD

    def response(self, error: BaseException, *, development: bool) -> HttpResponse:
        """Return the response for `error`."""
        named = error.renamed({TEXTS_FIELD: self.field}) if isinstance(error, WeirError) else error
        return HttpResponse(self.status(named), error_headers(named), encode_safely(self.document(named, development)))


HttpWork = TextWork[HttpResponse | Listing]


def content_type_of(headers: Headers) -> str:
    """Return the content type of the body of a request; "" if none is stated."""
    return dict(headers).get(b"content-type", b"").decode("latin-1")


@dataclass
class TextEndpoint:
    """An endpoint for texts. It decorates the function that reads a request, whose `request` has the type of a body.

    Attributes:
        path: where it is.
        summary: what OpenAPI says of it.
        example: a body, which every model with `task` takes.
        response: the type of a response.
        task: what it asks a model for; None: for what every model does.
        name: its name in metrics.
        errors: how it writes errors.
        variants: the endpoints of other products at the same path: a body with a field of this name is for that endpoint.
        aliases: further paths, for other clients.
        uploads: whether it takes a picture as its body, and a form with files.
        read: reads a request. Raises InvalidRequest naming the field and the rule, and ModelNotFound.
        request: the type of a body.
    """

    path: str
    summary: str
    example: Any
    response: Any
    task: TextTask | None = None
    _: KW_ONLY
    name: str
    errors: ErrorForm
    variants: "Mapping[str, TextEndpoint]" = field(default_factory=dict)
    aliases: Sequence[str] = ()
    uploads: bool = False
    read: "Callable[[Any, HttpExchange], HttpWork]" = field(init=False)
    request: type[Any] = field(init=False)

    def __call__(self, read: "Callable[[Any, HttpExchange], HttpWork]") -> Self:
        """Return the endpoint, whose requests are read by `read`."""
        self.read, self.request = read, get_type_hints(read)["request"]
        return self

    def work(self, exchange: "HttpExchange", headers: Headers, body: bytes) -> HttpWork:
        """Return what the request `exchange` with this body asks for. Raises what `read` raises."""
        return self.uploaded(exchange, headers, body) or self.work_of(exchange, forms.read_object(body))

    def uploaded(self, exchange: "HttpExchange", headers: Headers, body: bytes) -> HttpWork | None:
        """Return what an upload asks for; None if the request is none. Raises what `read` raises."""
        if not self.uploads or not is_upload(content_type := content_type_of(headers)):
            return None
        document = read_upload(content_type, body, self.errors.field, exchange.context.max_texts)
        return self.read(self._converted(document, strict=False), exchange)

    def work_of(self, exchange: "HttpExchange", document: dict[str, Any]) -> HttpWork:
        """Return what a decoded body without fields that are null asks for. Raises what `read` raises."""
        for mark, variant in self.variants.items():
            if mark in document:
                exchange.errors = variant.errors
                return variant.work_of(exchange, document)
        return self.read(self.request_of(document), exchange)

    def request_of(self, document: dict[str, Any]) -> Any:
        """Return a decoded body as a value of the type `request`. Raises InvalidRequest about the field, naming the rule."""
        return self._converted(document, strict=True)

    def _converted(self, document: dict[str, Any], *, strict: bool) -> Any:
        # The fields of a form are texts, also where numbers are meant.
        try:
            return msgspec.convert(document, self.request, strict=strict)
        except msgspec.ValidationError as error:
            name, message = wrong_field(document, self.request, error)
            raise InvalidRequest(message).about(name) from None

    def described(self, error: Any) -> dict[str, Any]:
        """Return its operation in OpenAPI. `error` is the type of errors."""
        others = [each.request for each in self.variants.values()]
        body = Annotated[Any, any_of(self.request, *others)] if others else self.request
        uploads = UPLOADS if self.uploads else ()
        return described_post(self.path, self.summary, body, self.example, self.response, error, uploads)


@dataclass(eq=False, slots=True)
class HttpExchange(TextExchange):
    """A request over HTTP. `errors` says how its errors are written: as those of its endpoint, until the body says more."""

    errors: ErrorForm = field(kw_only=True)


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
                self.client = forms.check_client(value.decode("latin-1"), "X-Client-Id")
            else:
                self.read(name, value)

    def client_name(self, peer: str | None) -> str:
        """Return the name under which the client is counted: its X-Client-Id, or else its address."""
        return self.client or peer or "local"

    def apply_to(self, exchange: TextExchange, peer: str | None) -> None:
        """Set client, priority, timeout and trace of `exchange`. A client that the body names goes before that of the head."""
        exchange.client = exchange.client or self.client
        exchange.peer = peer
        exchange.priority = self.priority
        exchange.timeout = self.timeout or None
        exchange.trace = self.carrier


class HttpTexts:
    """Responds to the requests at `endpoint`: to those of ASGI itself, and FastTexts to those of the fast path."""

    def __init__(self, endpoint: TextEndpoint, context: EmbeddingContext) -> None:
        self.endpoint = endpoint
        self.context = context

    def refusal(self, error: BaseException, exchange: HttpExchange | None = None) -> HttpResponse:
        """Return the response for an `error`, and count it; None is the exchange of a request of which nothing has been read, or which was counted before."""
        errors, model = (self.endpoint.errors, "") if exchange is None else (exchange.errors, exchange.model)
        response = errors.response(error, development=self.context.http.development)
        if exchange is not None or not (isinstance(error, WeirError) and error.reported):
            self.context.counts.refused(model, self.endpoint.name, response.status)
        return response

    async def __call__(self, call: AsgiCall) -> HttpResponse | None:
        """Return the response to `call`, also for an error; None if it has been sent already or the caller has left."""
        request = AsgiTextCall(self, call)
        request.begin()
        try:
            return await unless_left(request.response, call.receive)
        except ClientLeft:
            return None
        finally:
            request.leave()


class HttpTextCall(TextCall[HttpResponse | Listing, HttpResponse]):
    """A request at the endpoint of `texts`, with the body `payload`, from `peer`. A channel adds `send` and, before `compute`, the `head`."""

    exchange: HttpExchange
    head: TextHead

    def __init__(self, texts: HttpTexts, account: Account, headers: Headers, payload: bytes, peer: str | None) -> None:
        endpoint = texts.endpoint
        exchange = HttpExchange(texts.context, endpoint.name, route=endpoint.path, errors=endpoint.errors)
        super().__init__(exchange, account, len(payload))
        self.texts = texts
        self.headers = headers
        self.payload = payload
        self.peer = peer

    def compute(self, work: HttpWork) -> None:
        """See TextCall."""
        self.head.apply_to(self.exchange, self.peer)
        super().compute(work)

    def write(self, work: HttpWork, encoded: Encoded) -> HttpResponse:
        """See TextCall. The response is neither compressed nor counted yet."""
        written = work.write(encoded)
        response = written.whole() if isinstance(written, Listing) else written
        response.headers.extend(_marks(encoded))
        return response

    def deliver(self, message: HttpResponse) -> None:
        """See ChannelCall. The response is compressed first, if the caller accepts that."""
        coding = self.head.accept_coding
        if coding and len(message.body) > self.texts.context.http.compress_above:
            self.run(compressed_off_loop(message, coding), super().deliver)
        else:
            super().deliver(message)

    def fail(self, error: Exception) -> None:
        """See ChannelCall."""
        self.send(self.texts.refusal(error, self.exchange))

    def report(self, error: Exception) -> None:
        """Log `error` unless it is one that callers are to expect."""
        if not isinstance(error, WeirError):
            _log.error("POST %s failed", self.texts.endpoint.path, exc_info=error)


class AsgiTextCall(HttpTextCall):
    """A request of ASGI. `response` gets its response, or None if that has been sent in parts."""

    def __init__(self, texts: HttpTexts, call: AsgiCall) -> None:
        claim = CLAIM.get()
        account = Account(texts.context.http) if claim is None else claim.account
        super().__init__(texts, account, call.headers, call.body, call.peer)
        self._call = call
        self.response: asyncio.Future[HttpResponse | None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Read the body, in a thread if it is long, and have the model compute what it asks for."""
        self.read(len(self.payload), self._work, self.compute)

    def _work(self) -> HttpWork:
        content_type = content_type_of(self.headers)
        if is_upload(content_type):
            charge_values(len(self.payload), partial(len, self.payload))
        else:
            charge_body(self.payload, content_type)
        return self.texts.endpoint.work(self.exchange, self.headers, self.payload)

    def compute(self, work: HttpWork) -> None:
        """See TextCall. Raises what TextHead raises."""
        self.head = TextHead(self.headers)
        super().compute(work)

    def computed(self, work: HttpWork, encoded: Encoded) -> None:
        """See TextCall. A very large response is sent in parts, uncompressed."""
        large = numbers_of(encoded) > _STREAMED_ABOVE and self._call.version != "1.0"
        listing = work.write(encoded) if large else None
        if not isinstance(listing, Listing):
            return super().computed(work, encoded)
        self.made = len(encoded.counts), sum(encoded.truncated)
        marked = HttpResponse(200, [*_marks(encoded), *trace_headers(self.exchange)], b"")
        headers = identified(marked, self.headers).headers
        self.run(send_listing(self._call.send, listing, headers), self.ended)

    def ended(self, sent_bytes: int) -> None:
        """See ChannelCall."""
        super().ended(sent_bytes)
        resolve(self.response, None)

    def send(self, message: HttpResponse) -> int:
        """See ChannelCall."""
        message.headers.extend(trace_headers(self.exchange))
        resolve(self.response, message)
        return len(message.body)


def mark_headers(truncated: int, foreign: int) -> Headers:
    """Return headers with the numbers of texts that were cut, and that came as token ids of another model. A number of 0 has no header."""
    return [(name, b"%d" % count) for name, count in ((TRUNCATED, truncated), (FOREIGN, foreign)) if count]


def _marks(encoded: Encoded) -> Headers:
    dispatch, arrival = encoded.dispatch or (None, 0.0)
    waited = start_headers(arrival, dispatch) if dispatch is not None and dispatch.woken_at is not None else []
    cut = sum(encoded.truncated)
    return mark_headers(cut, encoded.foreign) + waited if cut or encoded.foreign else waited


class FastTexts:
    """The RouteHandler, see frontends/http/fast/plan.py, of the endpoints of `texts`, which write errors alike. Only requests for `models` are
    answered, which have no vectors of tokens, so that responses are small."""

    of_service = False

    def __init__(self, texts: Sequence[HttpTexts], models: Container[str]) -> None:
        self.models = models
        self._texts = {path: each for each in texts for path in (each.endpoint.path, *each.endpoint.aliases)}
        self._errors = texts[0]
        self.prefix = tuple(path.encode() for path in self._texts if path != "/")
        self._longest = min(LARGE_BYTES, self._errors.context.http.max_body_size)

    def request(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> "FastTextCall":
        """See RouteHandler."""
        return FastTextCall(self, connection, plan, payload)

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

    def error_response(self, error: BaseException, service: "ModelHandle | None") -> HttpResponse:
        """See RouteHandler."""
        return self._errors.refusal(error)


class FastTextCall(HttpTextCall):
    """One request on a connection of the fast path; see HotRequest."""

    def __init__(self, handler: FastTexts, connection: "Connection", plan: "RoutePlan", payload: bytes) -> None:
        texts, self.head, headers = plan.head
        super().__init__(texts, connection.shared.account, headers, payload, connection.peer)
        self._models = handler.models
        self._connection = connection
        self._plan = plan

    def begin(self) -> None:
        """See HotRequest."""
        work = self.texts.endpoint.work(self.exchange, self.headers, self.payload)
        if self.exchange.model in self._models and _has_small_response(work):
            self.compute(work)
        else:
            self._connection.hand_over(self._plan, self.payload)

    def fail(self, error: Exception) -> None:
        """Write the error, or have another process respond."""
        if isinstance(error, PassedOn):
            self.exchange.passed_on()
            self._connection.hand_over(self._plan, self.payload)
        else:
            super().fail(error)

    def send(self, message: HttpResponse) -> int:
        """See ChannelCall."""
        if self.head.request_id is not None:
            message.headers.extend(echo_headers(self.head))
        if self.exchange.trace is not None:
            message.headers.extend(trace_headers(self.exchange))
        self._connection.respond(self._plan, message)
        return len(message.body)


def _has_small_response(work: HttpWork) -> bool:
    """Return whether the response need not be sent in parts: to a few texts, but for vectors of their tokens, or to more with a vector or scores each. The
    ASGI application takes pictures, which may be fetched, and which a front cannot send on."""
    encoder, options = work.encoder, work.options
    if TextOutput.TOKENS in options.outputs or has_pictures(work.texts):
        return False
    count = len(work.texts)
    if count <= SMALL_REQUEST:
        return True
    if work.compute is not None or options.outputs or TextOutput.SPARSE in encoder.facts.outputs[:1]:
        return False
    return TEXT_BYTES * count * (options.dimensions or encoder.dimensions) <= LONG_RESPONSE


class TextPage(NamedTuple):
    """A path of a product that takes no texts, what responds to it, and what OpenAPI says of it. `request` is None where it has no body."""

    method: str
    path: str
    summary: str
    response: Any
    handler: Handler
    request: Any = None
    example: Any = None

    def described(self, error: Any) -> dict[str, Any]:
        """Return its operation in OpenAPI. `error` is the type of errors."""
        if self.request is not None:
            return described_post(self.path, self.summary, self.request, self.example, self.response, error)
        return operation(self.method, self.path, self.summary, self.response, error, tag="texts")


class TextApi:
    """The endpoints and pages of one product, whose errors have the type `error`."""

    def __init__(
        self, context: EmbeddingContext, error: Any, endpoints: Sequence[TextEndpoint], pages: Sequence[TextPage] = ()
    ) -> None:
        self.context = context
        self.texts = [HttpTexts(each, context) for each in endpoints]
        self._error = error
        self._pages = pages

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints."""
        refuse = self.texts[0].refusal
        app = partial(Endpoint, settings=self.context.http, refuse=refuse)
        found: list[HttpEndpoint] = []
        for texts in self.texts:
            each = texts.endpoint
            able = each.task is None or any(each.task in model.facts.tasks for model in self.context.encoders.values())
            example = each.example if able else None
            shown = each.described(self._error)
            found.append(HttpEndpoint("POST", each.path, app(texts), shown, refuse, infers=True, example=example))
            found += [HttpEndpoint("POST", path, app(texts), None, refuse, infers=True) for path in each.aliases]
        for page in self._pages:
            path, shown = page.path.replace("}", ":path}"), page.described(self._error)
            found.append(HttpEndpoint(page.method.upper(), path, app(page.handler), shown, refuse))
        return found


def described_post(
    path: str, summary: str, request: Any, example: Any, response: Any, error: Any, others: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the OpenAPI operation of a POST for texts, with the headers that all of them read. `example` is a body as the type `request` declares it;
    `others` are further content types."""
    body = {JSON: {"schema": request, "examples": {"1": {"value": example}}}, **{kind: {} for kind in others}}
    parameters = described_headers(("X-Request-Timeout", "X-Request-Priority", "X-Client-Id", "X-Request-Id"))
    return operation("post", path, summary, response, error, tag="texts", parameters=parameters, body=body)
