"""A model's weights, mapped into memory from its safetensors files, under names that are the same for all families.

The canonical names are:

- `embeddings.word`, `embeddings.position`, `embeddings.type`, `embeddings.norm.weight`, `embeddings.norm.bias`;
- for each layer, counted from 0, with `.weight` and `.bias`: `layer.0.query`, `layer.0.key`, `layer.0.value`, `layer.0.output`,
  `layer.0.attention_norm`, `layer.0.up`, `layer.0.down`, `layer.0.norm`;
- `pooler.weight`, `pooler.bias`, `classifier.*`, `pre_classifier.*`;
- `relative_bias`, [buckets, heads], in MPNet only.

Matrices have torch's layout [outputs, inputs].
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from weir.embedding.checkpoint.config import Architecture, read_document
from weir.embedding.checkpoint.tensors import TensorFile, open_pickled, open_tensors
from weir.errors import SettingsError

Array = NDArray[Any]

WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"

WORDS = "embeddings.word_embeddings.weight"

EMBEDDINGS = {
    "embeddings.word": WORDS,
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight": "embeddings.LayerNorm.weight",
    "embeddings.norm.bias": "embeddings.LayerNorm.bias",
}

BERT_LAYER = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm",
}  # fmt: skip
LAYERS = {
    "bert": BERT_LAYER,
    "roberta": BERT_LAYER,
    "xlm-roberta": BERT_LAYER,
    "mpnet": BERT_LAYER | {
        "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v",
        "output": "attention.attn.o", "attention_norm": "attention.LayerNorm",
    },
    "distilbert": {
        "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin",
        "output": "attention.out_lin", "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "norm": "output_layer_norm",
    },
}  # fmt: skip

POOLER = {"pooler.weight": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
RELATIVE_BIAS = {"relative_bias": "encoder.relative_attention_bias.weight"}
ONE_LAYER_HEAD = ("classifier.weight", "classifier.bias")
TWO_LAYER_HEAD = (
    "classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias",
)  # fmt: skip
HEADS = {
    "bert": ONE_LAYER_HEAD,
    "roberta": TWO_LAYER_HEAD,
    "xlm-roberta": TWO_LAYER_HEAD,
    "mpnet": TWO_LAYER_HEAD,
    "distilbert": ("pre_classifier.weight", "pre_classifier.bias", *ONE_LAYER_HEAD),
}


class StoredNames:
    """Finds weights among the names in a model's files. `source` is the file that errors name.

    A model that was saved as part of another has a prefix before its names (`bert.`, `roberta.`, `0.auto_model.`). Old files call weight and bias of a
    layer normalization gamma and beta. Callers pass names without prefix, with weight and bias.
    """

    def __init__(self, names: Iterable[str], source: str) -> None:
        self.in_files = {_current_name(name): name for name in names}
        self.source = source
        self.prefix = min(
            (name.removesuffix(WORDS) for name in self.in_files if name.endswith(WORDS)), key=len, default=""
        )

    def has(self, names: dict[str, str]) -> bool:
        """Return whether the files have all values of `names`."""
        return all(self.prefix + name in self.in_files for name in names.values())

    def head(self, family: str) -> dict[str, str] | None:
        """Return the names of the classifier's weights in the files by canonical name, or None if there is no classifier."""
        for prefix in self._outer_prefixes():
            names = {name: prefix + name for name in HEADS[family]}
            if all(name in self.in_files for name in names.values()):
                return {here: self.in_files[name] for here, name in names.items()}
        return None

    def find(self, name: str) -> str:
        """Return the name in the files of the weight `name`. Raises SettingsError if the files do not have it."""
        if self.prefix + name not in self.in_files:
            raise SettingsError(f"{self.source}: has no weight {self.prefix + name!r}, which the model must have")
        return self.in_files[self.prefix + name]

    def _outer_prefixes(self) -> Iterator[str]:
        """Yield the prefixes that a classifier may have. It stands beside the network, so `bert.` is not before its names."""
        parts = self.prefix.split(".")[:-1]
        for kept in range(len(parts), -1, -1):
            yield "".join(part + "." for part in parts[:kept])


def weight_names(family: str, layers: int) -> dict[str, str]:
    """Return the weights that a model of the family must have: names in the files, without prefix, by canonical name. Heads are not among them."""
    names = dict(EMBEDDINGS)
    if family in ("mpnet", "distilbert"):
        del names["embeddings.type"]
    if family == "mpnet":
        names |= RELATIVE_BIAS
    root = "transformer.layer" if family == "distilbert" else "encoder.layer"
    for layer in range(layers):
        for here, there in LAYERS[family].items():
            for part in ("weight", "bias"):
                names[f"layer.{layer}.{here}.{part}"] = f"{root}.{layer}.{there}.{part}"
    return names


def _current_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class Weights(Mapping[str, Array]):
    """A model's weights as float32 arrays, by canonical name (see the top of this module). Each access reads the file; nothing is kept."""

    def __init__(self, files: Mapping[str, TensorFile], names: Mapping[str, str]) -> None:
        self._files = files
        self._names = names

    def __getitem__(self, name: str) -> Array:
        stored = self._names[name]
        return self._files[stored][stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Store:
    """The files of a directory's weights: safetensors, or with `allow_pickle` pytorch_model.bin where there are none.

    Attributes:
        paths: the files that decide the weights, the index of a model in parts among them.
        files: by name of a tensor, the file that holds it.
        stored: finds weights among the names in the files.
    """

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        """Open all files. Raises SettingsError naming the file if one is missing or broken."""
        self.paths = _weight_files(directory, WEIGHTS) or (
            _weight_files(directory, PICKLED_WEIGHTS) if allow_pickle else []
        )
        if not self.paths:
            raise no_weights_error(directory)
        self.files: dict[str, TensorFile] = {}
        for path in self.paths:
            if path.suffix != ".json":
                file = open_tensors(path) if path.suffix == ".safetensors" else open_pickled(path)
                self.files.update(dict.fromkeys(file, file))
        self.stored = StoredNames(self.files, str(self.paths[0]))

    def weights(self, architecture: Architecture) -> Weights:
        """Return the weights of a model of this architecture.

        Raises SettingsError naming the file and the weight: it is missing, its shape does not fit the architecture, or it is quantised.
        """
        family = architecture.family
        names = {here: self.stored.find(name) for here, name in weight_names(family, architecture.layers).items()}
        if architecture.has_pooler:
            names |= {here: self.stored.find(name) for here, name in POOLER.items()}
        if architecture.labels:
            names |= self.stored.head(family) or {}
        for name, stored in names.items():
            file, expected = self.files[stored], _shape(name, architecture)
            if file.shape(stored) != expected:
                raise SettingsError(
                    f"{file.path}: {stored!r} has the shape {list(file.shape(stored))}, config.json requires {list(expected)}"
                )
            if not file.floating(stored):
                raise SettingsError(f"{file.path}: {stored!r} is quantised: weights must be floating-point numbers")
        return Weights(self.files, names)


def no_weights_error(directory: Path) -> SettingsError:
    """Return the error for a directory that has no safetensors file; it says how to get one."""
    if not directory.is_dir():
        return SettingsError(
            f"{directory}: must be a directory with a model, or the id of one on the Hugging Face Hub: OWNER/NAME[@REVISION]"
        )
    unsafe = [*directory.glob("pytorch_model*.bin"), *directory.glob("*.pt")]
    if unsafe:
        return SettingsError(
            f"{directory}: has {unsafe[0].name}, but no {WEIGHTS}. Pickles can run any code and are not read without --allow-pickle, which reads "
            "the tensors in them and runs nothing. Or convert it where you trust it: AutoModel.from_pretrained(directory).save_pretrained(directory, safe_serialization=True)"
        )
    if list(directory.glob("*.ckpt*")):
        return SettingsError(
            f"{directory}: is a TensorFlow checkpoint: convert it with `weir embed convert {directory} TARGET`"
        )
    return SettingsError(f"{directory}: has no weights: must hold {WEIGHTS}, or {WEIGHTS}.index.json with its parts")


def _weight_files(directory: Path, name: str) -> list[Path]:
    """Return the file `name`, or its index with all parts; empty if there is neither."""
    index = directory / f"{name}.index.json"
    if (directory / name).is_file():
        return [directory / name]
    return [index, *_shards(index)] if index.is_file() else []


def _shards(index: Path) -> list[Path]:
    try:
        shards = msgspec.convert(read_document(index).values.get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{index}: weight_map must name the file of each weight: {error}") from None
    for name in shards.values():
        if Path(name).name != name:
            raise SettingsError(f"{index}: {name!r} must be the name of a file beside it")
    return [index.parent / name for name in sorted(set(shards.values()))]


def _shape(name: str, sizes: Architecture) -> tuple[int, ...]:
    """Return the shape that the weight with this canonical name must have."""
    hidden = sizes.hidden_size
    known: dict[str, tuple[int, ...]] = {
        "embeddings.word": (sizes.vocab_size, hidden),
        "embeddings.position": (sizes.max_length + sizes.position_offset, hidden),
        "embeddings.type": (sizes.type_vocab_size, hidden),
        "relative_bias": (sizes.relative_buckets, sizes.heads),
        "classifier.weight": (sizes.labels, hidden),
        "classifier.out_proj.weight": (sizes.labels, hidden),
        "classifier.bias": (sizes.labels,),
        "classifier.out_proj.bias": (sizes.labels,),
    }
    if name in known:
        return known[name]
    end = name.split(".", 2)[-1] if name.startswith("layer.") else name
    known = {"up.weight": (sizes.intermediate_size, hidden), "up.bias": (sizes.intermediate_size,)}
    known |= {"down.weight": (hidden, sizes.intermediate_size)}
    square = end.endswith(".weight") and "norm" not in end
    return known.get(end, (hidden, hidden) if square else (hidden,))
