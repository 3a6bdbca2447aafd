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
import numpy as np
from numpy.typing import NDArray

from weir.embedding.checkpoint.config import Architecture, read_document
from weir.errors import SettingsError

Array = NDArray[Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

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


# The supported datatypes of safetensors, and the numpy type that their bytes are read as. numpy has no bfloat16.
DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


class TensorFile(Mapping[str, Array]):
    """The tensors of one safetensors file, by name. Floating-point tensors are float32 arrays, whatever their datatype in the file.

    A tensor that the file has as float32 is a view of the mapped file, another a copy. `path` is the file.
    """

    def __init__(self, path: Path, entries: "dict[str, _Entry]", data: NDArray[np.uint8]) -> None:
        self.path = path
        self._entries = entries
        self._data = data

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        start, stop = entry.data_offsets
        stored = self._data[start:stop].view(DTYPES[entry.dtype]).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if entry.dtype in FLOATS:
            return stored.astype(np.float32, copy=False)
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values."""
        return self._entries[name].shape

    def floating(self, name: str) -> bool:
        """Return whether a tensor holds floating-point numbers."""
        return self._entries[name].dtype in FLOATS


class _Entry(msgspec.Struct):
    """The description of one tensor in a file's header. The offsets, in bytes, count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def open_tensors(path: Path) -> TensorFile:
    """Open a safetensors file: check its header and map the rest into memory.

    The package safetensors checks that the header is sound and covers the file. Its own arrays are not used: they are copies, and it cannot read
    bfloat16 for numpy. Arrays of float32 are views of the file's pages, which all processes that map the file share.

    Raises SettingsError naming the file and what is wrong, also if safetensors is not installed.
    (https://huggingface.co/docs/safetensors, "Format")
    """
    try:
        import safetensors
    except ImportError:
        raise SettingsError("safetensors is missing: pip install 'weir-serving[embed]'") from None
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            with safetensors.safe_open(str(path), framework="numpy"):
                header = file.read(length)
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        data = np.memmap(path, dtype=np.uint8, mode="r")[8 + length :]
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (safetensors.SafetensorError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken, or is not a safetensors file: {error}") from None
    if not entries:
        raise SettingsError(f"{path}: is broken, or is not a safetensors file: it has no tensors")
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise SettingsError(
                f"{path}: {name!r} is of the datatype {entry.dtype}: must be one of {', '.join(DTYPES)}"
            )
    return TensorFile(path, entries, data)


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
    """The safetensors files of a directory.

    Attributes:
        paths: the files that decide the weights, the index of a model in parts among them.
        files: by name of a tensor, the file that holds it.
        stored: finds weights among the names in the files.
    """

    def __init__(self, directory: Path) -> None:
        """Open all files. Raises SettingsError naming the file if one is missing or broken."""
        index = directory / INDEX
        if (directory / WEIGHTS).is_file():
            self.paths = [directory / WEIGHTS]
        elif index.is_file():
            self.paths = [index, *_shards(index)]
        else:
            raise no_weights_error(directory)
        self.files: dict[str, TensorFile] = {}
        for path in self.paths:
            if path != index:
                file = open_tensors(path)
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
        return SettingsError(f"{directory}: must be a directory with a model")
    unsafe = [*directory.glob("pytorch_model*.bin"), *directory.glob("*.pt")]
    if unsafe:
        return SettingsError(
            f"{directory}: has {unsafe[0].name}, but no {WEIGHTS}. Pickles can run any code and are not read. Convert it where you trust it: "
            "AutoModel.from_pretrained(directory).save_pretrained(directory, safe_serialization=True)"
        )
    if list(directory.glob("*.ckpt*")):
        return SettingsError(
            f"{directory}: is a TensorFlow checkpoint: convert it with `weir embed convert {directory} TARGET`"
        )
    return SettingsError(f"{directory}: has no weights: must hold {WEIGHTS}, or {INDEX} with its parts")


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
