"""The library that cuts texts into tokens (Rust; it releases the interpreter's lock), and a model's files for it."""

import os
from pathlib import Path
from typing import Any

import msgspec

from weir.embedding.checkpoint.config import Document, read_document
from weir.embedding.tokens.failing import named
from weir.embedding.tokens.options import TokenizerOptions
from weir.embedding.tokens.sentencepiece import FILES, from_pieces
from weir.embedding.tokens.vocabularies import from_merges, from_vocabulary
from weir.errors import SettingsError

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
    config = read_document(path) if path.is_file() else Document(path, {})
    with named(directory):
        pieces = _read(directory, config, options)
    _refuse_case(pieces, directory, options.lowercase)
    if options.lowercase_text:
        lower = tokenizers.normalizers.Lowercase()
        known = pieces.normalizer
        pieces.normalizer = lower if known is None else tokenizers.normalizers.Sequence([lower, known])
    return pieces


def _read(directory: Path, config: Document, options: TokenizerOptions) -> Any:
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


def _described(path: Path, config: Document, options: TokenizerOptions) -> str:
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


def _overrides(config: Document) -> dict[str, Any]:
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
