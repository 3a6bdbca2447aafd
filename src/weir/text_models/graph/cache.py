"""A cache of graphs in the user's cache directory. A graph is built once for each checkpoint content, recipe, device and version of the builder.

Processes coordinate by file locks. A process that uses a graph holds a shared lock on the graph's manifest. A process that builds or removes a graph
holds an exclusive lock on a file next to the graph's folder. When the graphs take too much space, graphs that no process uses are removed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weir.errors import SettingsError, reason_of
from weir.text_models import Precision, Recipe
from weir.text_models.graph import require, weight_bits
from weir.text_models.graph.building import ALLOW_PICKLE, GRAPH, VERSION, WEIGHTS, WHOLE, recipe_as_json
from weir.text_models.recipe import dimensions_of

if TYPE_CHECKING:
    from weir.text_models.checkpoint.reading import Checkpoint


# The graph's hash and the size of the weights. Its modification time is when the graph was last used.
MANIFEST = "made.json"


class _CachedGraph(NamedTuple):
    """A graph's time of last use, in seconds since the epoch, its folder, and its size in bytes. They sort by time of last use."""

    used: float
    folder: Path
    size: int


class Hold:
    """Keeps a graph from being removed until it is closed or garbage-collected, or until this process and all its forks have ended."""

    def __init__(self, manifest: Path) -> None:
        """Raises OSError if the manifest cannot be opened."""
        self.descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # on a file system without locks, no graph is removed either
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the graph. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:  # a model that is unloaded is not closed
        if hasattr(self, "descriptor"):
            self.close()


def hold(folder: Path) -> Hold | None:
    """Keep the graph in `folder` from being removed, and record that it is used now. Return None if it has been removed."""
    path = folder / MANIFEST
    try:
        held = Hold(path)
    except OSError:
        return None
    if not _is_at(held.descriptor, path):
        held.close()
        return None
    with suppress(OSError):  # the file may belong to another user
        os.utime(path)
    return held


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the exclusive lock for building or removing the graph in `folder`. Without `wait`, yield False if another process has the lock."""
    path = folder.parent / f"{folder.name}.lock"
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if _is_at(lock.fileno(), path):  # else the previous holder has removed the file together with the graph
                yield True
                return


def prune(graphs: Path, max_bytes: int) -> list[Path]:
    """Remove graphs from the folder `graphs` until the others have at most `max_bytes` bytes together. Return the removed folders.

    The least recently used graph is removed first. A graph that is in use, is being built, or cannot be removed stays.
    """
    removed: list[Path] = []
    with suppress(OSError), _pruning_lock(graphs):
        cached = sorted(_cached_graphs(graphs))
        left = sum(each.size for each in cached)
        for each in cached:
            if left > max_bytes and _remove(each.folder):
                removed.append(each.folder)
                left -= each.size
    return removed


@contextmanager
def _pruning_lock(graphs: Path) -> Iterator[None]:
    """Let one process prune at a time. Two would each count the graphs that the other is about to remove, and remove too many."""
    descriptor = os.open(graphs, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cached_graphs(graphs: Path) -> Iterator[_CachedGraph]:
    for folder in graphs.iterdir():
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        with suppress(OSError):  # it may be in the middle of being built again
            size = sum(file.stat().st_size for file in folder.iterdir())
            manifest = folder / MANIFEST
            yield _CachedGraph(manifest.stat().st_mtime if manifest.exists() else 0.0, folder, size)


def _remove(folder: Path) -> bool:
    aside = folder.parent / f".{folder.name}"
    with suppress(OSError), locked(folder, wait=False) as ours:
        if not ours or _in_use(folder):
            return False
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)  # atomic, so that no process sees half of a graph
        shutil.rmtree(aside, ignore_errors=True)
        (folder.parent / f"{folder.name}.lock").unlink()
        return True
    return False


def _in_use(folder: Path) -> bool:
    try:
        with (folder / MANIFEST).open() as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # a graph without a manifest is broken and cannot be in use
        return False
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still the file that is open as `descriptor`."""
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def cache_directory(stated: Path | str | None = None) -> Path:
    """Return `stated`, or Weir's cache directory of the user: WEIR_CACHE, else weir in XDG_CACHE_HOME, else ~/.cache/weir."""
    if chosen := stated or os.environ.get("WEIR_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "weir"


def graphs_folder(cache: Path) -> Path:
    """Return the folder of the graphs in a cache directory."""
    return cache / "graphs"


def graph_file(checkpoint: "Checkpoint", recipe: Recipe, cache: Path | str | None = None, device: str = "cpu") -> Path:
    """Return the path of the graph of `recipe` for a device, "cpu" or "cuda". Build the graph first if it is missing or broken.

    The weights are in a file next to the graph, aligned so that they can be mapped into memory. A child process builds the graph; of several
    processes that need the same graph, one builds it and the others wait. The folder of the graph appears complete or not at all.

    `cache` is the cache directory (None: the user's). Raises SettingsError if the checkpoint cannot do what the recipe states, or the cache
    directory cannot be written.
    """
    dimensions_of(checkpoint, recipe, device)
    folder = graphs_folder(cache_directory(cache)) / _key(checkpoint, recipe, device)
    if _is_complete(folder):
        return folder / GRAPH
    require("onnx")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not _is_complete(folder):
                _build(checkpoint, recipe, device, folder)
    except OSError as error:
        raise SettingsError(
            f"cache {folder.parent}: a graph cannot be written there: {reason_of(error)}; choose a writable directory with --cache"
        ) from error
    return folder / GRAPH


def _key(checkpoint: "Checkpoint", recipe: Recipe, device: str) -> str:
    decides = [checkpoint.content_hash(), recipe_as_json(recipe), device, VERSION]
    if recipe.precision is Precision.INT8:
        decides.append(weight_bits())
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()


def _build(checkpoint: "Checkpoint", recipe: Recipe, device: str, folder: Path) -> None:
    """Build the files in a folder aside, in a child process, and rename that to `folder`. What `folder` held before was broken."""
    # A remainder of a process that ended while it built: this process has the lock.
    aside = folder.parent / f".{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        pickled = ALLOW_PICKLE if checkpoint.allow_pickle else ""
        run_child(
            "weir.text_models.graph.building",
            str(checkpoint.directory),
            recipe_as_json(recipe),
            device,
            str(aside),
            pickled,
            checkpoint.router or "",
        )
        (aside / MANIFEST).write_text(json.dumps(_manifest(aside)))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def run_child(module: str, *arguments: str) -> None:
    """Run a module of Weir as a program that makes files from those in the folder that is its first argument. Raises SettingsError with that of the program,
    or with the last line that it wrote, if it fails."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
        refused = why.removeprefix(f"{SettingsError.__module__}.{SettingsError.__name__}: ")
        if refused == why:
            refused = f"its graph cannot be built: {why}"
        raise SettingsError(refused if refused.startswith(arguments[0]) else f"{arguments[0]}: {refused}")


def _manifest(folder: Path) -> dict[str, int | str]:
    graphs = [folder / name for name in (GRAPH, WHOLE) if name == GRAPH or (folder / name).exists()]
    return manifest_of(graphs, folder / WEIGHTS)


def manifest_of(graphs: Sequence[Path], weights: Path) -> dict[str, int | str]:
    """Return what tells whether these files are whole. Raises OSError if one is missing."""
    graph = hashlib.blake2b(b"".join(file.read_bytes() for file in graphs), digest_size=16).hexdigest()
    return {"graph": graph, "weights_bytes": weights.stat().st_size}


def _is_complete(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == _manifest(folder))
    except (OSError, ValueError):
        return False
