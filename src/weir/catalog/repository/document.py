"""What a model's file says, read and checked: its keys, and the settings of the repository."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weir.catalog.repository.platforms import ENSEMBLE, read_steps
from weir.catalog.repository.triton import read_pbtxt, translated
from weir.errors import SettingsError
from weir.model import NONE, OPTIONAL, REQUIRED

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "name": "name of the model; must be the folder's",
        "platform": "`python`, `onnx`, `ensemble`, or one that a package brings (entry point `weir.platforms`); without it, what the files are",
        "target": "of platform python: `FILE.py:Class` in the version's folder, or `module:Class`; without it, the one model of `file`",
        "file": "file in the version's folder; `model.py`, or the only `.onnx` file",
        "versions": 'versions to serve: "all" (the default), a list such as ["1", "3"], or how many of the highest',
        "default": "version that is meant where none is named; the highest",
        "steps": "of platform ensemble: tables with `model`, `version`, `inputs` and `outputs`, or with `branch`, or with `switch`",
        "params": "table of arguments for the model's constructor",
        "route": "path of the model's own, or a list of them",
        "inputs": "tables with `name`, `datatype` and `shape` of each input tensor; must agree with what the model itself says",
        "outputs": "the same of each output tensor",
        "batch_dimension": "whether requests have the batch as first dimension: `required`, `optional` (one row may come without) or `none` (each runs alone, as it is); without it, what the model itself says, and `max_batch_size` (0: none)",
        "examples": "list of items, or of tables of arrays, to warm up with and to check health by",
        "warmup_sizes": "batch sizes to warm up at",
    }
)

TOML, PBTXT = "config.toml", "config.pbtxt"
LARGEST = 1 << 20  # bytes of such a file

# Takes a table of settings and where it stands; returns their values, of the declared types. Raises SettingsError.
ReadSettings = Callable[[dict[str, Any], str], dict[str, Any]]


class ModelDocument(NamedTuple):
    """`attributes` are those that the model's class gets: inputs, outputs, examples, warmup_sizes; `batch_dimension`, which
    its tensors get; and `decoupled`, where it must stream."""

    platform: str | None = None
    target: str | None = None
    file: str | None = None
    versions: str | int | tuple[str, ...] = "all"
    default: str | None = None
    params: Mapping[str, Any] = {}
    route: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}


def read_file(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """Return what the file in `folder`, of the model `name`, says, and what to call it; nothing if there is none.

    Raises SettingsError naming the file, and where it is broken.
    """
    for ending, read in ((TOML, _read_toml), (PBTXT, read_pbtxt)):
        file = folder / ending
        if file.is_file():
            source = f"{name}/{ending}"
            try:
                if file.stat().st_size > LARGEST:
                    raise SettingsError(f"{source}: is larger than {LARGEST} bytes")
                return read(file.read_text("utf-8"), source), source
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{source}: cannot be read: {error}") from error
    return {}, name


def _read_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{source}: must be TOML: {error}") from error


# Keys that mean something of models in a repository only.
_OF_REPOSITORIES = ("default", "file", "route", "steps", "target", "versions")


def make_document(
    content: Mapping[str, Any], name: str, source: str, read_settings: ReadSettings,
    config: Mapping[str, Any] | None = None,
) -> ModelDocument:  # fmt: skip
    """Return what `content` in the model's file means; what `config`, of a load call, says goes before it. Raises SettingsError
    naming key, value and rule."""
    own = {**translated(content, source), **translated(config or {}, name)}
    if own.get("name", name) != name:
        raise SettingsError(f"{source}: name={own['name']!r}: must be the name of the folder, {name!r}")
    settings = read_settings({key: value for key, value in own.items() if key not in (*KEYS, "decoupled")}, source)
    attributes: dict[str, Any] = {key: tuple(own[key]) for key in ("inputs", "outputs") if _tables(own, key, source)}
    attributes |= {key: tuple(own[key]) for key in ("examples", "warmup_sizes") if _list(own, key, source)}
    if (batch := _text(own, "batch_dimension", source)) is not None:
        if batch not in (REQUIRED, OPTIONAL, NONE):
            raise SettingsError(f"{source}: batch_dimension={batch!r}: must be {REQUIRED!r}, {OPTIONAL!r} or {NONE!r}")
        attributes["batch_dimension"] = batch
    if own.get("decoupled"):
        attributes["decoupled"] = True
    if _list(own, "steps", source):
        if own.get("platform") != ENSEMBLE:
            raise SettingsError(f"{source}: steps: are for platform = {ENSEMBLE!r}")
        attributes["steps"] = tuple(read_steps(own["steps"], source))
    return ModelDocument(
        platform=_text(own, "platform", source), target=_text(own, "target", source), file=_text(own, "file", source),
        versions=_versions(own.get("versions", "all"), source), default=_text(own, "default", source),
        params=_table(own, "params", source), route=_route(own.get("route", []), source), attributes=attributes,
        settings=settings,
    )  # fmt: skip


def read_config(config: Mapping[str, Any], name: str, read_settings: ReadSettings) -> ModelDocument:
    """Return what the `config` of a load call means of a model that is in no repository. Raises SettingsError."""
    document = make_document({}, name, name, read_settings, config)
    for key in _OF_REPOSITORIES:
        if key in translated(config, name):
            raise SettingsError(f"{name}: {key}: is for models of a repository")
    return document


def _text(content: Mapping[str, Any], key: str, source: str) -> str | None:
    value = content.get(key)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"{source}: {key}={value!r}: must be text")
    return value


def _table(content: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{source}: {key}={value!r}: must be a table")
    return dict(value)


def _list(content: Mapping[str, Any], key: str, source: str) -> bool:
    if key in content and not isinstance(content[key], list):
        raise SettingsError(f"{source}: {key}={content[key]!r}: must be a list")
    return key in content


def _tables(content: Mapping[str, Any], key: str, source: str) -> bool:
    if not _list(content, key, source):
        return False
    for table in content[key]:
        shape = table.get("shape")
        if not (isinstance(shape, list) and all(isinstance(length, int) for length in shape)):
            raise SettingsError(f"{source}: {key}: shape={shape!r}: must be a list of whole numbers")
        if not (isinstance(table["name"], str) and table["name"]):
            raise SettingsError(f"{source}: {key}: name={table['name']!r}: must be text")
    return bool(content[key])


def _route(value: Any, source: str) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
        raise SettingsError(f"{source}: route={value!r}: must be a path or a list of paths")
    return tuple(paths)


def _versions(value: Any, source: str) -> str | int | tuple[str, ...]:
    if value == "all":
        return "all"
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, list) and value and all(isinstance(each, (str, int)) for each in value):
        return tuple(map(str, value))
    raise SettingsError(
        f'{source}: versions={value!r}: must be "all", a list of versions, or how many of the highest are served'
    )
