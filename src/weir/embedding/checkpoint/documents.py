"""JSON files of a model's directory, read with errors that name the file and the key."""

from pathlib import Path
from typing import Any

import msgspec

from weir.errors import SettingsError

MOST_BYTES = 64 << 20  # of a JSON file that is read whole; vocabularies are the largest


class Document:
    """A JSON object in a file. Every getter raises SettingsError naming the file, the key and the rule."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the whole number under the first of `keys` that is there, else `default` (None: it must be there)."""
        key, value = self._first(keys, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, value, f"must be a whole number of at least {least}")
        return value

    def number(self, *keys: str, default: float) -> float:
        """Return the positive number under the first of `keys` that is there, else `default`."""
        key, value = self._first(keys, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "must be a positive number")
        return float(value)

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return the string under the first of `keys` that is there, else `default` (None: it must be there)."""
        key, value = self._first(keys, default)
        if type(value) is not str:
            raise self.wrong(key, value, "must be a string")
        return value

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Return the true or false under `key`, else `default`."""
        _, value = self._first((key,), default)
        if type(value) is not bool:
            raise self.wrong(key, value, "must be true or false")
        return value

    def wrong(self, key: str, value: object, rule: str) -> SettingsError:
        """Return the error for a value that breaks `rule`."""
        return SettingsError(f"{self.path}: {key}={value!r}: {rule}")

    def _first(self, keys: tuple[str, ...], default: object) -> tuple[str, Any]:
        for key in keys:
            if key in self:
                return key, self.values[key]
        if default is None:
            raise SettingsError(f"{self.path}: has no {' or '.join(keys)}, which the model cannot be read without")
        return keys[0], default


def read_document(path: Path) -> Document:
    """Read a file that holds one JSON object. Raises SettingsError if it is missing, too large or something else."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: must hold a JSON object")
    return Document(path, values)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises SettingsError if it is missing, too large or not JSON."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SettingsError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, which none of these files is")
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: is not JSON: {error}") from None
