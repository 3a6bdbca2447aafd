"""The platforms that Weir brings besides the adapters: Python code, chains, ONNX, scikit-learn and transformers. A platform makes a class
from the files of a model's version.

The server loads no library of models: a process apart describes what is in a file, so one that makes onnxruntime crash does not harm the server.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from weir.catalog.chains import Branch, Chain, Step, Steps, Switch
from weir.catalog.loading import class_in, load_target, reread
from weir.catalog.repository.model_files import (
    PYTHON_FILE,
    TENSORS,
    as_tensor,
    batch_dimension_of,
    file_within,
    leaves_batch_out,
    need,
    only_file,
    read_apart,
    with_attributes,
)
from weir.catalog.repository.onnx_model import JOINS, TRY, OnnxModel, row_shape
from weir.catalog.repository.sklearn_model import SKOPS, SklearnModel
from weir.catalog.repository.transformers_model import TASKS, TransformersModel
from weir.catalog.repository.triton import triton_class_in
from weir.catalog.sources import PLATFORMS, TORCHSERVE, ModelToServe, is_archive, platform_of, task_and_model
from weir.errors import SettingsError
from weir.model import NONE, OPTIONAL, REQUIRED, Model, Tensor, check_model, overrides
from weir.serving.delivery import logger
from weir.serving.service import Service
from weir.text_models.checkpoint.hub import check_id
from weir.workers.process.launch import python_path
from weir.workers.source import FOLDER, declared, loaded_apart, reading


def guess(folder: Path, source: str) -> str:
    """Return the name of the platform that the files in `folder` are for. Raises SettingsError if that cannot be told."""
    # From Python 3.14 on, `is_file` says False of what may not be read; listing raises.
    if folder.is_dir() and any(each.name == "model.py" and each.is_file() for each in folder.iterdir()):
        return "python"
    if is_archive(folder):
        return TORCHSERVE
    for ending, platform in PLATFORMS.items():
        if any(folder.glob(f"*{ending}")):
            return platform
    raise SettingsError(f"{source}: {folder.name}/ has neither model.py nor an .onnx file: set `platform` and `file`")


class PythonPlatform:
    """The platform `python`: classes in files of the version's folder, or in modules."""

    def load(self, model: ModelToServe) -> type[Model] | type[Service]:
        """Return the class that the target names, or the only model of the file."""
        assert model.folder is not None, "a model of a repository has a folder: this is a bug"
        where, _, name = model.target.rpartition(":") if ":" in model.target else (model.target, "", "")
        if name and not where.endswith(".py"):
            found = load_target(model.target, fresh=True)
        else:
            path = file_within(model.folder, where or PYTHON_FILE, model.label)
            if not name and triton_class_in(path) is not None:
                return platform_of("triton_python").load(model)
            module = _read_module(model, path)
            with reading(vars(module)[FOLDER]):
                found = class_in(module, name, model.target) if name else _only_model(module, model.label)
        return found if issubclass(found, Service) else with_attributes(found, model)


def _read_module(model: ModelToServe, path: Path) -> ModuleType:
    name = "weir_model_" + re.sub(r"\W", "_", f"{model.name}_{model.version}")
    folder = loaded_apart(str(path.parent), name)
    with reading(folder):
        return reread(f"{model.label}/{path.name}", name, path, folder)


def _only_model(module: ModuleType, source: str) -> type[Model]:
    models = [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, Model)
        and each.__module__ == module.__name__
        and overrides(each, "predict")
    ]
    if len(models) != 1:
        names = ", ".join(model.__name__ for model in models) or "none"
        raise SettingsError(f"{source}: {module.__file__} defines the models {names}: name one of them (target)")
    return models[0]


ENSEMBLE = "ensemble"


class EnsemblePlatform:
    """The platform `ensemble`: chains whose steps the model's configuration lists. A version's folder adds nothing."""

    def load(self, model: ModelToServe) -> type[Model] | type[Service]:
        """Return a class of Chain with these steps."""
        attributes = dict(model.attributes or {})
        if "steps" not in attributes:
            raise SettingsError(f"{model.label}: platform={ENSEMBLE!r}: must have [[steps]]")
        batch = batch_dimension_of(attributes) or REQUIRED
        attributes.pop("batch_dimension", None)
        if attributes.pop("decoupled", False):
            raise SettingsError(f"{model.label}: model_transaction_policy.decoupled: a chain gives one response")
        for key in TENSORS:
            attributes[key] = tuple(
                as_tensor(table, batch, f"{model.label}: {key}") for table in attributes.get(key, ())
            )
        return type("Ensemble", (Chain,), attributes)


def read_steps(configured: Any, source: str) -> Steps:
    """Return the steps that a file's tables describe. Raises SettingsError naming the step and its key."""
    if not isinstance(configured, list) or not configured:
        raise SettingsError(f"{source}: steps={configured!r:.80}: must be a list of at least one table")
    return [_read_part(table, f"{source}: steps[{index}]") for index, table in enumerate(configured)]


def _read_part(table: Any, source: str) -> Any:
    if isinstance(table, str):
        return Step(table)
    if not isinstance(table, Mapping):
        raise SettingsError(f"{source}={table!r:.80}: must be a table or a model's name")
    kinds = {"model": _read_step, "branch": _read_branch, "switch": _read_switch}
    named = [kind for kind in kinds if kind in table]
    if len(named) != 1:
        raise SettingsError(f"{source}: must have one of the keys {', '.join(kinds)}")
    return kinds[named[0]](table, source)


def _read_step(table: Mapping[str, Any], source: str) -> Step:
    _only_keys(table, ("model", "version", "inputs", "outputs"), source)
    maps = [table.get(key, {}) for key in ("inputs", "outputs")]
    for configured in maps:
        if not (isinstance(configured, Mapping) and all(isinstance(name, str) for name in configured.values())):
            raise SettingsError(f"{source}: {configured!r:.80}: must be a table of names")
    if not isinstance(table["model"], str):
        raise SettingsError(f"{source}: model={table['model']!r:.80}: must be a name")
    return Step(table["model"], str(table.get("version", "")), *maps)


def _read_branch(table: Mapping[str, Any], source: str) -> Branch:
    _only_keys(table, ("branch", "fail_fast"), source)
    fail_fast = table.get("fail_fast", True)
    if not isinstance(fail_fast, bool):
        raise SettingsError(f"{source}: fail_fast={fail_fast!r:.80}: must be true or false")
    return Branch(_read_paths(table["branch"], f"{source}.branch"), fail_fast)


def _read_switch(table: Mapping[str, Any], source: str) -> Switch:
    _only_keys(table, ("switch", "cases", "default"), source)
    on = table["switch"]
    if not isinstance(on, str):
        raise SettingsError(f"{source}: switch={on!r:.80}: must be a key of the item, or the name of a tensor")
    cases = _read_paths(table.get("cases"), f"{source}.cases")
    default = read_steps(table["default"], f"{source}.default") if "default" in table else None
    # Keys of a table are always text, but the item's value may be a number: "3" stands for both.
    numbers = {int(case): path for case, path in cases.items() if case.isascii() and case.isdigit()}
    return Switch(on, {**cases, **numbers}, default)


def _read_paths(configured: Any, source: str) -> dict[str, Steps]:
    if not isinstance(configured, Mapping) or not configured:
        raise SettingsError(f"{source}={configured!r:.80}: must be a table of lists of steps")
    return {name: read_steps(steps, f"{source}.{name}") for name, steps in configured.items()}


def _only_keys(table: Mapping[str, Any], keys: tuple[str, ...], source: str) -> None:
    for key in table:
        if key not in keys:
            raise SettingsError(f"{source}: {key}: unknown key; available: {', '.join(keys)}")


_SKLEARN = [ending for ending, platform in PLATFORMS.items() if platform == "sklearn"]


class SklearnPlatform:
    """The platform `sklearn`: files of estimators and pipelines, run by scikit-learn."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the estimator in the file. Raises SettingsError; see Platform."""
        path = only_file(model, _SKLEARN)
        what = f"{model.label}: {path.name}"
        if path.suffix != SKOPS and not model.trust.pickles:
            raise SettingsError(
                f"{what}: loading a pickle file can run arbitrary code; if you trust it, set --allow-pickle; or save it with "
                f"skops.io.dump(estimator, '{path.stem}.skops')"
            )
        need("sklearn", "sklearn", model, "scikit-learn")
        if path.suffix == SKOPS:
            need("skops", "sklearn", model)
        described = _described(path, what, model.trust.types)
        if untrusted := described.get("untrusted"):
            flags = " ".join(f"--trust-type {name}" for name in untrusted)
            raise SettingsError(f"{what}: contains types that may run code; if you trust it, set {flags}")
        _check_method(model, described, what)
        attributes = {
            "path": str(path),
            "trusted": model.trust.types,
            "features": described["features"],
            "columns": tuple(described["columns"]),
            "examples": tuple(described["examples"]),
        }
        return with_attributes(declared(SklearnModel, attributes), model)


def _described(path: Path, what: str, trusted: tuple[str, ...]) -> dict[str, Any]:
    """Return the description that sklearn_model prints of the file. Steps of a pipeline may be of the user's own modules."""
    inherited = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": python_path(inherited)}
    return read_apart(
        "weir.catalog.repository.sklearn_model", [str(path), *trusted], f"{what}: cannot be loaded", environment
    )


def _check_method(model: ModelToServe, described: dict[str, Any], what: str) -> None:
    method = model.params.get("method", "predict")
    if method not in described["methods"]:
        has = ", ".join(described["methods"]) or "none of those that are served"
        rule = f"{what}: method={method!r}: {described['type']} has {has}; another one: --param method=NAME"
        raise SettingsError(rule)


class TransformersPlatform:
    """The platform `transformers`: models of the Hugging Face hub, or folders that `save_pretrained` has written."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the pipeline of the task. Raises SettingsError; see Platform."""
        task, source = task_and_model(model.target)
        if task not in TASKS:
            raise SettingsError(
                f"{model.label}: hf:{task}: must be one of {', '.join(TASKS)}; for another task, write a class that calls its "
                "pipeline (for sentence vectors: weir embed serve)"
            )
        path = Path(source).expanduser()
        if path.is_dir():
            source = str(path.absolute())
        elif path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
            raise SettingsError(f"{model.label}: hf:{task}={source}: no folder {path.absolute()}")
        need("torch", "transformers", model)
        need("transformers", "transformers", model)
        if not path.is_dir():
            source = check_id(source)
        attributes = {"task": task, "source": source, "examples": () if model.attributes else TASKS[task]}
        return with_attributes(declared(TransformersModel, attributes), model)


Described = Mapping[str, Any]  # what onnx_model.py prints about a file


class OnnxBatching(NamedTuple):
    """Whether requests for a file can be batched.

    Attributes:
        batch: as Tensor.batch.
        size: the only batch size, in rows, that the file accepts; 0 if it accepts any.
        reason: why requests cannot be batched; "" if they can.
    """

    batch: str
    size: int = 0
    reason: str = ""


def find_batching(described: Described, configured: Mapping[str, Any], source: str) -> OnnxBatching:
    """Return whether requests can be batched for a file with the tensors `described` and the attributes `configured`.

    Raises SettingsError for a configuration that wants batches of a model that cannot have them.
    """
    stated, ranks = batch_dimension_of(configured), _batch_dimension_by_ranks(described, configured)
    if stated == NONE or (ranks == NONE and configured.get("batch_dimension") is None):
        return OnnxBatching(NONE, reason="its configuration says so")
    tensors = [table for key in TENSORS for table in described[key]]
    reason = _why_no_batch(tensors)
    if stated is None and ranks is None:
        reason = reason or _why_unknown(tensors, described.get(JOINS))
    if not reason:
        size = max(table["shape"][0] for table in tensors)
        return OnnxBatching(OPTIONAL if OPTIONAL in (stated, ranks) else REQUIRED, max(size, 0))
    if stated is None and ranks is None:
        return OnnxBatching(NONE, reason=reason)
    raise SettingsError(f"{source}: max_batch_size must be 0: {reason}")


def states_batching(configured: Mapping[str, Any]) -> bool:
    """Return whether the attributes of a configuration state, or imply, whether requests are batched."""
    return "batch_dimension" in configured or any(configured.get(key) for key in TENSORS)


def _batch_dimension_by_ranks(described: Described, configured: Mapping[str, Any]) -> str | None:
    """Return the batch dimension that follows from the number of dimensions in the configuration: all that the file has, or all
    but the first. None if nothing follows."""
    found = set()
    for key in TENSORS:
        own = {table["name"]: table["shape"] for table in described[key]}
        for table in configured.get(key, ()):
            missing = len(own.get(table["name"], ())) - len(table["shape"])
            without = bool(table.get("batched")) or leaves_batch_out(table)
            if without and missing in (0, 1):
                found.add(NONE if missing == 0 else OPTIONAL if leaves_batch_out(table) else REQUIRED)
    return found.pop() if len(found) == 1 else None


def _why_no_batch(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return why the first dimension cannot be a batch; "" if it may be one."""
    for table in tensors:
        if not table["shape"]:
            return f"tensor {table['name']!r} is a scalar"
    fixed = {table["shape"][0]: table["name"] for table in tensors if table["shape"][0] != -1}
    if len(fixed) > 1:
        lengths = ", ".join(f"{name!r} has {length}" for length, name in fixed.items())
        return f"the first dimensions of its tensors differ: {lengths}"
    return ""


def _why_unknown(tensors: Sequence[Mapping[str, Any]], joins: bool | None) -> str:
    """Return why the first dimension is not a batch or why that is unknown; "" if it is a batch. `joins` is the result of
    onnx_model.joins_rows."""
    for table in tensors:
        if table["shape"][0] != -1:
            return f"tensor {table['name']!r} has the fixed first dimension {table['shape'][0]}, which may be no batch"
    if joins is not None:
        return "" if joins else "rows together are not answered as they are alone (a trial has shown that)"
    names = {table["names"][0]: table["name"] for table in tensors}
    elsewhere = {name for table in tensors for name in table["names"][1:]}
    if len(names) > 1 or "" in names or names.keys() & elsewhere:
        first = ", ".join(f"{table!r}: {name or 'none'}" for name, table in names.items())
        return f"it cannot be tried, and the names of the first dimensions do not say that they are a batch ({first})"
    return ""


class OnnxPlatform:
    """The platform `onnx`: ONNX files, run by onnxruntime."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the file. Raises SettingsError; see Platform."""
        need("onnxruntime", "onnx", model)
        path = only_file(model, [".onnx"])
        configured = _with_file_shapes(model.attributes or {}, model.label)
        described = _tensors_of_file(path, model.label, *([] if states_batching(configured) else [TRY]))
        described["inputs"] += _optional_inputs(configured, described)
        batching = find_batching(described, configured, model.label)
        if batching.reason:
            logger.info("model %r: each request runs alone: %s", model.label, batching.reason)
        tensors = {key: tuple(_tensor(table, batching) for table in described[key]) for key in TENSORS}
        sizes: dict[str, Any] = {}
        if batching.size:  # the file was made for batches of this size, and accepts no others
            sizes = {"max_batch_size": batching.size, "allowed_batch_sizes": (batching.size,)}
        found = declared(OnnxModel, {**tensors, **sizes, "path": str(path), "unbatched": batching.reason})
        found = with_attributes(found, model._replace(attributes=configured))
        return _with_request_shapes(found, model.attributes or {})


def _with_file_shapes(attributes: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `attributes` with the shapes of the file's tensors, where `reshape` makes them differ from those of requests."""
    own = dict(attributes)
    for key in TENSORS:
        tables = []
        for table in own.get(key, ()):
            if "reshape" in table:
                _check_reshape(table, f"{source}: {key}: {table['name']!r}")
                table = {**table, "shape": table["reshape"]}
                del table["reshape"]
            tables.append(table)
        if tables:
            own[key] = tuple(tables)
    return own


def _check_reshape(table: Mapping[str, Any], source: str) -> None:
    before, after = table["shape"], table["reshape"]
    if before.count(-1) != after.count(-1):
        raise SettingsError(f"{source}: reshape={after}: must have as many lengths of -1 as {before}")
    if math.prod(before) != math.prod(after):
        raise SettingsError(f"{source}: reshape={after}: must have as many elements as {before}")


def _with_request_shapes(model: type[Model], attributes: Mapping[str, Any]) -> type[Model]:
    """Return `model` with the shapes that its configuration gives to the tensors of requests and responses."""
    changed: dict[str, Any] = {}
    for key in TENSORS:
        shapes = {table["name"]: table["shape"] for table in attributes.get(key, ()) if "reshape" in table}
        if shapes:
            tensors: Sequence[Tensor] = getattr(model, key)
            changed[key] = tuple(
                _reshaped(tensor, shapes[tensor.name]) if tensor.name in shapes else tensor for tensor in tensors
            )
    return check_model(declared(model, changed)) if changed else model


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    whole = shape if tensor.batch == NONE else (-1, *shape)
    return tensor._replace(shape=tuple(whole), reshape=tuple(row_shape(tensor)))


def _optional_inputs(configured: Mapping[str, Any], described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs that the configuration names and for which the file has default values: requests may omit them."""
    wanted = {table["name"] for table in configured.get("inputs", ())}
    return [{**table, "optional": True} for table in described["defaults"] if table["name"] in wanted]


def _tensors_of_file(path: Path, source: str, *more: str) -> dict[str, Any]:
    """Return the file's description, as onnx_model prints it. With TRY in `more`, it also has JOINS, if that can be determined."""
    environment = {"PYTHONPATH": python_path(""), "PATH": ""}
    what = f"{source}: {path.name}: its tensors cannot be read"
    return read_apart("weir.catalog.repository.onnx_model", [str(path), *more], what, environment)


def _tensor(table: Mapping[str, Any], batching: OnnxBatching) -> Tensor:
    shape = tuple(table["shape"])
    whole = shape if batching.batch == NONE else (-1, *shape[1:])
    optional = bool(table.get("optional"))
    return Tensor(table["name"], table["datatype"], whole, batch=batching.batch, optional=optional)
