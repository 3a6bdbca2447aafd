"""Long texts in pieces: nothing is lost, and words stay whole where they can."""

import itertools
from pathlib import Path

import pytest
from tests.embedding import tiny
from tests.embedding.tokens.reading import ids

from weir.embedding.tokens.splitting import split_ids
from weir.embedding.tokens.template import shares
from weir.embedding.tokens.tokenizer import Tokenizer
from weir.errors import InvalidRequest


def test_pieces_end_between_words() -> None:
    words = [0, 0, 1, 2, 2, 2, 3, 4]
    assert split_ids(range(8), words, 4, 0) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert split_ids(range(8), words, 4, 1) == [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]]
    assert split_ids(range(8), words, 8, 3) == [list(range(8))]
    assert split_ids([], [], 4, 0) == [[]]


def test_a_word_longer_than_a_piece_is_cut() -> None:
    assert split_ids(range(7), [0] * 7, 3, 0) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("overlap", [0, 3])
def test_all_of_a_text_is_in_its_pieces(overlap: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    text = "the weirs hold the quick waters back until there is enough of it, and let it go at once " * 6
    pieces = tokenizer.split(text, max_length=16, overlap=overlap)
    assert not isinstance(pieces, InvalidRequest)
    found = [ids(piece) for piece in pieces]
    assert all(len(piece) <= 16 and piece[0] == 2 and piece[-1] == 3 for piece in found)
    whole = ids(tokenizer.encode([text], max_length=10_000)[0])[1:-1]
    joined = found[0][1:-1] + [number for piece in found[1:] for number in piece[1 + overlap : -1]]
    assert joined == whole
    for before, after in itertools.pairwise(found):
        assert before[-1 - overlap : -1] == after[1 : 1 + overlap]
    assert tokenizer.split("do it", max_length=16) == tokenizer.encode(["do it"], max_length=16)


def test_texts_that_cannot_be_split(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    assert "is empty" in str(tokenizer.split("", max_length=16))
    assert "must leave room for more than the 14 tokens" in str(tokenizer.split("a", max_length=16, overlap=14))


def test_shares_fill_the_room_and_take_from_the_longer() -> None:
    for first, second, room in itertools.product(range(1, 9), range(1, 9), range(2, 12)):
        kept, other = shares(first, second, room)
        assert kept + other == min(first + second, room)
        if first + second > room:
            assert abs(kept - other) <= 1 or (kept == first < other) or (other == second < kept)
