"""Texts of different lengths as the arrays of one run: which of them run together, and what fills the shorter ones up."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Inputs(NamedTuple):
    """What a runtime takes, all [texts, length]: see Runtime.run."""

    ids: NDArray[Any]
    mask: NDArray[Any]
    types: NDArray[Any]
    pool: NDArray[Any]


class Read(NamedTuple):
    """One text's token ids, and where its second text begins: 0 if it has none."""

    ids: NDArray[Any]
    second: int


def runs(lengths: Sequence[int], run_tokens: int, padding_cost: float = 1.0) -> Iterator[list[int]]:
    """Cut texts of these lengths into runs; yield the places of each, texts of like length together, short ones first.

    A run of n texts, filled up to its longest, has at most `run_tokens` tokens, where one of padding counts `padding_cost`; a text that is
    longer than that runs alone.
    """
    run: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = lengths[place]
        tokens += longest
        if run and tokens + padding_cost * (longest * (len(run) + 1) - tokens) > run_tokens:
            yield run
            run, tokens = [], longest
        run.append(place)
    if run:
        yield run


def filled(
    texts: Sequence[Read], *, pad_id: int, mask_special: bool, length: int | None = None, hide_special: bool = False
) -> Inputs:
    """Return the arrays of one run, filled up with `pad_id` to the longest text, or to `length` tokens.

    With `mask_special` the first token and the last of a text do not count in the pooling, unless it has no others. With `hide_special` they,
    and the one before the second text, are not there for the other tokens either: they keep their places, and nobody looks at them.
    """
    shape = len(texts), length or max(len(text.ids) for text in texts)
    ids = np.full(shape, pad_id, np.int32)
    mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    pool = np.zeros(shape, np.float32)
    for row, (tokens, second) in enumerate(texts):
        count = len(tokens)
        ids[row, :count] = tokens
        mask[row, :count] = 1
        if second:
            types[row, second:count] = 1
        inner = slice(1, count - 1) if mask_special and count > 2 else slice(0, count)
        pool[row, inner] = 1
        if hide_special and count > 2:
            mask[row, [0, count - 1, *([second - 1] if second else [])]] = 0
            pool[row] *= mask[row]
    return Inputs(ids, mask, types, pool)
