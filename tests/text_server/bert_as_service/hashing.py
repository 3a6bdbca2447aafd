"""An encoder without a model that does what its texts tell it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray
from tests.text_server import hashing
from tests.text_server.hashing import DIMENSIONS as DIMENSIONS
from tests.text_server.hashing import HashingEncoder, words_of

from weir.errors import InvalidRequest, WeirError
from weir.protocols.account import charge
from weir.text_models.texts import Text
from weir.text_server.texts import texts_bytes

MAX_LENGTH = 6


def vector_of(text: Text) -> NDArray[Any]:
    """Return the vector of one text."""
    return hashing.vector_of(" ".join(words_of(text)[:MAX_LENGTH]))


def expected(texts: Sequence[Text]) -> NDArray[Any]:
    """Return the vectors of texts."""
    return numpy.stack([vector_of(text) for text in texts])


class Hashing(HashingEncoder):
    """A text `!fail` fails, `!wait` waits until it is cancelled or `released`, `!raise` raises what nobody expects."""

    def __init__(self) -> None:
        super().__init__(max_length=MAX_LENGTH)
        self.one_by_one = False
        self.cancelled = 0
        self.charges = False  # for its texts, as the real encoder does
        self.refusals: list[WeirError] = []  # what the next calls raise
        self.released = asyncio.Event()

    async def obey(self, texts: Sequence[Text]) -> None:
        if self.charges:
            charge(texts_bytes(texts))
        if self.refusals:
            raise self.refusals.pop(0)
        for place, text in enumerate(texts):
            if isinstance(text, str) and (not text.strip() or text == "!fail"):
                raise InvalidRequest(f"texts[{place}]: {text!r} cannot be encoded")
            if text == "!raise":
                raise RuntimeError("nobody expects this")
            if text == "!wait":
                try:
                    await self.released.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
