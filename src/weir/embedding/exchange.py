"""One request for the vectors of texts, between the protocol that it is written in and the channel that brings it.

A *protocol* of texts is pure: it reads a body into texts and TextOptions, and writes vectors or an error. A *channel* moves bytes and waits: an ASGI call, a
connection of the fast path, a ZeroMQ message, or the Exchange of a KServe or native request. A TextExchange is the request between the two, for all of them: it
has its model encode the texts, and counts who asked and what came of it.
"""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
import orjson
from numpy.typing import NDArray

from weir.embedding.metrics import TextClients, TextCounts
from weir.embedding.texts import Encoded, Encodes, Text
from weir.errors import InvalidRequest, ModelNotFound, brief
from weir.protocols.settings import HttpSettings
from weir.telemetry.tracecontext import Trace
from weir.wire.values import decode_json, find_half, uncollected, without_halves

TRUNCATED = b"x-weir-truncated"
FOREIGN = b"x-weir-foreign-ids"
_LONGEST_CLIENT_ID = 128
_WORDS = {str: "a text", bool: "true or false", int: "a whole number"}


class EmbeddingContext:
    """What all requests for vectors share: the models by name, settings and counts. `max_texts` is how many texts one request may have."""

    def __init__(
        self, encoders: Mapping[str, Encodes], http: HttpSettings, max_texts: int, counts: TextCounts,
        clients: TextClients | None = None,
    ) -> None:  # fmt: skip
        self.encoders = encoders
        self.http = http
        self.max_texts = max_texts
        self.counts = counts
        self.clients = clients or TextClients()

    def encoder(self, name: str = "") -> Encodes:
        """Return the model called `name`; "" is the first one. Raises ModelNotFound naming those there are."""
        name = name or next(iter(self.encoders), "")
        if name not in self.encoders:
            there_are = ", ".join(self.encoders) or "no models of texts"
            raise ModelNotFound(f"model {name!r}: there is none of this name; there are {there_are}")
        return self.encoders[name]

    def check_count(self, count: int, field: str) -> None:
        """Raise InvalidRequest for a list of texts that may not have so many."""
        if not 1 <= count <= self.max_texts:
            raise InvalidRequest(f"{field}: has {count} texts, must have 1 to {self.max_texts} (max_texts)")


class TextOptions(NamedTuple):
    """What a caller may want of texts beside their vectors, see Encodes.encode."""

    dimensions: int | None = None
    truncate: bool | None = None
    prompt: str | None = None
    whole_words: bool = False
    want_tokens: bool = False


NO_OPTIONS = TextOptions()


class TextExchange:
    """One request that came by the channel `door`.

    A protocol reads `texts`, `options` and `encoder` into it, and keeps in `identity` and `form` what its answer needs: the caller's name of the request, and
    how vectors are to be written. The channel says who asks: requests of one `client` share one share of the queue ("": the request has its own), `whose` is who
    is counted. `timeout` is in seconds (None: the server's own), `trace` the caller's `traceparent` or the Trace that the channel has begun.
    """

    __slots__ = (
        "client", "context", "door", "encoder", "form", "identity", "options", "priority", "texts", "timeout", "trace", "whose",
    )  # fmt: skip

    def __init__(
        self, context: EmbeddingContext, door: str, encoder: Encodes | None = None, *, client: str = "", whose: str = "local",
        priority: int = 0, timeout: float | None = None, trace: str | Trace | None = None,
    ) -> None:  # fmt: skip
        self.context = context
        self.door = door
        self.encoder = encoder
        self.client = client
        self.whose = client or whose
        self.priority = priority
        self.timeout = timeout
        self.trace = trace
        self.texts: Sequence[Text] = ()
        self.options = NO_OPTIONS
        self.identity: Any = None
        self.form: Any = None

    @property
    def model(self) -> str:
        """The name of the model that is asked, "" before it is known."""
        return "" if self.encoder is None else self.encoder.name

    async def vectors(self) -> Encoded:
        """Count the request, and return what the model makes of its texts. Raises what `Encodes.encode` raises."""
        self.asked(len(self.texts))
        encoded = await self.encode(self.texts, self.options, self.timeout, self.trace)
        if encoded.foreign:
            self.warn_of_ids(encoded.foreign)
        return encoded

    def encode(
        self, texts: Sequence[Text], options: TextOptions, timeout: float | None = None, trace: str | Trace | None = None, *,
        each: bool = False,
    ) -> Coroutine[Any, Any, Encoded]:  # fmt: skip
        """Have the model encode `texts`, uncounted; with `each` every text has an end of its own. Awaited, raises what `Encodes.encode` raises."""
        assert self.encoder is not None  # the protocol has read whose vectors are wanted
        return self.encoder.encode(
            texts, door=self.door, client=self.client, priority=self.priority, timeout=timeout, dimensions=options.dimensions,
            truncate=options.truncate, want_tokens=options.want_tokens, prompt=options.prompt,
            whole_words=options.whole_words, each=each, trace=trace,
        )  # fmt: skip

    def asked(self, texts: int) -> None:
        """Count a request for so many texts."""
        self.context.clients.asked(self.whose, texts, door=self.door)

    def warn_of_ids(self, foreign: int) -> None:
        """Warn, once, of a caller who sent token ids of another model."""
        self.context.clients.warn_of_ids(self.whose, foreign, self.model)

    def answered(self, texts: int, truncated: int) -> None:
        """Count the answer: the vectors of so many texts, of which so many were cut."""
        self.context.counts.answered(self.model, self.door, texts, truncated)

    def delivered(self, encoded: Encoded, received_bytes: int, sent_bytes: int) -> None:
        """Count the answer, which is made of all that was `encoded`, and tell the sizes of the request and of the answer."""
        counts, model = self.context.counts, self.model
        counts.answered(model, self.door, len(encoded.counts), sum(encoded.truncated))
        counts.transferred(model, self.door, received_bytes, sent_bytes)

    def refused(self, status: int) -> None:
        """Count the answer: an error with this status."""
        self.context.counts.refused(self.model, self.door, status)


# What protocols read.


def check_text(text: Any, where: str) -> str:
    """Return `text` if it can be encoded. Raises InvalidRequest naming `where` it stands and the rule."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: must be a text, is {brief(text)}")
    if not text:
        raise InvalidRequest(f"{where}: must not be empty")
    return text


def read_text(text: Any, where: str, tokenized: bool | None) -> Text:
    """Return one text: a list is of words or of token ids. `tokenized` says that it must be words. Raises InvalidRequest."""
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


def read_field(fields: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return the field of that name, `default` where it is not there or null. Raises InvalidRequest unless it is of that kind."""
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequest(f"{name}={brief(value)}: must be {_WORDS[kind]}")
    return value


def check_dimensions(dimensions: int | None, encoder: Encodes) -> None:
    """Raise InvalidRequest unless vectors of `encoder` have so many numbers."""
    if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
        rule = f"must be 1 to {encoder.dimensions}, as many as vectors of {encoder.name!r} have"
        raise InvalidRequest(f"dimensions={dimensions}: {rule}")


def check_client(text: str | None, where: str) -> str:
    """Return whom a caller says to be; "" if nothing is said. Raises InvalidRequest naming `where` it was said and the rule."""
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


# What protocols write.


def as_json(vectors: NDArray[Any]) -> list[msgspec.Raw]:
    """Return the vector, or vectors, of each text as JSON: of each float32 the fewest digits that are that float32 to who reads it, also
    by way of a double; what is not finite is null. One by one, so that other threads are not kept waiting for all of them."""
    written = numpy.ascontiguousarray(vectors, numpy.float32)
    return [msgspec.Raw(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)) for vector in written]


def truncated_places(encoded: Encoded) -> list[int]:
    """Return which texts were cut."""
    return [place for place, cut in enumerate(encoded.truncated) if cut]


def mark_headers(truncated: int, foreign: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that say how many texts were cut, and how many came as token ids of another model; none for none."""
    return [(name, b"%d" % count) for name, count in ((TRUNCATED, truncated), (FOREIGN, foreign)) if count]
