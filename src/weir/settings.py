"""Composes the settings of all parts from a file, the environment and flags.

Each setting is declared once, as a field of its part's dataclass (config.py). The flag (`--max-batch-size`), the TOML key
(`max_batch_size`) and the variable (`WEIR_MAX_BATCH_SIZE`) follow from the field's name.

Precedence, low to high: default < model class < TOML < environment < flag. In TOML, a key at the top holds for all models, and
one in `[models.NAME]` for that model.
"""

import logging
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_type_hints

from weir.batching import BatchingSettings
from weir.catalog.sources import (
    ALL_FORMS,
    TORCHSERVE,
    ModelToServe,
    RepositorySettings,
    default_name,
    has_archives,
    is_archive,
    platform_of_target,
)
from weir.config import Checked, Rule, from_text, from_texts, from_toml, setting
from weir.errors import SettingsError, reason_of
from weir.frontends.frontend import FrontendsSettings
from weir.frontends.grpc import GrpcSettings
from weir.jobs import JobSettings
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.access import AccessSettings, ControlSettings
from weir.serving import ServiceSettings
from weir.telemetry import TelemetrySettings
from weir.workers.settings import SERVER_ADDRESS, WorkerSettings

PREFIX = "WEIR_"
TRUST = ("allow_pickle", "trust_type")  # settings of every command that loads models
CONFIG = "WEIR_CONFIG"  # the variable for --config

# Kubernetes sets these in every pod if there is a Service called "weir". They are not settings of ours.
_KUBERNETES = re.compile(r"WEIR_(SERVICE_HOST|SERVICE_PORT.*|PORT_\d+_.*)")
_KUBERNETES_PORT = re.compile(r"WEIR_PORT=(tcp|udp|sctp)://.*")


@dataclass(frozen=True)
class NamingSettings:
    """Settings that belong to one model only."""

    name: str | None = setting(None, "name of the model (default: the class name in lower case)")
    params: dict[str, Any] = setting(
        {}, "argument of the model's constructor: JSON, or else plain text", metavar="KEY=VALUE"
    )
    route: list[str] = setting([], "additional URL path for the model, next to /infer/NAME", metavar="PATH")


@dataclass(frozen=True)
class ProcessSettings(Checked):
    """Settings of the server's own process."""

    server_cpu_affinity: list[int] = setting(
        [],
        "CPUs that the server process is pinned to; for workers, see cpu_affinity",
        metavar="NUMBERS",
        rule=(lambda value: all(number >= 0 for number in value), "must be numbers from 0 on"),
    )
    fronts: int | str = setting(
        1,
        "processes that read and write HTTP in front of one queue; auto: as many as there are CPUs without workers",
        metavar="N or auto",
        rule=(lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "must be 1 or more, or auto"),
    )


MODEL_PARTS: dict[str, type[Any]] = {
    "Model": NamingSettings,
    "Batching": BatchingSettings,
    "Workers": WorkerSettings,
    "Service": ServiceSettings,
}
SERVER_PARTS: dict[str, type[Any]] = {
    "HTTP": HttpSettings,
    "gRPC": GrpcSettings,
    "Frontends": FrontendsSettings,
    "Open Inference Protocol": KserveSettings,
    "Access": AccessSettings,
    "Control": ControlSettings,
    "Repository": RepositorySettings,
    "Telemetry": TelemetrySettings,
    "Process": ProcessSettings,
    "Batch jobs": JobSettings,
}


class ServerKind(NamedTuple):
    """Describes what one command serves: the settings that its models and its server have, and how its models are named.

    Attributes:
        model_parts: the dataclasses of the models' settings, by heading.
        server_parts: the dataclasses of the server's settings, by heading.
        named: splits a TARGET into the names of the model, its own first, and the target itself.
        key: the key of a target in the table of a model.
        form: the form of a target, for errors.
        fallback: returns the targets of a server that was given none, or raises SettingsError.
        found: by name, a text for the default of a setting that is determined at the start.
        also: returns further names of the model that a target without names is, which it answers to whatever it is called.
    """

    model_parts: Mapping[str, type[Any]]
    server_parts: Mapping[str, type[Any]]
    named: Callable[[str], tuple[Sequence[str], str]]
    key: str
    form: str
    fallback: Callable[[], Sequence[str]]
    found: Mapping[str, str] = MappingProxyType({})
    also: Callable[[str], Sequence[str]] = lambda target: ()


class Declared(NamedTuple):
    """A setting as its part declares it.

    `part` is its heading; `of_model` tells whether it may differ between the models of one server; `found` is that of the
    ServerKind; the other fields are those of config.setting.
    """

    name: str
    hint: Any
    default: Any
    help: str
    rule: Rule | None
    metavar: str | None
    part: str
    of_model: bool
    found: str | None = None
    secret: bool = False
    guards: bool = False

    @property
    def flag(self) -> str:
        """The flag. For a table it is in the singular where each flag gives one value, not all of them as JSON."""
        one_each = isinstance(self.default, dict) and self.metavar != "JSON"
        name = self.name.removesuffix("s") if one_each else self.name
        return "--" + name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether its value is true or false, so that it has two flags."""
        return self.hint is bool or bool in get_args(self.hint)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()


class Settings(NamedTuple):
    """All settings of a server.

    `more` has the dataclasses that only this kind of server has, by heading. `general` are the settings for every model that a
    model's own file overrides; `overriding` are those that override the model's own file.
    """

    models: list[ModelToServe]
    http: HttpSettings
    grpc: GrpcSettings
    frontends: FrontendsSettings
    kserve: KserveSettings
    access: AccessSettings
    control: ControlSettings
    repository: RepositorySettings
    telemetry: TelemetrySettings
    process: ProcessSettings
    jobs: JobSettings = JobSettings()
    more: Mapping[str, Any] = MappingProxyType({})
    general: Mapping[str, Any] = MappingProxyType({})
    overriding: Mapping[str, Any] = MappingProxyType({})

    def complete(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return `own`, the settings in the file of a model of the repository, together with those that hold for every model."""
        return _layered(_layered(dict(self.general), dict(own)), dict(self.overriding))


def _nothing() -> Sequence[str]:
    raise SettingsError(f"nothing to serve: give a TARGET ({ALL_FORMS}), a model in --config, or a --model-repository")


# The kind of `weir serve`.
MODELS = ServerKind(
    MODEL_PARTS, SERVER_PARTS, lambda target: ((default_name(target),), target), "target", ALL_FORMS, _nothing
)


def declared_settings(kind: ServerKind = MODELS) -> dict[str, Declared]:
    """Return all settings of servers of this kind, by name."""
    return {
        declared.name: declared._replace(found=kind.found.get(declared.name))
        for parts, of_model in ((kind.model_parts, True), (kind.server_parts, False))
        for part, dataclass in parts.items()
        for declared in declared_by(dataclass, part, of_model)
    }


def declared_by(kind: type[Any], part: str, of_model: bool = True) -> list[Declared]:
    """Return the settings that the dataclass `kind` declares, under the heading `part`."""
    hints = get_type_hints(kind)
    return [
        Declared(
            field.name,
            hints[field.name],
            field.default_factory() if field.default_factory is not MISSING else field.default,
            field.metadata["help"],
            field.metadata["rule"],
            field.metadata["metavar"],
            part,
            of_model,
            secret=field.metadata["secret"],
            guards=field.metadata["guards"],
        )
        for field in fields(kind)
    ]


def read_settings(
    targets: Sequence[str],
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    config: str | None = None,
    kind: ServerKind = MODELS,
    given: Mapping[str, Any] = MappingProxyType({}),
    ignored: Collection[str] = (),
) -> Settings:
    """Return all settings of a server, with the models to serve.

    Arguments:
        targets: the TARGETs of the command line.
        flags: the texts given for each setting, by name.
        environment: the environment variables.
        config: the path of a TOML file; by default that in the variable CONFIG.
        kind: the kind of server.
        given: values from a program, which override all other sources.
        ignored: variables that other commands read.

    Raises SettingsError naming the source, the value and the rule.
    """
    catalog = declared_settings(kind)
    path = config or environment.get(CONFIG) or None
    general, tables, groups = _read_file(path, f"{'--config' if config else CONFIG}={path}", catalog, kind.key)
    from_flags = {name: value_of(catalog[name], texts) for name, texts in flags.items()}
    high = _layered(_from_environment(environment, catalog, ignored), from_flags)
    high = _layered(high, _from_table(dict(given), "settings", list(catalog), catalog))
    if kind is MODELS:
        targets, high = _with_folder(targets, high, bool(general.get("model_repository")))
    server = _layered(general, high)
    only_repository = bool(server.get("model_repository")) and not (targets or tables)
    models = [] if only_repository else _models(targets, general, tables, groups, high, catalog, kind)
    _check_grouped(groups, models, f"{path}: devices", bool(server.get("model_repository")))
    if kind is MODELS and has_archives(models, server.get("model_repository")):
        server = {**server, "protocols": [*server.get("protocols", ()), TORCHSERVE]}
    parts = {
        part: dataclass(**{name: value for name, value in server.items() if catalog[name].part == part})
        for part, dataclass in {**SERVER_PARTS, **kind.server_parts}.items()
    }
    own = [parts.pop(part) for part in SERVER_PARTS]
    settings = Settings(models, *own)._replace(more=parts)
    trusted = [model._replace(trust=settings.repository.trust) for model in models]
    return settings._replace(
        models=trusted, general=_of_every_model(general, catalog), overriding=_of_every_model(high, catalog)
    )


def _with_folder(
    targets: Sequence[str], high: dict[str, Any], has_repository: bool
) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the targets that are not folders, and `high` with the folder among the targets as the repository. Raises SettingsError."""
    folders = [target for target in targets if target and Path(target).is_dir() and not is_archive(Path(target))]
    if not folders:
        return targets, high
    if len(folders) > 1 or has_repository or high.get("model_repository"):
        raise SettingsError(f"TARGET {folders[-1]!r}: is a folder: there can be one; put all models into one folder")
    if high.get("name"):
        raise SettingsError(
            f"--name {high['name']!r}: is for a TARGET that is not a folder; in a folder, models have the folders' names"
        )
    return [target for target in targets if target not in folders], {**high, "model_repository": folders[0]}


def read_model_table(table: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings in a model's own file, in their declared types. Raises SettingsError naming `source`."""
    catalog = declared_settings()
    allowed = [name for name, declared in catalog.items() if declared.of_model and declared.part != "Model"]
    return _from_table(table, source, allowed, catalog)


def _of_every_model(values: dict[str, Any], catalog: dict[str, Declared]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if key in catalog and catalog[key].of_model and catalog[key].part != "Model"
    }


def _layered(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return `low` and `high` together; `high` overrides, and tables (params) are merged key by key."""
    merged = {**low, **high}
    for name in low.keys() & high.keys():
        if isinstance(low[name], dict):
            merged[name] = {**low[name], **high[name]}
    return merged


def _models(
    targets: Sequence[str],
    general: dict[str, Any],
    tables: dict[str, dict[str, Any]],
    groups: dict[str, dict[str, Any]],
    high: dict[str, Any],
    catalog: dict[str, Declared],
    kind: ServerKind,
) -> list[ModelToServe]:
    named = _named_targets(targets, tables, high, kind)
    for name in ("name", "route"):
        if high.get(name) and len(named) > 1:
            where = f"{catalog[name].flag} or {catalog[name].variable}"
            raise SettingsError(f"{where}: {high[name]!r} is for one model, but {', '.join(named)} are served")
    models = []
    for name, (target, aliases) in named.items():
        names = (name, *aliases)
        values = _layered(_layered(_layered(general, _table_of(names, groups)), _table_of(names, tables)), high)
        settings = _of_every_model(values, catalog)
        model = ModelToServe(target, name, values.get("params", {}), values.get("route", []), settings, aliases=aliases)
        models.append(model._replace(platform=platform_of_target(target)) if kind is MODELS else model)
    return models


def _named_targets(
    targets: Sequence[str], tables: dict[str, dict[str, Any]], high: dict[str, Any], kind: ServerKind
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the target and the further names of each model by name: first those of the command line, then those of the file.

    A model whose name is taken has its next one. A further name that another model has for its own is that one's.
    """
    named: dict[str, tuple[str, tuple[str, ...]]] = {}
    key = kind.key
    for given in targets or ([] if tables else kind.fallback()):
        names, target = kind.named(given)
        names = [high["name"]] if high.get("name") is not None else [*names, *kind.also(target)]
        taken = {each: model for own, (model, more) in named.items() for each in (*more, own)}
        name = next((each for each in names if each not in taken), None)
        if name is None:
            by, remedy = taken[names[0]], "--name" if kind is MODELS else f"NAME={key.upper()}"
            raise SettingsError(f"{target}: the name {names[0]!r} is taken by {by}; names must differ ({remedy})")
        in_file = _table_of(names, tables).get(key, target)
        if in_file != target:
            raise SettingsError(f"{target}: [models.{name}] has {key}={in_file!r}; it must be given once")
        named[name] = target, tuple(dict.fromkeys(each for each in names if each != name and each not in taken))
    known = {each for name, (_, aliases) in named.items() for each in (name, *aliases)}
    for name, table in tables.items():
        if name in known:
            continue
        if key not in table:
            raise SettingsError(f"[models.{name}]: no {key}; must be {kind.form}")
        named[name] = table[key], tuple(each for each in kind.also(table[key]) if each not in known | {name})
    return named


def _table_of(names: Sequence[str], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the table of the model with these names."""
    return next((tables[name] for name in names if name in tables), {})


def _check_grouped(
    groups: Mapping[str, Mapping[str, Any]], models: Sequence[ModelToServe], source: str, has_repository: bool
) -> None:
    """Raise SettingsError for a model of `groups` that is not served, or whose own table names another group; and for a group of another
    model that no table describes: where there are tables of devices, it is a slip of the pen."""
    by_name = {each: model for model in models for each in (*model.aliases, model.name)}
    for name, group in groups.items():
        where, device = f"{source}.{group['device_group']}: models", group["device_group"]
        if name not in by_name:
            there = f"there are {', '.join(each.name for each in models)}" if models else "there are none"
            if has_repository:
                there += "; a model of the repository names its device_group in its own file"
            raise SettingsError(f"{where}: unknown model {name!r}; {there}")
        own = by_name[name].settings.get("device_group")
        if own != device:
            raise SettingsError(f"{where}: {name!r} has device_group={own!r}; it must be given once")
    devices = list(dict.fromkeys(group["device_group"] for group in groups.values()))
    for model in models:
        own = model.settings.get("device_group")
        if devices and own not in (None, *devices):
            there = ", ".join(devices)
            raise SettingsError(
                f"{source}: {model.name!r} has device_group={own!r}, an unknown device; there are {there}; add [devices.{own}]"
            )


def value_of(declared: Declared, texts: Sequence[str]) -> Any:
    """Return the value of a flag that was given with `texts`. Raises SettingsError naming the flag, the value and the rule."""
    return _checked(declared, partial(from_texts, declared.hint, texts, declared.flag), declared.flag)


def _from_environment(
    environment: Mapping[str, str], catalog: Mapping[str, Declared], ignored: Collection[str]
) -> dict[str, Any]:
    """Return the values of the variables of settings, by the name of the setting. Variables that Kubernetes sets in every pod and those of
    `ignored` are none, and an empty variable is not set. Raises SettingsError for a wrong value, for a variable that looks like a setting,
    and for an empty one that should keep callers away."""
    by_variable = {declared.variable: declared for declared in catalog.values()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in (CONFIG, SERVER_ADDRESS) or _is_of_kubernetes(variable, text):
            continue
        if variable in ignored and variable not in by_variable:
            continue  # several commands may share an environment
        if variable not in by_variable:
            raise SettingsError(_unknown(variable, [*by_variable, CONFIG]))
        declared = by_variable[variable]
        if not text and declared.guards:
            raise SettingsError(
                f"{variable}: is empty, and without it the server is open to more callers; give a value, or remove it"
            )
        if text:
            values[declared.name] = _checked(declared, partial(from_text, declared.hint, text, variable), variable)
    return values


def _is_of_kubernetes(variable: str, text: str) -> bool:
    return bool(_KUBERNETES.fullmatch(variable) or _KUBERNETES_PORT.fullmatch(f"{variable}={text}"))


def _read_file(
    path: str | None, source: str, catalog: dict[str, Declared], key: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the values in the TOML file for all models, those for each model by name, and those of the models' devices, also by model. `source` is
    what names the file, and `key` the key of a model's target."""
    if path is None:
        return {}, {}, {}
    try:
        document = _document_in(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: cannot be read: {reason_of(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: must be TOML: {error}") from error
    tables = document.pop("models", {})
    if not (isinstance(tables, dict) and all(isinstance(table, dict) for table in tables.values())):
        raise SettingsError(f"{path}: models={tables!r}: must be tables, [models.NAME] for each model")
    groups = _read_devices(document.pop("devices", {}), f"{path}: devices", catalog)
    everywhere = [name for name in catalog if name not in ("name", "route")]
    of_model = [name for name, declared in catalog.items() if declared.of_model and name != "name"]
    general = _from_table(document, path, everywhere, catalog)
    return (
        general,
        {
            name: _from_table(table, f"{path}: models.{name}", [*of_model, key], catalog)
            for name, table in tables.items()
        },
        groups,
    )


def _document_in(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, or TorchServe's config.properties."""
    if path.suffix != ".properties":
        return tomllib.loads(path.read_text("utf-8-sig"))
    from weir.catalog.adapters.torchserve import read_configuration  # few have one

    document, ignored = read_configuration(path)
    if ignored:
        logging.getLogger("weir").warning("%s: ignored, as they have no meaning here: %s", path, ", ".join(ignored))
    return document


def _read_devices(devices: Any, source: str, catalog: dict[str, Declared]) -> dict[str, dict[str, Any]]:
    """Return the settings that the tables [devices.NAME] give to models, by model."""
    if not (isinstance(devices, dict) and all(isinstance(table, dict) for table in devices.values())):
        raise SettingsError(f"{source}={devices!r}: must be tables, [devices.NAME] for each device")
    found: dict[str, dict[str, Any]] = {}
    for device, table in devices.items():
        where = f"{source}.{device}"
        more = [key for key in table if key not in ("models", "order")]
        if more:
            raise SettingsError(f"{where}: {more[0]}: unknown; a device has models and order")
        given = {"device_group": device} | ({"device_order": table["order"]} if "order" in table else {})
        settings = _from_table(given, where, list(given), catalog)
        names: list[str] = from_toml(list[str], table.get("models", []), f"{where}: models")
        if not names:
            raise SettingsError(f"{where}: no models; must be models = [NAME, ...]")
        for name in names:
            if name in found:
                other = found[name]["device_group"]
                twice = "twice" if other == device else f"here and in [devices.{other}]"
                raise SettingsError(f"{where}: models={names!r}: {name!r} is named {twice}; a model is on one device")
            found[name] = settings
    return found


def _from_table(table: dict[str, Any], source: str, allowed: list[str], catalog: dict[str, Declared]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{source}: {name}"
        if name not in allowed:
            raise SettingsError(_misplaced(name, where, allowed, catalog))
        if name not in catalog:  # a model's target
            values[name] = from_toml(str, value, where)
        else:
            values[name] = _checked(catalog[name], partial(from_toml, catalog[name].hint, value, where), where)
    return values


def _misplaced(name: str, where: str, allowed: list[str], catalog: dict[str, Declared]) -> str:
    if name in ("name", "route") or (name in ("target", "directory") and ": models." not in where):
        return f"{where}: belongs to one model: set it in [models.NAME]" + (", as NAME" if name == "name" else "")
    if name in catalog:
        return f"{where}: is a setting of the whole server, not of one model"
    if ": models." not in where and name.lower().rstrip("s") == "model":
        return f"{where}: there is no such table; did you mean [models.NAME]?"
    return _unknown(where, allowed, name)


def _unknown(where: str, known: list[str], name: str | None = None) -> str:
    nearest = get_close_matches(name or where, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(known))}"
    return f"{where}: unknown setting; {hint}"


def _checked(declared: Declared, read: Callable[[], Any], source: str) -> Any:
    """Return the result of `read`. Raises SettingsError if it breaks the setting's rule: this checks the rule, although the dataclass
    does too, because the error can name the source here."""
    try:
        value = read()
    except SettingsError:
        if declared.secret:
            raise SettingsError(f"{source}: must be one text, given once; the value is not shown") from None
        raise
    if declared.rule is not None and value is not None and not declared.rule[0](value):
        raise SettingsError(f"{source}={value!r}: {declared.rule[1]}")
    return value
