"""TorchServe's model archives, run as they are: a handler of the archive, or one of TorchServe's own, gets the requests of a batch. And its config.properties.

The server unpacks an archive and reads its manifest and its model-config.yaml. The handler runs in the workers, which it must not share: it may change
the working directory and import modules of any name. Where the package `torchserve` is installed, handlers import it; else what ts_modules.py has.

An archive may come from a stranger: names outside of the folder, links, and more content than its size allows are refused before they are written.
"""

import gzip
import json
import os
import re
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, partialmethod
from importlib import import_module
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl
from uuid import uuid4

from weir.catalog.adapters.ts_modules import CONTENT, Context, Row, install, list_classes_from_module
from weir.catalog.repository.model_files import config_bytes, is_inner, json_object, only_file, with_attributes
from weir.catalog.sources import ARCHIVES, MANIFEST, TORCHSERVE, ModelToServe, archives_in, default_name, is_archive
from weir.errors import SettingsError, brief
from weir.metrics import ModelMetrics
from weir.model import Model
from weir.serving.delivery import logger
from weir.wire import predictions
from weir.wire.forms import MULTIPART, read_form
from weir.workers.cpus import gpu_count
from weir.workers.run.steps import responses_of
from weir.workers.source import FOLDER, declared, private_folder, reading

_MAX_PARTS = 1000  # of a form
_PROPERTIES = {"server_name": "MMS", "server_version": "0.12.0", "limit_max_image_pixels": True}  # TorchServe's

# Settings.

# What TorchServe's settings of a model are here: those of its model-config.yaml, of a query that registers it, and of config.properties.
# maxBatchDelay is in milliseconds; together with the size, it makes the policy.
_STATED = {
    "max_batch_size": ("batchSize", "batch_size"),
    "max_queue_delay": ("maxBatchDelay", "max_batch_delay"),
    "max_queue_size": ("jobQueueSize", "job_queue_size"),
    "predict_timeout": ("responseTimeout", "response_timeout", "default_response_timeout"),
    "start_timeout": ("startupTimeout", "startup_timeout", "default_startup_timeout"),
    "workers": ("minWorkers", "initial_workers", "default_workers_per_model"),
}
_SETTINGS = {theirs: ours for ours, names in _STATED.items() for theirs in names}


def number_in(text: Any) -> Any:
    """Return the number that a text is, and anything else as it is."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def settings_from(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return our settings for those that TorchServe has for a model, and ignore what is none of them. Raises SettingsError."""
    found: dict[str, Any] = {}
    for key in filter(_SETTINGS.get, given):
        number = number_in(given[key])
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 1e9:
            raise SettingsError(f"{source}: {key}={brief(number)}: must be a number from 0 on")
        found[_SETTINGS[key]] = number
    delay = found.pop("max_queue_delay", 100) / 1000
    found = {ours: number for ours, number in found.items() if number}  # 0 is no limit, or as many as there are
    if found.get("max_batch_size", 1) > 1:
        found |= {"policy": f"size-or-delay:delay={delay}", "max_queue_delay": max(delay, 0.001)}
    return found


_LINE = re.compile(r"([^=:\s]+)\s*[=:\s]\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"(https?)://(\[[^]]+]|[^]:/\[]+)(?::(\d{1,5}))?/?")
_INFERENCE, _MANAGEMENT = "inference_address", "management_address"
_RENAMED = {
    "max_request_size": "max_body_size",
    "private_key_file": "tls_keyfile",
    "certificate_file": "tls_certfile",
    "cors_allowed_origin": "cors_origins",
}
_READ = {_INFERENCE, _MANAGEMENT, *_SETTINGS, *_RENAMED, "load_models", "model_store", "models"}


def read_configuration(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what a config.properties says: the document that a TOML file would be, from which all checks follow, and the names of the settings that have
    no meaning here. Raises SettingsError naming key, value and rule; OSError."""
    source = str(path)
    given = _properties(config_bytes(path, source).decode("utf-8-sig"))
    document = settings_from(given, source)
    document |= {ours: number_in(given[theirs]) for theirs, ours in _RENAMED.items() if theirs in given}
    document |= _address(given.get(_INFERENCE, "http://127.0.0.1:8080"), f"{source}: {_INFERENCE}")
    managed = _address(given.get(_MANAGEMENT, "http://127.0.0.1:8081"), f"{source}: {_MANAGEMENT}")
    if "host" in managed:
        document["frontends"] = {TORCHSERVE: "{host}:{port}".format_map(managed)}
    if "model_store" in given:
        document |= _of_store(given, path.parent / given["model_store"], source)
    return document, sorted(given.keys() - _READ)


def _properties(text: str) -> dict[str, str]:
    """Return the keys and values of Java's properties: a line that ends with a backslash goes on."""
    joined = re.sub(r"\\\r?\n\s*", "", text)
    lines = [line.strip() for line in joined.splitlines()]
    found = [_LINE.fullmatch(line) for line in lines if line and line[0] not in "#!"]
    return {each[1]: each[2].strip() for each in found if each is not None}


def _address(text: str, source: str) -> dict[str, Any]:
    if text.startswith("unix:"):
        return {"uds": text.removeprefix("unix:")}
    if (found := _ADDRESS.fullmatch(text)) is None:
        raise SettingsError(f"{source}={brief(text)}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
    scheme, host, port = found.groups()
    return {"host": host.strip("[]"), "port": int(port or {"http": 80, "https": 443}[scheme])}


def _of_store(given: Mapping[str, str], store: Path, source: str) -> dict[str, Any]:
    """Return the models in the folder `store`, those with settings of their own, and which of them are loaded at the start."""
    tables: dict[str, Any] = {}
    names: dict[str, str] = {}  # by file
    for name, versions in json_object(given.get("models", "{}"), f"{source}: models").items():
        stated = [each for each in (versions.values() if isinstance(versions, dict) else ()) if isinstance(each, dict)]
        chosen = next((each for each in stated if each.get("defaultVersion")), stated[-1] if stated else {})
        file = chosen.get("marName")
        where = f"{source}: models: {name}"
        if not isinstance(file, str) or "/" in file:
            raise SettingsError(f"{where}: marName={brief(file)}: must be the name of a file in {store}")
        names[file] = name
        tables[name] = {"target": str(store / file), **settings_from(chosen, where)}
    wanted, load = given.get("load_models", "none"), []
    for each in [each.name for each in archives_in(store)] if wanted.lower() == "all" else wanted.split(","):
        stated_name, _, file = each.strip().rpartition("=")  # FILE or NAME=FILE
        if file.lower() not in ("", "none"):
            name = stated_name or names.get(file) or default_name(file)
            if name != default_name(file):
                tables.setdefault(name, {"target": str(store / file)})
            load.append(name)
    return {"model_repository": str(store), "models": tables, "load": load or ["none"]}


# Archives.

MAX_FILES = 10_000
_ALWAYS_FITS = 1 << 30  # bytes that any archive may unpack to
_MOST_PACKED = 20  # times its size that a larger one may unpack to: weights shrink little, a zip bomb a thousand times
_LONGEST_YAML = 1 << 16  # bytes; PyYAML reads a number such as 1:1:1 in quadratic time
_BLOCK, _PIECE = 512, 1 << 20  # bytes: tar's own, and what is written at once
_LONGEST_HEADER = 4096  # bytes of what a .tar.gz says of a file in addition to its block, such as a long name
_LONG_NAME = tarfile.GNUTYPE_LONGNAME

_DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError)

# The name of each file, its size as the archive states it, and its content; None for a folder.
_Files = Iterator[tuple[str, int, Iterable[bytes] | None]]


def unpack(archive: Path, folder: Path, source: str) -> None:
    """Write the files of `archive` into `folder`, which is empty. Raises SettingsError, which begins with `source`."""
    left = room = max(_ALWAYS_FITS, _MOST_PACKED * archive.stat().st_size)
    try:
        members = _in_zip(archive) if zipfile.is_zipfile(archive) else _in_tar(archive)
        for count, (name, size, content) in enumerate(members, 1):
            left -= size
            if count > MAX_FILES or left < 0:
                limit = f"has more than {MAX_FILES} files, or more than {room} bytes of them"
                raise SettingsError(f"{source}: {limit}; if you trust it, unpack it and serve the folder")
            if content is None:
                continue
            if not is_inner(name):
                raise SettingsError(f"{source}: has a file {brief(name, 200)}: must be a path inside of it")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.writelines(content)
    except _DAMAGED as error:
        raise SettingsError(f"{source}: is damaged, or no archive: {brief(str(error), 200)}") from error
    except OSError as error:
        raise SettingsError(f"{source}: cannot be unpacked: {error}") from error


def _in_zip(archive: Path) -> _Files:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"{info.filename!r} is a link or a device, must be a file")
            if info.filename.endswith("/"):
                yield info.filename, 0, None
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile bounds no other's pieces
                raise ValueError(f"{info.filename!r} is compressed by bzip2 or LZMA, must be stored or deflated")
            with opened.open(info) as content:
                yield info.filename, info.file_size, iter(partial(content.read, _PIECE), b"")


def _in_tar(archive: Path) -> _Files:
    """Yield the files of a .tar.gz. Of a hostile one, `tarfile` itself would keep in memory what its headers say, some of it once for each file, or search
    it in quadratic time."""
    more: dict[str, str] = {}
    with gzip.open(archive) as packed:
        for _ in range(3 * MAX_FILES):
            if (block := packed.read(_BLOCK)) == bytes(_BLOCK):
                return
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, _LONG_NAME):
                said = _long_header(packed, info)
                if info.type != tarfile.XGLTYPE:  # which is of all files, such as the commit that `git archive` notes
                    more |= said
                continue
            name, is_folder = more.get("path", info.name), info.type == tarfile.DIRTYPE
            is_sparse = any(key.startswith("GNU.sparse") for key in more)
            if is_sparse or not (is_folder or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
                raise ValueError(f"{name!r} is a link or a device, must be a file")
            size = 0 if is_folder else int(more.get("size", info.size))
            if size < 0:
                raise ValueError(f"{name!r} has {size} bytes")
            yield name, size, None if is_folder else _pieces(packed, size)
            packed.read(-size % _BLOCK)
            more = {}
    raise ValueError("has too many headers")


def _pieces(packed: gzip.GzipFile, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes. Raises EOFError if there are fewer."""
    while size:
        piece = packed.read(min(size, _PIECE))
        if not piece:
            raise EOFError("it ends within a file")
        size -= len(piece)
        yield piece


def _long_header(packed: gzip.GzipFile, info: tarfile.TarInfo) -> dict[str, str]:
    """Return what a header says of the file that follows it: GNU's its name, and that of POSIX values by key. Raises ValueError."""
    if not 0 <= info.size <= _LONGEST_HEADER:
        raise ValueError(f"has a header of {info.size} bytes, must be at most {_LONGEST_HEADER}")
    data = packed.read(info.size + -info.size % _BLOCK)[: info.size]
    if info.type == _LONG_NAME:
        return {"path": data.rstrip(b"\0").decode(errors="surrogateescape")}
    found = {}
    while data:  # LENGTH KEY=VALUE and an end of line, of which the length counts all
        stated = data.partition(b" ")[0]
        if (size := int(stated)) <= len(stated):
            raise ValueError(f"has a record of {size} bytes in a header")
        key, _, value = data[len(stated) + 1 : size - 1].decode(errors="surrogateescape").partition("=")
        found[key], data = value, data[size:]
    return found


def read_manifest(folder: Path, source: str) -> dict[str, Any]:
    """Return the manifest in `folder`, whose `model` names existing files only. Raises SettingsError, which begins with `source`."""
    where = f"{source}: {MANIFEST}"
    manifest = json_object(config_bytes(folder / MANIFEST, where), where)
    model = manifest.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("handler"), str):
        raise SettingsError(f"{where}: must have a `model` with a `handler`, such as image_classifier or handler.py")
    for key in ("serializedFile", "modelFile", "configFile", "requirementsFile"):
        named = model.get(key)
        if named is not None and not (isinstance(named, str) and is_inner(named) and (folder / named).is_file()):
            raise SettingsError(f"{where}: {key}={brief(named)}: must be a file of the archive")
    return manifest


# The model.


class TorchServePlatform:
    """The platform `torchserve`."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the handler of an archive, which may be unpacked already. Raises SettingsError; see Platform."""
        assert model.folder is not None, "a model that is a file, or of a repository, has a folder: this is a bug"
        path = model.folder / model.target
        if not is_archive(path):
            path = only_file(model, ARCHIVES)
        source = f"{model.label}: {path.name}"
        if (executor := model.settings.get("executor", "process")) != "process":
            raise SettingsError(f"{source}: executor={executor!r}: must be process, as handlers change their process")
        if path.is_dir():
            return _class_of(path.resolve(), path.name, model, source)
        with reading(private := private_folder()):
            folder = Path(private.path)
            unpack(path, folder, source)
            folder = next((each.parents[1] for each in folder.glob(f"*/{MANIFEST}")), folder)  # as a .tar.gz has it
            found = _class_of(folder, path.name, model, source)
        setattr(found, FOLDER, private)
        return found


def _class_of(folder: Path, archive: str, model: ModelToServe, source: str) -> type[Model]:
    """Return the class for an archive whose files are in `folder`. Raises SettingsError."""
    manifest = read_manifest(folder, source)
    described = manifest["model"]
    _module_of(described["handler"], folder, source)
    if file := described.get("requirementsFile"):
        logger.warning("%s: Weir does not install its requirements: pip install -r %s", source, folder / file)
    attributes = {
        **settings_from(_config_in(folder, described, source), source),
        "archive": archive,
        "archive_version": str(described.get("modelVersion") or ""),
        "folder": str(folder),
        "called": model.name,
        "manifest": json.dumps(manifest),
    }
    return with_attributes(declared(TorchServeModel, attributes), model)


def _module_of(handler: str, folder: Path, source: str) -> str:
    """Return the name of the module of a handler: a file of the archive, or one of TorchServe's that can be had. Raises SettingsError."""
    name = Path(handler.partition(":")[0]).name.removesuffix(".py")
    if (folder / f"{name}.py").is_file():
        return name
    own = "ts.torch_handler."
    if handler.isidentifier() and (f"{own}{name}" in CONTENT or any(distributions(name="torchserve"))):
        return f"{own}{name}"
    known = ", ".join(each.removeprefix(own) for each in CONTENT if each.startswith(own))
    rule = f"must be a file of the archive or one of {known}; TorchServe's other handlers need its package"
    raise SettingsError(f"{source}: handler={brief(handler)}: {rule} (pip install torchserve captum pyyaml)")


def _config_in(folder: Path, described: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return what a model-config.yaml says. Whoever writes it out may write far more: an alias may repeat what it stands for. Raises SettingsError."""
    if not (file := described.get("configFile")):
        return {}
    source = f"{source}: {file}"
    try:
        import yaml

        content = config_bytes(folder / file, source, _LONGEST_YAML)
        table = yaml.safe_load(content) or {}
    except ImportError:
        raise SettingsError(f"{source}: PyYAML is not installed (pip install pyyaml)") from None
    except SettingsError:
        raise
    except Exception as error:  # PyYAML raises any for values that are not of the type that they state
        raise SettingsError(f"{source}: must be YAML: {brief(str(error), 200)}") from error
    if not isinstance(table, dict):
        raise SettingsError(f"{source}: must be a table of settings")
    return table


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

    def load(self) -> None:
        """Import the handler and call its `initialize`, in the folder. Raises what they raise."""
        sys.path.insert(0, self.folder)
        os.chdir(self.folder)
        if not any(distributions(name="torchserve")):
            install()
        manifest, gpus = json.loads(self.manifest), gpu_count()
        gpu = self.worker_index % gpus if gpus else None
        properties = {"model_dir": self.folder, "gpu_id": gpu, "batch_size": self.max_batch_size, **_PROPERTIES}
        config = _config_in(Path(self.folder), manifest["model"], self.archive)
        self._context = Context(self.called, properties, manifest, HandlerMetrics(self.metrics), config)
        self._handle = _entry_point(manifest["model"]["handler"], self._context)

    def decode(self, body: bytes, content_type: str) -> Row:
        """Return a request of TorchServe's API as the handler gets it. Raises InvalidRequest."""
        name, sent, content = predictions.read_request(body)
        headers = _Headers(sent)
        return Row(name or str(uuid4()), headers, _values(content, headers.get("content-type") or ""))

    def predict(self, batch: list[Any]) -> list[Any]:
        """Return a response of TorchServe's API for each Row, and the handler's result for each other item."""
        rows = [each if isinstance(each, Row) else Row(str(uuid4()), _Headers(), {"body": each}) for each in batch]
        self._context.begin(rows)
        try:
            returned = self._handle([row.values for row in rows], self._context)
            results = responses_of(returned, len(rows), "the handler")
        except Exception as error:
            code = getattr(error, "error_code", None)
            if len(rows) > 1 or not isinstance(code, int) or not isinstance(batch[0], Row):
                raise
            document = predictions.error_document(code, "InternalServer", str(getattr(error, "message", error)))
            return [(code, [("content-type", "application/json")], document)]
        return [self._response(*each) for each in zip(range(len(batch)), batch, results, strict=True)]

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return what the server reads a response of TorchServe's API from."""
        return predictions.write_response(value)

    def _response(self, index: int, given: Any, value: Any) -> Any:
        if not isinstance(given, Row):
            return value
        kind, body = _written(value)
        set_by_handler = self._context.get_response_headers(index)
        headers = {"content-type": kind, **{str(name): str(each) for name, each in set_by_handler.items()}}
        return self._context.get_response_status(index)[0], [*headers.items()], body


def _written(value: Any) -> tuple[str, bytes]:
    """Return the content type and the body of a result, which TorchServe writes so."""
    if isinstance(value, str):
        return "text/plain; charset=utf-8", value.encode()
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        written = BytesIO()
        import_module("torch").save(value, written)
        value = written.getvalue()
    if isinstance(value, (bytes, bytearray)):
        return "application/octet-stream", bytes(value)
    return "application/json", json.dumps(value, indent=2).encode()


def _entry_point(handler: str, context: Any) -> Any:
    """Return the function that gets the batches of the handler that a manifest names, after its `initialize`."""
    module = import_module(_module_of(handler, Path(), context.model_name))
    function = handler.partition(":")[2] or "handle"
    if (found := getattr(module, function, None)) is not None:
        found(None, context)
        return found
    classes = list_classes_from_module(module)
    if len(classes) != 1 or not hasattr(classes[0], "handle"):
        rule = f"must have a function {function}, or one class with a method handle; has {[each.__name__ for each in classes]}"
        raise SettingsError(f"handler={handler!r}: {rule}")
    made: Any = classes[0]()
    made.initialize(context)
    return made.handle


class _Headers(dict[str, Any]):
    """Headers of a request, found by a name in any case, as handlers write it."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a header."""
        return super().get(name, super().get(name.lower(), default))


def _values(body: bytes, content_type: str) -> dict[str, Any]:
    """Return what a handler finds in a body: that of a form by name, else the whole as `body`. Raises InvalidRequest."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == MULTIPART:  # only a file has a type of its own; fields are bytes
        parts = read_form(content_type, body, _MAX_PARTS)
        return {part.name: _value(part.data, part.content_type or "") for part in parts}
    if kind != "application/x-www-form-urlencoded":
        return {"body": _value(body, kind)}
    fields = parse_qsl(body.decode("latin-1"), encoding="latin-1", max_num_fields=_MAX_PARTS)
    return {name: bytearray(value, "latin-1") for name, value in fields}


def _value(body: bytes, kind: str) -> Any:
    """Return a part of a body: parsed JSON, a text, or the bytes, also of what is no JSON, and no text."""
    with suppress(ValueError, RecursionError):
        if kind.startswith("application/json"):
            return json.loads(body)
        if kind.startswith("text"):
            return body.decode()
    return bytearray(body)


class HandlerMetrics:
    """Takes the metrics of a handler, as `context.metrics`: those that it adds are the model's own metrics."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics

    def _add(self, kind: Any, unit: Any, name: str, value: float, idx: Any = None, dimensions: Any = ()) -> None:
        labels = {str(each.name): str(each.value) for each in dimensions or ()}
        full = re.sub(r"\W", "_", f"{name}_{unit}" if unit else name)
        with suppress(SettingsError, ValueError):  # one that Prometheus does not allow costs itself
            if kind == "counter":
                self._metrics.counter(full, labels=tuple(labels)).inc(value, **labels)
            else:
                self._metrics.gauge(full, labels=tuple(labels)).set(value, **labels)

    add_counter = partialmethod(_add, "counter", "")
    add_percent = partialmethod(_add, "gauge", "percent")

    def add_metric(
        self, name: str, value: float, unit: Any = "", idx: Any = None, dimensions: Any = (), metric_type: Any = ""
    ) -> None:
        """Set a gauge to `value`, or have a counter count it."""
        self._add(getattr(metric_type, "value", metric_type), unit, name, value, idx, dimensions)

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms", dimensions: Any = ()) -> None:
        """Set a gauge to a time."""
        self._add("gauge", unit, name, value, idx, dimensions)

    def add_size(self, name: str, value: float, idx: Any = None, unit: str = "MB", dimensions: Any = ()) -> None:
        """Set a gauge to a size."""
        self._add("gauge", unit, name, value, idx, dimensions)

    def add_error(self, name: str, value: Any, dimensions: Any = ()) -> None:
        """Log an error."""
        logger.error("handler: %s: %s", name, brief(value, 200))
