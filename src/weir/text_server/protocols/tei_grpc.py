"""The gRPC services of text-embeddings-inference: Info, Embed, Predict, Rerank and Tokenize.

A call names no model: it goes to the first model of the server that can do what the method is for. Each request of a stream is answered in its order, as
soon as those before it are; requests of a stream are computed together.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from weir.errors import InvalidRequest, TooLarge, WeirError
from weir.frontends.grpc.call import Handler, IncomingCall, headers_of, in_task, parse, refuse, unary
from weir.protocols.exchange import Ended, Stop, end_of
from weir.text_models.packing import unit_vectors
from weir.text_models.texts import TextOptionFields
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextCall, TextExchange, TextWork, texts_of
from weir.text_server.http import TextHead
from weir.text_server.protocols import tei
from weir.text_server.texts import TEXTS_FIELD, Encoded, TextTask
from weir.wire.kserve_grpc import Method, message, methods
from weir.wire.status import http_code

SERVICES = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}
_NANOSECONDS = 1e9
_STREAM = "Stream"  # the end of the names of methods whose requests are streams

# The fields of a response, but for its metadata.
GrpcWork = TextWork[dict[str, Any]]
Read = Callable[[Any, TextExchange], GrpcWork]


class TeiMethod(NamedTuple):
    """A method, and what reads its requests."""

    context: EmbeddingContext
    declared: Method
    read: Read

    def begin(self, incoming: IncomingCall, size: int, request: Callable[[], Any], ended: Ended[bytes]) -> Stop:
        """Begin to answer one request; see TeiCall."""
        call = TeiCall(self, incoming, size, request, ended)
        call.attempt(call.begin)
        return call.leave


class TeiCall(TextCall[dict[str, Any], bytes]):
    """One request of `size` bytes in the call `incoming`. `request` returns its message, and `ended` is called once with that of its response, or the error."""

    def __init__(
        self, method: TeiMethod, incoming: IncomingCall, size: int, request: Callable[[], Any], ended: Ended[bytes]
    ) -> None:
        super().__init__(TextExchange(method.context, tei.NAME), incoming.account, size)
        self._method = method
        self._incoming = incoming
        self._request = request
        self._ended = ended

    def begin(self) -> None:
        """Read the request, in a thread if it is long, and have the model compute what it asks for."""
        exchange, left = self.exchange, self._incoming.time_remaining()
        TextHead(headers_of(self._incoming)).apply_to(exchange, self._incoming.peer)
        if left is not None:
            exchange.timeout = min(left, exchange.timeout or left)
        self.read(self.received_bytes, lambda: self._method.read(self._request(), exchange), self.compute)

    def write(self, work: GrpcWork, encoded: Encoded) -> bytes:
        """See TextCall."""
        response, fields = self._method.declared.response, work.write(encoded)
        if "metadata" in response.DESCRIPTOR.fields_by_name:
            fields["metadata"] = _metadata(work, encoded)
        message: bytes = response(**fields).SerializeToString()
        return message

    def send(self, message: bytes) -> int:
        """See ChannelCall."""
        self._ended(message)
        return len(message)

    def fail(self, error: Exception) -> None:
        """See ChannelCall."""
        if isinstance(error, WeirError):
            self.exchange.refused(http_code(error))
            error = error.renamed({TEXTS_FIELD: "inputs"})
        self._ended(error)


def handlers(context: EmbeddingContext, most: int, *, development: bool) -> dict[str, Handler]:
    """Return the handlers of all methods by path. A stream may have `most` requests under way."""
    found: dict[str, Handler] = {}
    for service in SERVICES:
        for method in methods(service):
            read = _READERS.get(method.name) or _READERS.get(method.name.removesuffix(_STREAM))
            if read is None:
                found[method.path] = unary(method, partial(_info, context), development=development)
                continue
            read_by = TeiMethod(context, method, read)
            if method.requests_stream:
                run = partial(_streamed, read_by, most) if method.responses_stream else partial(_collected, read_by)
                found[method.path] = Handler(in_task(run, development=development), takes_stream=True)
            else:
                found[method.path] = Handler(partial(_begin, read_by, development))
    return found


def _begin(method: TeiMethod, development: bool, incoming: IncomingCall, body: bytes) -> None:
    """Answer a unary call."""

    def ended(found: bytes | Exception) -> None:
        if isinstance(found, Exception):
            refuse(found, incoming, development=development)
        else:
            incoming.respond(found)

    stop = method.begin(incoming, len(body), partial(parse, method.declared, body), ended)
    if not incoming.over:
        incoming.on_left = stop


async def _streamed(method: TeiMethod, most: int, call: IncomingCall, _: bytes) -> None:
    """Answer the requests of a stream in order. At most `most` are under way; the first error ends the stream."""
    waiting: deque[tuple[asyncio.Task[bytes], int]] = deque()  # with the size of the request
    room, arrived = asyncio.Semaphore(most), asyncio.Event()

    async def read() -> None:
        while (body := await call.read()) is not None:
            await room.acquire()
            begin = partial(method.begin, call, len(body), partial(parse, method.declared, body))
            waiting.append((asyncio.create_task(end_of(begin)), len(body)))
            arrived.set()

    reader = asyncio.create_task(read())
    reader.add_done_callback(lambda _: arrived.set())
    try:
        while waiting or not reader.done():
            if not waiting:
                arrived.clear()
                await arrived.wait()
                continue
            response = await waiting[0][0]
            size = waiting.popleft()[1]
            await call.write(response)
            call.release(size)
            room.release()
        reader.result()
    finally:
        tasks = (reader, *(task for task, _ in waiting))
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _collected(method: TeiMethod, call: IncomingCall, _: bytes) -> None:
    """Answer all requests of a stream, at most `max_texts`, with one response."""
    requests: list[Any] = []
    size, most = 0, method.context.max_texts
    while (body := await call.read()) is not None:
        if len(requests) == most:
            raise TooLarge(f"the stream has more than {most} texts (max_texts)")
        requests.append(parse(method.declared, body))
        size += len(body)
    call.respond(await end_of(partial(method.begin, call, size, lambda: requests)))


async def _info(context: EmbeddingContext, request: Any, call: IncomingCall) -> Any:
    """Describe the server and its first model."""
    known: dict[str, Any] = {**tei.model_info(context.encoder(), context)}
    kind = next(iter(known.pop("model_type")))
    del known["auto_truncate"], known["similarity_fn_name"], known["served_model_name"]
    stated = {name: value for name, value in known.items() if value is not None}
    return message("tei.v1.InfoResponse")(**stated, model_type=_TYPES[kind])


def read_embed(request: Any, exchange: TextExchange, *, task: TextTask = TextTask.EMBED) -> GrpcWork:
    """Return the work of making the vector of a text, one for each of its tokens, or its terms."""
    work = tei.read_embed(tei.EmbedRequest(inputs=request.inputs, **_options(request)), exchange, task)

    def write(encoded: Encoded) -> dict[str, Any]:
        if task is TextTask.EMBED_SPARSE:
            return {"sparse_embeddings": [{"index": index, "value": value} for index, value in encoded.terms(0)]}
        if task is TextTask.EMBED_ALL:
            return {"token_embeddings": [{"embeddings": vector} for vector in encoded.output(0).tolist()]}
        vectors = unit_vectors(encoded.vectors) if request.normalize else encoded.vectors
        return {"embeddings": vectors[0].tolist()}

    return work.written(write)


def read_predict(request: Any, exchange: TextExchange) -> GrpcWork:
    """Return the work of labelling a text, or a pair of texts."""
    is_pair = not isinstance(request.inputs, str)
    if is_pair and len(request.inputs) != 2:
        raise InvalidRequest(f"inputs: has {len(request.inputs)} texts, must have 2")
    texts = [forms.check_text(text, "inputs") for text in (request.inputs if is_pair else [request.inputs])]
    encoder = exchange.choose(None, TextTask.PREDICT)

    def write(encoded: Encoded) -> dict[str, Any]:
        (labels,) = forms.labelled(encoded, encoder.facts, raw=request.raw_scores)
        return {"predictions": msgspec.to_builtins(labels)}

    options = forms.options_of(TextOptionFields(**_options(request)), encoder)
    return TextWork(encoder, [(texts[0], texts[1])] if is_pair else texts, write, options)


def read_rerank(request: Any, exchange: TextExchange, texts: Sequence[str] | None = None) -> GrpcWork:
    """Return the work of ranking `texts`, by default those of the request, by how well they answer a query."""
    options, listed = _options(request), list(request.texts if texts is None else texts)
    fields = tei.TeiRerankRequest(
        query=request.query, texts=listed, raw_scores=request.raw_scores, return_text=request.return_text, **options
    )
    work = tei.ranking_of(fields, exchange)
    return work.written(lambda encoded: {"ranks": msgspec.to_builtins(work.write(encoded))})


def read_rerank_stream(requests: Sequence[Any], exchange: TextExchange) -> GrpcWork:
    """Return the work of ranking the texts of a stream of requests; the first one states the query and the options."""
    if not requests:
        raise InvalidRequest("the stream has no request, must have one or more")
    return read_rerank(requests[0], exchange, [request.text for request in requests])


def read_tokenize(request: Any, exchange: TextExchange) -> GrpcWork:
    """Return the work of showing the tokens of a text."""
    text, prompt_name = forms.check_text(request.inputs, "inputs"), _optional(request, "prompt_name")
    work = tei.tokens_shown(tei.TokenizeBody(text, request.add_special_tokens, prompt_name), exchange)
    return work.written(lambda encoded: {"tokens": work.write(encoded)(0, 1)[0]})


def read_decode(request: Any, exchange: TextExchange) -> GrpcWork:
    """Return the work of putting token ids together to a text."""
    ids = list(request.ids)
    if not ids:
        raise InvalidRequest("ids: must not be empty")
    encoder = exchange.choose(None)
    compute = partial(texts_of, encoder, [ids], skip_special=request.skip_special_tokens)
    return TextWork(encoder, [ids], lambda encoded: {"text": "".join(encoded.decoded or ())}, compute=compute)


# How the requests of each method are read. Streams of a method take the same ones, unless they are here themselves.
_READERS: Mapping[str, Read] = {
    "Embed": read_embed,
    "EmbedAll": partial(read_embed, task=TextTask.EMBED_ALL),
    "EmbedSparse": partial(read_embed, task=TextTask.EMBED_SPARSE),
    "Predict": read_predict,
    "PredictPair": read_predict,
    "Rerank": read_rerank,
    "RerankStream": read_rerank_stream,
    "Tokenize": read_tokenize,
    "Decode": read_decode,
}


def _options(request: Any) -> dict[str, Any]:
    """Return the options that a request states about its texts."""
    direction = "left" if request.truncation_direction else "right"
    prompt_name = _optional(request, "prompt_name")
    return {"truncate": request.truncate, "truncation_direction": direction, "prompt_name": prompt_name}


def _optional(request: Any, field: str) -> str | None:
    """Return the value of an optional field, None if it is not set or the message has none of this name."""
    if field not in request.DESCRIPTOR.fields_by_name or not request.HasField(field):
        return None
    value: str = getattr(request, field)
    return value


def _metadata(work: GrpcWork, encoded: Encoded) -> dict[str, int]:
    names = ("tokenization", "queue", "inference", "total")  # of Phases, in their order
    times = {
        f"{name}_time_ns": int(_NANOSECONDS * max(time, 0.0)) for name, time in zip(names, encoded.phases, strict=True)
    }
    return {"compute_chars": sum(map(tei.characters, work.texts)), "compute_tokens": sum(encoded.counts), **times}
