"""The special tokens around a text, and around and between two."""

from typing import Any, NamedTuple


class Template(NamedTuple):
    """Token ids before, between and after. One text: `first + ids + last`; two: `first + a + middle + b + end`."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def room(self, max_length: int, *, pair: bool) -> int:
        """Return how many tokens of the text, or of both, fit."""
        special = len(self.middle) + len(self.end) if pair else len(self.last)
        return max_length - len(self.first) - special


def read_template(pieces: Any) -> Template:
    """See what the tokenizer's own rules put around a text, by giving it one that is a token of the vocabulary."""
    added = pieces.get_added_tokens_decoder()
    sample = added[min(added)].content if added else "a"
    one, two = pieces.encode(sample), pieces.encode(sample, sample)
    first, last = _around(one.ids, one.sequence_ids, (0,))
    _, end = _around(two.ids, two.sequence_ids, (0, 1))
    own = two.sequence_ids
    middle = two.ids[len(own) - own[::-1].index(0) : own.index(1)] if 0 in own and 1 in own else []
    return Template(tuple(first), tuple(last), tuple(middle), tuple(end))


def _around(ids: list[int], own: list[int | None], texts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    places = [place for place, text in enumerate(own) if text in texts]
    if not places:
        return [], []
    return ids[: places[0]], ids[places[-1] + 1 :]


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens two texts of these lengths keep, so that both fit: the longer one is cut first.

    As in the library: of two that are both cut, the second keeps the odd token, unless the first was the longer.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = room - short
    if long < short:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)
