"""Arrays of a safetensors file, mapped into memory: nothing is read before it is looked at.

The file is eight bytes with the length of a header, the header (JSON: name to datatype, shape and place), and the values.
The library of that name copies each array into memory of its own, and has no bfloat16 for numpy; here what is kept in
float32 is a view of the file's pages, which all processes that read it share.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError

Array = NDArray[Any]

MOST_HEADER_BYTES = 100_000_000  # as in the library
# Datatypes that weights have, and how their bytes are looked at.
KINDS: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


class Place(NamedTuple):
    """Where a tensor lies in its file, in bytes behind the header."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile(Mapping[str, Array]):
    """The tensors of one file by name. Those that are floats come as float32, whatever they are kept in."""

    def __init__(self, path: Path, places: dict[str, Place], data: NDArray[np.uint8]) -> None:
        self.path = path
        self.places = places
        self.data = data

    def __getitem__(self, name: str) -> Array:
        place = self.places[name]
        stored = self.data[place.start : place.stop].view(KINDS[place.kind]).reshape(place.shape)
        if place.kind == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if place.kind in FLOATS:
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
        return self.places[name].kind in FLOATS


def open_tensors(path: Path) -> TensorFile:
    """Read the header of a safetensors file and map the rest. Raises SettingsError naming the file and what is broken."""
    try:
        size = path.stat().st_size
        if size < 10:
            raise broken(path, "it has less than 10 bytes")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise broken(path, f"its header would have {length} bytes, the file has {size}")
            header = file.read(length)
        data = np.memmap(path, dtype=np.uint8, mode="r")[8 + length :]
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    return TensorFile(path, _places(path, header, len(data)), data)


def broken(path: Path, why: str) -> SettingsError:
    """Return the error for a file that is not what its name says."""
    return SettingsError(f"{path}: is broken, or no safetensors file: {why}")


def _places(path: Path, header: bytes, size: int) -> dict[str, Place]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise broken(path, f"its header is no JSON object of objects: {error}") from None
    entries.pop("__metadata__", None)
    if not entries:
        raise broken(path, "it has no tensors")
    return {name: _place(path, name, entry, size) for name, entry in entries.items()}


def _place(path: Path, name: str, entry: dict[str, Any], size: int) -> Place:
    try:
        kind = msgspec.convert(entry.get("dtype"), str)
        shape = msgspec.convert(entry.get("shape"), tuple[int, ...])
        start, stop = msgspec.convert(entry.get("data_offsets"), tuple[int, int])
    except msgspec.ValidationError as error:
        raise broken(path, f"{name!r} does not say its dtype, shape and data_offsets: {error}") from None
    if kind not in KINDS:
        raise SettingsError(f"{path}: {name!r} is of the datatype {kind}: must be one of {', '.join(KINDS)}")
    count = 1
    for number in shape:
        count *= number
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= size:
        raise broken(path, f"{name!r} would end at byte {stop} of {size}")
    if count * np.dtype(KINDS[kind]).itemsize != stop - start:
        raise broken(path, f"{name!r} has {stop - start} bytes, its shape {list(shape)} of {kind} takes others")
    return Place(kind, shape, start, stop)
