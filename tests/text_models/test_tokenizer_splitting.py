"""Long texts in pieces: nothing is lost, and words stay whole where they can."""

import itertools
from functools import partial
from pathlib import Path

import pytest
from tests.text_models import tiny
from tests.text_models.tokens.reading import ids

from weir.errors import InvalidRequest
from weir.text_models.texts import TokenizerOptions, TokenRule
from weir.text_models.tokenizer import MOST_SPLIT, Tokenizer, pair_lengths, split_ids


def test_pieces_end_between_words() -> None:
    words = [0, 0, 1, 2, 2, 2, 3, 4]
    assert split_ids(range(8), words, 4) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert split_ids(range(8), words, 8) == [list(range(8))]
    assert split_ids([], [], 4) == [[]]
    assert split_ids(range(7), [0] * 7, 3) == [[0, 1, 2], [3, 4, 5], [6]]  # a word longer than a piece is cut


def test_all_of_a_text_is_in_its_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    text = "the weirs hold the quick waters back until there is enough of it, and let it go at once " * 6
    pieces = tokenizer.split(text, TokenRule(16))
    assert not isinstance(pieces, InvalidRequest)
    found = [ids(piece) for piece in pieces]
    assert all(len(piece) <= 16 and piece[0] == 2 and piece[-1] == 3 for piece in found)
    whole = ids(tokenizer.encode([text], TokenRule(10_000))[0])[1:-1]
    assert [number for piece in found for number in piece[1:-1]] == whole
    assert tokenizer.split("do it", TokenRule(16)) == tokenizer.encode(["do it"], TokenRule(16))


WORDS = ["the", "weirs", "hold", "the", "Quick", "waters", "back", "until", "there", "is", "enough", "of", "it"] * 4


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("whole_words", [False, True])
def test_words_are_split_as_they_are_read(family: str, whole_words: bool, tmp_path: Path) -> None:
    tokenizer, rule = Tokenizer(tiny.model(tmp_path, family)), partial(TokenRule, whole_words=whole_words)
    pieces = tokenizer.split(WORDS, rule(16))
    assert not isinstance(pieces, InvalidRequest)
    found = [ids(piece) for piece in pieces]
    assert all(len(piece) <= 16 for piece in found)
    (read,) = tokenizer.encode([WORDS], rule(10_000))
    assert [number for piece in found for number in piece[1:-1]] == ids(read)[1:-1]


@pytest.mark.parametrize("place", [0, 1])
def test_the_longer_of_two_texts_is_split_beside_the_other(place: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    long, short = " ".join(WORDS), "do it right"
    pair = (long, short) if place == 0 else (short, long)
    whole = ids(tokenizer.encode([long], TokenRule(10_000))[0])[1:-1]
    beside = ids(tokenizer.encode([short], TokenRule(16))[0])[1:-1]
    pieces = tokenizer.split(pair, TokenRule(16))
    assert not isinstance(pieces, InvalidRequest) and not any(piece.truncated for piece in pieces)
    joined: list[int] = []
    for piece in pieces:
        numbers = ids(piece)
        parts = [numbers[1 : piece.second - 1], numbers[piece.second : -1]]
        assert len(numbers) <= 16 and parts[1 - place] == beside
        joined += parts[place]
    assert joined == whole
    assert tokenizer.split((short, short), TokenRule(16)) == tokenizer.encode([(short, short)], TokenRule(16))
    again = Tokenizer(tokenizer.directory, TokenizerOptions(pair_separator="|||"))
    assert again.split(f"{pair[0]} ||| {pair[1]}", TokenRule(16)) == pieces
    assert again.split([*pair[0].split(), "|||", *pair[1].split()], TokenRule(16)) == pieces


def test_of_two_long_texts_the_one_beside_is_cut_to_half_of_the_room(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    long, longer = " ".join(WORDS[:20]), " ".join(WORDS)
    pieces = tokenizer.split((long, longer), TokenRule(16))
    assert not isinstance(pieces, InvalidRequest)
    kept = ids(tokenizer.encode([long], TokenRule(10_000))[0])[1:7]  # of 16 - 3 tokens
    assert all(piece.truncated and ids(piece)[1 : piece.second - 1] == kept for piece in pieces)


def test_texts_that_cannot_be_split(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path))
    assert "token ids are not split" in str(tokenizer.split([2, 5, 3], TokenRule(16)))
    assert "must leave room" in str(tokenizer.split(("a", "b"), TokenRule(3)))
    assert "is empty" in str(tokenizer.split("", TokenRule(16)))
    for text in ("a" * (MOST_SPLIT + 1), ["a"] * (MOST_SPLIT + 1), ("b", "a" * (MOST_SPLIT + 1))):
        assert f"must have at most {MOST_SPLIT} to be read in pieces" in str(tokenizer.split(text, TokenRule(16)))


def test_shares_fill_the_room_and_take_from_the_longer() -> None:
    for first, second, room in itertools.product(range(1, 9), range(1, 9), range(2, 12)):
        kept, other = pair_lengths(first, second, room)
        assert kept + other == min(first + second, room)
        if first + second > room:
            assert abs(kept - other) <= 1 or (kept == first < other) or (other == second < kept)
