"""A text's tokens by its known words are those of the package, and texts that this cannot know are left to it."""

from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.tokens.reading import rule

from weir.text_models import tokenizer as words_module
from weir.text_models.texts import TokenRule
from weir.text_models.tokenizer import LONGEST_KNOWN, LONGEST_TEXT, NEW_AT_ONCE, KnownWords, Tokenizer

ODD = [chr(code) for code in (*range(1, 0x250), *range(0x2000, 0x2070), 0x301, 0x338, 0x4E2D, 0x1F600, 0xFEFF)]
# Letters, marks, symbols and punctuation of all scripts.
WIDE = [chr(code) for code in range(1, 0x3400) if chr(code).isprintable() or not code % 7]


@pytest.fixture(scope="module", params=[False, True], ids=["lowercase", "cased"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    tiny_tokens.write_vocabulary(directory, cased=request.param)
    return Tokenizer(directory)


def at_once(tokenizer: Tokenizer, texts: list[Any], max_length: int = 50) -> Any:
    return tokenizer.at_once(texts, TokenRule(max_length))


def test_the_tokens_of_words_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    chance, known = Random(1), tokenizer._known_words
    assert known is not None

    def drawn(odd: float) -> str:
        return chance.choice(ODD if chance.random() < odd else "abcdeXYZ 0129,.'-[")

    texts = ["".join(drawn(odd) for _ in range(length)) for odd in (0.0, 0.02, 0.3) for length in range(1, 300)]
    texts += ["".join(chance.choice(WIDE if chance.random() < 0.8 else " .,ab") for _ in range(40)) for _ in range(500)]
    texts += ["first [MASK] do it", "[mask]", "x" * 300, " \t\n", "e-mail@x.com, it's"]
    texts += [
        "Naïve café\u2019s \u201cidea\u201d",
        "\u0130stanbul",
        "10 \u00b5s \u2264 5\u00d7 \u2308x\u2309\u00b7y a\u2260b =\u0338 \u4e2d\u6587",
    ]

    found = [known.ids(text, inf) for text in texts]

    for each, ids in zip(tokenizer.backend.encode_batch(texts, add_special_tokens=False), found, strict=True):
        assert ids is None or ids == each.ids
    assert sum(ids is not None for ids in found) > 0.6 * len(texts)
    assert found[-1] is not None
    assert known.ids("half \ud800", inf) is None
    assert known.ids("first [MASK] do it", inf) is known.ids("first [mask] do it", inf) is None


def test_only_texts_of_known_words_are_tokenized_at_once(tokenizer: Tokenizer) -> None:
    text = " ".join(f"word{place}" for place in range(NEW_AT_ONCE + 1))
    assert at_once(tokenizer, [text]) is None
    (whole,) = tokenizer.encode([text], TokenRule(50))

    found = at_once(tokenizer, [text, ("first", "then"), ""])

    assert found[:2] == [whole, *tokenizer.encode([("first", "then")], TokenRule(50))]
    assert "empty" in rule(found[2])
    assert at_once(tokenizer, ["do it new1 new2"]) == tokenizer.encode(["do it new1 new2"], TokenRule(50))
    (cut,) = at_once(tokenizer, [text], max_length=5)
    assert cut == tokenizer.encode([text], TokenRule(5))[0]
    assert cut.truncated
    for other in (["a", "list"], [1, 2], "a" * (LONGEST_KNOWN + 1), "a " * LONGEST_TEXT):
        assert at_once(tokenizer, ["do it", other]) is None


def test_words_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MOST_WORDS", 10)
    asked: list[str] = []

    def encode(words: list[str]) -> list[list[int]]:
        asked.extend(words)
        return [[len(word)] for word in words]

    known = KnownWords(encode, [])

    assert known.ids("a bb a ccc", inf) == [1, 2, 1, 3]
    assert known.ids("bb, a", inf) == [2, 1, 1]
    assert asked == ["a", "bb", "ccc", ","]
    assert known.ids(" ".join(map(str, range(9))), inf) == [1] * 9
    assert known.ids("a", inf) == [1]
    assert asked.count("a") == 2


def test_other_tokenizers_know_no_words(tmp_path: Path) -> None:
    tiny.model(tmp_path, family="roberta")

    assert at_once(Tokenizer(tmp_path), ["do it"]) is None
