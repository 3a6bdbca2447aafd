"""The encoder of a served model: texts in, tokens through the queue of its service, vectors out, in order.

Few texts are in the queue at once: enough to make batches of like length from. The others wait here, as text. Callers share the queue fairly
(fair_queue.py). A caller who has had no more than the others may put a text into the queue at once, however full it is.
"""

import asyncio
import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from weir.embedding.fair_queue import CallerQueue
from weir.embedding.requests import CallTrace, EncodeRequest, Ready, TextRequest, distinct, named
from weir.embedding.texts import Encoded, Text, TokenizeOptions, Tokens, prompt_text
from weir.embedding.tokens.threads import CHUNK, TokenizeRequest, TokenizeResult, TokenizerThreads, Tokenizes
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelError, Overloaded, WeirError, brief
from weir.protocols.account import CLAIM, charge
from weir.telemetry.tracecontext import Trace

if TYPE_CHECKING:
    from weir.serving.service import Service


class Accepted:
    """Counts, and at the end takes no more."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._emptied = asyncio.Event()

    def begin(self) -> None:
        """One more. Raises Draining if no more are taken."""
        if self._closed:
            raise Draining("the server is about to stop")
        self._count += 1

    def end(self) -> None:
        """One has its end."""
        self._count -= 1
        if not self._count:
            self._emptied.set()

    async def drained(self, timeout: float) -> bool:
        """Take no more, and return when all have their ends; False if that took longer than `timeout` seconds."""
        self._closed = True
        if self._count:
            self._emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._emptied.wait()
        return not self._count


SMALL = 16  # texts of a request that has the server's timeout, and may be answered by the fast path
MAX_HELD = 1_000_000  # texts that are kept; a request of more is taken when there is no other
MANY = 2_000  # texts that take the event loop's time: what is to be done with all of them at once is done in a thread
LONGEST_TIMEOUT = 1e8
GIVE_BACK = (
    1.0,
    5.0,
    30.0,
)  # seconds after the end of a request of MANY texts: until then its answer may be written and sent
RETRY_AFTER = 1.0
DOUBT = 2.0  # times the time that is left: a request that needs more than that, even alone on all workers, is refused
FADE = 0.99  # weight that the length of a text loses with each later one
_UNTRACED: AbstractContextManager[None] = nullcontext()


_NUMBER_BYTES = 4


class Encoder:
    """Implements Encodes over `service`, whose model takes Tokens.

    `dimensions` and `max_length` are the model's; `truncate` is what holds for callers who do not say, but with `split` texts that are
    too long are read in pieces for them, see requests.py, also for `highest`; with `normalize` vectors of which only
    the first numbers are wanted are brought to length 1 again; `fixed_length` is what every text is filled up to. `threads` read texts (0: the event loop does all).
    `tokens_per_second` is what one worker computes at most, 0 if nobody knows; `of_tokens` says that each token has a vector. `heard` is told (began, ended, texts) of each round of reading. Serves one event loop, from the first call to `close`.
    """

    def __init__(
        self, service: "Service", tokenizer: Tokenizes, *, dimensions: int, max_length: int, name: str | None = None,
        truncate: bool = True, split: bool = False, normalize: bool = False, fixed_length: int | None = None, threads: int = 2,
        max_held: int = MAX_HELD, heard: Callable[[float, float, int], None] | None = None, prompts: Mapping[str, str] | None = None,
        highest: Sequence[bool] | None = None, tokens_per_second: float = 0.0, of_tokens: bool = False,
    ) -> None:  # fmt: skip
        self._service = service
        self._tokenizer = tokenizer
        self.name = name or service.name
        self.dimensions = dimensions
        self.max_length = max_length
        self._truncate = truncate
        self._split = split
        self._prompts = prompts or {}
        self._normalize = normalize
        self._highest = highest
        self._tokens_per_second = tokens_per_second
        self._of_tokens = of_tokens
        self._shortest = fixed_length or 1
        self._readers = TokenizerThreads(tokenizer, threads, heard)
        self._many = MANY if threads else inf
        self._shares: CallerQueue[EncodeRequest] = CallerQueue()
        self._max_held = max_held
        self._held = 0  # texts of requests that have no end yet
        self._in_queue = 0  # and how many of those the queue has
        self._pumping = False
        self._lengths = self._weight = 0.0  # of the texts that went into the queue, the later ones counting more
        self._accepted = Accepted()
        self._giving_back: list[asyncio.TimerHandle] = []

    @property
    def window(self) -> int:
        """How many texts are in the queue or running at once, but for those of callers who have had no more than others: enough to make batches
        by length from, and never all of the queue."""
        settings = self._service.batching
        return max(1, min(settings.max_queue_size // 2, max(256, 8 * settings.max_batch_size)))

    def serve(self, service: "Service") -> None:
        """Put texts into the queue of `service` from now on. Texts that are under way end where they are."""
        self._service = service

    async def drain(self) -> bool:
        """Take no more, and return when all requests have their ends; False if that took longer than the drain_timeout of the service.
        It must take texts until then: a large request goes into its queue little by little."""
        return await self._accepted.drained(self._service.settings.drain_timeout)

    def close(self) -> None:
        """End the threads that read. What is under way fails with the service that runs it."""
        self._give_back_later(None)
        self._readers.close()

    async def encode(
        self, texts: Sequence[Text], *, door: str, client: str = "", priority: int = 0, timeout: float | None = None,
        dimensions: int | None = None, truncate: bool | None = None, want_tokens: bool = False,
        prompt: str | None = None, whole_words: bool = False, each: bool = False,
        trace: str | Trace | None = None,
    ) -> Encoded:  # fmt: skip
        """Return the vectors of `texts`, in order; see Encodes. Texts that come more than once are computed once. The vectors are charged to
        the request that is answered; raises Overloaded, or TooLarge, where the server has no room for them."""
        if isinstance(texts, str) or not texts:
            raise InvalidRequest(f"texts: must be a list of one text or more, is {brief(texts)}")
        if dimensions is not None and not 0 < dimensions <= self.dimensions:
            raise InvalidRequest(f"dimensions={dimensions}: must be 1 to {self.dimensions}")
        # What a few equal texts cost to compute says nothing of what their vectors take until they are read.
        charge(_NUMBER_BYTES * len(texts) * (dimensions or self.dimensions))
        limit = f"timeout={timeout!r} s, which came with the request"
        if timeout is None:
            timeout, limit = self._default_timeout(len(texts))
        if not 0 < timeout <= LONGEST_TIMEOUT:
            raise InvalidRequest(f"timeout={timeout!r}: must be more than 0 and at most {LONGEST_TIMEOUT:g} seconds")
        tokenize_options = TokenizeOptions(None if prompt is None else prompt_text(prompt, self._prompts), whole_words)
        loop = asyncio.get_running_loop()
        deadline = self._service.now() + timeout
        many = len(texts) > self._many
        unlike, places = await asyncio.to_thread(distinct, texts) if many else distinct(texts)
        encoding = EncodeRequest(
            unlike, places, door=door, caller=client or None, priority=priority,
            deadline=deadline, limit=limit, truncate=self._truncate if truncate is None else truncate,
            future=loop.create_future(), split=self._split and truncate is None, tokenize_options=tokenize_options,
        )  # fmt: skip
        encoding.claim = CLAIM.get() if self._of_tokens else None
        if want_tokens:
            encoding.ids = [b""] * len(unlike)
        if each:
            encoding.errors = {}
        tracer, service = self._service.tracing, self._service
        with (
            _UNTRACED if tracer is None else CallTrace(tracer, service, self.name, trace, door=door, count=len(texts))
        ) as encoding.trace:
            await self._ended(encoding, timeout, loop)
        return (
            await asyncio.to_thread(self._encoded, encoding, dimensions)
            if many
            else self._encoded(encoding, dimensions)
        )

    def _default_timeout(self, count: int) -> tuple[float, str]:
        """Return how many seconds a request of so many texts has whose caller says nothing, and how to say that."""
        timeout = self._service.settings.timeout
        if count <= SMALL:
            return timeout, f"timeout={timeout:g} s, the server's setting"
        longer = min(timeout * count / SMALL, LONGEST_TIMEOUT)
        return (
            longer,
            f"timeout={longer:g} s, of {count} texts: the server's setting of {timeout:g} s holds for {SMALL}",
        )

    async def _ended(self, encoding: EncodeRequest, timeout: float, loop: asyncio.AbstractEventLoop) -> None:
        """Run the request to its end. Raises the error that it ends with."""
        self._accepted.begin()
        timer = None
        try:
            timer = self._begin(encoding, timeout, loop)
            await encoding.future
        except asyncio.CancelledError:
            self._end(encoding)
            self._withdraw(encoding)
            raise
        finally:
            self._accepted.end()
            if timer is not None:
                timer.cancel()
            if len(encoding.texts) > self._many:
                self._give_back_later(loop)

    def _give_back_later(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Return the memory of large requests to the system after GIVE_BACK seconds; None cancels that."""
        for timer in self._giving_back:
            timer.cancel()
        self._giving_back = []
        if loop is not None:
            give_back = partial(loop.run_in_executor, None, release_free_memory)
            self._giving_back = [loop.call_later(seconds, give_back) for seconds in GIVE_BACK]

    def _begin(self, encoding: EncodeRequest, timeout: float, loop: asyncio.AbstractEventLoop) -> asyncio.TimerHandle:
        """Have the texts tokenized; return the timer that ends the request if it still waits here at its deadline."""
        self._readers.start()
        count = len(encoding.texts)
        if encoding.caller is None:
            encoding.caller = object()  # not itself: it would be garbage that only the collector finds
            encoding.key = (encoding.key[0], encoding.caller)
        if self._held and self._held + count > self._max_held:
            raise Overloaded(f"{count} texts: {self._held} wait, at most {self._max_held}", retry_after=RETRY_AFTER)
        self._held += count
        self._shares.add(encoding.key, encoding)
        self._read_more(encoding)
        return loop.call_later(timeout, self._expire, encoding)

    # Texts are read.

    def _read_more(self, encoding: EncodeRequest) -> None:
        """Have the next texts tokenized, unless enough of them wait for their turn."""
        start = encoding.read
        if encoding.reading or start >= len(encoding.texts) or len(encoding.ready_texts) >= CHUNK:
            return
        chunk = encoding.texts[start : start + CHUNK]
        encoding.read = start + len(chunk)
        encoding.reading = True
        if encoding.trace is not None:
            encoding.trace.reads()
        self._readers.add(
            TokenizeRequest(
                chunk, self.max_length, encoding.truncate, partial(self._read_chunk, encoding, start), encoding.split,
                encoding.tokenize_options,
            ),
            sum(map(_size, chunk)) if len(encoding.texts) <= CHUNK else inf,
        )  # fmt: skip

    def _read_chunk(self, encoding: EncodeRequest, start: int, results: Sequence[TokenizeResult]) -> None:
        found, service = self._noted(encoding, start, results), self._service
        if encoding.ended:
            return
        encoding.ready_texts.extend(found)
        if not (self._has_memory(encoding, start, len(results)) and self._is_in_time(encoding, found)):
            return
        if not start and encoding.read == len(encoding.texts):
            encoding.brief = self._is_brief(found)
        is_full = not start and encoding.ready_texts and not service.has_room(1)
        # Refused then, and counted so, unless the policy lets the queue grow.
        if is_full and not self._put(encoding, self._shares.at_once(), service.now()):
            return
        self._shares.wake(encoding.key, encoding)
        self._read_more(encoding)
        self._pump()

    def _has_memory(self, encoding: EncodeRequest, start: int, count: int) -> bool:
        """Charge the memory of token vectors, now that their number is known: each text has as many as the longest. Return whether there is room;
        otherwise refuse the request."""
        longest = max(encoding.counts[start : start + count], default=0)
        if encoding.claim is None or longest <= encoding.charged_tokens:
            return True
        texts = len(encoding.texts if encoding.places is None else encoding.places)
        try:
            encoding.claim.take(_NUMBER_BYTES * self.dimensions * texts * (longest - encoding.charged_tokens))
        except WeirError as error:
            self._fail(encoding, error)
            return False
        encoding.charged_tokens = longest
        return True

    def _is_in_time(self, encoding: EncodeRequest, found: Sequence[Ready]) -> bool:
        """Return whether the request can still meet its deadline, as far as is known; otherwise refuse it. Texts that are not tokenized yet are taken to
        be as long as those `found`."""
        now = self._service.now()
        rate = self._token_rate(now)
        if not found or not 0.0 < rate < inf:
            return True
        length = sum(self._cost(tokens) for _, _, tokens in found) / len(found)
        needed, left = encoding.left * length / rate, encoding.deadline - now
        if needed <= DOUBT * left:
            return True
        wait = f"{encoding.left} texts like these take {needed:.3g} s at least, {max(left, 0.0):.3g} s are left"
        self._fail(encoding, DeadlineExceeded(f"{encoding.limit}: cannot be met: {wait}"))
        return False

    def _token_rate(self, now: float) -> float:
        """Return the tokens per second that all workers compute: by their last batches, or where there were none of late as measured at the
        start; infinity or 0 if nobody knows."""
        service = self._service
        rate = service.best_rate(now)
        if self._weight and rate < inf:
            return rate * self._lengths / self._weight
        return self._tokens_per_second * service.ready_workers

    def _noted(self, encoding: EncodeRequest, start: int, results: Sequence[TokenizeResult]) -> list[Ready]:
        """Return what is to wait in the queue for the texts; none if one of them is wrong and that is the end of the request."""
        encoding.reading = False
        if encoding.trace is not None:
            encoding.trace.has_read(len(results))
        found: list[Ready] = []
        if encoding.ended:
            return found
        for place, result in enumerate(results, start):
            if not isinstance(result, WeirError):
                found += encoding.note(place, result, self._normalize, self._highest)
            elif not encoding.spare(place, result):
                self._fail(encoding, named(result, encoding.first_place(place)))
                return []
        if not encoding.left:
            self._end(encoding)
        return found

    # Tokens go into the queue.

    def _pump(self) -> None:
        """Put as many texts into the queue as have room there, and those of callers who have had no more than others."""
        self._pumping = False
        window, shares, service = self.window, self._shares, self._service
        now = service.now()
        while (encoding := shares.next()) is not None:
            if self._in_queue >= window and not (shares.due and service.has_room(1)):
                break
            self._put(encoding, shares.charge(self._cost(encoding.ready_texts[0][2])), now)
            if encoding.is_sent:
                shares.leave(encoding.key, encoding)
            elif not encoding.ended:
                self._read_more(encoding)

    def _is_brief(self, found: Sequence[Ready]) -> bool:
        """Return whether one batch can hold all of these texts."""
        batching = self._service.batching
        cost = sum(self._cost(tokens) for _, _, tokens in found)
        return len(found) <= batching.max_batch_size and cost <= (batching.max_batch_cost or inf)

    def _cost(self, tokens: Tokens) -> float:
        return float(max(len(tokens.ids) // 4, self._shortest))

    def _put(self, encoding: EncodeRequest, tag: float, now: float) -> bool:
        """Put the next text into the queue; return whether it was taken. A refusal ends the request."""
        service, ready = self._service, encoding.ready_texts.popleft()
        request = TextRequest(self, service, encoding, ready, self._cost(ready[2]), tag, now)
        try:
            if encoding.deadline <= now:
                raise _too_late(encoding)
            service.submit(request, now)
        except WeirError as caught:
            error = _too_late(encoding) if isinstance(caught, DeadlineExceeded) else caught
            self._shares.ended(tag)
            self._fail(encoding, named(error, encoding.first_place(request.place)))
            return False
        encoding.under_way.add(request)
        self._lengths, self._weight = FADE * self._lengths + request.cost, FADE * self._weight + 1.0
        self._in_queue += 1
        return True

    # They have their ends.

    def answered(self, request: TextRequest, output: Any) -> None:
        """Take the vector of a text."""
        encoding = request.encoding
        self._leave_queue(request)
        if encoding.ended:
            return
        try:
            whole = encoding.put(request.place, request.piece, output)
        except Exception as error:  # no vector, or no memory for all: whoever waits is to hear of it
            failure = ModelError(f"the vectors could not be put together: {brief(error, 200)}")
            self._fail(encoding, named(failure, encoding.first_place(request.place)))
            return
        if whole:
            self._end(encoding)

    def failed(self, request: TextRequest, error: WeirError) -> None:
        """Take the error of a text."""
        encoding = request.encoding
        self._leave_queue(request)
        if not encoding.ended and encoding.spare(request.place, error):
            if not encoding.left:
                self._end(encoding)
            return
        if encoding.ended:  # its texts fail one after the other: where each stands is of no use any more
            return
        if isinstance(
            error, DeadlineExceeded
        ):  # the queue knows the time that was left, the request the timeout that the caller stated
            error = _too_late(encoding)
        self._fail(encoding, named(error, encoding.first_place(request.place)))

    def _leave_queue(self, request: TextRequest) -> None:
        # Once only: what the queue has left out as too late may be withdrawn before the queue says so.
        if request not in request.encoding.under_way:
            return
        request.encoding.under_way.remove(request)
        self._shares.ended(request.tag)
        self._in_queue -= 1
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _expire(self, encoding: EncodeRequest) -> None:
        if not encoding.is_sent:  # the queue knows the deadlines of what is in it
            self._fail(encoding, _too_late(encoding))

    def _fail(self, encoding: EncodeRequest, error: WeirError) -> None:
        if not encoding.ended:
            self._end(encoding, error)
            # Not at once: the service may be in the middle of giving a batch its answers.
            asyncio.get_running_loop().call_soon(self._withdraw, encoding)

    def _end(self, encoding: EncodeRequest, error: WeirError | None = None) -> None:
        """End the request with its vectors or with `error`, and free its places."""
        if encoding.ended:
            return
        encoding.end(error)
        self._held -= len(encoding.texts)
        encoding.ready_texts.clear()
        self._shares.leave(encoding.key, encoding)
        self._pump_soon()  # the next of this caller may have been ready long since

    def _withdraw(self, encoding: EncodeRequest) -> None:
        """Take the texts of a request that are left out of the queue."""
        for request in list(encoding.under_way):
            request.service.cancel(request)
            self._leave_queue(request)

    def _encoded(self, encoding: EncodeRequest, dimensions: int | None) -> Encoded:
        vectors = encoding.array()
        if dimensions is not None and dimensions < vectors.shape[-1]:
            vectors = _shortened(vectors, dimensions, self._normalize)
        tokens = (
            None if encoding.ids is None else encoding.of_all([self._tokenizer.tokens(ids) for ids in encoding.ids])
        )
        return Encoded(
            vectors, encoding.of_all(encoding.counts), encoding.of_all(encoding.truncated), tokens, encoding.lengths(),
            encoding.all_errors(), encoding.taken_dispatch(), encoding.foreign,
        )  # fmt: skip


def release_free_memory() -> None:
    """Have the C library give what nobody uses back to the system, wherever that lies: by itself it gives back the end of its heap alone.
    Takes milliseconds. Does nothing where the library (musl) has no such call."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _size(text: Any) -> int:
    if isinstance(text, tuple):
        return sum(map(_size, text))
    return len(text) if isinstance(text, (str, list)) else 1


def _too_late(encoding: EncodeRequest) -> WeirError:
    count = len(encoding.texts)
    done = f": {count - encoding.left} of {count} were" if count > 1 else ""
    return DeadlineExceeded(f"{encoding.limit}: the deadline passed before all texts were computed{done}")


def _shortened(vectors: Any, dimensions: int, normalize: bool) -> Any:
    import numpy

    short = vectors[..., :dimensions]
    if not normalize:
        return numpy.ascontiguousarray(short)
    lengths = numpy.linalg.norm(short, axis=-1, keepdims=True)
    return (short / numpy.maximum(lengths, 1e-12)).astype(numpy.float32)
