"""The token ids of words that were tokenized before, so that most texts are tokenized by looking their words up.

A WordPiece tokenizer of BERT's kind divides a text at spaces and around punctuation, and turns each word into tokens by itself. So the tokens of a text are
those of its words, one after the other, and a word always has the same ones. To look 30 words up takes a few microseconds, a tenth of what the package
tokenizers takes for them.

Where a word ends is known for spaces, and for the punctuation of ASCII and of typographers; what stands between, of any characters, counts as one word,
which the package may divide further. For texts with long words, and those in which a special token is written out, `KnownWords.packed` returns None, and the
package tokenizes the whole text.
"""

import re
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

MOST_WORDS = 1 << 14  # that are remembered, about 4 MB; then all are forgotten
LONGEST_KNOWN = 64  # characters of a word that is remembered
LONGEST_TEXT = 4_000  # characters of a text whose words are looked up
NEW_AT_ONCE = 4  # words that a text may have that are not known, where it must be tokenized within microseconds

_PUNCTUATION = "!-/:-@\\[-`{-~\u2010-\u2027"
WORD = re.compile(rf"[^ \t\n\r{_PUNCTUATION}]+|[{_PUNCTUATION}]")
# The package takes no halves of surrogate pairs.
_KNOWABLE = re.compile(rf"[^ \t\n\r{_PUNCTUATION}\ud800-\udfff]{{1,{LONGEST_KNOWN}}}|[{_PUNCTUATION}]")

# Normalizers that change each word by itself.
_NORMALIZERS = ("BertNormalizer", "Lowercase")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little-endian."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the token ids that `pack_ids` packed."""
    ids = array("i", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class KnownWords:
    """The token ids of words. `encode` returns the ids of each of some words, without special tokens; `special` are the tokens that texts may spell out.

    Threads may share it.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]], special: Sequence[str]) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}  # packed: a list of numbers is spread over memory, and takes longer to read
        self._beginnings = {character for token in special for character in (token[0].lower(), token[0].upper())}
        self._special = re.compile("|".join(map(re.escape, special)), re.IGNORECASE)

    def packed(self, text: str, new: float) -> bytes | None:
        """Return the ids of `text` as `pack_ids` does; None if it must be tokenized as a whole, or has more than `new` words that are not known yet."""
        if len(text) > LONGEST_TEXT or (any(map(text.__contains__, self._beginnings)) and self._special.search(text)):
            return None
        words = WORD.findall(text)
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            found = self._learned(words, new)
        return None if found is None else b"".join(map(found.__getitem__, words))

    def ids(self, text: str, new: float) -> list[int] | None:
        """Return what `packed` does as a list."""
        packed = self.packed(text, new)
        return None if packed is None else unpack_ids(packed)

    def _learned(self, words: list[str], new: float) -> dict[str, bytes] | None:
        """Return the ids of each of `words`, also of those that were not known; None as `packed` does."""
        found = {word: self._known.get(word) for word in words}
        missing = [word for word, ids in found.items() if ids is None]
        if len(missing) > new or not all(map(_KNOWABLE.fullmatch, missing)):
            return None
        learned = dict(zip(missing, map(pack_ids, self._encode(missing)), strict=True))
        if len(self._known) + len(learned) > MOST_WORDS:
            self._known.clear()
        self._known.update(learned)
        return {word: learned[word] if ids is None else ids for word, ids in found.items()}


def splits_into_words(state: dict[str, Any]) -> bool:
    """Return whether the tokenizer with this description (`tokenizer.json`) turns each word that `WORD` finds into tokens by itself."""
    normalizer = state.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    return (
        (state.get("model") or {}).get("type") == "WordPiece"
        and (state.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and all(step.get("type") in _NORMALIZERS for step in steps)
    )
