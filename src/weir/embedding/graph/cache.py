"""Graphs are made once, and kept in the user's cache directory by what decides them: the checkpoint's content, the recipe, the code that makes them.

Processes agree by locks on files. A process that uses a graph holds its seal shared; one that makes or removes a graph holds the lock beside its
folder alone. Graphs that are not in use are removed when all of them take too much room.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import weir
from weir.embedding.graph.assembly import require, weight_bits
from weir.embedding.graph.building import GRAPH, VERSION, WEIGHTS, recipe_as_json
from weir.embedding.recipe import Precision, Recipe, dimensions_of
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint


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


def cache_directory() -> Path:
    """Return where things are kept for the user: WEIR_CACHE, or weir in XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("WEIR_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "weir"


def graphs_in(cache: Path) -> Path:
    """Return the folder of the graphs in a directory where things are kept."""
    return cache / "graphs"


def graph_file(checkpoint: "Checkpoint", recipe: Recipe, cache: Path | None = None, device: str = "cpu") -> Path:
    """Return the file with the graph of `recipe` for a device, cpu or cuda; it is made where it is missing or broken.

    Its weights lie beside it, at places from which they can be mapped into memory. It is made in a process of its own, by one caller at a time
    whatever the processes, and appears at once or not at all. `cache` is the directory to keep it in (None: the user's). Raises SettingsError: the
    checkpoint cannot do what the recipe says, or the directory cannot be written.
    """
    dimensions_of(checkpoint, recipe, device)
    folder = graphs_in(cache or cache_directory()) / _key(checkpoint, recipe, device)
    if _whole(folder):
        return folder / GRAPH
    require("onnx")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not _whole(folder):
                _make(checkpoint, recipe, device, folder)
    except OSError as error:
        raise SettingsError(f"cache {folder.parent}: a graph cannot be written there: {error}") from error
    return folder / GRAPH


def _key(checkpoint: "Checkpoint", recipe: Recipe, device: str) -> str:
    decides = [checkpoint.content_hash(), recipe_as_json(recipe), device, VERSION]
    if recipe.precision is Precision.INT8:
        decides.append(weight_bits())
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()


def _make(checkpoint: "Checkpoint", recipe: Recipe, device: str, folder: Path) -> None:
    """Make the files aside, by a child, and put them in their place. What was there is broken."""
    aside = folder.parent / f".{folder.name}"  # whoever left it is gone: we have the lock
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        _run_child(str(checkpoint.directory), recipe_as_json(recipe), device, str(aside))
        (aside / SEAL).write_text(json.dumps(_seal(aside)))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _run_child(*arguments: str) -> None:
    found = str(Path(weir.__file__).parents[1])
    paths = [found, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "weir.embedding.graph.building", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
        raise SettingsError(f"{arguments[0]}: its graph cannot be made: {why}")


def _seal(folder: Path) -> dict[str, int | str]:
    graph = hashlib.blake2b((folder / GRAPH).read_bytes(), digest_size=16).hexdigest()
    return {"graph": graph, "weights_bytes": (folder / WEIGHTS).stat().st_size}


def _whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / SEAL).read_text()) == _seal(folder))
    except (OSError, ValueError):
        return False
