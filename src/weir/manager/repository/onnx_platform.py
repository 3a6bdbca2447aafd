"""Models that are ONNX files. Their tensors are read from the file, in a process of its own: onnxruntime is not loaded into the
server, and a file that makes it crash harms nobody."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weir.errors import SettingsError
from weir.manager.delivery import logger
from weir.manager.repository.onnx_batching import Batching, find_batching, says_batching
from weir.manager.repository.onnx_model import TRY, OnnxModel
from weir.manager.repository.paths import file_within
from weir.manager.repository.tensors import with_attributes
from weir.manager.spec import ModelToServe
from weir.model import NONE, Model, Tensor
from weir.workers.launch import python_path
from weir.workers.source import declared

LONGEST = 300.0  # seconds until a file's description must be there


class OnnxPlatform:
    """See Platform."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the file."""
        if find_spec("onnxruntime") is None:
            raise SettingsError(
                f"{model.label}: platform onnx: onnxruntime is not installed (pip install 'weir-serving[onnx]')"
            )
        assert model.folder is not None, "a model of a repository has a folder: this is a bug"
        path = _file(model.folder, model.target, model.label)
        said = model.attributes or {}
        described = _described(path, model.label, *([] if says_batching(said) else [TRY]))
        batching = find_batching(described, said, model.label)
        if batching.reason:
            logger.info("model %r: each request runs alone: %s", model.label, batching.reason)
        tensors = {key: tuple(_tensor(table, batching) for table in described[key]) for key in ("inputs", "outputs")}
        sizes: dict[str, Any] = {}
        if batching.size:  # the file was made for batches of this size, and takes no others
            sizes = {"max_batch_size": batching.size, "allowed_batch_sizes": (batching.size,)}
        found = declared(OnnxModel, {**tensors, **sizes, "path": str(path), "unbatched": batching.reason})
        return with_attributes(found, model)


def _file(folder: Path, file: str, source: str) -> Path:
    if file:
        return file_within(folder, file, source)
    files = sorted(folder.glob("*.onnx"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise SettingsError(
            f"{source}: there must be one .onnx file in {folder.name}/, or `file` names one; there are {names}"
        )
    return files[0]


def _described(path: Path, source: str, *more: str) -> Mapping[str, Any]:
    """Return what is in the file. With TRY, also whether its rows can be joined, unless it cannot be found out."""
    environment = {"PYTHONPATH": python_path(""), "PATH": ""}
    command = [sys.executable, "-P", "-m", "weir.manager.repository.onnx_model", str(path), *more]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LONGEST, env=environment, check=False)
        lines, ended = done.stdout.splitlines(), done.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        lines, ended = (error.stdout or b"").splitlines(), [f"it took more than {LONGEST:g} s"]
    for line in reversed(lines):  # the last one says the most, if it is whole
        with contextlib.suppress(ValueError):
            described: dict[str, Any] = json.loads(line)
            return described
    why = ended[-1] if ended else "it ended without a word"
    raise SettingsError(f"{source}: {path.name}: its tensors cannot be read: {why}")


def _tensor(table: Mapping[str, Any], batching: Batching) -> Tensor:
    shape = tuple(table["shape"])
    whole = shape if batching.batch == NONE else (-1, *shape[1:])
    return Tensor(table["name"], table["datatype"], whole, batch=batching.batch)
