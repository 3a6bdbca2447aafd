"""A model's weights by the names they have here, from one file or several."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from weir.errors import SettingsError

from .architecture import Architecture
from .documents import read_document
from .names import POOLER, Stored, names_of
from .tensors import TensorFile, open_tensors

Array = NDArray[Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights(Mapping[str, Array]):
    """Arrays by canonical name (see names.py), as float32. Each is read when it is asked for, and not kept."""

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
