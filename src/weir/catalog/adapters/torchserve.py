"""Runs TorchServe's model archives as they are: a handler of the archive, or one of TorchServe's own, gets the requests of a batch.

The server unpacks an archive and reads its manifest and its model-config.yaml. The handler runs in the workers, which it must not share: it may change
the working directory and import modules of any name. Where the package `torchserve` is installed, handlers import it; else what ts_modules.py has.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.parser import Parser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, NamedTuple, cast
from urllib.parse import unquote_to_bytes
from uuid import uuid4

from weir.catalog.adapters.model_archive import read_manifest, unpack
from weir.catalog.repository.model_files import only_file, with_attributes
from weir.catalog.sources import ARCHIVES, MANIFEST, ModelToServe, is_archive
from weir.errors import InvalidRequest, ModelError, SettingsError, brief
from weir.metrics import ModelMetrics
from weir.model import Model
from weir.serving.delivery import logger
from weir.wire import predictions
from weir.wire.predictions import PredictionResponse
from weir.workers.cpus import gpu_count
from weir.workers.source import FOLDER, declared, private_folder, reading

_MAX_PARTS = 1000  # of a form
_MAX_CONFIG = 1 << 20  # bytes
# Of TorchServe's settings of a model: what each is here, and how its value becomes ours.
SETTINGS: Mapping[str, tuple[str, Callable[[float], Any]]] = {
    "batchSize": ("max_batch_size", int),
    "minWorkers": ("workers", int),
    "responseTimeout": ("predict_timeout", float),
    "startupTimeout": ("start_timeout", float),
    "jobQueueSize": ("max_queue_size", int),
}
VERSION = "0.12.0"  # of TorchServe, whose interface this is
DELAY = "maxBatchDelay"  # milliseconds; it makes the policy, together with the size
_DELAY = 100


def settings_from(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return our settings for those that TorchServe has for a model, and ignore what is none of them. Raises SettingsError."""
    found: dict[str, Any] = {}
    for key in (*SETTINGS, DELAY):
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise SettingsError(f"{source}: {key}={brief(value)}: must be a number from 0 on")
        if key != DELAY and value:  # 0 is no limit, or "as many as there are"
            name, convert = SETTINGS[key]
            found[name] = convert(value)
    if found.get("max_batch_size", 1) > 1:
        delay = float(given.get(DELAY, _DELAY)) / 1000
        found |= {"policy": f"size-or-delay:delay={delay}", "max_queue_delay": max(delay, 0.001)}
    return found


class TorchServePlatform:
    """The platform `torchserve`."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the handler of an archive, which may be unpacked already. Raises SettingsError; see Platform."""
        path = _archive_of(model)
        source = f"{model.label}: {path.name}"
        if (executor := model.settings.get("executor", "process")) != "process":
            raise SettingsError(f"{source}: executor={executor!r}: must be process, as handlers change their process")
        if path.is_dir():
            return with_attributes(declared(TorchServeModel, _attributes(path.resolve(), path, model)), model)
        private = private_folder(mkdtemp(prefix="weir-archive-"))
        with reading(private):
            folder = Path(private.path)
            unpack(path, folder, source)
            # torch-model-archiver puts a folder into a .tar.gz.
            folder = next((each.parents[1] for each in folder.glob(f"*/{MANIFEST}")), folder)
            found = with_attributes(declared(TorchServeModel, _attributes(folder, path, model)), model)
        setattr(found, FOLDER, private)
        return found


def _attributes(folder: Path, path: Path, model: ModelToServe) -> dict[str, Any]:
    """Return the attributes of the class for the archive `path`, whose files are in `folder`. Raises SettingsError."""
    source = f"{model.label}: {path.name}"
    manifest = read_manifest(folder, source)
    described = manifest["model"]
    _check_handler(described["handler"], folder, source)
    if file := described.get("requirementsFile"):
        logger.warning(
            "model %r: its requirements are not installed by Weir: pip install -r %s", model.label, folder / file
        )
    config = b""
    if file := described.get("configFile"):
        config = (folder / file).read_bytes()
        if len(config) > _MAX_CONFIG:
            raise SettingsError(f"{source}: {file}: is larger than {_MAX_CONFIG} bytes")
    return {
        **settings_from(_table_in(config, f"{source}: {file}"), f"{source}: {file}"),
        "archive": path.name,
        "archive_version": str(described.get("modelVersion") or ""),
        "folder": str(folder),
        "called": model.name,
        "manifest": json.dumps(manifest),
        "config": config,
    }


def _archive_of(model: ModelToServe) -> Path:
    assert model.folder is not None, "a model that is a file, or of a repository, has a folder: this is a bug"
    if model.target:
        return model.folder / model.target
    return model.folder if is_archive(model.folder) else only_file(model, ARCHIVES)


def _has_torchserve() -> bool:
    """Return whether the package is installed; any folder may be called ts."""
    found = find_spec("ts")
    return found is not None and any(
        Path(each, "torch_handler").is_dir() for each in found.submodule_search_locations or ()
    )


def _check_handler(handler: str, folder: Path, source: str) -> None:
    """Raise SettingsError for a handler that is neither a file of the archive nor one of TorchServe's that can be had."""
    file = handler.partition(":")[0].removesuffix(".py") + ".py"
    if (folder / Path(file).name).is_file():
        return
    from weir.catalog.adapters.ts_modules import HANDLERS

    if handler.isidentifier() and (handler in HANDLERS or _has_torchserve()):
        return
    known = ", ".join(HANDLERS)
    raise SettingsError(
        f"{source}: handler={brief(handler)}: must be a file of the archive or one of {known}; for TorchServe's others, install "
        "the package torchserve (pip install torchserve captum pyyaml)"
    )


def _table_in(config: bytes, source: str) -> dict[str, Any]:
    """Return what a model-config.yaml says. Whoever writes it out may write far more: an alias may repeat what it stands for. Raises SettingsError."""
    if not config:
        return {}
    try:
        import yaml
    except ImportError:
        raise SettingsError(f"{source}: PyYAML is not installed (pip install pyyaml)") from None
    try:
        table = yaml.safe_load(config)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingsError(f"{source}: must be YAML: {brief(str(error), 200)}") from error
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: must be a table of settings")
    return table


class Row(NamedTuple):
    """A request as a handler gets it: an id, headers, and a value for each part of the body."""

    id: str
    headers: dict[str, Any]
    values: dict[str, Any]


class TorchServeModel(Model):
    """Runs the handler of the unpacked archive in `folder`."""

    content_types = (predictions.CONTENT_TYPE,)
    max_batch_size = 1
    predict_timeout = 120.0

    archive: ClassVar[str] = ""  # the name of its file
    archive_version: ClassVar[str] = ""  # as its manifest states it
    folder: ClassVar[str] = ""
    called: ClassVar[str] = ""
    manifest: ClassVar[str] = "{}"
    config: ClassVar[bytes] = b""  # YAML

    def load(self) -> None:
        """Import the handler and call its `initialize`, in the folder. Raises what they raise."""
        from weir.catalog.adapters import ts_modules

        sys.path.insert(0, self.folder)
        os.chdir(self.folder)
        if not _has_torchserve():
            ts_modules.install()
        manifest, gpus = json.loads(self.manifest), gpu_count()
        properties = {
            "model_dir": self.folder,
            "gpu_id": self.worker_index % gpus if gpus else None,
            "batch_size": self.max_batch_size,
            "server_name": "MMS",
            "server_version": VERSION,
            "limit_max_image_pixels": True,
        }
        metrics, config = HandlerMetrics(self.metrics), _table_in(self.config, "model-config.yaml")
        self._context = ts_modules.Context(self.called, properties, manifest, metrics, config)
        self._handle = _entry_point(manifest["model"]["handler"], self._context)

    def decode(self, body: bytes, content_type: str) -> Row:
        """Return a request of TorchServe's API as the handler gets it. Raises InvalidRequest."""
        given = predictions.read_request(body)
        headers = _Headers(given.headers)
        kind = headers.get("content-type") or ""
        return Row(given.id or str(uuid4()), headers, _values(given.body, kind))

    def predict(self, batch: list[Any]) -> list[Any]:
        """Return a PredictionResponse for each Row, and the handler's result for each other item."""
        rows = [each if isinstance(each, Row) else Row(str(uuid4()), _Headers(), {"body": each}) for each in batch]
        self._context.begin([(row.id, row.headers) for row in rows])
        try:
            returned = self._handle([row.values for row in rows], self._context)
        except Exception as error:
            code = getattr(error, "error_code", None)
            if len(rows) > 1 or not isinstance(code, int) or not isinstance(batch[0], Row):
                raise
            return [_failed(code, str(getattr(error, "message", error)))]
        if not isinstance(returned, list) or len(returned) != len(rows):
            what = f"{len(returned)} results" if isinstance(returned, list) else f"a {type(returned).__name__}"
            raise ModelError(f"the handler returned {what} for {len(rows)} requests, must be a list with one for each")
        return [
            self._predicted(index, value) if isinstance(batch[index], Row) else value
            for index, value in enumerate(returned)
        ]

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return what the server reads a response of TorchServe's API from."""
        return predictions.write(value)

    def _predicted(self, index: int, value: Any) -> PredictionResponse:
        kind, body = _written(value)
        set_by_handler = self._context.get_response_headers(index)
        headers = {"content-type": kind, **{str(name): str(each) for name, each in set_by_handler.items()}}
        return PredictionResponse(self._context.get_response_status(index)[0], [*headers.items()], body)


def _failed(code: int, message: str) -> PredictionResponse:
    document = {"code": code, "type": "InternalServerException", "message": message}
    return PredictionResponse(code, [("content-type", "application/json")], json.dumps(document, indent=2).encode())


def _written(value: Any) -> tuple[str, bytes]:
    """Return the content type and the body of a result, which TorchServe writes so."""
    if isinstance(value, (bytes, bytearray)):
        return "application/octet-stream", bytes(value)
    if isinstance(value, str):
        return "text/plain; charset=utf-8", value.encode()
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        import io

        import torch

        torch.save(value, written := io.BytesIO())
        return "application/octet-stream", written.getvalue()
    return "application/json", json.dumps(value, indent=2).encode()


Entry = Callable[[list[Any], Any], Any]  # takes the values of requests, and the context


def _entry_point(handler: str, context: Any) -> Entry:
    """Return the function that gets the batches of the handler that a manifest names, after its `initialize`."""
    file, _, function = handler.partition(":")
    name = Path(file).name.removesuffix(".py")
    module = import_module(name if Path(f"{name}.py").is_file() else f"ts.torch_handler.{name}")
    if (found := getattr(module, function or "handle", None)) is not None:
        found(None, context)
        return cast(Entry, found)
    classes = import_module("ts.utils.util").list_classes_from_module(module)
    if len(classes) != 1 or not hasattr(classes[0], "handle"):
        there = ", ".join(each.__name__ for each in classes) or "none"
        raise SettingsError(
            f"handler={handler!r}: must have a function {function or 'handle'}, or one class with a method handle; has {there}"
        )
    made = classes[0]()
    made.initialize(context)
    return cast(Entry, made.handle)


class _Headers(dict[str, Any]):
    """Headers of a request, found by a name in any case, as handlers write it."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a header."""
        return super().get(name, super().get(name.lower(), default))


def _values(body: bytes, content_type: str) -> dict[str, Any]:
    """Return what a handler finds in a body: that of a form by name, else the whole as `body`. Raises InvalidRequest."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _form(body, content_type)
    if kind == "application/x-www-form-urlencoded":
        pairs = [pair.partition(b"=") for pair in _parts(body, b"&") if b"=" in pair]
        return {_unquoted(name).decode(errors="replace"): bytearray(_unquoted(value)) for name, _, value in pairs}
    return {"body": _value(body, kind)}


def _unquoted(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def _value(body: bytes, kind: str) -> Any:
    """Return a part of a body: parsed JSON, a text, or the bytes."""
    try:
        if kind == "application/json":
            return json.loads(body)
        if kind.startswith("text"):
            return body.decode()
    except (ValueError, RecursionError):
        pass  # the handler gets what is no JSON, and no text, as bytes
    return bytearray(body)


def _form(body: bytes, content_type: str) -> dict[str, Any]:
    boundary = Parser().parsestr(f"content-type: {content_type}").get_boundary()
    if not boundary:
        raise InvalidRequest(f"Content-Type {content_type[:80]!r}: must have a boundary")
    values: dict[str, Any] = {}
    for part in _parts(b"\r\n" + body, b"\r\n--" + boundary.encode("latin-1"))[1:]:
        if part.startswith(b"--"):
            return values
        head, _, content = part.partition(b"\r\n\r\n")
        headers = Parser().parsestr(head.decode(errors="replace").lstrip())
        name = headers.get_param("name", header="content-disposition")
        if isinstance(name, str):
            # Only a file has a type of its own; fields are bytes.
            values[name] = _value(content, headers.get_content_type() if headers.get_filename() is not None else "")
    raise InvalidRequest("body: ends before the last boundary of its form")


def _parts(body: bytes, border: bytes) -> list[bytes]:
    parts = body.split(border, _MAX_PARTS + 2)
    if len(parts) > _MAX_PARTS + 2:
        raise InvalidRequest(f"body: a form must have at most {_MAX_PARTS} parts")
    return parts


class HandlerMetrics:
    """Takes the metrics of a handler, as `context.metrics`: those that it adds are the model's own metrics."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self.request_ids: Any = None

    def add_counter(self, name: str, value: float, idx: Any = None, dimensions: Any = None, **more: Any) -> None:
        """Count `value` more."""
        with suppress(SettingsError, ValueError):  # one that Prometheus does not allow costs itself
            labels = _labels(dimensions)
            self._metrics.counter(_metric_name(name), labels=tuple(labels)).inc(value, **labels)

    def add_metric(
        self,
        name: str,
        value: float,
        unit: Any = "",
        idx: Any = None,
        dimensions: Any = None,
        *more: Any,
        **others: Any,
    ) -> None:
        """Set a gauge to `value`."""
        with suppress(SettingsError, ValueError):
            labels = _labels(dimensions)
            self._metrics.gauge(_metric_name(name, unit), labels=tuple(labels)).set(value, **labels)

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms", dimensions: Any = None) -> None:
        """Set a gauge to a time or a size."""
        self.add_metric(name, value, unit, idx, dimensions)

    def add_size(self, name: str, value: float, idx: Any = None, unit: str = "MB", dimensions: Any = None) -> None:
        """Set a gauge to a size."""
        self.add_metric(name, value, unit, idx, dimensions)

    def add_percent(self, name: str, value: float, idx: Any = None, dimensions: Any = None) -> None:
        """Set a gauge to a share."""
        self.add_metric(name, value, "percent", idx, dimensions)

    def add_error(self, name: str, value: Any, dimensions: Any = None, **more: Any) -> None:
        """Log an error."""
        logger.error("handler: %s: %s", name, brief(value, 200))


def _metric_name(name: str, unit: Any = "") -> str:
    return re.sub(r"\W", "_", f"{name}_{unit}" if isinstance(unit, str) and unit else name)


def _labels(dimensions: Any) -> dict[str, str]:
    return {str(each.name): str(each.value) for each in dimensions or ()}
