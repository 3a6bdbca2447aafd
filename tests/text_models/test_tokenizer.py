"""Every text is checked by itself; what is accepted becomes ids that fit the model."""

import itertools
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.opening import opened
from tests.text_models.tokens.reading import ids, rule

from weir.errors import InvalidRequest, SettingsError
from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models import tokenizer as reading
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.runtime import Inputs, open_runtime
from weir.text_models.texts import Tokenized, TokenizerOptions, TokenRule, parse_text
from weir.text_models.tokenizer import Tokenizer, pair_lengths, split_ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


BAD: list[tuple[Any, str]] = [
    (3, "3 (int) must be a string, a pair of strings, a list of words or a list of token ids"),
    (None, "None (NoneType) must be a string"),
    (b"bytes", "b'bytes' (bytes) must be a string"),
    ({"a": 1}, "(dict) must be a string"),
    ("", "the text is empty: it must have at least one character"),
    ("ab\0c", "the text has a NUL at character 2: texts must have none"),
    ("ab\ud800c", "the text is not valid Unicode: character 2 is half of a surrogate pair"),
    ("\udfff", "the text is not valid Unicode: character 0"),
    (("", ""), "the first text of the pair is empty"),
    (("a", "b\0"), "the second text of the pair has a NUL at character 1"),
    ([], "the list is empty: it must have at least one word or token id"),
    (["a", ""], "word 1 is empty"),
    (["a", "\ud800"], "word 1 is not valid Unicode"),
    (["a", 3], "word 1 is 3 (int): all must be strings"),
    ([3, "a"], "token id 1 is 'a' (str): must be whole numbers"),
    ([3, 1.0], "token id 1 is 1.0 (float)"),
    ([True], "token id 0 is True (bool)"),
    ([[1]], "token id 0 is [1] (list)"),
    ([181], "token id 0 is 181: the model's vocabulary has 0 to 180"),
    ([5, -1], "token id 1 is -1: the model's vocabulary has 0 to 180"),
    ([10**30], "the model's vocabulary has 0 to 180"),
    ([None], "token id 0 is None (NoneType)"),
    (["x" * 100, 3.5], "word 1 is 3.5"),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[expected[:40] for _, expected in BAD])
def test_a_bad_text_fails_alone(text: Any, expected: str, tokenizer: Tokenizer) -> None:
    good, bad, other = tokenizer.encode(["do it", text, "do it"], TokenRule(64))
    assert expected in rule(bad)
    assert len(rule(bad)) < 200
    assert ids(good) == ids(other) == ids(tokenizer.encode(["do it"], TokenRule(64))[0])


def test_kinds_of_text_may_be_mixed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode([], TokenRule(64)) == []
    found = tokenizer.encode(["do it", ("do", "it"), ["do", "it"], [2, 10, 3]], TokenRule(64))
    tokens = [tokenizer.tokens(text.ids) for text in found if isinstance(text, Tokenized)]
    one = ["[CLS]", "do", "it", "[SEP]"]
    assert tokens[:3] == [one, ["[CLS]", "do", "[SEP]", "it", "[SEP]"], one]
    assert ids(found[3]) == [2, 10, 3]
    assert [text.second for text in found if isinstance(text, Tokenized)] == [0, 3, 0, 0]
    assert tokenizer.tokens([2, 3]) == ["[CLS]", "[SEP]"]


def test_a_text_is_cut_only_where_that_is_allowed(tokenizer: Tokenizer) -> None:
    fits, long = tokenizer.encode(["a b c", "a b c d"], TokenRule(5))
    assert isinstance(fits, Tokenized) and not fits.truncated
    assert isinstance(long, Tokenized) and long.truncated
    assert tokenizer.tokens(long.ids) == ["[CLS]", "a", "b", "c", "[SEP]"]
    fits, long, pair, numbers = tokenizer.encode(
        ["a b c", "a b c d", ("a", "b c"), [2, 9, 9, 9, 9, 3]], TokenRule(5, truncate=False)
    )
    assert isinstance(fits, Tokenized)
    for refused in (long, pair, numbers):
        assert rule(refused) == "the text has more than the 5 tokens that the model reads, and may not be cut"


def test_token_ids_that_are_cut_keep_the_special_token_at_the_end(tokenizer: Tokenizer) -> None:
    given = [[2, 10, 11, 12, 3], [10, 11, 12, 13, 14]]
    for left, expected in ((False, [[2, 10, 11, 3], [10, 11, 12, 13]]), (True, [[2, 11, 12, 3], [11, 12, 13, 14]])):
        found = tokenizer.encode(given, TokenRule(4, truncate_left=left))
        assert [ids(each) for each in found] == expected


def test_a_length_without_room(tokenizer: Tokenizer) -> None:
    for text in ("do it", ("do", "it"), ["do", "it"]):
        assert "must leave room" in rule(tokenizer.encode([text], TokenRule(2))[0])


def test_words_that_are_tokens_stay_what_they_are(directory: Path) -> None:
    given = ["do", "##ing", "[MASK]", "weirs", "Do"]
    split = Tokenizer(directory).encode([given], TokenRule(64))[0]
    assert isinstance(split, Tokenized)
    assert Tokenizer(directory).tokens(split.ids) == ["[CLS]", "do", "##ing", "[MASK]", "weir", "##s", "do", "[SEP]"]
    whole = Tokenizer(directory, TokenizerOptions(whole_words=True))
    one_each = whole.encode([given], TokenRule(64))[0]
    assert isinstance(one_each, Tokenized)
    assert whole.tokens(one_each.ids) == ["[CLS]", "do", "##ing", "[MASK]", "[UNK]", "[UNK]", "[SEP]"]


def test_pairs_in_one_text_on_request(directory: Path, tokenizer: Tokenizer) -> None:
    asked = Tokenizer(directory, TokenizerOptions(pair_separator=" ||| "))
    with pytest.raises(SettingsError, match="must have characters other than spaces"):
        Tokenizer(directory, TokenizerOptions(pair_separator=" "))
    pair = tokenizer.encode([("do it", "right now")], TokenRule(64))[0]
    for text in ("do it ||| right now", "do it  |||  right now", ["do", "it", "|||", "right", "now"]):
        assert asked.encode([text], TokenRule(64))[0] == pair
    for text in ("do it|||right now", "||| right", "do |||", " ||| ", "do | it"):
        assert asked.encode([text], TokenRule(64)) == tokenizer.encode([text], TokenRule(64))
    assert "there must be words on both sides" in rule(asked.encode([["|||", "a"]], TokenRule(64))[0])
    whole = tokenizer.encode(["do it ||| right now"], TokenRule(64))[0]
    assert ids(whole).count(tokenizer.sep_id) == 1


def test_without_special_tokens(directory: Path) -> None:
    bare = Tokenizer(directory, TokenizerOptions(special_tokens=False))
    found = bare.encode(["do it", ("do", "it"), " "], TokenRule(2))
    assert bare.tokens(ids(found[0])) == bare.tokens(ids(found[1])) == ["do", "it"]
    assert rule(found[2]) == "the text has no tokens, and none are added"
    assert (bare.cls_id, bare.sep_id, bare.pad_id) == (2, 3, 0)
    assert bare.special_ids == {0, 1, 2, 3, 4}


def test_a_list_of_tokens_may_stay_alone(directory: Path) -> None:
    bare = Tokenizer(directory, TokenizerOptions(word_special_tokens=False))
    stock = partial(TokenRule, whole_words=True)
    words, text, pair = bare.encode([["do", "it", "nowhere"], "do it", ["do", "|||", "it"]], stock(3))
    assert bare.tokens(ids(words)) == ["do", "it", "[UNK]"]
    assert bare.tokens(ids(text)) == ["[CLS]", "do", "[SEP]"]
    assert rule(pair).startswith("max_length=3")
    (pair,) = bare.encode([["do", "|||", "it"]], stock(8))
    assert bare.tokens(ids(pair)) == ["[CLS]", "do", "[SEP]", "it", "[SEP]"]
    (cut,) = bare.encode([["do"]], TokenRule(8))  # words of other dialects are text
    assert bare.tokens(ids(cut)) == ["[CLS]", "do", "[SEP]"]
    pieces = bare.split(["do", "it"] * 3, stock(4))
    assert isinstance(pieces, list) and [len(ids(piece)) for piece in pieces] == [4, 2]


SENTENCE = "The quick brown fox, 'don't' ask; it's é — 水は [SEP] <mask>  jumps\tover the lazy dog's 1,234 lines.\n"
LONG = [SENTENCE * 100, "x" * 9000, "水" * 3000, " " * 9000 + "do it", ("a" * 99 + " ") * 100, "1 " * 5000, ". " * 5000]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_reading_a_part_gives_what_cutting_the_whole_gives(family: str, left: bool, tmp_path: Path) -> None:
    tokenizer, options = Tokenizer(tiny.model(tmp_path, family)), partial(TokenRule, truncate_left=left)
    template = tokenizer.template
    for text in LONG:
        whole = tokenizer.backend.encode(text, add_special_tokens=False).ids
        for length in (8, 16, 64):
            cut, pair = tokenizer.encode([text, (text, text)], options(length))
            assert isinstance(cut, Tokenized)
            assert ids(cut)[1:-1] == (whole[-(length - 2) :] if left else whole[: length - 2])
            assert cut.truncated == (len(whole) > length - 2)
            room = length - len(template.first) - len(template.middle) - len(template.end)
            first, second = pair_lengths(len(whole), len(whole), room)
            if left:
                assert ids(pair)[-second - len(template.end) :][:second] == whole[-second:]
            else:
                assert ids(pair)[1 : 1 + first] == whole[:first]


def test_what_is_cut_at_the_left_is_what_the_library_cuts(tokenizer: Tokenizer) -> None:
    backend = tokenizer.backend
    pairs = [("first do it then do it right", "do it"), ("do", "first do it then do it better"), ("it " * 9, "do " * 9)]
    for pair in pairs:
        for length in (6, 7, 9):
            backend.enable_truncation(length, strategy="longest_first", direction="left")
            expected = backend.encode(*pair).ids
            backend.no_truncation()
            found = tokenizer.encode([pair], TokenRule(length, truncate_left=True))
            assert ids(found[0]) == expected


def test_tokens_are_shown_with_what_they_stand_for(tokenizer: Tokenizer) -> None:
    found = tokenizer.details("First do it")
    assert [(each.text, each.special, each.start, each.stop) for each in found] == [
        ("[CLS]", True, None, None), ("First", False, 0, 5), ("do", False, 6, 8), ("it", False, 9, 11), ("[SEP]", True, None, None),
    ]  # fmt: skip
    assert [each.text for each in tokenizer.details("it", special=False, prompt="do ")] == ["do", "it"]
    with pytest.raises(InvalidRequest, match="has 300000 characters, must have at most 262144"):
        tokenizer.details("x" * 300_000)


def test_ids_are_put_together_again(tokenizer: Tokenizer) -> None:
    shown = [each.id for each in tokenizer.details("first do it")]
    assert tokenizer.decode(shown) == "first do it"
    assert tokenizer.decode(shown, skip_special=False) == "[CLS] first do it [SEP]"
    wrongs: list[Any] = [181, -1, True, "a"]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest, match=r"token id 1 is .*: the model's vocabulary has 0 to 180"):
            tokenizer.decode([4, wrong])


MILLIONS = {
    "Chinese": "\u6c34\u706b" * 1_000_000, "a word": "x" * 2_000_000, "spaces": " " * 2_000_000 + "do it", "a space at last": "\u6c34" * 2_000_000 + " it do",
    "words": "do it " * 320_000, "signs": "\u2603" * 2_000_000, "dots": "." * 2_000_000, "a word behind": "do it " + "ab" * 1_000_000,
}  # fmt: skip


# The small vocabulary of XLM-R has none of these characters: they are one unknown token together, which is read whole.
UNKNOWN = ("signs", "Chinese", "a space at last", "spaces")


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_of_millions_of_characters_only_those_are_read_that_can_count(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(tiny.model(tmp_path, family))
    read: list[int] = []
    real = tokenizer._encode

    def counted(texts: list[str]) -> Any:
        read.extend(map(len, texts))
        return real(texts)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    for name, text in MILLIONS.items():
        if family == "xlm-roberta" and name in UNKNOWN:
            continue
        expected = ids(tokenizer.encode([text[:4000] + ("do it" if name == "spaces" else "")], TokenRule(32))[0])
        read.clear()
        assert ids(tokenizer.encode([text], TokenRule(32))[0]) == expected, name
        assert sum(read) < 400_000, name


def test_a_pickled_tokenizer_is_the_same(directory: Path) -> None:
    options = TokenizerOptions(pair_separator="|||", special_tokens=False)
    before = Tokenizer(directory, options, vocab_size=200)
    after = pickle.loads(pickle.dumps(before))
    assert (after.options, after.vocab_size) == (options, 200)
    assert after.encode(["do it ||| now"], TokenRule(9)) == before.encode(["do it ||| now"], TokenRule(9))


def test_threads_share_one(tokenizer: Tokenizer) -> None:
    texts = [f"do it {place} times" for place in range(200)]
    wanted = {length: tokenizer.encode(texts, TokenRule(length)) for length in (5, 6, 64)}
    with ThreadPoolExecutor(4) as pool:
        found = [(length, pool.submit(tokenizer.encode, texts, TokenRule(length))) for length in (5, 6, 64) * 5]
        assert all(answer.result() == wanted[length] for length, answer in found)


def test_case_is_what_the_files_say_unless_chosen(tmp_path: Path) -> None:
    def tokens(**options: Any) -> list[str]:
        tokenizer = Tokenizer(tmp_path, TokenizerOptions(special_tokens=False, **options))
        return tokenizer.tokens(ids(tokenizer.encode(["The fox"], TokenRule(64))[0]))

    tiny_tokens.write_vocabulary(tmp_path)
    assert tokens() == ["the", "fox"]
    assert tokens(lowercase=False) == ["[UNK]", "fox"]
    tiny_tokens.write_vocabulary(tmp_path, cased=True)
    assert tokens() == ["The", "fox"]
    assert tokens(lowercase=True) == ["the", "fox"]
    tiny.model(tmp_path)
    assert tokens() == ["the", "fox"]
    assert tokens(lowercase=False) == ["[UNK]", "fox"]
    cased = [Tokenizer(tmp_path, TokenizerOptions(lowercase=each)).cased for each in (None, True, False)]
    assert cased == [False, False, True]
    for family in ("roberta", "xlm-roberta"):
        with pytest.raises(SettingsError, match=r"lowercase=True: .* has no tokenizer of BERT's kind"):
            Tokenizer(tiny.model(tmp_path / family, family), TokenizerOptions(lowercase=True))
        assert Tokenizer(tmp_path / family).cased


def test_cutting_and_padding_in_the_file_do_not_count(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 has both in its file: 128 tokens, whatever the text."""
    tokenizer = Tokenizer(tiny.model(tmp_path))
    tokenizer.backend.enable_truncation(4)
    tokenizer.backend.enable_padding(length=128)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert len(ids(Tokenizer(tmp_path).encode(["a b c d e"], TokenRule(64))[0])) == 7


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, r"has no tokenizer: must hold tokenizer\.json, vocab\.txt, vocab\.json and merges\.txt, or sentencepiece"),
        ({"tokenizer.json": b"{"}, r"tokenizer\.json: is broken"),
        ({"tokenizer.json": b"{}"}, "its tokenizer cannot be read"),
        ({"tokenizer.json": b'{"version":"1.0","model":{"type":"None"}}'}, "its tokenizer cannot be read"),
        ({"vocab.txt": b"\xff\xfe"}, r"vocab\.txt: cannot be read"),
        ({"vocab.txt": b"the\nfox\n"}, r"vocab\.txt: has no '\[UNK\]', which a vocabulary must have"),
        ({"vocab.txt": b"[CLS]\n[UNK]\n[PAD]\n"}, r"has no '\[SEP\]'"),
        ({"vocab.json": b"{}", "merges.txt": b"#version: 0.2\n"}, r"vocab\.json: has no '<unk>'"),
        ({"vocab.json": b'{"a": "b"}', "merges.txt": b""}, r"vocab\.json: 'a' has the id 'b': must be a whole number"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"x y\n"}, "its tokenizer cannot be read"),
        ({"tokenizer_config.json": b"[]"}, r"tokenizer_config\.json: must hold a JSON object"),
        ({"tokenizer_config.json": b'{"do_lower_case": 3}', "vocab.txt": b"[CLS]\n[SEP]\n[UNK]\n[PAD]\n"}, "do_lower_case=3: must be true or false"),
    ],
)  # fmt: skip
def test_files_that_are_no_tokenizer(files: dict[str, bytes], expected: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=expected) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("family", "part", "key", "value"), [("bert", "post_processor", "special_tokens", {}), ("xlm-roberta", "model", "unk_id", None)]
)  # fmt: skip
def test_files_with_which_the_library_fails_later(family: str, part: str, key: str, value: Any, tmp_path: Path) -> None:
    """It takes a template that names a token which it does not define, and then panics; or it fails with some texts only."""
    known = json.loads((tiny.model(tmp_path, family) / "tokenizer.json").read_text())
    known[part][key] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(SettingsError, match="its tokenizer cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_token_without_a_row_is_refused_in_the_text_that_contains_it(family: str, tmp_path: Path) -> None:
    size, path = tiny_tokens.size(family), tiny.model(tmp_path, family) / "tokenizer.json"
    made = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made["added_tokens"].append({"id": size, "content": "<image_soft_token>", "special": True, **flags})
    path.write_text(json.dumps(made))
    tokenizer = Tokenizer(tmp_path, vocab_size=size)
    texts = ["first do it", "first <image_soft_token> do", ("it", "<image_soft_token>"), ["first", "do"]]
    found = tokenizer.encode(texts, TokenRule(30))
    assert [isinstance(each, InvalidRequest) for each in found] == [False, True, True, False]
    said = f"the text contains '<image_soft_token>', the token {size}, and the weights have {size} words: leave it out"
    pieces = tokenizer.split("first <image_soft_token> do", TokenRule(30))
    assert isinstance(pieces, InvalidRequest)
    assert rule(found[1]) == pieces.message == said
    with pytest.raises(SettingsError, match=r"are of different models"):  # it is around every text
        Tokenizer(tmp_path, vocab_size=2)


# A text's tokens by its known words are those of the package, and texts that this cannot know are left to it.


ODD = [chr(code) for code in (*range(1, 0x250), *range(0x2000, 0x2070), 0x301, 0x338, 0x4E2D, 0x1F600, 0xFEFF)]
# Letters, marks, symbols and punctuation of all scripts.
WIDE = [chr(code) for code in range(1, 0x3400) if chr(code).isprintable() or not code % 7]


@pytest.fixture(scope="module", params=[False, True], ids=["lowercase", "cased"])
def of_words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    tiny_tokens.write_vocabulary(directory, cased=request.param)
    return Tokenizer(directory)


def at_once(of_words: Tokenizer, texts: list[Any], max_length: int = 50) -> Any:
    return of_words.at_once(texts, TokenRule(max_length))


def test_the_tokens_of_words_are_those_of_the_text(of_words: Tokenizer) -> None:
    chance, known = Random(1), of_words._known_words
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

    for each, made in zip(of_words.backend.encode_batch(texts, add_special_tokens=False), found, strict=True):
        assert made is None or made == each.ids
    assert sum(made is not None for made in found) > 0.6 * len(texts)
    assert found[-1] is not None
    assert known.ids("half \ud800", inf) is None
    assert known.ids("first [MASK] do it", inf) is known.ids("first [mask] do it", inf) is None


def test_only_texts_of_known_words_are_tokenized_at_once(of_words: Tokenizer) -> None:
    text = " ".join(f"word{place}" for place in range(reading.NEW_AT_ONCE + 1))
    assert at_once(of_words, [text]) is None
    (whole,) = of_words.encode([text], TokenRule(50))

    found = at_once(of_words, [text, ("first", "then"), ""])

    assert found[:2] == [whole, *of_words.encode([("first", "then")], TokenRule(50))]
    assert "empty" in rule(found[2])
    assert at_once(of_words, ["do it new1 new2"]) == of_words.encode(["do it new1 new2"], TokenRule(50))
    (cut,) = at_once(of_words, [text], max_length=5)
    assert cut == of_words.encode([text], TokenRule(5))[0]
    assert cut.truncated
    for other in (["a", "list"], [1, 2], "a" * (reading.LONGEST_KNOWN + 1), "a " * reading.LONGEST_TEXT):
        assert at_once(of_words, ["do it", other]) is None


def test_words_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_WORDS", 10)
    asked: list[str] = []

    def encode(words: list[str]) -> list[list[int]]:
        asked.extend(words)
        return [[len(word)] for word in words]

    known = reading.KnownWords(encode, [])

    assert known.ids("a bb a ccc", inf) == [1, 2, 1, 3]
    assert known.ids("bb, a", inf) == [2, 1, 1]
    assert asked == ["a", "bb", "ccc", ","]
    assert known.ids(" ".join(map(str, range(9))), inf) == [1] * 9
    assert known.ids("a", inf) == [1]
    assert asked.count("a") == 2


def test_other_tokenizers_know_no_words(tmp_path: Path) -> None:
    tiny.model(tmp_path, family="roberta")

    assert at_once(Tokenizer(tmp_path), ["do it"]) is None


# Long texts in pieces: nothing is lost, and words stay whole where they can.


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
    for text in (
        "a" * (reading.MOST_SPLIT + 1),
        ["a"] * (reading.MOST_SPLIT + 1),
        ("b", "a" * (reading.MOST_SPLIT + 1)),
    ):
        assert f"must have at most {reading.MOST_SPLIT} to be read in pieces" in str(
            tokenizer.split(text, TokenRule(16))
        )


def test_shares_fill_the_room_and_take_from_the_longer() -> None:
    for first, second, room in itertools.product(range(1, 9), range(1, 9), range(2, 12)):
        kept, other = pair_lengths(first, second, room)
        assert kept + other == min(first + second, room)
        if first + second > room:
            assert abs(kept - other) <= 1 or (kept == first < other) or (other == second < kept)


# Token ids that the model's own tokenizer would not make of the text that they stand for.


@pytest.fixture(scope="module", params=["bert", "roberta"])
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Read the tokenizer of a small model."""
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("foreign"), request.param)).tokenizer()


def ids_of(of_family: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, special ones included."""
    (found,) = of_family.encode([text], TokenRule(32))
    assert isinstance(found, Tokenized)
    assert not found.foreign
    return [int.from_bytes(found.ids[at : at + 4], "little") for at in range(0, len(found.ids), 4)]


def test_ids_that_the_tokenizer_has_made_are_its_own(of_family: Tokenizer) -> None:
    own = ids_of(of_family, "the river")
    special = len(of_family.template.first) + len(of_family.template.last)
    bare = own[len(of_family.template.first) : len(own) - len(of_family.template.last)]
    found = of_family.encode([own, bare, own[:-1], [*own, *own], own[:1]], TokenRule(64))
    assert special > 0
    assert [isinstance(each, Tokenized) and each.foreign for each in found] == [False] * 5


def test_ids_that_it_would_not_make_are_foreign(of_family: Tokenizer) -> None:
    first, last = list(of_family.template.first), list(of_family.template.last)
    known = of_family.vocabulary
    letters = [
        known["r"],
        *(known.get(f"##{letter}", known[letter]) for letter in "ight"),
    ]  # "right" is one token, or two
    found = of_family.encode([letters, [*first, *letters, *last]], TokenRule(64))
    assert [isinstance(each, Tokenized) and each.foreign for each in found] == [True, True]


# tokenizer.py with inputs that are long, and made to be dear: what the model does not read costs neither time nor memory.


# Prints how many bytes of memory it takes to tokenize what `text` makes.
MEASURED = """
import resource, sys
from pathlib import Path
from weir.text_models.texts import TokenRule
from weir.text_models.tokenizer import Tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

tokenizer = Tokenizer(Path(sys.argv[1]))
tokenizer.encode([[1, 2, 3], ["a", "b"]], TokenRule(32))
text = {text}
before = peak()
tokenizer.encode([text], TokenRule(32))
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("text", ["[10, 11] * 500_000", '["abab", "baba"] * 200_000'], ids=["ids", "words"])
def test_of_many_ids_and_words_those_are_tokenized_that_the_model_reads(text: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED.format(text=text), str(tiny.model(tmp_path, kind))]
    measured = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(measured.stdout) < 50_000_000


def spent(work: Callable[[], object]) -> float:
    """Return how many seconds of CPU time `work` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def test_pairs_are_found_in_time_that_grows_with_the_text() -> None:
    texts = " ||| " * 40_000, "a" * 100_000 + "|||", " " * 200_000 + "|||" + " " * 200_000, "a ||| " * 40_000
    assert spent(lambda: [parse_text(text, "|||", 10) for text in texts]) < 1.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a ||| b ||| c", ("a ||| b", "c")),
        ("a ||| ", ("a ||| ",)),
        (" ||| b", (" ||| b",)),
        ("a ||| b ||| ", ("a", "b |||")),
        ("  a  |||  b\n", ("a", "b")),
        ("a|||b", ("a|||b",)),
        ("a ||| ||| b", ("a |||", "b")),
        ("|||", ("|||",)),
        (" ||| ", (" ||| ",)),
    ],
)
def test_a_pair_is_cut_at_the_last_separator_with_text_on_both_sides(text: str, parts: tuple[str, ...]) -> None:
    assert parse_text(text, "|||", 10).texts == parts


def test_words_that_are_almost_too_long_are_read_once() -> None:
    text = ("a" * (reading.LONGEST_WORD - 1) + " ") * 300
    assert spent(lambda: reading.LONG_WORD.sub("", text)) < 2.0
    assert reading.LONG_WORD.sub("<>", f"{text}{'b' * reading.LONGEST_WORD} c") == f"{text}<> c"


def test_words_without_tokens_do_not_end_a_list_of_words(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path)
    tokenizer, whole = Tokenizer(directory), Tokenizer(directory, TokenizerOptions(special_tokens=False))
    words = ["\u200b"] * 500 + ["a", "b"]
    for each in (tokenizer, whole):
        assert each.encode([words], TokenRule(8)) == each.encode([["a", "b"]], TokenRule(8))


NO_TYPES = {"model_input_names": ["input_ids", "attention_mask"]}


def retyped(directory: Path, change: dict[str, int]) -> Path:
    """Make the tokenizer put special tokens and a second text of these types around a pair."""
    path = directory / "tokenizer.json"
    made = json.loads(path.read_text())
    names = made["model"]["vocab"]
    special = {name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}

    def piece(name: str, kind: str = "SpecialToken", place: str = "") -> dict[str, Any]:
        return {kind: {"id": name, "type_id": change.get(place or name, 0)}}

    made["post_processor"] = {
        "type": "TemplateProcessing", "special_tokens": special,
        "single": [piece("[CLS]"), piece("A", "Sequence"), piece("[SEP]")],
        "pair": [piece("[CLS]"), piece("A", "Sequence"), piece("[SEP]", place="middle"), piece("B", "Sequence"), piece("[SEP]", place="end")],
    }  # fmt: skip
    path.write_text(json.dumps(made))
    return directory


@pytest.mark.parametrize(
    ("tokens", "settings", "lead"),
    [
        ("bert", {}, 0), ("bert", {"tokenizer_class": "BertTokenizerFast"}, 0), ("bert", {"tokenizer_class": None}, 0), ("bert", NO_TYPES, None),
        ("bert", {"tokenizer_class": "PreTrainedTokenizerFast"}, None), ("bert", {"tokenizer_class": "AlbertTokenizer"}, None),
        ("bert", {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, 0),
        ("roberta", {}, None), ("xlm-roberta", {}, None), ("mpnet", {}, None),
    ],
)  # fmt: skip
def test_a_class_of_tokenizers_gives_types_or_does_not(
    tokens: str, settings: dict[str, Any], lead: int | None, tmp_path: Path
) -> None:
    tiny.model(tmp_path, tokenizer=False)
    tiny_tokens.write(tmp_path, tokens)
    assert Tokenizer(tiny.change(tmp_path / "tokenizer_config.json", **settings)).type_lead == lead


def test_the_separator_before_the_second_text_may_have_its_type(tmp_path: Path) -> None:
    directory = retyped(tiny.model(tmp_path), {"middle": 1, "B": 1, "end": 1})
    assert Tokenizer(directory).type_lead == 1
    text = TokenIds(np.array([2, 5, 3, 6, 3], np.int32), 3)
    for lead, types in ((1, [0, 0, 1, 1, 1]), (0, [0, 0, 0, 1, 1]), (None, [0] * 5)):
        assert padded_inputs([text], pad_id=0, mask_special=False, type_lead=lead).types.tolist() == [types]


def test_other_types_are_refused_when_the_model_is_read(tmp_path: Path) -> None:
    directory = retyped(tiny.model(tmp_path), {"B": 1})
    with pytest.raises(SettingsError, match=r"types of a pair of texts are \[0, 0, 0, 1, 0\]: must be 0 and then 1"):
        Tokenizer(directory)


@pytest.mark.parametrize("settings", [{}, NO_TYPES])
def test_a_score_is_computed_with_these_types(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny.change(tiny.model(tmp_path / "model", labels=1) / "tokenizer_config.json", **settings)
    model = opened(directory, tmp_path / "cache")
    (read,) = model.preprocess_batch([("first do it", "then do it right")])
    ids = read.ids[None]
    types = np.zeros_like(ids) if settings else (np.arange(len(read.ids)) >= read.second).astype(np.int32)[None]
    runtime = open_runtime(
        read_checkpoint(directory), Recipe(Pooling.LOGITS), ComputingSettings(cache=str(tmp_path / "cache"))
    )
    (expected,) = runtime.run(Inputs(ids, np.ones_like(ids), types, np.ones(ids.shape, np.float32)))
    np.testing.assert_array_equal(model.predict([read])[0], expected[0])
