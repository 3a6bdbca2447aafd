"""A text as callers give it: a string, a pair of strings, a list of words or a list of token ids, checked before anything is tokenized.

A text that breaks a rule becomes an error that names the rule; the caller adds which text it was.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from weir.errors import InvalidRequest

SHOWN = 40  # the most characters of a text that an error quotes


class CheckedText(NamedTuple):
    """A valid input in one of three forms: one or two strings (`texts`), one or two lists of words (`words`), or token ids (`ids`)."""

    texts: tuple[str, ...] = ()
    words: tuple[list[str], ...] = ()
    ids: list[int] | None = None


def parse_text(text: Any, separator: str | None, vocab_size: int) -> CheckedText:
    """Check an input and return it in its form. A `separator` in a string or a list of words makes it a pair.

    Raises InvalidRequest naming the rule that the input breaks; token ids must be below `vocab_size`.
    """
    if isinstance(text, str):
        check_string(text, "the text")
        return CheckedText(texts=_cut_string(text, separator))
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        for part, name in zip(text, ("the first text of the pair", "the second text of the pair"), strict=True):
            check_string(part, name, may_be_empty=any(text))
        return CheckedText(texts=text)
    if isinstance(text, Sequence) and not isinstance(text, bytes | bytearray | memoryview):
        return _parse_list(text, separator, vocab_size)
    raise InvalidRequest(f"{_shown(text)} must be a string, a pair of strings, a list of words or a list of token ids")


def check_string(text: str, name: str, *, may_be_empty: bool = False) -> None:
    """Raise InvalidRequest if `text`, which the error calls `name`, is empty and may not be, has a NUL character, or is not valid Unicode."""
    if not (text or may_be_empty):
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


def _parse_list(items: Sequence[Any], separator: str | None, vocab_size: int) -> CheckedText:
    if not items:
        raise InvalidRequest("the list is empty: it must have at least one word or token id")
    if isinstance(items[0], str):
        for place, word in enumerate(items):
            if not isinstance(word, str):
                raise InvalidRequest(f"word {place} is {_shown(word)}: all must be strings")
            check_string(word, f"word {place}")
        return CheckedText(words=_cut_words(list(items), separator))
    for place, number in enumerate(items):
        if type(number) is not int:
            raise InvalidRequest(
                f"token id {place} is {_shown(number)}: must be whole numbers, or words that are strings"
            )
        if not 0 <= number < vocab_size:
            raise InvalidRequest(f"token id {place} is {number}: the model's vocabulary has 0 to {vocab_size - 1}")
    return CheckedText(ids=list(items))


def _cut_string(text: str, separator: str | None) -> tuple[str, ...]:
    """Split at the last separator that stands between spaces, as bert-as-service does. Without text on both sides the string is one text."""
    if separator is None:
        return (text,)
    between = f" {separator} "
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    place = text.rfind(between, begin + 1, max(end - 1, 0))
    return (text,) if place < 0 else (text[:place].strip(), text[place + len(between) :].strip())


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
