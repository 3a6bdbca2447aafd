"""A model's weights: opened and mapped into memory from safetensors or from archives that torch.save writes, under names that are the same for all families.

Such an archive has a pickle in addition to the values of its tensors. It is not unpickled: `open_pickled` reads the few instructions of which a table of tensors is
made, calls nothing, and refuses all others. families.py has the names.
"""

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError, add_extra
from weir.text_models.checkpoint.families import (
    ALBERT_POOLER,
    COMPLETE,
    HEADS,
    JINA_CODE,
    POOLER,
    ROOT,
    ROOTS,
    STATIC,
    WORD_NAMES,
    Architecture,
    names_of,
)
from weir.text_models.formats import read_document

Array = NDArray[Any]

# The supported datatypes of safetensors, and the numpy type that their bytes are read as. numpy has no bfloat16.
DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


class TensorFile(Mapping[str, Array]):
    """The tensors of one safetensors file, by name. Floating-point tensors are float32 arrays, whatever their datatype in the file.

    A tensor that the file has as float32 is a view of the mapped file, another a copy. `path` is the file. Reading a tensor raises SettingsError if it has a
    number that is NaN or infinite: no model computes with such weights.
    """

    def __init__(self, path: Path, entries: "dict[str, TensorEntry]", data: NDArray[np.uint8]) -> None:
        self.path = path
        self._entries = entries
        self._data = data

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        start, stop = entry.data_offsets
        stored = self._data[start:stop].view(DTYPES[entry.dtype]).reshape(entry.shape)
        if entry.dtype not in FLOATS:
            return stored
        if entry.dtype == "BF16":
            numbers = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = stored.astype(np.float32, copy=False)
        if numbers.size and not (-np.inf < numbers.min() and numbers.max() < np.inf):  # of NaN both are NaN
            raise SettingsError(
                f"{self.path}: {name!r} has a weight that is NaN or infinite in float32: the file is broken"
            )
        return numbers

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


class TensorEntry(msgspec.Struct):
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
        raise SettingsError(f"safetensors is not installed; {add_extra('embed')}") from None
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            with safetensors.safe_open(str(path), framework="numpy"):
                header = file.read(length)
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
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


MAX_PICKLE_BYTES = 64 << 20  # of the table of tensors in an archive; the values are next to it
# The storage classes of torch, by the datatype of safetensors.
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip
# Of a file in a zip archive: signature, and the lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _Global(NamedTuple):
    """A name of Python that a pickle mentions. It is compared, and never looked up."""

    module: str
    name: str


class _Stored(NamedTuple):
    """A tensor as a pickle describes it: the class and the key of its storage, and its place there, in elements."""

    kind: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unreadable(ValueError):
    """The pickle has something that a table of tensors does not need."""


def open_pickled(path: Path) -> TensorFile:
    """Open an archive that torch.save wrote with a table of tensors, such as pytorch_model.bin, and map it into memory. No code in it is run.

    Raises SettingsError naming the file and what is wrong.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = next((info for info in archive.infolist() if info.filename.endswith("data.pkl")), None)
            if found is None or found.file_size > MAX_PICKLE_BYTES:
                raise _Unreadable("it has no table of tensors, or too large a one")
            table = _read_table(archive.read(found))
            root = found.filename.removesuffix("data.pkl")
            infos = {info.filename: info for info in archive.infolist()}
        data = np.memmap(path, dtype=np.uint8, mode="r")
        entries = {name: _entry(name, stored, infos, root, data) for name, stored in table.items()}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # zipfile and pickletools raise errors of a dozen types for broken files
        raise SettingsError(
            f"{path}: is damaged, or is not an archive of tensors from torch 1.6 or later: {' '.join(str(error).split())[:200]}"
        ) from None
    if not entries:
        raise SettingsError(f"{path}: has no tensors")
    return TensorFile(path, entries, data)


def _entry(
    name: str, stored: _Stored, infos: Mapping[str, zipfile.ZipInfo], root: str, data: NDArray[np.uint8]
) -> TensorEntry:
    """Return where the values of a tensor are in the archive. Raises _Unreadable if they are not there in one piece, in order."""
    dtype = STORAGES[stored.kind]
    size, count = np.dtype(DTYPES[dtype]).itemsize, 1
    for length, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        if length > 1 and stride != count:
            raise _Unreadable(f"the values of {name!r} are not in order")
        count *= length
    info = infos[f"{root}data/{stored.key}"]
    if info.compress_type != zipfile.ZIP_STORED:
        raise _Unreadable(f"the values of {name!r} are compressed")
    _, name_length, extra_length = _LOCAL_HEADER.unpack(data[info.header_offset :][: _LOCAL_HEADER.size].tobytes())
    first = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    start = first + stored.offset * size
    stop = start + count * size
    if min(stored.offset, *stored.shape, 0) < 0 or stop > first + info.file_size or stop > len(data):
        raise _Unreadable(f"the values of {name!r} are not all there")
    return TensorEntry(dtype, stored.shape, (start, stop))


def _read_table(pickle: bytes) -> dict[str, _Stored]:
    """Return the tensors in the dictionary that a pickle describes."""
    table = _Machine().run(pickle)
    if isinstance(table, dict) and isinstance(table.get("state_dict"), dict):
        table = table["state_dict"]
    if not isinstance(table, dict):
        raise _Unreadable("it is not a table of tensors")
    return {name: value for name, value in table.items() if isinstance(name, str) and isinstance(value, _Stored)}


class _Machine:
    """Follows the instructions of a pickle as far as a table of tensors needs them. Nothing that the pickle names is imported or called."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """Return the value that the pickle describes. Raises _Unreadable for an instruction or a call that no table of tensors has."""
        for instruction, argument, _ in pickletools.genops(pickle):
            name = instruction.name
            if name == "STOP":
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _STEPS:
                _STEPS[name](self, argument)
            elif name not in ("PROTO", "FRAME"):
                raise _Unreadable(f"its pickle has the instruction {name}")
        raise _Unreadable("its pickle has no end")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def take(self, count: int) -> list[Any]:
        """Take `count` values from the stack; return them in the order in which they were put there."""
        return self._take_from(len(self.stack) - count)

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark from the stack."""
        return self._take_from(self.marks.pop())

    def _take_from(self, start: int) -> list[Any]:
        values = self.stack[start:]
        del self.stack[start:]
        return values


def _check_storage(machine: _Machine, _: Any) -> None:
    """Keep the description of a storage: ("storage", class, key, device, elements)."""
    kind = machine.stack[-1]
    if not (isinstance(kind, tuple) and len(kind) == 5 and kind[0] == "storage" and isinstance(kind[1], _Global)):
        raise _Unreadable("its pickle refers to something other than a storage")


def _drop_attributes(machine: _Machine, _: Any) -> None:
    """Drop the attributes of a dictionary: the versions of the modules, which say nothing of the weights."""
    machine.stack.pop()
    if not isinstance(machine.stack[-1], dict):
        raise _Unreadable("its pickle sets attributes of an object")


def _reduce(machine: _Machine, _: Any) -> None:
    function, arguments = machine.take(2)
    if function == _Global("collections", "OrderedDict"):
        machine.push(dict(*arguments))
    elif function == _Global("torch._utils", "_rebuild_tensor_v2"):
        (_, kind, key, *_), offset, shape, strides, *_ = arguments
        machine.push(_Stored(kind.name, str(key), int(offset), tuple(map(int, shape)), tuple(map(int, strides))))
    elif function == _Global("torch._utils", "_rebuild_parameter"):
        machine.push(arguments[0])
    else:
        called = ".".join(function) if isinstance(function, _Global) else "an object"
        raise _Unreadable(f"its pickle would call {called}")


def _set_items(machine: _Machine, pairs: list[Any]) -> None:
    machine.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))


def _extend(machine: _Machine, values: list[Any]) -> None:
    machine.stack[-1].extend(values)


def _remember(machine: _Machine, number: int) -> None:
    machine.memo[number] = machine.stack[-1]


# What each instruction does, given its argument.
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "GLOBAL": lambda machine, names: machine.push(_Global(*names.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.push(_Global(*machine.take(2))),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "SETITEM": lambda machine, _: _set_items(machine, machine.take(2)),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.since_mark()),
    "APPEND": lambda machine, _: _extend(machine, machine.take(1)),
    "APPENDS": lambda machine, _: _extend(machine, machine.since_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _remember),
    "MEMOIZE": lambda machine, _: _remember(machine, len(machine.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])),
    "BINPERSID": _check_storage,
    "BUILD": _drop_attributes,
    "REDUCE": _reduce,
}
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "INT", "LONG1", "LONG", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINSTRING", "SHORT_BINSTRING",
})  # fmt: skip


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
        index, count = map(int, part.split("/"))
        size = len(value) // count
        return value[index * size : (index + 1) * size]

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
        "projection": (sizes.projection_size, hidden),
    }  # fmt: skip
    norms = "attention_norm", "norm", "attention_post_norm", "post_norm", "before_norm", "final_norm", "distances.norm"
    vectors = dict.fromkeys((*norms, "head.norm"), hidden)
    vectors |= {"embeddings.norm": words if sizes.family in ("albert", "electra") else hidden}
    vectors |= dict.fromkeys(("query_norm", "key_norm"), hidden if sizes.family == JINA_CODE else sizes.size_of_head)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word": (sizes.vocab_size, words),
        "embeddings.position": (sizes.max_length + sizes.position_offset, words),
        "embeddings.type": (sizes.type_vocab_size, words),
        "relative_bias": (sizes.relative_buckets, sizes.heads),
        "distances": (2 * span, hidden),
        "patches.weight": (hidden, 3, sizes.patch_size, sizes.patch_size),
        "patches.bias": (hidden,),
        "class_token": (hidden,),
        "probe": (1, 1, hidden),
    }
    if sizes.experts is not None:
        total = sizes.experts.total
        shapes |= dict.fromkeys(("experts.up", "experts.down"), (total * inner, hidden))
        shapes |= {"router.weight": (total, hidden), "experts.bias": (hidden,)}
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
