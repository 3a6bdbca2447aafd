"""One request for texts, between its protocol and its channel.

A *protocol* is pure: it reads a body into a TextWork, which holds the texts, the options and the function that writes the response. A *channel* moves bytes
and waits: an ASGI call, a connection of the fast path, a gRPC call, a ZeroMQ message, or the Exchange of a KServe or native request. A TextExchange joins
the two: it passes the work to the model's encoder, and counts the request and its response.

Also what every protocol with scores shares: probabilities of labels, and the ranking of documents.
"""

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import msgspec
import numpy
from msgspec import Struct
from numpy.typing import NDArray

from weir.errors import InvalidRequest, brief, unknown_model
from weir.messages import CURRENT_TRACE, Origin, Trace
from weir.protocols import HttpSettings
from weir.text_models.late_interaction import MAXSIM, MEAN_MAXSIM
from weir.text_models.texts import DIRECTIONS, Text, TextOptionFields, TextOutput, chosen_prompt
from weir.text_server.metrics import TextClients, TextCounts
from weir.text_server.texts import NO_OPTIONS, Encoded, Encodes, TextFacts, TextOptions, TextQuery, TextTask
from weir.wire.values import decode_json, half_in, uncollected, without_halves

TRUNCATED = b"x-weir-truncated"
FOREIGN = b"x-weir-foreign-ids"
_MAX_CLIENT_ID = 128
EMPTY, MANY = "empty", "max_texts"  # keys in an error's details
_MOST_TOKENS = 1 << 31  # token ids are below this
NOT_SPECIFIED = "default/not-specified"  # what infinity's client sends for a model that its user did not name


@dataclass(eq=False)
class EmbeddingContext:
    """What all requests for vectors share.

    Attributes:
        encoders: the models by name; the first is the default.
        http: the settings of HTTP.
        max_texts: the most texts of one request.
        counts: counts calls for metrics.
        clients: counts requests by client.
        aliases: the models' own names, by their further ones.
        since: when the server began, in seconds since 1970, for lists of models.
    """

    encoders: Mapping[str, Encodes]
    http: HttpSettings
    max_texts: int
    counts: TextCounts
    clients: TextClients = field(default_factory=TextClients)
    aliases: Mapping[str, str] = field(default_factory=dict)
    since: int = field(default_factory=lambda: int(time.time()))

    def encoder(self, name: str = "", task: TextTask | None = None) -> Encodes:
        """Return the model called `name`; for "" the first one, with `task` the first one that was made for it, else the first that can do it.

        Raises ModelNotFound naming the models that exist, and InvalidRequest naming the tasks of a model that cannot do `task`.
        """
        name = "" if name == NOT_SPECIFIED else name
        if not name and task is not None:
            able = [each for each in self.encoders.values() if task in each.facts.tasks]
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


def listed_name(encoder: Encodes) -> str:
    """Return the name of a model as lists and responses have it."""
    return encoder.facts.listed or encoder.name


def options_of(
    fields: TextOptionFields,
    encoder: Encodes,
    *,
    whole_words: bool = False,
    want_tokens: bool = False,
    outputs: Sequence[str] | None = None,
) -> TextOptions:
    """Return the options that `fields` and the names of `outputs` state for a request to `encoder`.

    Raises InvalidRequest naming the field.
    """
    left = cuts_left(fields.truncation_direction)
    prompt = chosen_prompt(encoder.facts.prompts, fields)
    check_dimensions(fields.dimensions, encoder)
    wanted = () if outputs is None else check_outputs(outputs, encoder, fields.dimensions)
    return TextOptions(fields.dimensions, fields.truncate, prompt, whole_words, want_tokens, left, outputs=wanted)


def cut_to(options: TextOptions, count: int | None, encoder: Encodes) -> TextOptions:
    """Return `options` that cut each text to `count` tokens; -1 cuts it to as many as the model reads, None to no number. Raises InvalidRequest."""
    if count == -1:
        return options._replace(truncate=True)
    if count is not None and not 1 <= count <= encoder.max_length:
        rule = f"must be -1, or 1 to {encoder.max_length}, as many as the model reads"
        raise InvalidRequest(rule).of("truncate_prompt_tokens", str(count))
    return options._replace(max_tokens=count)


def cuts_left(direction: str | None) -> bool:
    """Return whether a text is cut at its beginning. Clients of TEI write left or Left. Raises InvalidRequest for another direction."""
    if direction is not None and direction.lower() not in DIRECTIONS:
        raise InvalidRequest(f"must be one of {', '.join(DIRECTIONS)}").of("truncation_direction", brief(direction))
    return direction is not None and direction.lower() == "left"


def check_outputs(names: Sequence[str], encoder: Encodes, dimensions: int | None = None) -> tuple[TextOutput, ...]:
    """Return the outputs called `names`, in the order in which the model has them; none if they are its own alone.

    Raises InvalidRequest naming those that the model makes, and for `dimensions` without a vector that could be cut.
    """
    known = encoder.facts.outputs
    for name in names:
        if name not in known:
            rule = f"model {encoder.name!r} makes {', '.join(known) or 'labels or scores alone'}"
            raise InvalidRequest(f"{brief(name)}: {rule}").of("outputs")
    if not names:
        raise InvalidRequest(f"must name one or more of {', '.join(known)}").of("outputs")
    if dimensions is not None and TextOutput.DENSE not in names:
        raise InvalidRequest("of dense vectors alone").of("dimensions", str(dimensions))
    wanted = tuple(output for output in known if output in names)
    return () if wanted == known[:1] else wanted


R = TypeVar("R")
Q = TypeVar("Q")


class TextWork(NamedTuple, Generic[R]):
    """What a request asks for, as its protocol has read it.

    Attributes:
        encoder: the requested model.
        texts: the texts, which are counted.
        write: returns the response with what was computed. Raises Unsupported if the protocol has no form for it.
        options: what the body states about the texts.
        as_json: whether `write` uses the vector of the only text as JSON and nothing else, so that its worker may write it.
        compute: computes, within a timeout in seconds, what is not vectors of `texts` alone; None for vectors.
    """

    encoder: Encodes
    texts: Sequence[Text]
    write: Callable[[Encoded], R]
    options: TextOptions = NO_OPTIONS
    as_json: bool = False
    compute: Callable[[float | None], Coroutine[Any, Any, Encoded]] | None = None

    def written(self, write: Callable[[Encoded], Q]) -> "TextWork[Q]":
        """Return the same work with `write` in place of its own."""
        return TextWork(self.encoder, self.texts, write, self.options, self.as_json, self.compute)


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
    """

    context: EmbeddingContext
    frontend: str
    model: str = ""
    client: str = ""
    peer: str | None = None
    priority: int = 0
    timeout: float | None = None
    trace: Trace | Origin = None

    @property
    def client_name(self) -> str:
        """The client that is counted."""
        return self.client or self.peer or "local"

    def choose(self, name: str | None, task: TextTask | None = None) -> Encodes:
        """Return the requested model, and count the request as one for it; see `EmbeddingContext.encoder`."""
        encoder = self.context.encoder(name or "", task)
        self.model = encoder.name
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
        return TextQuery(self.frontend, options, self.client, self.priority, timeout, trace, each, as_json)

    async def run(self, work: TextWork[Any]) -> Encoded:
        """Return what `work` asks for; `trace` is then the request's own, if it has a span. Raises what Encodes raises."""
        try:
            if work.compute is not None:
                return await work.compute(self.timeout)
            encoded = await work.encoder.encode(work.texts, self.query(work.options, self.timeout, self.trace))
        finally:
            self.trace = CURRENT_TRACE.get() or self.trace
        if encoded.foreign:
            self.warn_of_ids(encoded.foreign)
        return encoded

    def received(self, texts: int) -> None:
        """Count the request, which has `texts` texts."""
        self.context.clients.received(self.client_name, texts, frontend=self.frontend)

    def warn_of_ids(self, foreign: int) -> None:
        """Warn in the log, once for each client, of `foreign` texts sent as token ids of another model."""
        self.context.clients.warn_of_ids(self.client_name, foreign, self.model)

    def answered(self, texts: int, truncated: int) -> None:
        """Count the response: the vectors of `texts` texts, of which `truncated` were cut."""
        self.context.counts.answered(self.model, self.frontend, texts, truncated)

    def delivered(self, texts: int, truncated: int, received_bytes: int, sent_bytes: int) -> None:
        """Count the response, see `answered`, and report the sizes of request and response."""
        self.context.counts.answered(self.model, self.frontend, texts, truncated)
        self.context.counts.transferred(self.model, self.frontend, received_bytes, sent_bytes)

    def refused(self, status: int) -> None:
        """Count the response: an error with this HTTP status."""
        self.context.counts.refused(self.model, self.frontend, status)


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


# What protocols read.


def check_text(text: Any, where: str, *, may_be_empty: bool = False) -> str:
    """Return `text` if it is a string, and not empty unless it may be. Raises InvalidRequest naming its place `where` and the rule."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: must be a text, is {brief(text)}")
    if not (text or may_be_empty):
        raise InvalidRequest(f"{where}: must not be empty", details={EMPTY: True})
    return text


def read_texts(value: Any, field: str, context: EmbeddingContext) -> list[Text]:
    """Return the texts of `field`: a text, a list of texts (or of objects with `text` alone), a list of token ids, or a list of such.

    Raises InvalidRequest naming the place and the rule.
    """
    if isinstance(value, str):
        return [check_text(value, field)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}={brief(value)}: must be a text or a list")
    if value and type(value[0]) is int:
        return [token_ids(value, field)]
    context.check_count(len(value), field)
    return [_one_text(each, f"{field}[{place}]") for place, each in enumerate(value)]


def _one_text(value: Any, where: str) -> Text:
    if isinstance(value, list):
        return token_ids(value, where)
    return check_text(value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value, where)


def token_ids(value: Any, where: str) -> list[int]:
    """Return `value` if it is a list of token ids that is not empty. Raises InvalidRequest naming its place `where`."""
    if not isinstance(value, list) or not value:
        rule = "must not be empty" if value == [] else f"must be a list of token ids, is {brief(value)}"
        raise InvalidRequest(f"{where}: {rule}")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise InvalidRequest(f"{where}[{place}]: must be a token id, is {brief(token, 40)}")
    return value


def read_text(text: Any, where: str, tokenized: bool | None) -> Text:
    """Return `text` if it is a string, a list of words or a list of token ids; with `tokenized` it must be a list of words.

    Raises InvalidRequest naming its place `where` and the rule.
    """
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


def check_dimensions(dimensions: int | None, encoder: Encodes) -> None:
    """Raise InvalidRequest unless `dimensions` is None or 1 to the dimensions of the vectors of `encoder`."""
    if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
        rule = f"must be 1 to {encoder.dimensions}, the size of the vectors of {encoder.name!r}"
        raise InvalidRequest(rule).of("dimensions", str(dimensions))


def check_task(encoder: Encodes, task: TextTask) -> None:
    """Raise InvalidRequest naming the tasks that there are, unless the model can be called for `task`. The error's details name it as `task`."""
    tasks = encoder.facts.tasks
    if task not in tasks:
        known = ", ".join(tasks) or "none"
        message = f"model {encoder.name!r}: has no task {task}; it has {known}"
        raise InvalidRequest(message, details={"task": task}).about("model")


def check_client(text: str | None, where: str) -> str:
    """Return the client's id that a request states, "" for None. Raises InvalidRequest naming the field `where` and the rule."""
    if text is None:
        return ""
    if not 0 < len(text) <= _MAX_CLIENT_ID:
        raise InvalidRequest(f"{where} {text[:40]!r}: must have 1 to {_MAX_CLIENT_ID} characters")
    return text


def check_texts(texts: Any, where: str, context: EmbeddingContext) -> list[str]:
    """Return `texts` if it is a list of strings that are not empty, as many as a request may have. Raises InvalidRequest naming the place `where`."""
    if not isinstance(texts, list):
        raise InvalidRequest(f"must be a list of texts, is {brief(texts)}").of(where)
    context.check_count(len(texts), where)
    return [check_text(text, f"{where}[{place}]") for place, text in enumerate(texts)]


def read_json(body: bytes, *, clean: bool = False) -> Any:
    """Return the value of the JSON `body`; with `clean`, halves of surrogate pairs are read as NULs. Raises InvalidRequest."""
    try:
        with uncollected(len(body)):
            return decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if clean and (cleaned := without_halves(body)) is not None:
            return read_json(cleaned)
        raise InvalidRequest(f"body: {half_in(body) or f'is not JSON ({error})'}") from error


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body is, without its fields that are null, which count as not given. Raises InvalidRequest."""
    document = read_json(body)
    if not isinstance(document, dict):
        raise InvalidRequest("body: must be an object as JSON")
    return {name: value for name, value in document.items() if value is not None}


# What protocols write.


def text_of_content(value: Any, where: str) -> Any:
    """Return the text of an object whose `content` is a list of one text. Raises InvalidRequest naming its place `where`."""
    content = value.get("content") if isinstance(value, dict) else None
    first = content[0] if isinstance(content, list) and len(content) == 1 else None
    if not isinstance(first, dict) or first.get("type") != "text":
        rule = "must be an object whose `content` is a list of one text: {type: text, text: ...}"
        raise InvalidRequest(f"{where}={brief(value)}: {rule}")
    return first.get("text")


def truncated_places(encoded: Encoded) -> list[int]:
    """Return the indices of the texts that were cut."""
    return [place for place, cut in enumerate(encoded.truncated) if cut]


def mark_headers(truncated: int, foreign: int) -> list[tuple[bytes, bytes]]:
    """Return headers with the numbers of texts that were cut, and that came as token ids of another model. A number of 0 has no header."""
    return [(name, b"%d" % count) for name, count in ((TRUNCATED, truncated), (FOREIGN, foreign)) if count]


class Ranked(Struct, omit_defaults=True):
    """A document at its place in a ranking: its index in the request, its score, and its text if the request asks for it."""

    index: int
    score: float
    text: str | None = None


class RankingForm(NamedTuple):
    """How a ranking is written: the best `top_n`, with the documents' texts, with the model's own numbers."""

    top_n: int | None = None
    with_texts: bool = False
    raw: bool = False


class Label(Struct):
    """A label with its score."""

    label: str
    score: float


def read_ranking(
    exchange: TextExchange, query: Any, documents: Any, field: str, model: str | None, form: RankingForm
) -> TextWork[list[Ranked]]:
    """Return the work of ranking `documents`, the list `field`, by `query`, which writes the documents, the best first.

    A document is a text, or an object with `text`; it may be empty. Each pair of the query and a document is tokenized, batched and cut as any other pair of
    texts: the longer of both first. Raises InvalidRequest naming the field, and ModelNotFound, also if the model does not rank.
    """
    if form.top_n is not None and form.top_n < 1:
        raise InvalidRequest("must be 1 or more").of("top_n", str(form.top_n))
    query = check_text(query, "query")
    if not isinstance(documents, list):
        raise InvalidRequest(f"must be a list of texts, is {brief(documents)}").of(field)
    exchange.context.check_count(len(documents), field)
    texts = [_document(each, f"{field}[{index}]") for index, each in enumerate(documents)]
    encoder = exchange.choose(model, TextTask.RERANK)

    def write(encoded: Encoded) -> list[Ranked]:
        best = ranking(relevance(encoder, encoded, raw=form.raw), form.top_n)
        return [Ranked(each.index, each.score, texts[each.index]) for each in best] if form.with_texts else best

    return TextWork(encoder, [(query, text) for text in texts], write)


def _document(value: Any, where: str) -> str:
    if isinstance(value, dict):
        if "text" not in value:
            raise InvalidRequest(f"{where}.text: is missing")
        return check_text(value["text"], f"{where}.text", may_be_empty=True)
    return check_text(value, where, may_be_empty=True)


def relevance(encoder: Encodes, encoded: Encoded, *, raw: bool) -> list[float]:
    """Return the score of each document: the model's number with `raw` and in late interaction, else its sigmoid."""
    numbers = encoded.vectors[:, 0]
    as_it_is = raw or encoder.facts.similarity in (MAXSIM, MEAN_MAXSIM)
    scores: list[float] = (numbers if as_it_is else _sigmoid(numbers)).tolist()
    return scores


def ranking(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """Return the best `top_n` documents, all for None, the best first. Of equal ones the first goes first."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [Ranked(index, scores[index]) for index in order[:top_n]]


def labelled(encoded: Encoded, facts: TextFacts, *, raw: bool, independent: bool | None = None) -> list[list[Label]]:
    """Return the labels of each text with their scores, the likeliest first. Scores are the model's numbers with `raw`, else probabilities.

    They are sigmoids if the labels are `independent`, else a softmax; None: as the model states.
    """
    logits = encoded.vectors
    if raw:
        scores = logits
    else:
        if independent is None:
            independent = facts.independent_labels or logits.shape[1] == 1
        scores = _sigmoid(logits) if independent else _softmax(logits)
    return [[Label(facts.labels[each.index], each.score) for each in ranking(row)] for row in scores.tolist()]


def likeliest(logits: NDArray[Any], facts: TextFacts) -> list[Label]:
    """Return the likeliest label of each row of `logits` [tokens, labels], with its probability."""
    shares = _softmax(logits)
    best = shares.argmax(axis=-1).tolist()
    return [Label(facts.labels[index], share) for index, share in zip(best, shares.max(axis=-1).tolist(), strict=True)]


def terms(encoded: Encoded, row: int) -> list[tuple[int, float]]:
    """Return the terms of the text `row`, which a sparse vector consists of: the id of a token of the vocabulary, and its weight."""
    return [(int(index), weight) for index, weight in own_output(encoded, row).tolist()]


def own_output(encoded: Encoded, row: int) -> NDArray[Any]:
    """Return the vector of the text `row`, its terms [terms, 2], or the vectors of its tokens, by the kind of the model."""
    numbers: NDArray[Any] = encoded.vectors[row]
    return numbers if encoded.lengths is None else numbers[: encoded.lengths[row]]


def each_output(encoded: Encoded, outputs: Sequence[TextOutput], row: int) -> dict[TextOutput, NDArray[Any]]:
    """Return the results of the text `row` for `outputs`, which the request asked for: a vector, terms [terms, 2], or the vectors of tokens."""
    return {outputs[0]: own_output(encoded, row), **{output: rows[row] for output, rows in encoded.further.items()}}


class SparseVector(TypedDict):
    """Terms: ids of words of the vocabulary, and their weights."""

    indices: list[int]
    values: list[float]


def sparse_vector(found: NDArray[Any]) -> SparseVector:
    """Return terms [terms, 2] as a document."""
    return {"indices": found[:, 0].astype(int).tolist(), "values": found[:, 1].tolist()}


def _sigmoid(logits: NDArray[Any]) -> NDArray[Any]:
    # Of a large negative number the exponential would overflow.
    small = numpy.exp(-numpy.abs(logits))
    found: NDArray[Any] = numpy.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    return found


def _softmax(logits: NDArray[Any]) -> NDArray[Any]:
    powers = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    found: NDArray[Any] = powers / powers.sum(axis=-1, keepdims=True)
    return found
