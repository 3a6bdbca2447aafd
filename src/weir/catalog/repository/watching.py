"""Loads the models of a folder when their files have changed, and unloads those whose folders are gone.

A change is acted upon once nothing has happened to the model's files for a while and they look the same twice: what is being
copied or written is left alone until it is whole. A load that fails leaves the old one serving, as always; the next change
tries again.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.catalog.repository.folder import FolderRepository
from weir.errors import SettingsError, WeirError
from weir.serving.delivery import logger
from weir.serving.settings import NAME

if TYPE_CHECKING:
    from weir.catalog.manager import Manager


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
                continue  # it has gone meanwhile
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
