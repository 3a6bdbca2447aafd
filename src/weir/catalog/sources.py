"""The models that a server can serve: those that a TARGET names, their descriptions, the repositories that have them, and those loaded at the start.

A TARGET is a class or a function in Python code, a file of a model, or a model of Hugging Face and its task. A platform makes a class of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.config import SIZE, check, one_of, parse_size, setting
from weir.errors import InvalidRequest, SettingsError, unknown_model
from weir.messages import label_of
from weir.model import Model
from weir.plugins import Plugins
from weir.policy.residency import Room
from weir.serving import NAME

if TYPE_CHECKING:
    from weir.serving.service import Service
    from weir.workers.source import ModelFolder

Parameter = str | int | float | bool  # the values that a parameter of the Open Inference Protocol may have
Parameters = Mapping[str, Parameter]


class Trust(NamedTuple):
    """The rights of models' files, as whoever started the server decided. Load calls cannot change them.

    Attributes:
        pickles: whether pickled files may be loaded, which can run any code.
        types: types in a file of skops that may be loaded, besides those that skops knows.
    """

    pickles: bool = False
    types: tuple[str, ...] = ()


class ModelToServe(NamedTuple):
    """One version of one model, as it is to be served.

    Attributes:
        target: where its class is; `platform` says how to read it.
        name: the name that it is served under.
        params: arguments for the constructor of its class.
        routes: its own paths.
        settings: the settings that were given for it, and no others: the class's own values hold for the rest.
        version: "" if it has no versions.
        platform: the kind of its files, such as python or onnx.
        folder: the folder that holds its files, or None.
        attributes: attributes for its class: tensors, examples, sizes to warm up at.
        trust: what its files may do.
        config: what a load call says in place of its configuration, as it came.
        aliases: further names that it answers to.
        uploaded: holds `folder`, if a load call has brought its files.
    """

    target: str
    name: str
    params: dict[str, Any]
    routes: list[str]
    settings: dict[str, Any]
    version: str = ""
    platform: str = "python"
    folder: Path | None = None
    attributes: Mapping[str, Any] | None = None
    trust: Trust = Trust()
    config: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()
    uploaded: "ModelFolder | None" = None

    @property
    def label(self) -> str:
        """The name, followed by a slash and the version if there is one."""
        return label_of(self.name, self.version)


class ModelReading(NamedTuple):
    """The models that a repository has for a name: the versions to serve, and the version for requests that name none (None: the
    highest)."""

    versions: list[ModelToServe]
    default: str | None = None


class Repository(Protocol):
    """Describes models by name, whether they run or not. It only reads, and may be called in any thread."""

    def names(self) -> list[str]:
        """Return the names of the models that it has."""

    def has(self, name: str) -> bool:
        """Return whether it has the model `name`, without a look at all others where that is possible."""

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Read a model again and describe it.

        `config` has settings that override those of the model's own file. `files` has contents by path VERSION/PATH, which
        replace the model's own files. Raises ModelNotFound, and SettingsError for what cannot be served.
        """


class TargetRepository:
    """The Repository of the models that a server was started with, whose settings do not change.

    `read_config` reads the configuration of a load call into a ModelDocument. Without it, a configuration consists of settings
    and `params`.
    """

    def __init__(
        self, models: Sequence[ModelToServe], read_config: Callable[[Mapping[str, Any], str], Any] | None = None
    ) -> None:
        self._models: dict[str, list[ModelToServe]] = {}
        for model in models:
            self._models.setdefault(model.name, []).append(model)
        self._read_config = read_config

    def names(self) -> list[str]:
        """Return the names of the models that it has."""
        return list(self._models)

    def has(self, name: str) -> bool:
        """See Repository."""
        return name in self._models

    def target_of(self, name: str) -> str:
        """Return the target of the model `name`, which it has."""
        return self._models[name][0].target

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """See Repository. `config` overrides settings and has `params` for the constructor; `files` raise InvalidRequest."""
        models = self._models.get(name)
        if models is None:
            raise unknown_model(name, self._models)
        if files:
            raise InvalidRequest(f"model {name!r}: files can be sent for models of a repository only")
        # A model that has towers besides has them as versions, and is the default itself.
        first = models[0].settings
        return ModelReading([self._with(config, model, first) for model in models], "" if len(models) > 1 else None)

    def _with(self, config: Mapping[str, Any] | None, model: ModelToServe, first: Mapping[str, Any]) -> ModelToServe:
        """Return `model` with what a load call states. What a tower has in place of the settings of the `first` stays, such as the largest batch."""
        name = model.name
        if config and config.get("file") == Path(model.target).name:  # which says what holds anyway
            config = {key: value for key, value in config.items() if key != "file"}
        own = {key: value for key, value in model.settings.items() if first.get(key) != value}
        if config and self._read_config is not None:
            document = self._read_config(config, name)
            if document.platform not in (None, model.platform):
                raise SettingsError(f"{name}: platform={document.platform!r}: must be {model.platform!r}, which it is")
            return model._replace(
                params={**model.params, **document.params},
                settings={**model.settings, **document.settings, **own},
                attributes={**(model.attributes or {}), **document.attributes},
            )
        if config:
            settings = dict(config)
            params = settings.pop("params", {})
            if not isinstance(params, Mapping):
                raise SettingsError(f"params={params!r}: must be a table")
            return model._replace(params={**model.params, **params}, settings={**model.settings, **settings, **own})
        return model


class OpenRepository(Repository, Protocol):
    """A Repository to which load calls can add models."""

    def takes(self, config: Mapping[str, Any] | None, files: Mapping[str, bytes] | None) -> bool:
        """Return whether `read` can make a model that it does not have from `config` and `files`."""


class CombinedRepository:
    """Several repositories as one. A model is read from the first that has it, else from the first of `open_ones` that takes it."""

    def __init__(self, sources: Sequence[Repository], open_ones: Sequence[OpenRepository] = ()) -> None:
        self._sources = sources
        self._open_ones = open_ones

    def names(self) -> list[str]:
        """Return the names of all models, each once."""
        return list(dict.fromkeys(name for source in self._sources for name in source.names()))

    def has(self, name: str) -> bool:
        """See Repository."""
        return any(source.has(name) for source in self._sources)

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """See Repository."""
        for source in self._sources:
            if source.has(name):
                return source.read(name, config, files)
        for source in self._open_ones:
            if source.takes(config, files):
                return source.read(name, config, files)
        raise unknown_model(name, self.names())


LOAD_ALL, LOAD_NONE = "all", "none"
AT_START, ON_DEMAND = "start", "on-demand"
ON_DEMAND_SETTINGS = ("model_control", "model_memory", "model_gpu_memory")


def all_sources(known: TargetRepository, folder: OpenRepository | None, inline: OpenRepository) -> CombinedRepository:
    """Return one repository of the TARGETs, the models of the folder and the models that load calls describe. Raises
    SettingsError for a name that both the TARGETs and the folder have."""
    if folder is None:
        return CombinedRepository([known, inline], [inline])
    for name in known.names():
        if (
            folder.has(name) and platform_of_target(known.target_of(name)) != TORCHSERVE
        ):  # which may be configured by name
            raise SettingsError(
                f"name={name!r}: is both a TARGET and a model of the repository; give the TARGET another (--name)"
            )
    return CombinedRepository([known, folder, inline], [inline, folder])


class ModelsToStart(NamedTuple):
    """The models loaded at the start: their services, which are not started yet, and their descriptions."""

    readings: list[ModelReading]
    services: "list[Service]"

    @property
    def defaults(self) -> dict[str, str]:
        """The default version by name, of the models that set one."""
        return {each.versions[0].name: each.default for each in self.readings if each.default is not None}

    @property
    def aliases(self) -> dict[str, str]:
        """The models' own names, by their further ones. A name that two models have is that of the first."""
        models = [model for reading in self.readings for model in reading.versions]
        return {alias: model.name for model in reversed(models) for alias in model.aliases}

    @property
    def routes(self) -> dict[str, list[str]]:
        """The models' own paths, by name."""
        return {model.name: model.routes for reading in self.readings for model in reading.versions}


def read_models_to_start(
    sources: CombinedRepository, load: Sequence[str], make: "Callable[[ModelToServe], Service]"
) -> ModelsToStart:
    """Read the models to load at the start, and make services of them with `make`.

    `load` has names of models, "all" or "none"; an empty list means all. Raises SettingsError for an unknown name; and one
    SettingsError for all models that cannot be served, with one line of text for each.
    """
    opened = ModelsToStart([], [])
    wrong: list[str] = []
    for name in names_to_start(sources, load):
        try:
            reading = sources.read(name)
        except SettingsError as error:
            wrong.append(error.message)
            continue
        opened.readings.append(reading)
        for model in reading.versions:
            try:
                opened.services.append(make(model))
            except SettingsError as error:
                wrong.append(error.message)
    if wrong:
        raise SettingsError("\n".join(dict.fromkeys(wrong)))
    return opened


def names_to_start(sources: CombinedRepository, load: Sequence[str]) -> list[str]:
    """Return the names of the models that `load` means; see read_models_to_start. Raises SettingsError."""
    if list(load) == [LOAD_NONE]:
        return []
    names = sources.names()
    if LOAD_NONE in load:
        raise SettingsError(f"load={list(load)!r}: none must be the only value")
    for name in load:
        if name not in (LOAD_ALL, LOAD_NONE, *names):
            raise SettingsError(f"load={name!r}: unknown model; available: {', '.join(names) or 'none'}")
    return names if not load or LOAD_ALL in load else [name for name in names if name in load]


@dataclass(frozen=True)
class RepositorySettings:
    """Settings: where models come from besides the TARGETs, and which models are loaded at the start."""

    model_repository: str | None = setting(
        None,
        "model repository: a directory of MODEL/VERSION/FILE, whose models can be loaded while serving",
        metavar="DIR",
    )
    load: list[str] = setting([], "models to load at startup, or none (default: all)", metavar="NAME")
    model_control: str = setting(
        AT_START,
        "when models of the repository are loaded: at the start, or on-demand: by their first requests",
        rule=one_of(AT_START, ON_DEMAND),
    )
    model_memory: int | str | None = setting(
        None,
        "with on-demand: memory for all models together, such as 16GB; evicted models are loaded again when needed",
        rule=SIZE,
        metavar="SIZE",
    )
    model_gpu_memory: int | str | None = setting(
        None,
        "with on-demand: the same for GPU memory, as measured (extra gpu) or stated (needs_gpu_memory)",
        rule=SIZE,
        metavar="SIZE",
    )
    watch: bool = setting(False, "load and unload models when repository files change")
    reload: bool = setting(False, "for development: reload a model when the file of its TARGET changes")
    allow_pickle: bool = setting(
        False,
        "load models from pickle files (.joblib, .pkl), which can run arbitrary code; only for files that you trust",
    )
    trust_type: list[str] = setting([], "additional type that a .skops file may contain", metavar="TYPE")

    def __post_init__(self) -> None:
        check(self)
        for name in ("model_memory", "model_gpu_memory"):
            if getattr(self, name) is not None and not self.on_demand:
                raise SettingsError(
                    f"{name}={getattr(self, name)!r}: is for model_control={ON_DEMAND!r}, which loads and evicts models; state both or neither"
                )
        if self.on_demand and self.model_repository is None:
            raise SettingsError(f"model_control={ON_DEMAND!r}: is for the models of a --model-repository; give one")

    @property
    def on_demand(self) -> bool:
        """Whether models of the repository are loaded by their first requests."""
        return self.model_control == ON_DEMAND

    @property
    def room(self) -> Room:
        """The memory for all models together; infinite where none is stated."""
        stated = (self.model_memory, self.model_gpu_memory)
        return Room(*(inf if each is None else float(parse_size(each) or 0) for each in stated))

    @property
    def trust(self) -> Trust:
        """The rights of models' files."""
        return Trust(self.allow_pickle, tuple(self.trust_type))


FORMS = "module:Class or path/file.py:Class"
ALL_FORMS = f"{FORMS}, a function in their place, a file .onnx, .skops, .joblib, .pkl or .mar, hf:TASK=MODEL, or a folder of models"
HUGGING_FACE = "hf:"

# The platforms of models that are one file, by the end of the file's name.
TORCHSERVE, ARCHIVES, MANIFEST = "torchserve", (".mar", ".tar.gz", ".tgz"), "MAR-INF/MANIFEST.json"
PLATFORMS: Mapping[str, str] = MappingProxyType(
    {
        ".onnx": "onnx",
        **dict.fromkeys((".skops", ".joblib", ".pkl", ".pickle"), "sklearn"),
        **dict.fromkeys(ARCHIVES, TORCHSERVE),
    }
)


def is_archive(path: Path) -> bool:
    """Return whether `path` is one of TorchServe's model archives: a file, or a folder with what is in one."""
    try:
        return path.name.lower().endswith(ARCHIVES) if path.is_file() else (path / MANIFEST).is_file()
    except OSError:  # a folder that may not be read: reading it as a model says so
        return False


def archives_in(root: Path) -> list[Path]:
    """Return the model archives in the folder `root`, a model store of TorchServe. Raises OSError."""
    return sorted(each for each in root.iterdir() if NAME.fullmatch(each.name) and is_archive(each))


def has_archives(models: Sequence[ModelToServe], root: str | None) -> bool:
    """Return whether one of `models` is a model archive, or the repository in `root` has one."""
    try:
        stored = root is not None and bool(archives_in(Path(root)))
    except OSError:
        stored = False  # opening the repository says why
    return stored or any(model.platform == TORCHSERVE for model in models)


def _ending_of(target: str) -> str:
    """Return the one of PLATFORMS with which `target` ends, as it has it; "" for none."""
    found = next((ending for ending in PLATFORMS if target.lower().endswith(ending)), "")
    return target[len(target) - len(found) :]


def platform_of_target(target: str) -> str:
    """Return the name of the platform that reads what `target` names; see platforms.py."""
    if target.startswith(HUGGING_FACE):
        return "transformers"
    ending = _ending_of(target)
    return PLATFORMS[ending.lower()] if ending else TORCHSERVE if target and is_archive(Path(target)) else "python"


def split_target(target: str) -> tuple[str, str]:
    """Return the module or the file that a target of Python code names, and the name in it. Raises SettingsError, whatever files there are."""
    where, _, name = target.rpartition(":")
    rule = f"TARGET {target!r}: must be {ALL_FORMS}"
    if not (where and name):
        raise SettingsError(rule)
    if not (where.endswith(".py") or all(part.isidentifier() for part in where.split("."))):
        raise SettingsError(f"{rule}; {where!r} is neither a module's name nor a .py file")
    return where, name


def target_of(model: Any) -> str:
    """Return `model` if it is a target, else a target that names this class or function."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", type(model).__qualname__)
    return f"{getattr(model, '__module__', None)}:{name.replace('<lambda>', 'function')}"


def default_name(target: str) -> str:
    """Return the default name of a model: that of its class in lower case, of its file without the ending, or of its task.

    Raises SettingsError for an empty `target`, and for a task without a model.
    """
    if not target.strip():
        raise SettingsError(f"TARGET {target!r}: must be {ALL_FORMS}")
    platform = platform_of_target(target)
    if platform == "transformers":
        return task_and_model(target)[0]
    if platform == "python":
        return target.rpartition(":")[2].rpartition(".")[2].lower()
    return Path(target).name.removesuffix(_ending_of(target))


def task_and_model(target: str) -> tuple[str, str]:
    """Return the task and the model of `hf:TASK=MODEL`. Raises SettingsError."""
    task, _, model = target.removeprefix(HUGGING_FACE).partition("=")
    if not (task and model):
        raise SettingsError(
            f"TARGET {target!r}: must be hf:TASK=MODEL, such as "
            "hf:text-classification=distilbert/distilbert-base-uncased-finetuned-sst-2-english"
        )
    return task, model


def located(model: ModelToServe) -> ModelToServe:
    """Return `model` with the folder and the name of its file, if its target is a file. Raises SettingsError if there is no such
    file."""
    if model.folder is not None or model.platform not in PLATFORMS.values() or not model.target:
        return model
    path = Path(model.target).absolute()
    if not (path.is_file() or is_archive(path)):
        raise SettingsError(f"TARGET {model.target!r}: no file {path}")
    return model._replace(target=path.name, folder=path.parent)


def model_to_load(target: str, trust: Trust | None = None) -> ModelToServe | None:
    """Return the description of the model that `target` names if it is not Python code. Raises SettingsError."""
    platform = platform_of_target(target)
    if platform == "python":
        return None
    return located(ModelToServe(target, default_name(target), {}, [], {}, platform=platform, trust=trust or Trust()))


class Platform(Protocol):
    """Reads the files of one kind of model. It is called in a thread; what it imports stays in the server's process."""

    def load(self, model: ModelToServe) -> "type[Model] | type[Service]":
        """Return the class that serves `model`.

        `model.folder` holds the version's files; `model.attributes` are the attributes that its configuration gives the class.
        Each call reads the files again. Raises SettingsError that says what is wrong with them.
        """


_PLUGINS = Plugins(
    "platform",
    "weir.platforms",
    {
        "python": "weir.catalog.repository.platforms:PythonPlatform",
        "onnx": "weir.catalog.repository.platforms:OnnxPlatform",
        "sklearn": "weir.catalog.repository.platforms:SklearnPlatform",
        "transformers": "weir.catalog.repository.platforms:TransformersPlatform",
        "triton_python": "weir.catalog.adapters.triton_python:TritonPythonPlatform",
        "mlserver": "weir.catalog.adapters.mlserver:MlserverPlatform",
        TORCHSERVE: "weir.catalog.adapters.torchserve:TorchServePlatform",
        "ensemble": "weir.catalog.repository.platforms:EnsemblePlatform",
    },
)


def platform_of(name: str) -> Platform:
    """Return the platform of that name. Raises SettingsError, which names the known platforms."""
    platform: Platform = _PLUGINS.make(name)
    return platform
