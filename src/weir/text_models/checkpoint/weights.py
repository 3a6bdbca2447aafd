"""A model's weights, mapped into memory from its files, under names that are the same for all families (see families.py)."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.text_models.checkpoint.config import Architecture
from weir.text_models.checkpoint.families import (
    ALBERT_POOLER,
    COMPLETE,
    HEADS,
    POOLER,
    ROOT,
    ROOTS,
    STATIC,
    WORD_NAMES,
    names_of,
)
from weir.text_models.checkpoint.tensors import TensorFile, open_pickled, open_tensors
from weir.text_models.formats import read_document

Array = NDArray[Any]

WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"

OPTIONAL_OF_HEADS = ("head.dense.bias", "head.norm.bias")  # ModernBERT's


class StoredNames:
    """Finds weights among the names in a model's files. `source` is the file that errors name.

    A model that was saved as part of another has a prefix before its names (`bert.`, `roberta.`, `0.auto_model.`). Old files call weight and bias of a
    layer normalization gamma and beta. Callers pass names without prefix, with weight and bias.
    """

    def __init__(self, names: Iterable[str], source: str) -> None:
        self.in_files = {_current_name(name): name for name in names}
        self.source = source
        self.prefix = min(
            (name.removesuffix(words) for name in self.in_files for words in WORD_NAMES if name.endswith(words)),
            key=len,
            default="",
        )

    def has(self, name: str) -> bool:
        """Return whether the files have the weight `name`, or the weight of which it is a part."""
        return self.prefix + name.partition(":")[0] in self.in_files

    def pooler(self, family: str) -> dict[str, str]:
        """Return the names of the pooler's weights, without prefix, by canonical name; empty if there is no pooler within the network."""
        names = ALBERT_POOLER if family == "albert" else POOLER
        return names if all(map(self.has, names.values())) else {}

    def head(self, family: str) -> dict[str, str] | None:
        """Return the names of the classifier's weights in the files by canonical name, or None if there is no classifier."""
        for prefix in self._outer_prefixes():
            names = {name: prefix + name for name in HEADS[family]}
            if all(name in self.in_files for name in names.values()):
                more = {name: prefix + name for name in OPTIONAL_OF_HEADS if prefix + name in self.in_files}
                return {here: self.in_files[name] for here, name in {**more, **names}.items()}
        return None

    def outside(self, name: str) -> str | None:
        """Return the name in the files of a weight outside the network, or None if there is none."""
        found = (prefix + name for prefix in self._outer_prefixes() if prefix + name in self.in_files)
        return next((self.in_files[each] for each in found), None)

    def words(self) -> str | None:
        """Return the name in the files of the embeddings of words."""
        return next((self.in_files[self.prefix + name] for name in WORD_NAMES if self.has(name)), None)

    def find(self, name: str) -> str:
        """Return the name in the files of the weight `name`, with its part if it is one. Raises SettingsError if the files do not have it."""
        stored, colon, part = name.partition(":")
        if self.prefix + stored not in self.in_files:
            raise SettingsError(f"{self.source}: has no weight {self.prefix + stored!r}, which the model must have")
        return self.in_files[self.prefix + stored] + colon + part

    def layers(self, root: str) -> int:
        """Return how many layers the files have, given where a layer is (see families.ROOTS)."""
        before, _, _ = root.partition("{}")
        start = self.prefix + before
        found = (name[len(start) :].partition(".")[0] for name in self.in_files if name.startswith(start))
        return 1 + max((int(number) for number in found if number.isdecimal()), default=-1)

    def _outer_prefixes(self) -> Iterator[str]:
        """Yield the prefixes that a classifier may have. It stands next to the network, so `bert.` is not before its names."""
        parts = self.prefix.split(".")[:-1]
        for kept in range(len(parts), -1, -1):
            yield "".join(part + "." for part in parts[:kept])


def _current_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class Weights(Mapping[str, Array]):
    """A model's weights as float32 arrays, by canonical name (see the top of this module). Each access reads the file; nothing is kept."""

    def __init__(self, files: Mapping[str, TensorFile], names: Mapping[str, str]) -> None:
        self._files = files
        self._names = names

    def __getitem__(self, name: str) -> Array:
        stored, _, part = self._names[name].partition(":")
        value = self._files[stored][stored]
        if not part:
            return value
        place, count = map(int, part.split("/"))
        size = len(value) // count
        return value[place * size : (place + 1) * size]

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
        family, stored = architecture.family, self.stored
        names = {
            here: stored.find(name)
            for here, name in names_of(architecture).items()
            if _is_required(here, family) or stored.has(name)
        }
        if architecture.has_pooler:
            names |= {here: stored.find(name) for here, name in stored.pooler(family).items()}
        if architecture.labels:
            names |= stored.head(family) or {}
        self._check_layers(architecture)
        shapes = weight_shapes(architecture)
        for here, name in names.items():
            self._check(name, shapes[here.split(".", 2)[-1] if here.startswith("layer.") else here])
        return Weights(self.files, names)

    def _check_layers(self, architecture: Architecture) -> None:
        """Raise SettingsError if the files have layers that config.json does not name."""
        there = self.stored.layers(ROOTS.get(architecture.family, ROOT))
        if not architecture.shared_layers and there > architecture.layers:
            raise SettingsError(
                f"{self.paths[0]}: has weights of {there} layers, config.json names {architecture.layers}: one of them is of another model; "
                f"to serve a lower layer, name {there} there and pool that layer (--layers)"
            )

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise SettingsError unless a weight holds floating-point numbers in this shape; `name` may be that of a part."""
        stored, _, part = name.partition(":")
        file = self.files[stored]
        if part:
            expected = (expected[0] * int(part.rpartition("/")[2]), *expected[1:])
        if file.shape(stored) != expected:
            raise SettingsError(
                f"{file.path}: {stored!r} has the shape {list(file.shape(stored))}, config.json requires {list(expected)}"
            )
        if not file.floating(stored):
            raise SettingsError(f"{file.path}: {stored!r} is quantised: weights must be floating-point numbers")


def _is_required(name: str, family: str) -> bool:
    """Return whether a model must have this weight. ModernBERT's first layer has no first normalization, and many families no biases."""
    if family in COMPLETE:
        return not name.startswith("embeddings.projection.bias")
    return not name.endswith(".bias") and name != "layer.0.attention_norm.weight"


def weight_shapes(sizes: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by canonical name, those of layers without the number of the layer."""
    hidden, inner, labels = sizes.hidden_size, sizes.intermediate_size, sizes.labels
    words = sizes.embedding_size or hidden
    queries, keys = sizes.heads * sizes.size_of_head, sizes.attended_heads * sizes.size_of_head
    span = 0 if sizes.distances is None else sizes.distances.span
    matrices = {
        "embeddings.projection": (hidden, words), "query": (queries, hidden), "key": (keys, hidden), "value": (keys, hidden),
        "output": (hidden, queries), "up": (inner, hidden), "gate": (inner, hidden), "down": (hidden, inner),
        "position_query": (queries, hidden), "position_key": (queries, hidden), "pooler": (hidden, hidden), "pooler.dense": (hidden, hidden),
        "classifier": (labels, hidden), "classifier.dense": (hidden, hidden), "classifier.out_proj": (labels, hidden),
        "pre_classifier": (hidden, hidden), "head.dense": (hidden, hidden), "dense": (hidden, hidden), "score": (labels, hidden),
    }  # fmt: skip
    vectors = dict.fromkeys(
        ("attention_norm", "norm", "attention_post_norm", "post_norm", "final_norm", "distances.norm", "head.norm"),
        hidden,
    )
    vectors |= {"embeddings.norm": words if sizes.family in ("albert", "electra") else hidden}
    vectors |= dict.fromkeys(("query_norm", "key_norm"), sizes.size_of_head)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word": (sizes.vocab_size, words),
        "embeddings.position": (sizes.max_length + sizes.position_offset, words),
        "embeddings.type": (sizes.type_vocab_size, words),
        "relative_bias": (sizes.relative_buckets, sizes.heads),
        "distances": (2 * span, hidden),
    }
    shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes | {f"{name}.{kind}": (size,) for name, size in vectors.items() for kind in ("weight", "bias")}


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
            raise SettingsError(f"{index}: {name!r} must be the name of a file in the same directory")
    return [index.parent / name for name in sorted(set(shards.values()))]


# Models without a network: a table with a vector for each token, of which a text gets the mean (StaticEmbedding of sentence-transformers, model2vec).

STATIC_MODULE = "StaticEmbedding"
_STATIC_LENGTH = 32_768  # tokens of a text; the table has no limit of its own
_TABLES = ("embedding.weight", "embeddings")  # of sentence-transformers, and of model2vec


class StaticStore(Store):
    """The files of such a model. model2vec may state for each token a row of a smaller table, and a factor."""

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        """Raises SettingsError naming the file, and the table that it lacks or that does not fit."""
        super().__init__(directory, allow_pickle=allow_pickle)
        self._name = next((name for name in _TABLES if name in self.files), "")
        if (
            not self._name
            or len(self.files[self._name].shape(self._name)) != 2
            or not self.files[self._name].floating(self._name)
        ):
            raise SettingsError(
                f"{self.paths[0]}: must hold a table of floating-point numbers called {' or '.join(map(repr, _TABLES))}"
            )
        rows = {len(each) for each in (self._stored("mapping"), self._stored("weights")) if each is not None}
        if len(rows) > 1:
            raise SettingsError(
                f"{self.paths[0]}: 'mapping' and 'weights' must have as many numbers as there are tokens"
            )

    def architecture(self) -> Architecture:
        """Return the sizes of the table: that of a network without layers."""
        table = self._table()
        return Architecture(
            STATIC, hidden_size=table.shape[1], layers=1, heads=1, intermediate_size=1, vocab_size=len(table), max_length=_STATIC_LENGTH,
            type_vocab_size=0, position_table=False, order=STATIC,
        )  # fmt: skip

    def weights(self, architecture: Architecture) -> Weights:
        """Return the vectors of the tokens."""
        return Weights({"table": {"table": self._table()}}, {"embeddings.word": "table"})  # type: ignore[dict-item]  # a mapping from names to arrays, as a file is

    def _stored(self, name: str) -> Array | None:
        return self.files[name][name] if name in self.files else None

    def _table(self) -> Array:
        table, mapping, weights = self.files[self._name][self._name], self._stored("mapping"), self._stored("weights")
        if mapping is not None:
            if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
                raise SettingsError(
                    f"{self.paths[0]}: 'mapping' must name rows of {self._name!r}, which has {len(table)}"
                )
            table = table[mapping]
        if weights is None:
            return table
        if len(weights) != len(table):
            raise SettingsError(f"{self.paths[0]}: 'weights' has {len(weights)} numbers, there are {len(table)} tokens")
        scaled: Array = table * np.asarray(weights, np.float32)[:, None]
        return scaled
