"""Requests for vectors: the texts of one, the vectors and errors that have arrived, and its spans in a trace; and which caller's text enters the queue next."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy

from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, WeirError
from weir.images import Picture
from weir.messages import CURRENT_TRACE, LONGEST_TIMEOUT, Dispatch, Form, Origin, Trace, child_of, of_route
from weir.protocols.exchange import QueuedRequest
from weir.text_models import Pooling
from weir.text_models.texts import EncodedImage, Text, TextOutput, Tokenized, TokenRule, Tokens
from weir.text_server.texts import TEXTS_FIELD, Encoded, Phases, TextQuery

if TYPE_CHECKING:
    from weir.protocols.account import Claim
    from weir.protocols.exchange import Exchange
    from weir.serving.delivery import Tracer
    from weir.serving.handle import ModelHandle


_MAX_POOLINGS = (Pooling.MAX, Pooling.HIERARCHICAL)


def max_pooled_places(poolings: Sequence[Pooling], size: int) -> list[bool]:
    """Return for each of a vector's `size` numbers whether pieces of a text are combined by their maximum (True) or their mean (False).

    It is the maximum where the pooling takes the maximum over tokens.
    """
    both = (Pooling.MEAN, Pooling.MAX)
    parts = [part for each in poolings for part in (both if each is Pooling.MEAN_MAX else (each,))]
    return [part in _MAX_POOLINGS for part in parts for _ in range(size // len(parts))]


class PieceVectors:
    """Combines the vectors of the pieces of one text.

    The result is the mean of the vectors, weighted by `weights`, the number of tokens of each piece, but the maximum where `max_pooled` is True
    (None: nowhere). With `normalize` it is scaled to length 1. If each token has a vector, the result is all vectors in order; of `terms` [terms, 2] it is each
    term once, with its largest weight.
    """

    __slots__ = ("_found", "_left", "_max_pooled", "_normalize", "_terms", "_weights")

    def __init__(
        self, weights: list[int], normalize: bool, max_pooled: Sequence[bool] | None = None, *, terms: bool = False
    ) -> None:
        self._terms = terms
        self._max_pooled = max_pooled
        self._weights = weights
        self._left = len(weights)
        self._found: list[Any] = [None] * len(weights)
        self._normalize = normalize

    def put(self, piece: int, vector: Any) -> Any:
        """Store the vector of a piece. Return the vector of the text once all pieces have theirs, else None."""
        self._found[piece] = vector
        self._left -= 1
        if self._left:
            return None
        if vector.ndim > 1:
            together = numpy.concatenate(self._found)
            return _each_term_once(together) if self._terms else together
        mean = numpy.average(self._found, axis=0, weights=self._weights)
        if self._max_pooled is not None:
            mean = numpy.where(self._max_pooled, numpy.max(self._found, axis=0), mean)
        if self._normalize:
            mean /= max(float(numpy.linalg.norm(mean)), 1e-12)
        return mean.astype(numpy.float32)


def _each_term_once(terms: Any) -> Any:
    words, inverse = numpy.unique(terms[:, 0], return_inverse=True)
    weights = numpy.zeros(len(words), numpy.float32)
    numpy.maximum.at(weights, inverse, terms[:, 1])
    return numpy.stack([words, weights], axis=1)


# The index of a text, the index of a piece of it, and the tokens of the piece; or the index of a picture, 0, and the picture.
ReadyText = tuple[int, int, Tokens | EncodedImage]


class Deadline(NamedTuple):
    """When a request that began at the instant `began` must have ended: `timeout` seconds later. `limit` says for errors where that comes from."""

    began: float
    timeout: float
    limit: str

    @property
    def at(self) -> float:
        """The instant of the deadline, by the service's clock."""
        return self.began + self.timeout


SMALL_REQUEST = 16  # texts; such a request has the server's timeout, and may be answered on the fast path


def deadline_of(stated: float | None, count: int, *, own: float, began: float) -> Deadline:
    """Return the deadline of a request of `count` texts whose caller has `stated` a timeout or None, where `own` is the server's.

    Raises InvalidRequest for a timeout that cannot be.
    """
    if stated is not None:
        if not 0 < stated <= LONGEST_TIMEOUT:
            rule = f"must be more than 0 and at most {LONGEST_TIMEOUT:g} seconds"
            raise InvalidRequest(f"timeout={stated!r}: {rule}")
        return Deadline(began, stated, stated_limit(stated))
    if count <= SMALL_REQUEST:
        return Deadline(began, own, own_limit(own))
    longer = min(own * count / SMALL_REQUEST, LONGEST_TIMEOUT)
    why = f"of {count} texts: the server's setting of {own:g} s holds for {SMALL_REQUEST}"
    return Deadline(began, longer, f"timeout={longer:g} s, {why}")


def stated_limit(timeout: float) -> str:
    """Return where a timeout comes from that the caller stated, for errors."""
    return f"timeout={timeout!r} s, which came with the request"


def own_limit(timeout: float) -> str:
    """Return where a timeout comes from that the caller did not state, for errors."""
    return f"timeout={timeout:g} s, the server's setting"


@dataclass(eq=False)
class EncodeRequest:
    """One request for vectors.

    Attributes:
        texts: the distinct texts of the request.
        indices: for each text of the caller its index in `texts`; None if all texts are distinct.
        query: what is asked for.
        key: the priority, and the client or an object of its own.
        rule: how its texts are tokenized.
        ready_texts: tokenized texts that are not in the queue yet.
        under_way: texts that are in the queue or being computed.
        handed_over: how many texts have been given to the tokenizer.
        is_tokenizing: whether the tokenizer has texts of the request now.
        left: how many texts have neither a vector nor an error.
        brief: whether one batch can hold the whole request.
        ids: the token ids of each text, kept only if the caller wants tokens.
        errors: the errors of texts by index, kept only if an error of one text does not end the request.
        dispatch: the batch of the text that was answered first, and the time at which that text entered the queue.
        vectors: an array [texts, dimensions], or a list of an array [tokens, dimensions] for each text; None before the first.
        pieces: the outputs of texts that were split, by index, one for each output.
        foreign: how many texts were sent as token ids of another tokenizer.
        claim: the account that is charged for the vectors of tokens; None if each text has one vector.
        charged_tokens: for how many tokens of each text the claim was charged.
        outputs: what is made of each text; none for the model's own output alone.
        further: of several outputs the second and further ones: for each its result of each text.
        tokenized: when its first texts were tokenized, by the service's clock.
    """

    texts: list[Text]
    indices: list[int] | None
    query: TextQuery
    rule: TokenRule
    deadline: Deadline
    handed_over: int = 0
    is_tokenizing: bool = False
    brief: bool = False
    ended: bool = False
    foreign: int = 0
    charged_tokens: int = 1
    vectors: Any = None
    dispatch: tuple[Dispatch, float] | None = None
    claim: "Claim | None" = None
    trace: "CallTrace | None" = None
    ready_texts: deque[ReadyText] = field(default_factory=deque)
    under_way: "set[TextPiece]" = field(default_factory=set)
    pieces: dict[int, list[PieceVectors]] = field(default_factory=dict)
    further: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count, query = len(self.texts), self.query
        # Not the request itself, which would make a reference cycle.
        self.key = (query.priority, query.client or object())
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokenized = self.deadline.began
        self.left = count
        self.counts = [0] * count
        self.truncated = [False] * count
        self.ids: list[bytes] | None = [b""] * count if query.options.want_tokens else None
        self.errors: dict[int, WeirError] | None = {} if query.each else None
        self.outputs = query.options.outputs

    @property
    def ready(self) -> bool:
        """Whether a text of the request can enter the queue."""
        return bool(self.ready_texts)

    @property
    def is_bulk(self) -> bool:
        """Whether the request is bulk work."""
        return self.key[0] < 0

    @property
    def is_sent(self) -> bool:
        """Whether all texts of the request have entered the queue."""
        return self.handed_over == len(self.texts) and not self.is_tokenizing and not self.ready_texts

    def add_tokens(
        self,
        index: int,
        found: Tokenized | list[Tokenized] | EncodedImage,
        normalize: bool,
        max_pooled: Sequence[bool] | None = None,
    ) -> list[ReadyText]:
        """Store the tokens of a text or of its pieces, or what a picture costs; return what enters the queue for it. For the other arguments see PieceVectors."""
        if isinstance(found, EncodedImage):
            self.counts[index] = found.tokens
            return [(index, 0, found)]
        pieces = found if isinstance(found, list) else [found]
        counts = [len(piece.ids) // 4 for piece in pieces]
        self.counts[index] = sum(counts)
        self.foreign += pieces[0].foreign
        self.truncated[index] = any(piece.truncated for piece in pieces)
        if self.ids is not None:
            self.ids[index] = b"".join(piece.ids for piece in pieces)
        if len(pieces) > 1:
            self.pieces[index] = [
                PieceVectors(counts, normalize, max_pooled, terms=output is TextOutput.SPARSE)
                for output in self.outputs or (None,)
            ]
        return [(index, number, Tokens(piece.ids, piece.second, self.outputs)) for number, piece in enumerate(pieces)]

    def put(self, index: int, piece: int, output: Any) -> bool:
        """Store the vector of a text, or of one of its pieces. Return whether all texts now have a vector or an error.

        Raises Overloaded or TooLarge if there is no memory for vectors of so many rows.
        """
        found: list[Any] = [numpy.asarray(each, numpy.float32) for each in (output if self.outputs else (output,))]
        if index in self.pieces:
            found = [pieces.put(piece, each) for pieces, each in zip(self.pieces[index], found, strict=True)]
            if found[0] is None:
                return False
        vector = found[0]
        if vector.ndim > 1:
            self._charge(*vector.shape)
        if len(found) > 1:
            self._put_further(index, found[1:])
        if self.vectors is None:
            count, create = len(self.texts), numpy.empty if self.errors is None else numpy.zeros
            self.vectors = create((count, *vector.shape), numpy.float32) if vector.ndim == 1 else [None] * count
        self.vectors[index] = vector
        self.left -= 1
        return not self.left

    def _put_further(self, index: int, found: list[Any]) -> None:
        """Store the second and further outputs of a text. Raises what Claim.take does."""
        if not self.further:
            self.further = [[None] * len(self.texts) for _ in found]
        if self.claim is not None:
            self.claim.take(sum(each.nbytes for each in found))
        for results, each in zip(self.further, found, strict=True):
            results[index] = each

    def further_outputs(self) -> dict[TextOutput, list[Any]]:
        """Return the second and further outputs of the caller's texts; of a text with an error None."""
        further = self.further or [[None] * len(self.texts) for _ in self.outputs[1:]]
        return {output: self.per_text(results) for output, results in zip(self.outputs[1:], further, strict=True)}

    def _charge(self, rows: int, size: int) -> None:
        """Charge the memory of a text with more rows than were charged, such as terms: the array has as many for each text. Raises what Claim.take does."""
        if self.claim is not None and rows > self.charged_tokens:
            texts = len(self.texts if self.indices is None else self.indices)
            self.claim.take(4 * size * texts * (rows - self.charged_tokens))
            self.charged_tokens = rows

    def add_error(self, index: int, error: WeirError) -> bool:
        """Store the error of a text if the error does not end the request; return whether the request goes on."""
        if self.errors is None or isinstance(error, (CapacityError, DeadlineExceeded)):
            return False
        if index not in self.errors:  # another piece of the text may have failed too
            self.errors[index] = error
            self.left -= 1
        return True

    def end(self, error: WeirError | None = None) -> None:
        """End the request, with its vectors or with `error`. Idempotent."""
        self.ended = True
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def result_array(self) -> Any:
        """Return the vectors of the caller's texts as in `Encoded.vectors`; a text with an error has zeros."""
        vectors = self.vectors
        if vectors is None:  # all have errors
            vectors = numpy.zeros((len(self.texts), 0), numpy.float32)
        if isinstance(vectors, list):
            there = [(index, vector) for index, vector in enumerate(vectors) if vector is not None]
            longest = max(len(vector) for _, vector in there)
            filled = numpy.zeros((len(vectors), longest, there[0][1].shape[1]), numpy.float32)
            for index, vector in there:
                filled[index, : len(vector)] = vector
            vectors = filled
        return vectors if self.indices is None else vectors[self.indices]

    def lengths(self) -> list[int] | None:
        """Return how many vectors each text of the caller has; None if each text has one."""
        if not isinstance(self.vectors, list):
            return None
        return self.per_text([0 if vector is None else len(vector) for vector in self.vectors])

    def take_dispatch(self) -> tuple[Dispatch, float] | None:
        """Return `dispatch` and forget it. The batch refers to this request, so keeping it would make a reference cycle."""
        taken, self.dispatch = self.dispatch, None
        return taken

    def phases(self, now: float) -> Phases:
        """Return how long the request took, which ends `now`."""
        began = self.deadline.began
        if self.dispatch is None:
            return Phases(self.tokenized - began, 0.0, 0.0, now - began)
        dispatch, arrival = self.dispatch
        return Phases(self.tokenized - began, dispatch.at - arrival, now - dispatch.at, now - began)

    def errors_per_text(self) -> list[WeirError | None] | None:
        """Return the error or None of each text of the caller; None if there are no errors."""
        return self.per_text([self.errors.get(index) for index in range(len(self.texts))]) if self.errors else None

    def per_text(self, values: list[Any]) -> list[Any]:
        """Return a value for each text of the caller, given `values` for the distinct texts."""
        return values if self.indices is None else [values[index] for index in self.indices]

    def first_index(self, index: int) -> int:
        """Return the first index, in the caller's list, of the text with `index` in `texts`."""
        return index if self.indices is None else self.indices.index(index)


class TextRequest(QueuedRequest):
    """A request for one text, or for a piece of one, which enters the queue by `exchange`. `ended` is called with it as for a QueuedRequest.

    The timeout of its form is what its caller stated or the server's, and `deadline` that of the whole request, which began before this text entered the queue.
    """

    __slots__ = ("brief", "exchange", "tag")

    def __init__(
        self,
        exchange: "Exchange",
        form: Form,
        tokens: Tokens | EncodedImage,
        ended: Callable[[Any], None],
        *,
        deadline: float,
        tag: float,
        brief: bool,
    ) -> None:
        super().__init__(form, tokens, exchange.service.now(), ended)
        self.exchange = exchange
        self.deadline = deadline
        self.tag = tag
        self.brief = brief


class TextPiece(TextRequest):
    """A text of `request`, or a piece of one, which costs `cost` tokens. Its timeout is what is left `now` of that of the whole request."""

    __slots__ = ("index", "piece", "request")

    @property
    def limit(self) -> tuple[float, float]:
        """The timeout of the whole request, and the instant from which it counts."""
        deadline = self.request.deadline
        return deadline.timeout, deadline.began

    def __init__(
        self, exchange: "Exchange", request: EncodeRequest, ready: ReadyText, ended: Callable[["TextPiece"], None], *,
        cost: float, tag: float, now: float,
    ) -> None:  # fmt: skip
        self.request = request
        self.index, self.piece, tokens = ready
        deadline = request.deadline.at
        form = Form(deadline - now, cost=cost, priority=request.key[0], frontend=exchange.frontend)
        super().__init__(exchange, form, tokens, ended, deadline=deadline, tag=tag, brief=request.brief)
        if request.trace is not None:
            self.trace = request.trace.text_trace()


class OneText(TextRequest):
    """The only text of a request, which enters the queue as it comes, see Encoder.encode_one.

    The timeout of its form is that from `began` to the deadline. It is the same for all requests that state none, so that they wait in the order of their
    deadlines.

    Attributes:
        done: is called once with the response or the error, unless the request is withdrawn.
        query: what was asked.
        count, truncated: how many tokens the text has, and whether it was cut.
        began: when the request began, by the service's clock.
        is_over: whether it has its response or error, or was withdrawn.
    """

    __slots__ = ("began", "count", "done", "is_over", "query", "truncated")

    @property
    def limit(self) -> tuple[float, float]:
        """The timeout, and the instant from which it counts."""
        return self.form.timeout, self.began

    def __init__(
        self, exchange: "Exchange", form: Form, query: TextQuery, found: Tokenized, done: Callable[[Encoded | WeirError], None],
        ended: Callable[["OneText"], None], *, began: float, tag: float,
    ) -> None:  # fmt: skip
        ids, second, self.truncated, _ = found
        self.count = len(ids) // 4
        self.done = done
        self.query = query
        self.began = began
        self.is_over = False
        super().__init__(exchange, form, Tokens(ids, second), ended, deadline=began + form.timeout, tag=tag, brief=True)


def distinct(texts: Sequence[Text]) -> tuple[list[Text], list[int] | None]:
    """Return the distinct texts, and for each of `texts` its index among them, None if all are distinct. Lists are never equal."""
    if len(texts) == 1:
        return list(texts), None
    found: dict[Any, int] = {}
    first: list[Text] = []
    indices = []
    for text in texts:
        key = text if isinstance(text, (str, tuple)) and _is_text(text) else id(text)
        index = found.setdefault(key, len(first))
        if index == len(first):
            first.append(text)
        indices.append(index)
    return (first, indices) if len(first) < len(texts) else (list(texts), None)


def _is_text(text: Any) -> bool:
    return isinstance(text, (str, Picture)) or all(isinstance(part, str) for part in text)


def at_text(error: WeirError, index: int) -> WeirError:
    """Return `error` with the index of the text at fault before its message. Errors of capacity and deadlines, which no text causes, are unchanged."""
    if isinstance(error, (CapacityError, DeadlineExceeded)):
        return error
    return error.at(TEXTS_FIELD, index)


MAX_SPANS = 128  # of each kind in one request: a large request has no spans for its other texts and tokenizer calls


class CallTrace:
    """The span of one request, `query`, for the vectors of `count` texts: a context manager that begins and ends it.

    Entering makes the trace the current one of the task,
    so that the endpoint can name it in its response.
    """

    def __init__(self, tracer: "Tracer", service: "ModelHandle", model: str, query: TextQuery, *, count: int) -> None:
        self._tracer = tracer
        self._service = service
        self._model = model
        self._frontend = query.frontend
        self._attributes = {
            "weir.model": model,
            "weir.frontend": query.frontend,
            "weir.texts": count,
            **of_route(query.route),
        }
        self._trace = query.trace if isinstance(query.trace, Trace) else tracer.new(query.trace)
        self._others = Trace(self._trace.trace_id, self._trace.span_id, sampled=False)
        # How many more spans there may be of tokenizer calls and of texts.
        self._spans = [MAX_SPANS, MAX_SPANS if self._trace.sampled else 0]
        self._began = self._tokenizing_since = service.now()

    def __enter__(self) -> Self:
        CURRENT_TRACE.set(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        known, inside = error if isinstance(error, WeirError) else None, self._frontend == "python"
        span, facts = (f"encode {self._model}", self._trace, self._began, self._service.now()), self._attributes
        self._tracer.ended(*span, attributes=facts, error=known, inside=inside)

    def text_trace(self) -> Trace | Origin:
        """Return the trace of the next text: a child of this span for the first MAX_SPANS texts, and unsampled for the others."""
        if not self._spans[1]:
            return self._others
        self._spans[1] -= 1
        return child_of(self._trace)

    def begin_tokenizing(self) -> None:
        """Note that texts are given to the tokenizer."""
        self._tokenizing_since = self._service.now()

    def end_tokenizing(self, count: int) -> None:
        """Record a span for the tokenization of `count` texts, from the last `begin_tokenizing` until now."""
        if self._spans[0]:
            self._spans[0] -= 1
            facts: dict[str, Any] = {"weir.texts": count}
            self._tracer.step("tokenize", self._trace, self._tokenizing_since, self._service.now(), attributes=facts)


# The most tokens by which a caller without a ready text may fall behind virtual time and catch up later.
CREDIT = 4096.0
REMEMBERED = 1024  # absent callers; of twice as many those who have had least are forgotten


class Sharing(Hashable, Protocol):
    """A request in a CallerQueue."""

    @property
    def ready(self) -> bool:
        """Whether the request has a text that can enter the queue now."""


S = TypeVar("S", bound=Sharing)
Key = tuple[int, Hashable]  # priority, caller


class CallerShare(Generic[S]):
    """One caller at one priority.

    Attributes:
        had: the tokens that the caller has had, counted as if it had always been present.
        members: the caller's requests.
        ready: the requests that may be ready, in turn.
        queued: whether the caller is in the heap of those who may be next.
    """

    __slots__ = ("had", "key", "members", "queued", "ready")

    def __init__(self, key: Key, had: float) -> None:
        self.key = key
        self.had = had
        self.members: set[S] = set()
        self.ready: OrderedDict[S, None] = OrderedDict()  # a dict finds its first key slowly after many removals
        self.queued = False

    def first(self) -> S | None:
        """Return the caller's request whose turn it is; None if none is ready."""
        while self.ready:
            member = next(iter(self.ready))
            if member.ready and member in self.members:
                return member
            del self.ready[member]
        return None


class CallerQueue(Generic[S]):
    """The requests that have texts to send, by caller. All operations take O(log callers), except `len`, which takes O(callers).

    This is self-clocked fair queueing (Golestani, 1994), in tokens. A caller's next text gets a tag: the number of tokens that the caller has had, that text
    included. The caller with the lowest tag is next. Virtual time is the lowest tag of the texts that are under way, which means in the queue or being
    computed. A new caller begins at virtual time, so that nobody saves up a share while away. A caller who has had more than the others keeps that debt for a
    while after leaving.

    So a caller's share does not depend on the number of texts in a request: one text goes before the thousands of another caller. Requests of one caller take
    turns. A higher priority goes before a lower one.
    """

    def __init__(self) -> None:
        self._shares: dict[Key, CallerShare[S]] = {}
        self._heap: list[tuple[int, float, int, CallerShare[S]]] = []
        self._pushes = 0
        self._tags: list[float] = []  # a heap of the tags of texts in flight, and of some that are no longer
        self._ended: dict[float, int] = {}  # how many texts of each tag in `_tags` are no longer under way, if any
        self._held = 0  # texts in flight that entered out of turn; all have the tag `_now`
        self._now = 0.0
        self._away: dict[Key, float] = {}  # the tokens that absent callers have had

    def __len__(self) -> int:
        return sum(len(share.members) for share in self._shares.values())

    @property
    def now(self) -> float:
        """Virtual time, in tokens. It never decreases."""
        tags, ended = self._tags, self._ended
        while tags and tags[0] in ended:
            tag = heappop(tags)
            ended[tag] -= 1
            if not ended[tag]:
                del ended[tag]
        if tags and tags[0] > self._now and not self._held:
            self._now = tags[0]
        return self._now

    def add(self, key: Key, member: S) -> None:
        """Add the request `member` of the caller `key`."""
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = CallerShare(key, max(self.now, self._away.pop(key, 0.0)))
        share.members.add(member)
        self.wake(key, member)

    def wake(self, key: Key, member: S) -> None:
        """Note that `member` may have become ready. A request that was removed is ignored."""
        share = self._shares.get(key)
        if share is None or not member.ready:
            return
        share.ready.setdefault(member)
        if not share.queued:
            share.had = max(share.had, self.now - CREDIT)
            self._push(share)

    def _push(self, share: CallerShare[S]) -> None:
        share.queued = True
        self._pushes += 1
        heappush(self._heap, (-share.key[0], share.had, self._pushes, share))

    def next(self) -> S | None:
        """Return the request whose turn it is; None if none is ready. Follow it with `charge` or `leave`, or the result stays the same."""
        while self._heap:
            share = self._heap[0][3]
            if (member := share.first()) is not None:
                return member
            heappop(self._heap)
            share.queued = False
        return None

    @property
    def due(self) -> bool:
        """Whether the caller whose turn it is has had no more than any caller with a text under way. Call `next` before it."""
        return self._heap[0][1] <= self.now

    def charge(self, cost: float) -> float:
        """Charge `cost` tokens for a text of the request that `next` returned. Return the text's tag, to be passed to `ended` later."""
        _, _, _, share = heappop(self._heap)
        share.had += cost
        heappush(self._tags, share.had)
        share.ready.move_to_end(next(iter(share.ready)))
        self._push(share)
        return share.had

    def at_once(self) -> float:
        """Return a tag, to be passed to `ended` later, for a text that enters the queue out of turn and is not charged."""
        heappush(self._tags, self.now)
        return self._now

    def at(self, ahead: float) -> float:
        """Return a tag, to be passed to `ended` later, for a text that is so many tokens `ahead` of virtual time and is not charged."""
        tag = self.now + ahead
        heappush(self._tags, tag)
        return tag

    def hold(self) -> float:
        """Return a tag as `at_once` does, and let virtual time stand still until `release`. Most texts are such, and this takes no heap."""
        tag = self._now if self._held else self.now
        self._held += 1
        return tag

    def release(self) -> None:
        """Note that a text for which `hold` was called is no longer under way."""
        self._held -= 1

    def ended(self, tag: float) -> None:
        """Note that a text with this tag is no longer under way."""
        self._ended[tag] = self._ended.get(tag, 0) + 1

    def leave(self, key: Key, member: S) -> None:
        """Remove the request `member`, which has no more texts to send. Idempotent."""
        share = self._shares.get(key)
        if share is None or member not in share.members:
            return
        share.members.remove(member)
        if not share.members:
            del self._shares[key]
            self._away[key] = share.had
            if len(self._away) >= 2 * REMEMBERED:
                self._forget()

    def _forget(self) -> None:
        """Forget the absent callers who have had no more than virtual time, and of the others all but the REMEMBERED who have had most; if nobody is
        present, all of them.

        At least half of them go, so that it is done once for many who leave: tens of thousands may leave at once.
        """
        now = self.now
        owing = [(key, had) for key, had in self._away.items() if had > now and self._shares]
        self._away = dict(nlargest(REMEMBERED, owing, key=itemgetter(1)) if len(owing) > REMEMBERED else owing)
