"""SentencePiece's own files give the tokenizer that tokenizer.json describes."""

import json
import struct
from pathlib import Path

import pytest
from tests.text_models import tiny, tiny_towers
from tests.text_models.tokens.directories import PAIRS, TEXTS
from tests.text_models.tokens.reading import ids
from tests.text_server.bert_as_service.bundles import field, varint

from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.texts import TokenRule
from weir.text_models.tokenizer import Tokenizer

NAME = "sentencepiece.bpe.model"


def piece(text: str, score: float) -> bytes:
    return field(1, field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score))


def replace_by_pieces(directory: Path, first: list[str]) -> list[tuple[str, float]]:
    """Write the vocabulary of tokenizer.json as SentencePiece does, and take tokenizer.json away."""
    known = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"][4:-1]
    pieces = [(token, 0.0) for token in first] + [(token, score) for token, score in known]
    trained = field(2, field(3, 1) + field(4, 1000)) + field(3, field(1, b"identity") + field(3, 1))
    (directory / NAME).write_bytes(b"".join(piece(*one) for one in pieces) + trained)
    (directory / "tokenizer.json").unlink()
    return pieces


def test_xlm_r(tmp_path: Path) -> None:
    before = Tokenizer(tiny.model(tmp_path, "xlm-roberta"))
    replace_by_pieces(tmp_path, ["<unk>", "<s>", "</s>"])
    after = Tokenizer(tmp_path)
    assert after.vocabulary == before.vocabulary
    assert after.special_ids == before.special_ids
    for texts in (TEXTS, PAIRS):
        assert after.encode(texts, TokenRule(64)) == before.encode(texts, TokenRule(64))


def test_camembert(tmp_path: Path) -> None:
    tiny.model(tmp_path, "xlm-roberta", model_type="camembert")
    pieces = replace_by_pieces(tmp_path, ["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (5, 6, 1)
    assert tokenizer.vocab_size == len(pieces) - 1 + 5 + 1
    assert tokenizer.tokens(ids(tokenizer.encode(["first do it"], TokenRule(64))[0])) == [
        "<s>",
        "▁first",
        "▁do",
        "▁it",
        "</s>",
    ]


def test_siglip(tmp_path: Path) -> None:
    before = read_checkpoint(tiny_towers.model(tmp_path, "siglip")).tokenizer()
    known = tiny.read(tmp_path / "tokenizer.json")["model"]["vocab"]
    trained = field(2, field(3, 1)) + field(3, field(1, b"identity"))
    (tmp_path / "spiece.model").write_bytes(b"".join(piece(*one) for one in known) + trained)
    (tmp_path / "tokenizer.json").unlink()
    after = read_checkpoint(tmp_path).tokenizer()
    texts = ["First, do it!", "the mill's  TURNS faster than yesterday", "?!"]
    assert after.encode(texts, TokenRule(30)) == before.encode(texts, TokenRule(30))


def test_deberta_with_the_file_of_its_training_alone(tmp_path: Path) -> None:
    tiny.model(tmp_path, "deberta-v3", tokenizer=False)
    words = ["\u2581first", "\u2581do", "\u2581it", "!", "\u2581do it"]
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trained = field(2, field(3, 1)) + field(3, field(1, b"identity"))
    pieces = [piece(token, 0.0) for token in special] + [piece(word, -float(place)) for place, word in enumerate(words)]
    (tmp_path / "spm.model").write_bytes(b"".join(pieces) + trained)
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.vocabulary["[MASK]"] == len(pieces)
    read = tokenizer.encode(["  first do   it! ", ("do", "it"), "Do"], TokenRule(64))
    one, pair, odd = [tokenizer.tokens(ids(each)) for each in read]
    assert one == ["[CLS]", "\u2581first", "\u2581do", "\u2581it", "!", "[SEP]"]
    assert pair == ["[CLS]", "\u2581do", "[SEP]", "\u2581it", "[SEP]"]
    assert "[UNK]" in odd
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true, "split_by_punct": true}')
    (lower,) = Tokenizer(tmp_path).encode(["DO"], TokenRule(64))
    assert tokenizer.tokens(ids(lower)) == ["[CLS]", "\u2581do", "[SEP]"]
    (tmp_path / "spm.model").write_bytes(b"".join(pieces[1:]) + trained)
    with pytest.raises(SettingsError, match=r"spm.model: has no piece '\[PAD\]'"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is broken, or is not a SentencePiece model: it has no pieces"),
        (b"\x0a\x05ab", "is broken"),
        (field(1, field(1, b"\xff")) * 5, "is broken"),
        (field(1, field(1, 3)) * 5, "a field has a number, must have a text"),
        (field(1, field(2, b"x")) * 5, "a piece has no score"),
        (piece("a", 0) * 5 + field(2, field(3, 2)), "must be a Unigram model"),
    ],
)
def test_files_that_are_broken(content: bytes, rule: str, tmp_path: Path) -> None:
    tiny.model(tmp_path, "xlm-roberta", tokenizer=False)
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(SettingsError, match=rule) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / NAME) in caught.value.message


def test_a_family_whose_ids_are_numbered_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    tiny.model(tmp_path, "roberta", tokenizer=False)
    (tmp_path / NAME).write_bytes(b"")
    with pytest.raises(SettingsError, match=r"for roberta, make a tokenizer\.json where transformers is installed"):
        Tokenizer(tmp_path)
