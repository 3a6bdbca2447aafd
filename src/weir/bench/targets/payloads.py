"""What is sent: `--data`, or the example that the model gives of itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weir.errors import SettingsError

_LINES = (".jsonl", ".ndjson")


def read_payloads(data: str | Sequence[Any]) -> list[bytes]:
    """Return the bodies to send, one after the other and round again.

    `data` is the body itself, `@PATH` for the content of a file, of which each line is a body if its name ends with .jsonl
    or .ndjson; or a sequence of values, each sent as JSON. Raises SettingsError for a file that cannot be read or is
    empty, and for values that are not JSON.
    """
    if not isinstance(data, str):
        try:
            bodies = [msgspec.json.encode(value) for value in data]
        except TypeError as error:
            raise SettingsError(f"data: {error}") from error
        return _some(bodies, "data")
    if not data.startswith("@"):
        return [data.encode()]
    path = Path(data[1:])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"data={data!r}: cannot be read: {error.strerror}") from error
    if path.suffix in _LINES:
        return _some([line for line in content.splitlines() if line.strip()], f"data={data!r}")
    return [content]


def _some(bodies: list[bytes], source: str) -> list[bytes]:
    if not bodies:
        raise SettingsError(f"{source}: must have at least one value")
    return bodies


def decode_items(bodies: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON bodies, for a model in this process. Raises SettingsError."""
    try:
        return [msgspec.json.decode(body) for body in bodies]
    except msgspec.DecodeError as error:
        raise SettingsError(f"data: must be JSON for a model in this process: {error}") from error
