"""The formats of models' files: JSON documents, fields of protocol buffers, and the names of ONNX files.

Errors name the file, the key, the value and the rule.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weir.errors import SettingsError

MAX_BYTES = 64 << 20  # of a JSON file that is read whole; vocabularies are the largest


class NotComputed(SettingsError):
    """The network is valid, but not computed from its weights here: transformers computes it, or an ONNX file."""


class JsonDocument:
    """A JSON object from the file `path`. A key whose value is null counts as missing.

    Every getter raises SettingsError naming the file, the key, the value and the rule.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer, at least `least`, under the first of `keys` that is there, else `default`. With None as the default, one must be there."""
        key, value = self._first(keys, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, value, f"must be a whole number of at least {least}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return the positive, finite number under the first of `keys` that is there, else `default`. With None as the default, one must be there."""
        key, value = self._first(keys, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "must be a positive number")
        return float(value)

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return the string under the first of `keys` that is there, else `default`. With None as the default, one must be there."""
        key, value = self._first(keys, default)
        if type(value) is not str:
            raise self.wrong(key, value, "must be a string")
        return value

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Return the boolean under `key`, or `default` if there is none."""
        _, value = self._first((key,), default)
        if type(value) is not bool:
            raise self.wrong(key, value, "must be true or false")
        return value

    def wrong(self, key: str, value: object, rule: str) -> SettingsError:
        """Return the error for the value under `key`, which breaks `rule`."""
        return SettingsError(f"{self.path}: {key}={value!r}: {rule}")

    def not_computed(
        self, key: str, value: object, rule: str, others: str = "others are served with --runtime torch"
    ) -> NotComputed:
        """Return the error for a network that is not computed from its weights here, as the value under `key` breaks `rule`."""
        return NotComputed(f"{self.path}: {key}={value!r}: {rule}; {others}")

    def _first(self, keys: tuple[str, ...], default: object) -> tuple[str, Any]:
        for key in keys:
            if key in self:
                return key, self.values[key]
        if default is None:
            raise SettingsError(f"{self.path}: has no {' or '.join(keys)}, which the model cannot be read without")
        return keys[0], default


def read_document(path: Path) -> JsonDocument:
    """Read a file that holds one JSON object. Raises SettingsError if it is missing, larger than MAX_BYTES, or not a JSON object."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: must hold a JSON object")
    return JsonDocument(path, values)


def read_optional(path: Path) -> JsonDocument:
    """Read a file as `read_document` does; without a file return an empty document. Raises SettingsError."""
    return read_document(path) if path.is_file() else JsonDocument(path, {})


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises SettingsError if it is missing, larger than MAX_BYTES, or not JSON."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, the most for a JSON file of a model")
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: is not JSON: {error}") from None


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of Protocol Buffers


class Malformed(ValueError):
    """The bytes do not follow the file format."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of an encoded Protocol Buffers message, in order.

    The value of a varint or fixed-width field is the unsigned integer of its bits. (https://protobuf.dev/programming-guides/encoding)

    Raises Malformed if the message is cut off or has another wire type.
    """
    offset = 0
    while offset < len(message):
        tag, offset = read_varint(message, offset)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == VARINT:
            value, offset = read_varint(message, offset)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            value, offset = int.from_bytes(message[offset : offset + size], "little"), offset + size
        elif kind == BYTES:
            size, offset = read_varint(message, offset)
            value, offset = message[offset : offset + size], offset + size
        else:
            raise Malformed(f"a field has the wire type {kind}, which does not exist")
        if offset > len(message):
            raise Malformed("a field is cut off")
        yield number, value


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at `offset`, and the offset after it. A varint is an integer in groups of seven bits, lowest group first.

    Raises Malformed if the varint is cut off, or longer than the ten bytes of 64 bits.
    """
    number = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            break
        byte = data[offset]
        offset += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, offset
    raise Malformed("a number is cut off")


RUNTIMES = ("onnx", "torch", "onnx-file")
DEVICE_RULE = "must be auto, cpu, cuda, or the number of a GPU: cuda:1, or 1"
# The files of each variant of an ONNX file, of which the first that a repository has is served: as transformers.js and sentence-transformers call them.
MODEL, ENDING = "model.onnx", ".onnx"
DTYPES: Mapping[str, Sequence[str]] = {
    "fp32": (MODEL,), "float32": (MODEL,), "fp16": ("model_fp16.onnx",), "float16": ("model_fp16.onnx",),
    "int8": ("model_int8.onnx", "model_quantized.onnx"), "uint8": ("model_uint8.onnx",), "q8": ("model_quantized.onnx", "model_int8.onnx"),
    "q4": ("model_q4.onnx",), "q4f16": ("model_q4f16.onnx",), "bnb4": ("model_bnb4.onnx",),
    **{level: (f"model_{level}.onnx",) for level in ("O1", "O2", "O3", "O4")},
}  # fmt: skip


def is_device(name: object) -> bool:
    """Return whether `name` obeys DEVICE_RULE."""
    return isinstance(name, str) and re.fullmatch(r"auto|cpu|cuda|(cuda:)?\d+", name) is not None


def is_dtype(name: str) -> bool:
    """Return whether `name` is a variant in DTYPES, or the name of a file."""
    return name in DTYPES or (name.endswith(ENDING) and "/" not in name)
