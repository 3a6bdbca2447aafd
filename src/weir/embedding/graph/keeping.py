"""Graphs that are kept on disk: which are in use, and which go when they have become too many. Processes agree by locks on files.

Whoever uses a graph holds its seal shared; whoever makes or removes one has the lock beside its folder to himself.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

SEAL = "made.json"  # the sizes of the files and the graph's hash; how old it is says when the graph was used last


class _Kept(NamedTuple):
    used: float
    folder: Path
    size: int


def hold(folder: Path) -> IO[str] | None:
    """Return what keeps a graph's folder from being removed for as long as it is open, also by a fork; None if the folder is gone. Notes that it
    is used now."""
    path = folder / SEAL
    try:
        seal = path.open()
    except OSError:
        return None
    with suppress(OSError):  # where files cannot be locked nothing is removed either
        fcntl.flock(seal, fcntl.LOCK_SH)
    if not _is_at(seal, path):
        seal.close()
        return None
    with suppress(OSError):  # of another user
        os.utime(path)
    return seal


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
            if _is_at(lock, path):  # else the one before has removed it, with its graph
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


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
