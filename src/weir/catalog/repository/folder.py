"""The repository of a folder of models: it reads their files, and `--watch` loads models again when their files change.

InlineConfigs is another repository: the chains that load calls describe.
"""

import asyncio
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.catalog.registry import version_order
from weir.catalog.repository.model_files import MAX_FILE_BYTES, MAX_PATH_LENGTH, config_bytes
from weir.catalog.repository.platforms import ENSEMBLE, guess, read_steps
from weir.catalog.repository.triton import read_pbtxt, translated
from weir.catalog.sources import (
    ARCHIVES,
    TORCHSERVE,
    ModelReading,
    ModelToServe,
    Trust,
    archives_in,
    default_name,
    is_archive,
    platform_of_target,
)
from weir.errors import InvalidRequest, ModelError, ModelNotFound, SettingsError, WeirError, add_extra, brief
from weir.model import NONE, OPTIONAL, REQUIRED
from weir.serving import NAME, is_name
from weir.serving.delivery import logger
from weir.workers.source import ModelFolder, private_folder, reading
from weir.workers.timer import end_tasks, in_background

if TYPE_CHECKING:
    from weir.catalog.manager import Manager


KEYS: Mapping[str, str] = MappingProxyType(
    {
        "name": "name of the model; must be the folder's name",
        "platform": "`python`, `onnx`, `ensemble`, or a package's (entry point `weir.platforms`); default: by the files",
        "target": "python: `FILE.py:Class` in the version's folder, or `module:Class`; default: the only model of `file`",
        "file": "file in the version's folder; default: `model.py`, or the only `.onnx` file",
        "versions": '"all" (default), a list such as ["1", "3"], or how many of the highest',
        "default": "version for requests that name none; default: the highest",
        "steps": "ensemble: tables with `model`, `version`, `inputs` and `outputs`, or with `branch`, or with `switch`",
        "params": "table of arguments for the model's constructor",
        "route": "the model's own path, or a list of paths",
        "inputs": "tables with `name`, `datatype` and `shape`; must agree with the model",
        "outputs": "the same",
        "batch_dimension": "`required`, `optional` (a request of one row may leave it out) or `none` (each request runs alone); default: by the model and `max_batch_size` (0: none)",
        "examples": "items, or tables of arrays, for warm-up and health checks",
        "warmup_sizes": "batch sizes to warm up at",
    }
)

TOML, PBTXT = "config.toml", "config.pbtxt"
MLSERVER_FILE = "model-settings.json"
_MODEL_FILES = ("model.py", "model.onnx", "model.skops", "model.joblib")

# Takes a table of settings and the name of its source; returns their values in the declared types. Raises SettingsError.
ReadSettings = Callable[[dict[str, Any], str], dict[str, Any]]


class ModelDocument(NamedTuple):
    """A model's configuration. KEYS explains the fields.

    `attributes` are those for the model's class: inputs, outputs, examples, warmup_sizes; `batch_dimension`, for its tensors; and
    `decoupled`, if it must stream. `settings` are all keys that are not in KEYS.
    """

    platform: str | None = None
    target: str | None = None
    file: str | None = None
    versions: str | int | tuple[str, ...] = "all"
    default: str | None = None
    params: Mapping[str, Any] = {}
    route: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}

    def model(self, target: str, name: str, settings: dict[str, Any], **more: Any) -> ModelToServe:
        """Return the model `name`, which serves `target` with these settings; `more` are further fields of ModelToServe."""
        params, routes = dict(self.params), list(self.route)
        return ModelToServe(target, name, params, routes, settings, attributes=self.attributes, **more)


def read_file(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """Return the content of the configuration in `folder` of the model `name`, and a name of the file for errors.

    The content is empty if there is no file. Raises SettingsError naming the file and what is wrong with it.
    """
    for ending, read in ((TOML, _read_toml), (PBTXT, read_pbtxt)):
        file = folder / ending
        if file.is_file():
            source = f"{name}/{ending}"
            try:
                return read(config_bytes(file, source).decode("utf-8-sig"), source), source
            except UnicodeDecodeError as error:
                raise SettingsError(f"{source}: cannot be read: {error}") from error
    return {}, name


def _read_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"{source}: must be TOML: {error}") from error


# What the values of keys must be.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("platform", "target", "file", "default", "batch_dimension"), ((str, type(None)), "text")),
    **dict.fromkeys(("inputs", "outputs", "examples", "warmup_sizes", "steps"), ((list,), "a list")),
    "params": ((Mapping,), "a table"),
}

# Keys that only models of a repository may have.
_OF_REPOSITORIES = ("default", "file", "route", "steps", "target", "versions")


def make_document(
    content: Mapping[str, Any],
    name: str,
    source: str,
    read_settings: ReadSettings,
    config: Mapping[str, Any] | None = None,
) -> ModelDocument:
    """Return what `content`, from the model's file, and `config`, from a load call, say together. `config` overrides. Raises
    SettingsError naming key, value and rule."""
    own = {**translated(content, source), **translated(config or {}, name)}
    for key, (kinds, words) in _KINDS.items():
        if key in own and not isinstance(own[key], kinds):
            raise SettingsError(f"{source}: {key}={own[key]!r}: must be {words}")
    if own.get("name", name) not in (name, name.rpartition("/")[2]):
        raise SettingsError(f"{source}: name={own['name']!r}: must be the name of the folder, {name!r}")
    settings = read_settings({key: value for key, value in own.items() if key not in (*KEYS, "decoupled")}, source)
    attributes: dict[str, Any] = {key: tuple(own[key]) for key in ("examples", "warmup_sizes") if key in own}
    attributes |= {key: _tensors(own[key], key, source) for key in ("inputs", "outputs") if own.get(key)}
    if (batch := own.get("batch_dimension")) is not None:
        if batch not in (REQUIRED, OPTIONAL, NONE):
            raise SettingsError(f"{source}: batch_dimension={batch!r}: must be {REQUIRED!r}, {OPTIONAL!r} or {NONE!r}")
        attributes["batch_dimension"] = batch
    if own.get("decoupled"):
        attributes["decoupled"] = True
    if "steps" in own:
        if own.get("platform") != ENSEMBLE:
            raise SettingsError(f"{source}: steps: are for platform = {ENSEMBLE!r}")
        attributes["steps"] = tuple(read_steps(own["steps"], source))
    return ModelDocument(
        platform=own.get("platform"),
        target=own.get("target"),
        file=own.get("file"),
        versions=_versions(own.get("versions", "all"), source),
        default=own.get("default"),
        params=dict(own.get("params", {})),
        route=_route(own.get("route", []), source),
        attributes=attributes,
        settings=settings,
    )


def read_config(config: Mapping[str, Any], name: str, read_settings: ReadSettings) -> ModelDocument:
    """Return what the `config` of a load call says about a model that is not in a repository. Raises SettingsError, also for
    keys that only models of a repository may have."""
    document = make_document({}, name, name, read_settings, config)
    for key in _OF_REPOSITORIES:
        if key in translated(config, name):
            raise SettingsError(f"{name}: {key}: is for models of a repository")
    return document


def _tensors(tables: list[Any], key: str, source: str) -> tuple[Any, ...]:
    for table in tables:
        shape = table.get("shape")
        if not (isinstance(shape, list) and all(isinstance(length, int) for length in shape)):
            raise SettingsError(f"{source}: {key}: shape={shape!r}: must be a list of whole numbers")
        if not (isinstance(table["name"], str) and table["name"]):
            raise SettingsError(f"{source}: {key}: name={table['name']!r}: must be text")
    return tuple(tables)


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
    rule = f'{source}: versions={value!r}: must be "all", a list of versions, or how many of the highest are served'
    raise SettingsError(rule)


def _is_model(folder: Path) -> bool:
    """Return whether `folder` is that of one model, rather than of several: it has a configuration of another server, or versions with files."""
    if not folder.is_dir():
        return False
    if any((folder / file).is_file() for file in (PBTXT, MLSERVER_FILE)):
        return True
    versions = versions_in(folder)
    return bool(versions) and not any(versions_in(folder / version) for version in versions)


def _name_of(folder: Path, own: str) -> str:
    """Return the name of the model in `folder`: MLServer's settings may have one, else it is `own`."""
    try:
        with (folder / MLSERVER_FILE).open("rb") as file:
            named = json.loads(file.read(MAX_FILE_BYTES)).get("name", own)
    except (OSError, ValueError, AttributeError, RecursionError):
        return own  # reading the model says what is wrong
    return named if isinstance(named, str) and is_name(named) else own


def _folders_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if NAME.fullmatch(each.name) and each.is_dir())


def _own_names(root: Path) -> dict[Path, str]:
    """Return the folders of models with their paths as names: MODEL, or OWNER/MODEL where a folder has models in place of versions."""
    if _is_model(root):
        return {root: root.resolve().name}
    own: dict[Path, str] = {}
    for folder in _folders_in(root):
        own |= {each: f"{folder.name}/{each.name}" for each in _models_of_owner(folder)} or {folder: folder.name}
    return own | {each: default_name(str(each)) for each in archives_in(root)}


def _models_of_owner(folder: Path) -> list[Path]:
    """Return the folders of models in `folder`; none if it is that of a model itself, or if it cannot be read, which reading the model reports."""
    try:
        return [] if _is_owned(folder) else [each for each in _folders_in(folder) if _is_owned(each)]
    except OSError:
        return []


def _is_owned(folder: Path) -> bool:
    """Return whether `folder` may be that of a model in the folder of an owner: it is that of a model, or has a configuration."""
    return _is_model(folder) or (folder / TOML).is_file()


def _folder_with_path(root: Path, name: str) -> Path | None:
    """Return the folder of the model `name` if its path is its name, without a look at other models; None if only `models_in` can tell."""
    parts = name.split("/")
    folder, owner = root.joinpath(*parts), root / parts[0]
    if len(parts) > 2 or not all(map(NAME.fullmatch, parts)):
        return None
    try:
        is_there = (
            _is_owned(folder) and not _is_owned(owner)
            if len(parts) == 2
            else folder.is_dir() and not _models_of_owner(folder)
        )
        return folder if is_there and not _is_model(root) and _name_of(folder, name) == name else None
    except OSError:
        return None


def models_in(root: Path) -> dict[str, Path]:
    """Return the folders of the models in `root` by name; `root` itself may be the folder of one. Raises OSError."""
    own = _own_names(root)
    named = {folder: _name_of(folder, name) for folder, name in own.items()}
    kept = {name for folder, name in named.items() if own[folder] == name}
    found: dict[str, Path] = {}
    for folder, name in named.items():
        # A name that is taken: the folder has its own, and reading it says what is wrong.
        is_taken = name in found or (name in kept and own[folder] != name)
        found[own[folder] if is_taken else name] = folder
    return found


def upload_path(name: str) -> PurePosixPath:
    """Return `name`, the name of a file in a load call, as a path VERSION/FILE. Raises InvalidRequest if it has another form."""
    path = PurePosixPath(name)
    is_plain = len(path.parts) >= 2 and all(NAME.fullmatch(part) for part in path.parts) and str(path) == name
    if not is_plain or len(name) > MAX_PATH_LENGTH:
        raise InvalidRequest(
            f"file {brief(name, 200)}: must be VERSION/NAME, of letters, digits and . _ ~ -, up to 255 for each part and "
            f"{MAX_PATH_LENGTH} for all"
        )
    return path


_VERSION = re.compile(r"[1-9][0-9]{0,17}")

# Takes a model's own settings; returns them together with the settings that hold for every model of the server.
CompleteSettings = Callable[[Mapping[str, Any]], dict[str, Any]]


class FolderRepository:
    """The Repository of the models in the folder `root`: `MODEL/VERSION/FILE` and `MODEL/config.toml` (or config.pbtxt).

    Each call reads the files again. `read_settings` reads the settings in the configurations; `complete` adds those that hold
    for every model; `trust` is what files of models may do. Raises SettingsError if the folder cannot be read.
    """

    def __init__(
        self,
        root: str | Path,
        read_settings: ReadSettings,
        complete: CompleteSettings = dict,
        trust: Trust | None = None,
    ) -> None:
        self.root = Path(root)
        try:
            os.scandir(self.root).close()
        except (FileNotFoundError, NotADirectoryError):
            raise SettingsError(f"model_repository={str(root)!r}: no such directory") from None
        except OSError as error:
            raise SettingsError(f"model_repository={str(root)!r}: cannot be read: {error.strerror}") from error
        self._read_settings = read_settings
        self._complete = complete
        self._trust = trust or Trust()
        self._archives: dict[str, Path] = {}  # those that load calls have given another name

    def names(self) -> list[str]:
        """Return the names of all models: the names of the folders. If the repository cannot be read, log that and return
        none."""
        try:
            return list(models_in(self.root))
        except OSError as error:
            logger.warning("the model repository cannot be read: %s", error)
            return []

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of the model `name`, or None."""
        try:
            return _folder_with_path(self.root, name) or models_in(self.root).get(name) or self._archives.get(name)
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """See Repository."""
        return self.folder_of(name) is not None

    def models_of(self, path: Path) -> list[str]:
        """Return the names of the models that may have the file `path`, as MODEL or as OWNER/MODEL. It need not be there any more."""
        try:
            parts = path.resolve().relative_to(self.root.resolve()).parts
        except ValueError:
            return []
        if not parts or any(_is_ignored(part) for part in parts):
            return []
        if _is_model(self.root):
            return [_name_of(self.root, self.root.resolve().name)]
        own = ["/".join(parts[:depth]) for depth in (1, 2)]
        if parts[0].lower().endswith(ARCHIVES):
            own = [default_name(parts[0])]
        return [_name_of(self.root / name, name) for name in dict.fromkeys(own) if is_name(name)]

    def takes(self, config: Mapping[str, Any] | None, files: Mapping[str, bytes] | None) -> bool:
        """Return whether there are `files`, or `config` names a model archive: they need no folder in the repository."""
        return bool(files) or self._archive_in(config) is not None

    def _archive_in(self, config: Mapping[str, Any] | None) -> Path | None:
        """Return the archive of the repository that the `file` of a load call's configuration names, or None."""
        named = (config or {}).get("file")
        found = self.root / named if isinstance(named, str) and NAME.fullmatch(named) else None
        return found if found is not None and is_archive(found) else None

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """See Repository. With `files`, the model's own file is not read, unless it is one of them."""
        archive, folder = self._archive_in(config), self.folder_of(name)
        if (files or archive) and not is_name(name):
            raise ModelNotFound(f"model {name!r}: must be of letters, digits and . _ ~ -")
        uploaded = _written(files) if files else None
        if uploaded is not None:
            folder = Path(uploaded.path)
        elif archive is not None and (folder is None or is_archive(folder)):  # else `file` is one of the model's own
            folder = self._archives[name] = archive
        if folder is None:
            raise ModelNotFound(f"model {name!r}: no such directory in the model repository")
        try:
            with reading(uploaded):
                found = self._read(folder, name, config)
        except OSError as error:
            raise SettingsError(f"{name}: its folder cannot be read: {error.strerror}") from error
        return found._replace(versions=[model._replace(uploaded=uploaded) for model in found.versions])

    def _read(self, folder: Path, name: str, config: Mapping[str, Any] | None) -> ModelReading:
        if (folder / MLSERVER_FILE).is_file():
            if config:
                rule = f"{name}: a model with {MLSERVER_FILE} has its configuration there; a load call has none"
                raise SettingsError(rule)
            from weir.catalog.adapters.mlserver import read_mlserver_model

            return read_mlserver_model(folder, name, self._complete, self._trust)
        if is_archive(folder):
            document = make_document({}, name, name, self._read_settings, config)
            settings = self._complete(document.settings)
            archive = document.model(folder.name, name, settings, platform=TORCHSERVE, folder=self.root.absolute())
            return ModelReading([archive._replace(config=config)])
        content, source = read_file(folder, name)
        document = make_document(content, name, source, self._read_settings, config)
        existing = versions_in(folder) or (["1"] if document.platform == ENSEMBLE else [])  # a chain needs no files
        if not existing and (file := next((each for each in _MODEL_FILES if (folder / each).is_file()), None)):
            raise SettingsError(f"{source}: {file}: must be in the folder of a version: mkdir 1 && mv {file} 1/")
        versions = _versions_to_serve(existing, document, source)
        if document.default is not None and document.default not in versions:
            raise SettingsError(f"{source}: default={document.default!r}: must be one of {', '.join(versions)}")
        models = [self._model(folder, name, version, document)._replace(config=config) for version in versions]
        return ModelReading(models, document.default)

    def _model(self, folder: Path, name: str, version: str, document: ModelDocument) -> ModelToServe:
        files = (folder / version).resolve()
        platform = document.platform or (
            platform_of_target(document.target) if document.target else guess(files, f"{name}/{version}")
        )
        target = document.target or document.file or ""
        settings, trust = self._complete(document.settings), self._trust
        return document.model(target, name, settings, version=version, platform=platform, folder=files, trust=trust)


def _written(files: Mapping[str, bytes]) -> ModelFolder:
    """Return a new folder that has these files. Raises InvalidRequest for a path."""
    paths = {upload_path(file): content for file, content in files.items()}
    with reading(folder := private_folder()):
        for path, content in paths.items():
            target = Path(folder.path, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return folder


def versions_in(folder: Path) -> list[str]:
    """Return the versions in a model's folder, the lowest first: the names of folders that are numbers from 1 on, without
    leading zeros."""
    names = [each.name for each in folder.iterdir() if _VERSION.fullmatch(each.name) and each.is_dir()]
    return sorted(names, key=version_order)


def _versions_to_serve(existing: list[str], document: ModelDocument, source: str) -> list[str]:
    wanted = document.versions
    if not existing:
        raise SettingsError(
            f"{source}: there is no version: the model's folder must have a folder whose name is a number, such as 1/"
        )
    if wanted == "all":
        return existing
    if isinstance(wanted, int):
        return existing[-wanted:]
    for version in wanted:
        if version not in existing:
            raise SettingsError(f"{source}: versions: unknown version {version!r}; available: {', '.join(existing)}")
    return [version for version in existing if version in wanted]


MAX_CHAINS = 1000  # that load calls may describe


class InlineConfigs:
    """The Repository of the chains that load calls have described. It keeps them as long as the server runs."""

    def __init__(self, read_settings: ReadSettings, complete: CompleteSettings) -> None:
        self._read_settings = read_settings
        self._complete = complete
        self._contents: dict[str, Mapping[str, Any]] = {}

    def names(self) -> list[str]:
        """Return the names of the chains that were described."""
        return list(self._contents)

    def has(self, name: str) -> bool:
        """See Repository."""
        return name in self._contents

    def takes(self, config: Mapping[str, Any] | None, files: Mapping[str, bytes] | None) -> bool:
        """Return whether `config` is that of a chain."""
        return config is not None and config.get("platform") == ENSEMBLE

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Return the chain that `config` describes, together with what an earlier call has described. Raises SettingsError as
        for a file, InvalidRequest for `files` or too many chains, and ModelNotFound for a name that no model may have."""
        if files:
            raise InvalidRequest(f"model {brief(name)}: a chain has no files")
        if not is_name(name):
            raise ModelNotFound(f"model {brief(name)}: must be of letters, digits and . _ ~ -")
        if name not in self._contents and len(self._contents) >= MAX_CHAINS:
            rule = f"model {name!r}: {MAX_CHAINS} chains are described already, which is the most there may be"
            raise InvalidRequest(rule)
        content = {**self._contents.get(name, {}), **(config or {})}
        document = make_document(content, name, name, self._read_settings)
        self._contents[name] = content
        settings = self._complete(document.settings)
        model = document.model("", name, settings, version="1", platform=ENSEMBLE)
        return ModelReading([model], document.default)


# The watcher loads the models of a folder again when their files have changed, and unloads models whose folders are gone.
#
# It acts on a change when the model's files have not changed for a while and have the same signature twice, so files that are
# still being copied or written are not loaded. When a load fails, the former model goes on, and the next change tries again.


QUIET = 0.5  # seconds without a change before a model is loaded
LOOK = 0.1  # seconds between looks
_IGNORED = ("__pycache__",)
_UNFINISHED = (".tmp", ".part", ".swp", ".crdownload", "~")

Signature = tuple[tuple[str, int, int], ...]  # path, size in bytes and time of change in ns of each file


class Settling:
    """The models that have changed lately. A model is settled when its files have not changed for `quiet` seconds."""

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._changed: dict[str, tuple[float, Signature]] = {}

    def note(self, name: str, now: float, signature: Signature) -> None:
        """Record that a model has changed, and that its files now have this signature."""
        self._changed[name] = now, signature

    def settled(self, now: float, look: Callable[[str], Signature]) -> list[str]:
        """Return the models that have settled, and forget them. `look` returns the present signature of a model's files."""
        done = []
        for name, (since, signature) in list(self._changed.items()):
            if now - since < self._quiet:
                continue
            present = look(name)
            if present == signature:
                del self._changed[name]
                done.append(name)
            else:
                self.note(name, now, present)
        return done


class FileWatch:
    """Has `manager` load models again whose files have not changed for `quiet` seconds of `clock`."""

    def __init__(self, manager: "Manager", quiet: float, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._settling = Settling(quiet)
        self._clock = clock

    async def run(self) -> None:
        """Watch until cancelled."""
        raise NotImplementedError  # each looks in its own way


class Watcher(FileWatch):
    """Watches `folder`, whose models it loads and unloads; see FileWatch."""

    def __init__(
        self,
        folder: FolderRepository,
        manager: "Manager",
        quiet: float = QUIET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(manager, quiet, clock)
        self._folder = folder
        self._known = set(folder.names())  # without models that were added later and could not be loaded

    async def run(self) -> None:
        """Watch until cancelled. Raises SettingsError if watchfiles is not installed."""
        watchfiles = load_library()
        changes = watchfiles.awatch(
            self._folder.root,
            watch_filter=None,
            rust_timeout=round(1000 * LOOK),
            yield_on_timeout=True,
            stop_event=asyncio.Event(),
        )
        async for changed in changes:
            await self.step([Path(path) for _, path in changed])

    async def step(self, changed: Iterable[Path]) -> None:
        """Record that the files at these paths have changed, and load or unload the models that have settled."""
        now = self._clock()
        for name in {name for path in changed for name in self._folder.models_of(path)}:
            self._settling.note(name, now, self._look(name))
        for name in self._settling.settled(self._clock(), self._look):
            await self._act(name)

    async def _act(self, name: str) -> None:
        exists = self._folder.folder_of(name) is not None
        running = name in self._manager.registry.services
        try:
            if exists and (running or name not in self._known):
                await self._manager.load_model(name)
            elif running and not exists:
                await self._manager.unload_model(name)
        except WeirError as error:
            logger.warning("model %r has changed, but %s", name, error.message)
            return  # a new model stays unknown, so its next change tries again: it may still be being copied
        except Exception:
            logger.exception("model %r has changed, but cannot be loaded", name)
            return
        if exists:
            self._known.add(name)
        else:
            self._known.discard(name)

    def _look(self, name: str) -> Signature:
        folder = self._folder.folder_of(name)
        return () if folder is None else tuple(sorted(_files(folder)))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    if folder.is_file():
        found = folder.stat()
        yield str(folder), found.st_size, found.st_mtime_ns
    for directory, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not _is_ignored(each)]
        for file in files:
            path = Path(directory) / file
            try:
                found = path.stat()
            except OSError:
                continue  # it was deleted meanwhile
            if not _is_ignored(file):
                yield str(path), found.st_size, found.st_mtime_ns


def _is_ignored(part: str) -> bool:
    return part in _IGNORED or part.startswith(".") or part.endswith(_UNFINISHED)


def load_library() -> Any:
    """Return the module watchfiles. Raises SettingsError if it is not installed."""
    try:
        import watchfiles
    except ImportError:
        raise SettingsError(f"watch: watchfiles is not installed; {add_extra('watch')}") from None
    return watchfiles


class TargetWatcher(FileWatch):
    """Watches the files of targets; see FileWatch.

    It looks by itself, because a TARGET has few files and watchfiles may not be installed.
    """

    def __init__(self, targets: Mapping[str, str], manager: "Manager") -> None:
        super().__init__(manager, QUIET, time.monotonic)
        found = {name: file_of_target(target) for name, target in targets.items()}
        self._files = {name: path for name, path in found.items() if path is not None}
        self._seen = {name: self._look(name) for name in self._files}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            await self.step()

    async def step(self) -> None:
        """Note the files that have changed, and load the models that have settled."""
        for name in self._files:
            if (signature := self._look(name)) != self._seen[name]:
                self._seen[name] = signature
                self._settling.note(name, self._clock(), signature)
        for name in self._settling.settled(self._clock(), self._look):
            if self._look(name):  # an editor may remove a file before it writes it again
                await self._load(name)

    async def _load(self, name: str) -> None:
        try:
            await self._manager.load_model(name)
        except WeirError as error:
            trace = error.remote_traceback if isinstance(error, ModelError) else ""
            logger.error("model %r keeps running unchanged: %s\n%s", name, error.message, trace)
        except Exception:
            logger.exception("model %r keeps running unchanged", name)

    def _look(self, name: str) -> Signature:
        try:
            found = self._files[name].stat()
        except OSError:
            return ()
        return ((str(self._files[name]), found.st_size, found.st_mtime_ns),)


def file_of_target(target: str) -> Path | None:
    """Return the file that `target` names, or None: a model of Hugging Face has none, nor a class that was given as it is."""
    for name in (target, target.rpartition(":")[0]):
        if name and (path := Path(name)).is_file():
            return path.absolute()
    module = sys.modules.get(target.partition(":")[0])
    where = getattr(module, "__file__", None)
    return None if where is None else Path(where)


@asynccontextmanager
async def watching(watchers: Sequence[FileWatch]) -> AsyncIterator[None]:
    """Run `watchers` while the block runs."""
    tasks = [in_background(watcher.run(), "a watch of model files") for watcher in watchers]
    try:
        yield
    finally:
        await end_tasks(*tasks)
