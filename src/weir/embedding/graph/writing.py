"""A graph and its weights on disk. Run as a program, it makes them in a process of its own, which takes its memory with it."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weir.embedding.graph.assembling import Graph
from weir.embedding.graph.building import WEIGHTS, build
from weir.embedding.recipe import Pooling, Precision, Recipe

GRAPH = "graph.onnx"


def write(graph: Graph, folder: Path) -> Path:
    """Write `graph` into `folder`, and return the file that a session opens. All of it is on the disk then."""
    with open(folder / WEIGHTS, "wb") as file:
        for offset, weight in graph.weights:
            file.seek(offset)
            weight.tofile(file)
        _sync(file)
    with open(folder / GRAPH, "wb") as file:
        file.write(graph.model)
        _sync(file)
    return folder / GRAPH


def told(recipe: Recipe) -> str:
    """Return a recipe as JSON."""
    plain = {name: getattr(value, "value", value) for name, value in asdict(recipe).items()}
    plain["joined"] = [pooling.value for pooling in recipe.joined]
    return json.dumps(plain, sort_keys=True)


def understood(recipe: str) -> Recipe:
    """Return the recipe of which `told` made this JSON."""
    plain: dict[str, Any] = json.loads(recipe)
    layers, pooling, precision = tuple(plain["layers"]), Pooling(plain["pooling"]), Precision(plain["precision"])
    joined = tuple(map(Pooling, plain["joined"]))
    return Recipe(**plain | {"layers": layers, "pooling": pooling, "precision": precision, "joined": joined})


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def main(directory: str, recipe: str, device: str, folder: str) -> None:
    """Make the graph of a checkpoint in a folder that is there."""
    from weir.embedding.checkpoint.reading import read_checkpoint

    write(build(read_checkpoint(Path(directory)), understood(recipe), device), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
