"""One request for texts, between its protocol and its channel.

A *protocol* is pure: it reads a body into a TextWork, which holds the texts, the options and the function that writes the response. A *channel* moves bytes
and waits: an ASGI call, a connection of the fast path, a gRPC call, a ZeroMQ message, or the Exchange of a KServe or native request. A TextExchange joins
the two: it passes the work to the model's encoder, and counts the request and its response.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy

from weir.errors import InvalidRequest, WeirError, unknown_model
from weir.images import ImageLimits
from weir.images.fetching import Fetcher
from weir.messages import CURRENT_TRACE, Origin, Trace
from weir.protocols import HttpSettings
from weir.protocols.account import Account, charge
from weir.protocols.call import ChannelCall, Writing
from weir.text_server.encoder import DETAIL_BYTES
from weir.text_server.metrics import TextClients, TextCounts
from weir.text_server.pictures import Asked, fetched, has_pictures
from weir.text_server.texts import (
    NO_OPTIONS,
    TEXTS_FIELD,
    Encoded,
    Encodes,
    TextOptions,
    TextQuery,
    TextTask,
    no_images,
)
from weir.wire.tensors import TEXT_BYTES

MANY = "max_texts"  # a key in an error's details
NOT_SPECIFIED = "default/not-specified"  # what infinity's client sends for a model that its user did not name


@dataclass(eq=False)
class EmbeddingContext:
    """The objects that all requests for vectors share.

    Attributes:
        encoders: the models by name; the first is the default.
        http: the settings of HTTP.
        max_texts: the most texts of one request.
        counts: counts calls for metrics.
        clients: counts requests by client.
        aliases: the models' own names, by their further ones.
        since: when the server began, in seconds since 1970, for lists of models.
        images: the limits of pictures, and the hosts from which they are fetched.
    """

    encoders: Mapping[str, Encodes]
    http: HttpSettings
    max_texts: int
    counts: TextCounts
    clients: TextClients = field(default_factory=TextClients)
    aliases: Mapping[str, str] = field(default_factory=dict)
    since: int = field(default_factory=lambda: int(time.time()))
    images: ImageLimits = field(default_factory=ImageLimits)

    def __post_init__(self) -> None:
        self.fetch = Fetcher(self.images, charge).fetch

    def encoder(self, name: str = "", task: TextTask | None = None, *, sees: bool = False) -> Encodes:
        """Return the model called `name`; for "" the first one, with `task` the first one that was made for it, else the first that can do it. With `sees` the
        first of those that read pictures, if there is one.

        Raises ModelNotFound naming the models that exist, and InvalidRequest naming the tasks of a model that cannot do `task`.
        """
        name = "" if name == NOT_SPECIFIED else name
        if not name and (sees or task is not None):
            able = [each for each in self.encoders.values() if task is None or task in each.facts.tasks]
            able = [each for each in able if sees and each.facts.vision is not None] or able
            name = next((each.name for each in [*(each for each in able if each.facts.tasks[0] == task), *able]), "")
        name = name or next(iter(self.encoders), "")
        if name not in self.encoders:
            name = self.aliases.get(name, name)
        if name not in self.encoders:
            raise unknown_model(name, self.encoders)
        if task is not None:
            check_task(self.encoders[name], task)
        return self.encoders[name]

    def check_count(self, count: int, field: str) -> None:
        """Raise InvalidRequest naming `field` unless `count` is 1 to `max_texts`."""
        if not 1 <= count <= self.max_texts:
            rule = f"{field}: has {count} texts, must have 1 to {self.max_texts} (max_texts)"
            raise InvalidRequest(rule, details={MANY: self.max_texts} if count else None)


R = TypeVar("R")


Q = TypeVar("Q")


M = TypeVar("M")


def _located(error: WeirError, lists: Sequence[tuple[str, int]]) -> WeirError:
    """Return `error`, which names the text at fault by its list in the request and its index there; see TextWork."""
    index = error.index
    if error.field != TEXTS_FIELD or index is None:
        return error
    for name, size in lists:
        if index < size:
            return error.at(name, index)
        index -= size
    return error


class TextWork(NamedTuple, Generic[R]):
    """The work that a request asks for, as its protocol has read it.

    Attributes:
        encoder: the requested model.
        texts: the texts and pictures, which are counted.
        write: returns the response with what was computed. Raises Unsupported if the protocol has no form for it.
        options: what the body states about the texts.
        as_json: whether `write` uses the vector of the only text as JSON and nothing else, so that its worker may write it.
        compute: computes, within a timeout in seconds, what is not vectors of `texts` alone; None for vectors.
        lists: the names and the lengths of the lists that the texts come from, one after the other; none if there is one list.
    """

    encoder: Encodes
    texts: Sequence[Asked]
    write: Callable[[Encoded], R]
    options: TextOptions = NO_OPTIONS
    as_json: bool = False
    compute: Callable[[float | None], Coroutine[Any, Any, Encoded]] | None = None
    lists: Sequence[tuple[str, int]] = ()

    def written(self, write: Callable[[Encoded], Q]) -> "TextWork[Q]":
        """Return the same work with `write` in place of its own, which may use more than a vector as JSON."""
        return TextWork(self.encoder, self.texts, write, self.options, compute=self.compute, lists=self.lists)


@dataclass(eq=False, slots=True)
class TextExchange:
    """One request for texts, and how it is counted.

    Attributes:
        context: what all requests share.
        frontend: the name of the endpoint or frontend, for metrics.
        model: the name of the requested model; "" until it is known.
        client: requests of one client share one fair share of the queue; with "" the request has its own.
        peer: where the request came from, under which it is counted if `client` is "".
        priority: higher goes first.
        timeout: in seconds; None for the server's setting.
        trace: the request's Origin, or the Trace that the channel has begun.
        texts: how many texts were counted.
        route: the path of its endpoint; "" if it did not come over HTTP.
    """

    context: EmbeddingContext
    frontend: str
    model: str = ""
    client: str = ""
    peer: str | None = None
    priority: int = 0
    timeout: float | None = None
    trace: Trace | Origin = None
    texts: int = 0
    route: str = ""

    @property
    def client_name(self) -> str:
        """The client that is counted."""
        return self.client or self.peer or "local"

    def choose(
        self, name: str | None, task: TextTask | None = None, texts: Sequence[Asked] = (), *, sees: bool = False
    ) -> Encodes:
        """Return the requested model, and count the request as one for it; see `EmbeddingContext.encoder`. Raises InvalidRequest if it cannot read the pictures
        among `texts`."""
        pictured = has_pictures(texts)
        encoder = self.context.encoder(name or "", task, sees=sees or pictured)
        self.model = encoder.name
        if pictured and encoder.facts.vision is None:
            raise no_images(encoder.name)
        return encoder

    def query(
        self,
        options: TextOptions,
        timeout: float | None = None,
        trace: Trace | Origin = None,
        *,
        each: bool = False,
        as_json: bool = False,
    ) -> TextQuery:
        """Return what an encoder is asked for in this request; see TextQuery."""
        return TextQuery(
            self.frontend, options, self.client, self.priority, timeout, trace, each, as_json, route=self.route
        )

    async def run(self, work: TextWork[Any]) -> Encoded:
        """Return what `work` asks for; `trace` is then the request's own, if it has a span. Raises what Encodes raises."""
        try:
            if work.compute is not None:
                return await work.compute(self.timeout)
            texts: Sequence[Any] = work.texts
            query = self.query(work.options, self.timeout, self.trace)
            if self.context.images.allow_url:
                loop = asyncio.get_running_loop()
                began = loop.time()
                texts = await fetched(texts, self.context.fetch, self.timeout)
                query = query._replace(waited=0.0 if self.timeout is None else loop.time() - began)
            encoded = await work.encoder.encode(texts, query)
        except WeirError as error:
            raise _located(error, work.lists) from error.__cause__
        finally:
            self.trace = CURRENT_TRACE.get() or self.trace
        self.count_images(encoded)
        if encoded.foreign:
            self.warn_of_ids(encoded.foreign)
        return encoded

    def count_images(self, encoded: Encoded) -> None:
        """Count the images that were computed."""
        if encoded.images:
            self.context.counts.images[self.model, self.frontend] += encoded.images

    def received(self, texts: int) -> None:
        """Count the request, which has `texts` texts."""
        self.texts = texts
        self.context.clients.received(self.client_name, texts, frontend=self.frontend)

    def passed_on(self) -> None:
        """Count the request no more: another process of the server receives it again."""
        self.context.clients.passed_on(self.client_name, self.texts)

    def warn_of_ids(self, foreign: int) -> None:
        """Warn in the log, once for each client, of `foreign` texts sent as token ids of another model."""
        self.context.clients.warn_of_ids(self.client_name, self.model, foreign)

    def answered(self, texts: int, truncated: int) -> None:
        """Count the response: the vectors of `texts` texts, of which `truncated` were cut."""
        self.context.counts.answered(self.model, self.frontend, texts, truncated)

    def delivered(self, texts: int, truncated: int, received_bytes: int, sent_bytes: int) -> None:
        """Count the response, see `answered`, and report the sizes of request and response."""
        self.answered(texts, truncated)
        self.context.counts.transferred(self.model, self.frontend, received_bytes, sent_bytes)

    def refused(self, status: int) -> None:
        """Count the response: an error with this HTTP status."""
        self.context.counts.refused(self.model, self.frontend, status)


class TextCall(ChannelCall, Generic[R, M]):
    """One request for texts, whose message had `received_bytes`; see ChannelCall. A channel adds `send`, `fail` and `write`."""

    def __init__(self, exchange: TextExchange, account: Account, received_bytes: int) -> None:
        super().__init__(account, received_bytes)
        self.exchange = exchange
        self.made = (0, 0)  # texts with results, and how many of them were cut

    def write(self, work: TextWork[R], encoded: Encoded) -> M:
        """Return the message of the response to `work`. This may run in a thread."""
        raise NotImplementedError  # a channel implements it

    def compute(self, work: TextWork[R]) -> None:
        """Have the model compute `work`: a step for `attempt`. The only text of a request mostly needs no task."""
        exchange, then = self.exchange, partial(self.computed, work)
        exchange.received(len(work.texts))
        stop = None
        if len(work.texts) == 1 and work.compute is None:
            query = exchange.query(work.options, exchange.timeout, as_json=work.as_json)
            stop = work.encoder.encode_one(work.texts[0], query, self.after(then))
        if stop is None:
            self.run(exchange.run(work), then)
        else:
            self.stopped_by(stop)

    def computed(self, work: TextWork[R], encoded: Encoded) -> None:
        """Respond with what was computed: a step for `attempt`."""
        self.made = len(encoded.counts), sum(encoded.truncated)
        self.respond(Writing(_size(encoded), partial(self.write, work, encoded)))

    def count(self, sent_bytes: int) -> None:
        """See ChannelCall."""
        self.exchange.delivered(*self.made, self.received_bytes, sent_bytes)


def _size(encoded: Encoded) -> int:
    """Return about how many bytes the vectors, the tokens or the texts take as JSON."""
    if encoded.written is not None:
        return len(encoded.written)
    found = sum(map(len, encoded.decoded or ())) + DETAIL_BYTES * sum(map(len, encoded.details or ()))
    return TEXT_BYTES * numbers_of(encoded) + found


def numbers_of(encoded: Encoded) -> int:
    """Return how many numbers the outputs have together."""
    return encoded.vectors.size + sum(each.size for results in encoded.further.values() for each in results)


async def tokens_of(
    encoder: Encodes, texts: Sequence[str], timeout: float | None = None, *, special: bool, prompt: str = ""
) -> Encoded:
    """Return the tokens of each text, without vectors; see Encodes.tokenize."""
    details = await encoder.tokenize(texts, special=special, prompt=prompt, timeout=timeout)
    return _without_vectors(len(texts))._replace(details=details)


async def texts_of(
    encoder: Encodes, ids: Sequence[Sequence[int]], timeout: float | None = None, *, skip_special: bool
) -> Encoded:
    """Return the text of each list of token ids, without vectors; see Encodes.decode."""
    decoded = await encoder.decode(ids, skip_special=skip_special, timeout=timeout)
    return _without_vectors(len(ids))._replace(decoded=decoded)


def _without_vectors(count: int) -> Encoded:
    return Encoded(numpy.empty((count, 0), numpy.float32), [0] * count, [False] * count)


def check_task(encoder: Encodes, task: TextTask) -> None:
    """Raise InvalidRequest naming the tasks that there are, unless the model can be called for `task`. The error's details name it as `task`."""
    tasks = encoder.facts.tasks
    if task not in tasks:
        known = ", ".join(tasks) or "none"
        message = f"model {encoder.name!r}: has no task {task}; it has {known}"
        raise InvalidRequest(message, details={"task": task}).about("model")
