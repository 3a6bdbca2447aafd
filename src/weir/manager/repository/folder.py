"""A folder of models, as a Repository."""

import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from weir.errors import ModelNotFound, SettingsError
from weir.manager.delivery import logger
from weir.manager.naming import NAME
from weir.manager.registry import version_order
from weir.manager.repository.document import Document, ReadSettings, make_document, read_file
from weir.manager.repository.ensemble import ENSEMBLE
from weir.manager.repository.paths import model_folder, upload_path
from weir.manager.repository.platforms import guess
from weir.manager.spec import ModelReading, ModelToServe

_VERSION = re.compile(r"[1-9][0-9]{0,17}")

# Puts what holds for every model of the server around a model's own settings.
Around = Callable[[Mapping[str, Any]], dict[str, Any]]


class Folder:
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
        said, source = read_file(folder, name)
        document = make_document(said, name, source, self._read_settings, config)
        there = versions_in(folder) or (["1"] if document.platform == ENSEMBLE else [])  # which has no files
        versions = _served(there, document, source)
        if document.default is not None and document.default not in versions:
            raise SettingsError(f"{source}: default={document.default!r}: must be one of {', '.join(versions)}")
        return ModelReading([self._model(folder, name, version, document) for version in versions], document.default)

    def _model(self, folder: Path, name: str, version: str, document: Document) -> ModelToServe:
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


def _served(there: list[str], document: Document, source: str) -> list[str]:
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
