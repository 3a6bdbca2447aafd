"""Tokenizes texts in threads of its own, off the event loop, the texts of a few requests at a time.

The tokenizer is Rust and releases the interpreter's lock: it works while models compute and the event loop serves. What comes while a thread is busy is
tokenized together. The first thread takes urgent requests alone, so that a small request never waits for a large one. A sentence is tokenized sooner than a
thread wakes up, above all where models use all CPUs: the event loop tokenizes brief requests itself, for a small share of its time.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from weir.embedding.texts import AS_THE_SERVER, Text, Tokenized, TokenizeOptions
from weir.errors import Draining, InvalidRequest, ModelError, WeirError

CHUNK = 64  # texts that a thread reads at once
URGENT_CHARACTERS = 20_000  # a text that is longer takes milliseconds: it is not urgent
BRIEF_CHARACTERS = 1_000  # take a quarter of a millisecond
REST = 10  # times as long as it has read, the loop leaves reading to the threads


class Tokenizes(Protocol):
    """What the encoder needs of a tokenizer. Several threads call it at once."""

    def encode(
        self, texts: Sequence[Text], *, max_length: int, truncate: bool, tokenize_options: TokenizeOptions
    ) -> Sequence[Tokenized | InvalidRequest]:
        """Return what each text is, in order; an error in the place of one that is wrong."""

    def split(
        self, text: Text, *, max_length: int, tokenize_options: TokenizeOptions
    ) -> Sequence[Tokenized] | InvalidRequest:
        """Return a long text, or pair of texts, in pieces that the model can read; never asked for token ids."""

    def tokens(self, ids: bytes) -> list[str]:
        """Return the tokens as texts."""


TokenizeResult = Tokenized | list[Tokenized] | WeirError  # a list: the pieces of a text


class TokenizeRequest:
    """Texts of one request that are tokenized together; `done` gets the results, on the event loop's thread. Texts that are too long are cut with
    `truncate`, read in pieces with `split`, and refused otherwise."""

    __slots__ = ("done", "tokenize_options", "max_length", "split", "texts", "truncate")

    def __init__(
        self, texts: Sequence[Text], max_length: int, truncate: bool, done: Callable[[Sequence[TokenizeResult]], None],
        split: bool = False, tokenize_options: TokenizeOptions = AS_THE_SERVER,
    ) -> None:  # fmt: skip
        self.split = split
        self.tokenize_options = tokenize_options
        self.texts = texts
        self.max_length = max_length
        self.truncate = truncate
        self.done = done


class TokenizerThreads:
    """Threads that tokenize; with none, the event loop does. `heard`, if given, is called with (began, ended, texts) of each round, in seconds of
    time.monotonic, on the event loop's thread."""

    def __init__(
        self, tokenizer: Tokenizes, threads: int = 2, heard: Callable[[float, float, int], None] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._count = threads
        self._heard = heard
        self._urgent: deque[TokenizeRequest] = deque()
        self._bulk: deque[TokenizeRequest] = deque()
        # One entry for each reading that may be waiting; False: the end.
        self._for_first: SimpleQueue[bool] = SimpleQueue()
        self._for_rest: SimpleQueue[bool] = SimpleQueue() if threads > 1 else self._for_first
        self._threads: list[Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rested = 0.0  # when the loop may read again

    def start(self) -> None:
        """Start the threads, for the running loop. Idempotent."""
        if self._loop is not None and len(self._threads) == self._count:
            return
        self._loop = asyncio.get_running_loop()
        for number in range(len(self._threads), self._count):
            queue = self._for_rest if number else self._for_first
            only_urgent = number == 0 and self._count > 1
            thread = Thread(target=self._work, args=(queue, only_urgent), name=f"weir-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads, on the loop's thread; what they have not read fails with Draining. Idempotent."""
        self._end_unread()
        for number in range(len(self._threads)):
            (self._for_rest if number else self._for_first).put(False)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._loop = None

    def _end_unread(self) -> None:
        while unread := _taken(self._urgent) or _taken(self._bulk):
            for reading in unread:
                if self._loop is not None and not self._loop.is_closed():  # else nobody waits any more
                    reading.done([Draining("the server stopped before the texts were read")] * len(reading.texts))

    def add(self, reading: TokenizeRequest, characters: float) -> None:
        """Have `reading`, of so many characters, read; infinity: it is not urgent, however many it has."""
        if not self._count:
            asyncio.get_running_loop().call_soon(self._read, [reading])
        elif characters <= BRIEF_CHARACTERS and (began := time.monotonic()) >= self._rested:
            self._read([reading])
            ended = time.monotonic()
            self._rested = ended + REST * (ended - began)
        elif characters <= URGENT_CHARACTERS:
            self._urgent.append(reading)
            self._for_first.put(True)
        else:
            self._bulk.append(reading)
            self._for_rest.put(True)

    def _work(self, wake: "SimpleQueue[bool]", only_urgent: bool) -> None:
        # An entry is one reading's, so each takes from its queue, whatever was urgent besides.
        queues = (self._urgent,) if only_urgent else (self._urgent, self._bulk)
        while wake.get():
            for queue in queues:
                self._read_from(queue)

    def _read_from(self, queue: "deque[TokenizeRequest]") -> None:
        # Not in `_work`: what was read would stay until there is more.
        if readings := _taken(queue):
            self._read(readings)

    def _read(self, readings: list[TokenizeRequest]) -> None:
        began = time.monotonic()
        results = self._results(readings)
        assert self._loop is not None  # set before the threads are started
        try:
            self._loop.call_soon_threadsafe(self._give, readings, results, began, time.monotonic())
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _results(self, readings: list[TokenizeRequest]) -> list[Sequence[TokenizeResult]]:
        try:
            return self._tokenized(readings)
        except BaseException as error:  # those who wait are to hear of it; Rust's panics are no Exceptions
            if len(readings) > 1:  # one of them is at fault: the others are fine without it
                return [self._results([reading])[0] for reading in readings]
            failure = ModelError(f"the texts could not be turned into tokens: {error!r}")
            return [[failure] * len(readings[0].texts)]

    def _tokenized(self, readings: list[TokenizeRequest]) -> list[Sequence[TokenizeResult]]:
        """Tokenize the requests that have the same options together."""
        alike: dict[tuple[int, bool, TokenizeOptions], list[TokenizeRequest]] = {}
        for reading in readings:
            key = (reading.max_length, reading.truncate or reading.split, reading.tokenize_options)
            alike.setdefault(key, []).append(reading)
        found: dict[int, Sequence[TokenizeResult]] = {}
        for (max_length, truncate, tokenize_options), members in alike.items():
            texts = [text for reading in members for text in reading.texts]
            results = iter(
                self._tokenizer.encode(
                    texts, max_length=max_length, truncate=truncate, tokenize_options=tokenize_options
                )
            )
            for reading in members:
                mine = [next(results) for _ in reading.texts]
                found[id(reading)] = self._in_pieces(reading, mine) if reading.split else mine
        return [found[id(reading)] for reading in readings]

    def _in_pieces(self, reading: TokenizeRequest, results: list[Tokenized | InvalidRequest]) -> list[TokenizeResult]:
        return [self._whole(reading, *each) for each in zip(reading.texts, results, strict=True)]

    def _whole(self, reading: TokenizeRequest, text: Text, found: Tokenized | InvalidRequest) -> TokenizeResult:
        """Return all pieces of a text that was cut; token ids, with special ones of the caller's, stay cut."""
        if isinstance(found, InvalidRequest) or not found.truncated or isinstance(text[0], int):
            return found
        pieces = self._tokenizer.split(text, max_length=reading.max_length, tokenize_options=reading.tokenize_options)
        return pieces if isinstance(pieces, InvalidRequest) else list(pieces)

    def _give(
        self, readings: list[TokenizeRequest], results: list[Sequence[TokenizeResult]], began: float, ended: float
    ) -> None:
        for reading, result in zip(readings, results, strict=True):
            reading.done(result)
        if self._heard is not None:
            self._heard(began, ended, sum(map(len, results)))


def _taken(queue: "deque[TokenizeRequest]") -> list[TokenizeRequest]:
    """Take what is to be read together from the front of `queue`: at least one reading, unless another thread was faster."""
    taken: list[TokenizeRequest] = []
    count = 0
    try:
        while count < CHUNK:
            taken.append(queue.popleft())
            count += len(taken[-1].texts)
    except IndexError:
        pass
    return taken
