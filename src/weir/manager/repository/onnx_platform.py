"""Models that are ONNX files. Their tensors are read from the file, in a process of its own: onnxruntime is not loaded into the
server, and a file that makes it crash harms nobody."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weir.errors import SettingsError
from weir.manager.repository.onnx_model import OnnxModel
from weir.manager.repository.paths import file_within
from weir.manager.repository.tensors import with_attributes
from weir.manager.spec import ModelToServe
from weir.model import Model, Tensor
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
        described = _described(path, model.label)
        tensors = {key: [_tensor(table, model.label) for table in described[key]] for key in ("inputs", "outputs")}
        attributes = {**tensors, **_batches(described, model.label), "path": str(path)}
        return with_attributes(declared(OnnxModel, attributes), model)


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


def _described(path: Path, source: str) -> Mapping[str, Any]:
    environment = {"PYTHONPATH": python_path(""), "PATH": ""}
    command = [sys.executable, "-P", "-m", "weir.manager.repository.onnx_model", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{source}: {path.name}: its tensors could not be read within {LONGEST:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise SettingsError(f"{source}: {path.name}: its tensors cannot be read: {said}")
    described: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return described


def _tensor(table: Mapping[str, Any], source: str) -> Tensor:
    shape = table["shape"]
    if not shape:
        raise SettingsError(f"{source}: tensor {table['name']!r} is a scalar: the first dimension must be the batch")
    return Tensor(table["name"], table["datatype"], (-1, *shape[1:]))


def _batches(described: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return what the first dimensions say of batches: a file compiled for batches of a fixed size takes no others."""
    sizes = {table["shape"][0] for table in described["inputs"] if table["shape"]}
    fixed = sizes - {-1}
    if len(fixed) > 1:
        raise SettingsError(
            f"{source}: its inputs have different first dimensions, {sorted(fixed)}: they must be the batch"
        )
    if not fixed:
        return {}
    (size,) = fixed
    return {"max_batch_size": size, "allowed_batch_sizes": (size,)}
