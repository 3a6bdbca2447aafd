"""Threads that tokenize the texts of requests, off the event loop.

The tokenizer is Rust and releases the interpreter's lock, so it runs while models compute and the event loop serves. Requests that arrive while all
threads are busy are tokenized together. The first thread takes urgent requests only, so that a small request never waits for a large one.

To tokenize a sentence takes less time than to wake a thread, above all where models use all CPUs. So the event loop tokenizes requests itself if their
words are known (KnownWords), which takes microseconds; and very small other requests, for a small share of its time.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

from weir.errors import InvalidRequest, ModelError, WeirError, stopped
from weir.images import Picture
from weir.text_models.texts import EncodedImage, Text, TokenDetail, Tokenized, TokenRule

CHUNK = 64  # texts that a thread tokenizes in one call
# A request of at most so many is tokenized on the event loop if its words are known, in about 0.1 ms.
AT_ONCE_CHARACTERS = 4_000
URGENT_CHARACTERS = 20_000  # a larger request takes milliseconds and is not urgent
INLINE_CHARACTERS = 1_000  # a request of at most so many, about 0.25 ms, may be tokenized on the event loop
REST_FACTOR = 10  # after tokenizing for t seconds, the event loop leaves this work to the threads for 10 t


class Tokenizes(Protocol):
    """The tokenizer that an encoder needs. Several threads call it at the same time."""

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> Sequence[Tokenized | InvalidRequest]:
        """Return for each text its tokens or its error, in order; see `Tokenizer.encode`."""

    def at_once(self, texts: Sequence[Text], rule: TokenRule) -> Sequence[Tokenized | InvalidRequest] | None:
        """Return what `encode` returns if that takes microseconds, else None; see `Tokenizer.at_once`."""

    def split(self, text: Text, rule: TokenRule) -> Sequence[Tokenized] | InvalidRequest:
        """Return a long text, or a pair, in pieces, or its error; see `Tokenizer.split`. It is never called with token ids."""

    def tokens(self, ids: bytes) -> list[str]:
        """Return the tokens of `ids`, int32 little-endian, as strings."""

    def details(self, text: str, *, special: bool = True, prompt: str | None = None) -> list[TokenDetail]:
        """Return the tokens of a whole text; see `Tokenizer.details`."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; see `Tokenizer.decode`."""


TokenizeResult = Tokenized | list[Tokenized] | EncodedImage | WeirError  # a list holds the pieces of one text


class TokenizeRequest(NamedTuple):
    """Texts of one caller to be tokenized. `done` is called with a result for each text, on the thread of the event loop."""

    texts: Sequence[Text]
    rule: TokenRule
    done: Callable[[Sequence[TokenizeResult]], None]


Look = Callable[[Picture], EncodedImage | InvalidRequest]


class TokenizerThreads:
    """A pool of `threads` threads that tokenize for one event loop; with 0 threads the event loop tokenizes. They `look` at pictures, too."""

    def __init__(self, tokenizer: Tokenizes, threads: int = 2, look: Look | None = None) -> None:
        self.tokenizer = tokenizer
        self._look = look
        self.count = threads
        self._urgent: deque[TokenizeRequest] = deque()
        self._bulk: deque[TokenizeRequest] = deque()
        # One True for each waiting request, so that a thread wakes up; False ends a thread.
        self._for_first: SimpleQueue[bool] = SimpleQueue()
        self._for_rest: SimpleQueue[bool] = SimpleQueue() if threads > 1 else self._for_first
        self._threads: list[Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inline_from = 0.0  # the instant from which the event loop may tokenize again

    def start(self) -> None:
        """Start the threads, for the running loop. Idempotent."""
        if self._loop is not None and len(self._threads) == self.count:
            return
        self._loop = asyncio.get_running_loop()
        for number in range(len(self._threads), self.count):
            queue = self._for_rest if number else self._for_first
            only_urgent = number == 0 and self.count > 1
            thread = Thread(target=self._work, args=(queue, only_urgent), name=f"weir-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads; requests that no thread has begun fail with Draining. Call it on the thread of the event loop. Idempotent."""
        self._fail_waiting()
        for number in range(len(self._threads)):
            (self._for_rest if number else self._for_first).put(False)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._loop = None

    def _fail_waiting(self) -> None:
        while waiting := _take(self._urgent) or _take(self._bulk):
            for request in waiting:
                if self._loop is not None and not self._loop.is_closed():  # a closed loop has no callers
                    request.done([stopped("the server", "the texts were read")] * len(request.texts))

    def add(self, request: TokenizeRequest, characters: float) -> None:
        """Tokenize `request`, which has so many `characters`; with infinity it is not urgent. Call it on the thread of the event loop."""
        if characters <= AT_ONCE_CHARACTERS and not request.rule.split and self._done_at_once(request):
            return
        if not self.count:
            asyncio.get_running_loop().call_soon(self._run, [request])
        elif characters <= INLINE_CHARACTERS and (began := time.monotonic()) >= self._inline_from:
            self._run([request])
            ended = time.monotonic()
            self._inline_from = ended + REST_FACTOR * (ended - began)
        elif characters <= URGENT_CHARACTERS:
            self._urgent.append(request)
            self._for_first.put(True)
        else:
            self._bulk.append(request)
            self._for_rest.put(True)

    def _done_at_once(self, request: TokenizeRequest) -> bool:
        """Tokenize `request` if all its words are known, or nearly all. Return whether that was so."""
        try:
            results = self.tokenizer.at_once(request.texts, request.rule)
        except Exception:  # a thread meets it again, and answers with it
            return False
        if results is None:
            return False
        request.done(results)
        return True

    def _work(self, wake: "SimpleQueue[bool]", only_urgent: bool) -> None:
        # Each wake-up stands for one request, so the thread looks into both queues each time: the request may be in either.
        queues = (self._urgent,) if only_urgent else (self._urgent, self._bulk)
        while wake.get():
            for queue in queues:
                self._work_off(queue)

    def _work_off(self, queue: "deque[TokenizeRequest]") -> None:
        # A method of its own: a variable of `_work` would keep the finished requests alive until the next wake-up.
        if requests := _take(queue):
            self._run(requests)

    def _run(self, requests: list[TokenizeRequest]) -> None:
        results = self._results(requests)
        assert self._loop is not None  # set before the threads are started
        try:
            self._loop.call_soon_threadsafe(_deliver, requests, results)
        except RuntimeError:
            return  # the loop is closed and has no callers

    def _results(self, requests: list[TokenizeRequest]) -> list[Sequence[TokenizeResult]]:
        try:
            return self._tokenized(requests)
        except BaseException as error:
            # Callers need a response; a panic of Rust is a BaseException, but not an Exception.
            if len(requests) > 1:  # one request is at fault, so each is tokenized by itself
                return [self._results([request])[0] for request in requests]
            failure = ModelError(f"the texts could not be turned into tokens: {error!r}")
            return [[failure] * len(requests[0].texts)]

    def _tokenized(self, requests: list[TokenizeRequest]) -> list[Sequence[TokenizeResult]]:
        """Return the results of each request. Requests with the same rule are tokenized in one call."""
        groups: dict[TokenRule, list[TokenizeRequest]] = {}
        for request in requests:
            groups.setdefault(request.rule, []).append(request)
        found: dict[int, Sequence[TokenizeResult]] = {}
        for rule, members in groups.items():
            texts = [text for request in members for text in request.texts]
            results = iter(self._read(texts, rule))
            for request in members:
                mine: list[TokenizeResult] = [next(results) for _ in request.texts]
                if rule.split:
                    mine = [self._split(request, *each) for each in zip(request.texts, mine, strict=True)]
                found[id(request)] = mine
        return [found[id(request)] for request in requests]

    def _read(self, texts: Sequence[Text], rule: TokenRule) -> Sequence[TokenizeResult]:
        """Return the tokens of each text, and of each picture what the look at it has found."""
        if self._look is None:
            return self.tokenizer.encode(texts, rule)
        found: list[Any] = [self._look(text) if isinstance(text, Picture) else None for text in texts]
        missing = [index for index, each in enumerate(found) if each is None]
        for index, tokens in zip(missing, self.tokenizer.encode([texts[each] for each in missing], rule), strict=True):
            found[index] = tokens
        return found

    def _split(self, request: TokenizeRequest, text: Text, result: TokenizeResult) -> TokenizeResult:
        """Return the pieces of a text that was cut. Token ids stay cut, as they include special tokens that the caller placed."""
        if not isinstance(result, Tokenized) or not result.truncated or isinstance(text[0], int):
            return result
        pieces = self.tokenizer.split(text, request.rule)
        return pieces if isinstance(pieces, InvalidRequest) else list(pieces)


def _deliver(requests: list[TokenizeRequest], results: list[Sequence[TokenizeResult]]) -> None:
    for request, result in zip(requests, results, strict=True):
        request.done(result)


def _take(queue: "deque[TokenizeRequest]") -> list[TokenizeRequest]:
    """Take requests of about CHUNK texts from the front of `queue`; none if another thread took them first."""
    taken: list[TokenizeRequest] = []
    count = 0
    try:
        while count < CHUNK:
            taken.append(queue.popleft())
            count += len(taken[-1].texts)
    except IndexError:
        pass
    return taken
