"""What counts as a text: the rules, and the errors that name them. The caller says which text it was."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from weir.errors import InvalidRequest

SHOWN = 40  # characters of a text in an error


class Read(NamedTuple):
    """A text, found valid: one or two texts, one or two lists of words, or the ids."""

    texts: tuple[str, ...] = ()
    words: tuple[list[str], ...] = ()
    ids: list[int] | None = None


def read_text(text: Any, separator: str | None, vocab_size: int) -> Read:
    """Find out what a text is, and whether it is one. Raises InvalidRequest naming the rule."""
    if isinstance(text, str):
        check_string(text, "the text")
        return Read(texts=_cut_string(text, separator))
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        for part, name in zip(text, ("the first text of the pair", "the second text of the pair"), strict=True):
            check_string(part, name)
        return Read(texts=text)
    if isinstance(text, Sequence) and not isinstance(text, bytes | bytearray | memoryview):
        return _read_list(text, separator, vocab_size)
    raise InvalidRequest(f"{_shown(text)} must be a string, a pair of strings, a list of words or a list of token ids")


def check_string(text: str, name: str) -> None:
    """Raise InvalidRequest if `text` is empty, has a NUL, or is not valid Unicode."""
    if not text:
        raise InvalidRequest(f"{name} is empty: it must have at least one character")
    if "\0" in text:
        raise InvalidRequest(f"{name} has a NUL at character {text.index(chr(0))}: texts must have none")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair"
            ) from None


def _read_list(items: Sequence[Any], separator: str | None, vocab_size: int) -> Read:
    if not items:
        raise InvalidRequest("the list is empty: it must have at least one word or token id")
    if isinstance(items[0], str):
        for place, word in enumerate(items):
            if not isinstance(word, str):
                raise InvalidRequest(f"word {place} is {_shown(word)}: all must be strings")
            check_string(word, f"word {place}")
        return Read(words=_cut_words(list(items), separator))
    for place, number in enumerate(items):
        if type(number) is not int:
            raise InvalidRequest(
                f"token id {place} is {_shown(number)}: must be whole numbers, or words that are strings"
            )
        if not 0 <= number < vocab_size:
            raise InvalidRequest(f"token id {place} is {number}: the model's vocabulary has 0 to {vocab_size - 1}")
    return Read(ids=list(items))


def _cut_string(text: str, separator: str | None) -> tuple[str, ...]:
    """Cut at the last separator between spaces, as bert-as-service does; what has nothing beside it is no pair."""
    if separator is None or separator not in text:
        return (text,)
    found = re.fullmatch(rf"(.*\S.*) {re.escape(separator)} (.*\S.*)", text, re.DOTALL)
    return (found[1].strip(), found[2].strip()) if found else (text,)


def _cut_words(words: list[str], separator: str | None) -> tuple[list[str], ...]:
    if separator is None or separator not in words:
        return (words,)
    place = words.index(separator)
    parts = words[:place], words[place + 1 :]
    if not all(parts):
        raise InvalidRequest(
            f"word {place} is {separator!r}, which stands between two texts: there must be words on both sides"
        )
    return parts


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:SHOWN]}{'...' if len(text) > SHOWN else ''} ({type(value).__name__})"
