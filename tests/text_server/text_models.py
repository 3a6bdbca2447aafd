"""A tokenizer of words and models that answer from tokens alone: what the front needs, without a network."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy

from weir.errors import InvalidRequest
from weir.model import Measure, Model
from weir.text_models.texts import Text, TokenDetail, Tokenized, TokenRule, Tokens

DIMENSIONS = 4


class Words:
    """A tokenizer: each word is the sum of its letters. It notes how many texts it got at once; while `gate` is closed, it waits."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.fault: BaseException | None = None
        self.knows_all = False  # whether all words are known, so that texts are tokenized at once

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest]:
        """Read texts."""
        self.began.set()
        self.gate.wait()
        self.rounds.append(len(texts))
        if self.fault is not None:
            raise self.fault
        return [self._one(text, rule.max_length, rule.truncate) for text in texts]

    def _one(self, text: Any, max_length: int, truncate: bool) -> Tokenized | InvalidRequest:
        if text == "":
            return InvalidRequest("'': must not be empty")
        parts = [text] if isinstance(text, (str, list)) else list(text)
        numbers = [
            [sum(map(ord, word)) for word in (part.split() if isinstance(part, str) else part)] for part in parts
        ]
        ids = [number for part in numbers for number in part]
        if len(ids) > max_length and not truncate:
            return InvalidRequest(f"{len(ids)} tokens: must be at most {max_length}")
        second = len(numbers[0]) if len(numbers) > 1 else 0
        return Tokenized(numpy.array(ids[:max_length], "<i4").tobytes(), second, len(ids) > max_length)

    def at_once(self, texts: Sequence[Text], rule: TokenRule) -> Sequence[Tokenized | InvalidRequest] | None:
        """Read texts, or leave them to the threads."""
        if not self.knows_all:
            return None
        return self.encode(texts, rule)

    def split(self, text: Text, rule: TokenRule) -> list[Tokenized] | InvalidRequest:
        """Read a long text in pieces, of a pair the first."""
        if isinstance(text, str) and text.startswith("whole"):
            return InvalidRequest("whole: must not be divided")
        long, beside = text if isinstance(text, tuple) else (text, None)
        words = long.split() if isinstance(long, str) else [str(word) for word in long]
        room = rule.max_length - (0 if beside is None else len(str(beside).split()))
        pieces = [" ".join(words[start : start + room]) for start in range(0, len(words), room)]
        found = [self._one(piece if beside is None else (piece, beside), rule.max_length, True) for piece in pieces]
        return [each for each in found if isinstance(each, Tokenized)]

    def tokens(self, ids: bytes) -> list[str]:
        """Return the tokens as texts."""
        return [str(number) for number in numpy.frombuffer(ids, "<i4")]

    def details(self, text: str, *, special: bool = True, prompt: str | None = None) -> list[TokenDetail]:
        """Return the words."""
        return [TokenDetail(sum(map(ord, word)), word, False, None, None) for word in f"{prompt or ''}{text}".split()]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the numbers."""
        return " ".join(map(str, ids))


def vector_of(text: str) -> list[float]:
    """Return the vector of a text: its tokens, the first of them, their sum, 1."""
    numbers = [sum(map(ord, word)) for word in text.split()]
    return [float(len(numbers)), float(numbers[0]), float(sum(numbers)), 1.0]


class Summing(Model):
    """A vector for each text. Fails at texts that begin with the word `bad`."""

    padded = True

    def predict(self, batch: list[Tokens]) -> list[Any]:
        """Compute vectors."""
        arrays = [numpy.frombuffer(item[0], "<i4") for item in batch]
        return [
            InvalidRequest("bad word")
            if array[0] == sum(map(ord, "bad"))
            else numpy.array([len(array), array[0], array.sum(), 1.0], numpy.float32)
            for array in arrays
        ]

    @classmethod
    def measure(cls, item: Tokens) -> Measure:
        """A text's cost is its length."""
        return Measure(cost=len(item.ids) / 4)


class PerToken(Summing):
    """Two numbers for each token of a text."""

    def predict(self, batch: list[Tokens]) -> list[Any]:
        """Compute vectors."""
        arrays = [numpy.frombuffer(item[0], "<i4") for item in batch]
        return [numpy.stack([array, -array], axis=1).astype(numpy.float32) for array in arrays]
