"""A small real encoder: the vector of a text is the mean of its words' vectors, which come of their hashes."""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
from numpy.typing import NDArray
from tests.text_server.hashing import Heard

from weir.batching.settings import BatchingSettings
from weir.errors import InvalidRequest, WeirError
from weir.protocols.account import charge
from weir.text_models.texts import Text, TokenDetail
from weir.text_server.texts import Encoded, TextFacts, TextQuery, texts_bytes

DIMENSIONS = 8
MAX_LENGTH = 6


def words_of(text: Text) -> list[str]:
    if isinstance(text, str):
        return text.split()
    if isinstance(text, tuple):
        return [*str(text[0]).split(), "|||", *str(text[1]).split()]
    return [str(word) for word in text]


def vector_of(text: Text, dimensions: int = DIMENSIONS) -> NDArray[Any]:
    """Return the vector of one text."""
    return _mean_of(tuple(words_of(text)[:MAX_LENGTH]))[:dimensions]


@cache  # some tests send a text 20,000 times
def _mean_of(words: tuple[str, ...]) -> NDArray[Any]:
    digests = [hashlib.blake2b(word.encode(), digest_size=DIMENSIONS).digest() for word in words]
    rows: NDArray[Any] = numpy.array([list(digest) for digest in digests], "float32")
    mean: NDArray[Any] = numpy.asarray(rows.mean(axis=0))
    mean.flags.writeable = False
    return mean


class Hashing:
    """Encodes; a text `!fail` fails, `!wait` waits until it is cancelled or `released`, `!raise` raises what nobody expects."""

    name = "hashing"
    dimensions = DIMENSIONS
    max_length = MAX_LENGTH
    facts = TextFacts()
    batching = BatchingSettings()

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.cancelled = 0
        self.charges = False  # for its texts, as the real encoder does
        self.refusals: list[WeirError] = []  # what the next calls raise
        self.released = asyncio.Event()

    def encode_one(self, text: Text, query: TextQuery, done: Any) -> None:
        """Leave it to `encode`."""

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        """Return the vectors of `texts`."""
        if self.charges:
            charge(texts_bytes(texts))
        options = query.options
        self.heard.append(Heard(list(texts), query))
        if self.refusals:
            raise self.refusals.pop(0)
        for place, text in enumerate(texts):
            await self._obey(place, text)
        words = [words_of(text) for text in texts]
        cut = [len(each) > MAX_LENGTH for each in words]
        if options.truncate is False and any(cut):
            raise InvalidRequest(f"texts[{cut.index(True)}]: is longer than {MAX_LENGTH} tokens")
        vectors = numpy.stack([vector_of(text, options.dimensions or DIMENSIONS) for text in texts])
        tokens = [each[:MAX_LENGTH] for each in words] if options.want_tokens else None
        return Encoded(vectors, [min(len(each), MAX_LENGTH) for each in words], cut, tokens)

    async def tokenize(
        self, texts: Sequence[str], *, special: bool, prompt: str | None, timeout: float | None = None
    ) -> list[list[TokenDetail]]:
        """Nobody asks."""
        return []

    async def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool, timeout: float | None = None
    ) -> list[str]:
        """Nobody asks."""
        return []

    async def _obey(self, place: int, text: Text) -> None:
        if not isinstance(text, str):
            return
        if not text.strip() or text == "!fail":
            raise InvalidRequest(f"texts[{place}]: {text!r} cannot be encoded")
        if text == "!raise":
            raise RuntimeError("nobody expects this")
        if text == "!wait":
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
