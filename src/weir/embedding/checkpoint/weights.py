"""A model's weights by canonical name, mapped from its safetensors files.

Canonical names: `embeddings.word|position|type`, `embeddings.norm.weight|bias`; in a layer `layer.0.query|key|value|output`,
`layer.0.attention_norm`, `layer.0.up|down`, `layer.0.norm`, each with `.weight` and `.bias`; `pooler.weight|bias`; `classifier.*`,
`pre_classifier.*`; `relative_bias`. Weights keep torch's layout: outputs first.
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


class Stored:
    """The names in a model's files: which of them is which weight.

    Models that were saved as part of another one have a prefix (`bert.`, `roberta.`, `0.auto_model.`), and old ones call a
    normalisation's weight and bias gamma and beta.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self.real = {_modern(name): name for name in names}
        self.where = where
        self.prefix = min((name.removesuffix(WORDS) for name in self.real if name.endswith(WORDS)), key=len, default="")

    def has(self, names: dict[str, str]) -> bool:
        """Return whether all of these are there, behind the prefix."""
        return all(self.prefix + name in self.real for name in names.values())

    def head(self, family: str) -> dict[str, str] | None:
        """Return the classifier's names, here and in the files, or None if there is none."""
        for prefix in self._outer_prefixes():
            names = {name: prefix + name for name in HEADS[family]}
            if all(name in self.real for name in names.values()):
                return {here: self.real[name] for here, name in names.items()}
        return None

    def find(self, name: str) -> str:
        """Return the name in the files of what stands behind the prefix. Raises SettingsError where it is missing."""
        if self.prefix + name not in self.real:
            raise SettingsError(
                f"{self.where}: has no weight {self.prefix + name!r}, which the model is not complete without"
            )
        return self.real[self.prefix + name]

    def _outer_prefixes(self) -> Iterator[str]:
        """A classifier stands beside the model, not inside: `bert.` is the prefix of that alone."""
        parts = self.prefix.split(".")[:-1]
        for kept in range(len(parts), -1, -1):
            yield "".join(part + "." for part in parts[:kept])


def names_of(family: str, layers: int) -> dict[str, str]:
    """Return the names, here and in the files behind the prefix, of all weights that a model of the family must have."""
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


def _modern(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


# Datatypes that weights have, and how their bytes are looked at.
KINDS: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


class TensorFile(Mapping[str, Array]):
    """The tensors of one file by name. Those that are floats come as float32, whatever they are kept in."""

    def __init__(self, path: Path, places: "dict[str, _Entry]", data: NDArray[np.uint8]) -> None:
        self.path = path
        self.places = places
        self.data = data

    def __getitem__(self, name: str) -> Array:
        place = self.places[name]
        start, stop = place.data_offsets
        stored = self.data[start:stop].view(KINDS[place.dtype]).reshape(place.shape)
        if place.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if place.dtype in FLOATS:
            return stored.astype(np.float32, copy=False)
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without looking at its values."""
        return self.places[name].shape

    def floating(self, name: str) -> bool:
        """Return whether a tensor holds floating-point numbers."""
        return self.places[name].dtype in FLOATS


class _Entry(msgspec.Struct):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def open_tensors(path: Path) -> TensorFile:
    """Check the header of a safetensors file and map the rest. Raises SettingsError naming the file and what is broken.

    The library checks that the header is sound and covers the file. Its own arrays are copies, and numpy has no bfloat16 for it: here what is
    kept in float32 is a view of the file's pages, which all processes that read the file share.
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
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        places = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
        data = np.memmap(path, dtype=np.uint8, mode="r")[8 + length :]
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (safetensors.SafetensorError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is broken, or no safetensors file: {error}") from None
    if not places:
        raise SettingsError(f"{path}: is broken, or no safetensors file: it has no tensors")
    for name, place in places.items():
        if place.dtype not in KINDS:
            raise SettingsError(f"{path}: {name!r} is of the datatype {place.dtype}: must be one of {', '.join(KINDS)}")
    return TensorFile(path, places, data)


class Weights(Mapping[str, Array]):
    """Arrays by canonical name (see weights.py), as float32. Each is read when it is asked for, and not kept."""

    def __init__(self, files: Mapping[str, TensorFile], names: Mapping[str, str]) -> None:
        self.files = files
        self.names = names

    def __getitem__(self, name: str) -> Array:
        stored = self.names[name]
        return self.files[stored][stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape without reading it."""
        stored = self.names[name]
        return self.files[stored].shape(stored)


class Store:
    """The safetensors files of a directory: which of them holds which tensor."""

    def __init__(self, directory: Path) -> None:
        index = directory / INDEX
        if (directory / WEIGHTS).is_file():
            self.paths = [directory / WEIGHTS]
        elif index.is_file():
            self.paths = [index, *_shards(index)]
        else:
            raise missing(directory)
        self.files: dict[str, TensorFile] = {}
        for path in self.paths:
            if path != index:
                file = open_tensors(path)
                self.files.update(dict.fromkeys(file, file))
        self.stored = Stored(self.files, str(self.paths[0]))

    def weights(self, architecture: Architecture) -> Weights:
        """Name what is there for a model of this architecture. Raises SettingsError where something is missing or has another shape."""
        family = architecture.family
        names = {here: self.stored.find(name) for here, name in names_of(family, architecture.layers).items()}
        if architecture.has_pooler:
            names |= {here: self.stored.find(name) for here, name in POOLER.items()}
        if architecture.labels:
            names |= self.stored.head(family) or {}
        weights = Weights(self.files, names)
        for name, stored in names.items():
            wanted = _shape(name, architecture)
            if weights.shape(name) != wanted:
                raise SettingsError(
                    f"{self.files[stored].path}: {stored!r} has the shape {list(weights.shape(name))}, config.json asks for {list(wanted)}"
                )
            if not self.files[stored].floating(stored):
                raise SettingsError(
                    f"{self.files[stored].path}: {stored!r} is quantised: weights must be floating-point numbers"
                )
        return weights


def missing(directory: Path) -> SettingsError:
    """Return the error for a directory without weights that can be read, saying how to come by them."""
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
        raise SettingsError(f"{index}: weight_map must say the file of each weight: {error}") from None
    for name in shards.values():
        if Path(name).name != name:
            raise SettingsError(f"{index}: {name!r} must be the name of a file beside it")
    return [index.parent / name for name in sorted(set(shards.values()))]


def _shape(name: str, sizes: Architecture) -> tuple[int, ...]:
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
