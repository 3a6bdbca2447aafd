"""How fast a server of sentence vectors answers clients that each wait for one answer before they ask again."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

from weir.client import EmbeddingClient

# Each is one token for the usual models of English.
_WORDS = (
    "the of and to in was he is for it with as his on be at by had not are but from or have an they which one you were all her she "
    "there would their we him been has when who will more no if out so up said what its about than into them can only other time new some"
)
WORDS: Sequence[str] = tuple(_WORDS.split())

Connect = Callable[[], EmbeddingClient]


class Clients(NamedTuple):
    """So many, each of which asks for so many texts of so many words at once."""

    number: int
    batch: int
    words: int


class Patience(NamedTuple):
    """How often each client asks: at most `repeats` times, and no more once `seconds` are over; at least once."""

    repeats: int
    seconds: float


def texts_of(clients: Clients, vocabulary: Sequence[str] = WORDS, seed: int = 0) -> list[list[str]]:
    """Return what each client asks for: words by chance, no text twice but by chance."""
    chance = random.Random(seed)
    return [
        [" ".join(chance.choices(vocabulary, k=clients.words)) for _ in range(clients.batch)]
        for _ in range(clients.number)
    ]


def measure(connect: Connect, clients: Clients, patience: Patience, vocabulary: Sequence[str] = WORDS) -> list[float]:
    """Return the texts per second that each client got. The first answer to each is not counted. Raises what a call raises."""
    start = Barrier(clients.number)

    def one(texts: list[str]) -> float:
        try:
            with connect() as client:
                client.encode(texts)
                start.wait()
                return _rate(client, texts, patience)
        except BaseException:
            start.abort()  # the others would wait for this one
            raise

    with ThreadPoolExecutor(clients.number) as pool:
        asking = [pool.submit(one, texts) for texts in texts_of(clients, vocabulary)]
        failed = [error for each in asking if (error := each.exception()) is not None]
        # One whose call failed says why; those that waited for it only know that somebody did.
        for error in sorted(failed, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
            raise error
        return [each.result() for each in asking]


def _rate(client: EmbeddingClient, texts: list[str], patience: Patience) -> float:
    began = time.perf_counter()
    spent, repeats = 0.0, 0
    while not repeats or (repeats < patience.repeats and spent < patience.seconds):
        client.encode(texts)
        repeats += 1
        spent = time.perf_counter() - began
    return repeats * len(texts) / spent
