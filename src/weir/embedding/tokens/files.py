"""The library that cuts texts into tokens, set up from a model's files.

It reads tokenizer.json, or is made of a vocab.txt (WordPiece), of a vocab.json and a merges.txt (byte-level BPE), or of a SentencePiece file, which
XLM-R and CamemBERT had before tokenizer.json. The library is Rust and releases the interpreter's lock.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from weir.embedding.checkpoint.config import JsonDocument, read_document
from weir.embedding.texts import TokenizerOptions
from weir.errors import SettingsError


@contextmanager
def named(directory: Path) -> Iterator[None]:
    """Raise SettingsError naming `directory` for whatever the library raises in the block."""
    try:
        yield
    except SettingsError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise SettingsError(f"{directory}: its tokenizer cannot be read: {error}") from None


FILES = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "tokenizer.model")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how a field of a protocol buffer is written
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


class Malformed(ValueError):
    """These bytes are not what they should be."""


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
    pieces, characters = _read_pieces(path)
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


def _read_pieces(path: Path) -> tuple[list[Piece], bytes]:
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


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protocol buffer. Raises Malformed."""
    place = 0
    while place < len(message):
        tag, place = read_varint(message, place)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == VARINT:
            value, place = read_varint(message, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            value, place = int.from_bytes(message[place : place + size], "little"), place + size
        elif kind == BYTES:
            size, place = read_varint(message, place)
            value, place = message[place : place + size], place + size
        else:
            raise Malformed(f"a field is of the kind {kind}, which there is not")
        if place > len(message):
            raise Malformed("a field is cut off")
        yield number, value


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number in groups of seven bits, lowest first, and the place behind it."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise Malformed("a number is cut off")


# The special tokens by their role, as BERT and DistilBERT call them, and as RoBERTa and MPNet do.
SQUARE = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ANGLE = {"unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}


def from_vocabulary(directory: Path, config: JsonDocument, options: TokenizerOptions) -> Any:
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


def from_merges(directory: Path, config: JsonDocument) -> Any:
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


def _special(directory: Path, config: JsonDocument, names: dict[str, str]) -> dict[str, str]:
    """Return the special tokens by role: what the files beside the vocabulary call them, else `names`."""
    path = directory / "special_tokens_map.json"
    mapped = read_document(path).values if path.is_file() else {}
    named = {}
    for role, usual in names.items():
        given = mapped.get(f"{role}_token") or config.values.get(f"{role}_token") or usual
        named[role] = given.get("content", usual) if isinstance(given, dict) else str(given)
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


JSON = "tokenizer.json"
NO_OVERRIDES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # these take tokenizer.json as it is


def load_pieces(directory: Path, options: TokenizerOptions) -> Any:
    """Return a `tokenizers.Tokenizer` that neither cuts nor pads, from the files in `directory`.

    Raises SettingsError naming the files if none of the forms is there, one is broken, or an option does not suit the model.
    """
    try:
        import tokenizers
    except ImportError:
        raise SettingsError("tokenizers is missing: pip install weir-serving[embed]") from None
    # Texts are given to it by several threads already; its own would be as many again, and must not be forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = directory / "tokenizer_config.json"
    config = read_document(path) if path.is_file() else JsonDocument(path, {})
    with named(directory):
        pieces = _read(directory, config, options)
    _refuse_case(pieces, directory, options.lowercase)
    if options.lowercase_text:
        lower = tokenizers.normalizers.Lowercase()
        known = pieces.normalizer
        pieces.normalizer = lower if known is None else tokenizers.normalizers.Sequence([lower, known])
    return pieces


def _read(directory: Path, config: JsonDocument, options: TokenizerOptions) -> Any:
    import tokenizers

    if (directory / JSON).is_file():
        return tokenizers.Tokenizer.from_str(_described(directory / JSON, config, options))
    if (directory / "vocab.txt").is_file():
        return from_vocabulary(directory, config, options)
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return from_merges(directory, config)
    if found := [directory / name for name in FILES if (directory / name).is_file()]:
        return from_pieces(found[0])
    raise SettingsError(
        f"{directory}: has no tokenizer: must hold {JSON}, vocab.txt, vocab.json and merges.txt, or {FILES[0]}"
    )


def _described(path: Path, config: JsonDocument, options: TokenizerOptions) -> str:
    """Return the text of a tokenizer.json without cutting and padding, and with what the settings beside it say otherwise."""
    try:
        parts = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken: {error}") from None
    parts["truncation"] = parts["padding"] = msgspec.Raw(b"null")
    changed = _overrides(config)
    if options.lowercase is not None:
        changed["lowercase"] = options.lowercase
    for part, kind, names in (
        ("normalizer", "BertNormalizer", ("lowercase", "strip_accents", "handle_chinese_chars")),
        ("pre_tokenizer", "ByteLevel", ("add_prefix_space",)),
    ):
        now = {name: changed[name] for name in names if name in changed}
        if now and part in parts:
            parts[part] = msgspec.Raw(msgspec.json.encode(_changed(msgspec.json.decode(parts[part]), kind, now)))
    return msgspec.json.encode(parts).decode()


def _overrides(config: JsonDocument) -> dict[str, Any]:
    """What tokenizer_config.json says otherwise than tokenizer.json counts, as with the tokenizers made for these families."""
    if config.values.get("tokenizer_class") in NO_OVERRIDES:
        return {}
    names = {
        "do_lower_case": "lowercase", "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars", "add_prefix_space": "add_prefix_space",
    }  # fmt: skip
    return {here: config.switch(there) for there, here in names.items() if there in config}


def _changed(state: Any, kind: str, values: dict[str, Any]) -> Any:
    """Change the part of this kind, wherever it stands in a sequence of parts."""
    if not isinstance(state, dict):
        return state
    if state.get("type") == kind:
        return state | values
    for key in ("normalizers", "pretokenizers"):
        if key in state:
            state = state | {key: [_changed(part, kind, values) for part in state[key]]}
    return state


def _refuse_case(pieces: Any, directory: Path, lowercase: bool | None) -> None:
    known = b"" if pieces.normalizer is None else pieces.normalizer.__getstate__()
    if lowercase is not None and b'"BertNormalizer"' not in known:
        raise SettingsError(
            f"lowercase={lowercase}: {directory} has no tokenizer of BERT's kind: its case cannot be chosen"
        )
