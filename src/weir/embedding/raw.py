"""Items as they come, to token ids: those that the front has read, and texts that reach a worker as they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weir.embedding.padding import Read
from weir.embedding.texts import Tokens
from weir.errors import InvalidRequest

if TYPE_CHECKING:
    from weir.embedding.tokens.tokenizer import Tokenizer

KINDS = "must be a text, a list of words or of token ids, or an object with `text` and perhaps `pair`"


class Texts:
    """Reads the items of a model: `vocabulary` is the number of its tokens, `max_length` the most that a text may have."""

    def __init__(self, tokenizer: "Tokenizer", *, max_length: int, truncate: bool, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncate = truncate
        self._vocabulary = vocabulary

    def read(self, items: Sequence[Any]) -> list[Read | InvalidRequest]:
        """Return what each item is, in order; an error in the place of one that is wrong."""
        results: list[Any] = [self._tokens(item) for item in items]
        texts = [(place, _text(items[place])) for place, result in enumerate(results) if result is None]
        good = [(place, text) for place, text in texts if not isinstance(text, InvalidRequest)]
        results_of = dict(texts)
        if good:
            results_of |= zip([place for place, _ in good], self._tokenized([text for _, text in good]), strict=True)
        for place, result in results_of.items():
            results[place] = result
        return results

    def _tokens(self, item: Any) -> Read | InvalidRequest | None:
        """Return what an item of token bytes is; None for any other."""
        ids, second = item if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], bytes) else (item, 0)
        if not isinstance(ids, bytes):
            return None
        return self._checked(Tokens(ids, second))

    def _tokenized(self, texts: list[Any]) -> "list[Read | InvalidRequest]":
        found = self._tokenizer.encode(texts, max_length=self._max_length, truncate=self._truncate)
        return [
            each if isinstance(each, InvalidRequest) else Read(np.frombuffer(each.ids, "<i4"), each.second)
            for each in found
        ]

    def _checked(self, tokens: Tokens) -> Read | InvalidRequest:
        if not tokens.ids or len(tokens.ids) % 4:
            return InvalidRequest(
                f"token ids of {len(tokens.ids)} bytes: must be one or more, each an int32 of 4 bytes"
            )
        ids = np.frombuffer(tokens.ids, "<i4")
        if len(ids) > self._max_length:
            return InvalidRequest(f"{len(ids)} token ids: must be at most {self._max_length}")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            return InvalidRequest(f"token ids from {ids.min()} to {ids.max()}: must be 0 to {self._vocabulary - 1}")
        return Read(ids, tokens.second)


def _text(item: Any) -> Any:
    """Return the item as one of the forms of Text."""
    if isinstance(item, dict):
        if not {"text"} <= item.keys() <= {"text", "pair"} or not all(isinstance(part, str) for part in item.values()):
            return InvalidRequest(f"an object with {sorted(map(str, item))}: {KINDS}, all strings")
        return (item["text"], item["pair"]) if "pair" in item else item["text"]
    if isinstance(item, (str, list, tuple)):
        return item
    return InvalidRequest(f"an item of type {type(item).__name__}: {KINDS}")
