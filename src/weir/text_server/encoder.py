"""The encoder of a served text model: it tokenizes texts, passes them through the queue of the model's service, and returns their vectors in order.

Only a window of the texts is in the queue at a time: enough to form batches of similar length. The other texts wait here, as strings. Callers share the
window fairly (CallerQueue); a text of a caller who has had no more than the others may exceed it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from math import inf
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy

from weir.batching import BatchingSettings
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelError, Overloaded, WeirError, brief, draining
from weir.images import Picture
from weir.messages import JSON, LONGEST_TIMEOUT, OBJECT, Form
from weir.protocols.account import CLAIM, charge
from weir.protocols.exchange import Exchange
from weir.text_models.runtime import release_free_memory
from weir.text_models.texts import EncodedImage, Text, TextOutput, TokenDetail, TokenRule, Tokens, prompt_text
from weir.text_server.requests import (
    CallerQueue,
    CallTrace,
    EncodeRequest,
    OneText,
    ReadyText,
    TextPiece,
    at_text,
    deadline_of,
    distinct,
    own_limit,
    stated_limit,
)
from weir.text_server.texts import NO_OPTIONS, Encoded, Phases, TextFacts, TextOptions, TextQuery, texts_bytes
from weir.text_server.tokenizing import (
    AT_ONCE_CHARACTERS,
    CHUNK,
    TokenizeRequest,
    TokenizeResult,
    TokenizerThreads,
)
from weir.wire.cells import LARGE_BYTES

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle


T = TypeVar("T")


class OpenRequests:
    """Counts the requests that have not ended, and refuses new ones when the server drains."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._emptied = asyncio.Event()

    def begin(self) -> None:
        """Count a request. Raises Draining if no more are accepted."""
        if self._closed:
            raise draining()
        self._count += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self._count -= 1
        if not self._count:
            self._emptied.set()

    async def drained(self, timeout: float | None = None) -> bool:
        """Accept no more requests, and wait until all have ended. Return False if some have not after `timeout` seconds (None: no limit)."""
        self._closed = True
        if self._count:
            self._emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._emptied.wait()
        return not self._count


MAX_HELD = 1_000_000  # texts of all requests together; a larger request is accepted if there is no other
LARGE_REQUEST = 2_000  # texts; work on more texts at once is done in a thread, as it would block the event loop
# Free memory is returned to the system so many seconds after a large request: by then its response has most likely been sent.
RELEASE_AFTER = (1.0, 5.0, 30.0)
RETRY_AFTER = 1.0  # seconds
DEADLINE_SLACK = 2.0  # a request is refused if alone on all workers it needs more than this many times the time left
LENGTH_DECAY = 0.99  # the factor by which the weight of a text's length falls with each later text
_NO_TRACE: AbstractContextManager[None] = nullcontext()


_FLOAT_BYTES = 4
_COMPARED_AT_ONCE = 1 << 20  # bytes of texts and pictures; to compare more takes longer than a millisecond
_LONGEST_NUMBER = 16  # bytes of a float32 as JSON, with the comma behind it
_NO_VECTOR = numpy.empty((1, 0), numpy.float32)
_DECODED_BYTES = 64  # of memory for a token id that is decoded: the string of its token
DETAIL_BYTES = 200  # of memory for a token that is shown, and there are at most as many tokens as characters
NO_FACTS = TextFacts()


class TextShape(NamedTuple):
    """The facts that an encoder must know of its model.

    Attributes:
        dimensions: how many numbers a vector has.
        max_length: the most tokens of a text, special tokens included.
        truncate: whether texts that are too long are cut or refused, for callers who do not state it.
        split: for such callers, split these texts into pieces instead and combine the vectors, see requests.PieceVectors.
        normalize: whether vectors have length 1; shortened and combined vectors are then scaled to length 1 again.
        shortest: the number of tokens that shorter texts cost, too: what every text is padded to, if anything.
        max_pooled: see requests.PieceVectors.
        of_tokens: whether the model has a vector for each token.
        tokens_per_second, image_tokens_per_second: the most tokens that one worker computes in a second, 0 if unknown; and those of images.
    """

    dimensions: int
    max_length: int
    truncate: bool = True
    split: bool = False
    normalize: bool = False
    shortest: int = 1
    max_pooled: Sequence[bool] | None = None
    of_tokens: bool = False
    tokens_per_second: float = 0.0
    image_tokens_per_second: float = 0.0


class Tower:
    """The queue of a model's texts, or that of its images: the `service`, and what the items cost that entered it, in tokens.

    `tokens_per_second` is what one worker computes by a measurement before the first batch; 0 if unknown.
    """

    def __init__(self, service: "ModelHandle", tokens_per_second: float) -> None:
        self.serve(service)
        self._measured = tokens_per_second
        self._costs = self._weight = 0.0  # the weighted sum of what items cost, and the sum of the weights

    def serve(self, service: "ModelHandle") -> None:
        """Send items to the queue of `service` from now on."""
        self.service = service
        self._exchanges: dict[str, Exchange] = {}

    def exchange(self, frontend: str) -> Exchange:
        """Return the exchange by which items that came through `frontend` enter the queue. It has nothing of a single request."""
        found = self._exchanges.get(frontend)
        if found is None:
            found = self._exchanges[frontend] = Exchange(self.service, frontend=frontend)
        return found

    def entered(self, cost: float) -> None:
        """Note that an item of this `cost` has entered the queue."""
        self._costs = LENGTH_DECAY * self._costs + cost
        self._weight = LENGTH_DECAY * self._weight + 1.0

    def seconds(self, cost: float, now: float) -> float:
        """Return how long all workers take for what costs so much, by their last batches, or without recent ones as measured at the start; 0 if unknown."""
        control = self.service.control
        rate = control.best_rate(now)
        if self._weight and rate < inf:
            rate *= self._costs / self._weight
        else:
            rate = self._measured * control.ready_workers
        return cost / rate if rate > 0.0 else 0.0


class Encoder:
    """Implements Encodes over `service`, whose model takes Tokens. It serves one event loop, from the first call to `close`.

    Args:
        service: the model's service.
        images: the service of its tower for images; None if there is none.
        threads: tokenize for the model, until `close` ends them.
        shape: what is known of the model.
        name: the model's name; None for that of the service.
        facts: what a server tells of the model.
        max_held: the most texts of all requests together.
        fronts: how many processes have an encoder of this queue. They divide its window.
    """

    def __init__(
        self, service: "ModelHandle", threads: TokenizerThreads, shape: TextShape, *, name: str | None = None, facts: TextFacts = NO_FACTS,
        max_held: int = MAX_HELD, fronts: int = 1, images: "ModelHandle | None" = None,
    ) -> None:  # fmt: skip
        self._service = service
        self._texts = Tower(service, shape.tokens_per_second)
        self._images = Tower(service if images is None else images, shape.image_tokens_per_second)
        self._shape = shape
        self.name = name or service.facts.name
        self.dimensions, self.max_length = shape.dimensions, shape.max_length
        self._own_rule = TokenRule(shape.max_length, shape.truncate or shape.split, shape.split)
        self.facts = facts
        self._is_small = _LONGEST_NUMBER * shape.dimensions < LARGE_BYTES  # a vector as JSON travels with its batch
        self._threads, self._tokenizer = threads, threads.tokenizer
        self._large_request = LARGE_REQUEST if threads.count else inf
        self._callers: CallerQueue[EncodeRequest] = CallerQueue()
        self._max_held = max_held // fronts
        self._fronts = fronts
        self._held = 0  # texts of requests that have not ended
        self._under_way = {False: 0, True: 0}  # texts in the queue or being computed, by whether they are bulk work
        self._pump_scheduled = False
        self._open_requests = OpenRequests()
        self._release_timers: list[asyncio.TimerHandle] = []

    @property
    def services(self) -> Sequence["ModelHandle"]:
        """The present services of texts and of images, which may be one."""
        return list(dict.fromkeys((self._texts.service, self._images.service)))

    @property
    def window(self) -> int:
        """How many texts may be in the queue or being computed, except for texts of callers who have had no more than others.

        It is enough to form batches of similar length, and at most half of the queue.
        """
        settings = self._service.facts.batching
        return max(1, min(settings.max_queue_size // 2, max(256, 8 * settings.max_batch_size)) // self._fronts)

    def serve(self, service: "ModelHandle", images: "ModelHandle | None" = None) -> None:
        """Send texts to the queue of `service` from now on, and images to that of `images`; without it, to the one that refuses them, if they had one of their
        own. What is in the queue of the previous service stays there."""
        if images is not None or self._images.service is self._service:
            self._images.serve(images or service)
        self._service = service
        self._texts.serve(service)

    async def drain(self) -> bool:
        """Accept no more requests, and wait until all have ended. Return False if some have not after the service's drain_timeout.

        The service must accept texts meanwhile, as a large request enters its queue little by little.
        """
        return await self._open_requests.drained(self._service.facts.settings.drain_timeout)

    async def drained(self) -> None:
        """Accept no more requests, and return when all have ended, however long that takes."""
        await self._open_requests.drained()

    def close(self) -> None:
        """End the threads that tokenize. Texts in the queue fail when the service is closed."""
        self._release_memory_later(None)
        self._threads.close()

    @property
    def batching(self) -> BatchingSettings:
        """The limits of the model's queue and of its batches, as they are now."""
        return self._service.facts.batching

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        """Return the vectors of `texts`, in order; see Encodes. Equal texts are computed once.

        The memory of the vectors is charged to the current claim (protocols/account.py); raises Overloaded or TooLarge if it has no room.
        """
        options, dimensions = query.options, query.options.dimensions
        if isinstance(texts, str) or not texts:
            raise InvalidRequest(f"texts: must be a list of one text or more, is {brief(texts)}")
        if dimensions is not None and not 0 < dimensions <= self.dimensions:
            raise InvalidRequest(f"dimensions={dimensions}: must be 1 to {self.dimensions}")
        # Charged for all texts, as the response has a vector for each of several equal texts.
        many = len(texts) > self._large_request
        size = await asyncio.to_thread(texts_bytes, texts) if many else texts_bytes(texts)
        charge(size + _FLOAT_BYTES * len(texts) * (dimensions or self.dimensions))
        rule = self._token_rule(options)
        if rule.split:  # a text is tokenized as a whole, one of the request at a time
            charge(DETAIL_BYTES * max(map(_size, texts)))
        own = self._service.facts.settings.timeout
        deadline = deadline_of(query.timeout, len(texts), own=own, began=self._service.now() - query.waited)
        long = many or size > _COMPARED_AT_ONCE
        distinct_texts, indices = await asyncio.to_thread(distinct, texts) if long else distinct(texts)
        request = EncodeRequest(distinct_texts, indices, query, rule, deadline)
        if self._shape.of_tokens or options.outputs:
            request.claim = CLAIM.get()
        tracer, service = self._service.tracing, self._service
        with (
            _NO_TRACE if tracer is None else CallTrace(tracer, service, self.name, query, count=len(texts))
        ) as request.trace:
            await self._ended(request, is_large=long)
        return (
            await asyncio.to_thread(self._encoded, request, dimensions) if many else self._encoded(request, dimensions)
        )

    def encode_one(
        self, text: Text, query: TextQuery, done: Callable[[Encoded | WeirError], None]
    ) -> Callable[[], None] | None:
        """Encode one text without a task, see Encodes. Most requests have one text, and this takes half the time of `encode`.

        That is for a client without a name, and for a text whose words are known, while no text of its class waits to enter the queue: it enters at
        once, so there is no turn to share.
        """
        service, options, bulk = self._service, query.options, query.priority < 0
        if (
            type(text) is not str
            or len(text) > AT_ONCE_CHARACTERS
            or not query.is_plain
            or self._shape.of_tokens
            or service.tracing is not None
        ):
            return None
        first = self._callers.next()  # that of the highest priority
        is_turn = first is None or (first.is_bulk and not bulk)
        if not is_turn or self._under_way[bulk] >= self.window or self._held >= self._max_held:
            return None
        rule = self._own_rule if options is NO_OPTIONS else self._token_rule(options)
        timeout = service.facts.settings.timeout if query.timeout is None else query.timeout
        if rule.split or not 0 < timeout <= LONGEST_TIMEOUT:
            return None
        began = service.now()
        found = self._tokenizer.at_once([text], rule)
        if found is None:
            return None
        (result,) = found
        if isinstance(result, WeirError):
            raise at_text(result, 0)
        as_json = query.as_json and options.dimensions is None and self._is_small and not result.truncated
        exchange = self._texts.exchange(query.frontend)
        cost = float(max(len(result.ids) // 4, self._shape.shortest))
        form = Form(
            timeout, accept=JSON if as_json else OBJECT, cost=cost, priority=query.priority, frontend=query.frontend
        )
        tag = self._callers.hold()
        one = OneText(exchange, form, query, result, done, self._one_ended, began=began, tag=tag)
        self._enter_one(one)
        return partial(self._withdraw_one, one)

    def _enter_one(self, one: OneText) -> None:
        """Put `one` into the queue. Raises the error with which the queue refuses it."""
        try:
            self._open_requests.begin()
        except Draining:
            self._callers.release()
            raise
        try:
            one.exchange.put(one)
        except WeirError as refusal:
            self._callers.release()
            self._open_requests.end()
            raise (_one_too_late(one) if isinstance(refusal, DeadlineExceeded) else at_text(refusal, 0)) from None
        self._held += 1
        self._under_way[one.form.priority < 0] += 1
        self._texts.entered(one.form.cost)

    def _leave_one(self, one: OneText) -> bool:
        """Note that `one` has ended; return False if it had ended before."""
        if one.is_over:
            return False
        one.is_over = True
        self._held -= 1
        self._under_way[one.form.priority < 0] -= 1
        self._callers.release()
        self._open_requests.end()
        if self._callers.next() is not None:
            self._pump_soon()
        return True

    def _one_ended(self, one: OneText) -> None:
        """Deliver the vector of `one`, or its error. That of the queue names the time that was left, not the caller's timeout."""
        if not self._leave_one(one):
            return
        error, output, dispatch = one.error, one.output, one.dispatch
        if error is not None:
            one.done(_one_too_late(one) if isinstance(error, DeadlineExceeded) else at_text(error, 0))
            return
        assert dispatch is not None  # it has its output
        if type(output) is bytes:
            one.done(
                Encoded(_NO_VECTOR, [one.count], [one.truncated], dispatch=(dispatch, one.arrival), written=output)
            )
            return
        try:
            vectors = numpy.asarray(output, numpy.float32).reshape(1, -1)
            dimensions = one.query.options.dimensions
            if dimensions is not None and dimensions < vectors.shape[-1]:
                vectors = _shortened(vectors, dimensions, self._shape.normalize)
        except Exception as error:  # the output is not a vector: the caller needs a response
            one.done(ModelError(f"the vectors could not be put together: {brief(error, 200)}"))
            return
        began, arrival, at, now = one.began, one.arrival, dispatch.at, one.exchange.service.now()
        phases = Phases(arrival - began, at - arrival, now - at, now - began)
        one.done(Encoded(vectors, [one.count], [one.truncated], dispatch=(dispatch, arrival), phases=phases))

    def _withdraw_one(self, one: OneText) -> None:
        """Cancel `one`, whose caller has left."""
        if self._leave_one(one):
            one.exchange.cancel(one)

    # Texts that fronts have tokenized: see fronts.py.

    @property
    def virtual_time(self) -> float:
        """The virtual time of CallerQueue, in tokens."""
        return self._callers.now

    def enter(self, ahead: float, cost: float) -> tuple[float, bool]:
        """Return the turn of a text: that of a new caller, if others wait here, unless its caller is further `ahead` in its front."""
        callers = self._callers
        waiting = callers.next() is not None
        if not (ahead or waiting):
            return callers.hold(), True
        return callers.at(max(ahead, cost) if waiting else ahead), False

    def leave(self, turn: tuple[float, bool]) -> None:
        """Note that the text with this turn has ended."""
        tag, holds = turn
        if holds:
            self._callers.release()
        else:
            self._callers.ended(tag)
        if self._callers.next() is not None:
            self._pump_soon()

    def _prompt(self, prompt: str | None) -> str | None:
        return None if prompt is None else prompt_text(prompt, self.facts.prompts)

    async def tokenize(
        self, texts: Sequence[str], *, special: bool, prompt: str | None, timeout: float | None = None
    ) -> list[list[TokenDetail]]:
        """Return the tokens of each text, see Encodes. Their memory is charged to the current claim."""
        charge(DETAIL_BYTES * sum(map(len, texts)))
        text_of_prompt = self._prompt(prompt)
        show = partial(self._tokenizer.details, special=special, prompt=text_of_prompt)
        return await self._each(show, texts, timeout)

    async def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool, timeout: float | None = None
    ) -> list[str]:
        """Return the text of each list of token ids, see Encodes. The memory of the tokens is charged to the current claim."""
        charge(_DECODED_BYTES * sum(map(len, ids)))
        return await self._each(partial(self._tokenizer.decode, skip_special=skip_special), ids, timeout)

    async def _each(self, work: Callable[[Any], T], values: Sequence[Any], timeout: float | None) -> list[T]:
        """Return the result of `work` for each value, which is done in a thread. Raises its error with the index of the value, and DeadlineExceeded; then no
        further value is worked at."""
        limit = own_limit(self._service.facts.settings.timeout) if timeout is None else stated_limit(timeout)
        goes_on = Event()
        goes_on.set()
        try:
            async with asyncio.timeout(self._service.facts.settings.timeout if timeout is None else timeout):
                return await asyncio.to_thread(_each, work, values, goes_on.is_set)
        except TimeoutError:
            raise DeadlineExceeded(f"{limit}: the deadline passed before all of {len(values)} were done") from None
        finally:
            goes_on.clear()

    def _token_rule(self, options: TextOptions) -> TokenRule:
        """Return how texts with these options are tokenized. Raises InvalidRequest for a prompt that the model does not have."""
        rule, prompt = self._own_rule, options.prompt
        if options.truncate is not None:
            rule = rule._replace(truncate=options.truncate, split=False)
        if options.max_tokens is not None:
            rule = rule._replace(max_length=min(rule.max_length, options.max_tokens), truncate=True, split=False)
        if prompt is None and not (options.whole_words or options.truncate_left):
            return rule
        return rule._replace(
            prompt=self._prompt(prompt), whole_words=options.whole_words, truncate_left=options.truncate_left
        )

    async def _ended(self, request: EncodeRequest, *, is_large: bool) -> None:
        """Run the request and wait for its end; one that `is_large` leaves much free memory. Raises the error with which the request ends."""
        self._open_requests.begin()
        timer, loop = None, asyncio.get_running_loop()
        try:
            timer = self._begin(request, loop)
            await request.future
        except asyncio.CancelledError:
            self._end(request)
            self._withdraw(request)
            raise
        finally:
            self._open_requests.end()
            if timer is not None:
                timer.cancel()
            if is_large:
                self._release_memory_later(loop)

    def _release_memory_later(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Schedule the return of free memory to the system after RELEASE_AFTER seconds, and cancel earlier schedules; with None only cancel."""
        for timer in self._release_timers:
            timer.cancel()
        self._release_timers = []
        if loop is not None:
            release = partial(loop.run_in_executor, None, release_free_memory)
            self._release_timers = [loop.call_later(seconds, release) for seconds in RELEASE_AFTER]

    def _begin(self, request: EncodeRequest, loop: asyncio.AbstractEventLoop) -> asyncio.TimerHandle:
        """Accept the request and begin to tokenize. Return the timer that fails the request if it is not all in the queue at its deadline."""
        self._threads.start()
        count = len(request.texts)
        if self._held and self._held + count > self._max_held:
            raise Overloaded(f"{count} texts: {self._held} wait, at most {self._max_held}", retry_after=RETRY_AFTER)
        self._held += count
        self._callers.add(request.key, request)
        self._tokenize_more(request)
        return loop.call_later(request.deadline.at - self._service.now(), self._expire, request)

    # Tokenization.

    def _tokenize_more(self, request: EncodeRequest) -> None:
        """Have the next texts of the request tokenized, unless enough tokenized texts wait already."""
        start = request.handed_over
        if request.is_tokenizing or start >= len(request.texts) or len(request.ready_texts) >= CHUNK:
            return
        chunk = request.texts[start : start + CHUNK]
        request.handed_over = start + len(chunk)
        request.is_tokenizing = True
        if request.trace is not None:
            request.trace.begin_tokenizing()
        self._threads.add(
            TokenizeRequest(chunk, request.rule, partial(self._chunk_tokenized, request, start)),
            sum(map(_size, chunk)) if len(request.texts) <= CHUNK and not request.is_bulk else inf,
        )

    def _chunk_tokenized(self, request: EncodeRequest, start: int, results: Sequence[TokenizeResult]) -> None:
        found = self._store_tokens(request, start, results)
        if not start:
            request.tokenized = self._service.now()
        if request.ended:
            return
        request.ready_texts.extend(found)
        if not (self._has_memory(request, start, len(results)) and self._can_meet_deadline(request, found)):
            return
        if not start and request.handed_over == len(request.texts):
            request.brief = self._is_brief(found)
        is_full = not start and request.ready_texts and not self._has_room(request)
        # The queue is full: it refuses and counts the request, unless the policy lets it grow.
        if is_full and not self._put(request, self._callers.at_once(), self._service.now()):
            return
        self._callers.wake(request.key, request)
        self._tokenize_more(request)
        self._pump()

    def _has_memory(self, request: EncodeRequest, start: int, count: int) -> bool:
        """Charge the memory of token vectors, now that the lengths are known: the array has as many for each text as for the longest.

        Return whether there is room; if not, fail the request.
        """
        longest = max(request.counts[start : start + count], default=0)
        # What else is made in addition to dense vectors is charged when it is there.
        if request.claim is None or longest <= request.charged_tokens or TextOutput.DENSE in request.outputs:
            return True
        texts = len(request.texts if request.indices is None else request.indices)
        try:
            request.claim.take(_FLOAT_BYTES * self.dimensions * texts * (longest - request.charged_tokens))
        except WeirError as error:
            self._fail(request, error)
            return False
        request.charged_tokens = longest
        return True

    def _can_meet_deadline(self, request: EncodeRequest, found: Sequence[ReadyText]) -> bool:
        """Return whether the request can meet its deadline at the known token rate; if not, fail the request.

        Texts that are not tokenized yet are assumed to be as long as those in `found`. With an unknown rate it is True.
        """
        now = self._service.now()
        if not found:
            return True
        each = sum(self._tower_of(tokens).seconds(self._cost(tokens), now) for _, _, tokens in found) / len(found)
        needed, left = request.left * each, request.deadline.at - now
        if not each or needed <= DEADLINE_SLACK * left:
            return True
        wait = f"{request.left} texts like these take {needed:.3g} s at least, {max(left, 0.0):.3g} s are left"
        self._fail(request, DeadlineExceeded(f"{request.deadline.limit}: cannot be met: {wait}"))
        return False

    def _tower_of(self, tokens: Tokens | EncodedImage) -> Tower:
        return self._images if isinstance(tokens, EncodedImage) else self._texts

    def _has_room(self, request: EncodeRequest) -> bool:
        """Return whether the queue of the next text of `request` has room for it."""
        return self._tower_of(request.ready_texts[0][2]).service.has_room(1, bulk=request.is_bulk)

    def _store_tokens(self, request: EncodeRequest, start: int, results: Sequence[TokenizeResult]) -> list[ReadyText]:
        """Store the results of the tokenizer; return the texts that can enter the queue. Empty if the request has ended or ends with an error here."""
        request.is_tokenizing = False
        if request.trace is not None:
            request.trace.end_tokenizing(len(results))
        found: list[ReadyText] = []
        if request.ended:
            return found
        for index, result in enumerate(results, start):
            if not isinstance(result, WeirError):
                found += request.add_tokens(index, result, self._shape.normalize, self._shape.max_pooled)
            elif not request.add_error(index, result):
                self._fail(request, at_text(result, request.first_index(index)))
                return []
        if not request.left:
            self._end(request)
        return found

    # From here to the queue.

    def _pump(self) -> None:
        """Put texts into the queue while there is room in the window; beyond it, texts of callers who have had no more than others.

        Bulk work has a window of its own, and goes in when no other text is ready.
        """
        self._pump_scheduled = False
        window, callers, now = self.window, self._callers, self._service.now()
        while (request := callers.next()) is not None:
            bulk = request.is_bulk
            if self._under_way[bulk] >= window and not (callers.due and self._has_room(request)):
                break
            self._put(request, callers.charge(self._cost(request.ready_texts[0][2])), now)
            if request.is_sent:
                callers.leave(request.key, request)
            elif not request.ended:
                self._tokenize_more(request)

    def _is_brief(self, found: Sequence[ReadyText]) -> bool:
        """Return whether one batch can hold all texts in `found`."""
        batching = self._service.facts.batching
        cost = sum(self._cost(tokens) for _, _, tokens in found)
        return len(found) <= batching.max_batch_size and cost <= (batching.max_batch_cost or inf)

    def _cost(self, tokens: Tokens | EncodedImage) -> float:
        if isinstance(tokens, EncodedImage):
            return tokens.tokens + tokens.decoding
        return float(max(len(tokens.ids) // 4, self._shape.shortest))

    def _put(self, request: EncodeRequest, tag: float, now: float) -> bool:
        """Put the next text of the request into the queue. Return whether the queue accepted it; a refusal ends the request with an error."""
        ready = request.ready_texts.popleft()
        tower = self._tower_of(ready[2])
        exchange, cost = tower.exchange(request.query.frontend), self._cost(ready[2])
        text_request = TextPiece(exchange, request, ready, self._text_ended, cost=cost, tag=tag, now=now)
        try:
            if request.deadline.at <= now:
                raise _too_late(request)
            exchange.put(text_request)
        except WeirError as refusal:
            error = _too_late(request) if isinstance(refusal, DeadlineExceeded) else refusal
            self._callers.ended(tag)
            self._fail(request, at_text(error, request.first_index(text_request.index)))
            return False
        request.under_way.add(text_request)
        tower.entered(text_request.form.cost)
        self._under_way[request.is_bulk] += 1
        return True

    # Ends.

    def _text_ended(self, text_request: TextPiece) -> None:
        """Store the vector or the error of a text. End the request if it was the last, or with an error that is not of this text alone."""
        request, index, error = text_request.request, text_request.index, text_request.error
        self._leave_queue(text_request)
        if request.ended:
            return
        if request.dispatch is None and text_request.dispatch is not None and error is None:
            request.dispatch = text_request.dispatch, text_request.arrival
        try:
            if error is None:
                request.put(index, text_request.piece, text_request.output)
            elif not request.add_error(index, error):
                # The queue's error names the time that was left, not the caller's timeout.
                error = _too_late(request) if isinstance(error, DeadlineExceeded) else error
                self._fail(request, at_text(error, request.first_index(index)))
        except WeirError as failure:
            self._fail(request, failure)
        except Exception as failure:
            # The output is not a vector, or there is no memory for all: the caller needs an answer.
            wrong = ModelError(f"the vectors could not be put together: {brief(failure, 200)}")
            self._fail(request, at_text(wrong, request.first_index(index)))
        else:
            if not request.left:
                self._end(request)

    def _leave_queue(self, text_request: TextPiece) -> None:
        # A text may have left already: one that the queue dropped as too late may be withdrawn before the queue reports it.
        if text_request not in text_request.request.under_way:
            return
        text_request.request.under_way.remove(text_request)
        self._callers.ended(text_request.tag)
        self._under_way[text_request.request.is_bulk] -= 1
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _expire(self, request: EncodeRequest) -> None:
        if not request.is_sent:  # the queue itself checks the deadlines of texts in it
            self._fail(request, _too_late(request))

    def _fail(self, request: EncodeRequest, error: WeirError) -> None:
        if not request.ended:
            self._end(request, error)
            # In the next turn of the loop: the service may be in the middle of delivering a batch.
            asyncio.get_running_loop().call_soon(self._withdraw, request)

    def _end(self, request: EncodeRequest, error: WeirError | None = None) -> None:
        """End the request with its vectors or with `error`, and remove it from the callers' queue. Idempotent."""
        if request.ended:
            return
        request.end(error)
        self._held -= len(request.texts)
        request.ready_texts.clear()
        self._callers.leave(request.key, request)
        self._pump_soon()  # the caller's next request may be ready

    def _withdraw(self, request: EncodeRequest) -> None:
        """Cancel the texts of an ended request that are in the queue or being computed."""
        for text_request in list(request.under_way):
            text_request.exchange.cancel(text_request)
            self._leave_queue(text_request)

    def _encoded(self, request: EncodeRequest, dimensions: int | None) -> Encoded:
        phases = request.phases(self._service.now())
        vectors = request.result_array()
        if dimensions is not None and dimensions < vectors.shape[-1]:
            vectors = _shortened(vectors, dimensions, self._shape.normalize)
        tokens = None if request.ids is None else request.per_text([self._tokenizer.tokens(ids) for ids in request.ids])
        return Encoded(
            vectors, request.per_text(request.counts), request.per_text(request.truncated), tokens, request.lengths(),
            request.errors_per_text(), request.take_dispatch(), request.foreign, phases, request.further_outputs(),
            images=0 if self.facts.vision is None else sum([isinstance(text, Picture) for text in request.per_text(request.texts)]),
        )  # fmt: skip


def _each(work: Callable[[Any], T], values: Sequence[Any], goes_on: Callable[[], bool]) -> list[T]:
    """Return the result of `work` for each value, as long as it `goes_on`. Raises its error with the index of the value."""
    results = list[T]()
    for index, value in enumerate(values):
        if not goes_on():
            break
        try:
            results.append(work(value))
        except WeirError as error:
            raise at_text(error, index) from None
    return results


def _size(text: Any) -> int:
    if isinstance(text, Picture):
        return _PICTURE_SIZE
    if isinstance(text, tuple):
        return sum(map(_size, text))
    return len(text) if isinstance(text, (str, list)) else 1


_PICTURE_SIZE = AT_ONCE_CHARACTERS + 1  # a thread looks at a picture, which takes microseconds


def _one_too_late(one: OneText) -> WeirError:
    limit = own_limit(one.form.timeout) if one.query.timeout is None else stated_limit(one.form.timeout)
    return DeadlineExceeded(f"{limit}: the deadline passed before all texts were computed")


def _too_late(request: EncodeRequest) -> WeirError:
    count = len(request.texts)
    done = f": {count - request.left} of {count} were" if count > 1 else ""
    return DeadlineExceeded(f"{request.deadline.limit}: the deadline passed before all texts were computed{done}")


def _shortened(vectors: Any, dimensions: int, normalize: bool) -> Any:
    short = vectors[..., :dimensions]
    if not normalize:
        return numpy.ascontiguousarray(short)
    lengths = numpy.linalg.norm(short, axis=-1, keepdims=True)
    return (short / numpy.maximum(lengths, 1e-12)).astype(numpy.float32)
