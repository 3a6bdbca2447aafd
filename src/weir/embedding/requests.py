"""One request for vectors while it is under way: its texts, what has come of them, and its place in a trace."""

import asyncio
import copy
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weir.embedding.recipe import Pooling
from weir.embedding.texts import AS_THE_SERVER, Text, Tokenized, TokenizeOptions, Tokens
from weir.errors import CapacityError, DeadlineExceeded, WeirError
from weir.messages import Dispatch
from weir.serving.calls import InProcessRequest
from weir.telemetry.tracecontext import CURRENT, Trace

if TYPE_CHECKING:
    from weir.embedding.encoder import Encoder
    from weir.protocols.account import Claim
    from weir.serving.delivery import Tracer
    from weir.serving.service import Service


_OF_HIGHEST = (Pooling.MAX, Pooling.HIERARCHICAL)


def highest_places(poolings: Sequence[Pooling], size: int) -> list[bool]:
    """Return of which of a vector's `size` numbers the highest is taken over pieces, as it is over tokens; of the others it is the mean."""
    parts = [
        part for each in poolings for part in ((Pooling.MEAN, Pooling.MAX) if each is Pooling.MEAN_MAX else (each,))
    ]
    return [part in _OF_HIGHEST for part in parts for _ in range(size // len(parts))]


class Pieces:
    """What has come of the pieces of one text: the mean of their vectors, each weighed by its tokens, but the highest of the numbers that
    `highest` says (all others: None); or, where each token has a vector, all of them in order."""

    __slots__ = ("_found", "_highest", "_left", "_normalize", "_weights")

    def __init__(self, weights: list[int], normalize: bool, highest: Sequence[bool] | None = None) -> None:
        self._highest = highest
        self._weights = weights
        self._left = len(weights)
        self._found: list[Any] = [None] * len(weights)
        self._normalize = normalize

    def put(self, piece: int, vector: Any) -> Any:
        """Keep the vector of a piece; return that of the text when all are there, else None."""
        self._found[piece] = vector
        self._left -= 1
        if self._left:
            return None
        import numpy

        if vector.ndim > 1:
            return numpy.concatenate(self._found)
        mean = numpy.average(self._found, axis=0, weights=self._weights)
        if self._highest is not None:
            mean = numpy.where(self._highest, numpy.max(self._found, axis=0), mean)
        if self._normalize:
            mean /= max(float(numpy.linalg.norm(mean)), 1e-12)
        return mean.astype(numpy.float32)


Ready = tuple[int, int, Tokens]  # the place of a text, which of its pieces, and that


class EncodeRequest:
    """One request. `texts` are those that differ, `places` says for each text of the caller which of these it is (None: they all differ).

    `ready_texts` were read and are not in the queue yet, `under_way` are those that are.
    """

    __slots__ = (
        "brief", "caller", "charged_tokens", "claim", "counts", "deadline", "dispatch", "door", "ended", "errors", "foreign", "future", "ids", "key", "left", "limit", "tokenize_options", "pieces", "places", "read",
        "ready_texts", "reading", "split", "texts", "trace", "truncate", "truncated", "under_way", "vectors",
    )  # fmt: skip

    def __init__(
        self, texts: list[Text], places: list[int] | None, *, door: str, caller: Any, priority: int, deadline: float, limit: str,
        truncate: bool, future: "asyncio.Future[None]", split: bool = False, tokenize_options: TokenizeOptions = AS_THE_SERVER,
    ) -> None:  # fmt: skip
        count = len(texts)
        self.texts = texts
        self.places = places
        self.door = door
        self.caller = caller
        self.key = (priority, caller)
        self.deadline = deadline
        self.limit = limit  # where the deadline came from, in words
        self.truncate = truncate
        self.split = split
        self.tokenize_options = tokenize_options
        self.future = future
        self.brief = False  # one batch can hold all of it
        self.left = count
        self.counts = [0] * count
        self.truncated = [False] * count
        self.ids: list[bytes] | None = None  # kept only where the tokens are wanted
        self.errors: dict[int, WeirError] | None = None  # kept only where each text has an end of its own
        self.dispatch: tuple[Dispatch, float] | None = (
            None  # the batch of the first text that is answered, and its arrival
        )
        self.vectors: Any = None
        self.pieces: dict[int, Pieces] = {}  # of texts that were read in pieces, by place
        self.read = 0  # texts that were given to the readers
        self.reading = False
        self.ready_texts: deque[Ready] = deque()
        self.under_way: set[TextRequest] = set()
        self.foreign = 0  # texts that came as token ids of another tokenizer
        self.ended = False
        self.trace: CallTrace | None = None
        self.claim: Claim | None = None  # to which the vectors of tokens are charged
        self.charged_tokens = 1  # of each text

    @property
    def ready(self) -> bool:
        """Whether a text of it can go into the queue."""
        return bool(self.ready_texts)

    @property
    def is_sent(self) -> bool:
        """Whether all of it has gone into the queue."""
        return self.read == len(self.texts) and not self.reading and not self.ready_texts

    def note(
        self, place: int, found: Tokenized | list[Tokenized], normalize: bool, highest: Sequence[bool] | None = None
    ) -> list[Ready]:
        """Keep the tokens of a text; return the pieces of it that go into the queue: the text itself, if it is not split."""
        pieces = found if isinstance(found, list) else [found]
        counts = [len(piece.ids) // 4 for piece in pieces]
        self.counts[place] = sum(counts)
        self.foreign += pieces[0].foreign
        self.truncated[place] = any(piece.truncated for piece in pieces)
        if self.ids is not None:
            self.ids[place] = b"".join(piece.ids for piece in pieces)
        if len(pieces) > 1:
            self.pieces[place] = Pieces(counts, normalize, highest)
        return [(place, number, Tokens(piece.ids, piece.second)) for number, piece in enumerate(pieces)]

    def put(self, place: int, piece: int, output: Any) -> bool:
        """Keep the vector of a text, or of one of its pieces; return whether the request has all of its vectors."""
        import numpy

        vector = numpy.asarray(output, numpy.float32)
        if place in self.pieces:
            vector = self.pieces[place].put(piece, vector)
            if vector is None:
                return False
        if self.vectors is None:
            count, made = len(self.texts), numpy.empty if self.errors is None else numpy.zeros
            self.vectors = made((count, *vector.shape), numpy.float32) if vector.ndim == 1 else [None] * count
        self.vectors[place] = vector
        self.left -= 1
        return not self.left

    def spare(self, place: int, error: WeirError) -> bool:
        """Keep the error of a text, where each text has an end of its own; return whether the other texts go on."""
        if self.errors is None or isinstance(error, (CapacityError, DeadlineExceeded)):
            return False
        if place not in self.errors:  # another piece of the text may have failed too
            self.errors[place] = error
            self.left -= 1
        return True

    def end(self, error: WeirError | None = None) -> None:
        """End the request, with all vectors or with an error."""
        self.ended = True
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def array(self) -> Any:
        """Return the vectors of the caller's texts, in order; those of tokens with zeros behind the shorter texts. A text with an error
        has zeros."""
        import numpy

        vectors = self.vectors
        if vectors is None:  # all have errors
            vectors = numpy.zeros((len(self.texts), 0), numpy.float32)
        if isinstance(vectors, list):
            there = [(place, vector) for place, vector in enumerate(vectors) if vector is not None]
            longest = max(len(vector) for _, vector in there)
            filled = numpy.zeros((len(vectors), longest, there[0][1].shape[1]), numpy.float32)
            for place, vector in there:
                filled[place, : len(vector)] = vector
            vectors = filled
        return vectors if self.places is None else vectors[self.places]

    def lengths(self) -> list[int] | None:
        """Return how many vectors each text of the caller has; None where it has one."""
        if not isinstance(self.vectors, list):
            return None
        return self.of_all([0 if vector is None else len(vector) for vector in self.vectors])

    def taken_dispatch(self) -> tuple[Dispatch, float] | None:
        """Return `dispatch`, which it lets go: its batch knows it too, and such a circle is garbage that only the collector finds."""
        taken, self.dispatch = self.dispatch, None
        return taken

    def all_errors(self) -> list[WeirError | None] | None:
        """Return the error, or None, of each text of the caller; None where there are none."""
        return self.of_all([self.errors.get(place) for place in range(len(self.texts))]) if self.errors else None

    def of_all(self, values: list[Any]) -> list[Any]:
        """Return what `values` has of the texts that differ, for each text of the caller."""
        return values if self.places is None else [values[place] for place in self.places]

    def first_place(self, place: int) -> int:
        """Return the first place, in the caller's list, of the text at `place` of `texts`."""
        return place if self.places is None else self.places.index(place)


class TextRequest(InProcessRequest):
    """One text in the queue of `service`, or a piece of one: a request like any other. It tells `encoder` its end."""

    def __init__(
        self,
        encoder: "Encoder",
        service: "Service",
        encoding: EncodeRequest,
        ready: Ready,
        cost: float,
        tag: float,
        now: float,
    ) -> None:
        self.encoder = encoder
        self.service = service
        self.encoding = encoding
        self.place, self.piece, self.payload = ready
        self.cost = cost
        self.tag = tag
        self.brief = encoding.brief
        self.arrival = now
        self.timeout = encoding.deadline - now
        self.deadline = encoding.deadline
        self.priority = encoding.key[0]
        self.door = encoding.door
        if encoding.trace is not None:
            self.trace = encoding.trace.of_text()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Deliver the vector."""
        if self.encoding.dispatch is None:
            self.encoding.dispatch = dispatch, self.arrival
        self.encoder.answered(self, output)

    def fail(self, error: WeirError) -> None:
        """Deliver the error, which is the end of the whole request for vectors."""
        self.encoder.failed(self, error)


def distinct(texts: Sequence[Text]) -> tuple[list[Text], list[int] | None]:
    """Return the texts that differ, and which of them each of `texts` is; None if all differ. Lists count as different."""
    if len(texts) == 1:
        return list(texts), None
    found: dict[Any, int] = {}
    unlike: list[Text] = []
    places = []
    for text in texts:
        key = text if isinstance(text, (str, tuple)) and _is_text(text) else id(text)
        place = found.setdefault(key, len(unlike))
        if place == len(unlike):
            unlike.append(text)
        places.append(place)
    return (unlike, places) if len(unlike) < len(texts) else (list(texts), None)


def _is_text(text: Any) -> bool:
    return isinstance(text, str) or all(isinstance(part, str) for part in text)


def named(error: WeirError, place: int) -> WeirError:
    """Return `error` with the place of the text at fault, unless it is not the text's."""
    if isinstance(error, (CapacityError, DeadlineExceeded)):
        return error
    return _saying(error, f"texts[{place}]: {error.message}")


def renamed(error: WeirError, before: str, after: str) -> WeirError:
    """Return `error` with the place of the text at fault as the caller calls it: `before[3]` becomes `after[3]`."""
    if not error.message.startswith(f"{before}["):
        return error
    return _saying(error, after + error.message.removeprefix(before))


def _saying(error: WeirError, message: str) -> WeirError:
    told = copy.copy(error)
    told.message = message
    told.args = (message,)
    told.__cause__ = error.__cause__ or error
    return told


MOST_SPANS = 128  # of texts, and of rounds of reading, of one request: the others of a large one have none


class CallTrace:
    """The span of one request for the vectors of `count` texts: it lasts as long as the block. `trace` is the `traceparent` that the caller
    sent, or the Trace that an endpoint has begun. It is the task's current trace from then on, so that the endpoint can name it."""

    __slots__ = (
        "_attributes",
        "_began",
        "_door",
        "_model",
        "_others",
        "_read_since",
        "_service",
        "_spans",
        "_trace",
        "_tracer",
    )

    def __init__(
        self, tracer: "Tracer", service: "Service", model: str, trace: str | Trace | None, *, door: str, count: int
    ) -> None:
        self._tracer = tracer
        self._service = service
        self._model = model
        self._door = door
        self._attributes = {"weir.model": model, "weir.door": door, "weir.texts": count}
        self._trace = trace if isinstance(trace, Trace) else tracer.new(trace)
        self._others = Trace(self._trace.trace_id, self._trace.span_id, sampled=False)
        self._spans = [
            MOST_SPANS,
            MOST_SPANS if self._trace.sampled else 0,
        ]  # rounds of reading, texts: as many may still come
        self._began = self._read_since = service.now()

    def __enter__(self) -> Self:
        CURRENT.set(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        told = error if isinstance(error, WeirError) else None
        self._tracer.ended(
            f"encode {self._model}", self._trace, self._began, self._service.now(), attributes=self._attributes, error=told,
            inside=self._door == "python",
        )  # fmt: skip

    def of_text(self) -> str | Trace:
        """Return the trace of the next text: a child of this, as far as there are not too many."""
        if not self._spans[1]:
            return self._others
        self._spans[1] -= 1
        return self._trace.traceparent

    def reads(self) -> None:
        """A round of reading begins: texts are on their way to become tokens."""
        self._read_since = self._service.now()

    def has_read(self, count: int) -> None:
        """It is over: so many texts have become tokens."""
        if self._spans[0]:
            self._spans[0] -= 1
            attributes: dict[str, Any] = {"weir.texts": count}
            self._tracer.step("tokenize", self._trace, self._read_since, self._service.now(), attributes=attributes)
