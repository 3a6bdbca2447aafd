"""Tokenizers from SentencePiece's own files, as XLM-R and CamemBERT had them before tokenizer.json.

The file is a protocol buffer: pieces (1), each with its text (1) and score (2); how they were trained (2), with the kind of model (3); and how
texts are normalised (3), with a table of characters (2). (SentencePiece, sentencepiece_model.proto)
"""

import struct
from pathlib import Path
from typing import Any

from weir.embedding.checkpoint.config import read_document
from weir.embedding.checkpoint.table import Malformed, fields
from weir.errors import SettingsError

FILES = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "tokenizer.model")
UNIGRAM = 1  # of the kinds of model, the one that is the default too

Piece = tuple[str, float]
# The tokens that fairseq, where both were trained, put before those of the file, and how many of the file's own it left out.
BEFORE: dict[str, tuple[list[Piece], int]] = {
    "xlm-roberta": ([("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)], 3),
    "camembert": (
        [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)], 1,
    ),
}  # fmt: skip
UNKNOWN = 3  # the place of <unk> in both


def from_pieces(path: Path) -> Any:
    """Return the tokenizer of a SentencePiece file, for the kind of model that config.json beside it names.

    Raises SettingsError if it is broken, or of a model whose vocabulary is arranged in a way that is not known.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    family = read_document(path.with_name("config.json")).text("model_type")
    if family not in BEFORE:
        raise SettingsError(
            f"{path}: a SentencePiece file is read for {' and '.join(BEFORE)}; for {family}, make a tokenizer.json where "
            "transformers is installed: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    pieces, characters = _read(path)
    before, left_out = BEFORE[family]
    vocabulary = [*before, *pieces[left_out:], ("<mask>", 0.0)]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=UNKNOWN))
    table = [normalizers.Precompiled(characters)] if characters else []
    made.normalizer = normalizers.Sequence([*table, normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    around = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=around
    )
    return made


def _read(path: Path) -> tuple[list[Piece], bytes]:
    """Return the pieces with their scores, and the table of characters."""
    pieces: list[Piece] = []
    characters = b""
    try:
        for number, value in fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes) and dict(fields(value)).get(3, UNIGRAM) != UNIGRAM:
                raise SettingsError(f"{path}: must be a Unigram model, the kind that XLM-R and CamemBERT have")
            elif number == 3 and isinstance(value, bytes):
                characters = _bytes(dict(fields(value)).get(2, b""))
        if len(pieces) < 4:
            raise Malformed("it has no pieces")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (Malformed, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken, or no SentencePiece model: {error}") from None
    return pieces, characters


def _piece(message: bytes) -> Piece:
    known = dict(fields(message))
    score = known.get(2, 0)
    if not isinstance(score, int) or score >= 1 << 32:
        raise Malformed("a piece has no score")
    return _bytes(known.get(1, b"")).decode(), struct.unpack("<f", score.to_bytes(4, "little"))[0]


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise Malformed("a number stands where a text should")
    return value
