"""Every text is checked by itself; what is accepted becomes ids that fit the model."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.tokens.reading import ids, rule

from weir.errors import InvalidRequest, SettingsError
from weir.text_models.texts import Tokenized, TokenizerOptions, TokenRule
from weir.text_models.tokenizer import Tokenizer, pair_lengths


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


def test_a_megabyte_in_one_text(tokenizer: Tokenizer) -> None:
    text = (SENTENCE * 12_000)[: 1 << 20]
    cut, word = tokenizer.encode([text, "x" * (1 << 20)], TokenRule(64))
    (refused,) = tokenizer.encode([text], TokenRule(64, truncate=False))
    assert ids(cut)[:-1] == ids(tokenizer.encode([SENTENCE * 20], TokenRule(64))[0])[:-1]
    assert ids(word) == [2, 1, 3]
    assert "has more than the 64 tokens" in rule(refused)


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
