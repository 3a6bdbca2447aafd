"""TorchServe's model archives: zip files (.mar), .tar.gz files, and folders, with MAR-INF/MANIFEST.json. Unpacking runs none of their code.

An archive may come from a stranger: names outside of the folder, links, and more content than its size allows are refused before they are written.
"""

import gzip
import json
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from weir.catalog.repository.model_files import MAX_PATH_LENGTH
from weir.catalog.sources import MANIFEST
from weir.errors import SettingsError, brief

MAX_FILES = 10_000
_ALWAYS_FITS = 1 << 30  # bytes that any archive may unpack to
_MOST_PACKED = 20  # times its size that a larger one may unpack to: weights shrink little, a zip bomb a thousand times
_MAX_MANIFEST = 1 << 20
_PIECE = 1 << 20
_HEADERS = 64 << 20  # bytes of a .tar.gz besides its files

_DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError)


class _Packed(NamedTuple):
    """A file in an archive: its name, its size as the archive states it, and what reads it."""

    name: str
    size: int
    content: IO[bytes]


def unpack(archive: Path, folder: Path, source: str) -> None:
    """Write the files of `archive` into `folder`, which is empty. Raises SettingsError, which begins with `source`."""
    room = max(_ALWAYS_FITS, _MOST_PACKED * archive.stat().st_size)
    files = total = 0
    try:
        is_zip = zipfile.is_zipfile(archive)
        for member in _zip_members(archive) if is_zip else _tar_members(archive, room + _HEADERS):
            files, total = files + 1, total + member.size
            if files > MAX_FILES or total > room:
                found = f"more than {MAX_FILES} files" if files > MAX_FILES else f"more than {room} bytes of files"
                raise SettingsError(
                    f"{source}: has {found}, its limit; if you trust it, unpack it and serve the folder"
                )
            _write(member, folder / _inner_path(member.name, source))
    except FileExistsError as error:
        raise SettingsError(f"{source}: has {str(Path(error.filename).relative_to(folder))!r} twice") from error
    except _DAMAGED as error:
        raise SettingsError(f"{source}: is damaged, or no archive: {brief(str(error), 200)}") from error
    except OSError as error:
        raise SettingsError(f"{source}: cannot be unpacked into {folder.parent}: {error.strerror or error}") from error


def _zip_members(archive: Path) -> Iterator[_Packed]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"{info.filename!r} is a link or a device, must be a file")
            if not info.is_dir():
                with opened.open(info) as content:
                    yield _Packed(info.filename, info.file_size, content)


class _Bounded:
    """Reads at most `room` bytes of `content`."""

    def __init__(self, content: gzip.GzipFile, room: int) -> None:
        self._content, self._room = content, room

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises ValueError after the last that may be."""
        data = self._content.read(size)
        self._room -= len(data)
        if self._room < 0:
            raise ValueError("unpacks to more than its limit")
        return data


def _tar_members(archive: Path, room: int) -> Iterator[_Packed]:
    # A name in it may be as long as it likes; tarfile keeps it in memory.
    with gzip.open(archive) as packed:
        bounded: Any = _Bounded(packed, room)
        with tarfile.open(fileobj=bounded, mode="r|") as opened:
            yield from _files_in(opened)


def _files_in(opened: tarfile.TarFile) -> Iterator[_Packed]:
    for info in opened:
        if not (info.isreg() or info.isdir()) or info.issparse():
            raise ValueError(f"{info.name!r} is a link or a device, must be a file")
        if info.isreg() and (content := opened.extractfile(info)) is not None:
            yield _Packed(info.name, info.size, content)


def _inner_path(name: str, source: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or "\\" in name
        or "\0" in name
        or len(name.encode()) > MAX_PATH_LENGTH
    ):
        raise SettingsError(f"{source}: has a file {brief(name, 200)}: must be a path inside of it")
    return path


def _write(member: _Packed, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    left = member.size
    with path.open("xb") as file:
        while piece := member.content.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise ValueError(f"{member.name!r} is longer than the {member.size} bytes that are stated")
            file.write(piece)


def read_manifest(folder: Path, source: str) -> dict[str, Any]:
    """Return the manifest in `folder`, whose `model` names existing files only. Raises SettingsError, which begins with `source`."""
    file = folder / MANIFEST
    where = f"{source}: {MANIFEST}"
    try:
        if file.stat().st_size > _MAX_MANIFEST:
            raise SettingsError(f"{where}: is larger than {_MAX_MANIFEST} bytes")
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        raise SettingsError(f"{where}: cannot be read ({error.strerror}); every model archive has one") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: must be JSON: {brief(str(error), 200)}") from error
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, Mapping) or not isinstance(model.get("handler"), str):
        raise SettingsError(f"{where}: must have a `model` with a `handler`, such as image_classifier or handler.py")
    for key in ("serializedFile", "modelFile", "configFile", "requirementsFile"):
        named = model.get(key)
        if named is not None and not (
            isinstance(named, str) and (folder / _inner_path(named, f"{where}: {key}")).is_file()
        ):
            raise SettingsError(f"{where}: {key}={brief(named)}: must be a file of the archive")
    return dict(manifest)
