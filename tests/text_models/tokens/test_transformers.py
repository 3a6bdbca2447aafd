"""Ids are those of transformers' tokenizers (expected.json, written by make_reference.py), whichever files they are read from."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text_models.tokens.directories import LENGTHS, PAIRS, TEXTS, WORDS, make
from tests.text_models.tokens.reading import ids

from weir.text_models.texts import TokenizerOptions, TokenRule
from weir.text_models.tokenizer import Tokenizer

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parent / "expected.json").read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    assert make(folder) == sorted(EXPECTED)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_texts_pairs_and_words(name: str, root: Path) -> None:
    tokenizer, expected = Tokenizer(root / name), EXPECTED[name]
    for length in LENGTHS:
        found = tokenizer.encode(TEXTS, TokenRule(length))
        assert [ids(text) for text in found] == expected["texts"][str(length)]
        pairs = tokenizer.encode(PAIRS, TokenRule(length))
        assert [ids(pair) for pair in pairs] == expected["pairs"][str(length)]
    assert [ids(words) for words in tokenizer.encode(WORDS, TokenRule(1000))] == expected["words"]
    bare = Tokenizer(root / name, TokenizerOptions(special_tokens=False)).encode(TEXTS, TokenRule(1000))
    for text, wanted in zip(bare, expected["bare"], strict=True):
        assert (ids(text) == wanted) if wanted else ("has no tokens" in str(text))


@pytest.mark.parametrize("name", ["bert", "vocabulary", "distilbert"])
def test_the_second_text_begins_where_types_change(name: str, root: Path) -> None:
    for found, types in zip(
        Tokenizer(root / name).encode(PAIRS, TokenRule(1000)), EXPECTED["bert"]["types"], strict=True
    ):
        assert not isinstance(found, Exception)
        assert [int(place >= found.second) for place in range(len(found.ids) // 4)] == types
