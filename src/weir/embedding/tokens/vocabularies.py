"""Tokenizers from vocabularies alone: WordPiece from vocab.txt, byte-level BPE from vocab.json and merges.txt."""

from pathlib import Path
from typing import Any

from weir.embedding.checkpoint.config import Document, read_document
from weir.embedding.tokens.options import TokenizerOptions
from weir.errors import SettingsError

# The special tokens by their role, as BERT and DistilBERT call them, and as RoBERTa and MPNet do.
SQUARE = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ANGLE = {"unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}


def from_vocabulary(directory: Path, config: Document, options: TokenizerOptions) -> Any:
    """Return the WordPiece tokenizer of a vocab.txt: a token a line, its number the line's.

    Texts are brought to lower case if the options say so, else tokenizer_config.json, else if the vocabulary has no capitals.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = directory / "vocab.txt"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    if lines[-1] == "":
        lines.pop()
    vocabulary = {token: number for number, token in enumerate(lines)}
    square = SQUARE["cls"] in vocabulary
    named = _special(directory, config, SQUARE if square else ANGLE | {"unk": "[UNK]"})
    _check(path, vocabulary, named)
    lowercase = options.lowercase
    if lowercase is None:
        lowercase = config.switch("do_lower_case", default=not has_capitals(lines))
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token=named["unk"], max_input_chars_per_word=100))
    pieces.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.switch("tokenize_chinese_chars", default=True),
        strip_accents=config.switch("strip_accents") if "strip_accents" in config else None,
        lowercase=lowercase,
    )
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece(prefix="##")
    return _with_special(pieces, vocabulary, named, joins_twice=not square)


def from_merges(directory: Path, config: Document) -> Any:
    """Return the byte-level BPE tokenizer of a vocab.json and a merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = read_document(directory / "vocab.json").values
    for token, number in vocabulary.items():
        if type(number) is not int or number < 0:
            raise SettingsError(f"{directory / 'vocab.json'}: {token!r} has the id {number!r}: must be a whole number")
    pieces = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    named = _special(directory, config, ANGLE)
    _check(directory / "vocab.json", vocabulary, named)
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.switch("add_prefix_space"))
    pieces.decoder = decoders.ByteLevel()
    return _with_special(pieces, vocabulary, named, joins_twice=True)


def _special(directory: Path, config: Document, names: dict[str, str]) -> dict[str, str]:
    """Return the special tokens by role: what the files beside the vocabulary call them, else `names`."""
    path = directory / "special_tokens_map.json"
    mapped = read_document(path).values if path.is_file() else {}
    named = {}
    for role, usual in names.items():
        said = mapped.get(f"{role}_token") or config.values.get(f"{role}_token") or usual
        named[role] = said.get("content", usual) if isinstance(said, dict) else str(said)
    return named


def _check(path: Path, vocabulary: dict[str, Any], named: dict[str, str]) -> None:
    for role in ("unk", "sep", "cls", "pad"):
        if named[role] not in vocabulary:
            raise SettingsError(f"{path}: has no {named[role]!r}, which a vocabulary must have")


def has_capitals(tokens: list[str]) -> bool:
    """Return whether a vocabulary has words with capitals, other than `[unused0]` and the like."""
    return any(token != token.lower() and not token.startswith(("[", "<")) for token in tokens)


def _with_special(pieces: Any, vocabulary: dict[str, int], named: dict[str, str], *, joins_twice: bool) -> Any:
    """Put special tokens around a text, and one or two of them between two texts."""
    from tokenizers import AddedToken, processors

    # A mask takes the space before it along where words carry theirs.
    pieces.add_special_tokens(
        [
            AddedToken(token, lstrip=role == "mask" and joins_twice)
            for role, token in named.items()
            if token in vocabulary
        ]
    )
    cls, sep = ((named[role], vocabulary[named[role]]) for role in ("cls", "sep"))
    if joins_twice:
        pieces.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=False)
    else:
        pieces.post_processor = processors.BertProcessing(sep, cls)
    return pieces
