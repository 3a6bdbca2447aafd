"""What a server knows of models at its start, and which of them it loads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weir.errors import SettingsError
from weir.manager.service import Service
from weir.manager.spec import Known, Listening, ModelReading, ModelToServe, Repository, Sources

ALL, NONE = "all", "none"


def all_sources(known: Known, folder: Repository | None, spoken: Listening) -> Sources:
    """Return the TARGETs, the models of the folder, and what load calls will describe, as one. Raises SettingsError for a
    name that both of the first have."""
    if folder is None:
        return Sources([known], spoken)
    for name in known.names():
        if name in folder.names():
            raise SettingsError(
                f"name={name!r}: is both a TARGET and a model of the repository; give the TARGET another (--name)"
            )
    return Sources([known, folder], spoken)


class Opened(NamedTuple):
    """What is to run from the start on: services, not started, and what was read of them."""

    readings: list[ModelReading]
    services: list[Service]

    @property
    def defaults(self) -> dict[str, str]:
        """The version that is meant where none is named, by name, of those that say one."""
        return {each.versions[0].name: each.default for each in self.readings if each.default is not None}

    @property
    def routes(self) -> dict[str, list[str]]:
        """The paths of their own, by name."""
        return {model.name: model.routes for reading in self.readings for model in reading.versions}


def open_wanted(sources: Sources, load: Sequence[str], make: Callable[[ModelToServe], Service]) -> Opened:
    """Read what is to be loaded at the start, and make services of it. Raises SettingsError for a name that nothing is known
    of; and once for all models that cannot be, a line for each."""
    opened = Opened([], [])
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


def _wanted(sources: Sources, load: Sequence[str]) -> list[str]:
    names = sources.names()
    if NONE in load and len(load) > 1:
        raise SettingsError(f"load={list(load)!r}: none goes with no other name")
    for name in load:
        if name not in (ALL, NONE, *names):
            raise SettingsError(f"load={name!r}: there is no such model; there are {', '.join(names) or 'none'}")
    return names if not load or ALL in load else [name for name in names if name in load]
