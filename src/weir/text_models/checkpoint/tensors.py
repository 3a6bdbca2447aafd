"""Open files of weights and map them into memory: safetensors, and the archives that torch.save writes.

Such an archive has a pickle in addition to the values of its tensors. It is not unpickled: `open_pickled` reads the few instructions of which a table of tensors is
made, calls nothing, and refuses all others.
"""

import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError

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
        raise SettingsError("safetensors is missing: pip install 'weir-serving[embed]'") from None
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
            f"{path}: is broken, or is no archive of tensors of torch 1.6 or later: {' '.join(str(error).split())[:200]}"
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
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """Return the value that the pickle describes. Raises _Unreadable for an instruction or a call that no table of tensors has."""
        for instruction, argument, _ in pickletools.genops(pickle):
            name = instruction.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                self._stack.append(argument)
            elif (step := getattr(self, f"_{name.lower()}", None)) is not None:
                step(argument)
            elif name not in ("PROTO", "FRAME"):
                raise _Unreadable(f"its pickle has the instruction {name}")
        raise _Unreadable("its pickle has no end")

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(_Global(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Global(module, name))

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _empty_tuple(self, _: Any) -> None:
        self._stack.append(())

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _tuple1(self, _: Any) -> None:
        self._stack.append((self._stack.pop(),))

    def _tuple2(self, _: Any) -> None:
        self._stack[-2:] = [tuple(self._stack[-2:])]

    def _tuple3(self, _: Any) -> None:
        self._stack[-3:] = [tuple(self._stack[-3:])]

    def _setitem(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._stack[-1][key] = value

    def _setitems(self, _: Any) -> None:
        pairs = self._since_mark()
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value)

    def _appends(self, _: Any) -> None:
        values = self._since_mark()
        self._stack[-1].extend(values)

    def _put(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    _binget = _long_binget = _get

    def _binpersid(self, _: Any) -> None:
        """Keep the description of a storage: ("storage", class, key, device, elements)."""
        kind = self._stack[-1]
        if not (isinstance(kind, tuple) and len(kind) == 5 and kind[0] == "storage" and isinstance(kind[1], _Global)):
            raise _Unreadable("its pickle refers to something other than a storage")

    def _build(self, _: Any) -> None:
        """Drop the attributes of a dictionary: the versions of the modules, which say nothing of the weights."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise _Unreadable("its pickle sets attributes of an object")

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if function == _Global("collections", "OrderedDict"):
            self._stack.append(dict(*arguments))
        elif function == _Global("torch._utils", "_rebuild_tensor_v2"):
            (_, kind, key, *_), offset, shape, strides, *_ = arguments
            self._stack.append(
                _Stored(kind.name, str(key), int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
            )
        elif function == _Global("torch._utils", "_rebuild_parameter"):
            self._stack.append(arguments[0])
        else:
            called = ".".join(function) if isinstance(function, _Global) else "an object"
            raise _Unreadable(f"its pickle would call {called}")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "INT", "LONG1", "LONG", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINSTRING", "SHORT_BINSTRING",
})  # fmt: skip
