"""What can be served and who knows of it: models to serve, repositories of them, and those that are loaded at the start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.config import check, setting
from weir.errors import InvalidRequest, ModelNotFound, SettingsError

if TYPE_CHECKING:
    from weir.serving.service import Service

Parameter = str | int | float | bool  # what travels as a parameter of the Open Inference Protocol
Parameters = Mapping[str, Parameter]


class ModelToServe(NamedTuple):
    """One version of one model: where its class is, its name, and the settings given for it (only those given, so that the class's
    own values hold for the rest).

    `target` is read by `platform`; files that it names lie in `folder`, if it has one of its own. `attributes` are for its
    class: tensors, examples, sizes to warm up at.
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

    @property
    def label(self) -> str:
        """The name, and after a slash the version if it has one."""
        return f"{self.name}/{self.version}" if self.version else self.name


class ModelReading(NamedTuple):
    """What was read of a model: the versions that are to be served, and the one that is meant where none is named (None: the
    highest)."""

    versions: list[ModelToServe]
    default: str | None = None


class Repository(Protocol):
    """Knows models by name, whether they run or not. Reads, and runs nothing; called in any thread."""

    def names(self) -> list[str]:
        """The models that there are."""

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Read a model anew. What `config` says goes before the model's own file; `files` (VERSION/PATH) are its files instead
        of those that lie there. Raises ModelNotFound, and SettingsError for what cannot be served."""


class TargetRepository:
    """The models that a server was started with, as a Repository: their settings do not change.

    `read_config` reads the configuration of a load call (see repository/document.py); without it that is settings and `params`.
    """

    def __init__(
        self, models: Sequence[ModelToServe], read_config: Callable[[Mapping[str, Any], str], Any] | None = None
    ) -> None:
        self._models = {model.name: model for model in models}
        self._read_config = read_config

    def names(self) -> list[str]:
        """The names."""
        return list(self._models)

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Return the given settings; `config` may override them, and has `params` of the constructor."""
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(
                f"model {name!r}: there is none of this name to load; there are {', '.join(self._models)}"
            )
        if files:
            raise InvalidRequest(f"model {name!r}: files can be sent for models of a repository only")
        if config and self._read_config is not None:
            document = self._read_config(config, name)
            if document.platform not in (None, model.platform):
                raise SettingsError(f"{name}: platform={document.platform!r}: must be {model.platform!r}, which it is")
            model = model._replace(
                params={**model.params, **document.params}, settings={**model.settings, **document.settings},
                attributes={**(model.attributes or {}), **document.attributes},
            )  # fmt: skip
        elif config:
            settings = dict(config)
            params = settings.pop("params", {})
            if not isinstance(params, Mapping):
                raise SettingsError(f"params={params!r}: must be a table")
            model = model._replace(params={**model.params, **params}, settings={**model.settings, **settings})
        return ModelReading([model])


class InlineRepository(Repository, Protocol):
    """A Repository to which models can be added by their configuration alone."""

    def takes(self, config: Mapping[str, Any] | None) -> bool:
        """Tell whether it reads a model of such a configuration, known or not."""


class CombinedRepository:
    """Several repositories as one: the first that has a model of that name is read; `inline` if none has."""

    def __init__(self, sources: Sequence[Repository], inline: InlineRepository | None = None) -> None:
        self._sources = [*sources, *([] if inline is None else [inline])]
        self._inline = inline

    def names(self) -> list[str]:
        """The names of all, each once."""
        return list(dict.fromkeys(name for source in self._sources for name in source.names()))

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Read it where it is."""
        for source in self._sources:
            if name in source.names():
                return source.read(name, config, files)
        if self._inline is not None and self._inline.takes(config):
            return self._inline.read(name, config, files)
        raise ModelNotFound(f"model {name!r}: there is none of this name to load; there are {', '.join(self.names())}")


LOAD_ALL, LOAD_NONE = "all", "none"


def all_sources(known: TargetRepository, folder: Repository | None, inline: InlineRepository) -> CombinedRepository:
    """Return the TARGETs, the models of the folder, and what load calls will describe, as one. Raises SettingsError for a
    name that both of the first have."""
    if folder is None:
        return CombinedRepository([known], inline)
    for name in known.names():
        if name in folder.names():
            raise SettingsError(
                f"name={name!r}: is both a TARGET and a model of the repository; give the TARGET another (--name)"
            )
    return CombinedRepository([known, folder], inline)


class ModelsToStart(NamedTuple):
    """What runs from the start on: services, not started, and what was read for them."""

    readings: list[ModelReading]
    services: "list[Service]"

    @property
    def defaults(self) -> dict[str, str]:
        """The version that is meant where none is named, by name, of those that say one."""
        return {each.versions[0].name: each.default for each in self.readings if each.default is not None}

    @property
    def routes(self) -> dict[str, list[str]]:
        """The paths of their own, by name."""
        return {model.name: model.routes for reading in self.readings for model in reading.versions}


def open_wanted(
    sources: CombinedRepository, load: Sequence[str], make: "Callable[[ModelToServe], Service]"
) -> ModelsToStart:
    """Read the models to load at the start, and make services of them. Raises SettingsError for a name that nothing is known
    of; and once for all models that cannot be, a line for each."""
    opened = ModelsToStart([], [])
    wrong: list[str] = []
    for name in _wanted(sources, load):
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


def _wanted(sources: CombinedRepository, load: Sequence[str]) -> list[str]:
    names = sources.names()
    if LOAD_NONE in load and len(load) > 1:
        raise SettingsError(f"load={list(load)!r}: none goes with no other name")
    for name in load:
        if name not in (LOAD_ALL, LOAD_NONE, *names):
            raise SettingsError(f"load={name!r}: there is no such model; there are {', '.join(names) or 'none'}")
    return names if not load or LOAD_ALL in load else [name for name in names if name in load]


@dataclass(frozen=True)
class RepositorySettings:
    """Which models there are beside the TARGETs, and which of all of them are loaded at the start."""

    model_repository: str | None = setting(
        None, "folder of models, MODEL/VERSION/FILE, that can be loaded while serving", metavar="DIR"
    )
    load: list[str] = setting(
        [], "model to load at the start, or all, or none; without it all are loaded", metavar="NAME"
    )
    watch: bool = setting(False, "load models of the repository when their files change, and unload those that go")

    def __post_init__(self) -> None:
        check(self)
