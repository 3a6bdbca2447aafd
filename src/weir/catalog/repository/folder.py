"""A folder of models, as a Repository; and chains that load calls describe, as another."""

import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Any

from weir.catalog.registry import version_order
from weir.catalog.repository.document import ModelDocument, ReadSettings, make_document, read_file
from weir.catalog.repository.platforms import ENSEMBLE, LONGEST_PATH, guess
from weir.catalog.sources import ModelReading, ModelToServe
from weir.errors import InvalidRequest, ModelNotFound, SettingsError, brief
from weir.serving.delivery import logger
from weir.serving.settings import NAME


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
    """A Repository that knows what it was told: the configuration of a chain, by name, for as long as the server runs."""

    def __init__(self, read_settings: ReadSettings, around: Around) -> None:
        self._read_settings = read_settings
        self._around = around
        self._contents: dict[str, Mapping[str, Any]] = {}

    def names(self) -> list[str]:
        """Return those that it was told of."""
        return list(self._contents)

    def takes(self, config: Mapping[str, Any] | None) -> bool:
        """Tell whether `config` is that of a chain."""
        return config is not None and config.get("platform") == ENSEMBLE

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Return the chain that `config` describes, or that it was told of before. Raises SettingsError as for a file."""
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
