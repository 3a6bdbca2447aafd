"""TorchServe's config.properties as Weir's settings: the document that a TOML file would be, from which all checks follow."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from weir.catalog.adapters.torchserve import settings_from
from weir.catalog.sources import TORCHSERVE, archives_in, default_name
from weir.errors import SettingsError, brief

_MAX_BYTES = 1 << 20
_LINE = re.compile(r"([^=:\s]+)\s*[=:\s]\s*(.*)", re.DOTALL)
_PORTS = {"inference_address": 8080, "management_address": 8081}
_LOCAL = "127.0.0.1"
# Settings of every model, by what they are called in a model's own.
_OF_MODELS = {
    "default_workers_per_model": "minWorkers",
    "default_response_timeout": "responseTimeout",
    "default_startup_timeout": "startupTimeout",
    "job_queue_size": "jobQueueSize",
}
_RENAMED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "max_request_size": ("max_body_size", int),
    "private_key_file": ("tls_keyfile", str),
    "certificate_file": ("tls_certfile", str),
    "cors_allowed_origin": ("cors_origins", lambda text: [text]),
}
_READ = {*_PORTS, *_OF_MODELS, *_RENAMED, "load_models", "model_store", "models"}


class Configuration(NamedTuple):
    """What a config.properties says: the document that a TOML file would be, and the names of the settings that have no meaning here."""

    document: dict[str, Any]
    ignored: list[str]


def read_configuration(path: Path) -> Configuration:
    """Read a config.properties. Raises SettingsError naming key, value and rule; OSError."""
    source = str(path)
    if path.stat().st_size > _MAX_BYTES:
        raise SettingsError(f"{source}: is larger than {_MAX_BYTES} bytes")
    given = _properties(path.read_text("utf-8-sig"))
    general = {
        ours: _number(given[theirs], f"{source}: {theirs}") for theirs, ours in _OF_MODELS.items() if theirs in given
    }
    document: dict[str, Any] = settings_from(general, source)
    for theirs, (ours, convert) in _RENAMED.items():
        if theirs in given:
            try:
                document[ours] = convert(given[theirs])
            except ValueError:
                raise SettingsError(f"{source}: {theirs}={brief(given[theirs])}: must be a whole number") from None
    document |= _address(given.get("inference_address", ""), f"{source}: inference_address")
    managed = _address(given.get("management_address", ""), f"{source}: management_address", "management_address")
    if "host" in managed:
        document["frontends"] = {TORCHSERVE: f"{managed['host']}:{managed['port']}"}
    if "model_store" in given:
        store = path.parent / given["model_store"]
        document |= _of_store(given, store, source)
    return Configuration(document, sorted(given.keys() - _READ))


def _properties(text: str) -> dict[str, str]:
    """Return the keys and values of Java's properties: a line that ends with a backslash goes on."""
    joined = re.sub(r"\\\r?\n\s*", "", text)
    lines = [line.strip() for line in joined.splitlines()]
    found = [_LINE.fullmatch(line) for line in lines if line and line[0] not in "#!"]
    return {each[1]: each[2].strip() for each in found if each is not None}


def _number(text: str, source: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{source}={brief(text)}: must be a number") from None


def _address(text: str, source: str, key: str = "inference_address") -> dict[str, Any]:
    if text.startswith("unix:"):
        return {"uds": text.removeprefix("unix:")}
    try:
        parts = urlsplit(text or f"http://{_LOCAL}:{_PORTS[key]}")
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        host, port = None, 0
    if host is None:
        raise SettingsError(f"{source}={brief(text)}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
    return {"host": host, "port": port}


def _of_store(given: Mapping[str, str], store: Path, source: str) -> dict[str, Any]:
    """Return the models in the folder `store`, those with settings of their own, and which of them are loaded at the start."""
    tables: dict[str, Any] = {}
    files: dict[str, str] = {}
    for name, versions in _models(given.get("models", "{}"), source).items():
        stated = [each for each in versions.values() if isinstance(each, dict)]
        chosen = next((each for each in stated if each.get("defaultVersion")), stated[-1] if stated else {})
        file = chosen.get("marName")
        if not isinstance(file, str) or "/" in file:
            raise SettingsError(
                f"{source}: models: {name}: marName={brief(file)}: must be the name of a file in {store}"
            )
        files[file] = name
        tables[name] = {"target": str(store / file), **settings_from(chosen, f"{source}: models: {name}")}
    try:
        there = {each.name for each in archives_in(store)}
    except OSError as error:
        raise SettingsError(f"{source}: model_store={str(store)!r}: cannot be read: {error.strerror}") from error
    wanted = given.get("load_models", "none").strip()
    if wanted.lower() == "all":
        load = [files.get(file) or default_name(file) for file in sorted(there)]
    else:
        load = [
            _loaded(each.strip(), files, store, tables)
            for each in wanted.split(",")
            if each.strip().lower() not in ("", "none")
        ]
    return {"model_repository": str(store), "models": tables, "load": load or ["none"]}


def _loaded(text: str, files: Mapping[str, str], store: Path, tables: dict[str, Any]) -> str:
    """Return the name of a model of load_models, FILE or NAME=FILE."""
    name, _, file = text.rpartition("=")
    name = name or files.get(file) or default_name(file)
    if name != default_name(file):
        tables.setdefault(name, {"target": str(store / file)})
    return name


def _models(text: str, source: str) -> dict[str, dict[str, Any]]:
    try:
        models = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: models: must be JSON: {brief(str(error), 200)}") from error
    if not (isinstance(models, dict) and all(isinstance(each, dict) for each in models.values())):
        raise SettingsError(f"{source}: models={brief(models)}: must be tables of versions by name")
    return models
