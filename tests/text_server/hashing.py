"""An encoder without a model, for tests of frontends: the vector of a text follows from its hash; a word is a token."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.batching import BatchingSettings
from weir.errors import InvalidRequest, WeirError
from weir.messages import Dispatch
from weir.text_models.texts import TOO_LONG, Text, TextOutput, TokenDetail, prompt_text
from weir.text_server.texts import Encoded, Phases, TextFacts, TextQuery, TextTask

DIMENSIONS = 8


class Heard(NamedTuple):
    """What was asked of it."""

    texts: Sequence[Text]
    query: TextQuery


class HashingEncoder:
    """Encodes at once, or when `gate` is opened. `error` is raised instead if there is one."""

    dimensions = DIMENSIONS
    batching = BatchingSettings()

    def __init__(
        self, name: str = "hashing", *, max_length: int = 6, per_token: bool = False, facts: TextFacts | None = None
    ) -> None:
        self.name = name
        self.facts = facts or TextFacts(tasks=(TextTask.EMBED_ALL if per_token else TextTask.EMBED,))
        self.max_length = max_length
        self.heard: list[Heard] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.entered: asyncio.Event | None = None
        self.left: asyncio.Event | None = None  # set when a call is cancelled
        self.scores: dict[str, Any] | None = None  # the numbers of a text, of a pair those of its second text
        self.lists: dict[str, list[Any]] | None = None  # the rows of a text, of so many numbers each
        self.lists_width = 2
        self._per_token = per_token
        self.one_by_one = True  # whether `encode_one` takes a text
        self.dispatch: tuple[Dispatch, float] | None = None  # the batch of the texts, and when they entered the queue

    def encode_one(
        self, text: Text, query: TextQuery, done: Callable[[Encoded | WeirError], None]
    ) -> Callable[[], object] | None:
        """Encode one text in a task. It has no worker that writes vectors."""
        failing = self.error is not None and not isinstance(self.error, WeirError)
        if failing or not (self.one_by_one and query.is_plain):
            return None

        async def run() -> None:
            try:
                encoded: Encoded | WeirError = await self.encode([text], query._replace(as_json=False))
            except WeirError as error:
                encoded = error
            done(encoded)

        return asyncio.get_running_loop().create_task(run(), context=Context()).cancel

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        """Return vectors."""
        options = query.options
        self.heard.append(Heard(texts, query))
        if self.entered is not None:
            self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            if self.left is not None:
                self.left.set()
            raise
        if self.error is not None:
            raise self.error
        await self.obey(texts)
        words = [words_of(text) for text in texts]
        for place, read in enumerate(words):
            if options.truncate is False and len(read) > self.max_length:
                rule = f"has {len(read)} tokens, must have at most {self.max_length}"
                raise InvalidRequest(rule, details={"text": place, TOO_LONG: self.max_length}).at("texts", place)
        kept = [read[: self.max_length] for read in words]
        vectors = np.stack([vector_of(" ".join(read))[: options.dimensions or DIMENSIONS] for read in kept])
        if self.scores is not None:
            vectors = np.stack([self.scores[text[1] if isinstance(text, tuple) else str(text)] for text in texts])
        if self._per_token:
            vectors = np.repeat(vectors[:, None, :], max(map(len, kept)), axis=1)
        truncated = [len(read) > self.max_length for read in words]
        if self.lists is not None:
            rows = [self.lists[str(text)] for text in texts]
            vectors = np.zeros((len(rows), max(map(len, rows)), self.lists_width), np.float32)
            for place, row in enumerate(rows):
                vectors[place, : len(row)] = np.array(row, np.float32).reshape(-1, self.lists_width)
            return Encoded(vectors, list(map(len, kept)), truncated, lengths=list(map(len, rows)))
        lengths = [len(each) for each in kept] if self._per_token else None
        return Encoded(
            vectors,
            list(map(len, kept)),
            truncated,
            kept if options.want_tokens else None,
            lengths,
            dispatch=self.dispatch,
            phases=Phases(0.001, 0.002, 0.003, 0.007),
            further={
                output: [np.repeat(vector[None], len(read), axis=0) for vector, read in zip(vectors, kept, strict=True)]
                for output in options.outputs[1:] if output is TextOutput.TOKENS
            },
        )  # fmt: skip

    async def obey(self, texts: Sequence[Text]) -> None:
        """Do what `texts` tell it."""

    async def tokenize(
        self, texts: Sequence[str], *, special: bool, prompt: str | None, timeout: float | None = None
    ) -> list[list[TokenDetail]]:
        """Return the words of each text."""
        marks = [TokenDetail(0, "<s>", True, None, None)] if special else []
        return [[*marks, *_details(prompt_text(prompt or "", self.facts.prompts) + text)] for text in texts]

    async def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool, timeout: float | None = None
    ) -> list[str]:
        """Return the numbers, with 0 as a special token."""
        return [" ".join(str(number) for number in each if number or not skip_special) for each in ids]


def ranker() -> HashingEncoder:
    """Return a model that ranks: the number of each document is known."""
    encoder = HashingEncoder("ranker", facts=TextFacts(tasks=(TextTask.RERANK, TextTask.PREDICT), labels=("LABEL_0",)))
    encoder.scores = {"dam": [2.0], "bird": [-2.0], "weir": [4.0], "twin": [2.0]}
    return encoder


def labeller(independent: bool = False) -> HashingEncoder:
    """Return a model that labels."""
    facts = TextFacts(tasks=(TextTask.PREDICT,), labels=("sad", "glad", "mad"), independent_labels=independent)
    encoder = HashingEncoder("labeller", facts=facts)
    encoder.scores = {"dam": [0.0, 1.0, -1.0], "bird": [3.0, 0.0, 0.0]}
    return encoder


def weigher() -> HashingEncoder:
    """Return a model that weighs the terms of texts."""
    encoder = HashingEncoder("weigher", facts=TextFacts(tasks=(TextTask.EMBED_SPARSE,)))
    encoder.lists = {"one": [[7, 0.5], [30_000, 1.25]], "two": [], "three": [[9, 2.0]]}
    return encoder


def _details(text: str) -> list[TokenDetail]:
    found, start = [], 0
    for word in text.split():
        start = text.index(word, start)
        found.append(TokenDetail(len(word), word, False, start, start + len(word)))
        start += len(word)
    return found


def words_of(text: Text) -> list[str]:
    """Return the tokens of a text."""
    if isinstance(text, str):
        return text.split()
    if isinstance(text, tuple):
        return [*text[0].split(), "|||", *text[1].split()]
    return [str(word) for word in text]


def vector_of(text: str) -> NDArray[np.float32]:
    """Return the vector of a text that is not cut."""
    digest = blake2b(text.encode(), digest_size=DIMENSIONS).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32) / np.float32(256)
