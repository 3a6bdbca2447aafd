"""Convert the original TensorFlow checkpoints of BERT to a directory in Hugging Face's layout, without TensorFlow.

A checkpoint consists of `name.index` and data files such as `name.data-00000-of-00001`. The index is a table in LevelDB's format. Its empty key has a
header; every other key is the name of a variable, with the variable's datatype, shape, data file and offset. The data files hold the values alone.
(TensorFlow, core/protobuf/tensor_bundle.proto)

A table ends with a footer of 48 bytes: the handles of two blocks, padding, and a magic number. A handle is an offset and a size, both varints. The second
block is the index block, whose values are the handles of the blocks with the entries. A block is followed by a byte for its compression and a checksum.
An entry is three varints (the number of bytes of the key shared with the key before, of other bytes of the key, and of bytes of the value), then these
bytes of the key, and the value. A block ends with a list of the offsets of entries with unshared keys, and the length of that list.
(LevelDB, doc/table_format.md; TensorFlow, core/lib/io/format.h)
"""

import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.text_models.checkpoint.families import POOLER, weight_names
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.checkpoint.weights import WEIGHTS
from weir.text_models.formats import JsonDocument, Malformed, fields, read_document, read_varint
from weir.text_models.tokenizer_files import has_capitals

FOOTER = 48  # bytes
MAX_INDEX_BYTES = 64 << 20  # of all keys and values together; an index of thousands of variables has a megabyte
MAGIC = bytes.fromhex("57fb808b247547db")


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Return all keys and values of a table in LevelDB's format. Raises Malformed."""
    if len(data) < FOOTER or data[-8:] != MAGIC:
        raise Malformed("it does not end with the footer of a table")
    _, _, position = _handle(data[-FOOTER:], 0)
    start, size, _ = _handle(data[-FOOTER:], position)
    entries: dict[bytes, bytes] = {}
    room = MAX_INDEX_BYTES
    for value in _block(data, start, size, room).values():
        start, size, _ = _handle(value, 0)
        found = _block(data, start, size, room)
        # The limit is counted in decoded bytes: a block may be named twice, and a short entry may stand for a long key.
        room -= sum(map(len, found.keys())) + sum(map(len, found.values()))
        entries |= found
    return entries


def _block(data: bytes, start: int, size: int, room: int) -> dict[bytes, bytes]:
    """Return the entries of one block. Raises Malformed, also if the entries have more than `room` bytes."""
    block = data[start : start + size]
    if len(block) < max(size, 4) or start + size >= len(data):
        raise Malformed("a block is cut off")
    if data[start + size]:
        raise Malformed("a block is compressed, which TensorFlow never does in checkpoints")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    entries: dict[bytes, bytes] = {}
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(block, position)
        own, position = read_varint(block, position)
        length, position = read_varint(block, position)
        if shared > len(key) or position + own + length > end:
            raise Malformed("an entry is cut off")
        room -= shared + own + length
        if room < 0:
            raise Malformed(f"its entries take more than {MAX_INDEX_BYTES >> 20} MiB")
        key = key[:shared] + block[position : position + own]
        entries[key] = block[position + own : position + own + length]
        position += own + length
    return entries


def _handle(data: bytes, position: int) -> tuple[int, int, int]:
    """Return the offset and the size in the handle at `position`, and the position after it."""
    start, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return start, size, position


# TensorFlow's numbers of datatypes (core/framework/types.proto). Variables of other types, such as strings, are not weights.
DTYPES: dict[int, Any] = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 19: np.float16}


class Variable(NamedTuple):
    """An entry of the index: the variable's datatype and shape, the number of its data file, its offset and size there in bytes.

    A sliced variable is stored in parts, which are not supported.
    """

    kind: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    sliced: bool = False


class Bundle:
    """The variables of a checkpoint by name. `prefix` is the path without `.index`."""

    def __init__(self, prefix: Path) -> None:
        """Read the index. Raises SettingsError naming the file if it is missing or broken."""
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + ".index")
        try:
            if self.index.stat().st_size > MAX_INDEX_BYTES:
                raise Malformed(f"it has more than {MAX_INDEX_BYTES >> 20} MiB")
            entries = read_table(self.index.read_bytes())
            self.shards = _header(entries.pop(b"", b""))
            self.variables = {name.decode(): _variable(entry) for name, entry in entries.items()}
        except OSError as error:
            raise SettingsError(f"{self.index}: cannot be read: {error.strerror}") from None
        except (Malformed, UnicodeDecodeError) as error:
            raise SettingsError(f"{self.index}: is broken, or no index of a TensorFlow checkpoint: {error}") from None

    def read(self, name: str) -> NDArray[Any]:
        """Return the values of a variable, mapped from its data file; a scalar has the shape [1].

        Raises SettingsError naming the file: the variable is stored in slices, has another datatype or size, or is cut off.
        """
        variable = self.variables[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{variable.shard:05}-of-{self.shards:05}")
        if variable.kind not in DTYPES or variable.sliced:
            what = f"{name!r} is in slices or of the datatype {variable.kind}"
            raise SettingsError(f"{self.index}: {what}: must be whole and of floats")
        dtype = np.dtype(DTYPES[variable.kind])
        if math.prod(variable.shape) * dtype.itemsize != variable.size or not variable.size:
            rule = f"has {variable.size} bytes, which does not fit its shape {list(variable.shape)}"
            raise SettingsError(f"{self.index}: {name!r} {rule}")
        try:
            if path.stat().st_size < variable.offset + variable.size:
                rule = f"{path}: is truncated: {name!r} would end at byte {variable.offset + variable.size}"
                raise SettingsError(rule)
            return np.memmap(path, dtype=dtype, mode="r", offset=variable.offset, shape=variable.shape or (1,))
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None


def _header(message: bytes) -> int:
    """Return the number of data files in a BundleHeaderProto."""
    known = dict(fields(message))
    shards = known.get(1, 0)
    if not isinstance(shards, int) or shards < 1:
        raise Malformed("it does not say how many data files there are")
    if known.get(2, 0):
        raise Malformed("its numbers are big-endian")
    return shards


def _variable(message: bytes) -> Variable:
    """Return the variable in a BundleEntryProto."""
    sliced, numbers, shape = False, dict.fromkeys((1, 3, 4, 5), 0), b""
    for number, value in fields(message):
        if number == 7:
            sliced = True
        elif number == 2 and isinstance(value, bytes):
            shape = value
        elif number in numbers and isinstance(value, int):
            numbers[number] = value
    sizes = [_size(value) for number, value in fields(shape) if number == 2 and isinstance(value, bytes)]
    return Variable(numbers[1], tuple(sizes), numbers[3], numbers[4], numbers[5], sliced)


def _size(message: bytes) -> int:
    size = dict(fields(message)).get(1, 0)
    if not isinstance(size, int) or size >= 1 << 63:
        raise Malformed("a variable has a dimension of unknown size")
    return size


DEFAULT_NAME = "bert_model.ckpt"
# The names in BERT's run_classifier.py.
HEAD = {"classifier.weight": "output_weights", "classifier.bias": "output_bias"}


def convert(source: Path, target: Path, *, name: str | None = None, cased: bool | None = None) -> Path:
    """Convert a checkpoint of the original BERT to `target`, a new or empty directory, in Hugging Face's layout. Return `target`.

    The weights of a classifier are converted too; the optimiser's variables are not.

    Args:
        source: the directory with bert_config.json (or config.json), vocab.txt and the checkpoint.
        target: the directory to write. It appears complete or not at all.
        name: the name of the checkpoint; by default bert_model.ckpt, or the only checkpoint in the directory.
        cased: whether the model distinguishes capital letters; None if the vocabulary decides by having any.

    Raises SettingsError naming the file and the rule.
    """
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target}: must be a new or empty directory")
    config = read_document(_config(source))
    vocabulary = source / "vocab.txt"
    if not vocabulary.is_file():
        raise SettingsError(f"{source}: has no vocab.txt")
    bundle = Bundle(source / _checkpoint_name(source, name))
    names = _variables(bundle, config.integer("num_hidden_layers"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        converted = Path(folder) / "converted"
        converted.mkdir()
        _write_weights(converted / WEIGHTS, bundle, names)
        _write_settings(converted, config, bundle, vocabulary, cased)
        read_checkpoint(converted).tokenizer()  # checks the result
        if target.exists():
            target.rmdir()
        converted.rename(target)
    return target


def _config(source: Path) -> Path:
    for name in ("bert_config.json", "config.json"):
        if (source / name).is_file():
            return source / name
    raise SettingsError(f"{source}: has no bert_config.json: must be a directory with an original BERT")


def _checkpoint_name(source: Path, name: str | None) -> str:
    found = sorted(path.name.removesuffix(".index") for path in source.glob("*.index"))
    chosen = name if name is not None else DEFAULT_NAME if DEFAULT_NAME in found or len(found) != 1 else found[0]
    if chosen not in found:
        raise SettingsError(f"{source}: has no {chosen}.index; available checkpoints: {', '.join(found) or 'none'}")
    return chosen


def _variables(bundle: Bundle, layers: int) -> dict[str, str]:
    """Return the name of the variable for each weight, by the name of the weight in the new file."""
    inner = weight_names("bert", layers) | POOLER
    names = {plain: _tensorflow_name(plain) for plain in inner.values()}
    if all(variable in bundle.variables for variable in HEAD.values()):
        names = {f"bert.{plain}": variable for plain, variable in names.items()} | HEAD
    for variable in names.values():
        if variable not in bundle.variables:
            raise SettingsError(f"{bundle.index}: has no {variable!r}: must be a checkpoint of the original BERT")
    return names


def _tensorflow_name(name: str) -> str:
    """Return the name of the variable that has the weight `name`, a name in Hugging Face's files."""
    path = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", name).replace(".", "/")
    path = re.sub(r"_embeddings/weight$", "_embeddings", path)
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    return "bert/" + re.sub(r"/weight$", "/kernel", path)


def _array(bundle: Bundle, variable: str) -> NDArray[Any]:
    value = bundle.read(variable)
    # TensorFlow's kernels are [inputs, outputs], torch's weights [outputs, inputs].
    return value.T if variable.endswith("/kernel") else value


def _write_weights(path: Path, bundle: Bundle, names: dict[str, str]) -> None:
    """Write a safetensors file. Only one weight is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, variable in names.items():
        value = _array(bundle, variable)
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [position, position + 4 * value.size]}
        position += 4 * value.size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for variable in names.values():
            file.write(np.ascontiguousarray(_array(bundle, variable), dtype="<f4").data)


def _write_settings(folder: Path, config: JsonDocument, bundle: Bundle, vocabulary: Path, cased: bool | None) -> None:
    """Write vocab.txt and the configurations of model and tokenizer."""
    shutil.copyfile(vocabulary, folder / "vocab.txt")
    if cased is None:
        cased = has_capitals(vocabulary.read_text(encoding="utf-8", errors="replace").split("\n"))
    kind = "BertModel"
    labels: dict[str, Any] = {}
    if HEAD["classifier.bias"] in bundle.variables:
        kind = "BertForSequenceClassification"
        count = bundle.read(HEAD["classifier.bias"]).size
        labels = {"id2label": {str(label): f"LABEL_{label}" for label in range(count)}}
    own = {"model_type": "bert", "architectures": [kind], "layer_norm_eps": 1e-12, "pad_token_id": 0}
    whole, longest = config.values | own | labels, config.integer("max_position_embeddings")
    text = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased, "model_max_length": longest}
    for name, value in (("config.json", whole), ("tokenizer_config.json", text)):
        (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
