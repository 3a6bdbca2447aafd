"""The gRPC services of text-embeddings-inference: Info, Embed, Predict, Rerank and Tokenize.

A call names no model: the first model of the server that can do what the method is for responses. Each request of a stream is answered in its order, as
soon as those before it are; requests of a stream are computed together.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from weir.errors import InvalidRequest, TooLarge, WeirError
from weir.frontends.grpc.call import Handler, IncomingCall, headers_of, in_task, parse, unary
from weir.text_models.packing import unit_vectors
from weir.text_models.texts import Text, TextOptionFields, prompt_text
from weir.text_server.exchange import (
    EmbeddingContext,
    RankingForm,
    TextExchange,
    check_text,
    labelled,
    options_of,
    ranked,
    read_pairs,
    terms,
)
from weir.text_server.http import TextHead
from weir.text_server.protocols.tei import NAME, characters, model_info, options_for, with_byte_offsets
from weir.text_server.texts import TEXTS_FIELD, Encoded, TextTask
from weir.wire.kserve_grpc import Method, message, methods
from weir.wire.status import http_code

SERVICES = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
_TYPES = {"embedding": 0, "classifier": 1, "reranker": 2}
_NANOSECONDS = 1e9
_STREAM = "Stream"  # the end of the names of methods whose requests are streams

Respond = Callable[[Any, IncomingCall], Coroutine[Any, Any, Any]]


def handlers(context: EmbeddingContext, most: int, *, development: bool) -> dict[str, Handler]:
    """Return the handlers of all methods by path. A stream may have `most` requests under way."""
    calls = TeiCalls(context)
    found: dict[str, Handler] = {}
    for service in SERVICES:
        for method in methods(service):
            if method.name == "RerankStream":
                run = partial(_collected, method, calls.rerank_stream, context.max_texts)
                found[method.path] = Handler(in_task(run, development=development), takes_stream=True)
            elif method.requests_stream:
                respond = calls.respond[method.name.removesuffix(_STREAM)]
                run = partial(_streamed, method, respond, most)
                found[method.path] = Handler(in_task(run, development=development), takes_stream=True)
            else:
                found[method.path] = unary(method, calls.respond[method.name], development=development)
    return found


async def _streamed(method: Method, respond: Respond, most: int, call: IncomingCall, _: bytes) -> None:
    """Answer the requests of a stream in order. At most `most` are under way; the first error ends the stream."""
    waiting: deque[tuple[asyncio.Task[Any], int]] = deque()  # with the size of the request
    room, arrived = asyncio.Semaphore(most), asyncio.Event()

    async def read() -> None:
        while (body := await call.read()) is not None:
            await room.acquire()
            waiting.append((asyncio.create_task(respond(parse(method, body), call)), len(body)))
            arrived.set()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: arrived.set())
    try:
        while waiting or not reading.done():
            if not waiting:
                arrived.clear()
                await arrived.wait()
                continue
            response = await waiting[0][0]
            size = waiting.popleft()[1]
            await call.write(response.SerializeToString())
            call.release(size)
            room.release()
        reading.result()
    finally:
        tasks = (reading, *(task for task, _ in waiting))
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _collected(
    method: Method,
    respond: Callable[[Sequence[Any], IncomingCall], Awaitable[Any]],
    most: int,
    call: IncomingCall,
    _: bytes,
) -> None:
    """Answer all requests of a stream, at most `most`, with one response."""
    requests: list[Any] = []
    while (body := await call.read()) is not None:
        if len(requests) == most:
            raise TooLarge(f"the stream has more than {most} texts (max_texts)")
        requests.append(parse(method, body))
    response = await respond(requests, call)
    call.end(body=response.SerializeToString())


class TeiCalls:
    """Answers the requests of `context`'s models. `respond` has the function for each method by name, and it answers streams of the method, too."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._context = context
        self.respond: Mapping[str, Respond] = {
            "Info": self.info,
            "Embed": self.embed,
            "EmbedAll": self.embed_all,
            "EmbedSparse": self.embed_sparse,
            "Predict": self.predict,
            "PredictPair": self.predict_pair,
            "Rerank": self.rerank,
            "Tokenize": self.tokenize,
            "Decode": self.decode,
        }

    async def info(self, request: Any, call: IncomingCall) -> Any:
        """Describe the server and its first model."""
        known: dict[str, Any] = {**model_info(self._context.encoder(), self._context)}
        kind = next(iter(known.pop("model_type")))
        del known["auto_truncate"], known["similarity_fn_name"], known["served_model_name"]
        stated = {name: value for name, value in known.items() if value is not None}
        return message("tei.v1.InfoResponse")(**stated, model_type=_TYPES[kind])

    async def embed(self, request: Any, call: IncomingCall) -> Any:
        """Return the vector of a text."""
        exchange, encoded = await self._encoded(request, call, [request.inputs], TextTask.EMBED)
        vectors = unit_vectors(encoded.vectors) if request.normalize else encoded.vectors
        return message("tei.v1.EmbedResponse")(embeddings=vectors[0].tolist(), metadata=_metadata(exchange, encoded))

    async def embed_all(self, request: Any, call: IncomingCall) -> Any:
        """Return the vector of each token of a text."""
        exchange, encoded = await self._encoded(request, call, [request.inputs], TextTask.EMBED_ALL)
        kind = message("tei.v1.TokenEmbedding")
        count = None if encoded.lengths is None else encoded.lengths[0]
        tokens = [kind(embeddings=vector) for vector in encoded.vectors[0][:count].tolist()]
        return message("tei.v1.EmbedAllResponse")(token_embeddings=tokens, metadata=_metadata(exchange, encoded))

    async def embed_sparse(self, request: Any, call: IncomingCall) -> Any:
        """Return the terms of a text."""
        exchange, encoded = await self._encoded(request, call, [request.inputs], TextTask.EMBED_SPARSE)
        kind = message("tei.v1.SparseValue")
        found = [kind(index=index, value=value) for index, value in terms(encoded, 0)]
        return message("tei.v1.EmbedSparseResponse")(sparse_embeddings=found, metadata=_metadata(exchange, encoded))

    async def predict(self, request: Any, call: IncomingCall) -> Any:
        """Return the labels of a text."""
        return await self._predicted(request, call, request.inputs)

    async def predict_pair(self, request: Any, call: IncomingCall) -> Any:
        """Return the labels of a pair of texts."""
        if len(request.inputs) != 2:
            raise InvalidRequest(f"inputs: has {len(request.inputs)} texts, must have 2")
        return await self._predicted(request, call, (request.inputs[0], request.inputs[1]))

    async def rerank(self, request: Any, call: IncomingCall) -> Any:
        """Rank texts by how well they answer a query."""
        return await self._ranked(request, list(request.texts), call)

    async def rerank_stream(self, requests: Sequence[Any], call: IncomingCall) -> Any:
        """Rank the texts of a stream of requests; the first one states the query and how to response."""
        if not requests:
            raise InvalidRequest("the stream has no request, must have one or more")
        return await self._ranked(requests[0], [request.text for request in requests], call)

    async def tokenize(self, request: Any, call: IncomingCall) -> Any:
        """Return the tokens of a text."""
        encoder = self._context.encoder()
        text = check_text(request.inputs, "inputs")
        fields = TextOptionFields(prompt_name=_optional(request, "prompt_name"))
        prompt = options_of(fields, encoder).prompt or ""
        (tokens,) = await encoder.tokenize([text], special=request.add_special_tokens, prompt=prompt)
        shown = with_byte_offsets(prompt_text(prompt, encoder.facts.prompts) + text, tokens)
        kind = message("tei.v1.SimpleToken")
        return message("tei.v1.EncodeResponse")(tokens=[kind(**each) for each in shown])

    async def decode(self, request: Any, call: IncomingCall) -> Any:
        """Return the text of token ids."""
        if not request.ids:
            raise InvalidRequest("ids: must not be empty")
        (text,) = await self._context.encoder().decode([list(request.ids)], skip_special=request.skip_special_tokens)
        return message("tei.v1.DecodeResponse")(text=text)

    async def _predicted(self, request: Any, call: IncomingCall, text: Text) -> Any:
        exchange, encoded = await self._encoded(request, call, [text], TextTask.PREDICT)
        kind = message("tei.v1.Prediction")
        (labels,) = labelled(encoded, exchange.chosen.facts, raw=request.raw_scores)
        predictions = [kind(score=each.score, label=each.label) for each in labels]
        return message("tei.v1.PredictResponse")(predictions=predictions, metadata=_metadata(exchange, encoded))

    async def _ranked(self, request: Any, texts: list[str], call: IncomingCall) -> Any:
        exchange = self._exchange(call)
        left = bool(request.truncation_direction)
        documents = read_pairs(exchange, request.query, texts, "texts", None, request.truncate, left=left)
        exchange.form = RankingForm(None, documents if request.return_text else None, request.raw_scores)
        encoded = await self._computed(exchange)
        kind = message("tei.v1.Rank")  # a field that is None is left out
        ranks = [kind(index=place, score=score, text=text) for place, score, text in ranked(exchange, encoded)]
        return message("tei.v1.RerankResponse")(ranks=ranks, metadata=_metadata(exchange, encoded))

    async def _encoded(
        self, request: Any, call: IncomingCall, texts: list[Text], task: TextTask
    ) -> tuple[TextExchange, Encoded]:
        """Return the exchange with the first model that has the `task`, and what it computed for `texts`."""
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                check_text(part, "inputs")
        exchange = self._exchange(call)
        exchange.texts = texts
        exchange.encoder = encoder = self._context.encoder(task=task)
        direction = "left" if request.truncation_direction else "right"
        fields = TextOptionFields(
            truncate=request.truncate, truncation_direction=direction, prompt_name=_optional(request, "prompt_name")
        )
        exchange.options = options_for(fields, encoder, task)
        return exchange, await self._computed(exchange)

    def _exchange(self, call: IncomingCall) -> TextExchange:
        exchange = TextExchange(self._context, NAME)
        head = TextHead(headers_of(call))
        head.apply_to(exchange, call.peer)
        left = call.time_remaining()
        if left is not None:
            exchange.timeout = min(left, exchange.timeout or left)
        return exchange

    async def _computed(self, exchange: TextExchange) -> Encoded:
        try:
            encoded = await exchange.vectors()
        except WeirError as error:
            exchange.refused(http_code(error))
            raise error.renamed({TEXTS_FIELD: "inputs"}) from error.__cause__
        exchange.answered(len(encoded.counts), sum(encoded.truncated))
        return encoded


def _optional(request: Any, field: str) -> str | None:
    """Return the value of an optional field, None if it is not set or the message has none of this name."""
    if field not in request.DESCRIPTOR.fields_by_name or not request.HasField(field):
        return None
    value: str = getattr(request, field)
    return value


def _metadata(exchange: TextExchange, encoded: Encoded) -> Any:
    phases = encoded.phases
    return message("tei.v1.Metadata")(
        compute_chars=sum(map(characters, exchange.texts)),
        compute_tokens=sum(encoded.counts),
        total_time_ns=int(_NANOSECONDS * phases.total),
        tokenization_time_ns=int(_NANOSECONDS * phases.tokenize),
        queue_time_ns=int(_NANOSECONDS * max(phases.queue, 0.0)),
        inference_time_ns=int(_NANOSECONDS * max(phases.compute, 0.0)),
    )
