"""A folder of models as a Repository: what the files of its models say, and what `--watch` does when they change.

Chains that load calls describe are another Repository (InlineConfigs).
"""

import asyncio
import os
import re
import shutil
import time
import tomllib
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.catalog.registry import version_order
from weir.catalog.repository.platforms import ENSEMBLE, LONGEST_PATH, guess, read_steps
from weir.catalog.repository.triton import read_pbtxt, translated
from weir.catalog.sources import ModelReading, ModelToServe
from weir.errors import InvalidRequest, ModelNotFound, SettingsError, WeirError, brief
from weir.model import NONE, OPTIONAL, REQUIRED
from weir.serving.delivery import logger
from weir.serving.settings import NAME

if TYPE_CHECKING:
    from weir.catalog.manager import Manager


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


# A folder of models, as a Repository; and chains that load calls describe, as another.


def model_folder(root: Path, name: str) -> Path:
    """Return the folder of the model `name`. Raises ModelNotFound if there is none, or if that is no name of a model."""
    if not NAME.fullmatch(name) or not (folder := root / name).is_dir():
        raise ModelNotFound(f"model {name!r}: there is no such folder in the model repository")
    return folder


def upload_path(name: str) -> PurePosixPath:
    """Return the path VERSION/FILE of a file that came with a load call. Raises InvalidRequest unless it is one."""
    path = PurePosixPath(name)
    inside = len(path.parts) >= 2 and all(NAME.fullmatch(part) for part in path.parts) and str(path) == name
    if not inside or len(name) > LONGEST_PATH:
        raise InvalidRequest(
            f"file {brief(name, 200)}: must be VERSION/NAME, of letters, digits and . _ ~ -, up to 255 for each part and "
            f"{LONGEST_PATH} for all"
        )
    return path


_VERSION = re.compile(r"[1-9][0-9]{0,17}")

# Puts what holds for every model of the server around a model's own settings.
Around = Callable[[Mapping[str, Any]], dict[str, Any]]


class FolderRepository:
    """Reads `MODEL/VERSION/FILE` under `root`, and `MODEL/config.toml` (or config.pbtxt), anew whenever it is asked.

    `read_settings` reads the settings in those files; `around` adds those that hold for every model. Raises SettingsError
    if there is no such folder.
    """

    def __init__(self, root: str | Path, read_settings: ReadSettings, around: Around = dict) -> None:
        self.root = Path(root)
        try:
            os.scandir(self.root).close()
        except (FileNotFoundError, NotADirectoryError):
            raise SettingsError(f"model_repository={str(root)!r}: there is no such folder") from None
        except OSError as error:
            raise SettingsError(f"model_repository={str(root)!r}: cannot be read: {error.strerror}") from error
        self._read_settings = read_settings
        self._around = around
        self._uploads: dict[str, list[Path]] = {}

    def names(self) -> list[str]:
        """Return the models that there are: folders with a version in them, or a file about them."""
        try:
            folders = sorted(self.root.iterdir())
        except OSError as error:
            logger.warning("the model repository cannot be read: %s", error)
            return []
        return [each.name for each in folders if NAME.fullmatch(each.name) and each.is_dir()]

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """See Repository. What `config` does not say the model's own file still does, unless there are `files`."""
        folder = self._uploaded(name, files) if files else model_folder(self.root, name)
        try:
            return self._read(folder, name, config)
        except OSError as error:
            raise SettingsError(f"{name}: its folder cannot be read: {error.strerror}") from error

    def _read(self, folder: Path, name: str, config: Mapping[str, Any] | None) -> ModelReading:
        content, source = read_file(folder, name)
        document = make_document(content, name, source, self._read_settings, config)
        there = versions_in(folder) or (["1"] if document.platform == ENSEMBLE else [])  # which has no files
        versions = _served(there, document, source)
        if document.default is not None and document.default not in versions:
            raise SettingsError(f"{source}: default={document.default!r}: must be one of {', '.join(versions)}")
        return ModelReading([self._model(folder, name, version, document) for version in versions], document.default)

    def _model(self, folder: Path, name: str, version: str, document: ModelDocument) -> ModelToServe:
        files = (folder / version).resolve()
        platform = document.platform or ("python" if document.target else guess(files, f"{name}/{version}"))
        target = document.target or document.file or ""
        settings = self._around(document.settings)
        return ModelToServe(
            target, name, dict(document.params), list(document.route), settings, version=version, platform=platform,
            folder=files, attributes=document.attributes,
        )  # fmt: skip

    def _uploaded(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Put `files` into a folder that lives as long as they may be needed: until the second load after this one."""
        paths = {upload_path(file): content for file, content in files.items()}
        if not NAME.fullmatch(name):
            raise ModelNotFound(f"model {name!r}: must be of letters, digits and . _ ~ -")
        folder = Path(mkdtemp(prefix=f"weir-{name[:40]}-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for path, content in paths.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        kept = self._uploads.setdefault(name, [])
        kept.append(folder)
        for old in kept[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del kept[:-2]
        return folder


def versions_in(folder: Path) -> list[str]:
    """Return the versions in a model's folder, the lowest first: folders that are called by a number from 1 on, written without
    zeros before it."""
    names = [each.name for each in folder.iterdir() if _VERSION.fullmatch(each.name) and each.is_dir()]
    return sorted(names, key=version_order)


def _served(there: list[str], document: ModelDocument, source: str) -> list[str]:
    wanted = document.versions
    if not there:
        raise SettingsError(
            f"{source}: there is no version: its folder must have one that is called by a number, such as 1/"
        )
    if wanted == "all":
        return there
    if isinstance(wanted, int):
        return there[-wanted:]
    for version in wanted:
        if version not in there:
            raise SettingsError(f"{source}: versions: there is no {version!r}; there are {', '.join(there)}")
    return [version for version in there if version in wanted]


MOST_CHAINS = 1000  # that are remembered


class InlineConfigs:
    """A Repository of chains that load calls have described: their configurations by name, for as long as the server runs."""

    def __init__(self, read_settings: ReadSettings, around: Around) -> None:
        self._read_settings = read_settings
        self._around = around
        self._contents: dict[str, Mapping[str, Any]] = {}

    def names(self) -> list[str]:
        """Return the names of the chains that were described."""
        return list(self._contents)

    def takes(self, config: Mapping[str, Any] | None) -> bool:
        """Tell whether `config` is that of a chain."""
        return config is not None and config.get("platform") == ENSEMBLE

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Return the chain that `config` describes, or that an earlier call has described. Raises SettingsError as for a file."""
        if files:
            raise InvalidRequest(f"model {brief(name)}: a chain has no files")
        if not NAME.fullmatch(name):
            raise ModelNotFound(f"model {brief(name)}: must be of letters, digits and . _ ~ -")
        if name not in self._contents and len(self._contents) >= MOST_CHAINS:
            raise InvalidRequest(
                f"model {name!r}: {MOST_CHAINS} chains are described already, which is the most there may be"
            )
        content = {**self._contents.get(name, {}), **(config or {})}
        document = make_document(content, name, name, self._read_settings)
        self._contents[name] = content
        model = ModelToServe(
            "", name, dict(document.params), list(document.route), self._around(document.settings), version="1",
            platform=ENSEMBLE, attributes=document.attributes,
        )  # fmt: skip
        return ModelReading([model], document.default)


# Loads the models of a folder when their files have changed, and unloads those whose folders are gone.
#
# A change is acted upon once nothing has happened to the model's files for a while and they look the same twice: what is being
# copied or written is left alone until it is whole. A load that fails leaves the old one serving, as always; the next change
# tries again.


QUIET = 0.5  # seconds without a change before a model is loaded
LOOK = 0.1  # seconds between looks
_IGNORED = ("__pycache__",)
_UNFINISHED = (".tmp", ".part", ".swp", ".crdownload", "~")

Signature = tuple[tuple[str, int, int], ...]


class Settling:
    """The models that have changed and are waited for until nothing happens to them any more."""

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._changed: dict[str, tuple[float, Signature]] = {}

    def note(self, name: str, now: float, signature: Signature) -> None:
        """Something has happened to a model; its files look like `signature` now."""
        self._changed[name] = now, signature

    def settled(self, now: float, look: Callable[[str], Signature]) -> list[str]:
        """Return the models that have been quiet for long enough, and look as they did; each is returned once."""
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


class Watcher:
    """Watches `folder` and has `manager` load and unload what was quiet for `quiet` seconds of `clock`."""

    def __init__(
        self,
        folder: FolderRepository,
        manager: "Manager",
        *,
        quiet: float = QUIET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._folder = folder
        self._manager = manager
        self._settling = Settling(quiet)
        self._known = set(folder.names())  # without those that have come since and did not load

    async def run(self) -> None:
        """Do so until cancelled."""
        watchfiles = load_library()
        changes = watchfiles.awatch(
            self._folder.root, watch_filter=None, rust_timeout=round(1000 * LOOK), yield_on_timeout=True,
            stop_event=asyncio.Event(),
        )  # fmt: skip
        async for changed in changes:
            await self.step([Path(path) for _, path in changed])

    async def step(self, changed: Iterable[Path]) -> None:
        """Take note of these paths, and act upon what has settled."""
        now = self._clock()
        for name in set(filter(None, map(self._model_of, changed))):
            self._settling.note(name, now, self._look(name))
        for name in self._settling.settled(self._clock(), self._look):
            await self._act(name)

    async def _act(self, name: str) -> None:
        there = (self._folder.root / name).is_dir()
        running = name in self._manager.registry.services
        try:
            if there and (running or name not in self._known):
                await self._manager.load_model(name)
            elif running and not there:
                await self._manager.unload_model(name)
        except WeirError as error:
            logger.warning("model %r has changed, but %s", name, error.message)
            return  # a new one stays new: the next change, of a slow copy say, tries again
        except Exception:
            logger.exception("model %r has changed, but cannot be loaded", name)
            return
        if there:
            self._known.add(name)
        else:
            self._known.discard(name)

    def _model_of(self, path: Path) -> str | None:
        try:
            parts = path.resolve().relative_to(self._folder.root.resolve()).parts
        except ValueError:
            return None
        if not parts or not NAME.fullmatch(parts[0]) or any(_is_ignored(part) for part in parts):
            return None
        return parts[0]

    def _look(self, name: str) -> Signature:
        return tuple(sorted(_files(self._folder.root / name)))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for place, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not _is_ignored(each)]
        for file in files:
            path = Path(place) / file
            try:
                found = path.stat()
            except OSError:
                continue  # it was deleted meanwhile
            if not _is_ignored(file):
                yield str(path), found.st_size, found.st_mtime_ns


def _is_ignored(part: str) -> bool:
    return part in _IGNORED or part.startswith(".") or part.endswith(_UNFINISHED)


def load_library() -> Any:
    """Return watchfiles. Raises SettingsError if it is not there."""
    try:
        import watchfiles
    except ImportError:
        raise SettingsError("watch: watchfiles is not installed (pip install 'weir-serving[watch]')") from None
    return watchfiles


@asynccontextmanager
async def watching(folder: FolderRepository | None, manager: "Manager") -> AsyncIterator[None]:
    """Watch `folder` within the block; None: nothing."""
    if folder is None:
        yield
        return
    task = asyncio.create_task(Watcher(folder, manager).run())
    try:
        yield
    finally:
        task.cancel()
        ended = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended[0], Exception):
            logger.error("the repository was not watched to the end", exc_info=ended[0])
