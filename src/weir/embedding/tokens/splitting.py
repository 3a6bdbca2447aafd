"""Cutting a long text's tokens into pieces, between words where that can be."""

from collections.abc import Sequence


def split_ids(ids: Sequence[int], words: Sequence[int | None], room: int, overlap: int) -> list[list[int]]:
    """Return pieces of at most `room` tokens, each sharing `overlap` tokens with the one before.

    `words` says of each token which word it is part of. A word that alone is longer than a piece is cut inside.
    """
    pieces: list[list[int]] = []
    start = 0
    while True:
        stop = _stop(words, start, room, overlap)
        pieces.append(list(ids[start:stop]))
        if stop >= len(ids):
            return pieces
        start = stop - overlap


def _stop(words: Sequence[int | None], start: int, room: int, overlap: int) -> int:
    full = start + room
    if full >= len(words):
        return len(words)
    stop = full
    while stop > start + overlap and words[stop] == words[stop - 1] is not None:
        stop -= 1
    return stop if stop > start + overlap else full
