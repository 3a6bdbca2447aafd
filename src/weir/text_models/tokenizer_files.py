"""Load a model's tokenizer: build a `tokenizers.Tokenizer` from the files in the model's directory, and find the special tokens that it puts around texts.

The first of these forms that the directory has is used:

- tokenizer.json;
- vocab.txt: WordPiece;
- vocab.json and merges.txt: byte-level BPE;
- a SentencePiece file, which XLM-R, CamemBERT and DeBERTa v2 and v3 had before tokenizer.json.

The package tokenizers is written in Rust and releases the interpreter's lock while it works.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir.errors import SettingsError, add_extra, reason_of
from weir.text_models.formats import JsonDocument, Malformed, fields, read_document, read_optional
from weir.text_models.texts import TokenizerOptions


@contextmanager
def as_settings_error(directory: Path) -> Iterator[None]:
    """Turn whatever the package tokenizers raises in the block, panics of Rust included, into a SettingsError that names `directory`."""
    try:
        yield
    except SettingsError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise SettingsError(f"{directory}: its tokenizer cannot be read: {error}") from None


SENTENCEPIECE_FILES = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model", "tokenizer.model")
UNIGRAM = 1  # TrainerSpec.ModelType.UNIGRAM in sentencepiece_model.proto, which is also the default

Piece = tuple[str, float]  # a piece of the vocabulary and its score
# Both families were trained with fairseq, which puts tokens of its own before the pieces of the file and drops the first pieces of the file:
# the tokens that it adds, and the number of pieces that it drops.
FAIRSEQ_TOKENS: dict[str, tuple[list[Piece], int]] = {
    "xlm-roberta": ([("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)], 3),
    "camembert": (
        [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)],
        1,
    ),
}
UNKNOWN = 3  # the id of <unk> in both families


def from_sentencepiece(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a SentencePiece file. The `model_type` in config.json next to it decides how the ids are numbered.

    Raises SettingsError if a file is broken, if the SentencePiece model is not a Unigram model, or if the numbering of the family is not known.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    family = read_document(path.with_name("config.json")).text("model_type")
    if family in _NUMBERED:
        return _NUMBERED[family](path)
    if family not in FAIRSEQ_TOKENS:
        raise SettingsError(
            f"{path}: a SentencePiece file is read for {', '.join(FAIRSEQ_TOKENS)} and {' and '.join(_NUMBERED)}; for {family}, make a tokenizer.json where "
            "transformers is installed: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    pieces, charsmap = _read_sentencepiece(path)
    added, dropped = FAIRSEQ_TOKENS[family]
    tokenizer = Tokenizer(models.Unigram([*added, *pieces[dropped:], ("<mask>", 0.0)], unk_id=UNKNOWN))
    table = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*table, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    return tokenizer


def _for_deberta(path: Path) -> Any:
    """Return the tokenizer of DeBERTa v2 and v3: ids are numbers of pieces, the file has [CLS], [SEP], [PAD] and [UNK], and [MASK] comes behind them."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

    config = read_optional(path.with_name("tokenizer_config.json"))
    special = [BERT_SPECIAL_TOKENS[role] for role in ("unk", "cls", "sep", "pad")]
    lower = [normalizers.Lowercase()] if config.switch("do_lower_case") else []
    apart = [pre_tokenizers.Punctuation("isolated")] if config.switch("split_by_punct") else []
    tokenizer, numbers = _numbered(path, special, [*lower, normalizers.Strip()], apart)
    tokenizer.add_special_tokens([AddedToken(BERT_SPECIAL_TOKENS["mask"])])
    cls, sep = ((BERT_SPECIAL_TOKENS[role], numbers[BERT_SPECIAL_TOKENS[role]]) for role in ("cls", "sep"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


def _for_siglip(path: Path) -> Any:
    """Return the tokenizer of SigLIP: ids are numbers of pieces, and a text ends in </s>."""
    from tokenizers import processors

    tokenizer, numbers = _numbered(path, ["<unk>", "</s>"])
    end = [("</s>", numbers["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", end)
    return tokenizer


_NUMBERED: Mapping[str, Callable[[Path], Any]] = {"deberta-v2": _for_deberta, "siglip": _for_siglip}


def _numbered(
    path: Path, special: list[str], steps: Sequence[Any] = (), apart: Sequence[Any] = ()
) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer whose ids are the numbers of the pieces in a file, and these by piece; the first of the `special` tokens is that of unknown words.

    `steps` come before the normalization of the file, and `apart` divide a text before spaces do. Raises SettingsError for a special token that the file lacks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces, charsmap = _read_sentencepiece(path)
    numbers = {piece: number for number, (piece, _) in enumerate(pieces)}
    missing = [token for token in special if token not in numbers]
    if missing:
        raise SettingsError(f"{path}: has no piece {missing[0]!r}, which the model's vocabulary must have")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=numbers[special[0]]))
    table = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*steps, *table, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*apart, pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    return tokenizer, numbers


def _read_sentencepiece(path: Path) -> tuple[list[Piece], bytes]:
    """Return the pieces and `precompiled_charsmap`, the table that normalizes characters, b"" if the file has none.

    The field numbers are those of ModelProto, TrainerSpec and NormalizerSpec in sentencepiece_model.proto.
    """
    pieces: list[Piece] = []
    charsmap = b""
    try:
        for number, value in fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes) and dict(fields(value)).get(3, UNIGRAM) != UNIGRAM:
                raise SettingsError(f"{path}: must be a Unigram model, the kind that XLM-R and CamemBERT have")
            elif number == 3 and isinstance(value, bytes):
                charsmap = _bytes(dict(fields(value)).get(2, b""))
        if len(pieces) < 4:
            raise Malformed("it has no pieces")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (Malformed, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken, or is not a SentencePiece model: {error}") from None
    return pieces, charsmap


def _piece(message: bytes) -> Piece:
    values = dict(fields(message))
    score = values.get(2, 0)
    if not isinstance(score, int) or score >= 1 << 32:
        raise Malformed("a piece has no score")
    return _bytes(values.get(1, b"")).decode(), struct.unpack("<f", score.to_bytes(4, "little"))[0]


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise Malformed("a field has a number, must have a text")
    return value


# The special tokens by role, as BERT and DistilBERT write them, and as RoBERTa and MPNet do.
BERT_SPECIAL_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ROBERTA_SPECIAL_TOKENS = {"unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}


def from_wordpiece(directory: Path, config: JsonDocument, options: TokenizerOptions) -> Any:
    """Return the `tokenizers.Tokenizer` of a vocab.txt. Each line of the file is a token; its id is the number of the line, from 0.

    Texts are lowercased if `options.lowercase` is true, or if `options` do not state it and tokenizer_config.json says so, or if neither states it
    and no token has a capital letter.

    Raises SettingsError if the file cannot be read or a special token is missing.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = directory / "vocab.txt"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {reason_of(error)}") from None
    if lines[-1] == "":
        lines.pop()
    vocabulary = {token: number for number, token in enumerate(lines)}
    is_bert = BERT_SPECIAL_TOKENS["cls"] in vocabulary
    special = special_tokens(
        directory, config, BERT_SPECIAL_TOKENS if is_bert else ROBERTA_SPECIAL_TOKENS | {"unk": "[UNK]"}
    )
    _check_special_tokens(path, vocabulary, special)
    lowercase = options.lowercase
    if lowercase is None:
        lowercase = config.switch("do_lower_case", default=not has_capitals(lines))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk"], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.switch("tokenize_chinese_chars", default=True),
        strip_accents=config.switch("strip_accents") if "strip_accents" in config else None,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return _add_special_tokens(tokenizer, vocabulary, special, like_roberta=not is_bert)


def from_bpe(directory: Path, config: JsonDocument) -> Any:
    """Return the byte-level BPE `tokenizers.Tokenizer` of a vocab.json and a merges.txt.

    Raises SettingsError if vocab.json is not an object of ids by token, or a special token is missing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = read_document(directory / "vocab.json").values
    for token, number in vocabulary.items():
        if type(number) is not int or number < 0:
            raise SettingsError(f"{directory / 'vocab.json'}: {token!r} has the id {number!r}: must be a whole number")
    tokenizer = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    special = special_tokens(directory, config, ROBERTA_SPECIAL_TOKENS)
    _check_special_tokens(directory / "vocab.json", vocabulary, special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.switch("add_prefix_space"))
    tokenizer.decoder = decoders.ByteLevel()
    return _add_special_tokens(tokenizer, vocabulary, special, like_roberta=True)


def special_tokens(directory: Path, config: JsonDocument, defaults: dict[str, str]) -> dict[str, str]:
    """Return the special tokens by role: from special_tokens_map.json, else from tokenizer_config.json (`config`), else from `defaults`."""
    mapped = read_optional(directory / "special_tokens_map.json").values
    special = {}
    for role, default in defaults.items():
        given = mapped.get(f"{role}_token") or config.values.get(f"{role}_token") or default
        special[role] = given.get("content", default) if isinstance(given, dict) else str(given)
    return special


def _check_special_tokens(path: Path, vocabulary: dict[str, Any], special: dict[str, str]) -> None:
    for role in ("unk", "sep", "cls", "pad"):
        if special[role] not in vocabulary:
            raise SettingsError(f"{path}: has no {special[role]!r}, which a vocabulary must have")


def has_capitals(tokens: list[str]) -> bool:
    """Return whether any token has a capital letter. Tokens that begin with [ or <, such as [CLS] and [unused0], do not count."""
    return any(token != token.lower() and not token.startswith(("[", "<")) for token in tokens)


def _add_special_tokens(
    tokenizer: Any, vocabulary: dict[str, int], special: dict[str, str], *, like_roberta: bool
) -> Any:
    """Have `tokenizer` put special tokens around a text and between two texts: one separator as in BERT, or two as in RoBERTa. Return it."""
    from tokenizers import AddedToken, processors

    # In RoBERTa a word's token includes the space before the word, and so does a mask's.
    tokenizer.add_special_tokens(
        [
            AddedToken(token, lstrip=role == "mask" and like_roberta)
            for role, token in special.items()
            if token in vocabulary
        ]
    )
    cls, sep = ((special[role], vocabulary[special[role]]) for role in ("cls", "sep"))
    if like_roberta:
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=False)
    else:
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


JSON = "tokenizer.json"
SIGLIP = (
    "SiglipTokenizer",
    "SiglipTokenizerFast",
)  # these classes leave out punctuation, as SigLIP was trained; SigLIP 2 reads it
NO_OVERRIDES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # these classes use tokenizer.json as it is


def load_tokenizer(directory: Path, options: TokenizerOptions) -> Any:
    """Return the `tokenizers.Tokenizer` of the files in `directory`, with truncation and padding off.

    Sets TOKENIZERS_PARALLELISM=false in the environment unless the variable is set.

    Raises SettingsError naming the directory or the file if the package tokenizers is missing, if no form of tokenizer is there, if a file is
    broken, or if `options.lowercase` is given and the tokenizer has no such switch.
    """
    try:
        import tokenizers
    except ImportError:
        raise SettingsError(f"tokenizers is not installed; {add_extra('embed')}") from None
    # Several of our threads call the package already. Threads of its own would double their number, and do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = read_optional(directory / "tokenizer_config.json")
    with as_settings_error(directory):
        tokenizer = _read(directory, config, options)
    normalizer = tokenizer.normalizer
    known = b"" if normalizer is None else normalizer.__getstate__()
    if options.lowercase is not None and b'"BertNormalizer"' not in known:
        raise SettingsError(
            f"lowercase={options.lowercase}: {directory} has no tokenizer of BERT's kind: its case cannot be chosen"
        )
    if options.lowercase_text:
        steps = [tokenizers.normalizers.Lowercase()]
        if config.values.get("tokenizer_class") in SIGLIP:
            steps += _without_punctuation()
        own = [] if normalizer is None else [normalizer]
        tokenizer.normalizer = tokenizers.normalizers.Sequence([*steps, *own])
    return tokenizer


def _without_punctuation() -> list[Any]:
    """Return the steps that leave out ASCII punctuation, and then all spaces but one between two words."""
    from tokenizers import Regex, normalizers

    return [
        normalizers.Replace(Regex("[!-/:-@\\[-`{-~]"), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]


def _read(directory: Path, config: JsonDocument, options: TokenizerOptions) -> Any:
    import tokenizers

    if (directory / JSON).is_file():
        return tokenizers.Tokenizer.from_str(_adapted_json(directory / JSON, config, options))
    if (directory / "vocab.txt").is_file():
        return from_wordpiece(directory, config, options)
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return from_bpe(directory, config)
    if found := [directory / name for name in SENTENCEPIECE_FILES if (directory / name).is_file()]:
        return from_sentencepiece(found[0])
    raise SettingsError(
        f"{directory}: has no tokenizer: must hold {JSON}, vocab.txt, vocab.json and merges.txt, or {SENTENCEPIECE_FILES[0]}"
    )


def _adapted_json(path: Path, config: JsonDocument, options: TokenizerOptions) -> str:
    """Return the content of a tokenizer.json with truncation and padding off. Values in tokenizer_config.json and `options` replace its own."""
    try:
        parts = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken: {error}") from None
    parts["truncation"] = parts["padding"] = msgspec.Raw(b"null")
    overrides = _overrides(config)
    if options.lowercase is not None:
        overrides["lowercase"] = options.lowercase
    for part, kind, names in (
        ("normalizer", "BertNormalizer", ("lowercase", "strip_accents", "handle_chinese_chars")),
        ("pre_tokenizer", "ByteLevel", ("add_prefix_space",)),
    ):
        values = {name: overrides[name] for name in names if name in overrides}
        if values and part in parts:
            parts[part] = msgspec.Raw(msgspec.json.encode(_with_values(msgspec.json.decode(parts[part]), kind, values)))
    return msgspec.json.encode(parts).decode()


def _overrides(config: JsonDocument) -> dict[str, Any]:
    """Return the values of tokenizer_config.json that go before those of tokenizer.json, by their names in the latter.

    The tokenizer classes of transformers for these families apply them; the generic classes in NO_OVERRIDES do not.
    """
    if config.values.get("tokenizer_class") in NO_OVERRIDES:
        return {}
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
        "add_prefix_space": "add_prefix_space",
    }
    return {here: config.switch(there) for there, here in names.items() if there in config}


# The classes of transformers whose tokenizers give type ids, and the types of models whose tokenizers have them by default. Others give none: for their models
# every token has the type 0.
TYPED_CLASSES = ("BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer")
TYPED_MODELS = (
    "bert",
    "electra",
    "nomic_bert",
    "deberta",
    "deberta-v2",
    "ernie",
    "megatron-bert",
    "mobilebert",
    "convbert",
    "nezha",
)


def gives_types(directory: Path) -> bool:
    """Return whether the model in `directory` is given the type ids of its tokenizer: as tokenizer_config.json states, or as its class in transformers does."""
    config, network = read_optional(directory / "tokenizer_config.json"), directory / "config.json"
    if isinstance(names := config.values.get("model_input_names"), list):
        return "token_type_ids" in names
    model = read_document(network).values if network.is_file() else {"model_type": TYPED_MODELS[0]}
    kind = config.values.get("tokenizer_class") or model.get("tokenizer_class")
    if kind is None:
        return model.get("model_type") in TYPED_MODELS
    return isinstance(kind, str) and kind.removesuffix("Fast") in TYPED_CLASSES


def _with_values(state: Any, kind: str, values: dict[str, Any]) -> Any:
    """Return the description of a normalizer or pre-tokenizer with `values` in each step of the type `kind`, also within a sequence of steps."""
    if not isinstance(state, dict):
        return state
    if state.get("type") == kind:
        return state | values
    for key in ("normalizers", "pretokenizers"):
        if key in state:
            state = state | {key: [_with_values(step, kind, values) for step in state[key]]}
    return state


class SpecialTokens(NamedTuple):
    """The ids of the special tokens around texts. One text becomes `first + ids + last`; a pair becomes `first + a + middle + b + end`."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def room(self, max_length: int, *, pair: bool) -> int:
        """Return how many tokens of the text, or of both texts of a pair, fit into `max_length` tokens in addition to the special tokens."""
        special = len(self.middle) + len(self.end) if pair else len(self.last)
        return max_length - len(self.first) - special


def sample_text(tokenizer: Any) -> str:
    """Return a text that is one token of the vocabulary."""
    added = tokenizer.get_added_tokens_decoder()
    return str(added[min(added)].content) if added else "a"


def read_template(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens that a `tokenizers.Tokenizer` puts around texts, found by encoding a token of its vocabulary."""
    sample = sample_text(tokenizer)
    one, two = tokenizer.encode(sample), tokenizer.encode(sample, sample)
    first, last = _outside(one.ids, one.sequence_ids, (0,))
    _, end = _outside(two.ids, two.sequence_ids, (0, 1))
    own = two.sequence_ids
    middle = two.ids[len(own) - own[::-1].index(0) : own.index(1)] if 0 in own and 1 in own else []
    return SpecialTokens(tuple(first), tuple(last), tuple(middle), tuple(end))


def read_type_lead(tokenizer: Any, sample: str) -> int | None:
    """Return how many special tokens before the second text of a pair have the type of that text; None if both texts have the same type.

    Raises ValueError if the types are others than 0 and, from some token on, 1.
    """
    pair = tokenizer.encode(sample, sample)
    types, own = pair.type_ids, pair.sequence_ids
    if not any(types) or 1 not in own:
        return None
    begin = types.index(1)
    if types != [0] * begin + [1] * (len(types) - begin):
        raise ValueError(f"the types of a pair of texts are {types}: must be 0 and then 1")
    return int(own.index(1) - begin)


def _outside(ids: list[int], own: list[int | None], texts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the ids before the first and after the last token of the given texts."""
    places = [index for index, text in enumerate(own) if text in texts]
    if not places:
        return [], []
    return ids[: places[0]], ids[places[-1] + 1 :]
