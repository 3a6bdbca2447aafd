"""Graphs that are kept on disk: which are in use, and which go when they have become too many. Processes agree by locks on files.

Whoever uses a graph holds its seal shared; whoever makes or removes one has the lock beside its folder to himself.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

SEAL = "made.json"  # the sizes of the files and the graph's hash; how old it is says when the graph was used last


class _Kept(NamedTuple):
    used: float
    folder: Path
    size: int


class Hold:
    """Keeps a graph's folder from being removed until it is closed, forgotten, or its process and all that were forked from it have ended."""

    def __init__(self, seal: Path) -> None:
        """Raises OSError if the seal cannot be opened."""
        self.descriptor = os.open(seal, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # where files cannot be locked nothing is removed either
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:  # a model that is served no longer is only forgotten
        if hasattr(self, "descriptor"):
            self.close()


def hold(folder: Path) -> Hold | None:
    """Return what keeps a graph's folder where it is; None if it is gone. Notes that it is used now."""
    path = folder / SEAL
    try:
        held = Hold(path)
    except OSError:
        return None
    if not _is_at(held.descriptor, path):
        held.close()
        return None
    with suppress(OSError):  # of another user
        os.utime(path)
    return held


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Have the making and removing of a graph to oneself. Without `wait`, it may be False: somebody else has it."""
    path = folder.parent / f"{folder.name}.lock"
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if _is_at(lock.fileno(), path):  # else the one before has removed it, with its graph
                yield True
                return


def prune(graphs: Path, most_bytes: int) -> list[Path]:
    """Remove graphs until those that are left have at most so many bytes together: the one used least recently first, none that is in use or
    being made. Return the folders that are gone. What cannot be removed stays."""
    gone: list[Path] = []
    with suppress(OSError), _one_at_a_time(graphs):
        kept = sorted(_kept(graphs))
        left = sum(each.size for each in kept)
        for each in kept:
            if left > most_bytes and _remove(each.folder):
                gone.append(each.folder)
                left -= each.size
    return gone


@contextmanager
def _one_at_a_time(graphs: Path) -> Iterator[None]:
    """Two that remove at once would each count what the other is about to remove, and remove too much."""
    descriptor = os.open(graphs, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kept(graphs: Path) -> Iterator[_Kept]:
    for folder in graphs.iterdir():
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        with suppress(OSError):  # it is made anew
            size = sum(file.stat().st_size for file in folder.iterdir())
            seal = folder / SEAL
            yield _Kept(seal.stat().st_mtime if seal.exists() else 0.0, folder, size)


def _remove(folder: Path) -> bool:
    aside = folder.parent / f".{folder.name}"
    with suppress(OSError), locked(folder, wait=False) as ours:
        if not ours or _in_use(folder):
            return False
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)  # at once or not at all
        shutil.rmtree(aside, ignore_errors=True)
        (folder.parent / f"{folder.name}.lock").unlink()
        return True
    return False


def _in_use(folder: Path) -> bool:
    try:
        with (folder / SEAL).open() as seal:
            fcntl.flock(seal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # broken: nobody can use it
        return False
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
