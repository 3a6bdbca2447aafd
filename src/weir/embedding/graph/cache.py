"""Graphs are made once, and kept in the user's cache directory by what decides them: the checkpoint's content, the recipe, the code that makes them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import weir
from weir.embedding.graph.building import VERSION, WEIGHTS
from weir.embedding.graph.keeping import SEAL, locked
from weir.embedding.graph.optional_dependencies import require
from weir.embedding.graph.quantizing import weight_bits
from weir.embedding.graph.refusing import dimensions_of
from weir.embedding.graph.writing import GRAPH, told
from weir.embedding.recipe import Precision, Recipe
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint


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
    decides = [checkpoint.content_hash(), told(recipe), device, VERSION]
    if recipe.precision is Precision.INT8:
        decides.append(weight_bits())
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()


def _make(checkpoint: "Checkpoint", recipe: Recipe, device: str, folder: Path) -> None:
    """Make the files aside, by a child, and put them in their place. What was there is broken."""
    aside = folder.parent / f".{folder.name}"  # whoever left it is gone: we have the lock
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        _run_child(str(checkpoint.directory), told(recipe), device, str(aside))
        (aside / SEAL).write_text(json.dumps(_seal(aside)))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _run_child(*arguments: str) -> None:
    found = str(Path(weir.__file__).parents[1])
    paths = [found, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "weir.embedding.graph.writing", *arguments],
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
