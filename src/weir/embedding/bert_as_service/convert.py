"""Converting BERT's original TensorFlow checkpoints to a directory that everything else reads, without TensorFlow.

A checkpoint is `name.index` and `name.data-00000-of-00001`. The index is a table of LevelDB's format: the empty key has a header, every other key is a
variable's name, with its datatype, shape and place in a data file. The data files hold nothing but the values.
(TensorFlow, core/protobuf/tensor_bundle.proto)

A table ends in a footer of 48 bytes: the places of two blocks as varints, padding, and a magic number. The second block is the index: its
values are the places of the blocks with the entries. Behind each block stand a byte for its compression and a checksum. In a block, an entry is
three varints (bytes of the key shared with the one before, other bytes of the key, bytes of the value), then key and value; the block ends in
a list of places where keys are whole, and their number.
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

from weir.embedding.checkpoint.config import JsonDocument, read_document
from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.checkpoint.weights import WEIGHTS, names_of
from weir.embedding.tokens.files import Malformed, fields, has_capitals, read_varint
from weir.errors import SettingsError

FOOTER = 48
MOST_BYTES = 64 << 20  # of all keys and values: an index of thousands of variables has a megabyte
MAGIC = bytes.fromhex("57fb808b247547db")


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Return all keys and values of a table. Raises Malformed."""
    if len(data) < FOOTER or data[-8:] != MAGIC:
        raise Malformed("it does not end as a table does")
    _, _, place = _handle(data[-FOOTER:], 0)
    start, size, _ = _handle(data[-FOOTER:], place)
    entries: dict[bytes, bytes] = {}
    room = MOST_BYTES
    for value in _block(data, start, size, room).values():
        start, size, _ = _handle(value, 0)
        found = _block(data, start, size, room)
        # Blocks may be named twice, and short entries stand for long keys.
        room -= sum(len(key) + len(one) for key, one in found.items())
        entries |= found
    return entries


def _block(data: bytes, start: int, size: int, room: int) -> dict[bytes, bytes]:
    block = data[start : start + size]
    if len(block) < max(size, 4) or start + size >= len(data):
        raise Malformed("a block is cut off")
    if data[start + size]:
        raise Malformed("a block is compressed, which TensorFlow does not do to checkpoints")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    entries: dict[bytes, bytes] = {}
    key, place = b"", 0
    while place < end:
        shared, place = read_varint(block, place)
        own, place = read_varint(block, place)
        length, place = read_varint(block, place)
        if shared > len(key) or place + own + length > end:
            raise Malformed("an entry is cut off")
        room -= shared + own + length
        if room < 0:
            raise Malformed(f"its entries take more than {MOST_BYTES >> 20} MiB")
        key = key[:shared] + block[place : place + own]
        entries[key] = block[place + own : place + own + length]
        place += own + length
    return entries


def _handle(data: bytes, place: int) -> tuple[int, int, int]:
    start, place = read_varint(data, place)
    size, place = read_varint(data, place)
    return start, size, place


# TensorFlow's numbers of the datatypes that weights have; the other variables (such as the step) are not asked for.
KINDS: dict[int, Any] = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 19: np.float16}


class Variable(NamedTuple):
    """Where a variable's values are."""

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
            if self.index.stat().st_size > MOST_BYTES:
                raise Malformed(f"it has more than {MOST_BYTES >> 20} MiB")
            entries = read_table(self.index.read_bytes())
            self.shards = _header(entries.pop(b"", b""))
            self.variables = {name.decode(): _variable(entry) for name, entry in entries.items()}
        except OSError as error:
            raise SettingsError(f"{self.index}: cannot be read: {error.strerror}") from None
        except (Malformed, UnicodeDecodeError) as error:
            raise SettingsError(f"{self.index}: is broken, or no index of a TensorFlow checkpoint: {error}") from None

    def read(self, name: str) -> NDArray[Any]:
        """Return a variable, mapped from its file. Raises SettingsError naming the file if it does not hold it."""
        known = self.variables[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{known.shard:05}-of-{self.shards:05}")
        if known.kind not in KINDS or known.sliced:
            raise SettingsError(
                f"{self.index}: {name!r} is in slices or of the datatype {known.kind}: must be whole and of floats"
            )
        kind = np.dtype(KINDS[known.kind])
        if math.prod(known.shape) * kind.itemsize != known.size or not known.size:
            raise SettingsError(
                f"{self.index}: {name!r} has {known.size} bytes, its shape {list(known.shape)} takes others"
            )
        try:
            if path.stat().st_size < known.offset + known.size:
                raise SettingsError(f"{path}: is cut off: {name!r} would end at byte {known.offset + known.size}")
            return np.memmap(path, dtype=kind, mode="r", offset=known.offset, shape=known.shape or (1,))
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None


def _header(message: bytes) -> int:
    """Return the number of data files."""
    known = dict(fields(message))
    shards = known.get(1, 0)
    if not isinstance(shards, int) or shards < 1:
        raise Malformed("it does not say how many data files there are")
    if known.get(2, 0):
        raise Malformed("its numbers are big-endian")
    return shards


def _variable(message: bytes) -> Variable:
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
        raise Malformed("a variable's shape is not known")
    return size


USUAL = "bert_model.ckpt"
HEAD = {"classifier.weight": "output_weights", "classifier.bias": "output_bias"}  # of the original run_classifier.py


def convert(source: Path, target: Path, *, name: str | None = None, cased: bool | None = None) -> Path:
    """Convert a checkpoint of the original BERT and return `target`, a new directory in Hugging Face's layout.

    `source` holds bert_config.json, vocab.txt and a checkpoint: `name`, or bert_model.ckpt, or the only one that is there. `cased` says whether
    capitals count (None: they do if the vocabulary has any). A classifier that was trained on top is taken along. What the optimiser
    noted is left out. Nothing is left in `target` unless all went well.

    Raises SettingsError naming the file and the rule.
    """
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target}: must be a new or empty directory")
    config = read_document(_config(source))
    vocabulary = source / "vocab.txt"
    if not vocabulary.is_file():
        raise SettingsError(f"{source}: has no vocab.txt")
    bundle = Bundle(source / _name(source, name))
    names = _names(bundle, config.integer("num_hidden_layers"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        _write(made / WEIGHTS, bundle, names)
        _settings(made, config, bundle, vocabulary, cased)
        read_checkpoint(made).tokenizer()  # what is wrong shows here
        if target.exists():
            target.rmdir()
        made.rename(target)
    return target


def _config(source: Path) -> Path:
    for name in ("bert_config.json", "config.json"):
        if (source / name).is_file():
            return source / name
    raise SettingsError(f"{source}: has no bert_config.json: must be a directory with an original BERT")


def _name(source: Path, name: str | None) -> str:
    found = sorted(path.name.removesuffix(".index") for path in source.glob("*.index"))
    wanted = name if name is not None else USUAL if USUAL in found or len(found) != 1 else found[0]
    if wanted not in found:
        raise SettingsError(f"{source}: has no {wanted}.index; the checkpoints there: {', '.join(found) or 'none'}")
    return wanted


def _names(bundle: Bundle, layers: int) -> dict[str, str]:
    """Return the variable for each weight, by the weight's name in the new file."""
    inner = names_of("bert", layers) | {"pooler.weight": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
    names = {plain: _tensorflow_name(plain) for plain in inner.values()}
    if all(variable in bundle.variables for variable in HEAD.values()):
        names = {f"bert.{plain}": variable for plain, variable in names.items()} | HEAD
    for variable in names.values():
        if variable not in bundle.variables:
            raise SettingsError(f"{bundle.index}: has no {variable!r}: must be a checkpoint of the original BERT")
    return names


def _tensorflow_name(name: str) -> str:
    """Return what TensorFlow calls a weight."""
    path = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", name).replace(".", "/")
    path = re.sub(r"_embeddings/weight$", "_embeddings", path)
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    return "bert/" + re.sub(r"/weight$", "/kernel", path)


def _array(bundle: Bundle, variable: str) -> NDArray[Any]:
    value = bundle.read(variable)
    # TensorFlow multiplies by kernels from the right: their inputs come first.
    return value.T if variable.endswith("/kernel") else value


def _write(path: Path, bundle: Bundle, names: dict[str, str]) -> None:
    """Write a safetensors file one weight after the other, so that no more than one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, variable in names.items():
        value = _array(bundle, variable)
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [place, place + 4 * value.size]}
        place += 4 * value.size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for variable in names.values():
            file.write(np.ascontiguousarray(_array(bundle, variable), dtype="<f4").data)


def _settings(made: Path, config: JsonDocument, bundle: Bundle, vocabulary: Path, cased: bool | None) -> None:
    """Write the configuration of model and tokenizer."""
    shutil.copyfile(vocabulary, made / "vocab.txt")
    if cased is None:
        cased = has_capitals(vocabulary.read_text(encoding="utf-8", errors="replace").split("\n"))
    kind = "BertModel"
    labels: dict[str, Any] = {}
    if HEAD["classifier.bias"] in bundle.variables:
        kind = "BertForSequenceClassification"
        count = bundle.read(HEAD["classifier.bias"]).size
        labels = {"id2label": {str(label): f"LABEL_{label}" for label in range(count)}}
    whole = (
        config.values
        | {"model_type": "bert", "architectures": [kind], "layer_norm_eps": 1e-12, "pad_token_id": 0}
        | labels
    )
    text = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not cased,
        "model_max_length": config.integer("max_position_embeddings"),
    }
    for name, value in (("config.json", whole), ("tokenizer_config.json", text)):
        (made / name).write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
