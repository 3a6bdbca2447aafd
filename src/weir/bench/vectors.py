"""How fast a server of sentence vectors answers clients that each wait for one answer before they ask again, or keep several requests under way."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import Barrier, Event, Lock
from typing import NamedTuple

from weir.client import EmbeddingClient

# Each is one token for the usual models of English.
_WORDS = (
    "the of and to in was he is for it with as his on be at by had not are but from or have an they which one you were all her she "
    "there would their we him been has when who will more no if out so up said what its about than into them can only other time new some"
)
WORDS: Sequence[str] = tuple(_WORDS.split())
WARM = 64  # texts of a first request, which is not counted

Connect = Callable[[], EmbeddingClient]


class Clients(NamedTuple):
    """So many, each of which asks for so many texts of so many words at once, and keeps `ahead` such requests under way."""

    number: int
    batch: int
    words: int
    ahead: int = 1

    @property
    def under_way(self) -> int:
        """Texts of all of them together that the server has at a time."""
        return self.number * self.batch * self.ahead


class Patience(NamedTuple):
    """How often each client asks: at most `repeats` times, and no more once `seconds` are over; at least once."""

    repeats: int
    seconds: float


def texts_of(clients: Clients, vocabulary: Sequence[str] = WORDS, seed: int = 0) -> list[list[str]]:
    """Return what each client asks for: words by chance, no text twice but by chance. All together are the same texts
    wherever as many are under way."""
    chance = random.Random(seed)
    return [
        [" ".join(chance.choices(vocabulary, k=clients.words)) for _ in range(clients.batch * clients.ahead)]
        for _ in range(clients.number)
    ]


def measure(connect: Connect, clients: Clients, patience: Patience, vocabulary: Sequence[str] = WORDS) -> list[float]:
    """Return the texts per second that each client got that waits for each answer. Begins when all of them are connected and
    have had an answer. Raises what a call raises."""
    return _together(connect, clients, vocabulary, lambda client, texts: _waiting(client, texts, patience), Event())


def measure_steady(
    connect: Connect, clients: Clients, seconds: float, vocabulary: Sequence[str] = WORDS
) -> list[float]:
    """Return the texts per second that each client got that keeps `clients.ahead` requests under way, for `seconds` and at least
    one answer. Counted is only while all of them ask: from when all that was asked first is answered, and the others go on until the
    last has been counted. All is answered at the end. Raises what a call raises."""
    over, lock, left = Event(), Lock(), [clients.number]

    def counted() -> None:
        with lock:
            left[0] -= 1
            if not left[0]:
                over.set()

    def one(client: EmbeddingClient, texts: list[str]) -> float:
        return _Steady(clients, seconds, counted, over).rate(client, texts)

    return _together(connect, clients, vocabulary, one, over)


def _together(
    connect: Connect, clients: Clients, vocabulary: Sequence[str], one: Callable[[EmbeddingClient, list[str]], float], over: Event
) -> list[float]:  # fmt: skip
    start = Barrier(clients.number)

    def connected(texts: list[str]) -> float:
        try:
            with connect() as client:
                client.encode(texts[:WARM])
                start.wait()
                return one(client, texts)
        except BaseException:
            start.abort()  # the others would wait for this one
            over.set()
            raise

    with ThreadPoolExecutor(clients.number) as pool:
        asking = [pool.submit(connected, texts) for texts in texts_of(clients, vocabulary)]
        failed = [error for each in asking if (error := each.exception()) is not None]
        # One whose call failed says why; those that waited for it only know that somebody did.
        for error in sorted(failed, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
            raise error
        return [each.result() for each in asking]


def _waiting(client: EmbeddingClient, texts: list[str], patience: Patience) -> float:
    began = time.perf_counter()
    spent, repeats = 0.0, 0
    while not repeats or (repeats < patience.repeats and spent < patience.seconds):
        client.encode(texts)
        repeats += 1
        spent = time.perf_counter() - began
    return repeats * len(texts) / spent


class _Steady:
    """One client's requests. `counted` is called once it has been measured; it asks on until `over`."""

    def __init__(self, clients: Clients, seconds: float, counted: Callable[[], None], over: Event) -> None:
        self._clients = clients
        self._seconds = seconds
        self._counted = counted
        self._over = over
        self._answered = 0
        self._began: float | None = None  # when all that was asked first was answered
        self._rate: float | None = None

    def rate(self, client: EmbeddingClient, texts: list[str]) -> float:
        for _ in client.encode_async(self._asked(texts), ahead=self._clients.ahead):
            self._answered += 1
            self._look(time.perf_counter())
        if self._rate is None:
            raise RuntimeError("another client's call failed")
        return self._rate

    def _asked(self, texts: list[str]) -> Iterator[list[str]]:
        batch = self._clients.batch
        requests = cycle([texts[place : place + batch] for place in range(0, len(texts), batch)])
        while not self._over.is_set():
            yield next(requests)

    def _look(self, now: float) -> None:
        since = self._answered - self._clients.ahead
        if since == 0:
            self._began = now
        elif self._rate is None and self._began is not None and now - self._began >= self._seconds:
            self._rate = since * self._clients.batch / (now - self._began)
            self._counted()
