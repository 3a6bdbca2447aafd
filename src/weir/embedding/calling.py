"""One HTTP call for the vectors of texts: who asks, until when, what becomes of it, and how the answer is written.

Small calls are answered on the fast lane: one task for each, and no ASGI between it and its connection. What a head or a body wants beyond a few short
texts is for the ASGI application, which gets the connection then.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy
import orjson
from numpy.typing import NDArray
from starlette.types import Receive, Send

from weir.embedding.encoder import SMALL
from weir.embedding.metrics import TextClients, TextCounts
from weir.embedding.texts import Encoded, Encodes, Text
from weir.errors import Cancelled, InvalidRequest, ModelNotFound, WeirError, brief
from weir.frontends.http.asgi import AsgiCall, disconnected, identified
from weir.messages import JSON
from weir.protocols.account import charge
from weir.protocols.native import RequestOptions
from weir.protocols.offloading import off_loop
from weir.protocols.response import Headers, HttpResponse, compressed, echo_headers
from weir.protocols.settings import HttpSettings
from weir.wire.cells import LARGE_BYTES
from weir.wire.tensors import TEXT_BYTES
from weir.wire.values import decode_json, find_half, uncollected, without_halves

if TYPE_CHECKING:
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.http.fast.plan import Head, RoutePlan
    from weir.serving.service import Service

_log = logging.getLogger("weir.http")

CLIENT_ID = b"x-client-id"
TRUNCATED = b"x-weir-truncated"
FOREIGN = b"x-weir-foreign-ids"
_LONGEST_CLIENT_ID = 128
_LONG_WORK = 20_000  # numbers whose writing would keep the event loop for more than about a millisecond
_LARGEST = 1_000_000  # numbers that are about 20 MB as text
_NUMBERS_AT_ONCE = 65_536  # that are written together: about a megabyte as text
_AS_JSON = (b"content-type", JSON.encode())
_WORDS = {str: "a text", bool: "true or false", int: "a whole number"}

T = TypeVar("T")


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
        return HttpResponse(200, [_AS_JSON], body)


async def send_listing(send: Send, listing: Listing, headers: Headers) -> int:
    """Send `listing` bit by bit, with `headers` beside its own; return how many bytes it was. Each bit is made in a thread when
    most of the one before has been read."""
    headers = [_AS_JSON, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    parts, sent = listing.parts(), 0
    while part := await asyncio.to_thread(next, parts, b""):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        sent += len(part)
    await send({"type": "http.response.body", "body": b""})
    return sent


class Models:
    """The models of a server by name; where none is named, the first is meant."""

    def __init__(self, encoders: Mapping[str, Encodes]) -> None:
        self.encoders = encoders

    def get(self, name: str = "") -> Encodes:
        """Return the model called `name`. Raises ModelNotFound naming those there are."""
        name = name or next(iter(self.encoders), "")
        if name not in self.encoders:
            there_are = ", ".join(self.encoders) or "no models of texts"
            raise ModelNotFound(f"model {name!r}: there is none of this name; there are {there_are}")
        return self.encoders[name]


class Caller:
    """What the head of a call says of who calls. `client` is whom the caller says to be (X-Client-Id): his calls share one share of the
    line; a call without it has its own. Raises the errors of `RequestOptions`."""

    def __init__(self, headers: Headers) -> None:
        self.client = ""
        self.wishes = RequestOptions(0.0)  # 0: the server's own timeout
        for name, value in headers:
            if name == CLIENT_ID:
                self.client = check_client(value.decode("latin-1"), "X-Client-Id")
            else:
                self.wishes.read(name, value)

    def whose(self, peer: str | None) -> str:
        """Return who is counted: whom the caller says to be, or else his address."""
        return self.client or peer or "local"


class TextCall:
    """One call of the path `path` for the vectors of texts: `read` comes first, then `encoded`. `caller` is what its head says, if that is
    known already. `asgi` says when the caller leaves and sends what is written bit by bit; without it, whoever runs the call cancels it."""

    door: str
    path: str

    texts: Sequence[Text]
    encoder: Encodes

    def __init__(
        self, site: "EmbeddingContext", headers: Headers, peer: str | None, body: bytes, *, caller: Caller | None = None, asgi: AsgiCall | None = None
    ) -> None:  # fmt: skip
        self.site = site
        self.headers = headers
        self.peer = peer
        self.body = body
        self.caller = caller
        self.asgi = asgi

    @classmethod
    async def answer_to(cls, call: AsgiCall, site: "EmbeddingContext") -> HttpResponse | None:
        """Return the answer to `call`, whatever becomes of it; None: nothing is left to say."""
        one = cls(site, call.headers, call.peer, call.body, asgi=call)
        try:
            await read(call.body, one.read)
            return await one.encoded()
        except Cancelled:
            return None
        except WeirError as error:
            return one.refused(error)

    @property
    def model(self) -> str:
        """The name of the model that is asked, "" before it is known."""
        return self.encoder.name if hasattr(self, "encoder") else ""

    def read(self) -> None:
        """Find out whose vectors are wanted, of which model. Raises what is wrong with the body."""
        raise NotImplementedError  # each endpoint has its own

    async def encoded(self) -> HttpResponse | None:
        """Return the answer with the vectors; None: it has been sent. Raises what `Encodes.encode` raises, and Cancelled."""
        raise NotImplementedError  # each endpoint has its own

    def refused(self, error: BaseException) -> HttpResponse:
        """Return the answer for `error`, which is counted."""
        return self.refusal(self.site, error, self.model)

    @classmethod
    def refusal(
        cls, site: "EmbeddingContext", error: BaseException, model: str = "", identity: Any = None
    ) -> HttpResponse:
        """Return the answer for `error`, which is counted for `model` ("": it is not known); `identity` is what the caller calls his call."""
        answer = cls.error_answer(site, error, identity)
        site.counts.refused(model, cls.door, answer.status)
        return answer

    @staticmethod
    def error_answer(site: "EmbeddingContext", error: BaseException, identity: Any) -> HttpResponse:
        """Return the answer for `error` in the endpoint's form."""
        raise NotImplementedError  # each endpoint has its own

    async def vectors(
        self, *, client: str = "", dimensions: int | None = None, truncate: bool | None = None, want_tokens: bool = False,
        prompt: str | None = None, whole_words: bool = False,
    ) -> Encoded:  # fmt: skip
        """Return what the encoder makes of the texts. Raises its errors, and Cancelled when the caller has left: nothing of it goes on
        then."""
        site = self.site
        self.caller = caller = self.caller or Caller(self.headers)
        client, wishes = client or caller.client, caller.wishes
        site.clients.asked(client or caller.whose(self.peer), len(self.texts), door=self.door)
        work = self.encoder.encode(
            self.texts, door=self.door, client=client, priority=wishes.priority,
            timeout=wishes.timeout or None, dimensions=dimensions, truncate=truncate, want_tokens=want_tokens,
            prompt=prompt, whole_words=whole_words, trace=wishes.traceparent,
        )  # fmt: skip
        encoded = await self._unless_left(work)
        site.clients.warn_of_ids(client or caller.whose(self.peer), encoded.foreign, self.encoder.name)
        return encoded

    def _unless_left(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return work if self.asgi is None else unless_left(work, self.asgi.receive)

    async def answer(self, encoded: Encoded, write: Callable[[Encoded], HttpResponse | Listing]) -> HttpResponse | None:
        """Return what `write` makes of `encoded`, compressed if the caller likes that; large answers are made in a thread, and of
        the largest nothing is left to be done: they have been sent bit by bit, as they are. All are counted."""
        asgi, size, whole = self.asgi, encoded.vectors.size, partial(self._whole, encoded, write)
        if (
            size > _LARGEST
            and asgi is not None
            and asgi.version != "1.0"
            and isinstance(made := write(encoded), Listing)
        ):
            headers = identified(HttpResponse(200, _marks(encoded), b""), self.headers).headers
            answer, sent = None, await self._unless_left(send_listing(asgi.send, made, headers))
        else:
            if size > _LONG_WORK:
                charge(TEXT_BYTES * size)
            answer = await asyncio.to_thread(whole) if size > _LONG_WORK else whole()
            sent = len(answer.body)
        counts = self.site.counts
        counts.answered(self.model, self.door, len(encoded.counts), sum(encoded.truncated))
        counts.transferred(self.model, self.door, len(self.body), sent)
        return answer

    def _whole(self, encoded: Encoded, write: Callable[[Encoded], HttpResponse | Listing]) -> HttpResponse:
        assert self.caller is not None  # `vectors` has come before
        made = write(encoded)
        answer = made.whole() if isinstance(made, Listing) else made
        answer.headers.extend(_marks(encoded))
        coding = self.caller.wishes.accept_coding
        return compressed(answer, coding) if coding and len(answer.body) > self.site.http.compress_above else answer


def _marks(encoded: Encoded) -> Headers:
    marks = [(TRUNCATED, sum(encoded.truncated)), (FOREIGN, encoded.foreign)]
    return [(name, b"%d" % count) for name, count in marks if count]


async def unless_left(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what `work` returns. It is cancelled when the caller leaves: raises Cancelled."""
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


class EmbeddingContext:
    """What the endpoints of texts share: models, settings and counts."""

    def __init__(
        self, models: Models, http: HttpSettings, max_texts: int, counts: TextCounts, clients: TextClients | None = None
    ) -> None:
        self.models = models
        self.http = http
        self.max_texts = max_texts
        self.counts = counts
        self.clients = clients or TextClients()

    def check_count(self, count: int, field: str) -> None:
        """Raise InvalidRequest for a list of texts that may not have so many."""
        if not 1 <= count <= self.max_texts:
            raise InvalidRequest(f"{field}: has {count} texts, must have 1 to {self.max_texts} (max_texts)")


def check_text(text: Any, where: str) -> str:
    """Return `text` if it can be encoded. Raises InvalidRequest naming `where` it stands and the rule."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: must be a text, is {brief(text)}")
    if not text:
        raise InvalidRequest(f"{where}: must not be empty")
    return text


def read_text(text: Any, where: str, tokenized: bool | None) -> Text:
    """Read one: a list is of words or of token ids, whether `tokenized` is said or not, but then all must be."""
    if not isinstance(text, list):
        if tokenized:
            raise InvalidRequest(f"{where}: must be a list of words (is_tokenized), is {brief(text)}")
        return check_text(text, where)
    if not text:
        raise InvalidRequest(f"{where}: must not be empty")
    kind = type(text[0])
    if kind not in (str, int) or (kind is int and tokenized) or any(type(each) is not kind for each in text):
        raise InvalidRequest(f"{where}: must be a text, a list of words, or a list of token ids, is {brief(text)}")
    return text


def read_field(said: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return the field of that name, `default` where it is not there or null. Raises InvalidRequest unless it is of that kind."""
    value = said.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequest(f"{name}={brief(value)}: must be {_WORDS[kind]}")
    return value


async def read(body: bytes, reader: Callable[[], T]) -> T:
    """Return what `reader` makes of `body`; of a large one in a thread."""
    return await off_loop(len(body), reader)


def truncated_places(encoded: Encoded) -> list[int]:
    """Return which texts were cut."""
    return [place for place, cut in enumerate(encoded.truncated) if cut]


def check_client(text: str | None, where: str) -> str:
    """Return whom a caller says to be; "" if he says nothing. Raises InvalidRequest naming `where` he said it and the rule."""
    if text is None:
        return ""
    if not 0 < len(text) <= _LONGEST_CLIENT_ID:
        raise InvalidRequest(f"{where} {text[:40]!r}: must have 1 to {_LONGEST_CLIENT_ID} characters")
    return text


def read_json(body: bytes, *, clean: str = "") -> Any:
    """Return what `body` says. In the field `clean`, if one is named, halves of surrogate pairs are read as NULs.

    Raises InvalidRequest saying what is wrong; its details name the field (`param`) if it is one's.
    """
    try:
        with uncollected(len(body)):
            return decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = find_half(body)
        if half is None:
            raise InvalidRequest(f"body: is not JSON ({error})") from error
        param = half.where.partition("[")[0] or None
        if param == clean and (made := without_halves(body)) is not None:
            return read_json(made)
        raise InvalidRequest(str(half), details={"param": param}) from error


def as_json(vectors: NDArray[Any]) -> list[msgspec.Raw]:
    """Return the vector, or vectors, of each text as JSON: of each float32 the fewest digits that are that float32 to who reads it, also
    by way of a double; what is not finite is null. One by one, so that other threads are not kept waiting for all of them."""
    written = numpy.ascontiguousarray(vectors, numpy.float32)
    return [msgspec.Raw(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)) for vector in written]


class HotTexts:
    """The RouteHandler of the calls of `kind`; see fastlane/plan.py. `models` have one vector for each text, so that no answer is large."""

    of_service = False

    def __init__(self, site: EmbeddingContext, kind: type[TextCall], models: Container[str]) -> None:
        self.site = site
        self.kind = kind
        self.models = models
        self.prefix = kind.path.encode()
        self._longest = min(LARGE_BYTES, site.http.max_body_size)

    def request(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> "HotCall":
        """See RouteHandler."""
        return HotCall(self, connection, plan, payload)

    def complete(self, plan: "RoutePlan", head: "Head", path: str) -> bool:
        """See RouteHandler. What is wrong with a head the ASGI application says."""
        if path != self.kind.path or not 0 < head.length <= self._longest or plan.expects_continue:
            return False
        try:
            caller = Caller(head.headers)
        except WeirError:
            return False
        if caller.wishes.coding:
            return False
        plan.ask = (caller, head.headers)
        return True

    def named(self, path: str) -> "Service | None":
        """See RouteHandler: the body names the model."""
        return None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """See RouteHandler."""
        return self.kind.refusal(self.site, error)


class HotCall:
    """One call on `connection`."""

    __slots__ = ("_call", "_caller", "_connection", "_manner", "_plan", "_task", "payload")

    def __init__(self, manner: HotTexts, connection: "Connection", plan: "RoutePlan", payload: bytes) -> None:
        self.payload = payload
        self._manner = manner
        self._connection = connection
        self._plan = plan
        self._caller, headers = plan.ask
        self._call = manner.kind(manner.site, headers, _peer(connection), payload, caller=self._caller)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """See HotRequest."""
        call = self._call
        try:
            call.read()
        except WeirError as error:
            return self._refuse(error)
        if len(call.texts) > SMALL or call.model not in self._manner.models:
            return self._connection.hand_over(self._plan, self.payload)
        # A context of its own: what is current in that of a call before, whose answer made room for this, is not of this one.
        self._task = asyncio.get_running_loop().create_task(self._answered(), context=Context())

    async def _answered(self) -> None:
        call = self._call
        try:
            answer = await call.encoded()
            assert answer is not None  # that of a small call is never sent bit by bit
        except Cancelled:
            return self._connection.abort()
        except WeirError as error:
            answer = call.refused(error)
        except Exception as error:
            _log.exception("POST %s failed", call.path)
            answer = call.refused(error)
        self._connection.answer(self._plan, identified(answer, call.headers))

    def fail(self, error: Exception) -> None:
        """See HotRequest."""
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        answer = self._call.refused(error)
        answer.headers.extend(echo_headers(self._caller.wishes))
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
        ("X-Request-Priority", "higher goes first; 0 unless said otherwise", {"type": "integer"}),
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
            "200": {"description": "As said", "content": {JSON: {"schema": answer}}},
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
