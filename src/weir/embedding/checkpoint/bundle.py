"""Checkpoints of TensorFlow (`name.index` and `name.data-00000-of-00001`), read without it.

The index is a table (table.py): the empty key has a header, every other one is a variable's name with its datatype, shape and place
in a data file. The data files hold nothing but the values. (TensorFlow, core/protobuf/tensor_bundle.proto)
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.embedding.checkpoint.table import MOST_BYTES, read_table
from weir.embedding.tokens.files import Malformed, fields
from weir.errors import SettingsError

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
