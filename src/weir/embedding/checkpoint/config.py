"""Read the JSON files of a model's directory, and the network's architecture from its config.json.

Errors name the file, the key, the value and the rule.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weir.errors import SettingsError

MAX_BYTES = 64 << 20  # of a JSON file that is read whole; vocabularies are the largest

# The supported values of model_type in config.json, and the family of each: models of one family compute in the same way. MiniLM, E5, BGE and GTE
# have the type bert or xlm-roberta.
FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "camembert": "roberta",
    "xlm-roberta": "xlm-roberta",
    "distilbert": "distilbert",
    "mpnet": "mpnet",
}

# The keys of each size in config.json: the usual one, then DistilBERT's.
SIZES = {
    "hidden_size": ("hidden_size", "dim"),
    "layers": ("num_hidden_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_heads"),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
}


class JsonDocument:
    """A JSON object from the file `path`. A key whose value is null counts as missing.

    Every getter raises SettingsError naming the file, the key, the value and the rule.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer, at least `least`, under the first of `keys` that is there, else `default`. With None as the default, one must be there."""
        key, value = self._first(keys, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, value, f"must be a whole number of at least {least}")
        return value

    def number(self, *keys: str, default: float) -> float:
        """Return the positive, finite number under the first of `keys` that is there, else `default`."""
        key, value = self._first(keys, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "must be a positive number")
        return float(value)

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return the string under the first of `keys` that is there, else `default`. With None as the default, one must be there."""
        key, value = self._first(keys, default)
        if type(value) is not str:
            raise self.wrong(key, value, "must be a string")
        return value

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Return the boolean under `key`, or `default` if there is none."""
        _, value = self._first((key,), default)
        if type(value) is not bool:
            raise self.wrong(key, value, "must be true or false")
        return value

    def wrong(self, key: str, value: object, rule: str) -> SettingsError:
        """Return the error for the value under `key`, which breaks `rule`."""
        return SettingsError(f"{self.path}: {key}={value!r}: {rule}")

    def _first(self, keys: tuple[str, ...], default: object) -> tuple[str, Any]:
        for key in keys:
            if key in self:
                return key, self.values[key]
        if default is None:
            raise SettingsError(f"{self.path}: has no {' or '.join(keys)}, which the model cannot be read without")
        return keys[0], default


def read_document(path: Path) -> JsonDocument:
    """Read a file that holds one JSON object. Raises SettingsError if it is missing, larger than MAX_BYTES, or not a JSON object."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: must hold a JSON object")
    return JsonDocument(path, values)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises SettingsError if it is missing, larger than MAX_BYTES, or not JSON."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, the most for a JSON file of a model")
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: is not JSON: {error}") from None


@dataclass(frozen=True)
class Architecture:
    """The architecture of a BERT-like network: everything that its computation depends on, except the weights.

    Attributes:
        family: one of the values of FAMILIES; for the torch runtime any model_type.
        hidden_size, layers, heads, intermediate_size, vocab_size: as in config.json.
        max_length: the most tokens of a text, special tokens included: as many as there are position embeddings.
        position_offset: the token at index p has the position embedding p + position_offset. If the offset is not 0, the token with the id
            position_offset - 1 is padding wherever it stands: that number is also its position, and it is not counted in the indices of others.
        type_vocab_size: how many token types there are; 0 if the network has no token type embeddings.
        epsilon: the constant in layer normalization.
        activation: the activation of the feed-forward layers, by its name in config.json.
        pad_id: the id of the padding token.
        relative_buckets: how many buckets of distances MPNet's attention has; 0 in all other families.
        labels: how many outputs the classifier has; 0 if there is none.
        has_pooler: whether there are weights of a pooler, a dense layer on the first token.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    vocab_size: int
    max_length: int
    position_offset: int = 0
    type_vocab_size: int = 2
    epsilon: float = 1e-12
    activation: str = "gelu"
    pad_id: int = 0
    relative_buckets: int = 0
    labels: int = 0
    has_pooler: bool = False


def read_family(config: JsonDocument) -> str:
    """Return the family of a config.json's model_type. Raises SettingsError naming the supported types."""
    kind = config.text("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise config.wrong("model_type", kind, f"must be one of {known}; others are served with --runtime torch")
    return FAMILIES[kind]


def read_architecture(config: JsonDocument, *, has_pooler: bool, has_classifier: bool) -> Architecture:
    """Return the architecture of a config.json, given whether the weights hold a pooler and a classifier.

    Raises SettingsError naming the file, the key and the rule: a size is missing, sizes do not fit each other, or the model is a variant of its
    family that computes differently, such as a decoder.
    """
    family = read_family(config)
    _refuse_variants(config)
    distil = family == "distilbert"
    mpnet = family == "mpnet"
    pad_id = config.integer("pad_token_id", default=0 if family in ("bert", "distilbert") else 1, least=0)
    # MPNet's positions begin at 2 whatever its padding id is.
    offset = 0 if family in ("bert", "distilbert") else 2 if mpnet else pad_id + 1
    sizes = {name: config.integer(*keys) for name, keys in SIZES.items()}
    if sizes["hidden_size"] % sizes["heads"]:
        raise config.wrong("num_attention_heads", sizes["heads"], f"must divide the hidden size {sizes['hidden_size']}")
    positions = config.integer("max_position_embeddings", default=512)
    if positions <= offset + 2:
        raise config.wrong("max_position_embeddings", positions, f"must be more than {offset + 2}")
    return Architecture(
        family=family,
        **sizes,
        max_length=positions - offset,
        position_offset=offset,
        type_vocab_size=0 if distil or mpnet else config.integer("type_vocab_size", default=2),
        epsilon=1e-12 if distil else config.number("layer_norm_eps", default=1e-12),
        activation=config.text("hidden_act", "activation", default="gelu"),
        pad_id=pad_id,
        relative_buckets=config.integer("relative_attention_num_buckets", default=32) if mpnet else 0,
        labels=_label_count(config) if has_classifier else 0,
        has_pooler=has_pooler,
    )


def _refuse_variants(config: JsonDocument) -> None:
    kind = config.text("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise config.wrong("position_embedding_type", kind, "must be absolute; others are served with --runtime torch")
    for key in ("is_decoder", "add_cross_attention"):
        if config.switch(key):
            raise config.wrong(key, True, "must be false: a text is encoded by encoders")


def _label_count(config: JsonDocument) -> int:
    names = config.values.get("id2label")
    if names is None:
        return config.integer("num_labels", default=2)
    if not isinstance(names, dict) or not names:
        raise SettingsError(f"{config.path}: id2label={names!r}: must name at least one label by its number")
    return len(names)
