"""The files of a model's version, and the tensors that its configuration declares, for all platforms."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError, add_extra, brief
from weir.model import NONE, OPTIONAL, RAGGED, REQUIRED, Model, Tensor, check_model
from weir.workers.source import declared

PYTHON_FILE = "model.py"
MAX_PATH_LENGTH = 1024  # bytes of a file's path below its model's folder
MAX_FILE_BYTES = 1 << 20  # of a configuration
TENSORS = ("inputs", "outputs")  # the attributes that declare tensors


def with_attributes(model: type[Model], configured: ModelToServe) -> type[Model]:
    """Return `model` with the attributes of its configuration: tensors if the class declares none, whether they have a batch
    dimension, examples, sizes to warm up at.

    Raises SettingsError where the class and the configuration contradict each other.
    """
    attributes: dict[str, Any] = dict(configured.attributes or {})
    batch = batch_dimension_of(attributes)
    attributes.pop("batch_dimension", None)
    if attributes.pop("decoupled", False) and not model.streaming:
        raise SettingsError(
            f"{configured.label}: model_transaction_policy.decoupled: a streaming model declares it in its class (streaming = True)"
        )
    for key in TENSORS:
        tables = attributes.pop(key, None)
        own: Sequence[Tensor] = getattr(model, key)
        if own:
            attributes[key] = tuple(_with_batch(tensor, batch, f"{configured.label}: {key}") for tensor in own)
            if tables is not None:
                check_agree(tables, attributes[key], f"{configured.label}: {key}")
                formats = {table["name"]: table.get("format", "") for table in tables}
                attributes[key] = tuple(
                    tensor._replace(format=formats[tensor.name] or tensor.format) for tensor in attributes[key]
                )
        elif tables is not None and not _are_items(tables):
            attributes[key] = tuple(
                as_tensor(table, batch or REQUIRED, f"{configured.label}: {key}") for table in tables
            )
    attributes = {key: value for key, value in attributes.items() if value != getattr(model, key, None)}
    return check_model(declared(model, attributes)) if attributes else model


def _are_items(tables: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `tables` are what Weir's own configurations show for a model of items, which has no tensors."""
    return [(table["name"] in ("input", "output"), table["datatype"], table["shape"]) for table in tables] == [
        (True, "BYTES", [])
    ]


def batch_dimension_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the batch dimension (as Tensor.batch) that a configuration states or that the shapes in its tables imply; None if
    it leaves that open."""
    configured: str | None = attributes.get("batch_dimension")
    tables = [table for key in TENSORS for table in attributes.get(key, ())]
    if configured != NONE and tables and all(leaves_batch_out(table) for table in tables):
        return OPTIONAL  # clients of the AMD server send the shapes that the file has: without a batch
    return configured


def leaves_batch_out(table: Mapping[str, Any]) -> bool:
    """Return whether a table gives the shape of one row, so that requests may have that shape too."""
    return not table.get("batched") and table["shape"][:1] != [-1]


def _with_batch(tensor: Tensor, configured: str | None, source: str) -> Tensor:
    if configured is None or configured == tensor.batch:
        return tensor
    if configured == REQUIRED and tensor.batch == NONE:
        rule = f"{source}: {tensor.name!r} has no batch dimension in the model itself: max_batch_size must be 0"
        raise SettingsError(rule)
    # A class whose batch dimension is optional also satisfies "required".
    keeps = configured == REQUIRED or tensor.batch == NONE
    return tensor if keeps else tensor._replace(batch=configured)


def check_agree(tables: Sequence[Mapping[str, Any]], own: Sequence[Tensor], source: str) -> None:
    """Raise SettingsError unless the file declares exactly the tensors that the model has, in any order. The file's shapes may
    leave the batch dimension out."""
    tensors = {tensor.name: tensor for tensor in own}
    if tensors.keys() != {table["name"] for table in tables}:
        names = ", ".join(table["name"] for table in tables)
        raise SettingsError(f"{source}: are {names}; the model itself has {', '.join(tensors)}")
    for table in tables:
        tensor = tensors[table["name"]]
        if table["datatype"] != tensor.datatype:
            raise SettingsError(
                f"{source}: {tensor.name!r} has datatype {table['datatype']!r}; the model itself has {tensor.datatype!r}"
            )
        _check_supported(table, tensor, f"{source}: {tensor.name!r}")
        shapes = [table["shape"]] if tensor.batch == NONE else [table["shape"], [-1, *table["shape"]]]
        if not any(_fits(shape, tensor.shape) for shape in shapes):
            rule = f"{source}: {tensor.name!r} has shape {table['shape']}; the model itself has {list(tensor.shape)}"
            raise SettingsError(rule)


def _check_supported(table: Mapping[str, Any], tensor: Tensor, source: str) -> None:
    """Raise SettingsError if the file declares a property of the tensor that the model itself lacks."""
    if table.get("optional") and not tensor.optional:
        raise SettingsError(f"{source}: optional: the model itself needs it")
    if table.get("ragged") and tensor.varying != RAGGED:
        rule = f"{source}: allow_ragged_batch: a model declares it in its class (Tensor(varying='ragged'))"
        raise SettingsError(rule)
    if "reshape" in table and list(tensor.reshape or ()) != table["reshape"]:
        raise SettingsError(f"{source}: reshape: is for ONNX files; a class gets tensors as requests have them")


def _fits(configured: Sequence[int], own: Sequence[int]) -> bool:
    return len(configured) == len(own) and all(
        one == other or -1 in (one, other) for one, other in zip(configured, own, strict=True)
    )


def as_tensor(table: Mapping[str, Any], batch: str, source: str) -> Tensor:
    """Return the tensor that a table of a file declares; `batch` is the batch dimension of its model, as Tensor.batch. Raises
    SettingsError for properties that only a class or an ONNX file can have."""
    shape = table["shape"]
    # `dims` in files of Triton, and shapes in examples of the AMD server, leave the batch out.
    whole = batch == NONE or (shape[:1] == [-1] and not table.get("batched"))
    tensor = Tensor(
        table["name"],
        table["datatype"],
        tuple(shape if whole else [-1, *shape]),
        batch=batch,
        optional=bool(table.get("optional")),
        format=table.get("format", ""),
    )
    _check_supported(table, tensor, f"{source}: {tensor.name!r}")
    return tensor


def config_bytes(file: Path, source: str, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a configuration's file, at most `most` bytes. Raises SettingsError, which begins with `source`."""
    try:
        if file.stat().st_size > most:
            raise SettingsError(f"{source}: is larger than {most} bytes")
        return file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{source}: cannot be read: {error.strerror}") from error


def json_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the object that a JSON text of a configuration is. Raises SettingsError, which begins with `source`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: must be JSON: {brief(str(error), 200)}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{source}: must be a JSON object")
    return found


def is_inner(file: str) -> bool:
    """Return whether `file` is a path of a file that stays within the folder to which it is relative, whatever there is."""
    path = PurePosixPath(file)
    stays = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return stays and not {"\\", "\0"} & {*file} and len(file.encode(errors="replace")) <= MAX_PATH_LENGTH


def file_within(folder: Path, file: str, source: str) -> Path:
    """Return the path of `file`, which must lie in `folder`. Raises SettingsError."""
    if not is_inner(file):
        raise SettingsError(f"{source}: file={file!r}: must be a file in the version's folder")
    found = folder / file
    try:
        there = found.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise SettingsError(f"{source}: file={file!r}: there is no such file in {folder.name}/")
    return found


def only_file(model: ModelToServe, endings: Sequence[str]) -> Path:
    """Return the file of a model: the one that its target names, or else the only one with one of `endings` in its folder. Raises
    SettingsError."""
    assert model.folder is not None, "a model that is a file has a folder: this is a bug"
    if model.target:
        return file_within(model.folder, model.target, model.label)
    files = sorted(file for file in model.folder.iterdir() if file.suffix in endings)
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise SettingsError(
            f"{model.label}: there must be one {endings[0]} file in {model.folder.name}/, or `file` names one; there are {names}"
        )
    return files[0]


def need(library: str, extra: str, model: ModelToServe, called: str = "") -> None:
    """Raise SettingsError that names `extra` if `library` is not installed. It is `called` so by people."""
    if find_spec(library) is None:
        rule = f"{model.label}: platform {model.platform}: {called or library} is not installed; {add_extra(extra)}"
        raise SettingsError(rule)


DESCRIBE_TIMEOUT = 300.0  # seconds


def read_apart(program: str, arguments: Sequence[str], source: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON object that the module `program` prints last, run in a process of its own: the server loads no library of
    models, and a file that makes one crash does not harm it.

    Raises SettingsError that starts with `source` if it prints none; what it wrote to stderr last is the reason.
    """
    command = [sys.executable, "-P", "-m", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DESCRIBE_TIMEOUT, env=environment, check=False)
        lines, ended = done.stdout.splitlines(), done.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        lines, ended = (error.stdout or b"").splitlines(), [f"it took more than {DESCRIBE_TIMEOUT:g} s"]
    for line in reversed(lines):  # the last line has the most facts, if it is complete
        with suppress(ValueError):
            described: dict[str, Any] = json.loads(line)
            return described
    why = ended[-1] if ended else "the process that reads it ended without a message"
    raise SettingsError(f"{source}: {why}")
